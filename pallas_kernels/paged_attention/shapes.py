"""Named calls of paged attention, shared by commands, tests and benchmarks."""

import zlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import layout
from pallas_kernels.paged_attention.layout import PageShape, SeparatePages
from pallas_kernels.paged_attention.specs import PagedSpec, make_spec

# Table entries beyond the pages in use: a kernel that uses them reads far out of bounds.
GARBAGE = np.array([-1, -7, 2**30, 10**6], np.int32)


@dataclass(frozen=True)
class PagedShape:
    """One call: `lengths` has (new tokens, keys with the new ones) of each sequence.

    There are `gap` rows of padding before each sequence's queries and `num_padding` at the end. With `tree`, sequences
    of 2 to 32 new tokens are random token trees.
    """

    lengths: tuple[tuple[int, int], ...]
    page_size: int = 16
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: str = "float32"
    cache_dtype: str = "float32"
    max_query_length: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    sinks: bool = False
    tree: bool = False
    gap: int = 0
    num_padding: int = 0
    pages_per_sequence: int | None = None

    @property
    def options(self) -> dict:
        """The static keyword arguments of the call."""
        names = ("max_query_length", "window", "soft_cap", "scale")
        return {name: getattr(self, name) for name in names}

    @property
    def table_width(self) -> int:
        needed = max(-(-keys // self.page_size) for _, keys in self.lengths)
        return self.pages_per_sequence or max(needed, 1) + 2

    @property
    def num_tokens(self) -> int:
        return sum(n + self.gap for n, _ in self.lengths) + self.num_padding

    def page(self, num_pages: int | None = None) -> PageShape:
        used = sum(-(-keys // self.page_size) for _, keys in self.lengths)
        return PageShape(num_pages or used + 3, self.page_size, self.heads[1], self.head_dim, self.cache_dtype)

    def abstract(self, page_layout: str, num_pages: int | None = None) -> dict:
        """The arguments as `jax.ShapeDtypeStruct`s."""
        count, dtype = len(self.lengths), jnp.dtype(self.dtype)
        new = jax.ShapeDtypeStruct((self.num_tokens, self.heads[1], self.head_dim), dtype)
        vector = jax.ShapeDtypeStruct((count,), jnp.int32)
        arguments = {
            "q": jax.ShapeDtypeStruct((self.num_tokens, self.heads[0], self.head_dim), dtype),
            "k_new": new,
            "v_new": new,
            "pages": self.page(num_pages).abstract(page_layout),
            "page_table": jax.ShapeDtypeStruct((count, self.table_width), jnp.int32),
            "query_lengths": vector,
            "kv_lengths": vector,
            "query_starts": vector,
        }
        if self.sinks:
            arguments["sinks"] = jax.ShapeDtypeStruct((self.heads[0],), jnp.float32)
        if self.tree:
            arguments["ancestors"] = jax.ShapeDtypeStruct((self.num_tokens,), jnp.uint32)
        return arguments

    def spec(self, page_layout: str) -> PagedSpec:
        """The static facts of the call."""
        names = ("q", "k_new", "v_new", "pages", "page_table", "sinks", "ancestors")
        arguments = self.abstract(page_layout)
        return make_spec(**{name: arguments[name] for name in names if name in arguments}, **self.options)

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
            layout.to_stored(jnp.asarray(x), self.cache_dtype) for x in (k, v)
        )
        if k_scales is not None:
            scales = (jnp.where(is_live[..., None], s, stale).swapaxes(1, 2) for s in (k_scales, v_scales))
            return SeparatePages(k_values, v_values, *scales)
        values = (jnp.where(is_live[..., None, None], x, jnp.asarray(stale, x.dtype)) for x in (k_values, v_values))
        return SeparatePages(*values)

    def _ancestors(self, rng, starts) -> np.ndarray:
        bits = np.ones(self.num_tokens, np.uint32)
        for start, (new, _) in zip(starts, self.lengths, strict=True):
            for index in range(1, min(new, 32)):
                parent = int(rng.integers(0, index))
                bits[start + index] = bits[start + parent] | np.uint32(1 << index)
        return bits


# (query heads, key heads, head_dim) of popular models.
MODELS = {"qwen3-0.6b": (16, 8, 128), "llama-3-8b": (32, 8, 128), "qwen3-32b": (64, 8, 128)}


def decode_shape(model: str, batch: int, context: int, *, cache_dtype: str = "bfloat16", **options) -> PagedShape:
    """A step of `batch` sequences of `context` keys with `num_new` new tokens each (default 1: decode)."""
    num_new = options.pop("num_new", 1)
    heads = MODELS[model]
    options = {
        "dtype": "bfloat16",
        "page_size": 64,
        "pages_per_sequence": -(-context // options.get("page_size", 64)),
    } | options
    return PagedShape(
        ((num_new, context),) * batch,
        heads=heads[:2],
        head_dim=heads[2],
        cache_dtype=cache_dtype,
        max_query_length=num_new,
        **options,
    )
