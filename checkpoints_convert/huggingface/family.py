"""What an entry of the table of families says."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from checkpoints_convert.huggingface.fields import Fields
from checkpoints_convert.huggingface.rules import Layout, TensorRule, layout
from jaxinfer.models import ModelConfig

# A bias exists never, always, or when the named field of config.json says so.
Bias = bool | str
# Which layers have a sliding window: none; all, when `sliding_window` is set; when `use_sliding_window` is set, those
# from `max_window_layers` on, or those without rotation; all but every n-th. `layer_types`, where given, names them one
# by one.
Windows = Literal["none", "all", "late", "unrotated", "pattern"]
# Which layers are rotated: all; none; those with a window; those that `no_rope_layers` lists with a 1.
Rotated = Literal["all", "none", "windowed", "listed"]

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
    """Between the value in config.json and that of ModelConfig."""

    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value


def choice(**values: Any) -> Conversion:
    """true and false stand for these two values, named `true` and `false`."""
    return Conversion(lambda flag: values["true"] if flag else values["false"], lambda value: value == values["true"])


def _rounded(value: float) -> float:
    """Without the last digit, in which 1 / (1 / x) may differ from x."""
    return float(f"{value:.14g}")


SAME = Conversion()
RECIPROCAL = Conversion(lambda x: 1 / x, lambda x: _rounded(1 / x))
INVERSE_ROOT = Conversion(lambda x: x**-0.5, lambda x: int(y) if (y := _rounded(x**-2)) == int(y) else y)


@dataclass(frozen=True)
class Setting:
    """A field of ModelConfig that a field of config.json sets.

    Attributes:
      field: of ModelConfig. name: in config.json. default: what Transformers assumes when config.json is silent.
      kind: of the value in config.json; "optional" is a number or null, which turns it off.
      is_derived: `normalize` makes it of other fields, so it is not written.
    """

    field: str
    name: str
    kind: Literal["boolean", "number", "optional", "text"]
    default: Any
    conversion: Conversion = SAME
    is_derived: bool = False


@dataclass(frozen=True)
class RopeForm:
    """How a family's config.json speaks of rotation.

    Attributes:
      theta, partial: what Transformers assumes when config.json is silent: the base, and the share of a head.
      theta_name, partial_name: fields of config.json beside `rope_scaling`.
      has_partial: whether a share of less than 1 is possible.
      local_theta: layers with a window have a rotation of their own, with this base; None where they have not.
      local_theta_name: its field beside `rope_theta`.
      aliases: names of rope types. rotated: which layers are rotated.
      pairs_neighbours: whether outputs that rotate together are neighbours, and not half a head apart.
      has_query_scale: whether queries grow with the position ("llama_4_scaling_beta").
      default: settings where config.json has none.
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
    default: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class Family:
    """One `architectures` entry of config.json.

    Attributes:
      title, examples: what it is called, and well-known models of it, for people.
      max_position_embeddings, num_kv_heads, head_dim: what Transformers assumes when config.json is silent; None
        for one key-value head per query head, and for hidden_size / num_attention_heads.
      names: fields of config.json that are called otherwise than in Llama's; None for one that does not exist.
      defaults: values of fields that config.json may leave out. refused: values that are refused, with the reason.
      fixed: fields of ModelConfig. settings: fields of ModelConfig that config.json sets.
      activation: that of a silent config.json, by its name there. activations: all that are known.
      inner_factor: the MLP's width over the model's, when config.json is silent; None where it must say.
      windows, default_window, full_every: which layers have a sliding window; every n-th has none ("pattern").
      prefix: what the names of all tensors but the head's begin with. tensors: where they go.
      skipped: patterns of tensors that carry no weights.
      normalize, express: from the family's own fields of config.json to common ones, and what to write of a
        configuration; None where a renaming is enough.
      build: fields of ModelConfig, such as `moe`, made of several of config.json's, from these and the common values.
      has_later_layers: whether checkpoints hold layers beyond the last, for multi-token prediction, which are not used.
    """

    architecture: str
    model_type: str
    max_position_embeddings: int
    title: str = ""
    examples: str = ""
    num_kv_heads: int | None = None
    head_dim: int | None = None
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
    fixed: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[Setting, ...] = ()
    activation: str = "silu"
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATIONS)
    inner_factor: int | None = None
    is_tied: bool = False
    norm_eps: float = 1e-6
    prefix: str = "model."
    tensors: tuple[TensorRule, ...] = field(default=(), repr=False)
    skipped: tuple[str, ...] = ()
    normalize: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    express: Callable[[ModelConfig], dict[str, Any]] | None = None
    build: Callable[[Fields, Mapping[str, Any]], dict[str, Any]] | None = None
    has_later_layers: bool = False

    def is_skipped(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.skipped)

    def layout(self, config: ModelConfig) -> Layout:
        """Which stored tensors hold the parameters of a model of the family."""
        return layout(self.tensors, config, self.rope.pairs_neighbours)
