"""A few tokens of every slot on a GPU (Pallas Triton): each state is read once and written once, where it is.

A program has some columns of a key head's state in registers, and goes through the slot's tokens one after the other,
so that a token is computed alike in a step of its own and among drafts. A slot without tokens is not touched.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.platform import missing_platform
from pallas_kernels.recurrence.batch import RecurrentTokens
from pallas_kernels.recurrence.blocks import lanes
from pallas_kernels.recurrence.specs import ShortSpec

WARPS = 4
BLOCK_ELEMENTS = 8192  # 64 registers of each thread
LEAST_COLUMNS = 16
MAX_TOKENS = 16


def unsupported(spec: ShortSpec, platform: str) -> str | None:
    if (reason := missing_platform("gpu", platform)) is not None:
        return reason
    if spec.key_size & (spec.key_size - 1) or _columns(spec.key_size, spec.width) < LEAST_COLUMNS:
        return (
            f"the GPU kernel takes a power of two of keys, and values in multiples of {LEAST_COLUMNS}, not "
            f"[{spec.key_size}, {spec.width}]"
        )
    if spec.tokens > MAX_TOKENS:
        return f"the GPU kernel takes up to {MAX_TOKENS} tokens of a slot, not {spec.tokens}"
    return None


def run_short(
    tokens: RecurrentTokens, state: jax.Array, lengths: jax.Array, is_new: jax.Array, *, writes: bool = True
) -> tuple[jax.Array, jax.Array]:
    """See `ragged.RunShort`."""
    num_slots, num_key_heads, key_size, width = state.shape
    num_tokens, columns = tokens.v.shape[1], _columns(key_size, width)
    values, decays, rates = lanes(tokens)
    wide = [values, decays] if rates is None else [values, decays, rates]
    scalar = pl.BlockSpec((1,), lambda slot, head, column: (slot,))
    by_key = pl.BlockSpec((1, num_tokens, 1, key_size), lambda slot, head, column: (slot, 0, head, 0))
    by_lane = pl.BlockSpec((1, num_tokens, 1, columns), lambda slot, head, column: (slot, 0, head, column))
    of_state = pl.BlockSpec((1, 1, key_size, columns), lambda slot, head, column: (slot, head, 0, column))
    shapes = [jax.ShapeDtypeStruct(values.shape, jnp.float32), jax.ShapeDtypeStruct(state.shape, jnp.float32)]
    results = pl.pallas_call(
        partial(_kernel, has_rates=rates is not None, writes=writes),
        out_shape=shapes[: 1 + writes],
        grid=(num_slots, num_key_heads, width // columns),
        in_specs=[scalar, scalar, by_key, by_key, *[by_lane] * len(wide), of_state],
        out_specs=[by_lane, of_state][: 1 + writes],
        input_output_aliases={4 + len(wide): 1} if writes else {},
        cost_estimate=pl.CostEstimate(
            flops=7 * num_tokens * state.size,
            transcendentals=0,
            bytes_accessed=(1 + writes) * state.nbytes + 4 * (2 * tokens.k.size + (1 + len(wide)) * values.size),
        ),
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1),
        name="linear_recurrence",
    )(lengths, is_new.astype(jnp.int32), tokens.q, tokens.k, *wide, state)
    return results[0].reshape(tokens.v.shape), results[1] if writes else state


def _columns(key_size: int, width: int) -> int:
    """Columns of a program's part of a state: a power of two that divides the width."""
    return min(width & -width, max(BLOCK_ELEMENTS // key_size, 1))


def _kernel(length_ref, is_new_ref, q_ref, k_ref, *refs, has_rates: bool, writes: bool):
    v_ref, decay_ref, *rate_refs = refs[: 2 + has_rates]
    state_ref, out_ref, *after_refs = refs[2 + has_rates :]
    length = length_ref[0]

    @pl.loop(length, out_ref.shape[1])
    def _(token):
        out_ref[0, token, 0, :] = jnp.zeros(out_ref.shape[3:], jnp.float32)

    def run_token(token, state):
        q, k = q_ref[0, token, 0, :][:, None], k_ref[0, token, 0, :][:, None]
        decay, new = decay_ref[0, token, 0, :], v_ref[0, token, 0, :]
        if has_rates:
            new = rate_refs[0][0, token, 0, :] * (new - decay * jnp.sum(state * k, axis=0))
        out_ref[0, token, 0, :] = decay * jnp.sum(state * q, axis=0) + jnp.sum(q * k) * new
        return decay[None] * state + k * new[None]

    @pl.when(length > 0)
    def _():
        before = jnp.where(is_new_ref[0] == 0, state_ref[0, 0], 0.0)
        after = lax.fori_loop(0, length, run_token, before)
        if writes:
            after_refs[0][0, 0] = after
