"""Families with recurrent layers: Qwen3-Next and Qwen3.5, with gated delta nets between layers of gated attention; LFM2
and its mixture, with short convolutions; Granite 4, Falcon-H1 and Nemotron-H, with Mamba 2 beside attention or between
layers of it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from checkpoints_convert.huggingface.families_deepseek import v3_sizes
from checkpoints_convert.huggingface.families_llama import GRANITE_SCALES
from checkpoints_convert.huggingface.families_mixtures import (
    QWEN_EXPERTS,
    expert_size,
    normalizes,
    num_experts,
    per_token,
    qwen_mixture,
    without_experts,
)
from checkpoints_convert.huggingface.family import (
    ATTENTION_BIAS,
    LINEAR_BIAS,
    MAX_NUMBER,
    ROTARY_BUFFERS,
    ConfigPart,
    Family,
    Fields,
    RopeForm,
    Setting,
    is_positive,
    part_of,
    read_settings,
    settings_part,
    write_settings,
)
from checkpoints_convert.huggingface.llama_tensors import (
    ATTENTION,
    EMBEDDING,
    EXPERTS,
    HEAD,
    LAYER,
    LLAMA_TENSORS,
    MLP,
    NORMS,
    QKV,
    TARGET,
    all_experts,
    each_expert,
    linears,
    router,
)
from checkpoints_convert.huggingface.rules import TensorRule, linear, norm
from jaxinfer.models import ConvConfig, DeltaConfig, MambaConfig, ModelConfig, MoEConfig
from jaxinfer.models.recurrent_config import LayerKind

# `layer_types` of config.json goes by this name to the parts: the common code knows kinds of attention only.
_KINDS = "layer_kinds"
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


def _take_kinds(data: Mapping[str, Any], default: Callable[[int], list[str]]) -> dict[str, Any]:
    """The fields with `layer_types`, or their default for the number of layers, under the name `KINDS`."""
    data = dict(data)
    types, count = data.pop("layer_types", None), data.get("num_hidden_layers")
    if types is None and isinstance(count, int) and 0 < count <= 1000:
        types = default(count)
    return {**data, _KINDS: types}


def _read_kinds(fields: Fields, num_layers: int, known: Mapping[str, LayerKind]) -> tuple[LayerKind, ...]:
    """A kind for every layer; an unknown name is a problem, by `layer_types`."""
    given = fields.data.get(_KINDS)
    if not isinstance(given, list) or len(given) != num_layers:
        got = f"{len(given)} entries" if isinstance(given, list) else repr(given)
        fields.problem("layer_types", f"must list {num_layers} layers, got {got}")
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
    return _take_kinds(data, lambda count: [kinds[(i + 1) % every == 0] for i in range(count)])


def _layer_kinds(known: Mapping[str, LayerKind]) -> ConfigPart:
    """`layer_types` of config.json; the first name of each kind is written."""
    names = {kind: name for name, kind in reversed(list(known.items()))}
    return ConfigPart(
        lambda fields, values: {"layer_kinds": _read_kinds(fields, values["num_layers"], known)},
        lambda config: {"layer_types": [names[config.layer_kind(i)] for i in range(config.num_layers)]},
    )


_DELTA = (
    settings_part(
        "delta",
        DeltaConfig,
        Setting("num_key_heads", "linear_num_key_heads", "integer", 16),
        Setting("num_value_heads", "linear_num_value_heads", "integer", 32),
        Setting("key_size", "linear_key_head_dim", "integer", 128),
        Setting("value_size", "linear_value_head_dim", "integer", 128),
        Setting("conv_width", "linear_conv_kernel_dim", "integer", 4),
    ),
    _layer_kinds({"full_attention": "attention", "linear_attention": "gated_delta"}),
)


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
    parts=(*_DELTA, qwen_mixture(512, 10, 512, 512)),
)
_QWEN35 = replace(
    _NEXT,
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    title="Qwen3.5",
    examples="Qwen3.5-4B, Qwen3.5-27B, Qwen3.6-27B (text)",
    num_kv_heads=4,
    defaults={},
    tensors=without_experts(_TENSORS),
    skipped=(ROTARY_BUFFERS, r"mtp\..*", r"model\.visual\..*"),
    parts=_DELTA,
)

DELTA: tuple[Family, ...] = (
    _NEXT,
    _QWEN35,
    replace(
        _QWEN35,
        architecture="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        title="Qwen3.5-MoE",
        examples="Qwen3.5-35B-A3B, Qwen3.6-35B-A3B (text)",
        num_kv_heads=2,
        # Without an MLP: every layer has experts.
        defaults={"norm_topk_prob": True, "intermediate_size": 512},
        tensors=_TENSORS,
        parts=(*_DELTA, qwen_mixture(256, 8, 512, 512)),
    ),
)

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
    data = _take_kinds(data, lambda count: [kinds[full is None or i in full] for i in range(count)])
    inner, multiple = data.get("intermediate_size"), data.get("block_multiple_of") or 256
    if data.get("block_auto_adjust_ff_dim") and isinstance(inner, int):
        inner, factor = int(2 * inner / 3), data.get("block_ffn_dim_multiplier", 1.0)
        if factor is not None:
            inner = multiple * -(-int(factor * inner) // multiple)
        data["intermediate_size"] = inner
    return data


def _lfm2_conv(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"conv": ConvConfig(num_channels=values["hidden_size"], **read_settings(fields, _CONV))}


def _lfm2_mixture(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    first, count = fields.integer("num_dense_layers", 2, least=0), values["num_layers"]
    layers = tuple(range(min(first, count), count))
    return {"moe": MoEConfig(layers=layers, scoring="sigmoid", **read_settings(fields, _LFM2_EXPERTS))}


def _express_lfm2_mixture(config: ModelConfig) -> dict[str, Any]:
    moe = part_of(config, "moe")
    return {**write_settings(moe, _LFM2_EXPERTS), "num_dense_layers": config.num_layers - len(moe.layers)}


_LFM2_PARTS = (
    ConfigPart(_lfm2_conv, lambda config: write_settings(part_of(config, "conv"), _CONV)),
    _layer_kinds({"full_attention": "attention", "conv": "short_conv"}),
)


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
    parts=_LFM2_PARTS,
    written={"block_auto_adjust_ff_dim": False},
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
        parts=(*_LFM2_PARTS, ConfigPart(_lfm2_mixture, _express_lfm2_mixture)),
        written={},
    ),
)


def _mamba_tensors(source: str) -> tuple[TensorRule, ...]:
    return (
        *linears(source, _TARGET, ("in_proj", "out_proj")),
        TensorRule(f"{source}.conv1d.weight", (f"{_TARGET}.conv_weight",)),
        TensorRule(f"{source}.conv1d.bias", (f"{_TARGET}.conv_bias",)),
        TensorRule(f"{source}.A_log", (f"{_TARGET}.decay_log",)),
        TensorRule(f"{source}.dt_bias", (f"{_TARGET}.step_bias",)),
        TensorRule(f"{source}.D", (f"{_TARGET}.skip",)),
        TensorRule(f"{source}.norm.weight", (f"{_TARGET}.out_norm",)),
    )


_MAMBA = (
    Setting("num_groups", "mamba_n_groups", "integer", 1),
    Setting("state_size", "mamba_d_state", "integer", 256),
    Setting("conv_width", "mamba_d_conv", "integer", 4),
    Setting("has_conv_bias", "mamba_conv_bias", "boolean", True),
    Setting("has_bias", "mamba_proj_bias", "boolean", False),
)


def _mamba(fields: Fields, values: Mapping[str, Any], inner: int | None = None, **options: Any) -> MambaConfig:
    """The layer of config.json with fields `mamba_*`; `inner` is the width of the state space."""
    inner = inner or fields.integer("mamba_expand", 2) * values["hidden_size"]
    num_heads = fields.integer("mamba_n_heads", 128)
    head_size = fields.data.get("mamba_d_head", "auto")
    head_size = inner // num_heads if head_size in ("auto", None) else fields.integer("mamba_d_head")
    if head_size * num_heads != inner:
        fields.problem("mamba_d_head", f"{head_size} of {num_heads} heads make {head_size * num_heads}, not {inner}")
    return MambaConfig(
        num_heads, max(head_size, 1), **read_settings(fields, _MAMBA), **{**_time_steps(fields), **options}
    )


def _time_steps(fields: Fields) -> dict[str, Any]:
    """The range of dt; Transformers writes an infinite end as an object."""
    limit = fields.data.get("time_step_limit")
    if limit is None:
        return {}
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        fields.problem("time_step_limit", f"must be a list of 2 numbers, got {limit!r}")
        return {}
    least, most = (float("inf") if end in ({"__float__": "Infinity"}, "Infinity") else end for end in limit)
    if least and not is_positive(least, MAX_NUMBER):
        fields.problem("time_step_limit", f"must begin with a number of at least 0, got {least!r}")
        return {}
    if most != float("inf") and not is_positive(most, MAX_NUMBER):
        fields.problem("time_step_limit", f"must end with a positive number, got {most!r}")
        return {}
    return {"time_step_min": float(least), "time_step_max": None if most == float("inf") else float(most)}


def _express_mamba(mamba: MambaConfig) -> dict[str, Any]:
    most = {"__float__": "Infinity"} if mamba.time_step_max is None else mamba.time_step_max
    return {
        "mamba_n_heads": mamba.num_heads,
        "mamba_d_head": mamba.head_size,
        **write_settings(mamba, _MAMBA),
        "time_step_limit": [mamba.time_step_min, most],
    }


# Granite 4.

_GRANITE_KINDS: dict[str, LayerKind] = {
    "linear_attention": "mamba2",
    "full_attention": "attention",
    "mamba": "mamba2",
    "attention": "attention",
}
_MIXTURE = f"{LAYER}.block_sparse_moe"
_SHARED, _DENSE = f"{TARGET}.mlp.shared", f"{TARGET}.mlp"
_GRANITE_TENSORS = (
    *EMBEDDING,
    *NORMS,
    *ATTENTION,
    *_mamba_tensors(f"{LAYER}.mamba"),
    *linear(f"{LAYER}.shared_mlp.input_linear", f"{_DENSE}.gate_proj", f"{_DENSE}.up_proj", when=("moe", None)),
    *linear(f"{LAYER}.shared_mlp.output_linear", f"{_DENSE}.down_proj", when=("moe", None)),
    *linear(f"{LAYER}.shared_mlp.input_linear", f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj"),
    *linear(f"{LAYER}.shared_mlp.output_linear", f"{_SHARED}.down_proj"),
    *router(f"{_MIXTURE}.router.layer"),
    *all_experts(_MIXTURE, names=("input_linear.weight", "output_linear.weight")),
    # As Transformers 5 has them in memory.
    *router(f"{_MIXTURE}.router"),
    *all_experts(f"{_MIXTURE}.experts"),
    *HEAD,
)


def _granite_kinds(data: Mapping[str, Any]) -> dict[str, Any]:
    if data.get("layer_types") is None and data.get("layers_block_type") is not None:
        data = {**data, "layer_types": data["layers_block_type"]}
    return _take_kinds(data, lambda count: ["linear_attention"] * count)


def _granite(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, experts = values["num_layers"], fields.integer("num_local_experts", 8, least=0)
    shared = fields.integer("shared_intermediate_size", 1024)
    position = fields.data.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        fields.problem("position_embedding_type", f"{position!r} is not one of 'rope', 'nope'")
    moe = None
    if experts:
        sizes = experts, per_token(2).read(fields), values["intermediate_size"], tuple(range(num_layers))
        moe = MoEConfig(*sizes, scoring="softmax_of_chosen", shared_size=shared)
    return {
        "mamba": _mamba(fields, values, has_output_bias=fields.boolean("mamba_proj_bias", False)),
        "rotated_layers": () if position == "rope" else (False,) * num_layers,
        "intermediate_size": shared,
        "moe": moe,
    }


def _express_granite(config: ModelConfig) -> dict[str, Any]:
    mamba, moe = part_of(config, "mamba"), config.moe
    if mamba.width % config.hidden_size or mamba.has_output_bias != mamba.has_bias:
        raise ValueError(f"{config.architecture}: a state space of {mamba.width} for a width of {config.hidden_size}")
    return {
        **_express_mamba(mamba),
        "mamba_expand": mamba.width // config.hidden_size,
        "position_embedding_type": "rope" if config.rope_of(0) is not None else None,
        "shared_intermediate_size": config.intermediate_size if moe is None else moe.shared_size,
        "intermediate_size": config.intermediate_size if moe is None else moe.expert_size,
        "num_local_experts": 0 if moe is None else moe.num_experts,
        "num_experts_per_tok": 0 if moe is None else moe.num_experts_per_token,
    }


# Falcon-H1.

_FALCON_TENSORS = (
    *EMBEDDING,
    *norm(f"{LAYER}.input_layernorm", f"{TARGET}.attention_norm"),
    *norm(f"{LAYER}.pre_ff_layernorm", f"{TARGET}.mlp_norm"),
    *norm("model.final_layernorm", "final_norm"),
    *ATTENTION,
    *_mamba_tensors(f"{LAYER}.mamba"),
    *linears(f"{LAYER}.feed_forward", f"{TARGET}.mlp", MLP),
    *HEAD,
)


_FALCON_MAMBA = (
    Setting("has_output_bias", "projectors_bias", "boolean", False),
    Setting("has_norm", "mamba_rms_norm", "boolean", False),
    Setting("gates_after_norm", "mamba_norm_before_gate", "boolean", True),
    Setting("in_multiplier", "ssm_in_multiplier", "number", 1.0),
    Setting("out_multiplier", "ssm_out_multiplier", "number", 1.0),
)


def _factors(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    return fields.numbers(name, count) or (1.0,) * count if fields.has(name) else (1.0,) * count


def _falcon(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    key = fields.number("key_multiplier", 1.0)
    parts = _factors(fields, "ssm_multipliers", 5)
    inner = None if fields.data.get("mamba_d_ssm", 1024) is None else fields.integer("mamba_d_ssm", 1024)
    mamba = _mamba(
        fields,
        values,
        inner,
        **read_settings(fields, _FALCON_MAMBA),
        part_multipliers=() if set(parts) == {1.0} else parts,
    )
    return {
        "mamba": mamba,
        "layer_kinds": ("attention_and_mamba2",) * values["num_layers"],
        "attention_scale": None if key == 1.0 else values["head_dim"] ** -0.5 * key,
        "mlp_multipliers": _factors(fields, "mlp_multipliers", 2),
    }


def _express_falcon(config: ModelConfig) -> dict[str, Any]:
    mamba, scale = part_of(config, "mamba"), config.attention_scale
    key = 1.0 if scale is None else _key_multiplier(scale, config.head_dim)
    return {
        **_express_mamba(mamba),
        "mamba_d_ssm": mamba.width,
        **write_settings(mamba, _FALCON_MAMBA),
        "ssm_multipliers": list(mamba.part_multipliers or (1.0,) * 5),
        "key_multiplier": key,
        "mlp_multipliers": list(config.mlp_multipliers),
    }


def _key_multiplier(scale: float, head_dim: int) -> float:
    """The number that, times head_dim**-0.5, is `scale` to the bit; rounding may hide the last digits."""
    exact = scale / head_dim**-0.5
    near = [float(f"{exact:.{digits}g}") for digits in range(1, 18)]
    return next((number for number in near if head_dim**-0.5 * number == scale), exact)


# Nemotron-H.

_NEMOTRON_LAYER = "backbone.layers.{layer}"
_MIXER = f"{_NEMOTRON_LAYER}.mixer"
_NEMOTRON_TENSORS = (
    TensorRule("backbone.embeddings.weight", ("embed",)),
    *norm(f"{_NEMOTRON_LAYER}.norm", f"{TARGET}.attention_norm"),
    # A layer has one of the two. The condition holds for all: no two rules have the same source and condition.
    *norm(f"{_NEMOTRON_LAYER}.norm", f"{TARGET}.mlp_norm", when=("is_mlp_gated", False)),
    *norm("backbone.norm_f", "final_norm"),
    *linears(_MIXER, f"{TARGET}.attention", (*QKV, "o_proj")),
    *_mamba_tensors(_MIXER),
    *linears(_MIXER, _DENSE, MLP[1:]),
    *router(f"{_MIXER}.gate"),
    TensorRule(f"{_MIXER}.gate.e_score_correction_bias", (f"{TARGET}.mlp.router.correction",)),
    *each_expert(f"{_MIXER}.experts", MLP[1:], MLP[1:]),
    # As Transformers 5 has them in memory.
    *(TensorRule(f"{_MIXER}.experts.{name}", (f"{EXPERTS}.{name}.weight",), transpose=True) for name in MLP[1:]),
    *linears(f"{_MIXER}.shared_experts", _SHARED, MLP[1:]),
    *HEAD,
)
# As Transformers 5 has them in memory.
_NEMOTRON_TENSORS += tuple(
    replace(rule, source=rule.source.replace("backbone.", "model."))
    for rule in _NEMOTRON_TENSORS
    if rule.source.startswith("backbone.")
)
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_NEMOTRON_KINDS: dict[str, LayerKind] = {
    "linear_attention": "mamba2",
    "full_attention": "attention",
    "mlp": "none",
    "moe": "none",
    "mamba": "mamba2",
    "attention": "attention",
}


_NEMOTRON_MAMBA = (
    Setting("num_heads", "mamba_num_heads", "integer", 128),
    Setting("head_size", "mamba_head_dim", "integer", 64),
    Setting("num_groups", "n_groups", "integer", 8),
    Setting("state_size", "ssm_state_size", "integer", 128),
    Setting("conv_width", "conv_kernel", "integer", 4),
    Setting("has_conv_bias", "use_conv_bias", "boolean", True),
    Setting("has_bias", "use_bias", "boolean", False),
    Setting("time_step_min", "time_step_min", "number", 0.001),
)
# V3's router, with experts of the MLP's form.
_NEMOTRON_EXPERTS = (
    *v3_sizes(8, 2, 7688, 1.0, "num_local_experts"),
    Setting("shared_size", "moe_shared_expert_intermediate_size", "integer", 7688),
)


def _nemotron_kinds(data: Mapping[str, Any]) -> dict[str, Any]:
    """The number of layers is that of their kinds, which may be letters."""
    data = dict(data)
    types = data.pop("layers_block_type", None) or data.pop("layer_types", None)
    pattern = data.get("hybrid_override_pattern")
    if types is None and isinstance(pattern, str):
        types = [_LETTERS.get(letter, letter) for letter in pattern]
    if isinstance(types, list):
        data["num_hidden_layers"] = len(types)
    return {**data, _KINDS: types, "layer_types": None}


def _nemotron(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = _read_kinds(fields, values["num_layers"], _NEMOTRON_KINDS)
    mamba = MambaConfig(**read_settings(fields, _NEMOTRON_MAMBA), has_output_bias=fields.boolean("use_bias", False))
    given = fields.data.get(_KINDS)
    with_experts = tuple(i for i, kind in enumerate(given) if kind == "moe") if isinstance(given, list) else ()
    return {
        "mamba": mamba,
        "layer_kinds": kinds,
        "mlp_layers": tuple(kind == "none" for kind in kinds),
        "moe": _nemotron_experts(fields, with_experts) if with_experts else None,
    }


def _nemotron_experts(fields: Fields, layers: tuple[int, ...]) -> MoEConfig:
    """V3's router, with experts of the MLP's form."""
    if (size := fields.data.get("moe_latent_size")) is not None:
        fields.problem("moe_latent_size", f"{size!r} is not supported: experts read the hidden state itself")
    if fields.boolean("mlp_bias", False):
        fields.problem("mlp_bias", "is true, which is not supported beside experts")
    sizes = read_settings(fields, _NEMOTRON_EXPERTS)
    return MoEConfig(layers=layers, scoring="sigmoid", group_score="top2_sum", has_correction_bias=True, **sizes)


def _express_nemotron(config: ModelConfig) -> dict[str, Any]:
    kinds = {"mamba2": "linear_attention", "attention": "full_attention", "none": "mlp"}
    types = ["moe" if config.experts_of(i) else kinds[config.layer_kind(i)] for i in range(config.num_layers)]
    # One MLP of its own width, whatever the number of shared experts says.
    experts = {**write_settings(config.moe, _NEMOTRON_EXPERTS), "n_shared_experts": 1} if config.moe else {}
    mamba = write_settings(part_of(config, "mamba"), _NEMOTRON_MAMBA)
    return {**experts, **mamba, "layers_block_type": types}


MAMBA: tuple[Family, ...] = (
    Family(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        title="Granite 4",
        examples="Granite 4.0 H Micro, Tiny, Small",
        max_position_embeddings=2048,
        **ATTENTION_BIAS,
        names={"head_dim": None},
        activations={"silu": "silu"},  # the convolution has it too
        settings=GRANITE_SCALES,
        tensors=_GRANITE_TENSORS,
        normalize=_granite_kinds,
        parts=(_layer_kinds(_GRANITE_KINDS), ConfigPart(_granite, _express_granite)),
    ),
    Family(
        "FalconH1ForCausalLM",
        "falcon_h1",
        title="Falcon-H1",
        examples="Falcon-H1 0.5B to 34B",
        max_position_embeddings=8192,
        num_kv_heads=8,
        norm_eps=1e-5,
        **LINEAR_BIAS,
        activations={"silu": "silu"},  # the convolution has it too
        settings=(
            Setting("embedding_multiplier", "embedding_multiplier", "number", 1.0),
            Setting("logit_scale", "lm_head_multiplier", "number", 1.0),
            Setting("attention_in_multiplier", "attention_in_multiplier", "number", 1.0),
            Setting("attention_out_multiplier", "attention_out_multiplier", "number", 1.0),
        ),
        tensors=_FALCON_TENSORS,
        parts=(ConfigPart(_falcon, _express_falcon),),
    ),
    Family(
        "NemotronHForCausalLM",
        "nemotron_h",
        title="Nemotron-H",
        examples="Nemotron-H 8B, 47B, 56B; Nemotron Nano 9B v2; Nemotron 3 Nano",
        max_position_embeddings=4096,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        **LINEAR_BIAS,
        rope=RopeForm(rotated="none"),
        names={"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act"},
        activation="relu2",
        activations={"relu2": "relu2"},
        supported={
            "mamba_hidden_act": ("silu",),
            "mamba_ssm_cache_dtype": ("float32",),
            "residual_in_fp32": (False,),
            "sliding_window": (),
        },
        fixed={"is_mlp_gated": False},
        prefix="backbone.",
        tensors=_NEMOTRON_TENSORS,
        normalize=_nemotron_kinds,
        parts=(ConfigPart(_nemotron, _express_nemotron),),
    ),
)
