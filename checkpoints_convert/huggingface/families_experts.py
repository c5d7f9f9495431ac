"""More families with a mixture of experts: OLMoE, Phi-3.5-MoE, MiniMax-M2, ERNIE 4.5 and Hunyuan."""

from collections.abc import Mapping
from typing import Any

from checkpoints_convert.huggingface.families_dense import HUNYUAN_QK_NORMS
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
from checkpoints_convert.huggingface.families_mixtures import experts_of, mixture, router, shared_mlp
from checkpoints_convert.huggingface.family import Family, Fields, RopeForm, Setting
from checkpoints_convert.huggingface.rules import TensorRule
from jaxinfer.models import ModelConfig, MoEConfig

_COMMON = (*EMBEDDING, *NORMS, *ATTENTION, *QK_NORMS, *HEAD)
_CORRECTION = (f"{TARGET}.mlp.router.correction",)
# Mixtral's names, as in repositories.
_MIXTRAL_EXPERTS = experts_of(f"{LAYER}.block_sparse_moe", ("w1", "w3", "w2"))


def _olmoe(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    moe = MoEConfig(
        fields.integer("num_experts" if fields.has("num_experts") else "num_local_experts", 64),
        fields.integer("num_experts_per_tok", 8),
        values["intermediate_size"],
        tuple(range(values["num_layers"])),
        normalize=fields.boolean("norm_topk_prob", False),
    )
    return {"moe": moe}


def _express_olmoe(config: ModelConfig) -> dict[str, Any]:
    moe = mixture(config)
    sizes = {"num_experts": moe.num_experts, "num_experts_per_tok": moe.num_experts_per_token}
    return {**sizes, "norm_topk_prob": moe.normalize}


def _phimoe(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    if values["rope"].kind not in ("default", "longrope"):
        fields.problem("rope_scaling", f"of type {values['rope'].kind!r} is not supported, only 'longrope' is")
    has_no_jitter = fields.data.get("router_jitter_noise") == 0
    moe = MoEConfig(
        fields.integer("num_local_experts", 16),
        fields.integer("num_experts_per_tok", 2),
        values["intermediate_size"],
        tuple(range(values["num_layers"])),
        scoring="sparsemixer",
        jitter=0.0 if has_no_jitter else fields.number("router_jitter_noise", 0.01),
    )
    return {"moe": moe}


def _express_phimoe(config: ModelConfig) -> dict[str, Any]:
    moe = mixture(config)
    sizes = {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.num_experts_per_token}
    return {**sizes, "router_jitter_noise": moe.jitter}


def _minimax_rotation(data: Mapping[str, Any]) -> dict[str, Any]:
    """Repositories give the rotated dimensions, not their share of a head."""
    rotated, head_dim = data.get("rotary_dim"), data.get("head_dim", 128)
    if not isinstance(rotated, int) or not isinstance(head_dim, int) or head_dim < 1:
        return dict(data)
    return {"partial_rotary_factor": rotated / head_dim, **data}


def _minimax(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = fields.data.get("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        fields.problem("attn_type_list", f"{kinds!r} is not supported: only 1, softmax attention, is")
    moe = MoEConfig(
        fields.integer("num_local_experts" if fields.has("num_local_experts") else "num_experts", 256),
        fields.integer("num_experts_per_tok", 8),
        values["intermediate_size"],
        tuple(range(values["num_layers"])),
        scoring="sigmoid",
        has_correction_bias=True,
    )
    return {"moe": moe}


def _express_minimax(config: ModelConfig) -> dict[str, Any]:
    moe = mixture(config)
    sizes = {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.num_experts_per_token}
    return {**sizes, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}


def _ernie(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    count, size = values["num_layers"], fields.integer("moe_intermediate_size", 1536)
    first = fields.integer("moe_layer_start_index", 1, least=0)
    last = fields.integer("moe_layer_end_index", -1, least=-1)
    interval = fields.integer("moe_layer_interval", 1)
    last = count - 1 if last == -1 else last
    if fields.number("moe_norm_min", 1e-12) > 1e-6:
        found = fields.data["moe_norm_min"]
        fields.problem("moe_norm_min", f"{found!r} is not supported: sums of scores are not limited below")
    moe = MoEConfig(
        fields.integer("moe_num_experts" if fields.has("moe_num_experts") else "num_experts", 64),
        fields.integer("moe_k" if fields.has("moe_k") else "num_experts_per_tok", 6),
        size,
        tuple(layer for layer in range(count) if first <= layer <= last and (layer + 1) % interval == 0),
        has_correction_bias=True,
        shared_size=size * fields.integer("moe_num_shared_experts", 2, least=0),
    )
    return {"moe": moe}


def _express_ernie(config: ModelConfig) -> dict[str, Any]:
    moe = mixture(config)
    first, last = (moe.layers[0], moe.layers[-1]) if moe.layers else (config.num_layers, config.num_layers)
    return {
        "moe_num_experts": moe.num_experts,
        "moe_k": moe.num_experts_per_token,
        "moe_intermediate_size": moe.expert_size,
        "moe_num_shared_experts": moe.shared_size // moe.expert_size,
        "moe_layer_start_index": first,
        "moe_layer_end_index": last,
        "moe_layer_interval": moe.layers[1] - first if len(moe.layers) > 1 else 1,
    }


def _hunyuan(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    size = values["intermediate_size"]
    for name, wanted in (("num_shared_expert", 1), ("moe_intermediate_size", size)):
        if (found := _common_value(fields, name, wanted)) != wanted:
            fields.problem(name, f"{found!r} is not supported, only {wanted} is: Transformers computes with no other")
    name = "moe_topk" if fields.has("moe_topk") else "num_experts_per_tok"
    moe = MoEConfig(
        _common_value(fields, "num_experts" if fields.has("num_experts") else "num_local_experts", 1),
        _common_value(fields, name, 1),
        size,
        tuple(range(values["num_layers"])),
        shared_size=size,
    )
    return {"moe": moe}


def _common_value(fields: Fields, name: str, default: int) -> int:
    """An integer, or that of a list with one for each layer."""
    value = fields.data.get(name)
    if not isinstance(value, list):
        return fields.integer(name, default)
    if not value or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in value):
        fields.problem(name, f"must be an integer of at least 1, or a list of them, got {value!r}")
        return default
    if len(set(value)) > 1:
        fields.problem(name, f"{value!r} is not supported: only the same for all layers is")
    return value[0]


def _express_hunyuan(config: ModelConfig) -> dict[str, Any]:
    moe = mixture(config)
    return {"num_experts": moe.num_experts, "moe_topk": moe.num_experts_per_token, "use_qk_norm": True}


EXPERTS: tuple[Family, ...] = (
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
        tensors=(*_COMMON, *router(f"{LAYER}.mlp.gate"), *experts_of(f"{LAYER}.mlp")),
        build=_olmoe,
        express=_express_olmoe,
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
        tensors=(
            *_COMMON,
            TensorRule("lm_head.bias", ("lm_head_bias",)),
            *router(f"{LAYER}.block_sparse_moe.gate"),
            *router(f"{LAYER}.mlp.router"),
            *_MIXTRAL_EXPERTS,
        ),
        notes=("SparseMixer routing",),
        build=_phimoe,
        express=_express_phimoe,
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
        },
        tensors=(
            *_COMMON,
            *router(f"{LAYER}.block_sparse_moe.gate"),
            *router(f"{LAYER}.mlp.gate"),
            TensorRule(f"{LAYER}.block_sparse_moe.e_score_correction_bias", _CORRECTION),
            TensorRule(f"{LAYER}.mlp.e_score_correction_bias", _CORRECTION),
            *_MIXTRAL_EXPERTS,
        ),
        skipped=(r".*\.rotary_emb\.inv_freq", r"(model\.)?mtp.*"),
        normalize=_minimax_rotation,
        build=_minimax,
        express=_express_minimax,
        has_later_layers=True,
    ),
    Family(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        title="ERNIE 4.5 mixtures",
        examples="ERNIE-4.5-21B-A3B, 300B-A47B",
        max_position_embeddings=131072,
        num_kv_heads=4,
        norm_eps=1e-5,
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        is_tied=True,
        rope=RopeForm(theta=500000.0, pairs_neighbours=True),
        settings=(Setting("lm_head_bias", "use_bias", "boolean", False),),
        supported={"moe_gate": ("topk",), "moe_gate_act": ("softmax",)},
        tensors=(
            *_COMMON,
            TensorRule("lm_head.bias", ("lm_head_bias",)),
            *GATED_MLP,
            *router(f"{LAYER}.mlp.gate"),
            TensorRule(f"{LAYER}.mlp.moe_statics.e_score_correction_bias", _CORRECTION, stored=(1, -1)),
            TensorRule(f"{LAYER}.mlp.gate.moe_statics.e_score_correction_bias", _CORRECTION, stored=(1, -1)),
            *experts_of(f"{LAYER}.mlp"),
            *shared_mlp(f"{LAYER}.mlp.shared_experts"),
        ),
        skipped=(r".*\.rotary_emb\.inv_freq", r"(model\.)?mtp.*"),
        build=_ernie,
        express=_express_ernie,
    ),
    Family(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        title="Hunyuan mixtures",
        examples="Hunyuan-A13B",
        max_position_embeddings=2048,
        norm_eps=1e-5,
        **ATTENTION_BIAS,
        qk_norm=True,
        fixed={"is_qk_norm_after_rotation": True},
        rope=RopeForm(has_alpha=True),
        supported={
            "use_qk_norm": (True,),
            "use_cla": (False,),
            "use_mla": (False,),
            "mlp_bias": (False,),
            "use_mixed_mlp_moe": (True,),
            "group_limited_greedy": (False,),
            "moe_layer_num_skipped": (0,),
        },
        tensors=(
            *EMBEDDING,
            *NORMS,
            *ATTENTION,
            *HUNYUAN_QK_NORMS,
            *router(f"{LAYER}.mlp.gate.wg"),
            *experts_of(f"{LAYER}.mlp"),
            *shared_mlp(f"{LAYER}.mlp.shared_mlp"),
            *HEAD,
        ),
        build=_hunyuan,
        express=_express_hunyuan,
    ),
)
