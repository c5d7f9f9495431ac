"""Operands and static facts of a call, as every implementation of paged attention takes them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cpu_kernels.paged_attention.masks import MASKED as MASKED
from cpu_kernels.paged_attention.masks import MAX_TREE_TOKENS as MAX_TREE_TOKENS
from pallas_kernels.paged_attention.layout import InterleavedPages, Pages, PageShape, layout_of, page_shape
from pallas_kernels.paged_attention.parts import PagePart

DIVIDED_PAGES = "it does not read pages whose tokens are divided between devices"
# Sequences with at most this many new tokens (decode, verify) run in a program of their own.
SHORT_QUERIES = 16


class PagedOperands(NamedTuple):
    """The arrays of one call; shapes as in `paged_attention`."""

    q: jax.Array
    k_new: jax.Array
    v_new: jax.Array
    pages: Any
    page_table: jax.Array
    query_starts: jax.Array
    query_lengths: jax.Array
    kv_lengths: jax.Array
    sinks: Any
    ancestors: Any
    part: PagePart | None = None


@dataclass(frozen=True)
class PagedSpec:
    """Static facts of one call, from `make_spec`; `value_dim` is the width of the result."""

    page: PageShape
    layout: str
    num_tokens: int
    num_sequences: int
    pages_per_sequence: int
    num_q_heads: int
    q_dtype: str
    max_query_length: int
    window: int | None
    soft_cap: float | None
    scale: float
    has_sinks: bool
    has_ancestors: bool
    is_uniform: bool = False
    value_dim: int = 0
    num_parts: int = 1  # devices that the tokens of a page are divided between; `page` is of one

    @property
    def has_short(self) -> bool:
        """True if sequences of few new tokens run in a program of their own."""
        return not self.is_uniform

    @property
    def has_long(self) -> bool:
        """True if there is a program for any number of new tokens."""
        return self.is_uniform or self.max_query_length > SHORT_QUERIES

    @property
    def num_kv_heads(self) -> int:
        return self.page.num_kv_heads

    @property
    def num_groups(self) -> int:
        """Query heads that share a key head."""
        return self.num_q_heads // self.page.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.page.head_dim

    @property
    def page_size(self) -> int:
        return self.page.page_size

    @property
    def max_kv_length(self) -> int:
        """Keys of the longest sequence, or of a part of it."""
        return self.pages_per_sequence * self.page.page_size

    @property
    def facts(self) -> str:
        """Facts that block sizes may depend on. The batch is none of them: it must not change the rounding of sums."""
        heads = f"q{self.num_q_heads} kv{self.num_kv_heads} k{self.head_dim}"
        window = "" if self.window is None else f" window{self.window}"
        return f"{heads} page{self.page_size} {self.q_dtype}/{self.page.dtype}{window}"


def make_spec(
    q: Any,
    k_new: Any,
    v_new: Any,
    pages: Pages,
    page_table: Any,
    *,
    max_query_length: int | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    sinks: Any = None,
    ancestors: Any = None,
    is_uniform: bool = False,
    num_parts: int = 1,
) -> PagedSpec:
    """Checks shapes and options of arrays or `jax.ShapeDtypeStruct`s; raises ValueError with the offending shapes."""
    if q.ndim != 3 or k_new.ndim != 3 or not _fit(k_new.shape, v_new.shape, pages):
        raise ValueError(
            f"paged_attention takes q [T, Hq, K] and equal k_new, v_new [T, Hkv, K], or with pages of keys alone a "
            f"v_new that is not wider; got q {q.shape}, k_new {k_new.shape}, v_new {v_new.shape}"
        )
    num_tokens, num_heads, head_dim = q.shape
    if k_new.shape[0] != num_tokens or k_new.shape[2] != head_dim or num_heads % k_new.shape[1]:
        raise ValueError(
            f"q {q.shape} does not fit k_new {k_new.shape}: tokens and head_dim must agree and the "
            f"{num_heads} query heads must be a multiple of the {k_new.shape[1]} key heads"
        )
    if not (q.dtype == k_new.dtype == v_new.dtype) or jnp.dtype(q.dtype).name not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"q, k_new and v_new must share one of float32, bfloat16, float16; "
            f"got {q.dtype}, {k_new.dtype}, {v_new.dtype}"
        )
    if page_table.ndim != 2 or page_table.dtype != jnp.int32:
        raise ValueError(f"page_table is int32 [S, P]; got {page_table.dtype} {page_table.shape}")
    longest = num_tokens if max_query_length is None else max_query_length
    _check_options(num_tokens, num_heads, longest, window, soft_cap, sinks, ancestors)
    return PagedSpec(
        page=page_shape(pages, k_new.shape[1], head_dim),
        layout=layout_of(pages),
        num_tokens=num_tokens,
        num_sequences=page_table.shape[0],
        pages_per_sequence=page_table.shape[1],
        num_q_heads=num_heads,
        q_dtype=jnp.dtype(q.dtype).name,
        max_query_length=longest,
        window=window,
        soft_cap=soft_cap,
        scale=head_dim**-0.5 if scale is None else scale,
        has_sinks=sinks is not None,
        has_ancestors=ancestors is not None,
        is_uniform=is_uniform,
        value_dim=v_new.shape[2],
        num_parts=num_parts,
    )


def _check_options(num_tokens: int, num_heads: int, longest: int, window, soft_cap, sinks, ancestors) -> None:
    if not 1 <= longest <= max(num_tokens, 1):
        raise ValueError(f"max_query_length={longest} is not between 1 and the {num_tokens} tokens of q")
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1 key")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap} must be positive")
    if sinks is not None and (sinks.shape != (num_heads,) or sinks.dtype != jnp.float32):
        raise ValueError(f"sinks are float32 [{num_heads}], one for each query head; got {sinks.dtype} {sinks.shape}")
    if ancestors is not None and (ancestors.shape != (num_tokens,) or ancestors.dtype != jnp.uint32):
        raise ValueError(f"ancestors are uint32 [{num_tokens}]; got {ancestors.dtype} {ancestors.shape}")


def _fit(keys: tuple[int, ...], values: tuple[int, ...], pages: Pages) -> bool:
    if isinstance(pages, InterleavedPages) or pages.v is not None:
        return keys == values
    return len(values) == 3 and keys[:2] == values[:2] and 1 <= values[2] <= keys[2]
