"""The Mosaic GPU kernel: split-KV attention of tiles of 64 query rows over pages (Dao et al. 2023, Flash-Decoding).

A thread block (one warpgroup) processes items of `gpu_schedule`. For each item it keeps several blocks of keys and
values in flight from their pages to shared memory (TMA), multiplies on the tensor cores, and writes the tile's
normalised result with its log-sum-exp; the splits of a sequence are combined afterwards. Several thread blocks share a
multiprocessor, so that the softmax of one overlaps with the products and waits of another.

New tokens, rounded to the cache's dtype (`layout.to_stored`), are written to their pages by the items that read them:
an item copies them from shared memory to the page, waits for the write, then loads the page like any other.
"""

from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu_compat as compat
from pallas_kernels.paged_attention.gpu_schedule import (
    BLOCK_KEYS,
    COLUMNS,
    RESIDENT,
    TILE_ROWS,
    SplitPlan,
    SplitPlanShape,
)
from pallas_kernels.paged_attention.layout import SeparatePages
from pallas_kernels.paged_attention.rotation import levels_of
from pallas_kernels.paged_attention.specs import MASKED, MAX_TREE_TOKENS, PagedSpec

# Shared memory of a thread block; with the smaller figure two share a multiprocessor.
MAX_SHARED_BYTES = 227 * 1024
PAIR_SHARED_BYTES = 113 * 1024
# Columns of the values in one product if a row does not fit in registers.
MAX_ROW, CHUNK = 128, 64
# Every thread of the warpgroup signals a copy's barrier for an equal number of bytes.
COPY_BYTES = 128
NUM_BLOCKS = 2 * RESIDENT
LOG2_E = 1.4426950408889634

_MATRIX = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)
_COLUMN = plgpu.Layout.WGMMA.reduce(0)


@dataclass(frozen=True)
class KernelSizes:
    """Static sizes of the kernel; `shared_bytes` is its shared memory."""

    stages: int
    chunk: int
    new_tokens: int
    is_converted: bool
    shared_bytes: int


def swizzle(head_dim: int, dtype) -> int:
    """Bytes of the widest swizzle that divides a row of `head_dim` values; 0 if there is none."""
    row = head_dim * jnp.dtype(dtype).itemsize
    return next((width for width in (128, 64, 32) if row % width == 0), 0)


ItemFields = namedtuple("ItemFields", COLUMNS)


def compute_dtype(spec: PagedSpec) -> str:
    """Dtype of the products. fp8 is converted to float16, which is exact and takes one instruction."""
    return "float16" if spec.page.dtype.startswith("float8") else spec.q_dtype


def stored_row(spec: PagedSpec) -> tuple[int, Any]:
    """Elements of a stored key or value, and their dtype; int4 has two numbers in a byte."""
    width = spec.head_dim // 2 if spec.page.dtype == "int4" else spec.head_dim
    return width, jnp.dtype(spec.page.element_dtype)


def row_bytes(spec: PagedSpec) -> int:
    """Bytes of a stored key or value."""
    width, dtype = stored_row(spec)
    return width * dtype.itemsize


def padded_new_tokens(spec: PagedSpec) -> int:
    """Number of new tokens that one copy loads for a sequence."""
    row = row_bytes(spec)
    return next(n for n in range(spec.max_query_length, 2 * COPY_BYTES + 1) if n * row % COPY_BYTES == 0)


def kernel_sizes(spec: PagedSpec, shape: SplitPlanShape, has_append: bool) -> KernelSizes:
    """Sizes that fit in shared memory; `stages` is 0 if none do."""
    row, compute = row_bytes(spec), jnp.dtype(spec.q_dtype).itemsize
    is_converted = spec.page.dtype != compute_dtype(spec)
    new_tokens = padded_new_tokens(spec) if has_append else 0
    stage = 2 * BLOCK_KEYS * row + (16 * BLOCK_KEYS if spec.page.has_scales else 0)
    fixed = TILE_ROWS * spec.head_dim * compute + 2 * new_tokens * row + 6144
    fixed += 2 * TILE_ROWS * 4
    converted = 2 * BLOCK_KEYS * spec.head_dim * compute if is_converted else 0
    result = TILE_ROWS * spec.head_dim * (4 if shape.num_splits > 1 else compute)

    def total(stages: int) -> int:
        return fixed + max(stages * stage + converted, result)

    fitting = [n for n in range(2, max(shape.max_stages, 2) + 1) if total(n) <= PAIR_SHARED_BYTES]
    fitting = fitting or [n for n in range(2, max(shape.max_stages, 2) + 1) if total(n) <= MAX_SHARED_BYTES]
    stages = max(fitting, default=0)
    chunk = spec.head_dim if spec.head_dim <= MAX_ROW else CHUNK
    return KernelSizes(stages, chunk, new_tokens, is_converted, total(max(stages, 2)))


def run(
    q_tiles: jax.Array,
    pages: SeparatePages,
    new_tokens: SeparatePages | None,
    page_table: jax.Array,
    plan: SplitPlan,
    aux: jax.Array | None,
    spec: PagedSpec,
    shape: SplitPlanShape,
) -> tuple[jax.Array, jax.Array]:
    """Runs one program.

    q_tiles: [num_tiles, Hkv, out_rows, K] in `compute_dtype`.
    pages: `jax.new_ref`s of the cache, updated if there are `new_tokens`.
    new_tokens: stored values [T, Hkv, K] of k_new and v_new, T at least `padded_new_tokens`; for int8 also float32
      scales, by token [T, 2, Hkv] and aligned with their keys [S, 2, 2, Hkv, 64] (block of the first new token or the
      next one; keys or values). None if the pages have the new tokens already.
    aux: int32 [num_tiles, 2, 64], ancestor bits and depth of each row; None without ancestors.

    Returns the result of every slot, [num_tiles * num_splits, Hkv, out_rows, K] (float32 for several splits, else q's
    dtype), and its base-2 log-sum-exp, float32 [..., out_rows]. Slots without an item are not written.
    """
    size = kernel_sizes(spec, shape, new_tokens is not None)
    num_slots = shape.num_tiles * shape.num_splits
    leading = (num_slots, spec.num_kv_heads, shape.out_rows)
    out_dtype = jnp.dtype(jnp.float32 if shape.num_splits > 1 else spec.q_dtype)
    out_type = (jax.ShapeDtypeStruct((*leading, spec.head_dim), out_dtype), jax.ShapeDtypeStruct(leading, jnp.float32))
    inputs: dict[str, Any] = {"work": plan.work, "count": plan.count, "table": page_table, "q": q_tiles}
    inputs |= {"k": pages.k, "v": pages.v, "k_scales": pages.k_scales, "v_scales": pages.v_scales}
    if new_tokens is not None:
        inputs |= {"new_k": new_tokens.k, "new_v": new_tokens.v}
        inputs |= {"new_scales": new_tokens.k_scales, "aligned_scales": new_tokens.v_scales}
    inputs["aux"] = aux
    inputs = {name: array for name, array in inputs.items() if array is not None}
    scratch = _scratch(q_tiles.dtype, spec, size, inputs)

    def body(*refs):
        named = dict(zip((*inputs, "out", "lse", *scratch), refs, strict=True))
        _Kernel(spec, shape, size, named).run()

    cache_bytes = 2 * shape.num_tiles * spec.max_kv_length * row_bytes(spec)
    cost = pl.CostEstimate(
        flops=4 * shape.num_tiles * spec.num_kv_heads * TILE_ROWS * spec.max_kv_length * spec.head_dim,
        bytes_accessed=cache_bytes * spec.num_kv_heads + q_tiles.nbytes,
        transcendentals=shape.num_tiles * spec.num_kv_heads * TILE_ROWS * spec.max_kv_length,
    )
    return compat.kernel_in_place(
        body,
        out_type=out_type,
        scratch_types=tuple(scratch.values()),
        grid=(min(num_slots * spec.num_kv_heads, NUM_BLOCKS),),
        grid_names=("block",),
        cost_estimate=cost,
        name="paged_attention",
    )(*inputs.values())


def _scratch(dtype, spec: PagedSpec, size: KernelSizes, inputs: dict) -> dict:
    """Shared memory and barriers that an item needs whatever its keys, by the names of `_Kernel.refs`."""
    has_append, has_aux = "new_k" in inputs, "aux" in inputs
    rows = (TILE_ROWS, spec.head_dim)
    scratch: dict = {"q_smem": plgpu.SMEM(rows, dtype, transforms=_transforms(spec.head_dim, dtype))}
    scratch["lse_smem"] = plgpu.SMEM((TILE_ROWS,), jnp.float32)
    if has_append:
        width, stored = stored_row(spec)
        appended = plgpu.SMEM((size.new_tokens, width), stored)
        scratch |= {"new_k_smem": appended, "new_v_smem": appended, "new_barrier": plgpu.Barrier(num_arrivals=2)}
    if has_aux:
        scratch["aux_smem"] = plgpu.SMEM((2, TILE_ROWS), jnp.int32)
    copies = _pages_of_block(spec)
    if spec.page.has_scales:
        copies += copies + has_append
    scratch["q_barrier"] = plgpu.Barrier(num_arrivals=1 + has_aux)
    scratch["k_barrier"] = plgpu.Barrier(num_arrivals=copies, num_barriers=size.stages)
    scratch["v_barrier"] = plgpu.Barrier(num_arrivals=copies, num_barriers=size.stages)
    scratch["sync_barrier"] = plgpu.Barrier()
    return scratch


def _pages_of_block(spec: PagedSpec) -> int:
    return max(1, BLOCK_KEYS // spec.page_size)


def _transforms(head_dim: int, dtype) -> tuple:
    width = swizzle(head_dim, dtype)
    if not width:
        return ()
    return (plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(width))


class _Kernel:
    """The kernel of one warpgroup: its references by name, and the scalar fields of the current item."""

    def __init__(self, spec: PagedSpec, shape: SplitPlanShape, size: KernelSizes, refs: dict):
        self.spec, self.shape, self.size, self.refs = spec, shape, size, refs
        self.has_append = "new_k" in refs
        self.dtype = compute_dtype(spec)

    def run(self):
        total = self.refs["count"][0] * self.spec.num_kv_heads
        first = lax.axis_index("block")
        if self.shape.out_rows < TILE_ROWS:
            # Rows that copies do not fill.
            zeros = jnp.zeros((TILE_ROWS, self.spec.head_dim), self.dtype)
            self.refs["q_smem"][...] = compat.cast_layout(zeros, _MATRIX)
            plgpu.commit_smem()
        step = min(self.shape.num_tiles * self.shape.num_splits * self.spec.num_kv_heads, NUM_BLOCKS)

        def one(index, _):
            self.item(first + index * step)

        lax.fori_loop(0, lax.div(total - first + step - 1, step), one, None)

    def item(self, index):
        spec, size, refs = self.spec, self.size, self.refs
        row, head = lax.div(index, spec.num_kv_heads), lax.rem(index, spec.num_kv_heads)
        self.fields = ItemFields(*(refs["work"][row, column] for column in range(len(COLUMNS))))
        self.head = head
        rows, tile = pl.ds(0, self.shape.out_rows), self.fields.tile
        plgpu.copy_gmem_to_smem(refs["q"].at[tile, head], refs["q_smem"].at[rows], refs["q_barrier"])
        if "aux" in refs:
            plgpu.copy_gmem_to_smem(refs["aux"].at[tile], refs["aux_smem"], refs["q_barrier"])
        if self.has_append:
            self.start_new_tokens()

        stages, block, row = size.stages, (BLOCK_KEYS, spec.head_dim), stored_row(spec)
        stored = plgpu.SMEM((stages, BLOCK_KEYS, row[0]), row[1], transforms=_transforms(*row))
        ring = {"k_smem": stored, "v_smem": stored}
        if spec.page.has_scales:
            scales = plgpu.SMEM((stages, BLOCK_KEYS), jnp.float32)
            ring |= {"k_scales_smem": scales, "v_scales_smem": scales}
            if self.has_append:
                # Keys' and values' scales of the new tokens.
                ring["new_scales_smem"] = plgpu.SMEM((stages, 2, BLOCK_KEYS), jnp.float32)
        if size.is_converted:
            converted = plgpu.SMEM(block, self.dtype, transforms=_transforms(spec.head_dim, self.dtype))
            ring |= {"k_converted": converted, "v_converted": converted}

        def with_ring(*smem):
            self.refs = refs | dict(zip(ring, smem, strict=True))
            return self.attend()

        highest, total, weighted = pl.run_scoped(with_ring, *ring.values())
        self.refs = refs
        self.write(highest, total, weighted)

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
        spec, size, refs, fields = self.spec, self.size, self.refs, self.fields
        block, slot = fields.block_begin + index, lax.rem(index, size.stages)
        if self.has_append:
            first_written = jnp.maximum(lax.div(fields.first_new, BLOCK_KEYS), fields.block_begin)
            has_new = fields.key_end > fields.first_new
            pl.when(jnp.logical_and(has_new, block == first_written))(self.write_new_tokens)
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
        """Online softmax over the item's blocks: each row's maximum and sum (base 2), and weighted values in chunks."""
        spec, size, refs, fields = self.spec, self.size, self.refs, self.fields
        count = fields.block_end - fields.block_begin
        lax.fori_loop(0, jnp.minimum(count, size.stages), lambda index, _: self.load(index), None)
        plgpu.barrier_wait(refs["q_barrier"])
        rows = self.row_facts()

        def step(index, carry):
            slot = lax.rem(index, size.stages)
            carry = self.block(index, slot, rows, carry)
            # All warps are done with the slot before it is filled again.
            plgpu.barrier_arrive(refs["sync_barrier"])
            plgpu.barrier_wait(refs["sync_barrier"])
            pl.when(index + size.stages < count)(partial(self.load, index + size.stages))
            return carry

        vector = partial(jnp.full, (TILE_ROWS,), dtype=jnp.float32)
        zeros = jnp.zeros((TILE_ROWS, size.chunk), jnp.float32)
        carry = (
            compat.cast_layout(vector(fill_value=MASKED), _ROW),
            compat.cast_layout(vector(fill_value=0.0), _ROW),
            tuple(compat.cast_layout(zeros, _MATRIX) for _ in range(spec.head_dim // size.chunk)),
        )
        return lax.fori_loop(0, count, step, carry)

    def row_facts(self):
        """Facts of each row, int32 [64]: the key place of its query, and its ancestor bits and depth."""
        row = compat.iota((TILE_ROWS,), 0, _ROW) + self.fields.first_row
        token = row if self.spec.num_groups == 1 else lax.div(row, jnp.full_like(row, self.spec.num_groups))
        facts = [token + self.fields.first_new]
        if "aux" in self.refs:
            facts += [compat.load(self.refs["aux_smem"], (index,), _ROW) for index in range(2)]
        return facts

    def block(self, index, slot, rows, carry):
        spec, size, refs, fields = self.spec, self.size, self.refs, self.fields
        highest, total, weighted = carry
        first_key = (fields.block_begin + index) * BLOCK_KEYS
        shape = (TILE_ROWS, BLOCK_KEYS)
        plgpu.barrier_wait(refs["k_barrier"].at[slot])
        if size.is_converted:
            self.convert("k", slot)
        keys_ref = refs["k_converted"] if size.is_converted else refs["k_smem"].at[slot]
        scores = compat.wgmma(refs["q_smem"], keys_ref, transpose_b=True)
        if spec.page.has_scales:
            scores *= lax.broadcast_in_dim(self.scales("k", slot, first_key), shape, (1,))
        if spec.soft_cap is None:
            scores *= spec.scale * LOG2_E
        else:
            # tanh(x) = 1 - 2 / (1 + exp(2 x)): the chip's tanh has 11 bits.
            exponential = jnp.exp2(scores * (2.0 * LOG2_E * spec.scale / spec.soft_cap))
            scores = (1.0 - 2.0 / (1.0 + exponential)) * (spec.soft_cap * LOG2_E)
        scores = jnp.where(self.visible(first_key, rows), scores, MASKED)
        new_highest = jnp.maximum(highest, scores.max(axis=1))
        decay = jnp.exp2(highest - new_highest)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_highest, shape, (0,)))
        total = total * decay + weights.sum(axis=1)

        plgpu.barrier_wait(refs["v_barrier"].at[slot])
        if spec.page.has_scales:
            weights *= lax.broadcast_in_dim(self.scales("v", slot, first_key), shape, (1,))
        self.clean_values(slot, first_key)
        values_ref = refs["v_converted"] if size.is_converted else refs["v_smem"].at[slot]
        weights = weights.astype(self.dtype)
        new_weighted = []
        for number, chunk in enumerate(weighted):
            columns = pl.ds(number * size.chunk, size.chunk)
            product = compat.wgmma(weights, values_ref.at[:, columns] if len(weighted) > 1 else values_ref)
            new_weighted.append(chunk * lax.broadcast_in_dim(decay, chunk.shape, (0,)) + product)
        return new_highest, total, tuple(new_weighted)

    def scales(self, name, slot, first_key):
        """Scales of a block's keys or values, float32 [keys]; 0 outside the item's keys."""
        fields = self.fields
        key = compat.iota((BLOCK_KEYS,), 0, _COLUMN) + first_key
        scales = compat.load(self.refs[f"{name}_scales_smem"], (slot,), _COLUMN)
        if self.has_append:
            new = compat.load(self.refs["new_scales_smem"], (slot, 0 if name == "k" else 1), _COLUMN)
            scales = jnp.where(key >= fields.first_new, new, scales)
        return jnp.where((key >= fields.key_begin) & (key < fields.key_end), scales, 0.0)

    def visible(self, first_key, rows):
        spec, fields = self.spec, self.fields
        position, *ancestry = (lax.broadcast_in_dim(fact, (TILE_ROWS, BLOCK_KEYS), (0,)) for fact in rows)
        key = compat.iota(position.shape, 1, _MATRIX) + first_key
        visible = key <= position
        if spec.window is not None:
            visible &= key > position - spec.window
        if not spec.has_ancestors:
            return visible
        bits, depth = ancestry
        first_new, num_new = fields.first_new, fields.num_new
        place = key - first_new
        shift = jnp.clip(place, 0, MAX_TREE_TOKENS - 1)
        is_ancestor = (lax.shift_right_logical(bits, shift) & 1) == 1
        is_ancestor &= (place >= 0) & (place < num_new)
        is_old = place < 0
        if spec.window is not None:
            is_old &= place > depth - spec.window
        is_tree = num_new <= MAX_TREE_TOKENS
        return ((is_old | is_ancestor) & is_tree) | (visible & jnp.logical_not(is_tree))

    def convert(self, name, slot, cleaned=lambda values: values):
        """Converts a block's keys or values, as `cleaned` changes them, to the dtype of the products."""
        stored, target = compat.load(self.refs[f"{name}_smem"], (slot,), _MATRIX), self.refs[f"{name}_converted"]
        if self.spec.page.dtype == "int4":
            # The first half of a vector is in the low bits.
            half, codes = stored.shape[1], stored.astype(jnp.int32)
            for part in range(2):
                numbers = levels_of(lax.shift_right_logical(codes, jnp.full_like(codes, 4 * part)))
                target[:, half * part : half * (part + 1)] = cleaned(numbers).astype(self.dtype)
        else:
            target[...] = cleaned(stored.astype(self.dtype))
        plgpu.commit_smem()

    def clean_values(self, slot, first_key):
        """Zeroes values outside the item's keys, which may be NaN: 0 * NaN is NaN."""
        size, refs, fields = self.size, self.refs, self.fields
        begin, end = fields.key_begin, fields.key_end

        def cleaned(values):
            key = compat.iota(values.shape, 0, _MATRIX) + first_key
            return jnp.where((key >= begin) & (key < end), values, jnp.zeros_like(values))

        if size.is_converted:
            self.convert("v", slot, cleaned)
            return

        @pl.when(jnp.logical_or(first_key < begin, first_key + BLOCK_KEYS > end))
        def _():
            refs["v_smem"][slot] = cleaned(compat.load(refs["v_smem"], (slot,), _MATRIX))
            plgpu.commit_smem()

    def write(self, highest, total, weighted):
        """Writes the normalised rows and their base-2 log-sum-exp, which is MASKED for rows without a visible key."""
        spec, shape, size, refs = self.spec, self.shape, self.size, self.refs
        slot = self.fields.slot
        out_dtype = refs["out"].dtype
        # The maximum may drop a NaN of a visible key; the sum does not.
        is_unseen = (highest == MASKED) & (total == total)
        lse = jnp.where(is_unseen, MASKED, highest + jnp.log2(total))
        inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)
        kept = pl.ds(0, shape.out_rows)

        def store(out_smem):
            for number, chunk in enumerate(weighted):
                columns = pl.ds(number * size.chunk, size.chunk)
                rows = chunk * lax.broadcast_in_dim(inverse, chunk.shape, (0,))
                out_smem[:, columns] = rows.astype(out_dtype)
            refs["lse_smem"][...] = lse
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[kept], refs["out"].at[slot, self.head])
            plgpu.copy_smem_to_gmem(refs["lse_smem"].at[kept], refs["lse"].at[slot, self.head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        transforms = _transforms(spec.head_dim, out_dtype)
        pl.run_scoped(store, plgpu.SMEM((TILE_ROWS, spec.head_dim), out_dtype, transforms=transforms))
