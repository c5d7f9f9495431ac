"""Tiny Llama-like models as GGUF, made of a Hugging Face checkpoint as llama.cpp's converter makes them."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoints_convert.gguf.gguf_writer import FLOATS, Blocks, q8_0, random_blocks, write

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


def write_random_llama(
    path: Path, kind: str, *, num_layers: int = 4, width: int = 256, inner: int = 512, num_alike: int = 1
) -> Path:
    """A Llama of random weights, whose layers have matrices of one type of ggml. `num_alike`: layers that share theirs,
    so that a large file is written fast."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": width // 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    random, ones = np.random.default_rng(0), np.ones(width, np.float32)

    def matrix(*shape: int) -> np.ndarray | Blocks:
        if kind in FLOATS or kind == "Q8_0":
            numbers = random.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5 * 4
            return q8_0(numbers) if kind == "Q8_0" else numbers.astype(FLOATS[kind])
        return random_blocks(kind, shape, random)

    tensors: dict[str, np.ndarray | Blocks] = {
        "token_embd.weight": random.standard_normal((512, width)).astype(np.float32),
        "output_norm.weight": ones,
        "output.weight": q8_0(random.standard_normal((512, width)) * 0.1),
    }
    shapes = {
        "attn_q": (width, width),
        "attn_k": (width // 4, width),
        "attn_v": (width // 4, width),
        "attn_output": (width, width),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    for first in range(0, num_layers, num_alike):
        matrices = {name: matrix(*shape) for name, shape in shapes.items()}
        for layer in range(first, min(first + num_alike, num_layers)):
            own = {"attn_norm": ones, "ffn_norm": ones, **matrices}
            tensors |= {f"blk.{layer}.{name}.weight": array for name, array in own.items()}
    return write(path, metadata_of(config), tensors)
