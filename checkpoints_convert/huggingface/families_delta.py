"""Qwen3-Next and Qwen3.5: gated delta nets between layers of gated attention."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from checkpoints_convert.huggingface.families_llama import (
    ATTENTION,
    ATTENTION_BIAS,
    EMBEDDING,
    GATED_MLP,
    HEAD,
    LAYER,
    NORMS,
    QK_NORMS,
    TARGET,
)
from checkpoints_convert.huggingface.families_mixtures import QWEN_EXPERTS, express_qwen, qwen_mixture, without_experts
from checkpoints_convert.huggingface.family import ROTARY_BUFFERS, Family, Fields, RopeForm
from checkpoints_convert.huggingface.rules import TensorRule
from jaxinfer.models import DeltaConfig, ModelConfig
from jaxinfer.models.recurrent_config import LayerKind

Build = Callable[[Fields, Mapping[str, Any]], dict[str, Any]]
# `layer_types` of config.json goes by this name to `build`: the common code knows kinds of attention only.
KINDS = "layer_kinds"
_KINDS: dict[str, LayerKind] = {"full_attention": "attention", "linear_attention": "gated_delta"}
_SOURCE, _TARGET = f"{LAYER}.linear_attn", f"{TARGET}.recurrent"
_PROJECTIONS = {
    "in_proj_qkvz": ("q_proj", "k_proj", "v_proj", "gate_proj"),
    "in_proj_ba": ("beta_proj", "decay_proj"),
    "in_proj_qkv": ("q_proj", "k_proj", "v_proj"),
    "in_proj_z": ("gate_proj",),
    "in_proj_b": ("beta_proj",),
    "in_proj_a": ("decay_proj",),
    "out_proj": ("out_proj",),
}


def _projections(*names: str, groups: str | None = None) -> tuple[TensorRule, ...]:
    return tuple(
        TensorRule(
            f"{_SOURCE}.{name}.weight",
            tuple(f"{_TARGET}.{part}.weight" for part in _PROJECTIONS[name]),
            transpose=True,
            groups=groups if len(_PROJECTIONS[name]) > 1 else None,
        )
        for name in names
    )


_COMMON = (
    *EMBEDDING,
    *NORMS,
    *ATTENTION,
    *QK_NORMS,
    TensorRule(f"{_SOURCE}.conv1d.weight", (f"{_TARGET}.conv_weight",)),
    TensorRule(f"{_SOURCE}.A_log", (f"{_TARGET}.decay_log",)),
    TensorRule(f"{_SOURCE}.dt_bias", (f"{_TARGET}.decay_bias",)),
    TensorRule(f"{_SOURCE}.norm.weight", (f"{_TARGET}.out_norm",)),
    *GATED_MLP,
    *QWEN_EXPERTS,
    *HEAD,
)
# Qwen3-Next stores the projections of a key head and its value heads together.
_NEXT_TENSORS = (*_COMMON, *_projections("in_proj_qkvz", "in_proj_ba", "out_proj", groups="delta.num_key_heads"))
_TENSORS = (
    *_COMMON,
    *_projections("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
)


def take_kinds(data: Mapping[str, Any], default: Callable[[int], list[str]]) -> dict[str, Any]:
    """The fields with `layer_types`, or their default for the number of layers, under the name `KINDS`."""
    data = dict(data)
    types, count = data.pop("layer_types", None), data.get("num_hidden_layers")
    if types is None and isinstance(count, int) and 0 < count <= 1000:
        types = default(count)
    return {**data, KINDS: types}


def read_kinds(fields: Fields, num_layers: int, known: Mapping[str, LayerKind]) -> tuple[LayerKind, ...]:
    """A kind for every layer; an unknown name is a problem, by `layer_types`."""
    given = fields.data.get(KINDS)
    if not isinstance(given, list) or len(given) != num_layers:
        found = f"{len(given)} entries" if isinstance(given, list) else repr(given)
        fields.problem("layer_types", f"must list {num_layers} layers, got {found}")
    elif unknown := [kind for kind in given if not isinstance(kind, str) or kind not in known]:
        fields.problem("layer_types", f"names {unknown[0]!r}, known are {' and '.join(known)}")
    else:
        return tuple(known[kind] for kind in given)
    return ("attention",) * num_layers


def _intervals(data: Mapping[str, Any]) -> dict[str, Any]:
    """Every fourth layer, or as `full_attention_interval` says, has attention."""
    every = data.get("full_attention_interval") or 4
    if not isinstance(every, int) or every < 1:
        every = 4
    kinds = ("linear_attention", "full_attention")
    return take_kinds(data, lambda count: [kinds[(i + 1) % every == 0] for i in range(count)])


def _delta(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    delta = DeltaConfig(
        fields.integer("linear_num_key_heads", 16),
        fields.integer("linear_num_value_heads", 32),
        fields.integer("linear_key_head_dim", 128),
        fields.integer("linear_value_head_dim", 128),
        fields.integer("linear_conv_kernel_dim", 4),
    )
    kinds = read_kinds(fields, values["num_layers"], _KINDS)
    return {"delta": delta, "layer_kinds": kinds}


def _mixture(mixture: Build) -> Build:
    def build(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        return {**_delta(fields, values), **mixture(fields, values)}

    return build


def _express(config: ModelConfig) -> dict[str, Any]:
    delta = config.delta
    if delta is None:
        raise ValueError(f"{config.architecture} needs a gated delta net, and the configuration has none")
    names = {kind: name for name, kind in _KINDS.items()}
    return {
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_size,
        "linear_value_head_dim": delta.value_size,
        "linear_conv_kernel_dim": delta.conv_width,
        "layer_types": [names[config.layer_kind(i)] for i in range(config.num_layers)],
    }


def _express_mixture(config: ModelConfig) -> dict[str, Any]:
    return {**_express(config), **express_qwen(config)}


_NEXT = Family(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    title="Qwen3-Next",
    examples="Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
    max_position_embeddings=32768,
    num_kv_heads=2,
    head_dim=256,
    **ATTENTION_BIAS,
    qk_norm=True,
    activations={"silu": "silu"},  # the convolution has it too
    rope=RopeForm(partial=0.25, has_partial=True),
    defaults={"norm_topk_prob": True},
    fixed={"norm": "rms_zero_centred", "is_attention_gated": True},
    tensors=_NEXT_TENSORS,
    skipped=(ROTARY_BUFFERS, r"mtp\..*"),
    normalize=_intervals,
    build=_mixture(qwen_mixture(512, 10, 512, 512)),
    express=_express_mixture,
)
_DENSE = replace(
    _NEXT,
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    title="Qwen3.5",
    examples="Qwen3.5-4B, Qwen3.5-27B, Qwen3.6-27B (text)",
    num_kv_heads=4,
    defaults={},
    tensors=without_experts(_TENSORS),
    skipped=(ROTARY_BUFFERS, r"mtp\..*", r"model\.visual\..*"),
    build=_delta,
    express=_express,
)

DELTA: tuple[Family, ...] = (
    _NEXT,
    _DENSE,
    replace(
        _DENSE,
        architecture="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        title="Qwen3.5-MoE",
        examples="Qwen3.5-35B-A3B, Qwen3.6-35B-A3B (text)",
        num_kv_heads=2,
        # Without an MLP: every layer has experts.
        defaults={"norm_topk_prob": True, "intermediate_size": 512},
        tensors=_TENSORS,
        build=_mixture(qwen_mixture(256, 8, 512, 512)),
        express=_express_mixture,
    ),
)
