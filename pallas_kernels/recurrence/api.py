"""Entry points of linear recurrences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Implementations
from pallas_kernels.platform import current_platform
from pallas_kernels.recurrence import ragged
from pallas_kernels.recurrence.batch import RaggedBatch, RecurrentTokens
from pallas_kernels.recurrence.specs import ShortSpec

if TYPE_CHECKING:
    from jaxtyping import Array, Float32, Int32

MAX_SHORT_TOKENS = 64
LEAST_MOVES = 2  # of a state in a decode step: it is read and written
IMPLEMENTATIONS = ("xla", "pallas_tpu")
_BY_PLATFORM = {"tpu": ("pallas_tpu", "xla"), "gpu": ("xla",), "cpu": ("xla",)}
_MODULES = Implementations("pallas_kernels.recurrence", IMPLEMENTATIONS, _BY_PLATFORM)


def linear_recurrence(
    tokens: RecurrentTokens,
    state: Float32[Array, "S Hk K E"],
    batch: RaggedBatch,
    *,
    max_query_length: int | None = None,
    short_tokens: int = 1,
    defers: bool = False,
    is_uniform: bool = False,
    implementation: str | None = None,
) -> tuple[Float32[Array, "T H V"], Float32[Array, "S Hk K E"]]:
    """Runs every sequence's rows through its recurrence: prompts, decode steps and drafts in one ragged call.

    The gated delta rule (Yang et al. 2024, arXiv 2412.06464) or, without beta, a state space (Dao & Gu 2024): with
    S' = exp(g) S, S <- S' + k (beta (v - S'k))' or S' + k v', and o = S'q with the new S. Sequences of up to
    `short_tokens` rows run in one pass over all slots; longer ones in blocks that end at positions that are multiples
    of `BLOCK_TOKENS`, so that steps which end there give the same results, to the bit, as one step for all.

    Args:
      tokens: operands [T, ...] of the rows; computed in float32.
      state: of each slot: for each key head the [K, V] of the H / Hk heads that read it, side by side (E = H / Hk * V
        fills the lanes of a TPU where V alone would not). Donate it: the result aliases it.
      max_query_length: static bound of the rows of a sequence, T when None.
      short_tokens: static; 1, or the rows of a verified draft.
      defers: static; states of sequences of up to `short_tokens` rows stay as they are, for `commit_recurrence`.
      is_uniform: static; token by token, so that results do not depend, to the bit, on how rows are cut into steps.
      implementation: of the pass over all slots, "xla" or "pallas_tpu"; None selects by platform and shape.

    Returns the outputs, zeros for padding, and the states. Raises ValueError for operands that do not fit.
    """
    _check(tokens, state, batch, short_tokens)
    if is_uniform:
        return ragged.recur_uniform(tokens, state, batch, short_tokens=short_tokens, defers=defers)
    longest = tokens.v.shape[0] if max_query_length is None else max_query_length
    has_long = longest > short_tokens
    run_short = _run_short(tokens, state, short_tokens, implementation)
    return ragged.recur(tokens, state, batch, run_short, short_tokens=short_tokens, has_long=has_long, defers=defers)


def commit_recurrence(
    state: Float32[Array, "S Hk K E"],
    tokens: RecurrentTokens,
    batch: RaggedBatch,
    num_committed: Int32[Array, " S"],
    *,
    short_tokens: int,
    is_uniform: bool = False,
    implementation: str | None = None,
) -> Float32[Array, "S Hk K E"]:
    """States after the first `num_committed` rows of each sequence that `linear_recurrence` deferred.

    The operands are those of that call. Rows that are not committed leave no trace. Donate `state`. Raises ValueError
    for operands that do not fit.
    """
    _check(tokens, state, batch, short_tokens)
    run_short = _run_short(tokens, state, short_tokens, implementation)
    options: Any = {"short_tokens": short_tokens, "is_uniform": is_uniform}
    return ragged.commit(state, tokens, batch, num_committed, run_short, **options)


def recurrence_of_sequences(tokens: RecurrentTokens) -> Float32[Array, "B T H V"]:
    """As `linear_recurrence`, of full sequences [B, T] without a state; differentiable."""
    return ragged.of_sequences(tokens)


def form(state_shape: tuple[int, int, int, int], platform: str | None = None) -> str:
    """The implementation of a decode step's pass over states [S, Hk, K, E], and the bytes that it moves, for people."""
    name = _MODULES.take(ShortSpec(*state_shape, tokens=1), platform or current_platform(), None)
    share = _MODULES[name].STATE_MOVES / LEAST_MOVES
    return f"{name}, {share:.3g} of the bytes of states that are read and written once"


def _run_short(
    tokens: RecurrentTokens, state: jax.Array, short_tokens: int, implementation: str | None
) -> ragged.RunShort:
    spec = ShortSpec(*state.shape, tokens=short_tokens)
    return _MODULES[_MODULES.take(spec, current_platform(), implementation)].run_short


def _check(tokens: RecurrentTokens, state: jax.Array, batch: RaggedBatch, short_tokens: int) -> None:
    num_sequences, num_key_heads, key_size, width = state.shape
    if tokens.q.shape != tokens.k.shape or tokens.k.shape[1:] != (num_key_heads, key_size):
        raise ValueError(f"q {tokens.q.shape} and k {tokens.k.shape} do not fit states {state.shape}")
    num_heads, value_size = tokens.v.shape[1:]
    if (
        num_heads % num_key_heads
        or num_heads * value_size != num_key_heads * width
        or tokens.g.shape != tokens.v.shape[:-1]
    ):
        raise ValueError(f"v {tokens.v.shape} and g {tokens.g.shape} do not fit states {state.shape}")
    if tokens.beta is not None and tokens.beta.shape != tokens.g.shape:
        raise ValueError(f"beta has the shape of g, {tokens.g.shape}; got {tokens.beta.shape}")
    if state.dtype != jnp.float32:
        raise ValueError(f"states are float32; got {state.dtype}")
    for name, array in batch._asdict().items():
        if array.shape != (num_sequences,) or array.dtype != jnp.int32:
            raise ValueError(f"{name} is int32 [{num_sequences}]; got {array.dtype} {array.shape}")
    if not 1 <= short_tokens <= MAX_SHORT_TOKENS:
        raise ValueError(f"short_tokens is 1 to {MAX_SHORT_TOKENS}; got {short_tokens}")
