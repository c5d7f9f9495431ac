"""Gemma 4, the text part: heads by kind of layer, layers that share keys, inputs per layer, experts beside an MLP."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from checkpoints_convert.huggingface.families_llama import EMBEDDING_MULTIPLIER, GEMMA3, scaled_embedding
from checkpoints_convert.huggingface.family import ConfigPart, Family, Fields, RopeForm, Setting
from checkpoints_convert.huggingface.llama_tensors import LAYER, TARGET, all_experts
from checkpoints_convert.huggingface.rules import TensorRule, linear, norm
from jaxinfer.models import LayerInputConfig, ModelConfig, MoEConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"
_GLOBAL_HEAD_DIM, _LAYER_INPUT_SIZE, _VOCAB_SIZE = 512, 256, 262144
_BESIDE, _INPUT = f"{TARGET}.beside", f"{TARGET}.layer_input"
_TENSORS = (
    *GEMMA3.tensors,
    TensorRule("model.embed_tokens_per_layer.weight", ("layer_embed",)),
    *linear("model.per_layer_model_projection", "layer_embed_proj"),
    *norm("model.per_layer_projection_norm", "layer_embed_norm"),
    *norm(f"{LAYER}.post_feedforward_layernorm_1", f"{_BESIDE}.mlp_norm"),
    *norm(f"{LAYER}.pre_feedforward_layernorm_2", f"{_BESIDE}.input_norm"),
    *norm(f"{LAYER}.post_feedforward_layernorm_2", f"{_BESIDE}.output_norm"),
    TensorRule(f"{LAYER}.router.proj.weight", (f"{_BESIDE}.moe.router.weight",), transpose=True),
    TensorRule(f"{LAYER}.router.scale", (f"{_BESIDE}.moe.router.input_scale",)),
    TensorRule(f"{LAYER}.router.per_expert_scale", (f"{_BESIDE}.moe.router.expert_scale",)),
    *all_experts(f"{LAYER}.experts", f"{_BESIDE}.moe.experts"),
    *linear(f"{LAYER}.per_layer_input_gate", f"{_INPUT}.gate_proj"),
    *linear(f"{LAYER}.per_layer_projection", f"{_INPUT}.out_proj"),
    *norm(f"{LAYER}.post_per_layer_input_norm", f"{_INPUT}.norm"),
    TensorRule(f"{LAYER}.layer_scalar", (f"{TARGET}.scalar",)),
)


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """With types of layers, of which the last has no window, and with the heads of layers without a window in the
    fields of repositories; Transformers 5.23 writes them by layer."""
    data = scaled_embedding(data)
    count, types = data.get("num_hidden_layers"), data.get("layer_types")
    if types is None and isinstance(count, int) and 0 < count <= 1000:
        types = [_SLIDING if (layer + 1) % GEMMA3.full_every else _FULL for layer in range(count)]
    if isinstance(types, list) and types:
        data["layer_types"] = types = [*types[:-1], _FULL]
    by_layer = data.get("per_layer_config")
    if isinstance(by_layer, Mapping) and isinstance(types, list):
        if (own := _overrides(by_layer, types)) is not None:
            data |= {"per_layer_config": None, "global_head_dim": own.get("head_dim", data.get("head_dim"))}
            data["num_global_heads"] = own.get("num_key_value_heads", data.get("num_key_value_heads"))
    elif data.get("attention_k_eq_v") is True:
        data["num_global_heads"] = data.get("num_global_key_value_heads")
    return data


def _overrides(by_layer: Mapping[str, Any], types: list[Any]) -> dict[str, Any] | None:
    """The settings that all layers without a window have in common; None if others have something of their own."""
    full = [str(layer) for layer, kind in enumerate(types) if kind == _FULL]
    own = [by_layer.get(layer, {}) for layer in full]
    is_known = not {*by_layer} - {*full} and all(settings == own[0] for settings in own)
    is_known = is_known and isinstance(own[0], dict) and not {*own[0]} - {"head_dim", "num_key_value_heads"}
    return own[0] if is_known else None


def _gemma4(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    count = values["num_layers"]
    if fields.has("per_layer_config"):
        fields.problem("per_layer_config", "may set head_dim and num_key_value_heads of layers without a window only")
    head_dim = fields.integer("global_head_dim", _GLOBAL_HEAD_DIM)
    num_kv_heads = fields.integer("num_global_heads", values["num_kv_heads"])
    size = 0 if fields.is_null("hidden_size_per_layer_input") else _LAYER_INPUT_SIZE
    size = fields.integer("hidden_size_per_layer_input", size, least=0)
    tokens = fields.integer("vocab_size_per_layer_input", _VOCAB_SIZE)
    if size and tokens < values["vocab_size"]:
        fields.problem("vocab_size_per_layer_input", f"is {tokens}, less than vocab_size={values['vocab_size']}")
    return {
        "global_head_dim": None if head_dim == values["head_dim"] else head_dim,
        "num_global_kv_heads": None if num_kv_heads == values["num_kv_heads"] else num_kv_heads,
        "kv_sources": _sources(fields, values),
        "layer_inputs": LayerInputConfig(size, tokens, count) if size else None,
        "layer_input_slots": tuple(range(count)) if size else (),
        "moe": _experts(fields, count),
    }


def _sources(fields: Fields, values: Mapping[str, Any]) -> tuple[int, ...]:
    """The last layers read the keys of the last one before them that has the same kind of attention."""
    count = values["num_layers"]
    shared = fields.integer("num_kv_shared_layers", 0, least=0)
    if not shared:
        return ()
    windows = values["sliding_windows"] or (None,) * count
    first = max(count - shared, 0)
    last = {window: layer for layer, window in enumerate(windows[:first])}
    if set(last) != set(windows):
        fields.problem("num_kv_shared_layers", f"is {shared}: not every kind of layer is among the {first} before them")
        return ()
    return (*range(first), *(last[window] for window in windows[first:]))


def _experts(fields: Fields, num_layers: int) -> MoEConfig | None:
    if not fields.boolean("enable_moe_block", False):
        return None
    sizes = (fields.integer(name) for name in ("num_experts", "top_k_experts", "moe_intermediate_size"))
    return MoEConfig(*sizes, layers=tuple(range(num_layers)), is_beside_mlp=True)


def _express(config: ModelConfig) -> dict[str, Any]:
    inputs, moe = config.layer_inputs, config.moe
    data: dict[str, Any] = {
        "global_head_dim": config.global_head_dim or config.head_dim,
        "num_global_key_value_heads": config.num_global_kv_heads,
        "num_kv_shared_layers": sum(source != layer for layer, source in enumerate(config.kv_sources)),
        "hidden_size_per_layer_input": 0 if inputs is None else inputs.size,
        "vocab_size_per_layer_input": config.vocab_size if inputs is None else inputs.vocab_size,
        "enable_moe_block": moe is not None,
    }
    if moe is not None:
        data |= {"num_experts": moe.num_experts, "top_k_experts": moe.num_experts_per_token}
        data["moe_intermediate_size"] = moe.expert_size
    if config.num_global_kv_heads is not None and not config.global_values_are_keys:  # no other field says so
        own = {"head_dim": data["global_head_dim"], "num_key_value_heads": config.num_global_kv_heads}
        full = (layer for layer in range(config.num_layers) if config.window(layer) is None)
        data["per_layer_config"] = {str(layer): own for layer in full}
    return data


GEMMA4: tuple[Family, ...] = (
    replace(
        GEMMA3,
        architecture="Gemma4ForCausalLM",
        model_type="gemma4_text",
        title="Gemma 4",
        examples="Gemma 4 E2B to 31B, text of the models with images too",
        global_head_dim=_GLOBAL_HEAD_DIM,
        default_window=512,
        defaults={**GEMMA3.defaults, "vocab_size": _VOCAB_SIZE, "num_hidden_layers": 30},
        refused={},
        rope=RopeForm(
            theta=1e6,
            local_theta=10000.0,
            default={
                _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
                _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
        ),
        fixed={
            "norm": "rms_float32",
            "block": "sandwich_norm",
            "attention_scale": 1.0,
            "has_value_norm": True,
            "has_layer_scalar": True,
        },
        settings=(
            EMBEDDING_MULTIPLIER,
            Setting("logit_softcap", "final_logit_softcapping", "optional", None),
            Setting("global_values_are_keys", "attention_k_eq_v", "boolean", False),
            Setting("has_double_mlp", "use_double_wide_mlp", "boolean", False),
        ),
        tensors=_TENSORS,
        normalize=_fields,
        parts=(ConfigPart(_gemma4, _express),),
        notes=(
            "wider heads in layers without a window",
            "normalized values",
            "layers that share keys and values in some models",
            "embeddings per layer in some models",
            "a mixture of experts beside the MLP in some models",
        ),
    ),
)
