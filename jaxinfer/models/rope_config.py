"""Configuration of rotary position embeddings."""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its published length extensions.

    Attributes:
      kind: formula of the inverse frequencies, see `jaxinfer.models.rope`.
      theta: base of the frequencies.
      rotary_dim: leading dimensions of a head that are rotated.
      factor: context extension factor (linear, dynamic, llama3, yarn, longrope, proportional).
      num_rotated: of these, the dimensions whose frequency is not zero (proportional); None for all.
      original_length: context length before extension, in tokens (dynamic, llama3, yarn, longrope).
      sequence_length: length, in tokens, for which `dynamic` and `longrope` compute their frequencies. An engine fixes
        it once, so that keys and queries of a sequence agree. None means at most `original_length`.
      low_freq_factor, high_freq_factor: llama3. beta_fast, beta_slow, mscale, mscale_all_dim, truncate: yarn.
      attention_factor: multiplies cos and sin (yarn, longrope); None uses the formula.
      short_factor, long_factor: one factor per frequency (longrope).
      short_mscale, long_mscale: multiply cos and sin of short and of long sequences (longrope of Phi-3.5-MoE); None
        uses `attention_factor`.
      query_scale_beta: queries at position p are multiplied by 1 + beta * ln(1 + floor(p / original_length)), after
        rotation (Ministral 3; the form is Llama 4's).
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
    short_mscale: float | None = None
    long_mscale: float | None = None
    query_scale_beta: float | None = None
    num_rotated: int | None = None

    @property
    def depends_on_length(self) -> bool:
        """True if the frequencies depend on `sequence_length`."""
        return self.kind in ("dynamic", "longrope")
