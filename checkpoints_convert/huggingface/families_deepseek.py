"""DeepSeek-V2 and V3: latent attention, experts in groups, shared experts."""

import math
from collections.abc import Mapping
from typing import Any

from checkpoints_convert.huggingface.families_llama import EMBEDDING, GATED_MLP, HEAD, LAYER, NORMS, TARGET
from checkpoints_convert.huggingface.families_mixtures import experts_of, mixture, router, shared_mlp
from checkpoints_convert.huggingface.family import Family, Fields
from checkpoints_convert.huggingface.rules import TensorRule, linear, norm
from jaxinfer.models import MLAConfig, ModelConfig, MoEConfig, RopeConfig

_ATTENTION, _TARGET = f"{LAYER}.self_attn", f"{TARGET}.attention"
_TENSORS = (
    *EMBEDDING,
    *NORMS,
    *linear(f"{_ATTENTION}.q_proj", f"{_TARGET}.q_proj"),
    *linear(f"{_ATTENTION}.q_a_proj", f"{_TARGET}.q_a_proj"),
    *norm(f"{_ATTENTION}.q_a_layernorm", f"{_TARGET}.q_a_norm"),
    *linear(f"{_ATTENTION}.q_b_proj", f"{_TARGET}.q_b_proj"),
    *linear(f"{_ATTENTION}.kv_a_proj_with_mqa", f"{_TARGET}.kv_a_proj"),
    *norm(f"{_ATTENTION}.kv_a_layernorm", f"{_TARGET}.kv_a_norm"),
    # [heads * (key part + value), latent]
    TensorRule(
        f"{_ATTENTION}.kv_b_proj.weight",
        (f"{_TARGET}.k_up.weight", f"{_TARGET}.v_up.weight"),
        transpose=True,
        stack="num_heads",
    ),
    *linear(f"{_ATTENTION}.o_proj", f"{_TARGET}.o_proj"),
    *GATED_MLP,
    *router(f"{LAYER}.mlp.gate"),
    TensorRule(f"{LAYER}.mlp.gate.e_score_correction_bias", (f"{TARGET}.mlp.router.correction",)),
    *experts_of(f"{LAYER}.mlp"),
    *shared_mlp(f"{LAYER}.mlp.shared_experts"),
    *HEAD,
)


def _attention(fields: Fields, values: Mapping[str, Any], *, is_interleaved: bool) -> dict[str, Any]:
    """Latent attention, and what the cache holds of it."""
    rank = None
    if "q_lora_rank" not in fields.data or fields.data["q_lora_rank"] is not None:
        rank = fields.integer("q_lora_rank", 1536)
    mla = MLAConfig(
        fields.integer("kv_lora_rank", 512),
        values["rope"].rotary_dim,
        fields.integer("qk_nope_head_dim", 128),
        fields.integer("v_head_dim", 128),
        rank,
        is_interleaved,
    )
    scale = mla.query_size**-0.5 * _mscale(values["rope"]) ** 2
    return {"mla": mla, "num_kv_heads": 1, "head_dim": mla.key_size, "attention_scale": scale, "qkv_bias": False}


def _mscale(rope: RopeConfig) -> float:
    """The factor of YaRN on queries and keys, besides the rotation's (Transformers' `yarn_apply_mscale`)."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def _express_attention(config: ModelConfig) -> dict[str, Any]:
    mla = config.mla
    if mla is None:
        raise ValueError(f"{config.architecture} needs latent attention, and the configuration has none")
    return {
        "num_key_value_heads": config.num_heads,
        "kv_lora_rank": mla.latent_size,
        "q_lora_rank": mla.query_rank,
        "qk_rope_head_dim": mla.rope_size,
        "qk_nope_head_dim": mla.nope_size,
        "v_head_dim": mla.value_size,
    }


def _experts(fields: Fields, values: Mapping[str, Any], first_dense: int, num_shared: int, **options: Any) -> MoEConfig:
    size = fields.integer("moe_intermediate_size", options.pop("expert_size"))
    first = fields.integer("first_k_dense_replace", first_dense, least=0)
    shared = fields.integer("n_shared_experts", num_shared, least=0)
    return MoEConfig(
        fields.integer("n_routed_experts", options.pop("num_experts")),
        fields.integer("num_experts_per_tok", options.pop("per_token")),
        size,
        tuple(range(min(first, values["num_layers"]), values["num_layers"])),
        scale=fields.number("routed_scaling_factor", options.pop("scale")),
        shared_size=size * shared,
        **options,
    )


def _express_experts(config: ModelConfig) -> dict[str, Any]:
    moe = mixture(config)
    first = config.num_layers - len(moe.layers)
    if moe.layers != tuple(range(first, config.num_layers)) or moe.shared_size % moe.expert_size:
        raise ValueError(f"{config.architecture}: experts in layers {moe.layers}, beside an MLP of {moe.shared_size}")
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.expert_size,
        "first_k_dense_replace": first,
        "n_shared_experts": moe.shared_size // moe.expert_size,
        "routed_scaling_factor": moe.scale,
        "norm_topk_prob": moe.normalize,
        "n_group": moe.num_groups,
        "topk_group": moe.num_chosen_groups,
    }


def _v2(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        fields.problem("topk_method", f"{method!r} is not one of 'greedy', 'group_limited_greedy'")
    if fields.text("scoring_func", "softmax") != "softmax":
        found = fields.data["scoring_func"]
        fields.problem("scoring_func", f"{found!r} is not supported for DeepSeek-V2, only 'softmax' is")
    groups = {}
    if method == "group_limited_greedy":
        groups = {"num_groups": fields.integer("n_group"), "num_chosen_groups": fields.integer("topk_group")}
    # Transformers' DeepSeek-V2 has norm_topk_prob and does not apply it.
    if fields.boolean("norm_topk_prob", False):
        fields.problem("norm_topk_prob", "is true, which is not supported: no DeepSeek-V2 was trained with it")
    sizes = {"expert_size": 1407, "num_experts": 64, "per_token": 6, "scale": 1.0}
    moe = _experts(fields, values, 0, 2, normalize=False, **sizes, **groups)
    return {**_attention(fields, values, is_interleaved=True), "moe": moe}


def _express_v2(config: ModelConfig) -> dict[str, Any]:
    method = "group_limited_greedy" if mixture(config).num_groups > 1 else "greedy"
    return {**_express_attention(config), **_express_experts(config), "topk_method": method}


def _v3(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    for name, known in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if fields.text(name, known) != known:
            fields.problem(name, f"{fields.data[name]!r} is not supported for DeepSeek-V3, only {known!r} is")
    moe = _experts(
        fields,
        values,
        3,
        1,
        expert_size=2048,
        num_experts=256,
        per_token=8,
        scale=2.5,
        scoring="sigmoid",
        normalize=fields.boolean("norm_topk_prob", True),
        num_groups=fields.integer("n_group", 8),
        num_chosen_groups=fields.integer("topk_group", 4),
        group_score="top2_sum",
        has_correction_bias=True,
    )
    is_interleaved = fields.boolean("rope_interleave", True)
    return {**_attention(fields, values, is_interleaved=is_interleaved), "moe": moe}


def _express_v3(config: ModelConfig) -> dict[str, Any]:
    data = {**_express_attention(config), **_express_experts(config), "num_nextn_predict_layers": 0}
    assert config.mla is not None
    return {**data, "rope_interleave": config.mla.is_interleaved}


_SHARED: dict[str, Any] = {
    "output_bias": "attention_bias",
    "names": {"head_dim": "qk_rope_head_dim"},
    "head_dim": 64,
    "tensors": _TENSORS,
}

DEEPSEEK: tuple[Family, ...] = (
    Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        title="DeepSeek-V2",
        examples="DeepSeek-V2, V2-Lite, Coder-V2",
        max_position_embeddings=2048,
        build=_v2,
        express=_express_v2,
        **_SHARED,
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        title="DeepSeek-V3",
        examples="DeepSeek-V3, V3.1, R1",
        max_position_embeddings=4096,
        build=_v3,
        express=_express_v3,
        has_later_layers=True,
        **_SHARED,
    ),
)
