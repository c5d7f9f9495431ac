"""Static facts, buffers and references of one Pallas call of the TPU kernel.

Keys and values of a head are unpacked from packed rows by one strided load of 32-bit words, then shifts. A token is
`num_words` words of 128 lanes, each holding `pack` rows (see `InterleavedPages`). Loading word w of every token of a
block gives [keys, 128] words with the rows of one or more heads, so no row moves between registers.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuning
from pallas_kernels.paged_attention.layout import LANES, SUBLANES, PageShape
from pallas_kernels.paged_attention.rotation import LEVEL_STEP
from pallas_kernels.paged_attention.specs import PagedSpec
from pallas_kernels.paged_attention.tpu_schedule import (
    ITEM_FIELDS,
    PART_ROWS,
    TpuProgramSizes,
    is_in_parts,
    rows_of_group,
)

# Chips whose matrix unit takes float8_e4m3b11fnuz and no float8_e4m3fn.
_CHIPS_OF_BIAS_11 = ("tpu_v5_lite", "tpu_v5", "tpu_v5p", "tpu_v6_lite")


@dataclass(frozen=True)
class WordRows:
    """Unpacking of the rows of `page` for queries of `q_dtype`.

    A unit is the smallest number of words with keys and values of whole heads: one word, or two with float32 and a
    head_dim above 64.
    """

    page: PageShape
    q_dtype: str

    @property
    def pack(self) -> int:
        return self.page.pack

    @property
    def num_words(self) -> int:
        return self.page.num_rows // self.pack

    @property
    def buffer_words(self) -> int:
        """Words from token to token in VMEM: odd, since loads with an even stride have bank conflicts."""
        return self.num_words | 1

    @property
    def words_per_unit(self) -> int:
        return 1 if self.page.has_whole_heads else max(1, 2 // self.pack)

    @property
    def heads_per_unit(self) -> int:
        return self.words_per_unit * self.pack // (1 if self.page.has_whole_heads else 2)

    @property
    def num_units(self) -> int:
        return self.num_words // self.words_per_unit

    @property
    def num_heads(self) -> int:
        """Key heads, with those of padding rows."""
        return self.num_units * self.heads_per_unit

    def load(self, buffer, unit, is_interpreted: bool) -> list[tuple[jax.Array, jax.Array]]:
        """Keys and values [keys, 128] of each head of `unit` (may be traced), in units of `factor`.

        buffer: ref [keys, buffer_words, pack, 128].
        """
        load = load_words_interpreted if is_interpreted else load_words
        rows = []
        for index in range(self.words_per_unit):
            rows += self.split(load(buffer, unit * self.words_per_unit + index))
        if self.page.is_side_by_side:
            return [(row, row) for row in rows]
        return list(zip(rows[::2], rows[1::2], strict=True))

    def split(self, words: jax.Array) -> list[jax.Array]:
        """The `pack` rows of each word [keys, 128]; with int4, a key and a value for each.

        The matrix unit takes 8-bit floats beside bfloat16, so these stay as they are; all else becomes q_dtype.
        """
        dtype = self.page.dtype
        if dtype == "float32":
            return [pltpu.bitcast(words, jnp.float32).astype(self.q_dtype)]
        rows = [half.astype(jnp.uint16) for half in (words, words >> 16)]
        if self.pack == 4:
            rows = [part.astype(jnp.uint8) for row in rows for part in (row, _upper_bytes(row))]
        if dtype == "int4":
            rows = [levels for row in rows for levels in _levels(row)]
        elif dtype == "float8_e4m3fn" and self.is_e4m3_converted:
            rows = [_to_bias_11(row) for row in rows]
        rows = [pltpu.bitcast(row, self._bits_dtype) for row in rows]
        if self.q_dtype == "bfloat16" and dtype != "int8":
            return rows
        return [row.astype(self.q_dtype) for row in rows]

    @property
    def is_e4m3_converted(self) -> bool:
        """True if the matrix unit takes 8-bit floats of 4 exponent bits with bias 11 instead of 7."""
        return self.q_dtype == "bfloat16" and tuning.chip() in _CHIPS_OF_BIAS_11

    @property
    def _bits_dtype(self):
        if self.page.dtype not in ("int4", "float8_e4m3fn"):
            return jnp.dtype(self.page.dtype)
        return jnp.float8_e4m3b11fnuz if self.is_e4m3_converted else jnp.float8_e4m3fn

    @property
    def factor(self) -> float:
        """The unit of the numbers of `load`."""
        if self.page.dtype == "int4":
            return LEVEL_STEP * (2.0**13 if self.is_e4m3_converted else 2.0**9)
        return 2.0**4 if self.page.dtype == "float8_e4m3fn" and self.is_e4m3_converted else 1.0


@dataclass(frozen=True)
class KernelProgram:
    """Static facts of one Pallas call, whose items `num_cores` cores share."""

    spec: PagedSpec
    sizes: TpuProgramSizes
    num_cores: int = 1

    @cached_property
    def rows(self) -> WordRows:
        return WordRows(self.spec.page, self.spec.q_dtype)

    @property
    def group_rows(self) -> int:
        return rows_of_group(self.spec)

    @property
    def num_rows(self) -> int:
        """Query rows of an item for one key head: token-major, then the heads of the group."""
        return self.sizes.num_queries * self.group_rows

    @property
    def part_rows(self) -> int:
        """Rows that are computed at once: all, or in uniform calls `PART_ROWS` (or a whole token)."""
        return min(max(PART_ROWS, self.group_rows), self.num_rows) if is_in_parts(self.spec) else self.num_rows

    @property
    def num_lanes(self) -> int:
        return self.spec.page.num_lanes

    @property
    def num_lane_tiles(self) -> int:
        return self.num_lanes // LANES

    @property
    def pages_per_block(self) -> int:
        return self.sizes.num_keys // self.spec.page_size

    def buffers(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each buffer in VMEM, by its name in `Refs`."""
        spec, sizes, rows = self.spec, self.sizes, self.rows
        item = (sizes.num_queries, spec.num_kv_heads, self.group_rows, self.num_lanes)
        kv = (sizes.num_buffers, self.num_lane_tiles, sizes.num_keys, rows.buffer_words, rows.pack, LANES)
        by_head = (rows.num_heads, self.num_rows)
        buffers = {
            "q_buffers": ((2, *item), spec.q_dtype),
            "out_buffer": (item, spec.q_dtype),
            "kv_buffers": (kv, spec.page.element_dtype),
            "queries": ((*by_head, self.num_lanes), spec.q_dtype),
            "highest": ((*by_head, LANES), "float32"),
            "total": ((*by_head, LANES), "float32"),
            "weighted": ((*by_head, self.num_lanes), "float32"),
        }
        if spec.page.has_scales:
            block = spec.page.abstract("interleaved").scales.shape[1:]
            buffers["scale_buffers"] = (sizes.num_buffers, self.pages_per_block, *block), "float32"
            buffers["scales"] = (block[0], sizes.num_keys), "float32"
        if spec.has_ancestors:
            buffers["ancestor_rows"] = (2, self.num_rows, LANES), "int32"
        return buffers

    def scratch(self) -> dict[str, Any]:
        """Buffers and semaphores, by their names in `Refs`."""
        dma, ring = pltpu.SemaphoreType.DMA, (self.sizes.num_buffers,)
        scratch = {name: pltpu.VMEM(shape, jnp.dtype(dtype)) for name, (shape, dtype) in self.buffers().items()}
        scratch |= {"q_arrived": dma((2,)), "out_written": dma, "kv_arrived": dma(ring), "appended": dma}
        if self.spec.page.has_scales:
            scratch |= {"scales_arrived": dma(ring), "scales_appended": dma}
        return scratch

    def vmem_bytes(self) -> int:
        """Upper bound of the kernel's VMEM in bytes: buffers, and intermediate values of one head."""
        total = 3 * 4 * self.part_rows * max(self.sizes.num_keys, LANES)
        for shape, dtype in self.buffers().values():
            total += math.prod(shape) * jnp.dtype(dtype).itemsize
        if self.spec.has_sinks:
            total += 2 * 4 * self.spec.num_kv_heads * max(SUBLANES, self.group_rows) * LANES
        return total


class Refs(NamedTuple):
    """References of the kernel: scalars, then arrays in HBM, then buffers and semaphores.

    rows: queries, replaced by the output [T, Hkv, G, lanes]. new_tokens: stored, [T, words, pack, lanes].
    new_scales: scales of pages that receive tokens, those of the new tokens merged [blocks, 2 Hkv, lanes] (int8).
    core: the number of the core that runs.
    """

    items: Any
    count: Any
    page_ids: Any
    new_tokens: Any
    rows: Any
    cache: Any
    q_buffers: Any
    out_buffer: Any
    kv_buffers: Any
    queries: Any
    highest: Any
    total: Any
    weighted: Any
    q_arrived: Any
    out_written: Any
    kv_arrived: Any
    appended: Any
    scale_pages: Any = None
    ancestors: Any = None
    depths: Any = None
    new_scales: Any = None
    sinks: Any = None
    cache_scales: Any = None
    scale_buffers: Any = None
    scales: Any = None
    scales_arrived: Any = None
    scales_appended: Any = None
    ancestor_rows: Any = None
    core: Any = 0
    num_cores: int = 1


class WorkItem(NamedTuple):
    """One work item, number `index` of its core: `count` queries of a sequence, in rows `row` onward.

    `position` is the key position of its first query, `first_new` that of the sequence's first new token. The item sees
    keys `first_key` to `end_key` - 1. Page p of the sequence has the id `page_ids[table + p]` and, if it receives
    tokens, the block of scales `scales + p`. The sequence has `num_new` new tokens.
    """

    index: Any
    table: Any
    row: Any
    count: Any
    position: Any
    first_new: Any
    first_key: Any
    end_key: Any
    scales: Any
    num_new: Any


def load_item(refs: Refs, index, *names: str) -> WorkItem:
    """Loads item `index` of this core: the fields `names`, or all."""
    # Cores take the items in turn: later parts of a prompt see more keys. The ring also loads the item after the last,
    # and does not use it.
    place = index * refs.num_cores + refs.core
    start = jnp.minimum(place, refs.items.shape[0] // ITEM_FIELDS - 1) * ITEM_FIELDS
    fields = enumerate(WorkItem._fields[1:])
    return WorkItem(index, *(refs.items[start + at] if not names or name in names else None for at, name in fields))


def key_range(program: KernelProgram, item: WorkItem, block):
    """First and one-past-last key of a block that the item may see."""
    start = block * program.sizes.num_keys
    return jnp.maximum(item.first_key, start), jnp.minimum(item.end_key, start + program.sizes.num_keys)


def load_words(buffer, word) -> jax.Array:
    """Word `word` of every token: uint32 [keys, 128], by one strided load."""
    keys, stride = buffer.shape[:2]
    return buffer.bitcast(jnp.uint32).reshape(keys * stride, LANES)[pl.ds(word, keys, stride)]


def store_words(buffer, word, words: jax.Array) -> None:
    """The inverse of `load_words`."""
    keys, stride = buffer.shape[:2]
    buffer.bitcast(jnp.uint32).reshape(keys * stride, LANES)[pl.ds(word, keys, stride)] = words


def load_words_interpreted(buffer, word) -> jax.Array:
    """As `load_words`, without `bitcast` and `reshape` of a ref, which the TPU interpreter does not support.

    Compiled, it takes some ten times as many instructions.
    """
    rows = buffer[:, word]
    return pltpu.bitcast(rows, jnp.uint32).reshape(rows.shape[0], LANES)


def store_words_interpreted(buffer, word, words: jax.Array) -> None:
    """The inverse of `load_words_interpreted`."""
    keys, _, pack, lanes = buffer.shape
    buffer[:, word] = pltpu.bitcast(words.reshape(keys, 1, lanes), buffer.dtype).reshape(keys, pack, lanes)


def _upper_bytes(halves: jax.Array) -> jax.Array:
    """uint16 shifted by a byte; the upper byte of the result is undefined."""
    return pltpu.bitcast(pltpu.bitcast(halves, jnp.uint32) >> 8, jnp.uint16)


def _levels(codes: jax.Array) -> list[jax.Array]:
    """uint8 [keys, 128] with the codes of a key and of a value: the bits of both levels as float8_e4m3fn.

    Below 2^-5 an integer j is the number j 2^-9, from there to 2^-4 it is (2 j - 16) 2^-9: the levels 1, 3, 5, 7, 9,
    12, 15 and 20 (`rotation.LEVELS`) have the bits 2 m + 1 + max(m - 4, 0). Eight codes share the 32-bit operations
    that compute 1 + max(m - 4, 0), and four the others.
    """
    words = pltpu.bitcast(codes, jnp.uint32)
    is_upper_half = words & jnp.uint32(0x44444444)
    added = (words & ((is_upper_half * 3) >> 2)) + jnp.uint32(0x11111111)
    both = ((words << 1, added, words << 4), (words >> 3, added >> 4, words))
    bits = (
        (double & jnp.uint32(0x0E0E0E0E)) + (added & jnp.uint32(0x07070707)) | (sign & jnp.uint32(0x80808080))
        for double, added, sign in both
    )
    return [pltpu.bitcast(level, jnp.uint8) for level in bits]


def _to_bias_11(codes: jax.Array) -> jax.Array:
    """Bits of float8_e4m3fn as those of float8_e4m3b11fnuz, whose numbers are 1/16 as large.

    There the bits of -0 are NaN, and there is no other NaN.
    """
    codes = jnp.where(codes == 0x80, jnp.uint8(0), codes)
    return jnp.where((codes & 0x7F) == 0x7F, jnp.uint8(0x80), codes)
