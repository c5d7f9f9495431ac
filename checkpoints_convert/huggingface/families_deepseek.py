"""DeepSeek-V2 and V3, and the families with their blocks: latent attention, experts in groups, shared experts. GLM-4.5
to 4.7 have the experts of V3, Mistral 4 has those of V2."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from checkpoints_convert.huggingface.families_llama import (
    ATTENTION,
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
from checkpoints_convert.huggingface.rules import TensorRule, linear, norm
from jaxinfer.models import MLAConfig, ModelConfig, MoEConfig, RopeConfig

_ATTENTION, _TARGET = f"{LAYER}.self_attn", f"{TARGET}.attention"
_LATENT_ATTENTION = (
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
)
_FEED_FORWARD = (
    *GATED_MLP,
    *router(f"{LAYER}.mlp.gate"),
    TensorRule(f"{LAYER}.mlp.gate.e_score_correction_bias", (f"{TARGET}.mlp.router.correction",)),
    *experts_of(f"{LAYER}.mlp"),
    *shared_mlp(f"{LAYER}.mlp.shared_experts"),
)
_TENSORS = (*EMBEDDING, *NORMS, *_LATENT_ATTENTION, *_FEED_FORWARD, *HEAD)
_INDEXER, _INDEX_TARGET = f"{_ATTENTION}.indexer", f"{_TARGET}.indexer"
_SPARSE_TENSORS = (
    *_TENSORS,
    *linear(f"{_INDEXER}.wq_b", f"{_INDEX_TARGET}.q_proj"),
    *linear(f"{_INDEXER}.wk", f"{_INDEX_TARGET}.k_proj"),
    *norm(f"{_INDEXER}.k_norm", f"{_INDEX_TARGET}.k_norm"),
    *linear(f"{_INDEXER}.weights_proj", f"{_INDEX_TARGET}.weights_proj"),
)
_GLM_TENSORS = (*EMBEDDING, *NORMS, *ATTENTION, *QK_NORMS, *_FEED_FORWARD, *HEAD)


def _attention(
    fields: Fields,
    values: Mapping[str, Any],
    *,
    is_interleaved: bool,
    index: Mapping[str, Any] | None = None,
    **defaults: int,
) -> dict[str, Any]:
    """Latent attention, and what the cache holds of it; `defaults` are those of DeepSeek where they are not given.
    `index` are fields of `MLAConfig` of an indexer."""
    defaults = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, **defaults}
    rank = None
    if "q_lora_rank" not in fields.data or fields.data["q_lora_rank"] is not None:
        rank = fields.integer("q_lora_rank", defaults["q_lora_rank"])
    mla = MLAConfig(
        fields.integer("kv_lora_rank", defaults["kv_lora_rank"]),
        values["rope"].rotary_dim,
        fields.integer("qk_nope_head_dim", defaults["qk_nope_head_dim"]),
        fields.integer("v_head_dim", defaults["v_head_dim"]),
        rank,
        is_interleaved,
        **(index or {}),
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
    return {**express_sizes(moe), "first_k_dense_replace": first}


def express_sizes(moe: MoEConfig) -> dict[str, Any]:
    """Fields of config.json of experts with V3's router."""
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.expert_size,
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
    sizes = {"expert_size": 2048, "num_experts": 256, "per_token": 8, "scale": 2.5}
    moe = _sigmoid_experts(fields, values, 3, num_groups=8, num_chosen_groups=4, **sizes)
    is_interleaved = fields.boolean("rope_interleave", True)
    return {**_attention(fields, values, is_interleaved=is_interleaved), "moe": moe}


def _sigmoid_experts(
    fields: Fields,
    values: Mapping[str, Any],
    first_dense: int,
    *,
    num_groups: int,
    num_chosen_groups: int,
    **sizes: Any,
) -> MoEConfig:
    """V3's experts; the arguments are defaults."""
    return _experts(
        fields,
        values,
        first_dense,
        1,
        scoring="sigmoid",
        normalize=fields.boolean("norm_topk_prob", True),
        num_groups=fields.integer("n_group", num_groups),
        num_chosen_groups=fields.integer("topk_group", num_chosen_groups),
        group_score="top2_sum",
        has_correction_bias=True,
        **sizes,
    )


def _express_v3(config: ModelConfig) -> dict[str, Any]:
    data = {**_express_attention(config), **_express_experts(config), "num_nextn_predict_layers": 0}
    assert config.mla is not None
    return {**data, "rope_interleave": config.mla.is_interleaved}


def _glm(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {"expert_size": 1408, "num_experts": 128, "per_token": 8, "scale": 1.0}
    return {"moe": _sigmoid_experts(fields, values, 1, num_groups=1, num_chosen_groups=1, **sizes)}


def _express_glm(config: ModelConfig) -> dict[str, Any]:
    return {**_express_experts(config), "num_nextn_predict_layers": 0}


def _glm_lite(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {"expert_size": 1536, "num_experts": 64, "per_token": 4, "scale": 1.8}
    moe = _sigmoid_experts(fields, values, 1, num_groups=1, num_chosen_groups=1, **sizes)
    moe = _in_named_layers(fields, moe, values["num_layers"])
    defaults: dict[str, Any] = {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}
    is_interleaved = fields.boolean("rope_interleave", True)
    return {**_attention(fields, values, is_interleaved=is_interleaved, **defaults), "moe": moe}


def _in_named_layers(fields: Fields, moe: MoEConfig, count: int) -> MoEConfig:
    """The experts in the layers of `mlp_layer_types`, if config.json has it."""
    kinds = fields.data.get("mlp_layer_types")
    if kinds is None:
        return moe
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in ("dense", "sparse") for kind in kinds):
        fields.problem("mlp_layer_types", f"must list 'dense' or 'sparse' for each of {count} layers, got {kinds!r}")
        kinds = []
    return replace(moe, layers=tuple(i for i, kind in enumerate(kinds) if kind == "sparse"))


def _express_glm_lite(config: ModelConfig) -> dict[str, Any]:
    data = {**_express_attention(config), **_express_named_layers(config), "num_nextn_predict_layers": 0}
    return {**data, "rope_interleave": config.mla is None or config.mla.is_interleaved}


def _express_named_layers(config: ModelConfig) -> dict[str, Any]:
    moe = mixture(config)
    kinds = ["sparse" if layer in moe.layers else "dense" for layer in range(config.num_layers)]
    return {**express_sizes(moe), "mlp_layer_types": kinds}


def _one_kind(data: Mapping[str, Any]) -> dict[str, Any]:
    """Without `layer_types`, if all are attention with an indexer: the common code knows other kinds only."""
    kinds = data.get("layer_types")
    is_usual = isinstance(kinds, list) and all(kind == "indexed_attention" for kind in kinds)
    return {name: value for name, value in data.items() if name != "layer_types" or not is_usual}


def _index(fields: Fields, heads: int, *, is_interleaved: bool) -> dict[str, Any]:
    """The fields of `MLAConfig` of an indexer in every layer."""
    for name, every in (("indexer_types", "full"), ("index_topk_pattern", "F")):
        found = fields.data.get(name)
        is_list = isinstance(found, list | str) and all(one in (every, "full") for one in found)
        if found is not None and not is_list:
            fields.problem(name, f"{found!r} is not supported: every layer has an indexer of its own")
    return {
        "index_topk": fields.integer("index_topk", 2048),
        "index_heads": fields.integer("index_n_heads", heads),
        "index_size": fields.integer("index_head_dim", 128),
        "is_index_interleaved": is_interleaved,
    }


def _v32(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {"expert_size": 2048, "num_experts": 256, "per_token": 8, "scale": 2.5}
    moe = _sigmoid_experts(fields, values, 3, num_groups=8, num_chosen_groups=4, **sizes)
    index = _index(fields, 64, is_interleaved=False)
    moe = _in_named_layers(fields, moe, values["num_layers"])
    return {**_attention(fields, values, is_interleaved=True, index=index), "moe": moe}


def _glm_dsa(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {"expert_size": 2048, "num_experts": 256, "per_token": 8, "scale": 2.5}
    moe = _sigmoid_experts(fields, values, 3, num_groups=1, num_chosen_groups=1, **sizes)
    index = _index(fields, 32, is_interleaved=True)
    defaults = {"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256}
    moe = _in_named_layers(fields, moe, values["num_layers"])
    return {**_attention(fields, values, is_interleaved=True, index=index, **defaults), "moe": moe}


def _express_sparse(config: ModelConfig) -> dict[str, Any]:
    mla = config.mla
    assert mla is not None
    return {
        **_express_attention(config),
        **_express_named_layers(config),
        "index_topk": mla.index_topk,
        "index_n_heads": mla.index_heads,
        "index_head_dim": mla.index_size,
        "num_nextn_predict_layers": 0,
    }


def _mistral4_rope(data: Mapping[str, Any]) -> dict[str, Any]:
    """Without `partial_rotary_factor`, if it is the rotated share of a whole head, as Transformers writes it; we count
    from the rotated part."""
    rotated, rest = data.get("qk_rope_head_dim", 64), data.get("qk_nope_head_dim", 64)
    is_share = isinstance(rotated, int) and isinstance(rest, int) and rotated > 0 and rest > 0
    data = dict(data)
    for name in ("rope_parameters", "rope_scaling"):
        settings = data.get(name)
        if is_share and isinstance(settings, Mapping):
            share = settings.get("partial_rotary_factor")
            if isinstance(share, float) and int((rotated + rest) * share) == rotated:
                data[name] = {key: value for key, value in settings.items() if key != "partial_rotary_factor"}
    return data


def _mistral4(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    moe = _experts(
        fields,
        values,
        0,
        1,
        expert_size=2048,
        num_experts=128,
        per_token=4,
        scale=1.0,
        normalize=fields.boolean("norm_topk_prob", True),
        num_groups=fields.integer("n_group", 1),
        num_chosen_groups=fields.integer("topk_group", 1),
        group_score="top2_sum",
    )
    defaults: dict[str, Any] = {"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64}
    is_interleaved = fields.boolean("rope_interleave", True)
    return {**_attention(fields, values, is_interleaved=is_interleaved, **defaults), "moe": moe}


def _express_mistral4(config: ModelConfig) -> dict[str, Any]:
    data = {**_express_attention(config), **_express_experts(config)}
    return {**data, "rope_interleave": config.mla is None or config.mla.is_interleaved}


_SHARED: dict[str, Any] = {
    "output_bias": "attention_bias",
    "names": {"head_dim": "qk_rope_head_dim"},
    "head_dim": 64,
}
# Every layer from `first_k_dense_replace` on has experts.
_V2_SUPPORTED = {"mlp_bias": (False,), "moe_layer_freq": (1,)}
_V3_ROUTER = {"moe_layer_freq": (1,), "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)}

_ONE_INDEXER = {"index_topk_freq": (1,), "rope_interleave": (True,), "mlp_bias": (False,)}

DEEPSEEK: tuple[Family, ...] = (
    Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        title="DeepSeek-V2",
        examples="DeepSeek-V2, V2-Lite, Coder-V2",
        max_position_embeddings=2048,
        supported=_V2_SUPPORTED,
        tensors=_TENSORS,
        build=_v2,
        express=_express_v2,
        **_SHARED,
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        title="DeepSeek-V3",
        examples="DeepSeek-V3, V3.1, R1, Kimi K2",
        max_position_embeddings=4096,
        supported=_V3_ROUTER,
        tensors=_TENSORS,
        build=_v3,
        express=_express_v3,
        has_later_layers=True,
        **_SHARED,
    ),
    Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        title="GLM-4 mixtures",
        examples="GLM-4.5, 4.5-Air, 4.6, 4.7",
        max_position_embeddings=131072,
        num_kv_heads=8,
        norm_eps=1e-5,
        qkv_bias="attention_bias",
        rope=RopeForm(partial=0.5, has_partial=True),
        settings=(Setting("qk_norm", "use_qk_norm", "boolean", False),),
        supported=_V3_ROUTER,
        tensors=_GLM_TENSORS,
        build=_glm,
        express=_express_glm,
        has_later_layers=True,
    ),
    Family(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        title="GLM-4 mixtures, lite",
        examples="GLM-4.7-Flash",
        max_position_embeddings=202752,
        norm_eps=1e-5,
        supported=_V3_ROUTER,
        tensors=_TENSORS,
        build=_glm_lite,
        express=_express_glm_lite,
        has_later_layers=True,
        **_SHARED,
    ),
    Family(
        "DeepseekV32ForCausalLM",
        "deepseek_v32",
        title="DeepSeek-V3.2",
        examples="DeepSeek-V3.2-Exp, V3.2",
        max_position_embeddings=163840,
        supported={**_V3_ROUTER, **_ONE_INDEXER, "indexer_rope_interleave": (False,)},
        tensors=_SPARSE_TENSORS,
        normalize=_one_kind,
        build=_v32,
        express=_express_sparse,
        notes=("sparse attention: an indexer chooses the tokens",),
        has_later_layers=True,
        **_SHARED,
    ),
    Family(
        "GlmMoeDsaForCausalLM",
        "glm_moe_dsa",
        title="GLM-5",
        examples="GLM-5",
        max_position_embeddings=202752,
        norm_eps=1e-5,
        supported={**_V3_ROUTER, **_ONE_INDEXER, "indexer_rope_interleave": (True,)},
        tensors=_SPARSE_TENSORS,
        normalize=_one_kind,
        build=_glm_dsa,
        express=_express_sparse,
        notes=("sparse attention: an indexer chooses the tokens",),
        has_later_layers=True,
        **_SHARED,
    ),
    Family(
        "Mistral4ForCausalLM",
        "mistral4",
        title="Mistral 4",
        examples="Mistral Small 4",
        max_position_embeddings=1048576,
        rope=RopeForm(
            has_query_scale=True,
            default={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        supported={"topk_method": (), "scoring_func": ("softmax",)},
        tensors=(
            *EMBEDDING,
            *NORMS,
            *_LATENT_ATTENTION,
            *GATED_MLP,
            *router(f"{LAYER}.mlp.gate"),
            *experts_of(f"{LAYER}.mlp")[::-1],  # the fused ones are those that are written
            *shared_mlp(f"{LAYER}.mlp.shared_experts"),
            *HEAD,
        ),
        normalize=_mistral4_rope,
        build=_mistral4,
        express=_express_mistral4,
        **_SHARED,
    ),
)
