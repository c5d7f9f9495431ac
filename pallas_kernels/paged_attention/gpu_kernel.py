"""The Mosaic GPU kernel: split-KV attention to pages (Dao et al. 2023, Flash-Decoding), with the sum of the splits.

A thread block (one warpgroup) processes items of `gpu_schedule`. For each item it keeps several blocks of keys and
values in flight from their pages to shared memory (TMA), and attends to them (`gpu_blocks`). The items of a tile write
partial results; the last one to finish combines them, in the order of their keys, and writes the rows of the result.
Several thread blocks share a multiprocessor: the softmax of one overlaps with the products and waits of another.

New tokens, rounded to the cache's dtype (`layout.to_stored`), are written to their pages by the items that read them:
an item copies them from shared memory to the page, waits for the write, then loads the page like any other.
"""

from collections import namedtuple
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu_compat as compat
from pallas_kernels.paged_attention.gpu_blocks import Blocks
from pallas_kernels.paged_attention.gpu_schedule import BLOCK_KEYS, COLUMNS, SplitPlan, SplitPlanShape, num_resident
from pallas_kernels.paged_attention.gpu_sizes import KernelSizes, kernel_sizes, row_bytes, stored_row, transforms
from pallas_kernels.paged_attention.layout import SeparatePages
from pallas_kernels.paged_attention.specs import PagedSpec

ItemFields = namedtuple("ItemFields", COLUMNS)
# Numbers of partial results that a thread has in flight while it combines them.
COMBINED_REGISTERS = 64


def run(
    q_tiles: jax.Array,
    pages: SeparatePages,
    new_tokens: SeparatePages | None,
    page_table: jax.Array,
    plan: SplitPlan,
    rows: dict[str, jax.Array],
    out: Any,
    spec: PagedSpec,
    shape: SplitPlanShape,
) -> Any:
    """Runs one program, which writes the results of its tokens. Returns them, [T, Hq, K] in q's dtype.

    q_tiles: [num_tiles, Hkv, out_rows, K] in `compute_dtype`.
    pages: `jax.new_ref`s of the cache, updated if there are `new_tokens`.
    new_tokens: stored values [T, Hkv, K] of k_new and v_new, T at least `padded_new_tokens`; for int8 also float32
      scales, by token [T, 2, Hkv] and aligned with their keys [S, 2, 2, Hkv, 64] (block of the first new token or the
      next one; keys or values). None if the pages have the new tokens already.
    rows: facts of the rows of tiles: `aux`, int32 [num_tiles, 2, rows], ancestor bits and depth; `sinks`, float32
      [num_tiles, Hkv, rows], base 2; rows are `KernelSizes.rows`. Neither without ancestors or sinks.
    out: a `jax.new_ref` that has the results of another program's tokens, or None: then those of no sequence are zero.
    """
    size = kernel_sizes(spec, shape, new_tokens is not None)
    num_slots = shape.num_tiles * shape.num_splits
    arrivals = jax.new_ref(plan.arrivals, memory_space=plgpu.GMEM) if compat.is_interpreted() else plan.arrivals
    inputs: dict[str, Any] = {"work": plan.work, "count": plan.count, "table": page_table, "q": q_tiles}
    inputs |= {"k": pages.k, "v": pages.v, "k_scales": pages.k_scales, "v_scales": pages.v_scales}
    if new_tokens is not None:
        inputs |= {"new_k": new_tokens.k, "new_v": new_tokens.v}
        inputs |= {"new_scales": new_tokens.k_scales, "aligned_scales": new_tokens.v_scales}
    inputs |= rows | ({"is_padding": plan.is_padding} if out is None else {"out": out})
    results: dict[str, Any] = {}
    if out is None:
        results["out"] = jax.ShapeDtypeStruct(
            (spec.num_tokens, spec.num_q_heads, spec.head_dim), jnp.dtype(spec.q_dtype)
        )
    if shape.num_splits > 1:
        leading = (num_slots, spec.num_kv_heads)
        inputs["arrivals"] = arrivals
        results["parts"] = jax.ShapeDtypeStruct((*leading, *size.weighted_shape), jnp.float32)
        results["stats"] = jax.ShapeDtypeStruct((*leading, 2, size.rows), jnp.float32)
    inputs = {name: array for name, array in inputs.items() if array is not None}
    scratch = _scratch(q_tiles.dtype, spec, size, inputs)

    def body(*refs):
        named = dict(zip((*inputs, *results, *scratch), refs, strict=True))
        _Kernel(spec, shape, size, named).run()

    # Upper bound: every query sees all keys that its sequence may have, or all of its window.
    num_keys = spec.max_kv_length if spec.window is None else min(spec.window + size.rows, spec.max_kv_length)
    num_tiles = shape.num_tiles * spec.num_kv_heads
    cost = pl.CostEstimate(
        flops=4 * num_tiles * size.rows * num_keys * spec.head_dim,
        bytes_accessed=2 * num_tiles * num_keys * row_bytes(spec) + q_tiles.nbytes,
        transcendentals=num_tiles * size.rows * num_keys,
    )
    outputs = compat.kernel_in_place(
        body,
        out_type=tuple(results.values()),
        scratch_types=tuple(scratch.values()),
        grid=(num_blocks(spec, shape),),
        grid_names=("block",),
        cost_estimate=cost,
        name="paged_attention",
    )(*inputs.values())
    return outputs[0] if out is None else out[...]


def num_blocks(spec: PagedSpec, shape: SplitPlanShape) -> int:
    """Thread blocks of a program: no more than are resident."""
    if shape.num_splits > 1 and not compat.has_ordered_blocks():
        return 1
    return min(shape.num_tiles * shape.num_splits * spec.num_kv_heads, num_resident())


def _scratch(dtype, spec: PagedSpec, size: KernelSizes, inputs: dict) -> dict:
    """Shared memory and barriers that an item needs whatever its keys, by the names of `_Kernel.refs`."""
    has_append, has_aux = "new_k" in inputs, "aux" in inputs
    rows = (size.rows, spec.head_dim)
    scratch: dict = {"q_smem": plgpu.SMEM(rows, dtype, transforms=transforms(spec.head_dim, dtype))}
    if has_append:
        width, stored = stored_row(spec)
        appended = plgpu.SMEM((size.new_tokens, width), stored)
        scratch |= {"new_k_smem": appended, "new_v_smem": appended, "new_barrier": plgpu.Barrier(num_arrivals=2)}
    if has_aux:
        scratch["aux_smem"] = plgpu.SMEM((2, size.aux_rows), jnp.int32)
    if "arrivals" in inputs:
        scratch["arrival_smem"] = plgpu.SMEM((1,), jnp.int32)
    copies = _pages_of_block(spec)
    if spec.page.has_scales:
        copies += copies + has_append
    scratch["q_barrier"] = plgpu.Barrier(num_arrivals=1 + has_aux)
    scratch["k_barrier"] = plgpu.Barrier(num_arrivals=copies, num_barriers=size.stages)
    scratch["v_barrier"] = plgpu.Barrier(num_arrivals=copies, num_barriers=size.stages)
    if not size.is_transposed:
        scratch["sync_barrier"] = plgpu.Barrier()
    return scratch


def _pages_of_block(spec: PagedSpec) -> int:
    return max(1, BLOCK_KEYS // spec.page_size)


class _Kernel:
    """The kernel of one warpgroup: its references by name, and the scalar fields of the current item."""

    def __init__(self, spec: PagedSpec, shape: SplitPlanShape, size: KernelSizes, refs: dict):
        self.spec, self.shape, self.size, self.refs = spec, shape, size, refs
        self.has_append = "new_k" in refs

    def run(self):
        first, step = lax.axis_index("block"), num_blocks(self.spec, self.shape)
        if self.shape.out_rows < self.size.rows:
            # Rows that copies do not fill.
            zeros = jnp.zeros((self.size.rows, self.spec.head_dim), self.size.dtype)
            self.refs["q_smem"][...] = compat.cast_layout(zeros, plgpu.Layout.WGMMA)
            plgpu.commit_smem()
        if "is_padding" in self.refs:
            self.clear_padding(first, step)
        total = self.refs["count"][0] * self.spec.num_kv_heads
        lax.fori_loop(0, lax.div(total - first + step - 1, step), lambda i, _: self.item(first + i * step), None)

    def clear_padding(self, first, step):
        """Zeroes the results of tokens of no sequence, each by one thread block."""
        spec, refs = self.spec, self.refs

        def clear(zeros_smem):
            zeros = jnp.zeros(zeros_smem.shape, zeros_smem.dtype)
            zeros_smem[...] = compat.cast_layout(zeros, plgpu.Layout.WG_STRIDED(zeros.shape, vec_size=2))
            plgpu.commit_smem()

            def one(index, _):
                token = first + index * step

                @pl.when(refs["is_padding"][token] == 1)
                def _():
                    for head in range(spec.num_q_heads):
                        plgpu.copy_smem_to_gmem(zeros_smem.at[pl.ds(0, spec.head_dim)], refs["out"].at[token, head])

            lax.fori_loop(0, lax.div(spec.num_tokens - first + step - 1, step), one, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.run_scoped(clear, plgpu.SMEM((256,), jnp.dtype(spec.q_dtype)))

    def item(self, index):
        spec, refs = self.spec, self.refs
        row, self.head = lax.div(index, spec.num_kv_heads), lax.rem(index, spec.num_kv_heads)
        self.fields = ItemFields(*(refs["work"][row, column] for column in range(len(COLUMNS))))
        rows, tile = pl.ds(0, self.shape.out_rows), self.fields.tile
        plgpu.copy_gmem_to_smem(refs["q"].at[tile, self.head], refs["q_smem"].at[rows], refs["q_barrier"])
        if "aux" in refs:
            plgpu.copy_gmem_to_smem(refs["aux"].at[tile], refs["aux_smem"], refs["q_barrier"])
        if self.has_append:
            self.start_new_tokens()
        ring = self.ring()

        def with_ring(*smem):
            self.refs = refs | dict(zip(ring, smem, strict=True))
            return self.attend()

        partial_result = pl.run_scoped(with_ring, *ring.values())
        self.refs = refs
        if self.shape.num_splits == 1:
            self.write(*partial_result)
        else:
            self.write_part(*partial_result)

    def ring(self) -> dict:
        """Shared memory of an item's blocks, by the names of `refs`; the result takes its place."""
        spec, size = self.spec, self.size
        stages, (width, stored) = size.stages, stored_row(spec)
        block = plgpu.SMEM((stages, BLOCK_KEYS, width), stored, transforms=transforms(width, stored))
        ring = {"k_smem": block, "v_smem": block}
        if spec.page.has_scales:
            scales = plgpu.SMEM((stages, BLOCK_KEYS), jnp.float32)
            ring |= {"k_scales_smem": scales, "v_scales_smem": scales}
            if self.has_append:
                # Keys' and values' scales of the new tokens.
                ring["new_scales_smem"] = plgpu.SMEM((stages, 2, BLOCK_KEYS), jnp.float32)
        tiles = transforms(spec.head_dim, size.dtype)
        if size.is_converted:
            converted = plgpu.SMEM((BLOCK_KEYS, spec.head_dim), size.dtype, transforms=tiles)
            ring |= {"k_converted": converted, "v_converted": converted}
        if size.is_transposed:
            ring["weights_smem"] = plgpu.SMEM((size.rows, BLOCK_KEYS), size.dtype, transforms=tiles)
        return ring

    def start_new_tokens(self):
        """Starts loading the sequence's new tokens if this item writes any to its pages."""
        refs, fields = self.refs, self.fields

        @pl.when(fields.key_end > fields.first_new)
        def _load():
            tokens = pl.ds(self.first_loaded(), self.size.new_tokens)
            for name in ("k", "v"):
                source = refs[f"new_{name}"].at[tokens, self.head]
                plgpu.copy_gmem_to_smem(source, refs[f"new_{name}_smem"], refs["new_barrier"])

    def first_loaded(self):
        """Index of the first token that is loaded, so that the copy ends within the new tokens of all sequences."""
        return jnp.minimum(self.fields.query_start, self.refs["new_k"].shape[0] - self.size.new_tokens)

    def write_new_tokens(self):
        """Writes the new tokens of this item's keys to their pages and waits until the writes are done."""
        spec, refs, fields = self.spec, self.refs, self.fields
        plgpu.barrier_wait(refs["new_barrier"])
        first_new = fields.first_new
        begin = jnp.maximum(first_new, fields.block_begin * BLOCK_KEYS)
        end = jnp.minimum(fields.key_end, first_new + fields.num_new)

        def one(position, _):
            page = refs["table"][fields.sequence, lax.div(position, spec.page_size)]
            slot, token = lax.rem(position, spec.page_size), fields.query_start + position - first_new
            for name in ("k", "v"):
                source = refs[f"new_{name}_smem"].at[token - self.first_loaded()]
                plgpu.copy_smem_to_gmem(source, refs[name].at[page, slot, self.head])
            if spec.page.has_scales:
                # Read by later steps only; this step reads `aligned_scales`.
                refs["k_scales"][page, self.head, slot] = refs["new_scales"][token, 0, self.head]
                refs["v_scales"][page, self.head, slot] = refs["new_scales"][token, 1, self.head]

        lax.fori_loop(begin, end, one, None)
        plgpu.wait_smem_to_gmem(0)
        compat.fence_copies()

    def load(self, index):
        """Starts the copies of the item's `index`-th block of keys and values."""
        fields = self.fields
        block, slot = fields.block_begin + index, lax.rem(index, self.size.stages)
        if self.has_append:
            first_written = jnp.maximum(lax.div(fields.first_new, BLOCK_KEYS), fields.block_begin)
            has_new = fields.key_end > fields.first_new
            pl.when(jnp.logical_and(has_new, block == first_written))(self.write_new_tokens)
        compat.one_warp(lambda: self.start_copies(block, slot))

    def start_copies(self, block, slot):
        """Starts the copies of a block of keys and values to a slot of shared memory."""
        spec, refs, fields = self.spec, self.refs, self.fields
        # Beyond the keys in use the table may have any ids.
        lowest = lax.div(fields.key_begin, spec.page_size)
        highest = lax.div(fields.key_end - 1, spec.page_size)
        width, first_key = min(spec.page_size, BLOCK_KEYS), block * BLOCK_KEYS
        pages = [lax.div(first_key, spec.page_size) + i for i in range(_pages_of_block(spec))]
        pages = [refs["table"][fields.sequence, jnp.clip(page, lowest, highest)] for page in pages]
        inside = pl.ds(lax.rem(first_key, spec.page_size), width) if spec.page_size > BLOCK_KEYS else slice(None)
        for name in ("k", "v"):
            barrier = refs[f"{name}_barrier"].at[slot]
            for i, page in enumerate(pages):
                rows = pl.ds(i * width, width)
                source = refs[name].at[page, inside, self.head]
                plgpu.copy_gmem_to_smem(source, refs[f"{name}_smem"].at[slot, rows], barrier)
                if spec.page.has_scales:
                    source = refs[f"{name}_scales"].at[page, self.head, inside]
                    plgpu.copy_gmem_to_smem(source, refs[f"{name}_scales_smem"].at[slot, rows], barrier)
            if spec.page.has_scales and self.has_append:
                near = jnp.clip(block - lax.div(fields.first_new, BLOCK_KEYS), 0, 1)
                which = 0 if name == "k" else 1
                source = refs["aligned_scales"].at[fields.sequence, near, which, self.head]
                plgpu.copy_gmem_to_smem(source, refs["new_scales_smem"].at[slot, which], barrier)

    def attend(self):
        """The item's partial result: each query's maximum and sum of weights (base 2), and the weighted values."""
        size, refs, fields = self.size, self.refs, self.fields
        count = fields.block_end - fields.block_begin
        lax.fori_loop(0, jnp.minimum(count, size.stages), lambda index, _: self.load(index), None)
        plgpu.barrier_wait(refs["q_barrier"])
        blocks = Blocks(self.spec, size, refs, fields)

        def refill(index):
            """Loads another block to the place of the `index`-th, which all warps are done with."""
            pl.when((index >= 0) & (index + size.stages < count))(partial(self.load, index + size.stages))

        def step(index, carry):
            return blocks.add(index, lax.rem(index, size.stages), carry, refill)

        return blocks.result(lax.fori_loop(0, count, step, blocks.start()))

    def write_part(self, highest, total, weighted):
        """Writes a partial result; the last item of a tile combines them all."""
        refs, fields = self.refs, self.fields
        plgpu.commit_smem()  # the next item's copies overwrite what this one's products read
        for part, chunk in enumerate(weighted):
            compat.store(refs["parts"], (fields.slot, self.head, part), chunk)
        for part, fact in enumerate((highest, total)):
            compat.store(refs["stats"], (fields.slot, self.head, part), fact)
        is_last = compat.count_arrival(
            refs["arrivals"].at[fields.tile, self.head], refs["arrival_smem"], fields.num_items
        )
        pl.when(is_last)(lambda: self.write(*self.combine()))

    def combine(self):
        """Sums the partial results of a tile, in the order of their keys."""
        size, refs, fields = self.size, self.refs, self.fields
        blocks = Blocks(self.spec, size, refs, fields)
        chunks, height, width = size.weighted_shape
        at_once = max(1, COMBINED_REGISTERS * 128 // (chunks * height * width))
        last = fields.first_slot + fields.num_items - 1

        def step(group, carry):
            slots = [fields.first_slot + group * at_once + i for i in range(at_once)]
            parts = [blocks.load_part(jnp.minimum(slot, last), self.head) for slot in slots]
            for slot, part in zip(slots, parts, strict=True):
                carry = blocks.merge(carry, part, slot <= last)
            return carry

        return lax.fori_loop(0, lax.div(fields.num_items + at_once - 1, at_once), step, blocks.nothing())

    def write(self, highest, total, weighted):
        """Writes the normalised rows of a tile to their tokens. A sink adds to the sum of weights only (gpt-oss)."""
        spec, size, refs, fields = self.spec, self.size, self.refs, self.fields
        blocks = Blocks(spec, size, refs, fields)
        if "sinks" in refs:
            sinks = compat.load(refs["sinks"], (fields.tile, self.head), blocks.of_query)
            total += jnp.exp2(sinks - highest)
        groups = spec.num_groups
        num_rows = jnp.minimum(fields.num_new * groups - fields.first_row, self.shape.out_rows)

        def store(out_smem):
            blocks.store_rows(out_smem, weighted, blocks.step / jnp.where(total == 0.0, 1.0, total))
            plgpu.commit_smem()

            def one(index, _):
                row = fields.first_row + index
                token, head = fields.query_start + lax.div(row, groups), self.head * groups + lax.rem(row, groups)
                plgpu.copy_smem_to_gmem(out_smem.at[index], refs["out"].at[token, head])

            lax.fori_loop(0, num_rows, one, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.run_scoped(store, plgpu.SMEM((size.rows, spec.head_dim), jnp.dtype(spec.q_dtype)))
