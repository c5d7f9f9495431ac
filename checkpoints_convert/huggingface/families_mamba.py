"""Granite 4, Falcon-H1 and Nemotron-H: Mamba 2 beside or between attention."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from checkpoints_convert.huggingface.families_deepseek import v3_sizes
from checkpoints_convert.huggingface.families_delta import KINDS, read_kinds, take_kinds, write_kinds
from checkpoints_convert.huggingface.families_llama import GRANITE_SCALES
from checkpoints_convert.huggingface.families_mixtures import per_token
from checkpoints_convert.huggingface.family import (
    ATTENTION_BIAS,
    LINEAR_BIAS,
    MAX_NUMBER,
    Family,
    Fields,
    RopeForm,
    Setting,
    is_positive,
    read_settings,
    write_settings,
)
from checkpoints_convert.huggingface.llama_tensors import (
    ATTENTION,
    EMBEDDING,
    EXPERTS,
    HEAD,
    LAYER,
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
from jaxinfer.models import MambaConfig, ModelConfig, MoEConfig
from jaxinfer.models.recurrent_config import LayerKind

_TARGET = f"{TARGET}.recurrent"


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


def mamba_of(config: ModelConfig) -> MambaConfig:
    """Raises ValueError for a configuration without Mamba layers."""
    if config.mamba is None:
        raise ValueError(f"{config.architecture} needs Mamba layers, and the configuration has none")
    return config.mamba


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
    return take_kinds(data, lambda count: ["linear_attention"] * count)


def _granite(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, experts = values["num_layers"], fields.integer("num_local_experts", 8, least=0)
    shared = fields.integer("shared_intermediate_size", 1024)
    position = fields.data.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        fields.problem("position_embedding_type", f"{position!r} is not one of 'rope', 'nope'")
    moe = None
    if experts:
        moe = MoEConfig(
            experts,
            per_token(2).read(fields),
            values["intermediate_size"],
            tuple(range(num_layers)),
            scoring="softmax_of_chosen",
            shared_size=shared,
        )
    return {
        "mamba": _mamba(fields, values, has_output_bias=fields.boolean("mamba_proj_bias", False)),
        "layer_kinds": read_kinds(fields, num_layers, _GRANITE_KINDS),
        "rotated_layers": () if position == "rope" else (False,) * num_layers,
        "intermediate_size": shared,
        "moe": moe,
    }


def _express_granite(config: ModelConfig) -> dict[str, Any]:
    mamba, moe = mamba_of(config), config.moe
    if mamba.width % config.hidden_size or mamba.has_output_bias != mamba.has_bias:
        raise ValueError(f"{config.architecture}: a state space of {mamba.width} for a width of {config.hidden_size}")
    return {
        **_express_mamba(mamba),
        "mamba_expand": mamba.width // config.hidden_size,
        **write_kinds(config, _GRANITE_KINDS),
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
    mamba, scale = mamba_of(config), config.attention_scale
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
    return next((one for one in near if head_dim**-0.5 * one == scale), exact)


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
    return {**data, KINDS: types, "layer_types": None}


def _nemotron(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = read_kinds(fields, values["num_layers"], _NEMOTRON_KINDS)
    mamba = MambaConfig(**read_settings(fields, _NEMOTRON_MAMBA), has_output_bias=fields.boolean("use_bias", False))
    given = fields.data.get(KINDS)
    with_experts = tuple(i for i, kind in enumerate(given) if kind == "moe") if isinstance(given, list) else ()
    return {
        "mamba": mamba,
        "layer_kinds": kinds,
        "mlp_layers": tuple(kind == "none" for kind in kinds),
        "moe": _nemotron_experts(fields, with_experts) if with_experts else None,
    }


def _nemotron_experts(fields: Fields, layers: tuple[int, ...]) -> MoEConfig:
    """V3's router, with experts of the MLP's form."""
    if fields.data.get("moe_latent_size") is not None:
        found = fields.data["moe_latent_size"]
        fields.problem("moe_latent_size", f"{found!r} is not supported: experts read the hidden state itself")
    if fields.boolean("mlp_bias", False):
        fields.problem("mlp_bias", "is true, which is not supported beside experts")
    sizes = read_settings(fields, _NEMOTRON_EXPERTS)
    return MoEConfig(layers=layers, scoring="sigmoid", group_score="top2_sum", has_correction_bias=True, **sizes)


def _express_nemotron(config: ModelConfig) -> dict[str, Any]:
    mamba, moe = mamba_of(config), config.moe
    kinds = {"mamba2": "linear_attention", "attention": "full_attention", "none": "mlp"}
    types = ["moe" if config.experts_of(i) else kinds[config.layer_kind(i)] for i in range(config.num_layers)]
    experts = {}
    if moe is not None:
        # One MLP of its own width, whatever the number says.
        experts = {**write_settings(moe, _NEMOTRON_EXPERTS), "n_shared_experts": 1}
    return {
        **experts,
        **write_settings(mamba, _NEMOTRON_MAMBA),
        "layers_block_type": types,
    }


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
        build=_granite,
        express=_express_granite,
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
        build=_falcon,
        express=_express_falcon,
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
        build=_nemotron,
        express=_express_nemotron,
    ),
)
