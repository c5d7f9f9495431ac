"""Configurations of recurrent layers, which keep a state of fixed size per sequence."""

from dataclasses import dataclass
from typing import Literal

# What mixes tokens in a layer: attention, a recurrent layer, both side by side, or nothing (a layer that has an MLP
# only).
LayerKind = Literal["attention", "gated_delta", "mamba2", "short_conv", "attention_and_mamba2", "none"]
RECURRENT_KINDS = ("gated_delta", "mamba2", "short_conv", "attention_and_mamba2")
ATTENTION_KINDS = ("attention", "attention_and_mamba2")


@dataclass(frozen=True)
class DeltaConfig:
    """A gated delta net (Yang et al. 2024, arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

    Attributes:
      num_key_heads, num_value_heads: value heads are a multiple of key heads; each value head has its own
        state.
      key_size, value_size: widths of a head; a value head's state is [key_size, value_size].
      conv_width: tokens that the convolution before the recurrence sees.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_width: int = 4

    def __post_init__(self) -> None:
        _check_sizes(self, "num_key_heads", "num_value_heads", "key_size", "value_size", "conv_width")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads={self.num_value_heads} is not a multiple of num_key_heads={self.num_key_heads}"
            )

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_size

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_size

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Columns of the convolution's state, and its channels: queries, keys and values."""
        return self.conv_width - 1, 2 * self.key_width + self.value_width

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Axes of a sequence's recurrent state: key heads, key size, values of the heads that share the key."""
        return self.num_key_heads, self.key_size, self.value_width // self.num_key_heads


@dataclass(frozen=True)
class MambaConfig:
    """A Mamba 2 layer (Dao & Gu 2024, arXiv 2405.21060).

    Attributes:
      num_heads, head_size: of the inputs of the state space. num_groups: heads of a group share B and C.
      state_size: width of B and C; a head's state is [state_size, head_size].
      conv_width, has_conv_bias: of the convolution before it. has_bias, has_output_bias: of the projections.
      has_norm: a gated norm over each group of the outputs; without it the gate multiplies them (Falcon-H1).
      gates_after_norm: whether the gate multiplies after the norm instead of before.
      time_step_min, time_step_max: dt is clipped to this range; None for no end.
      in_multiplier, out_multiplier: factors on the layer's input and output (Falcon-H1).
      part_multipliers: factors on gate, x, B, C and dt (Falcon-H1); empty for none.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    conv_width: int = 4
    has_conv_bias: bool = True
    has_bias: bool = False
    has_output_bias: bool = False
    has_norm: bool = True
    gates_after_norm: bool = False
    time_step_min: float = 0.0
    time_step_max: float | None = None
    in_multiplier: float = 1.0
    out_multiplier: float = 1.0
    part_multipliers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check_sizes(self, "num_heads", "head_size", "num_groups", "state_size", "conv_width")
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_groups={self.num_groups}")
        if len(self.part_multipliers) not in (0, 5):
            raise ValueError(f"part_multipliers are 5 factors, got {len(self.part_multipliers)}")

    @property
    def width(self) -> int:
        """Width of the inputs of the state space."""
        return self.num_heads * self.head_size

    @property
    def part_widths(self) -> tuple[int, ...]:
        """Widths of gate, x, B, C and dt, the outputs of the input projection."""
        group_width = self.num_groups * self.state_size
        return self.width, self.width, group_width, group_width, self.num_heads

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Columns of the convolution's state, and its channels: x, B and C."""
        return self.conv_width - 1, sum(self.part_widths[1:4])

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Axes of a sequence's recurrent state: groups, state size, inputs of the heads of a group."""
        return self.num_groups, self.state_size, self.width // self.num_groups


@dataclass(frozen=True)
class ConvConfig:
    """A short convolution between two gates (LFM2).

    Attributes:
      width: tokens that it sees. num_channels: the model's width. has_bias: of it and of its projections.
    """

    width: int
    num_channels: int
    has_bias: bool = False

    def __post_init__(self) -> None:
        _check_sizes(self, "width", "num_channels")

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Columns of the convolution's state, and its channels."""
        return self.width - 1, self.num_channels

    @property
    def state_shape(self) -> None:
        """There is no state but the convolution's."""
        return None


RecurrentConfig = DeltaConfig | MambaConfig | ConvConfig


def _check_sizes(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    width = getattr(config, "conv_width", getattr(config, "width", None))
    if width == 1:
        raise ValueError("a convolution of width 1 has no state")
