"""Llama 4, the text part: layers that are not rotated, and experts whose inputs the router scales."""

from collections.abc import Mapping
from typing import Any

from checkpoints_convert.huggingface.families_mixtures import layer_list, mixture, num_experts, per_token
from checkpoints_convert.huggingface.family import (
    ATTENTION_BIAS,
    Family,
    Fields,
    RopeForm,
    Setting,
    read_settings,
    write_settings,
)
from checkpoints_convert.huggingface.llama_tensors import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    LAYER,
    MLP,
    NORMS,
    TARGET,
    all_experts,
    each_expert,
    linears,
    router,
    shared_mlp,
)
from jaxinfer.models import ModelConfig, MoEConfig

_FEED_FORWARD = f"{LAYER}.feed_forward"
_TENSORS = (
    *(*EMBEDDING, *NORMS, *ATTENTION, *HEAD),
    *linears(_FEED_FORWARD, f"{TARGET}.mlp", MLP),
    *router(f"{_FEED_FORWARD}.router"),
    *all_experts(f"{_FEED_FORWARD}.experts", transpose=False),  # [E, D, 2 F] and [E, F, D]
    *each_expert(f"{_FEED_FORWARD}.experts"),
    *shared_mlp(f"{_FEED_FORWARD}.shared_expert"),
)
_SIZES = (
    num_experts(16, "num_local_experts"),
    per_token(1),
    Setting("expert_size", "expert_size", "integer", 8192),
)
_CHUNK = Setting("attention_chunk", "attention_chunk_size", "integer_or_null", 8192)
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
    layers = layer_list(fields, "moe_layers", list(range(step - 1, count, step)) if layers is None else layers)
    sizes = read_settings(fields, _SIZES)
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


def _express(config: ModelConfig) -> dict[str, Any]:
    moe = mixture(config)
    temperature = {} if config.query_temperature is None else {"attn_scale": config.query_temperature}
    kinds = {"layer_types": [_FULL] * config.num_layers} if config.attention_chunk is None else {}
    return {
        **kinds,
        **write_settings(moe, _SIZES[:2]),
        "intermediate_size": moe.expert_size,
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
