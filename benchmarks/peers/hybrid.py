"""A random model of the kind of Qwen3.5: three gated delta nets before each layer with attention."""

from pathlib import Path
from typing import Any

# What must hold: jaxinfer over the best mode of Transformers.
GOALS = (("decode", "transformers", 2.0), ("prefill", "transformers", 1.0))
SIZES: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_layers": 16,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
}
KEY_HEADS, VALUE_HEADS, HEAD_SIZE = 4, 8, 64
ATTENTION_EVERY = 4


def make_hybrid(folder: Path, sizes: dict[str, Any] = SIZES) -> int:
    """A random float32 checkpoint as Hugging Face lays it out; returns the bytes of its weights."""
    import jax

    from checkpoints_convert.huggingface.save import save_huggingface
    from jaxinfer.models import DeltaConfig, ModelConfig, RopeConfig, init_params
    from jaxinfer.quantization.tree import num_bytes

    layers = range(1, sizes["num_layers"] + 1)
    config = ModelConfig(
        architecture="Qwen3_5ForCausalLM",
        rope=RopeConfig(theta=1e6, rotary_dim=sizes["head_dim"] // 4),
        max_position_embeddings=2048,
        dtype="float32",
        layer_kinds=tuple("gated_delta" if layer % ATTENTION_EVERY else "attention" for layer in layers),
        delta=DeltaConfig(KEY_HEADS, VALUE_HEADS, HEAD_SIZE, HEAD_SIZE),
        is_attention_gated=True,
        norm="rms_zero_centred",
        qk_norm=True,
        tie_word_embeddings=True,
        **sizes,
    )
    params = init_params(config, jax.random.key(0))
    save_huggingface(config, params, folder, "float32")
    return num_bytes(params)
