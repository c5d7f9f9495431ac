"""Attention to the best pages of a cache (Quest, Tang et al. 2024, arXiv 2406.10774, section 3). Nothing is dropped.

Beside a layer's pages lie the least and the greatest of each page's stored keys, by kv head and channel: m and M. No
key of the page has a greater product with a query than sum_c max(q_c m_c, q_c M_c). A query attends to the pages where
this bound promises most, and to its own page. A shorter page table is all that a kernel needs.

Least and greatest keys are computed from what a page stores when it fills, and count from then on: rejected drafts and
former owners of the page leave nothing in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache.kv_dtype import KVScales, divide_by_scales, multiply_by_scales, scales_of_layer
from jaxinfer.cache.paged import LeafedPages, PagedCache
from jaxinfer.cache.policy.contract import SlotRows, StepRows
from jaxinfer.cache.policy.row_parts import parts_of, row_places
from jaxinfer.cache.ragged import AttentionByLayer
from pallas_kernels.paged_attention import Pages, PageShape, make_spec, paged_attention
from pallas_kernels.paged_attention.layout import append, from_stored, gather, queries_for
from pallas_kernels.paged_attention.reference import token_places, write_places
from pallas_kernels.platform import current_platform

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32


# Bytes of the bounds that a TPU gathers at once: they stay in vector memory.
BLOCK_BYTES = 4 << 20


class PageChoice(Protocol):
    """How many pages of so many tokens a row chooses, and how many rows of answers are replayed in a step. Hashable."""

    @property
    def num_pages(self) -> int: ...
    @property
    def page_size(self) -> int: ...

    num_replayed: ClassVar[int]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["page_table", "starts", "lengths", "positions", "chooses"],
    meta_fields=["best", "max_length", "num_filled", "appends_first", "is_uniform"],
)
@dataclass(frozen=True)
class QueryParts:
    """N parts of the T rows of a pass, as a ragged batch: a part is one row that chooses its pages, or adjacent rows of
    a sequence that attend to all of them.

    Attributes:
      page_table: int32 [N, P], all pages of each part's sequence. starts, lengths: int32 [N], its rows; unused ones
        have length 0. positions: int32 [N], of its first row. chooses: bool [N]; None where all do.
      best: how many pages are chosen. max_length: static bound of `lengths`. num_filled: static bound of the pages that
        the rows fill. appends_first: rows may read what others of the same pass store. is_uniform: as
        `PagedAttention`.
    """

    page_table: jax.Array
    starts: jax.Array
    lengths: jax.Array
    positions: jax.Array
    chooses: jax.Array | None
    best: PageChoice
    max_length: int | None = None
    num_filled: int = 0
    appends_first: bool = False
    is_uniform: bool = False


def bounds_dtype(dtype: str, layout: str) -> str:
    """The stored dtype of bounds of a cache's keys: bfloat16, or float32 where that is what the keys are or, on a CPU,
    which converts whole arrays of bfloat16, half the work."""
    return "float32" if dtype == "float32" or layout == "bits" else "bfloat16"


def abstract_bounds(pages: Any, heads: tuple[int, int], dtype: str, layout: str) -> jax.ShapeDtypeStruct:
    """The least and the greatest stored keys of each page of a layer [pages, 2, Hkv, K]: those of a full page count.
    With 4 bits they are of rotated keys, as stored. `heads` are the number of key heads and their width."""
    num_pages = jax.tree.leaves(pages)[0].shape[0]
    return jax.ShapeDtypeStruct((num_pages, 2, *heads), bounds_dtype(dtype, layout))


def query_parts_of_slots(best: PageChoice, page_table: jax.Array, rows: SlotRows) -> QueryParts:
    """The parts of a pass in which each of S slots has as many rows. `page_table` int32 [S, P]. Every row chooses."""
    number = jnp.arange(rows.count, dtype=jnp.int32)
    places, takes_part = rows.positions[:, None] + number, (number < rows.lengths[:, None]).astype(jnp.int32)
    count = places.size
    return QueryParts(
        jnp.repeat(page_table, rows.count, axis=0),
        jnp.arange(count, dtype=jnp.int32),
        takes_part.reshape(-1),
        places.reshape(-1),
        chooses=None,
        best=best,
        max_length=None if rows.is_uniform else 1,
        num_filled=_num_filled(best, count, rows.lengths.shape[0]),
        appends_first=rows.count > 1,
        is_uniform=rows.is_uniform,
    )


def query_parts_of_step(best: PageChoice, page_table: jax.Array, rows: StepRows) -> QueryParts:
    """The parts of a step: runs of rows of prompts, and rows of answers, at most `best.num_replayed` beside one of each
    slot. `page_table` int32 [S, P]. Raises ValueError for a step without the lengths of prompts."""
    if (num_prompt := rows.prompt_lengths) is None:
        raise ValueError("a step under this policy of the cache needs the lengths of prompts")
    places = row_places(rows.token_slots, rows.query_starts, rows.lengths, rows.ends)
    num_tokens, num_slots = rows.token_slots.shape[0], num_prompt.shape[0]
    chooses = places.position >= num_prompt[places.slot]
    is_first = places.is_real & ((places.offset == 0) | chooses)
    starts, lengths = parts_of(is_first, places.is_real, min(num_tokens, num_slots + best.num_replayed))
    return QueryParts(
        page_table[places.slot[starts]],
        starts,
        lengths,
        places.position[starts],
        chooses[starts],
        best,
        num_filled=_num_filled(best, num_tokens, num_slots),
        appends_first=True,
        is_uniform=rows.is_uniform,
    )


def _num_filled(best: PageChoice, num_tokens: int, num_slots: int) -> int:
    """Pages that so many rows of the slots fill, at most."""
    return min(num_tokens, num_tokens // best.page_size + num_slots)


class BestAttention(AttentionByLayer):
    """`attend` in which each row of a layer with bounds attends to the pages that it chooses, in other layers as
    `attend`, which is over the bare pages of `cache`."""

    def __init__(self, attend: Any, cache: PagedCache, parts: QueryParts):
        self._attend, self._before, self._layers, self._parts = attend, cache, list(cache.layers), parts

    def of_layer(self, layer: int) -> Any:
        """The attention of one layer."""
        if not isinstance(pages := self._layers[layer], LeafedPages):
            return self._attend.of_layer(layer)
        return BestLayer(pages, scales_of_layer(self._before.scales, layer), self._parts)

    def update(self, layer: int, state: Any) -> None:
        """Takes over what a layer has stored."""
        if isinstance(state, LeafedPages):
            self._layers[layer] = state
        else:
            self._attend.update(layer, state)

    @property
    def cache(self) -> PagedCache:
        return self._attend.cache.with_leafed(self._layers)


@jax.tree_util.register_pytree_node_class
class BestLayer:
    """One layer of `BestAttention`: a pytree. `state` are its pages with their bounds, and after a call what they hold
    then."""

    def __init__(self, state: LeafedPages, scales: KVScales | None, parts: QueryParts):
        self.state, self._scales, self._parts = state, scales, parts

    def tree_flatten(self):
        return (self.state, self._scales, self._parts), None

    @classmethod
    def tree_unflatten(cls, static, children) -> BestLayer:
        return cls(*children)

    def __call__(
        self,
        q: Float[Array, "T Hq K"],
        k: Float[Array, "T Hkv K"],
        v: Float[Array, "T Hkv K"],
        window: int | None,
        **options: Any,
    ) -> Float[Array, "T Hq K"]:
        del window  # only layers without one have bounds
        q, k, v = divide_by_scales(self._scales, q, k, v)
        out, self.state = attend_to_best(self.state, self._parts, q, k, v, is_uniform=self._parts.is_uniform, **options)
        return multiply_by_scales(self._scales, out)


def attend_to_best(
    state: LeafedPages,
    parts: QueryParts,
    q: Float[Array, "T Hq K"],
    k: Float[Array, "T Hkv K"],
    v: Float[Array, "T Hkv K"],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    **options: Any,
) -> tuple[Float[Array, "T Hq K"], LeafedPages]:
    """Stores new keys and values, and attends to the best pages of each part that chooses. `options` are those of
    `paged_attention`."""
    pages, bounds = state
    ends = jnp.where(parts.lengths > 0, parts.positions + parts.lengths, 0)
    options |= {"scale": scale, "soft_cap": soft_cap, "max_query_length": parts.max_length}
    spec = make_spec(q, k, v, pages, parts.page_table, **options)
    places = token_places(spec, parts.starts, parts.lengths, ends)
    page, slot = write_places(spec, parts.page_table, places)
    is_last = slot == spec.page_size - 1
    filled = jnp.where(is_last, page, spec.page.num_pages)
    if parts.num_filled < spec.num_tokens:
        (row,) = jnp.nonzero(filled < spec.page.num_pages, size=parts.num_filled, fill_value=spec.num_tokens)
        filled = filled.at[row].get(mode="fill", fill_value=spec.page.num_pages)
    if parts.appends_first:
        pages = append(pages, k, v, page, slot, by_rows=True)
        bounds = bounds_of_filled(pages, bounds, filled, spec.page)
    first_rows = q.at[parts.starts].get(mode="clip")
    promise = page_promise(queries_for(first_rows, spec.page.dtype), bounds, parts, spec.scale, soft_cap)
    table, kv_lengths = chosen_pages(parts, promise, ends)
    lengths = (parts.lengths, kv_lengths)
    out, pages = paged_attention(q, k, v, pages, table, *lengths, query_starts=parts.starts, **options)
    if not parts.appends_first:
        bounds = bounds_of_filled(pages, bounds, filled, spec.page)
    return out, LeafedPages(pages, bounds)


def bounds_of_filled(
    pages: Pages, bounds: jax.Array, ids: Int32[Array, " F"], shape: PageShape
) -> Float[Array, "pages 2 Hkv K"]:
    """The bounds with those of pages `ids`, which are full; one past the last page changes nothing."""
    stored = gather(pages, jnp.where(ids < shape.num_pages, ids, 0), shape)
    scales = None if stored.k_scales is None else stored.k_scales.swapaxes(1, 2)
    keys = from_stored(stored.k, scales)
    least, greatest = jnp.min(keys, axis=1), jnp.max(keys, axis=1)
    new = jnp.stack([_round_down(least, bounds.dtype), -_round_down(-greatest, bounds.dtype)], axis=1)
    return bounds.at[ids].set(new, mode="drop")


def page_promise(
    q: Float[Array, "N Hq K"], bounds: jax.Array, parts: QueryParts, scale: float, soft_cap: float | None
) -> Float32[Array, "N P"]:
    """The promise of each page of a sequence for a query, by the bounds of its scores: the logarithm of the share of
    attention, summed over query heads, if every page had one key with a score of its bound. -inf for pages that are not
    before the query's own.

    The paper chooses pages for each head. One table for all heads lets kernels read a page once, for all of them; of
    all choices for all heads, the greatest sums keep the most attention.
    """
    scores = _bounds_of_scores(q, bounds, parts.page_table) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    own = parts.positions // parts.best.page_size
    is_before = jnp.arange(scores.shape[2]) < own[:, None]
    scores = jnp.where(is_before[:, None], scores, -jnp.inf)
    highest = jnp.max(scores, axis=2, keepdims=True)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    total = jnp.sum(jnp.exp(scores - highest), axis=2, keepdims=True)
    shares = scores - highest - jnp.log(jnp.maximum(total, 1.0))
    return jax.nn.logsumexp(shares, axis=1)


def chosen_pages(parts: QueryParts, promise: Float32[Array, "N P"], ends: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The pages that each part attends to: its page table, int32 [N, P] or shorter where all parts choose, and its
    length."""
    best, num_columns = parts.best, parts.page_table.shape[1]
    own = parts.positions // best.page_size
    column = jnp.arange(num_columns)
    # Its own page comes first; of equal pages the earliest do.
    rank = jnp.where(column == own[:, None], jnp.inf, promise)
    columns = lax.top_k(rank, min(best.num_pages + 1, num_columns))[1]
    # In the order of the text, so that its own page is the last; those after it do not count.
    columns = jnp.sort(jnp.where(columns <= own[:, None], columns, num_columns), axis=1)
    table = jnp.take_along_axis(parts.page_table, columns, axis=1, mode="clip")
    num_left_out = jnp.maximum(own - best.num_pages, 0)
    kv_lengths = jnp.where(parts.lengths > 0, ends - num_left_out * best.page_size, 0)
    if parts.chooses is None:
        return table, kv_lengths
    table = jnp.pad(table, ((0, 0), (0, num_columns - table.shape[1])))
    table = jnp.where(parts.chooses[:, None], table, parts.page_table)
    return table, jnp.where(parts.chooses, kv_lengths, ends)


def _bounds_of_scores(q: jax.Array, bounds: jax.Array, page_table: jax.Array) -> Float32[Array, "N Hq P"]:
    """sum_c max(q_c m_c, q_c M_c), for each query head and page."""
    num_queries, num_heads, width = q.shape
    num_kv_heads = bounds.shape[2]
    q = q.reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, width)
    form = _by_products if current_platform() == "tpu" else _by_sums
    return form(jnp.maximum(q, 0), jnp.minimum(q, 0), bounds, page_table).reshape(num_queries, num_heads, -1)


def _by_sums(up: jax.Array, down: jax.Array, bounds: jax.Array, page_table: jax.Array) -> jax.Array:
    """One loop that reads each bound where it lies: compilers for CPUs and GPUs fuse the gather with the sum."""
    page_bounds = bounds.at[page_table].get(mode="clip").astype(jnp.float32)[:, :, :, :, None]
    up, down = (x.astype(jnp.float32)[:, None] for x in (up, down))
    return jnp.sum(up * page_bounds[:, :, 1] + down * page_bounds[:, :, 0], axis=-1).transpose(0, 2, 3, 1)


def _by_products(up: jax.Array, down: jax.Array, bounds: jax.Array, page_table: jax.Array) -> jax.Array:
    """For the matrix unit, of blocks of pages that are gathered into vector memory."""
    num_queries, num_pages = page_table.shape
    of_page = bounds.nbytes // bounds.shape[0]
    size = min(max(BLOCK_BYTES // (num_queries * of_page), 1), num_pages)
    num_blocks = -(-num_pages // size)
    precision = lax.Precision.HIGHEST if up.dtype == jnp.float32 else None

    def one_block(table: jax.Array) -> jax.Array:
        page_bounds = bounds.at[table].get(mode="clip").astype(up.dtype)
        product = partial(jnp.einsum, "nhgk,nphk->nhgp", precision=precision, preferred_element_type=jnp.float32)
        return product(up, page_bounds[:, :, 1]) + product(down, page_bounds[:, :, 0])

    table = jnp.pad(page_table, ((0, 0), (0, num_blocks * size - num_pages)))
    scores = lax.map(one_block, table.reshape(num_queries, num_blocks, size).swapaxes(0, 1))
    return jnp.moveaxis(scores, 0, 3).reshape(*up.shape[:3], -1)[..., :num_pages]


def _round_down(x: Float32[Array, "*any"], dtype: Any) -> jax.Array:
    """x in `dtype`, float32 or bfloat16, not above x."""
    if dtype == jnp.float32:
        return x
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    cut = bits & jnp.uint32(0xFFFF0000)  # towards zero
    cut = jnp.where((x < 0) & (cut != bits), cut + jnp.uint32(0x10000), cut)
    return lax.bitcast_convert_type(cut, jnp.float32).astype(jnp.bfloat16)
