"""DeepSeek-V2 and V3, and the families with their blocks: latent attention, experts in groups, shared experts. GLM-4.5
to 4.7 have the experts of V3, Mistral 4 has those of V2."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from checkpoints_convert.huggingface.families_llama import MISTRAL_YARN
from checkpoints_convert.huggingface.families_mixtures import expert_size, normalizes, num_experts, per_token
from checkpoints_convert.huggingface.family import (
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
    EMBEDDING,
    GATED_MLP,
    HEAD,
    LAYER,
    LLAMA_TENSORS,
    NORMS,
    TARGET,
    experts_of,
    router,
    shared_mlp,
)
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
_EXPERTS = (
    *router(f"{LAYER}.mlp.gate"),
    TensorRule(f"{LAYER}.mlp.gate.e_score_correction_bias", (f"{TARGET}.mlp.router.correction",)),
    *experts_of(f"{LAYER}.mlp"),
    *shared_mlp(f"{LAYER}.mlp.shared_experts"),
)
_DENSE = (*EMBEDDING, *NORMS, *_LATENT_ATTENTION, *GATED_MLP, *HEAD)
_INDEXER, _INDEX_TARGET = f"{_ATTENTION}.indexer", f"{_TARGET}.indexer"
_SPARSE_TENSORS = (
    *(*_DENSE, *_EXPERTS),
    *linear(f"{_INDEXER}.wq_b", f"{_INDEX_TARGET}.q_proj"),
    *linear(f"{_INDEXER}.wk", f"{_INDEX_TARGET}.k_proj"),
    *norm(f"{_INDEXER}.k_norm", f"{_INDEX_TARGET}.k_norm"),
    *linear(f"{_INDEXER}.weights_proj", f"{_INDEX_TARGET}.weights_proj"),
)


def _latent(latent: int = 512, query: int = 1536, nope: int = 128, value: int = 128) -> tuple[Setting, ...]:
    """Sizes of latent attention: fields of `MLAConfig`, with their defaults."""
    return (
        Setting("latent_size", "kv_lora_rank", "integer", latent),
        Setting("nope_size", "qk_nope_head_dim", "integer", nope),
        Setting("value_size", "v_head_dim", "integer", value),
        Setting("query_rank", "q_lora_rank", "integer_or_null", query),
    )


def _indexer(heads: int) -> tuple[Setting, ...]:
    """Sizes of an indexer in every layer."""
    return (
        Setting("index_topk", "index_topk", "integer", 2048),
        Setting("index_heads", "index_n_heads", "integer", heads),
        Setting("index_size", "index_head_dim", "integer", 128),
    )


_INTERLEAVED = Setting("is_interleaved", "rope_interleave", "boolean", True)


def _v2_sizes(count: int, chosen: int, size: int, scale: float, *other_names: str) -> tuple[Setting, ...]:
    """Settings of V2's experts. Defaults: count: number of experts; chosen: of a token; size: width of one; scale:
    factor of their output. other_names: further fields that may hold the number of experts."""
    of_scale = Setting("scale", "routed_scaling_factor", "number", scale)
    return num_experts(count, "n_routed_experts", *other_names), per_token(chosen), expert_size(size), of_scale


def v3_sizes(
    count: int, chosen: int, size: int, scale: float, *other_names: str, groups: tuple[int, int] = (1, 1)
) -> tuple[Setting, ...]:
    """Settings of V3's experts. groups: defaults of the number of groups and of groups that a token may use; others as
    in `_v2_sizes`."""
    return (
        *_v2_sizes(count, chosen, size, scale, *other_names),
        normalizes(True),
        Setting("num_groups", "n_group", "integer", groups[0]),
        Setting("num_chosen_groups", "topk_group", "integer", groups[1]),
    )


_SIGMOID: dict[str, Any] = {"scoring": "sigmoid", "group_score": "top2_sum", "has_correction_bias": True}


def _mscale(rope: RopeConfig) -> float:
    """The factor of YaRN on queries and keys, besides the rotation's (Transformers' `yarn_apply_mscale`)."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def _mixture(
    fields: Fields, values: Mapping[str, Any], settings: tuple[Setting, ...], first: int, shared: int, **fixed: Any
) -> MoEConfig:
    """The MoE configuration. first, shared: defaults of `first_k_dense_replace`, the first layer with experts, and of
    `n_shared_experts`."""
    sizes, count = read_settings(fields, settings), values["num_layers"]
    start = min(fields.integer("first_k_dense_replace", first, least=0), count)
    num_shared = fields.integer("n_shared_experts", shared, least=0)
    return MoEConfig(**sizes, layers=tuple(range(start, count)), shared_size=sizes["expert_size"] * num_shared, **fixed)


def _express_sizes(moe: MoEConfig) -> dict[str, Any]:
    return {**write_settings(moe, v3_sizes(1, 1, 1, 1.0)), "n_shared_experts": moe.shared_size // moe.expert_size}


def _express_experts(config: ModelConfig) -> dict[str, Any]:
    moe = part_of(config, "moe")
    first = config.num_layers - len(moe.layers)
    if moe.layers != tuple(range(first, config.num_layers)) or moe.shared_size % moe.expert_size:
        raise ValueError(f"{config.architecture}: experts in layers {moe.layers}, beside an MLP of {moe.shared_size}")
    return {**_express_sizes(moe), "first_k_dense_replace": first}


def _latent_attention(settings: tuple[Setting, ...], **fixed: Any) -> ConfigPart:
    """Latent attention, and what the cache holds of it. fixed: fields of `MLAConfig` that all models share."""

    def build(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        mla = MLAConfig(rope_size=values["rope"].rotary_dim, **read_settings(fields, settings), **fixed)
        scale = mla.query_size**-0.5 * _mscale(values["rope"]) ** 2
        return {"mla": mla, "num_kv_heads": 1, "head_dim": mla.key_size, "attention_scale": scale, "qkv_bias": False}

    def express(config: ModelConfig) -> dict[str, Any]:
        mla = part_of(config, "mla")
        sizes = write_settings(mla, settings)
        return {"num_key_value_heads": config.num_heads, "qk_rope_head_dim": mla.rope_size, **sizes}

    return ConfigPart(build, express)


def _v2(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        fields.problem("topk_method", f"{method!r} is not one of 'greedy', 'group_limited_greedy'")
    groups = {}
    if method == "group_limited_greedy":
        groups = {"num_groups": fields.integer("n_group"), "num_chosen_groups": fields.integer("topk_group")}
    # Transformers' DeepSeek-V2 has norm_topk_prob and does not apply it.
    if fields.boolean("norm_topk_prob", False):
        fields.problem("norm_topk_prob", "is true, which is not supported: no DeepSeek-V2 was trained with it")
    return {"moe": _mixture(fields, values, _v2_sizes(64, 6, 1407, 1.0), 0, 2, normalize=False, **groups)}


def _express_v2(config: ModelConfig) -> dict[str, Any]:
    method = "group_limited_greedy" if part_of(config, "moe").num_groups > 1 else "greedy"
    return {**_express_experts(config), "topk_method": method}


def _v3_experts(
    sizes: tuple[Setting, ...], *, first: int, router: Mapping[str, Any] = _SIGMOID, lists_layers: bool = False
) -> ConfigPart:
    """Experts of V3 and its successors.

    Args:
      first: default of the first layer with experts. router: fields of `MoEConfig` that all models share.
      lists_layers: config.json may name each layer with experts, and does so where it is written.
    """

    def build(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        moe = _mixture(fields, values, sizes, first, 1, **router)
        return {"moe": _in_named_layers(fields, moe, values["num_layers"]) if lists_layers else moe}

    def express(config: ModelConfig) -> dict[str, Any]:
        later = {"num_nextn_predict_layers": 0} if router is _SIGMOID else {}
        return {**(_express_named_layers if lists_layers else _express_experts)(config), **later}

    return ConfigPart(build, express)


def _sparse(
    latent: tuple[Setting, ...], heads: int, groups: tuple[int, int], *, is_index_interleaved: bool
) -> tuple[ConfigPart, ...]:
    """Parts of models with an indexer of so many heads."""
    return (
        ConfigPart(_check_indexers),
        _latent_attention((*latent, *_indexer(heads)), is_interleaved=True, is_index_interleaved=is_index_interleaved),
        _v3_experts(v3_sizes(256, 8, 2048, 2.5, groups=groups), first=3, lists_layers=True),
    )


def _check_indexers(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    for name, every in (("indexer_types", "full"), ("index_topk_pattern", "F")):
        kinds = fields.data.get(name)
        is_list = isinstance(kinds, list | str) and all(kind in (every, "full") for kind in kinds)
        if kinds is not None and not is_list:
            fields.problem(name, f"{kinds!r} is not supported: every layer has an indexer of its own")
    return {}


def _in_named_layers(fields: Fields, moe: MoEConfig, count: int) -> MoEConfig:
    """The experts in the layers of `mlp_layer_types`, if config.json has it."""
    kinds = fields.data.get("mlp_layer_types")
    if kinds is None:
        return moe
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in ("dense", "sparse") for kind in kinds):
        fields.problem("mlp_layer_types", f"must list 'dense' or 'sparse' for each of {count} layers, got {kinds!r}")
        kinds = []
    return replace(moe, layers=tuple(i for i, kind in enumerate(kinds) if kind == "sparse"))


def _express_named_layers(config: ModelConfig) -> dict[str, Any]:
    moe = part_of(config, "moe")
    kinds = ["sparse" if layer in moe.layers else "dense" for layer in range(config.num_layers)]
    return {**_express_sizes(moe), "mlp_layer_types": kinds}


def _one_kind(data: Mapping[str, Any]) -> dict[str, Any]:
    """Without `layer_types`, if all are attention with an indexer: the common code knows other kinds only."""
    kinds = data.get("layer_types")
    is_usual = isinstance(kinds, list) and all(kind == "indexed_attention" for kind in kinds)
    return {name: value for name, value in data.items() if name != "layer_types" or not is_usual}


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


_SHARED: dict[str, Any] = {
    "output_bias": "attention_bias",
    "names": {"head_dim": "qk_rope_head_dim"},
    "head_dim": 64,
}
# Every layer from `first_k_dense_replace` on has experts.
_V2_SUPPORTED = {"mlp_bias": (False,), "moe_layer_freq": (1,), "scoring_func": ("softmax",)}
_V3_ROUTER = {"moe_layer_freq": (1,), "topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)}

_ONE_INDEXER = {"index_topk_freq": (1,), "rope_interleave": (True,), "mlp_bias": (False,)}

_V32 = Family(
    "DeepseekV32ForCausalLM",
    "deepseek_v32",
    title="DeepSeek-V3.2",
    examples="DeepSeek-V3.2-Exp, V3.2",
    max_position_embeddings=163840,
    supported={**_V3_ROUTER, **_ONE_INDEXER, "indexer_rope_interleave": (False,)},
    tensors=_SPARSE_TENSORS,
    normalize=_one_kind,
    parts=_sparse(_latent(), 64, (8, 4), is_index_interleaved=False),
    notes=("sparse attention: an indexer chooses the tokens",),
    has_later_layers=True,
    **_SHARED,
)

DEEPSEEK: tuple[Family, ...] = (
    Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        title="DeepSeek-V2",
        examples="DeepSeek-V2, V2-Lite, Coder-V2",
        max_position_embeddings=2048,
        supported=_V2_SUPPORTED,
        tensors=(*_DENSE, *_EXPERTS),
        parts=(_latent_attention(_latent(), is_interleaved=True), ConfigPart(_v2, _express_v2)),
        **_SHARED,
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        title="DeepSeek-V3",
        examples="DeepSeek-V3, V3.1, R1, Kimi K2",
        max_position_embeddings=4096,
        supported=_V3_ROUTER,
        tensors=(*_DENSE, *_EXPERTS),
        parts=(
            _latent_attention((*_latent(), _INTERLEAVED)),
            _v3_experts(v3_sizes(256, 8, 2048, 2.5, groups=(8, 4)), first=3),
        ),
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
        tensors=(*LLAMA_TENSORS, *_EXPERTS),
        parts=(_v3_experts(v3_sizes(128, 8, 1408, 1.0), first=1),),
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
        tensors=(*_DENSE, *_EXPERTS),
        parts=(
            _latent_attention((*_latent(query=768, nope=192, value=256), _INTERLEAVED)),
            _v3_experts(v3_sizes(64, 4, 1536, 1.8), first=1, lists_layers=True),
        ),
        has_later_layers=True,
        **_SHARED,
    ),
    _V32,
    replace(
        _V32,
        architecture="GlmMoeDsaForCausalLM",
        model_type="glm_moe_dsa",
        title="GLM-5",
        examples="GLM-5",
        max_position_embeddings=202752,
        norm_eps=1e-5,
        supported={**_V3_ROUTER, **_ONE_INDEXER, "indexer_rope_interleave": (True,)},
        parts=_sparse(_latent(query=2048, nope=192, value=256), 32, (1, 1), is_index_interleaved=True),
    ),
    Family(
        "Mistral4ForCausalLM",
        "mistral4",
        title="Mistral 4",
        examples="Mistral Small 4",
        max_position_embeddings=1048576,
        rope=RopeForm(
            has_query_scale=True,
            default=scaled("yarn", 128.0, 8192, rope_theta=10000.0, beta_fast=32.0, beta_slow=1.0, **MISTRAL_YARN),
        ),
        supported={"topk_method": (), "scoring_func": ("softmax",)},
        tensors=(
            *_DENSE,
            *router(f"{LAYER}.mlp.gate"),
            *experts_of(f"{LAYER}.mlp")[::-1],  # the fused ones are those that are written
            *shared_mlp(f"{LAYER}.mlp.shared_experts"),
        ),
        normalize=_mistral4_rope,
        parts=(
            _latent_attention((*_latent(256, 1024, 64), _INTERLEAVED)),
            _v3_experts(v3_sizes(128, 4, 2048, 1.0), first=0, router={"group_score": "top2_sum"}),
        ),
        **_SHARED,
    ),
)
