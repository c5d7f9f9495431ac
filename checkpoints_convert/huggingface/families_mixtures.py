"""Families with a mixture of experts: Llama 4 (text; layers that are not rotated, and experts whose inputs the router
scales), Mixtral, Qwen2-MoE, Qwen3-MoE, gpt-oss, OLMoE, Phi-3.5-MoE, MiniMax-M2, ERNIE 4.5 and Hunyuan."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from checkpoints_convert.huggingface.families_llama import ERNIE, HUNYUAN
from checkpoints_convert.huggingface.family import (
    ATTENTION_BIAS,
    ConfigPart,
    Family,
    Fields,
    RopeForm,
    Setting,
    part_of,
    read_settings,
    scaled,
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
    TARGET,
    all_experts,
    each_expert,
    experts_of,
    linears,
    router,
    shared_mlp,
)
from checkpoints_convert.huggingface.rules import TensorRule, linear
from jaxinfer.models import ModelConfig, MoEConfig

_MIXTRAL_EXPERTS = (
    *router(f"{LAYER}.block_sparse_moe.gate"),
    *experts_of(f"{LAYER}.block_sparse_moe", ("w1", "w3", "w2")),  # as in repositories
)
QWEN_EXPERTS = (
    *router(f"{LAYER}.mlp.gate"),
    *experts_of(f"{LAYER}.mlp"),
    *shared_mlp(f"{LAYER}.mlp.shared_expert"),
    TensorRule(f"{LAYER}.mlp.shared_expert_gate.weight", (f"{TARGET}.mlp.shared_gate",), transpose=True),
)
# Gates and ups lie in turn along 2 F, and nothing is transposed.
_IN_TURN = "intermediate_size"
_GPT_OSS_TENSORS = (
    *LLAMA_TENSORS,
    TensorRule(f"{LAYER}.self_attn.sinks", (f"{TARGET}.attention.sinks",)),
    *linear(f"{LAYER}.mlp.router", f"{TARGET}.mlp.router"),
    *all_experts(f"{LAYER}.mlp.experts", transpose=False, groups=_IN_TURN),
    TensorRule(
        f"{LAYER}.mlp.experts.gate_up_proj_bias",
        (f"{EXPERTS}.gate_proj.bias", f"{EXPERTS}.up_proj.bias"),
        groups=_IN_TURN,
    ),
    TensorRule(f"{LAYER}.mlp.experts.down_proj_bias", (f"{EXPERTS}.down_proj.bias",)),
)
_CORRECTION = (f"{TARGET}.mlp.router.correction",)
_LM_HEAD_BIAS = TensorRule("lm_head.bias", ("lm_head_bias",))
# By the name that Transformers 5 writes for all families, or Qwen's before.
_EITHER = ("num_experts", "num_local_experts")


def without_experts(rules: tuple[TensorRule, ...]) -> tuple[TensorRule, ...]:
    """The rules of the dense models of a family that also has mixtures."""
    parts = (".mlp.experts.", ".mlp.router.", ".mlp.shared")
    return tuple(rule for rule in rules if not any(part in target for part in parts for target in rule.targets))


def num_experts(default: int, *names: str, written: str | None = None) -> Setting:
    """The number of experts, by the first of the names; `written` is by default the first."""
    return Setting("num_experts", written or names[0], "integer", default, names=names)


def per_token(default: int, name: str = "num_experts_per_tok") -> Setting:
    return Setting("num_experts_per_token", name, "integer", default, names=(name, "num_experts_per_tok"))


def expert_size(default: int) -> Setting:
    return Setting("expert_size", "moe_intermediate_size", "integer", default)


def normalizes(default: bool) -> Setting:
    return Setting("normalize", "norm_topk_prob", "boolean", default)


def _everywhere(values: Mapping[str, Any]) -> dict[str, Any]:
    """Experts of the width of the MLP in all layers."""
    return {"expert_size": values["intermediate_size"], "layers": tuple(range(values["num_layers"]))}


def _mixture_of(*settings: Setting, **fixed: Any) -> ConfigPart:
    """Experts of the width of the MLP in all layers.

    Args:
      settings: fields of `MoEConfig` that are read from config.json. fixed: those that all models share.
    """

    def build(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"moe": MoEConfig(**_everywhere(values), **read_settings(fields, settings), **fixed)}

    return ConfigPart(build, lambda config: write_settings(part_of(config, "moe"), settings))


def _qwen_sizes(count: int, chosen: int, size: int, shared: int) -> tuple[Setting, ...]:
    sizes = (num_experts(count, *_EITHER), per_token(chosen), expert_size(size))
    of_shared = Setting("shared_size", "shared_expert_intermediate_size", "integer", shared)
    return (*sizes, normalizes(False), *([of_shared] if shared else []))


def qwen_mixture(count: int, chosen: int, size: int, shared: int = 0) -> ConfigPart:
    """Qwen's mixtures, with their defaults where config.json has no value."""
    settings = _qwen_sizes(count, chosen, size, shared)

    def build(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        step = fields.integer("decoder_sparse_step", 1)
        dense = layer_list(fields, "mlp_only_layers", fields.data.get("mlp_only_layers") or [])
        layers = tuple(i for i in range(values["num_layers"]) if i not in dense and (i + 1) % step == 0)
        return {"moe": MoEConfig(layers=layers, has_shared_gate=bool(shared), **read_settings(fields, settings))}

    def express(config: ModelConfig) -> dict[str, Any]:
        moe = part_of(config, "moe")
        dense = [i for i in range(config.num_layers) if i not in moe.layers]
        sizes = write_settings(moe, _qwen_sizes(1, 1, 1, moe.shared_size))
        return {**sizes, "decoder_sparse_step": 1, "mlp_only_layers": dense}

    return ConfigPart(build, express)


def layer_list(fields: Fields, name: str, value: Any) -> list[int]:
    """A list of layers; an empty one beside a problem."""
    if isinstance(value, list) and all(isinstance(layer, int) and not isinstance(layer, bool) for layer in value):
        return value
    fields.problem(name, f"must be a list of layers, got {value!r}")
    return []


def _qwen2_windows(data: Mapping[str, Any]) -> dict[str, Any]:
    """With a window in every other layer below max_window_layers, the first among them."""
    data = dict(data)
    count, last = data.get("num_hidden_layers"), data.get("max_window_layers", 28)
    is_given = data.get("layer_types") is not None or not data.get("use_sliding_window")
    if not is_given and isinstance(count, int) and isinstance(last, int):
        kinds = ("sliding_attention", "full_attention")
        data["layer_types"] = [kinds[i % 2 if i < last else 1] for i in range(count)]
    return data


def _qwen3_windows(data: Mapping[str, Any]) -> dict[str, Any]:
    """All layers have a window, or none."""
    return {**data, "sliding_window": data.get("sliding_window", 4096) if data.get("use_sliding_window") else None}


_PHIMOE = (num_experts(16, "num_local_experts"), per_token(2))


def _phimoe(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    if values["rope"].kind not in ("default", "longrope"):
        fields.problem("rope_scaling", f"of type {values['rope'].kind!r} is not supported, only 'longrope' is")
    has_no_jitter = fields.data.get("router_jitter_noise") == 0
    jitter = 0.0 if has_no_jitter else fields.number("router_jitter_noise", 0.01)
    sizes = {**_everywhere(values), **read_settings(fields, _PHIMOE)}
    return {"moe": MoEConfig(**sizes, scoring="sparsemixer", jitter=jitter)}


def _express_phimoe(config: ModelConfig) -> dict[str, Any]:
    moe = part_of(config, "moe")
    return {**write_settings(moe, _PHIMOE), "router_jitter_noise": moe.jitter}


def _minimax_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Repositories give the rotated dimensions, not their share of a head, and a 1 for each layer of softmax
    attention."""
    rotated, head_dim, kinds = data.get("rotary_dim"), data.get("head_dim", 128), data.get("attn_type_list")
    if isinstance(kinds, list) and all(kind == 1 for kind in kinds):
        data = {**data, "attn_type_list": None}
    if not isinstance(rotated, int) or not isinstance(head_dim, int) or head_dim < 1:
        return dict(data)
    return {"partial_rotary_factor": rotated / head_dim, **data}


_ERNIE = (num_experts(64, "moe_num_experts", "num_experts"), per_token(6, "moe_k"), expert_size(1536))


def _ernie(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    count, sizes = values["num_layers"], read_settings(fields, _ERNIE)
    first = fields.integer("moe_layer_start_index", 1, least=0)
    last = fields.integer("moe_layer_end_index", -1, least=-1)
    interval = fields.integer("moe_layer_interval", 1)
    last = count - 1 if last == -1 else last
    if (least := fields.number("moe_norm_min", 1e-12)) > 1e-6:
        fields.problem("moe_norm_min", f"{least!r} is not supported: sums of scores are not limited below")
    moe = MoEConfig(
        **sizes,
        layers=tuple(layer for layer in range(count) if first <= layer <= last and (layer + 1) % interval == 0),
        has_correction_bias=True,
        shared_size=sizes["expert_size"] * fields.integer("moe_num_shared_experts", 2, least=0),
    )
    return {"moe": moe}


def _express_ernie(config: ModelConfig) -> dict[str, Any]:
    moe = part_of(config, "moe")
    first, last = (moe.layers[0], moe.layers[-1]) if moe.layers else (config.num_layers, config.num_layers)
    return {
        **write_settings(moe, _ERNIE),
        "moe_num_shared_experts": moe.shared_size // moe.expert_size,
        "moe_layer_start_index": first,
        "moe_layer_end_index": last,
        "moe_layer_interval": moe.layers[1] - first if len(moe.layers) > 1 else 1,
    }


def _hunyuan(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    size = values["intermediate_size"]
    for name, wanted in (("num_shared_expert", 1), ("moe_intermediate_size", size)):
        if (value := _common_value(fields, name, wanted)) != wanted:
            fields.problem(name, f"{value!r} is not supported, only {wanted} is: Transformers computes with no other")
    names = (("num_experts", "num_local_experts"), ("moe_topk", "num_experts_per_tok"))
    count, chosen = (_common_value(fields, name if fields.has(name) else other, 1) for name, other in names)
    return {"moe": MoEConfig(count, chosen, **_everywhere(values), shared_size=size)}


def _common_value(fields: Fields, name: str, default: int) -> int:
    """An integer, or that of a list with one for each layer."""
    value = fields.data.get(name)
    if not isinstance(value, list):
        return fields.integer(name, default)
    if not value or any(type(size) is not int or size < 1 for size in value):
        fields.problem(name, f"must be an integer of at least 1, or a list of them, got {value!r}")
        return default
    if len(set(value)) > 1:
        fields.problem(name, f"{value!r} is not supported: only the same for all layers is")
    return value[0]


def _express_hunyuan(config: ModelConfig) -> dict[str, Any]:
    moe = part_of(config, "moe")
    return {"num_experts": moe.num_experts, "moe_topk": moe.num_experts_per_token}


_FEED_FORWARD = f"{LAYER}.feed_forward"
_LLAMA4_TENSORS = (
    *(*EMBEDDING, *NORMS, *ATTENTION, *HEAD),
    *linears(_FEED_FORWARD, f"{TARGET}.mlp", MLP),
    *router(f"{_FEED_FORWARD}.router"),
    *all_experts(f"{_FEED_FORWARD}.experts", transpose=False),  # [E, D, 2 F] and [E, F, D]
    *each_expert(f"{_FEED_FORWARD}.experts"),
    *shared_mlp(f"{_FEED_FORWARD}.shared_expert"),
)
_LLAMA4_SIZES = (
    num_experts(16, "num_local_experts"),
    per_token(1),
    Setting("expert_size", "expert_size", "integer", 8192),
)
_CHUNK = Setting("attention_chunk", "attention_chunk_size", "integer_or_null", 8192)
_CHUNKED, _FULL = "chunked_attention", "full_attention"
_CHUNKS = "chunked_layers"


def _llama4_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """A list that is empty where it is absent, and a switch that the first files give as a number."""
    data = {name: value for name, value in data.items() if name != "no_rope_layers" or value != []}
    tuning = data.get("attn_temperature_tuning")
    if isinstance(tuning, int):
        data["attn_temperature_tuning"] = bool(tuning)
    if "layer_types" in data:  # which name chunks, and no windows
        data[_CHUNKS] = data.pop("layer_types")
    return data


def _llama4(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    temperature = fields.number("attn_scale", 0.1) if fields.boolean("attn_temperature_tuning", True) else None
    return {
        "moe": _llama4_experts(fields, values),
        "attention_chunk": _chunk(fields, values),
        "query_temperature": temperature,
        "query_temperature_period": fields.integer("floor_scale", 8192),
    }


def _llama4_experts(fields: Fields, values: Mapping[str, Any]) -> MoEConfig:
    count, step = values["num_layers"], fields.integer("interleave_moe_layer_step", 1)
    layers = fields.data.get("moe_layers")
    layers = layer_list(fields, "moe_layers", list(range(step - 1, count, step)) if layers is None else layers)
    sizes = read_settings(fields, _LLAMA4_SIZES)
    return MoEConfig(
        **sizes,
        layers=tuple(sorted(set(layers))),
        scoring="sigmoid_of_chosen",
        scales_input=True,
        shared_size=sizes["expert_size"],
    )


def _chunk(fields: Fields, values: Mapping[str, Any]) -> int | None:
    """The size of the chunks of the rotated layers; None if no layer has chunks."""
    chunk = _CHUNK.read(fields)
    rotated = values["rotated_layers"] or (True,) * values["num_layers"]
    kinds = fields.data.get(_CHUNKS)
    if kinds is None or kinds == [_CHUNKED if is_rotated else _FULL for is_rotated in rotated]:
        return chunk if any(rotated) else None
    if kinds != [_FULL] * len(rotated):
        fields.problem("layer_types", f"{kinds!r} is not supported: chunks in the rotated layers, or in none, are")
    return None


def _express_llama4(config: ModelConfig) -> dict[str, Any]:
    moe = part_of(config, "moe")
    temperature = {} if config.query_temperature is None else {"attn_scale": config.query_temperature}
    kinds = {"layer_types": [_FULL] * config.num_layers} if config.attention_chunk is None else {}
    return {
        **kinds,
        **write_settings(moe, _LLAMA4_SIZES[:2]),
        "intermediate_size": moe.expert_size,
        "moe_layers": list(moe.layers),
        "attention_chunk_size": config.attention_chunk,
        "attn_temperature_tuning": config.query_temperature is not None,
        "floor_scale": config.query_temperature_period,
        **temperature,
    }


MIXTURES: tuple[Family, ...] = (
    Family(
        "Llama4ForCausalLM",
        "llama4_text",
        title="Llama 4",
        examples="Llama 4 Scout and Maverick, text of the models with images",
        max_position_embeddings=131072,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        **ATTENTION_BIAS,
        names={"intermediate_size": "intermediate_size_mlp", "expert_size": "intermediate_size"},
        defaults={"intermediate_size_mlp": 16384},
        rope=RopeForm(theta=500000.0, rotated="listed", pairs_neighbours=True),
        fixed={"has_qk_norm_weight": False, "is_qk_norm_after_rotation": True},
        settings=(Setting("qk_norm", "use_qk_norm", "boolean", True),),
        tensors=_LLAMA4_TENSORS,
        notes=(
            "queries that grow with the position in layers without rotation",
            "sequences within one attention chunk",
        ),
        normalize=_llama4_fields,
        parts=(ConfigPart(_llama4, _express_llama4),),
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        title="Mixtral",
        examples="Mixtral 8x7B, 8x22B",
        max_position_embeddings=131072,
        num_kv_heads=8,
        norm_eps=1e-5,
        windows="all",
        rope=RopeForm(theta=1e6),
        tensors=(*LLAMA_TENSORS, *_MIXTRAL_EXPERTS, *router(f"{LAYER}.mlp.gate")),
        parts=(_mixture_of(num_experts(8, *_EITHER, written="num_local_experts"), per_token(2)),),
    ),
    Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        title="Qwen2-MoE",
        examples="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        max_position_embeddings=32768,
        num_kv_heads=16,
        names={"head_dim": None},
        qkv_bias="qkv_bias",
        defaults={"qkv_bias": True},
        windows="late",
        default_window=4096,
        tensors=(*LLAMA_TENSORS, *QWEN_EXPERTS),
        normalize=_qwen2_windows,
        parts=(qwen_mixture(60, 4, 1408, 5632),),
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        title="Qwen3-MoE",
        examples="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
        max_position_embeddings=32768,
        num_kv_heads=4,
        **ATTENTION_BIAS,
        qk_norm=True,
        windows="all",
        default_window=4096,
        tensors=(*LLAMA_TENSORS, *QWEN_EXPERTS),
        normalize=_qwen3_windows,
        parts=(qwen_mixture(128, 8, 768),),
        express=lambda config: {"use_sliding_window": any(config.sliding_windows)},
    ),
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        title="gpt-oss",
        examples="gpt-oss-20b, gpt-oss-120b",
        max_position_embeddings=131072,
        num_kv_heads=8,
        head_dim=64,
        **ATTENTION_BIAS,
        defaults={"attention_bias": True},
        norm_eps=1e-5,
        windows="pattern",
        default_window=128,
        full_every=2,
        rope=RopeForm(
            theta=150000.0,
            default=scaled("yarn", 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False),
        ),
        fixed={"norm": "rms_float32", "has_sinks": True},
        tensors=_GPT_OSS_TENSORS,
        parts=(
            _mixture_of(
                num_experts(128, *_EITHER, written="num_local_experts"),
                per_token(4),
                Setting("clamp", "swiglu_limit", "number", 7.0),
                Setting("clamp_slope", "swiglu_alpha", "number", 1.702),
                scoring="softmax_of_chosen",
                has_router_bias=True,
                has_expert_bias=True,
            ),
        ),
    ),
    Family(
        "OlmoeForCausalLM",
        "olmoe",
        title="OLMoE",
        examples="OLMoE-1B-7B",
        max_position_embeddings=4096,
        norm_eps=1e-5,
        **ATTENTION_BIAS,
        qk_norm=True,
        names={"head_dim": None},
        fixed={"qk_norm_span": "all_heads"},
        settings=(Setting("qkv_clip", "clip_qkv", "optional", None),),
        supported={"sliding_window": ()},
        tensors=(*LLAMA_TENSORS, *router(f"{LAYER}.mlp.gate"), *experts_of(f"{LAYER}.mlp")),
        parts=(_mixture_of(num_experts(64, *_EITHER), per_token(8), normalizes(False)),),
    ),
    Family(
        "PhimoeForCausalLM",
        "phimoe",
        title="Phi-3.5-MoE",
        examples="Phi-3.5-MoE, Phi-mini-MoE",
        max_position_embeddings=131072,
        num_kv_heads=8,
        norm_eps=1e-5,
        **ATTENTION_BIAS,
        windows="all",
        rope=RopeForm(theta=1e6, has_mscales=True),
        fixed={"norm": "layer", "norm_bias": True},
        settings=(Setting("lm_head_bias", "lm_head_bias", "boolean", False),),
        tensors=(*LLAMA_TENSORS, _LM_HEAD_BIAS, *_MIXTRAL_EXPERTS, *router(f"{LAYER}.mlp.router")),
        notes=("SparseMixer routing",),
        parts=(ConfigPart(_phimoe, _express_phimoe),),
    ),
    Family(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        title="MiniMax-M2",
        examples="MiniMax-M2, M2.1, M2.5",
        max_position_embeddings=196608,
        num_kv_heads=8,
        head_dim=128,
        qk_norm=True,
        rope=RopeForm(theta=5e6, has_partial=True),
        fixed={"qk_norm_span": "all_heads"},
        supported={
            "scoring_func": ("sigmoid",),
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "use_routing_bias": (True,),
            "shared_intermediate_size": (0,),
            "attn_type_list": (),
        },
        tensors=(
            *LLAMA_TENSORS,
            TensorRule(f"{LAYER}.block_sparse_moe.e_score_correction_bias", _CORRECTION),
            TensorRule(f"{LAYER}.mlp.e_score_correction_bias", _CORRECTION),
            *_MIXTRAL_EXPERTS,
            *router(f"{LAYER}.mlp.gate"),
        ),
        skipped=(r".*\.rotary_emb\.inv_freq", r"(model\.)?mtp.*"),
        normalize=_minimax_fields,
        parts=(
            _mixture_of(
                num_experts(256, "num_local_experts", "num_experts"),
                per_token(8),
                scoring="sigmoid",
                has_correction_bias=True,
            ),
        ),
        written={"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
        has_later_layers=True,
    ),
    replace(
        ERNIE,
        architecture="Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        title="ERNIE 4.5 mixtures",
        examples="ERNIE-4.5-21B-A3B, 300B-A47B",
        num_kv_heads=4,
        head_dim=None,
        settings=(Setting("lm_head_bias", "use_bias", "boolean", False),),
        supported={"moe_gate": ("topk",), "moe_gate_act": ("softmax",)},
        tensors=(
            *LLAMA_TENSORS,
            _LM_HEAD_BIAS,
            *router(f"{LAYER}.mlp.gate"),
            TensorRule(f"{LAYER}.mlp.moe_statics.e_score_correction_bias", _CORRECTION, stored=(1, -1)),
            TensorRule(f"{LAYER}.mlp.gate.moe_statics.e_score_correction_bias", _CORRECTION, stored=(1, -1)),
            *experts_of(f"{LAYER}.mlp"),
            *shared_mlp(f"{LAYER}.mlp.shared_experts"),
        ),
        skipped=(r".*\.rotary_emb\.inv_freq", r"(model\.)?mtp.*"),
        parts=(ConfigPart(_ernie, _express_ernie),),
    ),
    replace(
        HUNYUAN,
        architecture="HunYuanMoEV1ForCausalLM",
        model_type="hunyuan_v1_moe",
        title="Hunyuan mixtures",
        examples="Hunyuan-A13B",
        supported={
            **HUNYUAN.supported,
            "use_mla": (False,),
            "use_mixed_mlp_moe": (True,),
            "group_limited_greedy": (False,),
            "moe_layer_num_skipped": (0,),
        },
        tensors=(
            *HUNYUAN.tensors,
            *router(f"{LAYER}.mlp.gate.wg"),
            *experts_of(f"{LAYER}.mlp"),
            *shared_mlp(f"{LAYER}.mlp.shared_mlp"),
        ),
        parts=(ConfigPart(_hunyuan, _express_hunyuan),),
        written={"use_qk_norm": True},
    ),
)
