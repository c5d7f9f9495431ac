"""Calls of paged attention with random arguments, and small ones, a name for each edge case, to compare with dense
attention."""

import zlib

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import layout, shapes
from pallas_kernels.paged_attention.layout import SeparatePages

# Table entries beyond the pages in use: a kernel that uses them reads far out of bounds.
GARBAGE = np.array([-1, -7, 2**30, 10**6], np.int32)


class PagedShape(shapes.PagedShape):
    """A call that can have random arguments."""

    def arguments(self, page_layout: str, *, seed: int = 0, stale: float = np.nan, is_shuffled: bool = True) -> dict:
        """Random arguments. Pages are shuffled, unused table entries are `GARBAGE`, and slots that no query may read
        (beyond a length, below a window) are `stale`."""
        rng = np.random.default_rng([seed, zlib.crc32(repr(self).encode())])
        page = self.page()
        queries, keys = (np.array(column, np.int32) for column in zip(*self.lengths, strict=True))
        starts = np.cumsum(queries + self.gap, dtype=np.int32) - queries
        ids = np.arange(1, page.num_pages)
        ids = iter(rng.permutation(ids) if is_shuffled else ids)
        table = rng.choice(GARBAGE, (len(queries), self.table_width)).astype(np.int32)
        shape = (page.num_pages, page.page_size, page.num_kv_heads, page.head_dim)
        k, v = rng.standard_normal((2, *shape), np.float32)
        is_live = np.zeros(shape[:2], bool)
        for row, (new, total) in enumerate(self.lengths):
            if new == 0:
                continue
            low = 0 if self.window is None else max(total - new + 1 - self.window, 0)
            for index in range(low // self.page_size, -(-total // self.page_size)):
                table[row, index] = next(ids)
            for position in range(low, total - new):
                is_live[table[row, position // self.page_size], position % self.page_size] = True
        arguments = {
            "q": rng.standard_normal((self.num_tokens, self.heads[0], self.head_dim), np.float32),
            "k_new": rng.standard_normal((self.num_tokens, self.heads[1], self.head_dim), np.float32),
            "v_new": rng.standard_normal((self.num_tokens, self.heads[1], self.head_dim), np.float32),
        }
        arguments = {name: jnp.asarray(array, self.dtype) for name, array in arguments.items()}
        arguments |= {
            "pages": layout.pack(self._store(k, v, is_live, stale), page_layout),
            "page_table": jnp.asarray(table),
            "query_lengths": jnp.asarray(queries),
            "kv_lengths": jnp.asarray(keys),
            "query_starts": jnp.asarray(starts),
        }
        if self.sinks:
            arguments["sinks"] = jnp.asarray(rng.standard_normal(self.heads[0], np.float32))
        if self.tree:
            arguments["ancestors"] = jnp.asarray(self._ancestors(rng, starts))
        return arguments

    def _store(self, k, v, is_live, stale: float) -> SeparatePages:
        (k_values, k_scales), (v_values, v_scales) = (
            layout.to_stored(jnp.asarray(x), dtype)
            for x, dtype in ((k, layout.key_dtype(self.cache_dtype)), (v, layout.value_dtype(self.cache_dtype)))
        )
        if k_scales is not None:
            scales = (jnp.where(is_live[..., None], s, stale).swapaxes(1, 2) for s in (k_scales, v_scales))
            return SeparatePages(k_values, v_values, *scales)
        values = (jnp.where(is_live[..., None, None], x, jnp.asarray(stale, x.dtype)) for x in (k_values, v_values))
        return SeparatePages(*values)

    def _ancestors(self, rng, starts) -> np.ndarray:
        """Bits of a tree in every other sequence, and in the rest of a block whose tokens all see each other, which has
        two more tokens than the sequence."""
        bits = np.ones(self.num_tokens, np.uint32)
        for number, (start, (new, _)) in enumerate(zip(starts, self.lengths, strict=True)):
            if number % 2:
                bits[start : start + new] = 2 ** min(new + 2, 32) - 1
                continue
            for index in range(1, min(new, 32)):
                parent = int(rng.integers(0, index))
                bits[start + index] = bits[start + parent] | np.uint32(1 << index)
        return bits


def _decode(keys: tuple[int, ...], **options) -> PagedShape:
    return PagedShape(tuple((1, n) for n in keys), max_query_length=1, **options)


SMALL = {
    "decode_around_a_page": _decode((1, 15, 16, 17, 33)),
    "decode_one_sequence": _decode((40,)),
    "decode_empty_slots": PagedShape(((0, 0), (1, 20), (0, 7), (1, 3), (0, 0)), max_query_length=1, num_padding=2),
    "decode_64_sequences": _decode(tuple(1 + (7 * i) % 45 for i in range(64)), head_dim=64, heads=(2, 1)),
    "decode_odd_heads": _decode((5, 37), heads=(3, 3)),
    "decode_groups_7": _decode((5, 37), heads=(7, 1)),
    "decode_groups_16": _decode((5, 37), heads=(16, 1)),
    "decode_heads_1": _decode((5, 37), heads=(1, 1)),
    "decode_head_dim_80": _decode((18, 37), head_dim=80),
    "decode_head_dim_96": _decode((18, 37), head_dim=96),
    "decode_head_dim_128": _decode((18, 37), head_dim=128),
    "decode_head_dim_256": _decode((18, 37), head_dim=256),
    "decode_page_32": _decode((31, 32, 33, 70), page_size=32),
    "decode_page_64": _decode((63, 65, 130), page_size=64),
    "decode_page_128": _decode((128, 129), page_size=128),
    "decode_window_in_a_page": _decode((3, 16, 40, 61), window=5),
    "decode_window": _decode((3, 16, 40, 61), window=20),
    "decode_soft_cap_sinks": _decode((3, 40), soft_cap=2.0, sinks=True, scale=0.3),
    "decode_bf16": _decode((17, 40), dtype="bfloat16", cache_dtype="bfloat16", head_dim=128),
    "decode_e4m3": _decode((17, 40), dtype="bfloat16", cache_dtype="float8_e4m3fn", head_dim=128),
    "decode_e5m2": _decode((17, 40), dtype="bfloat16", cache_dtype="float8_e5m2", head_dim=128),
    "decode_int8": _decode((17, 40), dtype="bfloat16", cache_dtype="int8", head_dim=128),
    "decode_int8_head_dim_64": _decode((17, 40), cache_dtype="int8", heads=(6, 3)),
    "decode_int8_page_64": _decode((63, 65, 130), cache_dtype="int8", page_size=64, head_dim=128),
    "verify": PagedShape(((4, 4), (4, 19), (2, 33), (0, 0), (1, 16)), max_query_length=4),
    "verify_padded_slots": PagedShape(((3, 9), (1, 40), (0, 0), (4, 17)), max_query_length=4, gap=1, num_padding=3),
    "verify_bf16": PagedShape(
        ((8, 40), (5, 8)), max_query_length=8, dtype="bfloat16", cache_dtype="bfloat16", head_dim=128
    ),
    "verify_int8": PagedShape(
        ((8, 40), (5, 8)), max_query_length=8, dtype="bfloat16", cache_dtype="int8", head_dim=128
    ),
    "verify_window_soft_cap_sinks": PagedShape(
        ((4, 40), (3, 9)), max_query_length=4, window=6, soft_cap=5.0, sinks=True
    ),
    "verify_tree": PagedShape(((8, 40), (6, 6), (1, 17), (12, 30)), max_query_length=16, tree=True),
    "verify_tree_window": PagedShape(((8, 40), (6, 21), (12, 50)), max_query_length=16, tree=True, window=7),
    "prefill_from_nothing": PagedShape(((17, 17), (40, 40))),
    "prefill_chunk": PagedShape(((20, 45), (33, 60))),
    "prefill_window": PagedShape(((20, 45), (50, 60)), window=9),
    "prefill_soft_cap_sinks": PagedShape(((20, 45),), soft_cap=4.0, sinks=True, heads=(4, 1)),
    "prefill_bf16": PagedShape(((40, 70),), dtype="bfloat16", cache_dtype="bfloat16", head_dim=128, heads=(8, 2)),
    "prefill_int8": PagedShape(((40, 70),), dtype="bfloat16", cache_dtype="int8", head_dim=128, heads=(8, 2)),
    "prefill_e4m3": PagedShape(((20, 30),), dtype="bfloat16", cache_dtype="float8_e4m3fn", head_dim=128, heads=(8, 2)),
    "mixed": PagedShape(((1, 33), (20, 20), (0, 0), (1, 1), (30, 50), (4, 9)), num_padding=5),
    "mixed_tree": PagedShape(((5, 33), (40, 45), (20, 50)), tree=True),
}

# Caches of 4 bits, which are stored in pages of their own.
FOUR_BITS = {
    "decode_int4": _decode((17, 40), dtype="bfloat16", cache_dtype="int4", head_dim=128),
    "decode_int4_head_dim_96": _decode((17, 40), cache_dtype="int4", head_dim=96, heads=(6, 3)),
    "decode_int8_int4": _decode((17, 40), dtype="bfloat16", cache_dtype="int8_int4", head_dim=128),
    "decode_int4_page_64": _decode((63, 65, 130), cache_dtype="int4", page_size=64, head_dim=128),
    "verify_int4": PagedShape(
        ((8, 40), (5, 8)), max_query_length=8, dtype="bfloat16", cache_dtype="int4", head_dim=128
    ),
    "verify_tree_int8_int4": PagedShape(
        ((8, 40), (6, 6), (12, 50)), max_query_length=16, tree=True, cache_dtype="int8_int4"
    ),
    "prefill_int4": PagedShape(((17, 17), (40, 73)), cache_dtype="int4"),
    "prefill_int8_int4": PagedShape(((17, 17), (40, 73)), cache_dtype="int8_int4", soft_cap=3.0, sinks=True),
}
