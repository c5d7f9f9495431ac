"""An entry of the table of families, its tensor names in a checkpoint, and typed reading of config.json."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from checkpoints_convert.huggingface.llama_tensors import LLAMA_TENSORS
from checkpoints_convert.huggingface.rules import TensorLayout, TensorRule, layout
from jaxinfer.models import ModelConfig

REQUIRED: Any = object()
MAX_INTEGER = 2**31 - 1
MAX_NUMBER = 1e15  # beyond the largest base of a rotation, and far from overflow in float32


class Fields:
    """Typed reading of a JSON object. A field that is absent or null has its default.

    A value of the wrong type is appended to `problems`, so that all are reported at once, and replaced by a valid one.

    Args:
      prefix: of the names in messages. names: other names of fields in `data`; None for a field that it does not have.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        problems: list[str],
        prefix: str = "",
        names: Mapping[str, str | None] | None = None,
    ):
        self.data, self.problems, self._prefix = data, problems, prefix
        self._names = names or {}

    def has(self, name: str) -> bool:
        """True if a field is present and not null."""
        own = self._names.get(name, name)
        return own is not None and self.data.get(own) is not None

    def is_null(self, name: str) -> bool:
        """True if a field is present and null, by which Transformers takes some sizes from others, not the default."""
        own = self._names.get(name, name)
        return own is not None and own in self.data and self.data[own] is None

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            self.problem(name, f"must be a string, got {value!r}")
            return default
        return value

    def integer(self, name: str, default: Any = REQUIRED, *, least: int = 1, most: int = MAX_INTEGER) -> Any:
        """An int from `least` to `most`."""
        value = self._get(name, default)
        if value is default or (isinstance(value, int) and not isinstance(value, bool) and least <= value <= most):
            return least if value is REQUIRED else value
        is_too_large = isinstance(value, int) and value > most
        limit = f"from {least} to {most}" if is_too_large else f"of at least {least}"
        self.problem(name, f"must be an integer {limit}, got {value!r}")
        return least

    def number(self, name: str, default: Any = REQUIRED, *, most: float = MAX_NUMBER) -> Any:
        """A positive float of at most `most`."""
        value = self._get(name, default)
        if value is default or is_positive(value, most):
            return 1.0 if value is REQUIRED else (float(value) if isinstance(value, int) else value)
        limit = f" of at most {most:g}" if is_positive(value, math.inf) else ""
        self.problem(name, f"must be a positive number{limit}, got {value!r}")
        return 1.0

    def optional(self, name: str, default: float | None = None) -> float | None:
        """A positive float, or the default where the field is absent, null or 0, which means off."""
        own = self._names.get(name, name)
        value = None if own is None else self.data.get(own)
        is_zero = isinstance(value, int | float) and not isinstance(value, bool) and value == 0
        return default if is_zero else self.number(name, default)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            self.problem(name, f"must be true or false, got {value!r}")
            return default
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers; () beside a problem, since `length` may come from a hostile size."""
        value = self._get(name, REQUIRED)
        if value is REQUIRED:
            return ()
        is_list = isinstance(value, list) and all(is_positive(x, MAX_NUMBER) for x in value)
        if not is_list or len(value) != length:
            got = f"{len(value)} of them" if is_list else repr(value)
            self.problem(name, f"must be a list of {length} positive numbers, got {got}")
            return ()
        return tuple(float(x) for x in value)

    def problem(self, name: str, text: str) -> None:
        self.problems.append(f"{self._prefix}{self._names.get(name, name)} {text}")

    def _get(self, name: str, default: Any) -> Any:
        own = self._names.get(name, name)
        value = None if own is None else self.data.get(own)
        if value is None:
            if default is REQUIRED:
                self.problem(name, "is null" if own in self.data else "is missing")
            return default
        return value


def is_positive(value: Any, most: float) -> bool:
    """True for a positive number of at most `most` that is not infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most and value != math.inf


# A bias: never, always, or as the named field of config.json says.
Bias = bool | str
ATTENTION_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
LINEAR_BIAS: dict[str, Any] = {**ATTENTION_BIAS, "mlp_bias": "mlp_bias"}


def all_biases(bias: Bias) -> dict[str, Any]:
    """Settings that give all Linears of a layer this bias."""
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}


# Which layers have a sliding window: none; all, if `sliding_window` is set; if `use_sliding_window` is set, those from
# `max_window_layers` on ("late"), or those without rotation; all but every n-th ("pattern"). `layer_types` overrides.
Windows = Literal["none", "all", "late", "unrotated", "pattern"]
# Which layers have rotary embeddings: all; none; those with a window; those with a window or, if `sliding_window` is
# null, all; those with a 1 in `no_rope_layers`.
Rotated = Literal["all", "none", "windowed", "windowed_or_all", "listed"]

# Buffers that old exports store; they are computed from the configuration.
ROTARY_BUFFERS = r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)"
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True)
class Conversion:
    """Converts between the value in config.json and that of ModelConfig."""

    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value


def choice(**values: Any) -> Conversion:
    """A conversion of true and false to the values named `true` and `false`."""
    return Conversion(lambda flag: values["true"] if flag else values["false"], lambda value: value == values["true"])


def _rounded(value: float) -> float:
    """Rounded by one digit, in which 1 / (1 / x) may differ from x."""
    return float(f"{value:.14g}")


SAME = Conversion()
RECIPROCAL = Conversion(lambda x: 1 / x, lambda x: _rounded(1 / x))
INVERSE_ROOT = Conversion(lambda x: x**-0.5, lambda x: int(y) if (y := _rounded(x**-2)) == int(y) else y)


@dataclass(frozen=True)
class Setting:
    """A field of ModelConfig, or of a configuration in it, that is read from a field of config.json.

    Attributes:
      field: of ModelConfig, or of the configuration in it. name: in config.json. default: Transformers' default.
      kind: type of the value in config.json; "count" is an integer that may be 0, "integer_or_null" and "optional" are
        an integer and a number, or null for off.
      is_derived: `normalize` computes it from other fields, so it is not written.
      names: it is read by the first of these names that is present; () for `name` only.
    """

    field: str
    name: str
    kind: Literal["boolean", "count", "integer", "integer_or_null", "number", "optional", "text"]
    default: Any
    conversion: Conversion = SAME
    is_derived: bool = False
    names: tuple[str, ...] = ()

    def read(self, fields: Fields) -> Any:
        """The value for `field`; None for null if it means off."""
        name = next((name for name in self.names if fields.has(name)), self.name)
        if self.kind == "text":
            return fields.data.get(name, self.default)
        if self.kind in ("integer_or_null", "optional") and name in fields.data and fields.data[name] is None:
            return None
        if self.kind == "boolean":
            value = fields.boolean(name, self.default)
        elif self.kind in ("number", "optional"):
            value = fields.number(name, self.default)
        else:
            value = fields.integer(name, self.default, least=0 if self.kind == "count" else 1)
        return None if value is None else self.conversion.read(value)


def read_settings(fields: Fields, settings: Iterable[Setting]) -> dict[str, Any]:
    """Values of fields of a configuration."""
    return {setting.field: setting.read(fields) for setting in settings}


def write_settings(config: Any, settings: Iterable[Setting]) -> dict[str, Any]:
    """Fields of config.json of a configuration; the inverse of `read_settings`."""
    data = {}
    for setting in settings:
        if not setting.is_derived:
            value = getattr(config, setting.field)
            data[setting.name] = None if value is None else setting.conversion.write(value)
    return data


# Fields of ModelConfig made of the fields of config.json and of the values that are known so far.
Build = Callable[[Fields, Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class ConfigPart:
    """Fields of ModelConfig that are made of several fields of config.json, such as `moe`, and back."""

    build: Build
    express: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}


def part_of(config: ModelConfig, name: str) -> Any:
    """A configuration in `config`, such as "moe". Raises ValueError if it has none."""
    part = getattr(config, name)
    if part is None:
        raise ValueError(f"{config.architecture} needs `{name}`, and the configuration has none")
    return part


def settings_part(name: str, make: Callable[..., Any], *settings: Setting, **fixed: Any) -> ConfigPart:
    """The configuration `name` in ModelConfig, with the settings and `fixed`, which all models share."""
    return ConfigPart(
        lambda fields, values: {name: make(**read_settings(fields, settings), **fixed)},
        lambda config: write_settings(part_of(config, name), settings),
    )


@dataclass(frozen=True)
class RopeForm:
    """The rotary embedding in a family's config.json.

    Attributes:
      theta, partial: Transformers' defaults of the base, and of the rotated share of a head.
      theta_name, partial_name: their fields in config.json beside `rope_scaling`.
      has_partial: a share of less than 1 is possible.
      local_theta: default base of the layers with a window, if they have a rotation of their own; else None.
      local_theta_name: its field beside `rope_theta`.
      aliases: other names of rope types. rotated: which layers are rotated.
      pairs_neighbours: rotary dimensions are interleaved, rather than half a head apart.
      has_query_scale: queries are scaled by their position ("llama_4_scaling_beta").
      has_mscales: "longrope" has a factor on cos and sin for short and one for long sequences.
      has_alpha: "dynamic" with "alpha" is a base that is stretched once, for all lengths.
      default: settings if config.json has none.
    """

    theta: float = 10000.0
    partial: float = 1.0
    theta_name: str = "rope_theta"
    partial_name: str = "partial_rotary_factor"
    has_partial: bool = False
    local_theta: float | None = None
    local_theta_name: str = "rope_theta"
    aliases: Mapping[str, str] = field(default_factory=dict)
    rotated: Rotated = "all"
    pairs_neighbours: bool = False
    has_query_scale: bool = False
    has_mscales: bool = False
    has_alpha: bool = False
    default: Mapping[str, Any] | None = None


def scaled(kind: str, factor: float, original_length: int, **settings: Any) -> dict[str, Any]:
    """Settings of a rotary embedding that is stretched from a length, as config.json has them."""
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original_length, **settings}


@dataclass(frozen=True, eq=False)
class Family:
    """One `architectures` entry of config.json.

    Attributes:
      title, examples: its name, and well-known models of it, for documentation.
      max_position_embeddings, num_kv_heads, head_dim: Transformers' defaults; None for one key-value head per query
        head, and for hidden_size / num_attention_heads.
      global_head_dim: Transformers' default of the field of that name; None for families without one.
      names: names of fields of config.json that differ from Llama's; None for a field that it does not have.
      defaults: values of fields that config.json may omit. refused: values that are not supported, with the reason.
      supported: the values that are supported of fields that are not read otherwise; null and absence are.
      fixed: fields of ModelConfig that all models share. settings: fields of ModelConfig read from config.json.
      activation: the default, by its name in config.json. activations: all that are supported.
      inner_factor: default width of the MLP over the model's; None if config.json must have it.
      windows, default_window, full_every: which layers have a sliding window; with "pattern" every n-th has none.
      prefix: of the names of all tensors except the head's. tensors: the rules of `TensorRule`.
      skipped: patterns of tensors that are no weights.
      normalize, express: from the family's own fields of config.json to common ones, and back; None if renaming fields
        is enough. written: fields that are written with these values.
      parts: built and written in this order.
      notes: differences from Llama that the other fields do not show, for documentation.
      has_later_layers: checkpoints may have layers beyond the last, for multi-token prediction, which are not used.
    """

    architecture: str
    model_type: str
    max_position_embeddings: int
    title: str = ""
    examples: str = ""
    num_kv_heads: int | None = None
    head_dim: int | None = None
    global_head_dim: int | None = None
    qkv_bias: Bias = False
    output_bias: Bias = False
    mlp_bias: Bias = False
    qk_norm: bool = False
    windows: Windows = "none"
    default_window: int | None = None
    full_every: int = 0
    rope: RopeForm = field(default_factory=RopeForm)
    names: Mapping[str, str | None] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[Setting, ...] = ()
    activation: str = "silu"
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATIONS)
    inner_factor: int | None = None
    is_tied: bool = False
    norm_eps: float = 1e-6
    prefix: str = "model."
    tensors: tuple[TensorRule, ...] = field(default=LLAMA_TENSORS, repr=False)
    skipped: tuple[str, ...] = (ROTARY_BUFFERS,)
    normalize: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    express: Callable[[ModelConfig], dict[str, Any]] | None = None
    written: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[ConfigPart, ...] = ()
    notes: tuple[str, ...] = ()
    has_later_layers: bool = False

    def is_skipped(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.skipped)

    def layout(self, config: ModelConfig) -> TensorLayout:
        """The stored tensors of the parameters of a model of the family."""
        return layout(self.tensors, config, self.rope.pairs_neighbours)


def embedding_name(family: Family) -> str:
    return _source(family, "embed")[0]


def head_names(family: Family) -> tuple[str, ...]:
    """Names of the tensor of the head, the usual one first."""
    return _source(family, "lm_head")


def renaming(family: Family, names: Iterable[str]) -> Callable[[str], str]:
    """A function from the family's tensor names to those of a checkpoint with the tensors `names`.

    Names may lack the family's prefix (the base model), all have one more prefix, or be those of the text part of a
    model of text and images, before Transformers 5 ("language_model.model.") and since ("model.language_model.").
    """
    names = set(names)
    if not _source(family, "embed"):  # a head in its target's files, whose names are given in full
        return lambda name: name
    embedding, prefix = embedding_name(family), family.prefix
    bare = embedding.removeprefix(prefix)

    def without(name: str) -> str:
        return name.removeprefix(prefix)

    def nested(name: str) -> str:
        return f"model.language_model.{without(name)}" if name.startswith(prefix) else name

    if embedding in names:
        return lambda name: name
    if bare in names:
        return without
    if nested(embedding) in names:
        return nested
    before = {name.removesuffix(embedding) for name in names if name.endswith(f".{embedding}")}
    if len(before) == 1:
        common = before.pop()
        return lambda name: common + name
    return lambda name: name


def _source(family: Family, target: str) -> tuple[str, ...]:
    return tuple(rule.source for rule in family.tensors if rule.targets == (target,))
