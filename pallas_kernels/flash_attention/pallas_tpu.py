"""Flash attention for TPUs (Pallas Mosaic).

One step of the grid holds a block of queries and a block of keys of several key heads in VMEM. Keys and values are read
in the caller's layout, [B, S, Hkv, K]; queries and results, which are short, are transposed outside the kernel so that
the queries of one key head are the rows of a matrix: row r of a block is token r // G, group r % G.

If head_dim is not a multiple of 128, XLA keeps the caller's [B, S, Hkv, K] with S in the lanes and copies it for the
kernel: every call then costs the capacity of the cache.

The range of key blocks that a block of queries sees is computed outside and prefetched as scalars. Steps beyond it
compute nothing and repeat the block index, so that nothing is fetched; with `kv_lengths` the grid ends with the longest
row.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.flash_attention.masking import MASKED, scaled_scores, visible_blocks, visible_keys
from pallas_kernels.flash_attention.specs import AttentionSpec, FlashOperands
from pallas_kernels.platform import missing_platform
from pallas_kernels.tpu_parameters import compiler_params, vmem_bytes
from pallas_kernels.tuning import tuned

LANES = 128
# Rows (queries times groups) and keys of one score matrix, 1 MiB in float32.
BLOCK_ROWS = 512
BLOCK_KEYS = 512
# VMEM for the blocks of one step, of 64 MiB at least; on a v4, of its 16 MiB, blocks of fewer rows.
VMEM_BYTES, SMALL_VMEM_BYTES, SMALL_BLOCK_ROWS = 24 * 2**20, 10 * 2**20, 128
HEAD_DIMS = (64, 80, 96, 128, 256)


def unsupported(spec: AttentionSpec, platform: str) -> str | None:
    if (reason := missing_platform("tpu", platform)) is not None:
        return reason
    if spec.dtype not in ("float32", "bfloat16"):
        return f"the TPU kernel takes float32 and bfloat16, not {spec.dtype}"
    if spec.head_dim not in HEAD_DIMS:
        return f"the TPU kernel takes a head_dim of {', '.join(map(str, HEAD_DIMS))}, not {spec.head_dim}"
    size, limit = block_sizes(spec).vmem_bytes, _block_bytes() * 5 // 4
    if size > limit:
        return (
            f"the smallest blocks of {spec.num_heads} query heads on {spec.num_kv_heads} key heads "
            f"take {size} bytes of VMEM, more than {limit}"
        )
    return None


NAME = "flash_attention pallas_tpu forward"


@dataclass(frozen=True)
class TpuTunedSizes:
    """Tunable sizes, reduced to what fits: rows (queries times groups) and keys of one score matrix."""

    rows: int
    keys: int


def tunable(spec: AttentionSpec) -> dict[str, TpuTunedSizes]:
    """The sizes of the forward pass, by its name in tables."""
    rows = BLOCK_ROWS if _block_bytes() == VMEM_BYTES else SMALL_BLOCK_ROWS
    return {NAME: tuned(TpuTunedSizes(rows, BLOCK_KEYS), NAME, spec.facts)}


def candidates(spec: AttentionSpec) -> dict[str, list[TpuTunedSizes]]:
    """Sizes that the tuner measures."""
    return {NAME: [TpuTunedSizes(rows, keys) for rows in (256, 512, 1024) for keys in (256, 512, 1024, 2048)]}


@dataclass(frozen=True)
class TpuBlockSizes:
    """Tokens, keys and key heads of one step, and the number of steps for all queries and keys."""

    tokens: int
    keys: int
    heads: int
    num_query_blocks: int
    num_key_blocks: int
    vmem_bytes: int


def block_sizes(spec: AttentionSpec) -> TpuBlockSizes:
    """The largest blocks whose buffers fit in the VMEM for them."""
    groups, wanted, most_bytes = spec.num_groups, tunable(spec)[NAME], _block_bytes()
    # A row of the log-sum-exp is a lane: blocks are whole vectors of lanes, unless one block holds all rows.
    step = LANES // math.gcd(LANES, groups)
    tokens = min(max(wanted.rows // groups // step, 1) * step, spec.num_queries)
    keys = min(wanted.keys, spec.num_keys)
    # A block has all heads or a multiple of 8.
    heads = [spec.num_kv_heads] + [n for n in range(spec.num_kv_heads - 1, 7, -1)
                                   if n % 8 == 0 and spec.num_kv_heads % n == 0]  # fmt: skip
    for num_heads in heads:
        size = _vmem_bytes(spec, tokens * groups, keys, num_heads)
        if size <= most_bytes:
            break
    else:
        num_heads = heads[-1]
        while size > most_bytes and keys > LANES:
            keys = max(keys // 2 // LANES, 1) * LANES
            size = _vmem_bytes(spec, tokens * groups, keys, num_heads)
    return TpuBlockSizes(tokens, keys, num_heads, pl.cdiv(spec.num_queries, tokens), pl.cdiv(spec.num_keys, keys), size)


def _block_bytes() -> int:
    """VMEM for the blocks of one step, on the chip that the kernel is traced for."""
    return VMEM_BYTES if vmem_bytes() >= 2 * VMEM_BYTES else SMALL_VMEM_BYTES


def _vmem_bytes(spec: AttentionSpec, rows: int, keys: int, heads: int) -> int:
    """VMEM of one step, in bytes: two buffers for each operand's block, keys and values by head, running sums and three
    score matrices."""
    width = pl.cdiv(spec.head_dim, LANES) * LANES
    size = jnp.dtype(spec.dtype).itemsize
    rows = pl.cdiv(rows, 16) * 16
    operands = 2 * size * width * (2 * heads * rows + 3 * keys * pl.cdiv(heads, 16) * 16)
    columns = 2 * 4 * LANES * rows * (spec.has_segments + heads * spec.has_sinks)
    return operands + columns + 4 * heads * rows * (width + 2 * LANES) + 3 * 4 * rows * keys


def attention(operands: FlashOperands, spec: AttentionSpec) -> tuple[jax.Array, jax.Array | None]:
    """Output [B, T, Hq, K] in q's dtype and log-sum-exp [B, T, Hq], None unless `spec.return_lse`."""
    sizes = block_sizes(spec)
    batch = spec.batch_size
    rows = sizes.tokens * spec.num_groups
    first, count, num_steps = visible_blocks(operands, spec, sizes.tokens, sizes.keys)
    first, count = first.reshape(-1), count.reshape(-1)
    offset = jnp.zeros((batch,), jnp.int32) if operands.query_offset is None else operands.query_offset
    lengths = jnp.full((batch,), spec.num_keys, jnp.int32) if operands.kv_lengths is None else operands.kv_lengths
    inputs, in_specs = _inputs(operands, spec, sizes)
    out_shape = [jax.ShapeDtypeStruct(inputs[0].shape, operands.q.dtype)]
    out_specs = in_specs[:1]
    if spec.return_lse:
        lse_shape = (batch, spec.num_kv_heads, 1, spec.num_queries * spec.num_groups)
        out_shape.append(jax.ShapeDtypeStruct(lse_shape, jnp.float32))
        out_specs.append(pl.BlockSpec((1, sizes.heads, 1, rows), lambda b, h, i, j, *scalars: (b, h, 0, i)))

    results = pl.pallas_call(
        partial(_kernel, spec=spec, sizes=sizes),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, spec.num_kv_heads // sizes.heads, sizes.num_query_blocks, num_steps),  # pyright: ignore
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((sizes.heads, sizes.keys, spec.head_dim), operands.k.dtype),
                pltpu.VMEM((sizes.heads, sizes.keys, spec.head_dim), operands.k.dtype),
                pltpu.VMEM((sizes.heads, rows, LANES), jnp.float32),
                pltpu.VMEM((sizes.heads, rows, LANES), jnp.float32),
                pltpu.VMEM((sizes.heads, rows, spec.head_dim), jnp.float32),
            ],
        ),
        compiler_params=compiler_params(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=min(2 * VMEM_BYTES, vmem_bytes() - 2**20),
        ),
        cost_estimate=pl.CostEstimate(**spec.cost),
        name="flash_attention",
    )(first, count, offset, lengths, *inputs)
    lse = _tokens_first(results[1][:, :, 0], spec) if spec.return_lse else None
    return _tokens_first(results[0], spec), lse


def _rows_first(array: jax.Array, spec: AttentionSpec) -> jax.Array:
    """[B, T, Hq, ...] as [B, Hkv, T * G, ...]."""
    split = array.reshape(*array.shape[:2], spec.num_kv_heads, spec.num_groups, *array.shape[3:]).swapaxes(1, 2)
    return split.reshape(*split.shape[:2], -1, *array.shape[3:])


def _tokens_first(array: jax.Array, spec: AttentionSpec) -> jax.Array:
    """[B, Hkv, T * G, ...] as [B, T, Hq, ...]."""
    split = array.reshape(*array.shape[:2], spec.num_queries, spec.num_groups, *array.shape[3:]).swapaxes(1, 2)
    return split.reshape(*split.shape[:2], spec.num_heads, *array.shape[3:])


def _inputs(operands: FlashOperands, spec: AttentionSpec, sizes: TpuBlockSizes) -> tuple[list[jax.Array], list]:
    """The arrays in HBM and their block specs, queries first. The grid is (batch, key heads, queries, keys)."""
    groups, rows = spec.num_groups, sizes.tokens * spec.num_groups

    def key_block(b, i, j, first, count):
        place = b * sizes.num_query_blocks + i
        return first[place] + jnp.minimum(j, jnp.maximum(count[place] - 1, 0))

    queries = pl.BlockSpec((1, sizes.heads, rows, spec.head_dim), lambda b, h, i, j, *scalars: (b, h, i, 0))
    keys = pl.BlockSpec(
        (1, sizes.keys, sizes.heads, spec.head_dim),
        lambda b, h, i, j, first, count, *scalars: (b, key_block(b, i, j, first, count), h, 0),
    )
    inputs, in_specs = [_rows_first(operands.q, spec), operands.k, operands.v], [queries, keys, keys]
    if spec.has_sinks:
        sinks = operands.sinks.reshape(spec.num_kv_heads, 1, groups)
        inputs.append(jnp.broadcast_to(sinks, (spec.num_kv_heads, sizes.tokens, groups)).reshape(-1, rows, 1))
        in_specs.append(pl.BlockSpec((sizes.heads, rows, 1), lambda b, h, i, j, *scalars: (h, 0, 0)))
    if spec.has_segments:
        inputs.append(jnp.repeat(operands.query_segments, groups, axis=1)[..., None])
        in_specs.append(pl.BlockSpec((1, rows, 1), lambda b, h, i, j, *scalars: (b, i, 0)))
        inputs.append(operands.key_segments[:, None])
        in_specs.append(
            pl.BlockSpec((1, 1, sizes.keys), lambda b, h, i, j, f, c, *scalars: (b, 0, key_block(b, i, j, f, c)))
        )
    return inputs, in_specs


def _kernel(first_ref, count_ref, offset_ref, lengths_ref, q_ref, k_ref, v_ref, *refs, spec: AttentionSpec, sizes):
    """One step of the grid: a block of queries and a block of keys, for several key heads."""
    refs = list(refs)
    sinks_ref = refs.pop(0) if spec.has_sinks else None
    query_segments_ref, key_segments_ref = (refs.pop(0), refs.pop(0)) if spec.has_segments else (None, None)
    out_ref = refs.pop(0)
    lse_ref = refs.pop(0) if spec.return_lse else None
    k_heads_ref, v_heads_ref, *sums = refs
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    place = b * sizes.num_query_blocks + i
    rows = sizes.tokens * spec.num_groups
    pl.when(j == 0)(lambda: _start(sinks_ref, *sums))

    low_position = offset_ref[b] + i * sizes.tokens
    start = (first_ref[place] + j) * sizes.keys
    length = jnp.minimum(lengths_ref[b], spec.num_keys)
    needs_mask = start + sizes.keys > length
    if spec.causal:
        needs_mask |= start + sizes.keys - 1 > low_position
    if spec.window is not None:
        needs_mask |= start <= low_position + sizes.tokens - 1 - spec.window
    if spec.has_segments:
        needs_mask = True

    def accumulate(is_masked: bool):
        visible = exists = None
        if is_masked:
            key = start + lax.broadcasted_iota(jnp.int32, (rows, sizes.keys), 1)
            token = lax.broadcasted_iota(jnp.int32, (rows, sizes.keys), 0) // spec.num_groups
            segments = (query_segments_ref[0], key_segments_ref[0]) if spec.has_segments else (None, None)  # pyright: ignore
            visible = visible_keys(spec, low_position + token, key, length, *segments)
            if not spec.has_lengths and spec.num_keys % sizes.keys:
                visible = key < length if visible is None else visible & (key < length)
            # Values beyond the length may be NaN, and 0 * NaN is NaN.
            exists = start + lax.broadcasted_iota(jnp.int32, (sizes.keys, spec.head_dim), 0) < length
        # A packed head can only be sliced at a static index: heads are unpacked first, and a loop that is not unrolled
        # attends to each. 8 unrolled heads took 12 s to compile, the loop takes 2 s.
        for head in range(sizes.heads):
            k, v = k_ref[0, :, head], v_ref[0, :, head]
            k_heads_ref[head] = k
            v_heads_ref[head] = v if exists is None else jnp.where(exists, v, jnp.zeros_like(v))

        @pl.loop(0, sizes.heads)
        def _(head):
            operands = (q_ref.at[0, head], k_heads_ref.at[head], v_heads_ref.at[head], visible)
            _accumulate_head(*operands, *(ref.at[head] for ref in sums), spec=spec)

    is_seen = j < count_ref[place]
    pl.when(is_seen & needs_mask)(lambda: accumulate(True))
    if needs_mask is not True:
        pl.when(is_seen & ~needs_mask)(lambda: accumulate(False))
    pl.when(j == pl.num_programs(3) - 1)(lambda: _finish(out_ref, lse_ref, *sums))


def _start(sinks_ref, highest_ref, total_ref, weighted_ref):
    """Resets the running maximum, sum of weights and weighted values."""
    weighted_ref[...] = jnp.zeros_like(weighted_ref)
    if sinks_ref is None:
        highest_ref[...] = jnp.full_like(highest_ref, MASKED)
        total_ref[...] = jnp.zeros_like(total_ref)
    else:
        # A sink is a key before all others whose value is zero; -inf has no weight.
        sinks = jnp.broadcast_to(sinks_ref[...], highest_ref.shape)
        highest = jnp.maximum(sinks, MASKED)
        highest_ref[...] = highest
        total_ref[...] = jnp.exp(sinks - highest)


def _finish(out_ref, lse_ref, highest_ref, total_ref, weighted_ref):
    """Writes the normalised output and the log-sum-exp: zeros and -inf for queries that see no key."""
    total, highest = total_ref[...], highest_ref[...]
    is_unseen = (highest == MASKED) & ~jnp.isnan(total)
    out = weighted_ref[...] / jnp.where(is_unseen, 1.0, total)[..., :1]
    out = jnp.where(is_unseen[..., :1], 0.0, out)
    out_ref[0] = out.astype(out_ref.dtype)
    if lse_ref is not None:
        lse = jnp.where(is_unseen, -jnp.inf, highest + jnp.log(total))
        for head in range(lse_ref.shape[1]):
            lse_ref[0, head] = lse[head].T[:1]


def _accumulate_head(q_ref, k_ref, v_ref, visible, highest_ref, total_ref, weighted_ref, spec: AttentionSpec):
    """One step of the online softmax, for the rows of one key head."""
    precision = lax.Precision.HIGHEST if spec.dtype == "float32" else lax.Precision.DEFAULT
    dot = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    scores = scaled_scores(spec, dot(q_ref[...], k_ref[...], (((1,), (1,)), ((), ()))))
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    highest = highest_ref[:, :1]
    new_highest = jnp.maximum(highest, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - new_highest)
    decay = jnp.exp(highest - new_highest)
    total = total_ref[:, :1] * decay + jnp.sum(weights, axis=1, keepdims=True)
    highest_ref[...] = jnp.broadcast_to(new_highest, highest_ref.shape)
    total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
    weighted_ref[...] = weighted_ref[...] * decay + dot(
        weights.astype(v_ref.dtype), v_ref[...], (((1,), (0,)), ((), ()))
    )
