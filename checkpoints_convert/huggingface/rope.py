"""The rotary embedding's settings in config.json, in all the forms they have had.

Old: `rope_theta` beside `rope_scaling: {"type" or "rope_type": ..., ...}` or null. Transformers 5: one
`rope_parameters`, flat or nested by layer type. Precedence and defaults are those of its `modeling_rope_utils`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from checkpoints_convert.errors import did_you_mean
from checkpoints_convert.huggingface.fields import Fields
from jaxinfer.models import RopeConfig
from jaxinfer.models.config import RopeKind

_KINDS = get_args(RopeKind)
# mrope's three position rows are equal for text, which makes it the default rotation.
_ALIASES = {"su": "longrope", "mrope": "default"}

_SHARED_FIELDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    },
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}
# Notes of the checkpoint's author, which no implementation computes with.
_INERT_FIELDS = {"finetuned", "mrope_section", "mrope_interleaved", "original_max_position_embeddings"}
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "linear_attention"}


def rope_config(
    data: Mapping[str, Any],
    problems: list[str],
    *,
    head_dim: int,
    max_position_embeddings: int,
    layer_types: Sequence[str] = ("full_attention",),
) -> RopeConfig:
    """The rotation config.json asks for. What is wrong with it is appended to `problems`, by field.

    Args:
      layer_types: of the model's layers; with settings nested by layer type, all of these must agree.
    """
    name, settings = _settings(data, problems, layer_types)
    fields = Fields(settings, problems, f"{name}.")
    top = Fields(data, problems)
    given = settings.get("rope_type", settings.get("type")) or "default"
    kind = _ALIASES.get(given, given) if isinstance(given, str) else given
    if kind not in _KINDS:
        known = (*_KINDS, *_ALIASES)
        fields.problem("rope_type", f"{given!r} is not one of {', '.join(known)}{did_you_mean(str(given), known)}")
        kind = "default"
    for key, value in settings.items():
        if value is not None and key not in _SHARED_FIELDS | _FIELDS[kind] | _INERT_FIELDS:
            fields.problem(key, f"is not a setting of rope type {kind!r}{did_you_mean(key, _FIELDS[kind])}")

    theta = fields.number("rope_theta", None) or top.number("rope_theta", 10000.0)
    partial = fields.number("partial_rotary_factor", None) or top.number("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        if not problems:  # else a consequence of those
            problems.append(
                f"partial_rotary_factor={partial} makes {rotary_dim} rotated dimensions of {head_dim} a head"
            )
        rotary_dim = 2
    common = {"kind": kind, "theta": theta, "rotary_dim": rotary_dim}
    if kind == "default":
        return RopeConfig(**common)
    if kind == "linear":
        return RopeConfig(**common, factor=fields.number("factor"))
    if kind == "dynamic":
        # Transformers stretches beyond what the configuration declares, whatever the original length was.
        return RopeConfig(**common, factor=fields.number("factor"), original_length=max_position_embeddings)
    original = top.integer("original_max_position_embeddings", None) or fields.integer(
        "original_max_position_embeddings", max_position_embeddings
    )
    common["original_length"] = original
    if kind == "llama3":
        return RopeConfig(**common, **_llama3(fields))
    common["factor"] = fields.number("factor", None) or max_position_embeddings / original
    common["attention_factor"] = fields.number("attention_factor", None)
    if kind == "yarn":
        return RopeConfig(**common, **_yarn(fields))
    return RopeConfig(
        **common,
        short_factor=fields.numbers("short_factor", rotary_dim // 2),
        long_factor=fields.numbers("long_factor", rotary_dim // 2),
    )


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """The inverse: `rope_theta` and `rope_scaling`, the form every version of Transformers reads."""
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn", "longrope"):
        scaling["original_max_position_embeddings"] = rope.original_length
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        scaling |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    if rope.kind in ("yarn", "longrope"):
        scaling["attention_factor"] = rope.attention_factor
    if rope.kind == "longrope":
        scaling |= {"short_factor": list(rope.short_factor or ()), "long_factor": list(rope.long_factor or ())}
    scaling = {key: value for key, value in scaling.items() if value is not None}
    return {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else scaling}


def _settings(
    data: Mapping[str, Any], problems: list[str], layer_types: Sequence[str]
) -> tuple[str, Mapping[str, Any]]:
    """The name of the field in use, and the one flat object in it."""
    name = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
    settings = data.get(name) or {}
    if not isinstance(settings, dict):
        problems.append(f"{name} must be an object or null, got {settings!r}")
        return name, {}
    if not _LAYER_TYPES & set(settings):
        return name, settings
    used = {kind: settings.get(kind) for kind in dict.fromkeys(layer_types)}
    for kind, value in used.items():
        if not isinstance(value, dict):
            problems.append(f"{name}.{kind} must be an object, got {value!r}")
            return name, {}
    first = next(iter(used))
    differing = [kind for kind, value in used.items() if value != used[first]]
    if differing:
        problems.append(f"{name} differs between {first} and {', '.join(differing)}; one rotation serves all layers")
    return f"{name}.{first}", used[first] or {}


def _llama3(fields: Fields) -> dict[str, Any]:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low and not fields.problems:
        fields.problem("high_freq_factor", f"must be above low_freq_factor={low}, got {high}")
    return {"factor": fields.number("factor"), "low_freq_factor": low, "high_freq_factor": high}


def _yarn(fields: Fields) -> dict[str, Any]:
    defaults = RopeConfig()
    return {
        "beta_fast": fields.number("beta_fast", defaults.beta_fast),
        "beta_slow": fields.number("beta_slow", defaults.beta_slow),
        "mscale": fields.number("mscale", None),
        "mscale_all_dim": fields.number("mscale_all_dim", None),
        "truncate": fields.boolean("truncate", True),
    }
