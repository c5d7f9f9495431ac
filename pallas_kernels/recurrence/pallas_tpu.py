"""A few tokens of every slot on a TPU: each state is read once and written once, where it is.

A grid step has some key heads of a slot. 128 columns of a head's state stay in registers while its tokens go through
them one after the other, so that a token is computed alike in a step of its own and among drafts. Keys and queries
multiply along rows of the state, so each is laid along a column first, once for all columns of the state.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.platform import is_tpu_interpreted, missing_platform
from pallas_kernels.recurrence.batch import RecurrentTokens
from pallas_kernels.recurrence.blocks import lanes
from pallas_kernels.recurrence.specs import ShortSpec
from pallas_kernels.tpu_parameters import compiler_params

LANES = 128
SUBLANES = 8
MAX_TOKENS = 16
STATE_MOVES = 2
# Of a state: four such blocks are in vector memory, two on the way in and two on the way out.
BLOCK_BYTES = 2**20


def unsupported(spec: ShortSpec, platform: str) -> str | None:
    if not is_tpu_interpreted() and (reason := missing_platform("tpu", platform)) is not None:
        return reason
    if spec.key_size % LANES or spec.width % LANES:
        return f"the TPU kernel takes states in multiples of {LANES}, not [{spec.key_size}, {spec.width}]"
    if spec.tokens > MAX_TOKENS:
        return f"the TPU kernel takes up to {MAX_TOKENS} tokens of a slot, not {spec.tokens}"
    return None


def run_short(
    tokens: RecurrentTokens, state: jax.Array, lengths: jax.Array, is_new: jax.Array, *, writes: bool = True
) -> tuple[jax.Array, jax.Array]:
    """See `ragged.RunShort`."""
    num_slots, num_key_heads, key_size, width = state.shape
    num_tokens = tokens.v.shape[1]
    heads, columns = _block(num_key_heads, key_size, width)
    values, decays, rates = lanes(tokens)
    wide = [values, decays] if rates is None else [values, decays, rates]
    by_key = pl.BlockSpec((1, num_tokens, heads, key_size), lambda slot, head, column, *_: (slot, 0, head, 0))
    by_lane = pl.BlockSpec((1, num_tokens, heads, columns), lambda slot, head, column, *_: (slot, 0, head, column))
    of_state = pl.BlockSpec((1, heads, key_size, columns), lambda slot, head, column, *_: (slot, head, 0, column))
    shapes = [jax.ShapeDtypeStruct(values.shape, jnp.float32), jax.ShapeDtypeStruct(state.shape, jnp.float32)]
    results = pl.pallas_call(
        partial(_kernel, has_rates=rates is not None, writes=writes),
        out_shape=shapes[: 1 + writes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_slots, num_key_heads // heads, width // columns),
            in_specs=[by_key, by_key, *[by_lane] * len(wide), of_state],
            out_specs=[by_lane, of_state][: 1 + writes],
            scratch_shapes=[pltpu.VMEM((num_tokens, key_size, LANES), jnp.float32)] * 2,
        ),
        input_output_aliases={4 + len(wide): 1} if writes else {},
        cost_estimate=pl.CostEstimate(
            flops=7 * num_tokens * state.size,
            transcendentals=0,
            bytes_accessed=(1 + writes) * state.nbytes + 4 * (2 * tokens.k.size + (1 + len(wide)) * values.size),
        ),
        compiler_params=compiler_params(dimension_semantics=("parallel", "parallel", "parallel")),
        name="linear_recurrence",
    )(lengths, is_new.astype(jnp.int32), tokens.q, tokens.k, *wide, state)
    return results[0].reshape(tokens.v.shape), results[1] if writes else state


def _block(num_key_heads: int, key_size: int, width: int) -> tuple[int, int]:
    """Key heads and columns of a grid step. Key heads are all, or a multiple of the sublanes that one tile has."""
    most = max(BLOCK_BYTES // (4 * key_size), LANES)
    columns = next(size for size in range(width, 0, -LANES) if width % size == 0 and size <= most)
    choices = [size for size in range(SUBLANES, num_key_heads, SUBLANES) if num_key_heads % size == 0]
    heads = [size for size in choices if columns == width and size * width <= most]
    return heads[-1] if heads else (choices or [num_key_heads])[0], columns


def _kernel(lengths, is_new, q_ref, k_ref, *refs, has_rates: bool, writes: bool):
    v_ref, decay_ref, *rate_refs = refs[: 2 + has_rates]
    state_ref, out_ref, *after_refs, q_columns, k_columns = refs[2 + has_rates :]
    slot = pl.program_id(0)
    length, keeps = lengths[slot], is_new[slot] == 0
    out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)

    if writes:

        @pl.when(length == 0)
        def _():
            after_refs[0][...] = state_ref[...]

    def run_head(head: int):
        @pl.loop(0, length)
        def _(token):
            for ref, columns in ((q_ref, q_columns), (k_ref, k_columns)):
                columns[token] = _as_column(ref[0, token, pl.ds(head, 1)])

        for start in range(0, state_ref.shape[3], LANES):
            part = pl.ds(start, LANES)

            def run_token(token, state, part=part):
                q, k = q_columns[token], k_columns[token]
                at = (0, token, pl.ds(head, 1), part)
                decay, new = decay_ref[at], v_ref[at]
                if has_rates:
                    new = rate_refs[0][at] * (new - decay * jnp.sum(state * k, axis=0, keepdims=True))
                from_state = decay * jnp.sum(state * q, axis=0, keepdims=True)
                out_ref[at] = from_state + jnp.sum(q * k, axis=0, keepdims=True) * new
                return decay * state + k * new

            before = jnp.where(keeps, state_ref[0, head, :, part], 0.0)
            after = lax.fori_loop(0, length, run_token, before)
            if writes:
                after_refs[0][0, head, :, part] = after

    @pl.when(length > 0)
    def _():
        for head in range(state_ref.shape[1]):
            run_head(head)


def _as_column(row: jax.Array) -> jax.Array:
    """[K, LANES], in each column the K values of a row [1, K]."""
    size = row.shape[1]
    parts = [jnp.broadcast_to(row[:, start : start + LANES], (LANES, LANES)).T for start in range(0, size, LANES)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
