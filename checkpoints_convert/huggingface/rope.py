"""The settings of rotary embeddings in config.json, in all forms that Transformers has had.

Old: `rope_theta` beside `rope_scaling: {"type" or "rope_type": ..., ...}` or null. Transformers 5: one
`rope_parameters`, flat or nested by layer type. Precedence and defaults are those of its `modeling_rope_utils`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from checkpoints_convert.huggingface.family import Fields, RopeForm
from jaxinfer.checks import did_you_mean
from jaxinfer.models import ModelConfig, RopeConfig
from jaxinfer.models.rope_config import RopeKind

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
    "proportional": {"factor"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}
_MSCALES = {"short_mscale", "long_mscale"}
# Files with "alpha" have YaRN's fields too, which Transformers does not compute with.
_UNUSED_BESIDE_ALPHA = {"alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
# Fields that no implementation computes with.
_INERT_FIELDS = {"finetuned", "mrope_section", "mrope_interleaved", "original_max_position_embeddings"}
_NEUTRAL = {"factor": (0, 1)}  # values without effect where a field belongs to another type; others have 0
_MAX_PROBLEMS = 100  # more are not looked for
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "linear_attention"}


def rope_config(
    data: Mapping[str, Any],
    problems: list[str],
    *,
    head_dim: int,
    max_position_embeddings: int,
    layer_types: Sequence[str] = (_FULL,),
    form: RopeForm | None = None,
    is_local: bool = False,
) -> RopeConfig:
    """The rotary embedding of config.json. Invalid fields are appended to `problems`.

    Args:
      layer_types: of the model's layers. Settings nested by layer type must agree, unless the family's layers with a
        window have a rotation of their own.
      form: of the family. is_local: whether to read the rotation of the layers with a window.
    """
    form = form or RopeForm()
    types = layer_types if form.local_theta is None else (_SLIDING,) if is_local else (_FULL,)
    name, settings = _settings(data, problems, types, form, is_local)
    fields = Fields(settings, problems, f"{name}.")
    top = Fields(data, problems)
    kind = _kind(settings, fields, form)
    theta_name, theta = _top_theta(form, is_local)
    theta = fields.number("rope_theta", None) or top.number(theta_name, theta)
    partial = fields.number("partial_rotary_factor", None) or top.number(form.partial_name, form.partial)
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * partial)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        if not problems and form.rotated != "none":  # else it may follow from those
            problems.append(
                f"partial_rotary_factor={partial} makes {rotary_dim} rotated dimensions of {head_dim} a head"
            )
        rotary_dim = 2
    common: dict[str, Any] = {"kind": kind, "theta": theta, "rotary_dim": rotary_dim}
    if kind == "proportional":
        common |= {"num_rotated": 2 * min(int(partial * head_dim // 2), head_dim // 2)}
    if form.has_query_scale:
        common["query_scale_beta"] = fields.optional("llama_4_scaling_beta")
        if common["query_scale_beta"] is not None:
            common["original_length"] = fields.integer("original_max_position_embeddings", max_position_embeddings)
    if form.has_alpha and kind == "dynamic" and (alpha := fields.optional("alpha")):
        stretched = theta * alpha ** (rotary_dim / (rotary_dim - 2)) if rotary_dim > 2 else theta
        return RopeConfig("default", stretched, rotary_dim)
    if form.has_mscales and kind == "longrope":
        common |= {name: fields.number(name, None) for name in sorted(_MSCALES)}
    return RopeConfig(**common | _kind_settings(kind, fields, top, max_position_embeddings, rotary_dim))


def _kind(settings: Mapping[str, Any], fields: Fields, form: RopeForm) -> str:
    """The kind of rotation; "default" for an unknown one. Settings that do not belong to it are problems."""
    given = settings.get("rope_type", settings.get("type")) or "default"
    aliases = {**_ALIASES, **form.aliases}
    kind = aliases.get(given, given) if isinstance(given, str) else given
    if kind not in _KINDS:
        known = (*_KINDS, *_ALIASES)
        fields.problem("rope_type", f"{given!r} is not one of {', '.join(known)}{did_you_mean(given, known)}")
        kind = "default"
    known = _FIELDS[kind] | ({"llama_4_scaling_beta", "max_position_embeddings"} if form.has_query_scale else set())
    if kind == "longrope" and form.has_mscales:
        known = known | _MSCALES
    if kind == "dynamic" and form.has_alpha:
        known = known | _UNUSED_BESIDE_ALPHA
    for key, value in settings.items():
        if len(fields.problems) > _MAX_PROBLEMS:
            break
        has_effect = value is not None and (isinstance(value, bool) or value not in _NEUTRAL.get(key, (0,)))
        if has_effect and key not in _SHARED_FIELDS | known | _INERT_FIELDS:
            fields.problem(key, f"is not a setting of rope type {kind!r}{did_you_mean(key, _FIELDS[kind])}")
    return kind


def _kind_settings(
    kind: str, fields: Fields, top: Fields, max_position_embeddings: int, rotary_dim: int
) -> dict[str, Any]:
    """Fields of RopeConfig that only some kinds have."""
    if kind == "default":
        return {}
    if kind == "proportional":
        return {"factor": fields.number("factor", 1.0)}
    if kind == "linear":
        return {"factor": fields.number("factor")}
    if kind == "dynamic":
        # Transformers stretches beyond what the configuration declares, whatever the original length was.
        return {"factor": fields.number("factor"), "original_length": max_position_embeddings}
    name = "original_max_position_embeddings"
    original = top.integer(name, None) or fields.integer(name, max_position_embeddings)
    if kind == "llama3":
        return {"original_length": original, **_llama3(fields)}
    settings = {
        "original_length": original,
        "factor": fields.optional("factor") or max_position_embeddings / original,
        "attention_factor": fields.optional("attention_factor"),
    }
    if kind == "yarn":
        return {**settings, **_yarn(fields)}
    return {**settings, **{name: fields.numbers(name, rotary_dim // 2) for name in ("short_factor", "long_factor")}}


def rope_fields(config: ModelConfig, form: RopeForm) -> dict[str, Any]:
    """Fields of config.json: `rope_theta` and `rope_scaling`, which every version of Transformers reads, or
    `rope_parameters` of version 5 if those cannot express the rotation."""
    if form.rotated == "none":
        return {}
    rope, local = config.rope, config.local_rope or config.rope
    if form.has_query_scale:
        return {"rope_parameters": _flat(rope)}
    partial = {form.partial_name: _share(rope.rotary_dim, config.head_dim)} if form.has_partial else {}
    top = {form.theta_name: rope.theta, "rope_scaling": None if rope.kind == "default" else _scaling(rope), **partial}
    if rope.kind == "longrope" and form.aliases:
        top["original_max_position_embeddings"] = rope.original_length
    if form.local_theta is None:
        return top
    if (
        local.kind != "default"
        or rope.kind == "proportional"
        or (form.local_theta_name == form.theta_name and local.theta != rope.theta)
    ):
        return {"rope_parameters": {_FULL: _flat(rope), _SLIDING: _flat(local)}}
    return {**top, form.local_theta_name: local.theta}


def _flat(rope: RopeConfig) -> dict[str, Any]:
    return {"rope_theta": rope.theta, **_scaling(rope)}


def _scaling(rope: RopeConfig) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind == "proportional":
        count = rope.rotary_dim if rope.num_rotated is None else rope.num_rotated
        share = count / rope.rotary_dim
        is_exact = 2 * int(share * rope.rotary_dim // 2) == count
        scaling["partial_rotary_factor"] = share if is_exact else (count + 0.5) / rope.rotary_dim
    if rope.kind in ("llama3", "yarn", "longrope") or rope.query_scale_beta is not None:
        scaling["original_max_position_embeddings"] = rope.original_length
    if rope.query_scale_beta is not None:
        scaling["llama_4_scaling_beta"] = rope.query_scale_beta
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        scaling |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    if rope.kind in ("yarn", "longrope"):
        scaling["attention_factor"] = rope.attention_factor
    if rope.kind == "longrope":
        scaling |= {"short_mscale": rope.short_mscale, "long_mscale": rope.long_mscale}
        scaling |= {"short_factor": list(rope.short_factor or ()), "long_factor": list(rope.long_factor or ())}
    return {key: value for key, value in scaling.items() if value is not None}


def _share(rotary_dim: int, head_dim: int) -> float:
    """A factor such that `int(head_dim * factor)` is `rotary_dim`."""
    share = rotary_dim / head_dim
    return share if int(head_dim * share) == rotary_dim else (rotary_dim + 0.5) / head_dim


def _top_theta(form: RopeForm, is_local: bool) -> tuple[str, float]:
    """The field of the base beside `rope_scaling`, and its default."""
    if is_local and form.local_theta is not None:
        return form.local_theta_name, form.local_theta
    return form.theta_name, form.theta


def _settings(
    data: Mapping[str, Any], problems: list[str], layer_types: Sequence[str], form: RopeForm, is_local: bool
) -> tuple[str, Mapping[str, Any]]:
    """The name of the field in use, and its settings as one flat object."""
    name = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
    settings = data.get(name) or form.default or {}
    if not isinstance(settings, Mapping):
        problems.append(f"{name} must be an object or null, got {settings!r}")
        return name, {}
    if not _LAYER_TYPES & set(settings):
        # Flat settings are those of the layers without a window.
        return name, {} if is_local else settings
    used = {kind: settings.get(kind) for kind in dict.fromkeys(layer_types)}
    for kind, value in used.items():
        if value is None and form.local_theta is not None:
            return f"{name}.{kind}", {}
        if not isinstance(value, Mapping):
            problems.append(f"{name}.{kind} must be an object, got {value!r}")
            return name, {}
    first = next(iter(used))
    differing = [kind for kind, value in used.items() if value != used[first]]
    if differing:
        problems.append(f"{name} differs between {first} and {', '.join(differing)}; one rotation serves all layers")
    return f"{name}.{first}", used[first] or {}


def _llama3(fields: Fields) -> dict[str, Any]:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high < low and not fields.problems:
        fields.problem("high_freq_factor", f"must be at least low_freq_factor={low}, got {high}")
    return {"factor": fields.number("factor"), "low_freq_factor": low, "high_freq_factor": high}


def _yarn(fields: Fields) -> dict[str, Any]:
    defaults = RopeConfig()
    return {
        "beta_fast": fields.optional("beta_fast", defaults.beta_fast),
        "beta_slow": fields.optional("beta_slow", defaults.beta_slow),
        "mscale": fields.optional("mscale"),
        "mscale_all_dim": fields.optional("mscale_all_dim"),
        "truncate": fields.boolean("truncate", True),
    }
