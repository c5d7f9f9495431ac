"""Families with a mixture of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, gpt-oss."""

from collections.abc import Mapping, Sequence
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
from checkpoints_convert.huggingface.family import Family, Fields, RopeForm
from checkpoints_convert.huggingface.rules import INDEX, TensorRule, linear
from jaxinfer.models import ModelConfig, MoEConfig

EXPERTS = f"{TARGET}.mlp.experts"
_GATE, _UP, _DOWN = (f"{EXPERTS}.{name}_proj.weight" for name in ("gate", "up", "down"))


def experts_of(source: str, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")) -> tuple[TensorRule, ...]:
    """Experts one by one, as repositories and `save_pretrained` have them, or all in two tensors [E, 2 F, D] and
    [E, D, F], as Transformers 5 has them in memory."""
    each = (TensorRule(f"{source}.experts.{INDEX}.{name}.weight", (target,), transpose=True)
            for name, target in zip(names, (_GATE, _UP, _DOWN), strict=True))  # fmt: skip
    return (
        *each,
        TensorRule(f"{LAYER}.mlp.experts.gate_up_proj", (_GATE, _UP), transpose=True),
        TensorRule(f"{LAYER}.mlp.experts.down_proj", (_DOWN,), transpose=True),
    )


def router(source: str) -> tuple[TensorRule, ...]:
    return (TensorRule(f"{source}.weight", (f"{TARGET}.mlp.router.weight",), transpose=True),)


def shared_mlp(source: str) -> tuple[TensorRule, ...]:
    """The MLP that all tokens go through."""
    names = ("gate_proj", "up_proj", "down_proj")
    return tuple(rule for name in names for rule in linear(f"{source}.{name}", f"{TARGET}.mlp.shared.{name}"))


_COMMON = (*EMBEDDING, *NORMS, *ATTENTION, *HEAD)
_MIXTRAL_TENSORS = (
    *_COMMON,
    *router(f"{LAYER}.block_sparse_moe.gate"),
    *router(f"{LAYER}.mlp.gate"),
    *experts_of(f"{LAYER}.block_sparse_moe", ("w1", "w3", "w2")),
)
QWEN_EXPERTS = (
    *router(f"{LAYER}.mlp.gate"),
    *experts_of(f"{LAYER}.mlp"),
    *shared_mlp(f"{LAYER}.mlp.shared_expert"),
    TensorRule(f"{LAYER}.mlp.shared_expert_gate.weight", (f"{TARGET}.mlp.shared_gate",), transpose=True),
)
_QWEN_TENSORS = (*_COMMON, *QK_NORMS, *GATED_MLP, *QWEN_EXPERTS)
# Gates and ups lie in turn along 2 F, and nothing is transposed.
_IN_TURN = "intermediate_size"
_GPT_OSS_TENSORS = (
    *_COMMON,
    TensorRule(f"{LAYER}.self_attn.sinks", (f"{TARGET}.attention.sinks",)),
    *linear(f"{LAYER}.mlp.router", f"{TARGET}.mlp.router"),
    TensorRule(f"{LAYER}.mlp.experts.gate_up_proj", (_GATE, _UP), groups=_IN_TURN),
    TensorRule(
        f"{LAYER}.mlp.experts.gate_up_proj_bias",
        (f"{EXPERTS}.gate_proj.bias", f"{EXPERTS}.up_proj.bias"),
        groups=_IN_TURN,
    ),
    TensorRule(f"{LAYER}.mlp.experts.down_proj", (_DOWN,)),
    TensorRule(f"{LAYER}.mlp.experts.down_proj_bias", (f"{EXPERTS}.down_proj.bias",)),
)


def _num_experts(fields: Fields, default: int) -> int:
    """By the name that Transformers 5 writes for all families, or Qwen's before."""
    return fields.integer("num_experts" if fields.has("num_experts") else "num_local_experts", default)


def _mixtral(fields: Fields, values: Mapping[str, Any], num_experts: int = 8, per_token: int = 2) -> dict[str, Any]:
    """Experts of the width of the MLP in all layers."""
    num_experts, per_token = _num_experts(fields, num_experts), fields.integer("num_experts_per_tok", per_token)
    layers = tuple(range(values["num_layers"]))
    return {"moe": MoEConfig(num_experts, per_token, values["intermediate_size"], layers)}


def _express_mixtral(config: ModelConfig) -> dict[str, Any]:
    moe = mixture(config)
    return {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.num_experts_per_token}


def without_experts(rules: tuple[TensorRule, ...]) -> tuple[TensorRule, ...]:
    """The rules of the dense models of a family that also has mixtures."""
    parts = (".mlp.experts.", ".mlp.router.", ".mlp.shared")
    return tuple(rule for rule in rules if not any(part in target for part in parts for target in rule.targets))


def mixture(config: ModelConfig) -> MoEConfig:
    """Raises ValueError for a configuration without experts."""
    if config.moe is None:
        raise ValueError(f"{config.architecture} needs a mixture of experts, and the configuration has none")
    return config.moe


def qwen_mixture(num_experts: int, per_token: int, expert_size: int, shared_size: int = 0):
    """`build` of Qwen's mixtures, with their defaults where config.json has no value."""

    def build(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
        step = fields.integer("decoder_sparse_step", 1)
        dense = fields.data.get("mlp_only_layers") or []
        if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
            fields.problem("mlp_only_layers", f"must be a list of layers, got {dense!r}")
            dense = []
        shared = fields.integer("shared_expert_intermediate_size", shared_size) if shared_size else 0
        moe = MoEConfig(
            _num_experts(fields, num_experts),
            fields.integer("num_experts_per_tok", per_token),
            fields.integer("moe_intermediate_size", expert_size),
            tuple(i for i in range(values["num_layers"]) if i not in dense and (i + 1) % step == 0),
            normalize=fields.boolean("norm_topk_prob", False),
            shared_size=shared,
            has_shared_gate=bool(shared),
        )
        return {"moe": moe}

    return build


def express_qwen(config: ModelConfig) -> dict[str, Any]:
    moe = mixture(config)
    data = {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.expert_size,
        "norm_topk_prob": moe.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(config.num_layers) if i not in moe.layers],
    }
    if moe.shared_size:
        data["shared_expert_intermediate_size"] = moe.shared_size
    return data


def _express_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {**express_qwen(config), "use_sliding_window": any(config.sliding_windows)}


def _qwen2_windows(data: Mapping[str, Any]) -> dict[str, Any]:
    """Of the layers below max_window_layers every other one has a window, the first among them."""
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


def _gpt_oss(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    moe = replace(
        _mixtral(fields, values, 128, 4)["moe"],
        scoring="softmax_of_chosen",
        has_router_bias=True,
        has_expert_bias=True,
        clamp=fields.number("swiglu_limit", 7.0),
        clamp_slope=fields.number("swiglu_alpha", 1.702),
    )
    return {"moe": moe}


def _express_gpt_oss(config: ModelConfig) -> dict[str, Any]:
    moe = mixture(config)
    return {**_express_mixtral(config), "swiglu_limit": moe.clamp, "swiglu_alpha": moe.clamp_slope}


MIXTURES: tuple[Family, ...] = (
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
        tensors=_MIXTRAL_TENSORS,
        build=_mixtral,
        express=_express_mixtral,
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
        tensors=_QWEN_TENSORS,
        normalize=_qwen2_windows,
        build=qwen_mixture(60, 4, 1408, 5632),
        express=express_qwen,
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
        tensors=_QWEN_TENSORS,
        normalize=_qwen3_windows,
        build=qwen_mixture(128, 8, 768),
        express=_express_qwen3,
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
            default={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
        fixed={"norm": "rms_float32", "has_sinks": True},
        tensors=_GPT_OSS_TENSORS,
        build=_gpt_oss,
        express=_express_gpt_oss,
    ),
)
