"""The metadata of a GGUF file for a model: the keys of its architecture, as llama.cpp's converter writes them.

What is written is read again by `gguf.config` and compared with the model, so a setting that has no key is an error.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.gguf.config import LLAMA3, huggingface_config, llama3_divisors
from checkpoints_convert.gguf.index import GGUFIndex
from checkpoints_convert.huggingface.config import huggingface_config as config_json
from checkpoints_convert.huggingface.config import model_config
from jaxinfer.models import ModelConfig

# Architectures of config.json with their name in GGUF; tests compare the logits of each with llama.cpp's.
WRITTEN = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}


def architecture_name(config: ModelConfig, where: Path) -> str:
    """The name in GGUF. Raises CheckpointError for a family that is not written."""
    if config.architecture not in WRITTEN:
        raise CheckpointError(
            where, f"{config.architecture} is not written as GGUF; the architectures that are: {', '.join(WRITTEN)}"
        )
    return WRITTEN[config.architecture]


def metadata_of(config: ModelConfig, where: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Keys and values, and further tensors in float32. Raises CheckpointError for a family that is not written and for
    a window, which llama.cpp does not apply in these architectures."""
    name, values = architecture_name(config, where), config_json(config)
    if any(window is not None for window in config.sliding_windows):
        raise CheckpointError(where, f"has a sliding window, which llama.cpp's {name!r} does not have")
    head_dim = config.head_dim
    metadata: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(values["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "expert_count": values.get("num_experts") or values.get("num_local_experts"),
        "expert_used_count": values.get("num_experts_per_tok"),
        "expert_feed_forward_length": values.get("moe_intermediate_size"),
    }
    rope, tensors = _rope(values, head_dim, where)
    keyed = {f"{name}.{key}": value for key, value in (metadata | rope).items() if value is not None}
    return {"general.architecture": name, "general.quantization_version": 2, **keyed}, tensors


def _rope(values: Mapping[str, Any], head_dim: int, where: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    theta = float(values.get("rope_theta") or 10000.0)
    metadata: dict[str, Any] = {"rope.freq_base": theta}
    scaling = values.get("rope_scaling") or {}
    kind = scaling.get("rope_type", "default")
    if kind == "llama3" and all(scaling[name] == value for name, value in LLAMA3.items()):
        divisors = llama3_divisors(theta, head_dim, float(scaling["factor"]))
        return metadata, {"rope_freqs.weight": divisors.astype(np.float32)}
    if kind == "linear":
        return {**metadata, "rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}, {}
    if kind == "yarn":
        original = scaling.get("original_max_position_embeddings")
        keys = {"type": "yarn", "factor": float(scaling["factor"]), "original_context_length": original}
        return metadata | {f"rope.scaling.{name}": value for name, value in keys.items() if value is not None}, {}
    if kind != "default":
        raise CheckpointError(where, f"rope_scaling {scaling} is not written as GGUF")
    return metadata, {}


def check_reads_back(index: GGUFIndex, config: ModelConfig, where: Path) -> None:
    """Raises CheckpointError with the differing fields unless `index`, read as a file, gives back `config`. `index`
    needs the tensors' names and shapes only."""
    read_back = model_config(huggingface_config(index), index.path)
    if config.architecture in WRITTEN and WRITTEN.get(read_back.architecture) == WRITTEN[config.architecture]:
        read_back = replace(read_back, architecture=config.architecture)
    read_back = replace(read_back, dtype=config.dtype)
    differing = [
        f"{field.name} {getattr(config, field.name)!r} would be read as {getattr(read_back, field.name)!r}"
        for field in fields(ModelConfig)
        if getattr(read_back, field.name) != getattr(config, field.name)
    ]
    if differing:
        raise CheckpointError(where, *(f"GGUF cannot say it: {difference}" for difference in differing))
