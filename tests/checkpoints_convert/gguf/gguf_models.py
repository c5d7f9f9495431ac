"""Tiny Llama-like models as GGUF, made of a Hugging Face checkpoint as llama.cpp's converter makes them."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoints_convert.gguf.gguf_writer import Blocks, write

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def gguf_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    layer = ""
    if module.startswith("model.layers."):
        _, _, number, module = module.split(".", 3)
        layer = f"blk.{number}."
    return f"{layer}{_NAMES[module]}.{kind}"


def side_by_side(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of queries or keys with those that rotate together as neighbours, as the converter writes Llama's."""
    halves = array.reshape(num_heads, 2, array.shape[0] // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    name = ARCHITECTURES[config["architectures"][0]]
    values: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config.get("rope_theta", 10000.0),
        "rope.dimension_count": config["head_dim"],
    }
    if config["architectures"][0] == "MistralForCausalLM" and config.get("sliding_window"):
        values["attention.sliding_window"] = config["sliding_window"]
    ids = {
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in values.items()}, **ids}


def tensors_of(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray | Blocks]:
    """Norms and biases in float32, as the converter writes them; the rest in its dtype."""
    is_llama = ARCHITECTURES[config["architectures"][0]] == "llama"
    found: dict[str, np.ndarray | Blocks] = {}
    for name, array in tensors.items():
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if is_llama and f".{part}." in name:
                array = side_by_side(array, config[heads])
        found[gguf_name(name)] = array.astype(np.float32) if array.ndim == 1 else array
    return found


def write_model(path: Path, checkpoint: Any, **metadata: Any) -> Path:
    """A checkpoint of tests/checkpoints_convert/conftest.py as one GGUF file."""
    config = checkpoint.config
    return write(path, {**metadata_of(config), **metadata}, tensors_of(config, checkpoint.tensors))
