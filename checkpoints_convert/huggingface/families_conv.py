"""LFM2 and its mixture: short convolutions between layers of attention."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from checkpoints_convert.huggingface.families_delta import read_kinds, take_kinds
from checkpoints_convert.huggingface.families_llama import EMBEDDING, HEAD, LAYER, TARGET
from checkpoints_convert.huggingface.families_mixtures import EXPERTS, mixture, without_experts
from checkpoints_convert.huggingface.family import Family, Fields, RopeForm
from checkpoints_convert.huggingface.rules import INDEX, TensorRule, linear, norm
from jaxinfer.models import ConvConfig, ModelConfig, MoEConfig
from jaxinfer.models.recurrent_config import LayerKind

_KINDS: dict[str, LayerKind] = {"full_attention": "attention", "conv": "short_conv"}
_ATTENTION, _MLP = f"{TARGET}.attention", f"{TARGET}.mlp"
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_TENSORS = (
    *EMBEDDING,
    *norm(f"{LAYER}.operator_norm", f"{TARGET}.attention_norm"),
    *norm(f"{LAYER}.ffn_norm", f"{TARGET}.mlp_norm"),
    *norm("model.embedding_norm", "final_norm"),
    *(rule for name in "qkv" for rule in linear(f"{LAYER}.self_attn.{name}_proj", f"{_ATTENTION}.{name}_proj")),
    *linear(f"{LAYER}.self_attn.out_proj", f"{_ATTENTION}.o_proj"),
    *norm(f"{LAYER}.self_attn.q_layernorm", f"{_ATTENTION}.q_norm"),
    *norm(f"{LAYER}.self_attn.k_layernorm", f"{_ATTENTION}.k_norm"),
    *linear(f"{LAYER}.conv.in_proj", f"{TARGET}.recurrent.in_proj"),
    *linear(f"{LAYER}.conv.out_proj", f"{TARGET}.recurrent.out_proj"),
    TensorRule(f"{LAYER}.conv.conv.weight", (f"{TARGET}.recurrent.conv_weight",)),
    TensorRule(f"{LAYER}.conv.conv.bias", (f"{TARGET}.recurrent.conv_bias",)),
    *(rule for own, name in _PARTS.items() for rule in linear(f"{LAYER}.feed_forward.{own}", f"{_MLP}.{name}")),
    TensorRule(f"{LAYER}.feed_forward.gate.weight", (f"{_MLP}.router.weight",), transpose=True),
    TensorRule(f"{LAYER}.feed_forward.expert_bias", (f"{_MLP}.router.correction",)),
    *(
        TensorRule(f"{LAYER}.feed_forward.experts.{INDEX}.{own}.weight", (f"{EXPERTS}.{name}.weight",), transpose=True)
        for own, name in _PARTS.items()
    ),
    # As Transformers 5 has them in memory.
    TensorRule(
        f"{LAYER}.feed_forward.experts.gate_up_proj",
        (f"{EXPERTS}.gate_proj.weight", f"{EXPERTS}.up_proj.weight"),
        transpose=True,
    ),
    TensorRule(f"{LAYER}.feed_forward.experts.down_proj", (f"{EXPERTS}.down_proj.weight",), transpose=True),
    *HEAD,
)


def _normalize(data: Mapping[str, Any]) -> dict[str, Any]:
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


def _build(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    conv = ConvConfig(fields.integer("conv_L_cache", 3), values["hidden_size"], fields.boolean("conv_bias", False))
    return {"conv": conv, "layer_kinds": read_kinds(fields, values["num_layers"], _KINDS)}


def _express(config: ModelConfig) -> dict[str, Any]:
    conv = config.conv
    if conv is None:
        raise ValueError(f"{config.architecture} needs short convolutions, and the configuration has none")
    names = {kind: name for name, kind in _KINDS.items()}
    return {
        "conv_L_cache": conv.width,
        "conv_bias": conv.has_bias,
        "layer_types": [names[config.layer_kind(i)] for i in range(config.num_layers)],
        "block_auto_adjust_ff_dim": False,
    }


def _build_mixture(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    first, count = fields.integer("num_dense_layers", 2, least=0), values["num_layers"]
    moe = MoEConfig(
        fields.integer("num_experts", 32),
        fields.integer("num_experts_per_tok", 4),
        fields.integer("moe_intermediate_size", 1792),
        tuple(range(min(first, count), count)),
        scoring="sigmoid",
        normalize=fields.boolean("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        has_correction_bias=fields.boolean("use_expert_bias", True),
    )
    return {**_build(fields, values), "moe": moe}


def _express_mixture(config: ModelConfig) -> dict[str, Any]:
    moe = mixture(config)
    data = _express(config)
    del data["block_auto_adjust_ff_dim"]
    return {
        **data,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.expert_size,
        "num_dense_layers": config.num_layers - len(moe.layers),
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scale,
        "use_expert_bias": moe.has_correction_bias,
    }


_DENSE = Family(
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
    tensors=without_experts(_TENSORS),
    normalize=_normalize,
    build=_build,
    express=_express,
)

SHORT_CONV: tuple[Family, ...] = (
    _DENSE,
    replace(
        _DENSE,
        architecture="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        title="LFM2-MoE",
        examples="LFM2-8B-A1B",
        defaults={},
        tensors=_TENSORS,
        build=_build_mixture,
        express=_express_mixture,
    ),
)
