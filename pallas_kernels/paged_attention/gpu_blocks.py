"""Attention of a tile of queries to blocks of 64 keys on Hopper's tensor cores, by online softmax.

A product of a warpgroup has 64 rows. A prompt's tile has 64 queries, which are its rows. Of a decode step they are a
few (4 for each key head of Llama 3), so keys are the rows and queries the columns:

    scores^T [64 keys, N] = K Q^T        output^T [K, N] += V^T weights^T [64 keys, N]

with N = 8, 16, 24 or 32 queries. Softmax and rescaling work on N columns instead of 64 rows. Weights go to the second
product through shared memory (`gpu_registers.store_transposed`), values as they lie there: of 16-bit operands, the
tensor cores take the transposed.

Hopper transposes operands of 16 bits only, so keys and values of 8 and 4 bits are converted in registers, with one or
two instructions for a pair of numbers (`gpu_registers.convert`), and stored to shared memory as float16 (fp8) or in the
dtype of the queries (int8, int4, whose scales follow the products).
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu_compat as compat
from pallas_kernels.paged_attention import gpu_registers
from pallas_kernels.paged_attention.gpu_schedule import BLOCK_KEYS
from pallas_kernels.paged_attention.gpu_sizes import KernelSizes, swizzle, transforms
from pallas_kernels.paged_attention.rotation import LEVEL_STEP
from pallas_kernels.paged_attention.specs import MASKED, MAX_TREE_TOKENS, PagedSpec

LOG2_E = 1.4426950408889634
_MATRIX = plgpu.Layout.WGMMA


class Blocks:
    """Attention of one item's queries. refs: the kernel's references by name; fields: scalars of the item.

    A partial result is (highest, total, weighted): each query's largest score and its sum of weights, to base 2, and
    its weighted values in chunks (`KernelSizes.weighted_shape`).
    """

    def __init__(self, spec: PagedSpec, size: KernelSizes, refs: dict[str, Any], fields: Any):
        self.spec, self.size, self.refs, self.fields = spec, size, refs, fields
        self.query_axis, self.key_axis = (1, 0) if size.is_transposed else (0, 1)
        # Layouts of a vector with a number for each query, or for each key.
        self.of_query, self.of_key = _MATRIX.reduce(self.key_axis), _MATRIX.reduce(self.query_axis)
        self.scores_shape = (BLOCK_KEYS, size.rows) if size.is_transposed else (size.rows, BLOCK_KEYS)

    def spread(self, of_query: Any, shape: tuple[int, ...]) -> Any:
        """A number of each query, for a whole matrix."""
        return lax.broadcast_in_dim(of_query, shape, (self.query_axis,))

    def nothing(self) -> tuple[Any, Any, tuple[Any, ...]]:
        """The partial result of no keys."""
        chunks, *shape = self.size.weighted_shape
        highest, total = (
            compat.cast_layout(jnp.full((self.size.rows,), value, jnp.float32), self.of_query)
            for value in (MASKED, 0.0)
        )
        zeros = jnp.zeros(shape, jnp.float32)
        return highest, total, tuple(compat.cast_layout(zeros, _MATRIX) for _ in range(chunks))

    def start(self) -> tuple[Any, Any, tuple[Any, ...]]:
        """The carry of `add`: as `nothing`, but if queries are columns, `total` is a sum for each key of a block and
        query, since sums over rows cross the warps."""
        highest, total, weighted = self.nothing()
        if self.size.is_transposed:
            total = compat.cast_layout(jnp.zeros(self.scores_shape, jnp.float32), _MATRIX)
        return highest, total, weighted

    def result(self, carry) -> tuple[Any, Any, tuple[Any, ...]]:
        """The partial result of a carry."""
        highest, total, weighted = carry
        return highest, total.sum(axis=0) if self.size.is_transposed else total, weighted

    def add(self, index, slot, carry, refill) -> tuple[Any, Any, tuple[Any, ...]]:
        """Attends to the item's `index`-th block of keys, in the slot of shared memory. Calls `refill(i)` where all
        warps are done with the slot of the i-th block: past a barrier that they have anyway, if there is one."""
        spec, size, refs, fields = self.spec, self.size, self.refs, self.fields
        highest, total, weighted = carry
        first_key = (fields.block_begin + index) * BLOCK_KEYS
        plgpu.barrier_wait(refs["k_barrier"].at[slot])
        scores = self.score_product(slot)
        if spec.page.has_scales:
            scores *= lax.broadcast_in_dim(self.scales("k", slot, first_key), self.scores_shape, (self.key_axis,))
        factor = spec.scale * self.step
        if spec.soft_cap is None:
            scores *= factor * LOG2_E
        else:
            # tanh(x) = 1 - 2 / (1 + exp(2 x)): the chip's tanh has 11 bits.
            exponential = jnp.exp2(scores * (2.0 * LOG2_E * factor / spec.soft_cap))
            scores = (1.0 - 2.0 / (1.0 + exponential)) * (spec.soft_cap * LOG2_E)
        scores = jnp.where(self.visible(first_key), scores, MASKED)
        new_highest = jnp.maximum(highest, scores.max(axis=self.key_axis))
        if size.is_transposed and not size.is_converted:
            refill(index - 1)  # the maximum is one of all warps
        decay = jnp.exp2(highest - new_highest)
        weights = jnp.exp2(scores - self.spread(new_highest, self.scores_shape))
        if size.is_transposed:
            total = total * self.spread(decay, self.scores_shape) + weights
        else:
            total = total * decay + weights.sum(axis=1)

        plgpu.barrier_wait(refs["v_barrier"].at[slot])
        if spec.page.has_scales:
            weights *= lax.broadcast_in_dim(self.scales("v", slot, first_key), self.scores_shape, (self.key_axis,))
        self.clean_values(slot, first_key)
        if size.is_converted:
            self.convert("v", slot)
        if size.is_transposed:
            self.store_weights(weights.astype(size.dtype))
        if size.is_converted or size.is_transposed:
            plgpu.commit_smem()
        if size.is_transposed and size.is_converted:
            refill(index)
        weighted = self.value_product(slot, weights.astype(size.dtype), weighted, decay)
        if not size.is_transposed:
            plgpu.barrier_arrive(refs["sync_barrier"])
            plgpu.barrier_wait(refs["sync_barrier"])
            refill(index)
        return new_highest, total, weighted

    @property
    def step(self) -> float:
        """The unit of converted numbers."""
        return LEVEL_STEP if self.spec.page.dtype == "int4" else 1.0

    def score_product(self, slot):
        """Products of queries and keys."""
        refs = self.refs
        if self.size.is_converted:
            self.convert("k", slot)
            plgpu.commit_smem()
        keys = refs["k_converted"] if self.size.is_converted else refs["k_smem"].at[slot]
        left, right = (keys, refs["q_smem"]) if self.size.is_transposed else (refs["q_smem"], keys)
        return compat.wgmma(left, right, transpose_b=True)

    def store_weights(self, weights):
        """Stores the weights to shared memory, transposed."""
        head_dim, dtype = self.spec.head_dim, self.size.dtype
        tiles, width = transforms(head_dim, dtype), swizzle(head_dim, dtype)
        gpu_registers.store_transposed(self.refs["weights_smem"], weights, BLOCK_KEYS, width, tiles)

    def value_product(self, slot, weights, weighted, decay):
        """The weighted values, times `decay`, with those of a block."""
        refs = self.refs
        values = refs["v_converted"] if self.size.is_converted else refs["v_smem"].at[slot]
        weighted = tuple(chunk * self.spread(decay, chunk.shape) for chunk in weighted)
        added = []
        for start, chunk in zip(self.size.chunk_starts, weighted, strict=True):
            width = chunk.shape[0 if self.size.is_transposed else 1]
            part = values if width == self.spec.head_dim else values.at[:, pl.ds(start, width)]
            if self.size.is_transposed:
                columns = refs["weights_smem"]
                added.append(compat.wgmma(part, columns, transpose_a=True, transpose_b=True, accumulator=chunk))
            else:
                added.append(chunk + compat.wgmma(weights, part))
        return tuple(added)

    def scales(self, name, slot, first_key):
        """Scales of a block's keys or values, float32 [keys]; 0 outside the item's keys."""
        fields = self.fields
        key = compat.iota((BLOCK_KEYS,), 0, self.of_key) + first_key
        scales = compat.load(self.refs[f"{name}_scales_smem"], (slot,), self.of_key)
        if "new_scales_smem" in self.refs:
            new = compat.load(self.refs["new_scales_smem"], (slot, 0 if name == "k" else 1), self.of_key)
            scales = jnp.where(key >= fields.first_new, new, scales)
        return jnp.where((key >= fields.key_begin) & (key < fields.key_end), scales, 0.0)

    def visible(self, first_key):
        """Keys of a block that each query sees."""
        spec, fields = self.spec, self.fields
        row = compat.iota((self.size.rows,), 0, self.of_query) + fields.first_row
        token = row if spec.num_groups == 1 else lax.div(row, jnp.full_like(row, spec.num_groups))
        position = self.spread(token + fields.first_new, self.scores_shape)
        key = compat.iota(self.scores_shape, self.key_axis, _MATRIX) + first_key
        visible = key <= position
        if spec.window is not None:
            visible &= key > position - spec.window
        if not spec.has_ancestors:
            return visible
        rows = self.size.rows
        bits, depth = (
            self.spread(compat.load(self.refs["aux_smem"], (fact, pl.ds(0, rows)), self.of_query), self.scores_shape)
            for fact in range(2)
        )
        place = key - fields.first_new
        shift = jnp.clip(place, 0, MAX_TREE_TOKENS - 1)
        is_ancestor = (lax.shift_right_logical(bits, shift) & 1) == 1
        is_ancestor &= (place >= 0) & (place < fields.num_new)
        is_old = place < 0
        if spec.window is not None:
            is_old &= place > depth - spec.window
        is_tree = fields.num_new <= MAX_TREE_TOKENS
        return ((is_old | is_ancestor) & is_tree) | (visible & jnp.logical_not(is_tree))

    def convert(self, name, slot):
        """Converts a block's keys or values to the dtype of the products."""
        stored_ref, target = self.refs[f"{name}_smem"], self.refs[f"{name}_converted"]
        width = stored_ref.shape[2]
        layout, height = gpu_registers.vector_layout(width), gpu_registers.rows_at_once(width)
        for first in range(0, BLOCK_KEYS, height):
            rows = pl.ds(first, height)
            stored = compat.load(stored_ref, (slot, rows), layout)
            for part, numbers in enumerate(gpu_registers.convert(stored, self.spec.page.dtype, self.size.dtype)):
                target[rows, part * width : (part + 1) * width] = numbers

    def clean_values(self, slot, first_key):
        """Zeroes values outside the item's keys, which may be NaN: 0 * NaN is NaN. Integers are not NaN."""
        if self.spec.page.has_scales:
            return
        values, begin, end = self.refs["v_smem"], self.fields.key_begin, self.fields.key_end

        @pl.when(jnp.logical_or(first_key < begin, first_key + BLOCK_KEYS > end))
        def _():
            layout = gpu_registers.vector_layout(values.shape[2])
            key = compat.iota((BLOCK_KEYS,), 0, layout.reduce(1)) + first_key
            stored = compat.load(values, (slot,), layout)
            values[slot] = gpu_registers.keep_rows(stored, (key >= begin) & (key < end))
            plgpu.commit_smem()

    def load_part(self, slot, head) -> tuple[Any, Any, tuple[Any, ...]]:
        """The partial result that an item wrote."""
        highest, total = (compat.load(self.refs["stats"], (slot, head, fact), self.of_query) for fact in range(2))
        chunks = range(self.size.weighted_shape[0])
        return highest, total, tuple(compat.load(self.refs["parts"], (slot, head, chunk), _MATRIX) for chunk in chunks)

    def merge(self, one, other, is_used) -> tuple[Any, Any, tuple[Any, ...]]:
        """The partial result of the keys of both; `one` if the other is not used."""
        largest = jnp.maximum(one[0], jnp.where(is_used, other[0], MASKED))
        first, second = jnp.exp2(one[0] - largest), jnp.where(is_used, jnp.exp2(other[0] - largest), 0.0)
        weighted = tuple(
            mine * self.spread(first, mine.shape) + its * self.spread(second, its.shape)
            for mine, its in zip(one[2], other[2], strict=True)
        )
        return largest, one[1] * first + other[1] * second, weighted

    def store_rows(self, out_smem, weighted, inverse):
        """Stores the weighted values times `inverse`, a factor of each query, as rows of a tile."""
        chunks = [chunk * self.spread(inverse, chunk.shape) for chunk in weighted]
        chunks = [chunk.astype(out_smem.dtype) for chunk in chunks]
        for start, chunk in zip(self.size.chunk_starts, chunks, strict=True):
            if self.size.is_transposed:
                columns = out_smem.at[:, pl.ds(start, chunk.shape[0])]
                gpu_registers.store_transposed(columns, chunk, self.spec.head_dim, 0, ())
            else:
                compat.store(out_smem, (slice(None), pl.ds(start, chunk.shape[1])), chunk)
