"""Entry points of paged attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Implementations, KernelChoice
from pallas_kernels.paged_attention.layout import (
    ROTATED,
    Pages,
    PageShape,
    dtype_name,
    empty_pages,
    key_dtype,
    output_of,
    queries_for,
    value_dtype,
)
from pallas_kernels.paged_attention.parts import PagePart
from pallas_kernels.paged_attention.specs import MAX_TREE_TOKENS, PagedOperands, PagedSpec, make_spec
from pallas_kernels.platform import current_platform

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32, UInt32

IMPLEMENTATIONS = ("pallas_tpu", "pallas_gpu", "numba_cpu", "xla", "reference")
_BY_PLATFORM = {"tpu": ("pallas_tpu", "xla"), "gpu": ("pallas_gpu", "xla"), "cpu": ("numba_cpu", "xla")}
_MODULES = Implementations("pallas_kernels.paged_attention", IMPLEMENTATIONS, _BY_PLATFORM)


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["implementation", "spec"])
@dataclass(frozen=True)
class Schedule:
    """The work items of one step, shared by layers whose calls have equal specs; opaque to callers."""

    arrays: Any
    implementation: str
    spec: PagedSpec


def choose(spec: PagedSpec, implementation: str | None = None, platform: str | None = None) -> KernelChoice:
    """Selects an implementation for `spec` on `platform` (the current one when None).

    Raises NotImplementedError with the reason if the named one cannot run `spec`, ValueError for an unknown name.
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
    """Zeroed pages of one layer, in the preferred layout of the platform unless named.

    Without `has_values` there are only keys, whose first part is the values (multi-head latent attention).
    """
    shape = PageShape(num_pages, page_size, num_kv_heads, head_dim, dtype_name(dtype), has_values)
    return empty_pages(shape, layout or platform_layout(current_platform(), shape.dtype, has_values=has_values))


def platform_layout(platform: str, dtype: Any, *, has_values: bool = True) -> str:
    """The preferred layout of the platform's kernel for a cache of `dtype`."""
    name = dtype_name(dtype)
    if platform == "tpu" and has_values and key_dtype(name) == value_dtype(name):
        return "interleaved"
    if name in ROTATED:
        return "separate"
    is_narrow_float = jnp.issubdtype(name, jnp.floating) and jnp.dtype(name).itemsize < 4
    return "bits" if platform == "cpu" and is_narrow_float else "separate"


def make_schedule(
    spec: PagedSpec,
    page_table: Int32[Array, "S P"],
    query_lengths: Int32[Array, " S"],
    kv_lengths: Int32[Array, " S"],
    *,
    query_starts: Int32[Array, " S"] | None = None,
    part: PagePart | None = None,
    implementation: str | None = None,
) -> Schedule:
    """The work items of a step, from operands of `paged_attention` and their `make_spec`.

    Compute it once for each step: layers whose calls have equal specs share it.
    """
    name = _MODULES.take(spec, current_platform(), implementation)
    query_starts = _starts(query_starts, query_lengths)
    parts = () if part is None else (part,)
    arrays = _MODULES[name].make_schedule(spec, page_table, query_starts, query_lengths, kv_lengths, *parts)
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
    part: PagePart | None = None,
    schedule: Schedule | None = None,
    implementation: str | None = None,
) -> tuple[Any, Pages]:
    """Appends new keys and values to a paged cache and attends to it: prefill, decode and verify in one ragged call.

    Sequence s has `query_lengths[s]` new tokens, rows `query_starts[s]` onward of q, k_new and v_new: the last of its
    `kv_lengths[s]` keys (PagedAttention, Kwon et al. 2023; Ragged Paged Attention, arXiv 2604.15464). Rows of no
    sequence are padding: their results are meaningless, but finite where q is.

    Args:
      v_new: the first part of k_new where the pages have no values (`new_pages`).
      pages: one layer's cache. Donate it: the result aliases it.
      page_table: page ids of each sequence, anything for pages without a visible key. New tokens go to no shared page.
      query_lengths: new tokens of each sequence; those without any cost nothing.
      kv_lengths: all tokens of each sequence, the new ones included.
      query_starts: the running sum of query_lengths when None.
      max_query_length: static bound of query_lengths, T when None; up to 16 selects the programs for decode and verify.
      window: this, soft_cap, scale and sinks are as in `flash_attention`; scale may include an fp8 cache's key scale.
      ancestors: of trees, or of blocks whose tokens see each other. Bit j: the token sees the j-th new token of its
        sequence. Its own bit is set, and its depth in a window is its number of bits less 1. More than 32 new tokens
        are causal.
      is_uniform: static; results do not depend, to the bit, on how a prompt was cut into steps. Decode is slower.
      part: of the device, where devices divide the tokens of each page and `pages` has this one's. The output is then
        that of its keys, float32, with its log-sum-exp float32 [T, Hq] (-inf: no key is seen), for `merge_parts`.
      schedule: of `make_schedule` for these operands; computed when None.
      implementation: "pallas_tpu", "pallas_gpu", "numba_cpu" (needs jaxinfer[cpu]), "xla", "reference" (dense float32,
        for tests); None: see `choose`.

    Returns the output in q's dtype and the pages with the new tokens. Raises ValueError for operands, options
    or a schedule that do not fit, NotImplementedError with the reason if the named implementation cannot run the call.
    """
    options: Any = {"max_query_length": max_query_length, "window": window, "soft_cap": soft_cap, "scale": scale}
    options |= {"sinks": sinks, "ancestors": ancestors, "is_uniform": is_uniform, "num_parts": _count(part)}
    spec = make_spec(q, k_new, v_new, pages, page_table, **options)
    lengths = query_lengths, kv_lengths
    _check_lengths(spec, query_lengths=query_lengths, kv_lengths=kv_lengths, query_starts=query_starts)
    given: Any = {"query_starts": _starts(query_starts, query_lengths), "part": part}
    schedule = schedule or make_schedule(spec, page_table, *lengths, **given, implementation=implementation)
    _check_schedule(schedule, spec, implementation)
    ancestors = _within_window(ancestors, window)
    arrays = (q, k_new, v_new, pages, page_table, given["query_starts"])
    return _attend(PagedOperands(*arrays, *lengths, sinks, ancestors, part), spec, schedule)


def _attend(operands: PagedOperands, spec: PagedSpec, schedule: Schedule) -> tuple[Any, Pages]:
    """Attention in the space in which keys and values are stored: that of int4 is rotated."""
    operands = operands._replace(q=queries_for(operands.q, spec.page.dtype))
    out, pages = _MODULES[schedule.implementation].attention(operands, spec, schedule.arrays)
    if operands.part is None:
        return output_of(out, spec.page.dtype), pages
    out, lse = out
    return (output_of(out, spec.page.dtype), lse), pages


def _check_lengths(spec: PagedSpec, **arrays: jax.Array | None) -> None:
    for name, lengths in arrays.items():
        if lengths is not None and (lengths.shape != (spec.num_sequences,) or lengths.dtype != jnp.int32):
            raise ValueError(f"{name} is int32 [{spec.num_sequences}]; got {lengths.dtype} {lengths.shape}")


def _check_schedule(schedule: Schedule, spec: PagedSpec, implementation: str | None) -> None:
    if schedule.spec != spec or implementation not in (None, schedule.implementation):
        raise ValueError(
            f"the schedule was made for {schedule.implementation} and {schedule.spec}; "
            f"this call is {implementation}, {spec}"
        )


def _count(part: PagePart | None) -> int:
    return 1 if part is None else part.count


def _starts(query_starts: jax.Array | None, query_lengths: jax.Array) -> jax.Array:
    return jnp.cumsum(query_lengths) - query_lengths if query_starts is None else query_starts


def _within_window(ancestors: jax.Array | None, window: int | None) -> jax.Array | None:
    """Keeps the last `window` ancestors of each token."""
    if ancestors is None or window is None or window >= MAX_TREE_TOKENS:
        return ancestors
    bits = jnp.arange(MAX_TREE_TOKENS, dtype=jnp.uint32)
    is_near = jax.lax.population_count(ancestors[:, None] >> bits) <= window
    return ancestors & jnp.sum(jnp.where(is_near, jnp.uint32(1) << bits, 0), axis=1, dtype=jnp.uint32)
