"""Named calls of paged attention, shared by commands, tests and benchmarks."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.layout import PageShape
from pallas_kernels.paged_attention.specs import PagedSpec, make_spec


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
