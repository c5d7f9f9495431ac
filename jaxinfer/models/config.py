"""What a model is, apart from its weights. Families differ in these fields, not in code."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its published length extensions.

    Attributes:
      kind: which formula gives the inverse frequencies; see `jaxinfer.models.rope`.
      theta: base of the frequencies.
      rotary_dim: leading dimensions of a head that are rotated.
      factor: context extension factor (linear, dynamic, llama3, yarn, longrope).
      original_length: tokens the model saw before extension (dynamic, llama3, yarn, longrope).
      sequence_length: tokens the rotation is made for. `dynamic` and `longrope` change their formula with the
        length; a compiled engine fixes it here once, so that the keys of a sequence agree with its queries.
        None means no longer than `original_length`.
      low_freq_factor, high_freq_factor: llama3. beta_fast, beta_slow, mscale, mscale_all_dim, truncate: yarn.
      attention_factor: multiplies cos and sin (yarn, longrope); None uses the formula.
      short_factor, long_factor: one factor per frequency (longrope).
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    rotary_dim: int = 64
    factor: float = 1.0
    original_length: int | None = None
    sequence_length: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    attention_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
      architecture: the name in the checkpoint's config, such as "LlamaForCausalLM".
      hidden_size, intermediate_size, head_dim: widths; heads need not fill the hidden size.
      qkv_bias, output_bias, mlp_bias: which projections have a bias.
      qk_norm: RMSNorm over each head of queries and keys, before rope (Qwen3).
      sliding_windows: per layer the number of visible keys, the query's own included, or None for all;
        the empty tuple means None everywhere.
      max_position_embeddings: longest sequence the checkpoint declares, in tokens.
      dtype: dtype of the stored weights.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    max_position_embeddings: int = 2048
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ValueError(f"{len(self.sliding_windows)} sliding_windows for {self.num_layers} layers")
        if self.rope.rotary_dim % 2 or not 0 < self.rope.rotary_dim <= self.head_dim:
            raise ValueError(f"rotary_dim={self.rope.rotary_dim} must be even and at most head_dim={self.head_dim}")
        if not (math.isfinite(self.norm_eps) and self.norm_eps > 0):
            raise ValueError(f"norm_eps must be positive, got {self.norm_eps!r}")

    def window(self, layer: int) -> int | None:
        """Visible keys of a layer, or None for all."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` is its inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelConfig":
        """Raises ValueError for fields this version does not know."""
        rope: dict[str, Any] = {key: _frozen(value) for key, value in data["rope"].items()}
        _refuse_unknown(RopeConfig, rope)
        _refuse_unknown(cls, data)
        rest: dict[str, Any] = {key: _frozen(value) for key, value in data.items()}
        return cls(**{**rest, "rope": RopeConfig(**rope)})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _refuse_unknown(kind: type, data: dict[str, Any]) -> None:
    unknown = sorted(set(data) - {field.name for field in fields(kind)})
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}: written by a newer jaxinfer?")
