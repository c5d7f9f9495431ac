"""Qwen3-Next and Qwen3.5, with gated delta nets between layers of gated attention; LFM2 and its mixture, with short
convolutions between layers of attention."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from checkpoints_convert.huggingface.families_mixtures import (
    QWEN_EXPERTS,
    expert_size,
    express_qwen,
    mixture,
    normalizes,
    num_experts,
    per_token,
    qwen_mixture,
    without_experts,
)
from checkpoints_convert.huggingface.family import (
    ATTENTION_BIAS,
    ROTARY_BUFFERS,
    Family,
    Fields,
    RopeForm,
    Setting,
    read_settings,
    write_settings,
)
from checkpoints_convert.huggingface.llama_tensors import (
    EMBEDDING,
    HEAD,
    LAYER,
    LLAMA_TENSORS,
    MLP,
    QKV,
    TARGET,
    all_experts,
    each_expert,
    linears,
    router,
)
from checkpoints_convert.huggingface.rules import TensorRule, linear, norm
from jaxinfer.models import ConvConfig, DeltaConfig, ModelConfig, MoEConfig
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
    *LLAMA_TENSORS,
    TensorRule(f"{_SOURCE}.conv1d.weight", (f"{_TARGET}.conv_weight",)),
    TensorRule(f"{_SOURCE}.A_log", (f"{_TARGET}.decay_log",)),
    TensorRule(f"{_SOURCE}.dt_bias", (f"{_TARGET}.decay_bias",)),
    TensorRule(f"{_SOURCE}.norm.weight", (f"{_TARGET}.out_norm",)),
    *QWEN_EXPERTS,
)
# Qwen3-Next stores the projections of a key head and its value heads together.
_NEXT_TENSORS = (*_COMMON, *_projections("in_proj_qkvz", "in_proj_ba", "out_proj", groups="delta.num_key_heads"))
_TENSORS = (*_COMMON, *_projections("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"))
_DELTA = (
    Setting("num_key_heads", "linear_num_key_heads", "integer", 16),
    Setting("num_value_heads", "linear_num_value_heads", "integer", 32),
    Setting("key_size", "linear_key_head_dim", "integer", 128),
    Setting("value_size", "linear_value_head_dim", "integer", 128),
    Setting("conv_width", "linear_conv_kernel_dim", "integer", 4),
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


def write_kinds(config: ModelConfig, known: Mapping[str, LayerKind]) -> dict[str, Any]:
    """`layer_types` of config.json, each by the first name of its kind."""
    names = {kind: name for name, kind in reversed(list(known.items()))}
    return {"layer_types": [names[config.layer_kind(i)] for i in range(config.num_layers)]}


def _delta(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = read_kinds(fields, values["num_layers"], _KINDS)
    return {"delta": DeltaConfig(**read_settings(fields, _DELTA)), "layer_kinds": kinds}


def _mixture(mixture: Build) -> Build:
    def build(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        return {**_delta(fields, values), **mixture(fields, values)}

    return build


def _express(config: ModelConfig) -> dict[str, Any]:
    delta = config.delta
    if delta is None:
        raise ValueError(f"{config.architecture} needs a gated delta net, and the configuration has none")
    return {**write_settings(delta, _DELTA), **write_kinds(config, _KINDS)}


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

_LFM2_KINDS: dict[str, LayerKind] = {"full_attention": "attention", "conv": "short_conv"}
_ATTENTION, _FEED_FORWARD, _W = f"{TARGET}.attention", f"{LAYER}.feed_forward", ("w1", "w3", "w2")
_LFM2_TENSORS = (
    *EMBEDDING,
    *norm(f"{LAYER}.operator_norm", f"{TARGET}.attention_norm"),
    *norm(f"{LAYER}.ffn_norm", f"{TARGET}.mlp_norm"),
    *norm("model.embedding_norm", "final_norm"),
    *linears(f"{LAYER}.self_attn", _ATTENTION, QKV),
    *linear(f"{LAYER}.self_attn.out_proj", f"{_ATTENTION}.o_proj"),
    *norm(f"{LAYER}.self_attn.q_layernorm", f"{_ATTENTION}.q_norm"),
    *norm(f"{LAYER}.self_attn.k_layernorm", f"{_ATTENTION}.k_norm"),
    *linears(f"{LAYER}.conv", _TARGET, ("in_proj", "out_proj")),
    TensorRule(f"{LAYER}.conv.conv.weight", (f"{_TARGET}.conv_weight",)),
    TensorRule(f"{LAYER}.conv.conv.bias", (f"{_TARGET}.conv_bias",)),
    *linears(_FEED_FORWARD, f"{TARGET}.mlp", MLP, _W),
    *router(f"{_FEED_FORWARD}.gate"),
    TensorRule(f"{_FEED_FORWARD}.expert_bias", (f"{TARGET}.mlp.router.correction",)),
    *each_expert(f"{_FEED_FORWARD}.experts", _W),
    *all_experts(f"{_FEED_FORWARD}.experts"),
    *HEAD,
)
_CONV = (Setting("width", "conv_L_cache", "integer", 3), Setting("has_bias", "conv_bias", "boolean", False))
_LFM2_EXPERTS = (
    *(num_experts(32, "num_experts"), per_token(4), expert_size(1792), normalizes(True)),
    Setting("scale", "routed_scaling_factor", "number", 1.0),
    Setting("has_correction_bias", "use_expert_bias", "boolean", True),
)


def _lfm2_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Older names of fields, the kinds of layers, and the inner width after its adjustment."""
    data = dict(data)
    if data.get("tie_embedding") is not None:
        data["tie_word_embeddings"] = data["tie_embedding"]
    if data.get("block_ff_dim") is not None:
        data["intermediate_size"] = data["block_ff_dim"]
    full = data.get("full_attn_idxs")
    kinds = ("conv", "full_attention")
    data = take_kinds(data, lambda count: [kinds[full is None or i in full] for i in range(count)])
    inner, multiple = data.get("intermediate_size"), data.get("block_multiple_of") or 256
    if data.get("block_auto_adjust_ff_dim") and isinstance(inner, int):
        inner, factor = int(2 * inner / 3), data.get("block_ffn_dim_multiplier", 1.0)
        if factor is not None:
            inner = multiple * -(-int(factor * inner) // multiple)
        data["intermediate_size"] = inner
    return data


def _lfm2(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    conv = ConvConfig(num_channels=values["hidden_size"], **read_settings(fields, _CONV))
    return {"conv": conv, "layer_kinds": read_kinds(fields, values["num_layers"], _LFM2_KINDS)}


def _express_lfm2(config: ModelConfig) -> dict[str, Any]:
    if config.conv is None:
        raise ValueError(f"{config.architecture} needs short convolutions, and the configuration has none")
    is_adjusted = {} if config.moe else {"block_auto_adjust_ff_dim": False}
    return {**write_settings(config.conv, _CONV), **write_kinds(config, _LFM2_KINDS), **is_adjusted}


def _lfm2_mixture(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    first, count = fields.integer("num_dense_layers", 2, least=0), values["num_layers"]
    layers = tuple(range(min(first, count), count))
    moe = MoEConfig(layers=layers, scoring="sigmoid", **read_settings(fields, _LFM2_EXPERTS))
    return {**_lfm2(fields, values), "moe": moe}


def _express_lfm2_mixture(config: ModelConfig) -> dict[str, Any]:
    moe = mixture(config)
    dense = {"num_dense_layers": config.num_layers - len(moe.layers)}
    return {**_express_lfm2(config), **write_settings(moe, _LFM2_EXPERTS), **dense}


_LFM2 = Family(
    "Lfm2ForCausalLM",
    "lfm2",
    title="LFM2",
    examples="LFM2 350M, 700M, 1.2B, 2.6B",
    max_position_embeddings=128000,
    num_kv_heads=8,
    norm_eps=1e-5,
    qk_norm=True,
    is_tied=True,
    names={"rms_norm_eps": "norm_eps", "hidden_act": None, "head_dim": None},
    defaults={"block_auto_adjust_ff_dim": True},
    rope=RopeForm(theta=1e6),
    tensors=without_experts(_LFM2_TENSORS),
    normalize=_lfm2_fields,
    build=_lfm2,
    express=_express_lfm2,
)

SHORT_CONV: tuple[Family, ...] = (
    _LFM2,
    replace(
        _LFM2,
        architecture="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        title="LFM2-MoE",
        examples="LFM2-8B-A1B",
        defaults={},
        tensors=_LFM2_TENSORS,
        build=_lfm2_mixture,
        express=_express_lfm2_mixture,
    ),
)
