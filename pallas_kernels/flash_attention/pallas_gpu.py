"""Flash attention for Hopper GPUs (Pallas Mosaic GPU), after FlashAttention-3 (Shah et al. 2024, section 3.1).

A thread block computes 128 queries of one head: two warpgroups of 64 queries do the products (wgmma) and the softmax,
each hiding the other's latency, and a third fills a ring of key and value blocks by TMA. Only blocks that some of the
128 queries see are fetched. Keys and values are reshaped to blocks, [B, S / block, block, Hkv, K], which is free if S
is a multiple of the block (64 is enough); otherwise they are padded, which copies them.

Values beyond a row's length have zero weights but may be NaN, so the last block of such a row is fetched from a copy
with zeros there. Only this block of each row is copied.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu_compat as compat
from pallas_kernels.flash_attention.masking import MASKED, scaled_scores, visible_blocks, visible_keys
from pallas_kernels.flash_attention.specs import AttentionSpec, FlashOperands
from pallas_kernels.platform import missing_platform
from pallas_kernels.tuning import tuned

WARPGROUPS = 2
BLOCK_QUERIES = 64
BLOCK_KEYS = 128
HEAD_DIMS = (64, 128, 256)
SHARED_MEMORY_BYTES = 227 * 1024
LOG2_E = math.log2(math.e)
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def unsupported(spec: AttentionSpec, platform: str) -> str | None:
    if (reason := missing_platform("gpu", platform)) is not None:
        return reason
    if spec.dtype not in ("bfloat16", "float16"):
        return f"the GPU kernel takes bfloat16 and float16, not {spec.dtype}"
    if spec.head_dim not in HEAD_DIMS:
        return f"the GPU kernel takes a head_dim of {', '.join(map(str, HEAD_DIMS))}, not {spec.head_dim}"
    return compat.not_hopper()


NAME = "flash_attention pallas_gpu forward"
MAX_SLOTS = 4


@dataclass(frozen=True)
class GpuTunedSizes:
    """Tunable sizes, reduced to what fits: keys of a block, and blocks (slots) of the ring."""

    keys: int
    slots: int


def tunable(spec: AttentionSpec) -> dict[str, GpuTunedSizes]:
    """The sizes of the forward pass, by its name in tables."""
    return {NAME: tuned(GpuTunedSizes(BLOCK_KEYS, MAX_SLOTS), NAME, spec.facts)}


def candidates(spec: AttentionSpec) -> dict[str, list[GpuTunedSizes]]:
    """Sizes that the tuner measures."""
    return {NAME: [GpuTunedSizes(keys, slots) for keys in (64, 128) for slots in (2, 3, 4)]}


@dataclass(frozen=True)
class GpuBlockSizes:
    """Keys of a block, blocks (slots) of the ring, and columns of the result that one product computes."""

    keys: int
    num_slots: int
    columns: int


def block_sizes(spec: AttentionSpec) -> GpuBlockSizes:
    wanted = tunable(spec)[NAME]
    # Registers hold the result, one product with values and the scores: at most 64 x 256 + 64 x 128 + 64 x 64 floats.
    keys = min(wanted.keys, 64) if spec.head_dim > 128 or spec.num_keys % 128 else wanted.keys
    row = spec.head_dim * jnp.dtype(spec.dtype).itemsize
    queries = WARPGROUPS * BLOCK_QUERIES * (row + 4)
    num_slots = (SHARED_MEMORY_BYTES - 4096 - queries) // (2 * keys * row)
    return GpuBlockSizes(keys, max(2, min(num_slots, wanted.slots)), min(spec.head_dim, 128))


def attention(operands: FlashOperands, spec: AttentionSpec) -> tuple[jax.Array, jax.Array | None]:
    sizes = block_sizes(spec)
    tile = WARPGROUPS * BLOCK_QUERIES
    num_tiles, num_key_blocks = pl.cdiv(spec.num_queries, tile), pl.cdiv(spec.num_keys, sizes.keys)
    split = lambda array, size: _split(array, size, -array.shape[1] % size)  # noqa: E731
    q = _split(operands.q, BLOCK_QUERIES, num_tiles * tile - spec.num_queries)
    k, v = split(operands.k, sizes.keys), split(operands.v, sizes.keys)
    first, count, _ = visible_blocks(operands, spec, tile, sizes.keys)
    offset = jnp.zeros((spec.batch_size,), jnp.int32) if operands.query_offset is None else operands.query_offset
    length = jnp.full((spec.batch_size,), spec.num_keys, jnp.int32)
    if spec.has_lengths:
        length = jnp.minimum(length, operands.kv_lengths)
    inputs = [q, k, v, jnp.stack([first, count], -1), jnp.stack([offset, length], -1)]
    if spec.has_lengths:
        # The last block of each row, with zeros beyond its length.
        cut = jnp.minimum(length // sizes.keys, num_key_blocks - 1)
        last = jnp.take_along_axis(v, cut[:, None, None, None, None], axis=1)[:, 0]
        is_real = cut[:, None] * sizes.keys + jnp.arange(sizes.keys) < length[:, None]
        inputs.append(jnp.where(is_real[..., None, None], last, 0))
    if spec.has_sinks:
        inputs.append(operands.sinks)
    if spec.has_segments:
        padded = num_tiles * tile - spec.num_queries
        inputs += [_split(operands.query_segments, BLOCK_QUERIES, padded), split(operands.key_segments, sizes.keys)]
    out_type = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if spec.return_lse:
        shape = (spec.batch_size, spec.num_heads, WARPGROUPS * num_tiles, BLOCK_QUERIES)
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))

    results = compat.kernel(
        partial(_kernel, spec=spec, sizes=sizes),
        out_type=out_type,
        grid=(spec.num_heads, num_tiles, spec.batch_size),
        grid_names=("head", "tile", "batch"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        cost_estimate=pl.CostEstimate(**spec.cost),
        name="flash_attention",
    )(*inputs)
    out = results[0].reshape(spec.batch_size, -1, spec.num_heads, spec.head_dim)[:, : spec.num_queries]
    if not spec.return_lse:
        return out, None
    lse = results[1].reshape(spec.batch_size, spec.num_heads, -1)[..., : spec.num_queries]
    return out, lse.swapaxes(1, 2)


def _split(array: jax.Array, size: int, padding: int) -> jax.Array:
    """[B, N, ...] as [B, blocks, size, ...], N padded with `padding` zeros."""
    if padding:
        array = jnp.pad(array, ((0, 0), (0, padding), *[(0, 0)] * (array.ndim - 2)))
    return array.reshape(array.shape[0], -1, size, *array.shape[2:])


def _kernel(q_ref, k_ref, v_ref, range_ref, row_ref, *refs, spec: AttentionSpec, sizes: GpuBlockSizes):
    names = ["cut"] * spec.has_lengths + ["sinks"] * spec.has_sinks
    names += ["query_segments", "key_segments"] * spec.has_segments + ["out"] + ["lse"] * spec.return_lse
    gmem = {
        "q": q_ref,
        "k": k_ref,
        "v": v_ref,
        "range": range_ref,
        "row": row_ref,
        **dict(zip(names, refs, strict=True)),
    }

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    dtype, slots = q_ref.dtype, sizes.num_slots
    scratch = {
        "q": plgpu.SMEM((WARPGROUPS, BLOCK_QUERIES, spec.head_dim), dtype, transforms=transforms),
        "k": plgpu.SMEM((slots, sizes.keys, spec.head_dim), dtype, transforms=transforms),
        "v": plgpu.SMEM((slots, sizes.keys, spec.head_dim), dtype, transforms=transforms),
        "lse": plgpu.SMEM((WARPGROUPS, BLOCK_QUERIES), jnp.float32),
        "q_full": plgpu.Barrier(num_barriers=WARPGROUPS),
        "k_full": plgpu.Barrier(num_barriers=slots),
        "v_full": plgpu.Barrier(num_barriers=slots),
        "k_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=slots),
        "v_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=slots),
    }
    pl.run_scoped(
        lambda *values: _tile(gmem, dict(zip(scratch, values, strict=True)), spec, sizes),
        *scratch.values(),
        collective_axes="warpgroup",
    )


def _tile(gmem: dict, smem: dict, spec: AttentionSpec, sizes: GpuBlockSizes):
    """One tile of queries of a head: two warpgroups compute, the third fetches keys and values."""
    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    # With a causal mask the last queries see the most keys: they run first, so that none is left over at the end.
    tile = gmem["range"].shape[1] - 1 - lax.axis_index("tile")
    warpgroup = lax.axis_index("warpgroup")
    first, count = gmem["range"][batch, tile, 0], gmem["range"][batch, tile, 1]
    offset, length = gmem["row"][batch, 0], gmem["row"][batch, 1]

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        block = tile * WARPGROUPS + warpgroup
        _compute(gmem, smem, (batch, head, block), warpgroup, first, count, offset, length, spec, sizes)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        _fetch(gmem, smem, batch, lax.div(head, jnp.int32(spec.num_groups)), first, count, length, sizes)


def _compute(gmem, smem, place, warpgroup, first, count, offset, length, spec: AttentionSpec, sizes: GpuBlockSizes):
    """Attention of the 64 queries at `place`, (batch, head, block of queries), by one warpgroup."""
    batch, head, block = place
    q_smem = smem["q"].at[warpgroup]
    plgpu.copy_gmem_to_smem(gmem["q"].at[batch, block, :, head], q_smem, smem["q_full"].at[warpgroup])
    segments = None
    if spec.has_segments:
        query_segments = compat.load(gmem["query_segments"], (batch, block), ROWS)
        segments = (query_segments, gmem["key_segments"].at[batch])
    sink = gmem["sinks"][head] if spec.has_sinks else None
    position = offset + block * BLOCK_QUERIES
    plgpu.barrier_wait(smem["q_full"].at[warpgroup])
    out, lse = _attend(q_smem, smem, first, count, position, length, sink, segments, spec, sizes)
    for i, part in enumerate(out):
        q_smem[:, pl.ds(i * sizes.columns, sizes.columns)] = part.astype(q_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_smem, gmem["out"].at[batch, block, :, head])
    if spec.return_lse:
        lse_smem = smem["lse"].at[warpgroup]
        lse_smem[...] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(lse_smem, gmem["lse"].at[batch, head, block])
    plgpu.wait_smem_to_gmem(0)


def _fetch(gmem, smem, batch, kv_head, first, count, length, sizes: GpuBlockSizes):
    """Copies blocks of keys and values to the ring, each as soon as both warpgroups have read its slot."""

    @pl.loop(0, count)
    def _(step):
        slot = lax.rem(step, jnp.int32(sizes.num_slots))
        block = first + step

        @pl.when(step >= sizes.num_slots)
        def _wait_for_keys():
            plgpu.barrier_wait(smem["k_free"].at[slot])

        plgpu.copy_gmem_to_smem(gmem["k"].at[batch, block, :, kv_head], smem["k"].at[slot], smem["k_full"].at[slot])

        @pl.when(step >= sizes.num_slots)
        def _wait_for_values():
            plgpu.barrier_wait(smem["v_free"].at[slot])

        def fetch(source):
            plgpu.copy_gmem_to_smem(source, smem["v"].at[slot], smem["v_full"].at[slot])

        if "cut" in gmem:
            is_cut = (block + 1) * sizes.keys > length
            pl.when(is_cut)(lambda: fetch(gmem["cut"].at[batch, :, kv_head]))
            pl.when(jnp.logical_not(is_cut))(lambda: fetch(gmem["v"].at[batch, block, :, kv_head]))
        else:
            fetch(gmem["v"].at[batch, block, :, kv_head])

    if not compat.is_interpreted():
        return

    # The interpreter refuses barriers of which some phases were waited for, and the last one was not.
    @pl.loop(jnp.maximum(count - sizes.num_slots, 0), count)
    def _(step):
        slot = lax.rem(step, jnp.int32(sizes.num_slots))
        plgpu.barrier_wait(smem["k_free"].at[slot])
        plgpu.barrier_wait(smem["v_free"].at[slot])


def _attend(q_smem, smem, first, count, position, length, sink, segments, spec: AttentionSpec, sizes: GpuBlockSizes):
    """Online softmax of 64 queries, with powers of 2: the result in parts of `columns`, and the log-sum-exp."""
    spec = replace(spec, scale=spec.scale * LOG2_E, soft_cap=None if spec.soft_cap is None else spec.soft_cap * LOG2_E)
    shape = (BLOCK_QUERIES, sizes.keys)
    rows = lambda value: compat.cast_layout(jnp.full((BLOCK_QUERIES,), value, jnp.float32), ROWS)  # noqa: E731
    highest, total = rows(MASKED), rows(0.0)
    if sink is not None:
        # A sink is a key before all others whose value is zero; -inf has no weight.
        sink = rows(sink * LOG2_E)
        highest = jnp.maximum(sink, MASKED)
        total = jnp.exp2(sink - highest)
    zeros = jnp.zeros((BLOCK_QUERIES, sizes.columns), jnp.float32)
    weighted = tuple(compat.cast_layout(zeros, plgpu.Layout.WGMMA) for _ in range(spec.head_dim // sizes.columns))

    def step(i, carry, is_masked: bool):
        highest, total, weighted = carry
        slot = lax.rem(i, jnp.int32(sizes.num_slots))
        plgpu.barrier_wait(smem["k_full"].at[slot])
        scores = compat.wgmma(q_smem, smem["k"].at[slot], transpose_b=True)
        plgpu.barrier_arrive(smem["k_free"].at[slot])
        scores = scaled_scores(spec, scores, tanh=_tanh)
        if is_masked:
            start = (first + i) * sizes.keys
            positions = position + compat.iota(shape, 0, plgpu.Layout.WGMMA)
            keys = start + compat.iota(shape, 1, plgpu.Layout.WGMMA)
            rows_and_columns = (None, None)
            if segments is not None:
                columns = compat.load(segments[1], (first + i,), COLUMNS)
                rows_and_columns = (
                    lax.broadcast_in_dim(segments[0], shape, (0,)),
                    lax.broadcast_in_dim(columns, shape, (1,)),
                )
            # The padding of the last block lies beyond every length.
            visible = visible_keys(replace(spec, has_lengths=True), positions, keys, length, *rows_and_columns)
            scores = jnp.where(visible, scores, MASKED)  # pyright: ignore
        new_highest = jnp.maximum(highest, scores.max(axis=1))
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_highest, shape, (0,)))
        decay = jnp.exp2(highest - new_highest)
        total = total * decay + weights.sum(axis=1)
        weights = weights.astype(q_smem.dtype)
        plgpu.barrier_wait(smem["v_full"].at[slot])
        parts = []
        for part, old in enumerate(weighted):
            values = smem["v"].at[slot, :, pl.ds(part * sizes.columns, sizes.columns)]
            decayed = old * lax.broadcast_in_dim(decay, old.shape, (0,))
            parts.append(decayed + compat.wgmma(weights, values))
        plgpu.barrier_arrive(smem["v_free"].at[slot])
        return new_highest, total, tuple(parts)

    carry = (highest, total, weighted)
    for start, stop, is_masked in _loops(first, count, position, length, spec, sizes):
        carry = lax.fori_loop(start, stop, partial(step, is_masked=is_masked), carry)
    highest, total, weighted = carry
    # The maximum may drop a NaN; the sum does not, and tells a row of NaN scores from a row without visible keys.
    is_unseen = (highest == MASKED) & (total == total)
    divisor = jnp.where(is_unseen, 1.0, total)
    factor = lax.broadcast_in_dim(jnp.where(is_unseen, 0.0, 1.0 / divisor), zeros.shape, (0,))
    lse = jnp.where(is_unseen, -jnp.inf, highest / LOG2_E + jnp.log(divisor)) if spec.return_lse else None
    return tuple(part * factor for part in weighted), lse


def _tanh(x):
    """tanh by the fast power of 2 of the softmax; the error of tanh.approx would be 5e-4 of the cap."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2 * LOG2_E)) + 1.0)


def _loops(first, count, position, length, spec: AttentionSpec, sizes: GpuBlockSizes):
    """Ranges of steps in order, (start, stop, is_masked): blocks that every query sees whole need no mask."""
    if spec.has_segments:
        return [(0, count, True)]
    limit = length
    if spec.causal:
        limit = jnp.minimum(limit, position + 1)
    block = jnp.int32(sizes.keys)
    whole_end = jnp.clip(lax.div(jnp.maximum(limit, 0), block) - first, 0, count)
    whole_start = 0
    if spec.window is not None:
        needed = jnp.maximum(position + BLOCK_QUERIES - spec.window, 0)
        whole_start = jnp.clip(lax.div(needed + block - 1, block) - first, 0, count)
        whole_end = jnp.maximum(whole_end, whole_start)
    loops = [(whole_start, whole_end, False), (whole_end, count, True)]
    return loops if spec.window is None else [(0, whole_start, True), *loops]
