"""The entry points: pick an implementation, plan a step, run a layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Choice, Implementations
from pallas_kernels.paged_attention.layout import Pages, PageShape, empty_pages
from pallas_kernels.paged_attention.specs import MAX_TREE_TOKENS, Operands, PagedSpec, make_spec
from pallas_kernels.platform import current_platform

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32, UInt32

IMPLEMENTATIONS = ("pallas_tpu", "pallas_gpu", "xla", "reference")
_BY_PLATFORM = {"tpu": ("pallas_tpu", "xla"), "gpu": ("pallas_gpu", "xla"), "cpu": ("xla",)}
_MODULES = Implementations("pallas_kernels.paged_attention", IMPLEMENTATIONS, _BY_PLATFORM)


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["implementation", "spec"])
@dataclass(frozen=True)
class Schedule:
    """What one step reads, computed once and shared by its layers of the same window; opaque to callers."""

    arrays: Any
    implementation: str
    spec: PagedSpec


def choose(spec: PagedSpec, implementation: str | None = None, platform: str | None = None) -> Choice:
    """Picks an implementation for `spec` on `platform` (the current one when None).

    Raises NotImplementedError with the reason when a named implementation cannot, ValueError for an unknown name.
    """
    return _MODULES.choose(spec, platform or current_platform(), implementation)


def new_pages(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    *,
    layout: str | None = None,
    has_values: bool = True,
) -> Pages:
    """Zeroed pages of one layer, in the layout of the platform's kernel ("interleaved" on a TPU) unless named; without
    `has_values` for keys alone, whose first part is the values."""
    shape = PageShape(num_pages, page_size, num_kv_heads, head_dim, jnp.dtype(dtype).name, has_values)
    return empty_pages(shape, layout or platform_layout(current_platform(), shape.dtype, has_values=has_values))


def platform_layout(platform: str, dtype: Any, *, has_values: bool = True) -> str:
    """The layout that the platform's kernel reads best, for a cache of `dtype`."""
    if platform == "tpu" and has_values:
        return "interleaved"
    is_narrow_float = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return "bits" if platform == "cpu" and is_narrow_float else "separate"


def make_schedule(
    spec: PagedSpec,
    page_table: Int32[Array, "S P"],
    query_lengths: Int32[Array, " S"],
    kv_lengths: Int32[Array, " S"],
    *,
    query_starts: Int32[Array, " S"] | None = None,
    implementation: str | None = None,
) -> Schedule:
    """The order of work of a step, from the operands of `paged_attention` and `make_spec` of their shapes.

    Layers whose calls have equal specs share it: compute it once in a step, outside the layers.
    """
    name = _MODULES.take(spec, current_platform(), implementation)
    query_starts = _starts(query_starts, query_lengths)
    arrays = _MODULES[name].make_schedule(spec, page_table, query_starts, query_lengths, kv_lengths)
    return Schedule(arrays, name, spec)


def paged_attention(
    q: Float[Array, "T Hq K"],
    k_new: Float[Array, "T Hkv K"],
    v_new: Float[Array, "T Hkv W"],
    pages: Pages,
    page_table: Int32[Array, "S P"],
    query_lengths: Int32[Array, " S"],
    kv_lengths: Int32[Array, " S"],
    *,
    query_starts: Int32[Array, " S"] | None = None,
    max_query_length: int | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
    ancestors: UInt32[Array, " T"] | None = None,
    is_uniform: bool = False,
    schedule: Schedule | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T Hq W"], Pages]:
    """Appends new keys and values to a paged cache and attends to it: prefill, decode and verify in one ragged call.

    Sequence s has `query_lengths[s]` new tokens, rows `query_starts[s]` onward of q, k_new and v_new; they become the
    last of its `kv_lengths[s]` keys. (Kwon et al. 2023, PagedAttention; the ragged form is that of Ragged Paged
    Attention, arXiv 2604.15464.)

    Args:
      q: queries [T, Hq, K]; k_new, v_new: keys and values of the same tokens [T, Hkv, K]. Where the pages have no
        values (`new_pages`), v_new is the first part of k_new, [T, Hkv, W].
      pages: one layer's cache (`new_pages`). Donate it: the result aliases it.
      page_table: int32 [S, P], the page ids of each sequence in order. Ids of pages that hold no key a query sees
        are never used and may be anything. No two sequences with new tokens may share the pages these go to.
      query_lengths: int32 [S], new tokens. Length 0 costs and touches nothing.
      kv_lengths: int32 [S], all tokens, the new ones too.
      query_starts: int32 [S]; the running sum of query_lengths when None. Rows outside every sequence are padding:
        what is returned there has no meaning (but is finite when q is).
      max_query_length: static bound of query_lengths, T when None; 1 to 16 picks the programs for decode and verify.
      window: a query sees only the last `window` keys, its own included.
      soft_cap: scores become soft_cap * tanh(score / soft_cap), after scaling, before masking.
      scale: multiplies the scores; K**-0.5 when None. The scale of an fp8 cache's keys can be folded in here.
      sinks: float32 [Hq], one more score in each head's softmax, whose value is zero (gpt-oss).
      ancestors: uint32 [T], for verifying a token tree: bit j says that the token sees the j-th new token of its
        sequence; its own bit is set, and parents come before children. Its depth is the number of its bits less 1,
        which is its distance from the first new token in a window. Sequences of more than 32 new tokens are causal.
      is_uniform: static; sequences of few and of many new tokens go through the same program, so that the bits of an
        answer do not depend on how a sequence was cut into steps. Slower decode.
      schedule: from `make_schedule` for these operands; computed here when None.
      implementation: None picks by platform and shape (see `choose`), "xla", "pallas_tpu", "pallas_gpu", or
        "reference" (dense, float32, for tests).

    Returns:
      (out [T, Hq, K], or [T, Hq, W], in q's dtype, the pages with the new tokens).

    Raises:
      ValueError: shapes, dtypes or options that do not fit, or a schedule made for others.
      NotImplementedError: the named implementation cannot do this; the message says why.
    """
    spec = make_spec(
        q,
        k_new,
        v_new,
        pages,
        page_table,
        max_query_length=max_query_length,
        window=window,
        soft_cap=soft_cap,
        scale=scale,
        sinks=sinks,
        ancestors=ancestors,
        is_uniform=is_uniform,
    )
    for name, lengths in (("query_lengths", query_lengths), ("kv_lengths", kv_lengths), ("query_starts", query_starts)):
        if lengths is not None and (lengths.shape != (spec.num_sequences,) or lengths.dtype != jnp.int32):
            raise ValueError(f"{name} is int32 [{spec.num_sequences}]; got {lengths.dtype} {lengths.shape}")
    query_starts = _starts(query_starts, query_lengths)
    if schedule is None:
        schedule = make_schedule(
            spec, page_table, query_lengths, kv_lengths, query_starts=query_starts, implementation=implementation
        )
    elif schedule.spec != spec or implementation not in (None, schedule.implementation):
        raise ValueError(
            f"the schedule was made for {schedule.implementation} and {schedule.spec}; "
            f"this call is {implementation}, {spec}"
        )
    if ancestors is not None and window is not None and window < MAX_TREE_TOKENS:
        ancestors = _within_window(ancestors, window)
    operands = Operands(q, k_new, v_new, pages, page_table, query_starts, query_lengths, kv_lengths, sinks, ancestors)
    return _MODULES[schedule.implementation].attention(operands, spec, schedule.arrays)


def _starts(query_starts: jax.Array | None, query_lengths: jax.Array) -> jax.Array:
    return jnp.cumsum(query_lengths) - query_lengths if query_starts is None else query_starts


def _within_window(ancestors: jax.Array, window: int) -> jax.Array:
    """Keeps the last `window` ancestors of each token: those with fewer than `window` ancestors at or after them."""
    bits = jnp.arange(MAX_TREE_TOKENS, dtype=jnp.uint32)
    is_near = jax.lax.population_count(ancestors[:, None] >> bits) <= window
    return ancestors & jnp.sum(jnp.where(is_near, jnp.uint32(1) << bits, 0), axis=1, dtype=jnp.uint32)
