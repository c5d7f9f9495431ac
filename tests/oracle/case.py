"""A tiny model of cases.py, and the parts that several of them share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
FOLDER = GOLDEN / "families"
VOCAB_SIZE = 256
SEEDS = (0, 1, 2)
NUM_TOKENS = 300
POSITIONS = (0, 1, 23, 24, 25, 127, 255, 299)  # windows are of 24 tokens
NUM_GREEDY = 64
GREEDY_LENGTHS = (40, 53)
WINDOW = 24
# Two implementations agree to about 1e-5 in float32: where the best token leads by 1e-3, they choose the same.
MIN_MARGIN = 1e-3
# Fewer different tokens among the 64 would be a loop, which says little about the model.
MIN_DISTINCT = 16
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@dataclass(frozen=True, eq=False)
class Case:
    """One model.

    Attributes:
      model_type: Transformers' name. options: fields of its config, beside those all have.
      architecture: in config.json. ties: the values of tie_word_embeddings that are compared, the first in full.
      without: fields of `COMMON` that the family does not have.
      first_seed, live_seed: from which on greedy answers are tried, for those of which few are clear.
      seeds: of the weights and tokens whose hidden states are compared. num_tokens: of their forward pass.
      greedy_lengths: lengths of the prompts that are continued. max_model_len: what an engine is given for them.
      gain: factor on matrices: smaller where norms within layers magnify rounding.
    """

    name: str
    model_type: str
    architecture: str
    options: dict[str, Any] = field(default_factory=dict)
    ties: tuple[bool, ...] = (False, True)
    without: tuple[str, ...] = ()
    first_seed: int = 0
    live_seed: int = 0
    seeds: tuple[int, ...] = SEEDS
    num_tokens: int = NUM_TOKENS
    greedy_lengths: tuple[int, ...] = GREEDY_LENGTHS
    max_model_len: int = 128
    gain: float = 1.0

    @property
    def positions(self) -> tuple[int, ...]:
        """Path of the file in which hidden states and logits are stored."""
        return tuple(position for position in POSITIONS if position < self.num_tokens)

    def config(self, tied: bool) -> dict[str, Any]:
        common = {name: value for name, value in COMMON.items() if name not in self.without}
        return {"model_type": self.model_type, **common, **self.options, "tie_word_embeddings": tied}


GROUPS = {"n_group": 4, "topk_group": 2}
LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}


def layer_types(*kinds: str) -> list[str]:
    return [{"f": "full_attention", "s": "sliding_attention"}[kind] for kind in kinds]
