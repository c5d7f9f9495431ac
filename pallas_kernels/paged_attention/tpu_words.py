"""Unpacks keys and values of a head from packed rows: one strided load of 32-bit words, then shifts.

A token is `num_words` words of 128 lanes, each holding `pack` rows (see `InterleavedPages`). Loading word w of every
token of a block gives [keys, 128] words with the rows of one or more heads, so no row moves between registers.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.layout import LANES, PageShape


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
        return 1 if self.page.is_side_by_side else max(1, 2 // self.pack)

    @property
    def heads_per_unit(self) -> int:
        return self.words_per_unit * self.pack // (1 if self.page.is_side_by_side else 2)

    @property
    def num_units(self) -> int:
        return self.num_words // self.words_per_unit

    @property
    def num_heads(self) -> int:
        """Key heads, with those of padding rows."""
        return self.num_units * self.heads_per_unit

    def load(self, buffer, unit, live, is_interpreted: bool) -> list[tuple[jax.Array, jax.Array]]:
        """Keys and values [keys, 128] of each head of `unit` (may be traced), in q_dtype.

        buffer: ref [keys, buffer_words, pack, 128]. Keys outside `live` = (first, end) are zero.
        """
        is_live = lax.broadcasted_iota(jnp.int32, (buffer.shape[0], LANES), 0)
        is_live = (is_live >= live[0]) & (is_live < live[1])
        load = load_words_interpreted if is_interpreted else load_words
        rows = []
        for index in range(self.words_per_unit):
            words = load(buffer, unit * self.words_per_unit + index)
            rows += self.split(jnp.where(is_live, words, jnp.uint32(0)))
        return (
            [(row, row) for row in rows] if self.page.is_side_by_side else list(zip(rows[::2], rows[1::2], strict=True))
        )

    def split(self, words: jax.Array) -> list[jax.Array]:
        """The `pack` rows of each word [keys, 128], in q_dtype."""
        return [row.astype(self.q_dtype) for row in _SPLIT[self.page.dtype](words)]


def load_words(buffer, word) -> jax.Array:
    """Word `word` of every token: uint32 [keys, 128], by one strided load."""
    keys, stride = buffer.shape[:2]
    return buffer.bitcast(jnp.uint32).reshape(keys * stride, LANES)[pl.ds(word, keys, stride)]


def load_words_interpreted(buffer, word) -> jax.Array:
    """As `load_words`, without `bitcast` and `reshape` of a ref, which the TPU interpreter does not support.

    Compiled, it takes some ten times as many instructions.
    """
    rows = buffer[:, word]
    return pltpu.bitcast(rows, jnp.uint32).reshape(rows.shape[0], LANES)


def _float32(words):
    return [pltpu.bitcast(words, jnp.float32)]


def _bfloat16(words):
    # A bfloat16 is the upper half of a float32.
    halves = (words << 16, words & jnp.uint32(0xFFFF0000))
    return [pltpu.bitcast(half, jnp.float32) for half in halves]


def _int8(words):
    signed = pltpu.bitcast(words, jnp.int32)
    return [((signed << (24 - 8 * index)) >> 24).astype(jnp.float32) for index in range(4)]


def _float8(dtype, words):
    parts = ((words >> (8 * index)).astype(jnp.uint8) for index in range(4))
    return [pltpu.bitcast(part, dtype).astype(jnp.float32) for part in parts]


_SPLIT = {
    "float32": _float32,
    "bfloat16": _bfloat16,
    "int8": _int8,
    "float8_e4m3fn": partial(_float8, jnp.float8_e4m3fn),
    "float8_e5m2": partial(_float8, jnp.float8_e5m2),
}
