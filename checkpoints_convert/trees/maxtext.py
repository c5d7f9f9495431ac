"""MaxText's parameters of Llama, Qwen3 (dense and of experts) and Gemma 3, scanned (layers on axis 1) or not.

The form is that of `checkpoint_conversion/utils/param_mapping.py`: Llama's and Gemma's numbers are not Hugging Face's.
"""

import math
import re
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints_convert.trees.rules import LayerSpan, TreeForm, TreeRule
from jaxinfer.models import ModelConfig

_LLAMA, _GEMMA3 = "LlamaForCausalLM", "Gemma3ForCausalLM"
ARCHITECTURES = (_LLAMA, "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", _GEMMA3)
# Gemma 3 scans over its pattern of five layers with a window and one without; what is left stands beside.
_PATTERN = 6
_LAYER = re.compile(r"decoder\.(layers_(\d+)|layers_remainder\.layers_(\d+)|layers\.layers_(\d+)|layers)\.(.+)")


def _place(name: str, num_layers: int) -> tuple[str, LayerSpan | None]:
    match = _LAYER.fullmatch(name)
    if match is None:
        return name, None
    single, after, of_pattern, below = match[2], match[3], match[4], match[5]
    num_scanned = num_layers - num_layers % _PATTERN
    if single is not None:
        return below, LayerSpan((int(single),))
    if after is not None:
        return below, LayerSpan((num_scanned + int(after),))
    if of_pattern is not None:
        return below, LayerSpan(tuple(range(int(of_pattern), num_scanned, _PATTERN)), True)
    return below, LayerSpan(tuple(range(num_layers)), True)


def _check(config: ModelConfig) -> None:
    if config.architecture not in ARCHITECTURES:
        raise ValueError(
            f"MaxText's form of {config.architecture} is not known, only that of {', '.join(ARCHITECTURES)}"
        )


def _norm(scale: Any, config: ModelConfig) -> Any:
    """MaxText multiplies by Gemma's scale, and has 1 + that of the files."""
    return scale - 1 if config.norm == "rms_zero_centred" else scale


def _embedding(table: Any, config: ModelConfig) -> Any:
    """Gemma's is stored multiplied by sqrt(D), rounded to bfloat16."""
    if config.architecture != _GEMMA3:
        return table
    return (table / np.float32(ml_dtypes.bfloat16(math.sqrt(config.hidden_size)))).astype(table.dtype)


def _rotated(weight: Any, config: ModelConfig) -> Any:
    """Llama 3.1's rotation takes dimensions 2i and 2i + 1 together, ours i and i + K / 2."""
    if config.architecture != _LLAMA or config.rope.kind != "llama3":
        return weight
    heads = weight.reshape(config.hidden_size, -1, config.head_dim // 2, 2)
    return heads.transpose(0, 1, 3, 2).reshape(weight.shape)


def _query(weight: Any, config: ModelConfig) -> Any:
    """Llama's is stored divided by sqrt(K)."""
    if config.architecture != _LLAMA:
        return weight
    scaled = weight.astype(np.float32) * np.float32(math.sqrt(config.head_dim))
    return _rotated(scaled.astype(weight.dtype), config)


MAXTEXT = TreeForm(
    "MaxText",
    outside=(
        TreeRule("token_embedder.embedding", "embed", "V D", change=_embedding),
        TreeRule("decoder.decoder_norm.scale", "final_norm.weight", "D", change=_norm),
        TreeRule("decoder.logits_dense.kernel", "lm_head", "D V"),
    ),
    inside=(
        TreeRule("pre_self_attention_layer_norm.scale", "attention_norm.weight", "D"),
        TreeRule("post_self_attention_layer_norm.scale", "mlp_norm.weight", "D"),
        TreeRule("pre_self_attention_norm.scale", "attention_norm.weight", "D", change=_norm),
        TreeRule("post_self_attention_norm.scale", "attention_post_norm.weight", "D", change=_norm),
        TreeRule("pre_ffw_norm.scale", "mlp_norm.weight", "D", change=_norm),
        TreeRule("post_ffw_norm.scale", "mlp_post_norm.weight", "D", change=_norm),
        TreeRule("self_attention.query.kernel", "attention.q_proj.weight", "D Hq K", "D Hq*K", change=_query),
        TreeRule("self_attention.key.kernel", "attention.k_proj.weight", "D Hkv K", "D Hkv*K", change=_rotated),
        TreeRule("self_attention.value.kernel", "attention.v_proj.weight", "D Hkv K", "D Hkv*K"),
        TreeRule("self_attention.out.kernel", "attention.o_proj.weight", "Hq K D", "Hq*K D"),
        TreeRule("self_attention.query_norm.scale", "attention.q_norm.weight", "K", change=_norm),
        TreeRule("self_attention.key_norm.scale", "attention.k_norm.weight", "K", change=_norm),
        TreeRule("mlp.wi_0.kernel", "mlp.gate_proj.weight", "D F"),
        TreeRule("mlp.wi_1.kernel", "mlp.up_proj.weight", "D F"),
        TreeRule("mlp.wo.kernel", "mlp.down_proj.weight", "F D"),
        TreeRule("moe_block.gate.kernel", "mlp.router.weight", "D E"),
        TreeRule("moe_block.wi_0", "mlp.experts.gate_proj.weight", "E D G"),
        TreeRule("moe_block.wi_1", "mlp.experts.up_proj.weight", "E D G"),
        TreeRule("moe_block.wo", "mlp.experts.down_proj.weight", "E G D"),
    ),
    place=_place,
    check=_check,
)
