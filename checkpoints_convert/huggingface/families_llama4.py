"""Llama 4, the text part: layers that are not rotated, and experts whose inputs the router scales."""

from collections.abc import Mapping
from typing import Any

from checkpoints_convert.huggingface.families_llama import (
    ATTENTION,
    ATTENTION_BIAS,
    EMBEDDING,
    HEAD,
    LAYER,
    NORMS,
    TARGET,
)
from checkpoints_convert.huggingface.families_mixtures import EXPERTS, mixture
from checkpoints_convert.huggingface.family import Family, Fields, RopeForm, Setting
from checkpoints_convert.huggingface.rules import INDEX, TensorRule, linear
from jaxinfer.models import ModelConfig, MoEConfig

_FEED_FORWARD, _MLP = f"{LAYER}.feed_forward", f"{TARGET}.mlp"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_TENSORS = (
    *EMBEDDING,
    *NORMS,
    *ATTENTION,
    *(rule for name in _PROJECTIONS for rule in linear(f"{_FEED_FORWARD}.{name}", f"{_MLP}.{name}")),
    TensorRule(f"{_FEED_FORWARD}.router.weight", (f"{_MLP}.router.weight",), transpose=True),
    # [E, D, 2 F] and [E, F, D], not transposed
    TensorRule(f"{_FEED_FORWARD}.experts.gate_up_proj", (f"{EXPERTS}.gate_proj.weight", f"{EXPERTS}.up_proj.weight")),
    TensorRule(f"{_FEED_FORWARD}.experts.down_proj", (f"{EXPERTS}.down_proj.weight",)),
    # One by one, as quantized checkpoints have them
    *(
        TensorRule(f"{_FEED_FORWARD}.experts.{INDEX}.{name}.weight", (f"{EXPERTS}.{name}.weight",), transpose=True)
        for name in _PROJECTIONS
    ),
    *(
        rule
        for name in _PROJECTIONS
        for rule in linear(f"{_FEED_FORWARD}.shared_expert.{name}", f"{_MLP}.shared.{name}")
    ),
    *HEAD,
)
_CHUNKED, _FULL = "chunked_attention", "full_attention"


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """A list that is empty where it is absent, and a switch that the first files give as a number."""
    data = {name: value for name, value in data.items() if name != "no_rope_layers" or value != []}
    tuning = data.get("attn_temperature_tuning")
    if isinstance(tuning, int):
        data["attn_temperature_tuning"] = bool(tuning)
    if "layer_types" in data:  # which name chunks, and no windows
        data[_CHUNKS] = data.pop("layer_types")
    return data


_CHUNKS = "chunked_layers"


def _llama4(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    temperature = fields.number("attn_scale", 0.1) if fields.boolean("attn_temperature_tuning", True) else None
    return {
        "moe": _experts(fields, values),
        "attention_chunk": _chunk(fields, values),
        "query_temperature": temperature,
        "query_temperature_period": fields.integer("floor_scale", 8192),
    }


def _experts(fields: Fields, values: Mapping[str, Any]) -> MoEConfig:
    count, step = values["num_layers"], fields.integer("interleave_moe_layer_step", 1)
    layers = fields.data.get("moe_layers")
    if layers is None:
        layers = list(range(step - 1, count, step))
    if not isinstance(layers, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in layers):
        fields.problem("moe_layers", f"must be a list of layers, got {layers!r}")
        layers = []
    size = fields.integer("expert_size", 8192)
    return MoEConfig(
        fields.integer("num_local_experts", 16),
        fields.integer("num_experts_per_tok", 1),
        size,
        tuple(sorted(set(layers))),
        scoring="sigmoid_of_chosen",
        scales_input=True,
        shared_size=size,
    )


def _chunk(fields: Fields, values: Mapping[str, Any]) -> int | None:
    """The size of the chunks of the rotated layers; None if no layer has chunks."""
    chunk = None
    if "attention_chunk_size" not in fields.data or fields.data["attention_chunk_size"] is not None:
        chunk = fields.integer("attention_chunk_size", 8192)
    rotated = values["rotated_layers"] or (True,) * values["num_layers"]
    kinds = fields.data.get(_CHUNKS)
    if kinds is None or kinds == [_CHUNKED if is_rotated else _FULL for is_rotated in rotated]:
        return chunk if any(rotated) else None
    if kinds != [_FULL] * len(rotated):
        fields.problem("layer_types", f"{kinds!r} is not supported: chunks in the rotated layers, or in none, are")
    return None


def _express(config: ModelConfig) -> dict[str, Any]:
    moe = mixture(config)
    temperature = {} if config.query_temperature is None else {"attn_scale": config.query_temperature}
    kinds = {"layer_types": [_FULL] * config.num_layers} if config.attention_chunk is None else {}
    return {
        **kinds,
        "intermediate_size": moe.expert_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_layers": list(moe.layers),
        "attention_chunk_size": config.attention_chunk,
        "attn_temperature_tuning": config.query_temperature is not None,
        "floor_scale": config.query_temperature_period,
        **temperature,
    }


LLAMA4: tuple[Family, ...] = (
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
        tensors=_TENSORS,
        notes=(
            "queries that grow with the position in layers without rotation",
            "sequences within one attention chunk",
        ),
        normalize=_fields,
        build=_llama4,
        express=_express,
    ),
)
