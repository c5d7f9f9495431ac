"""Random tiny Llamas and prompts whose caches kvpress cuts; the same numbers in NumPy for both sides."""

from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent / "golden" / "policies.safetensors"
SCORES = GOLDEN.with_name("policy_scores.safetensors")
HEAVY = GOLDEN.with_name("policy_heavy.safetensors")
PAGE_SIZE, NUM_TOKENS, SEEDS = 8, 120, (1, 2, 3)
BUDGETS = ((4, 16), (8, 8), (16, 40))  # sinks and window, in tokens
SCORED = (24, 48, 90)  # tokens that are kept of a prompt
COMPACTED = GOLDEN.with_name("prompt_policies.safetensors")
# Methods that compact prompts: tokens of a page, and budgets of a prompt of NUM_TOKENS tokens. With pages of one token
# every budget of PyramidKV's layers can be met; of these, the first is too small for a pyramid.
PROMPTS = {
    "snapkv": (8, (40, 56, 88)),
    "keydiff": (8, (40, 56, 88)),
    "pyramidkv": (1, (40, 60, 70)),
    "expected_attention": (8, (40, 56, 88)),
}
OBSERVED = 32  # queries that score
ANSWER, EVERY = 24, 4  # tokens, and of how many one's logits are kept
METHODS = ("snapkv", "pyramidkv", "keydiff", "expected_attention")
HEAVY_BUDGETS = (16, 40, 72)  # tokens of `h2o`
HEAVY_PROMPT, HEAVY_ANSWER = 97, 7  # tokens; the answer's last one fills a page
WINDOW = 16  # queries of SnapKV and PyramidKV
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "head_dim": 8,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
}


def tensors(seed: int) -> dict[str, np.ndarray]:
    """A checkpoint's tensors by name; attention is sharp enough that dropped keys matter."""
    numbers = np.random.default_rng(seed)
    width, inner, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    heads = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    kv_heads = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return (numbers.standard_normal((rows, columns)) * scale / columns**0.5).astype(np.float32)

    found = {"model.embed_tokens.weight": matrix(vocab, width, width**0.5), "lm_head.weight": matrix(vocab, width, 3)}
    found["model.norm.weight"] = np.ones(width, np.float32)
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        found |= {
            f"{name}.self_attn.q_proj.weight": matrix(heads, width, 1.5),
            f"{name}.self_attn.k_proj.weight": matrix(kv_heads, width, 1.5),
            f"{name}.self_attn.v_proj.weight": matrix(kv_heads, width),
            f"{name}.self_attn.o_proj.weight": matrix(width, heads),
            f"{name}.mlp.gate_proj.weight": matrix(inner, width),
            f"{name}.mlp.up_proj.weight": matrix(inner, width),
            f"{name}.mlp.down_proj.weight": matrix(width, inner),
            f"{name}.input_layernorm.weight": np.ones(width, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(width, np.float32),
        }
    return found


def tokens(seed: int) -> np.ndarray:
    """int64 [NUM_TOKENS]."""
    return np.random.default_rng(100 + seed).integers(3, CONFIG["vocab_size"], NUM_TOKENS)


def name_of(seed: int, budget: tuple[int, int], is_relative: bool) -> str:
    return f"{seed}.{budget[0]}+{budget[1]}.{'relative' if is_relative else 'own'}"
