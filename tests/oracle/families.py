"""Tiny random models, one for each family and each variant of a config field that changes the numbers.

Plain data and NumPy: the tests read it, and `make_golden.py` and `test_live.py` build the same models in Transformers.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden"
NUM_PROMPT_TOKENS = 300
NUM_NEW_TOKENS = 64
LOGIT_POSITIONS = (0, 1, 7, 63, 64, 127, 128, 255, 299)
GREEDY_LENGTHS = (5, 17, 34, 47, 64, 120)
VOCAB_SIZE = 256
# Two implementations agree to about 1e-5 in float32: where the best token leads by 1e-3, they choose the same.
MIN_MARGIN = 1e-3
# Fewer different tokens among the 64 would be a loop, which says little about the model.
MIN_DISTINCT = 16


@dataclass(frozen=True, eq=False)
class Variant:
    """One model.

    Attributes:
      model_type: Transformers' name of the family. options: fields of its config, beside `COMMON`.
      num_logit_tokens: tokens of the one forward pass whose logits are compared.
      greedy_lengths: lengths of the prompts that are continued. max_model_len: what an engine is given for them.
    """

    name: str
    model_type: str
    options: dict[str, Any]
    num_logit_tokens: int = NUM_PROMPT_TOKENS
    greedy_lengths: tuple[int, ...] = GREEDY_LENGTHS
    max_model_len: int = 256

    @property
    def folder(self) -> Path:
        return GOLDEN / self.name

    @property
    def logit_positions(self) -> tuple[int, ...]:
        return tuple(position for position in LOGIT_POSITIONS if position < self.num_logit_tokens)

    def config(self) -> dict[str, Any]:
        """The fields of the Transformers config."""
        return {"model_type": self.model_type, **COMMON, **self.options}


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
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0],
    "long_factor": [1.0, 1.4, 1.9, 2.6, 3.5, 4.7, 6.2, 8.0],
}


def _scaled(rope_type: str, theta: float = 10000.0, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **options}}


_llama = partial(Variant, model_type="llama")
_tied = {"tie_word_embeddings": True}

VARIANTS = {
    variant.name: variant
    for variant in (
        _llama("llama", options={}),
        _llama("llama_tied_head_dim", options={**_tied, "head_dim": 32}),
        _llama("llama_bias", options={**_tied, "attention_bias": True, "mlp_bias": True}),
        _llama("llama_linear", options={**_tied, **_scaled("linear", factor=4.0)}),
        # Transformers makes the base of a forward pass from its longest position; an engine fixes it once. They agree
        # where nothing is longer than the original 128 tokens, or where the engine is told the length of the pass.
        _llama(
            "llama_dynamic",
            options={**_tied, **_scaled("dynamic", factor=2.0), "max_position_embeddings": 128},
            greedy_lengths=(5, 17, 34, 40, 47, 60),
            max_model_len=128,
        ),
        # At theta 500,000 the wavelengths 6, 32, 167, ... lie on all three sides of the bounds 64/4 and 64/1.
        _llama(
            "llama_llama3",
            options={
                **_tied,
                **_scaled(
                    "llama3",
                    theta=500000.0,
                    factor=8.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=64,
                ),
            },
        ),
        _llama("llama_yarn", options={**_tied, **_scaled("yarn", factor=8.0, original_max_position_embeddings=64)}),
        # Transformers takes the short factors for a forward pass within 128 tokens and the long ones for any other.
        _llama(
            "llama_longrope_short",
            options={**_tied, "rope_parameters": LONGROPE},
            num_logit_tokens=128,
            greedy_lengths=(5, 17, 34, 40, 47, 60),
            max_model_len=128,
        ),
        _llama(
            "llama_longrope_long",
            options={**_tied, "rope_parameters": LONGROPE},
            greedy_lengths=(129, 134, 140, 151, 160, 170),
        ),
        Variant("mistral", "mistral", {"sliding_window": None, "head_dim": 32, "rms_norm_eps": 1e-6}),
        Variant("mistral_window", "mistral", {**_tied, "sliding_window": 24}),
        Variant("qwen2", "qwen2", {**_tied, "rms_norm_eps": 1e-6, **_scaled("default", theta=1e6)}),
        Variant(
            "qwen2_window",
            "qwen2",
            {
                **_tied,
                "num_hidden_layers": 3,
                "use_sliding_window": True,
                "sliding_window": 24,
                "max_window_layers": 1,
            },
        ),
        Variant("qwen3", "qwen3", {**_tied, "head_dim": 32, "rms_norm_eps": 1e-6}),
        Variant("qwen3_mqa", "qwen3", {"head_dim": 16, "num_key_value_heads": 1, "attention_bias": True}),
    )
}


def prompt_tokens(seed: int) -> np.ndarray:
    """int32 [300]; the greedy prompts are its slices, see `greedy_prompts`."""
    return np.random.default_rng([seed, 1]).integers(0, VOCAB_SIZE, NUM_PROMPT_TOKENS, dtype=np.int32)


def greedy_prompts(variant: Variant, prompt: np.ndarray) -> list[list[int]]:
    """Prompts of the variant's lengths, each from another place of the long prompt."""
    return [prompt[10 * i : 10 * i + length].tolist() for i, length in enumerate(variant.greedy_lengths)]


def weights(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """float32 values of a parameter, a function of its Transformers name.

    Nothing is left at 0 or 1, so that a bias or a norm that is dropped or misplaced shows in the logits. Queries and
    keys are smaller than the rest: softer attention magnifies rounding less, and larger MLPs keep answers from looping.
    """
    noise = np.random.default_rng([seed, 2, *name.encode()]).standard_normal(shape, np.float32)
    if name.endswith("norm.weight"):
        return np.float32(0.5 if name == "model.norm.weight" else 1.0) * (1 + np.float32(0.3) * noise)
    if name.endswith("bias"):
        return np.float32(0.3) * noise
    if "embed" in name or "lm_head" in name:
        return np.float32(0.4) * noise
    gain = 1.2 if "q_proj" in name or "k_proj" in name else 2.0
    return np.float32(gain / np.sqrt(shape[-1])) * noise
