"""Attention that adds up, for each stored key, what queries attended to it, and eviction of the keys with the least:
heavy hitters (H2O, Zhang et al. 2023, section 4), by pages.

Sums lie in pages beside the keys: float32, of probabilities, the mean over the query heads of a key head. Kernels give
no probabilities, so a second pass computes them from the queries and the stored keys. A sequence's tokens are added one
after another, whatever rows a pass has, so that sums do not depend on how a prompt is cut.

What is dropped leaves no gap: tokens that stay are moved together, in the sequence's first pages. A token's place in
the page table is its position less what was dropped, `H2O.num_dropped`, which is whole pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache.kv_dtype import divide_by_scales, scales_of_layer
from jaxinfer.cache.paged import LeafedPages, PagedCache, PageTables
from jaxinfer.cache.policy.contract import StepRows
from jaxinfer.cache.policy.row_parts import RowParts, parts_in_pages
from jaxinfer.cache.policy.scores import kept_positions
from jaxinfer.cache.ragged import AttentionByLayer, LayerAttention, attend_ragged
from jaxinfer.models import ModelConfig
from pallas_kernels.paged_attention import Pages, PageShape
from pallas_kernels.paged_attention.compaction import compact
from pallas_kernels.paged_attention.layout import from_stored, gather, page_shape, queries_for

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


BLOCK_TOKENS = 256  # keys of a block of the second pass over a prompt's rows


class H2OPages(Protocol):
    """How many tokens of a sequence stay: pages of so many tokens, of which an answer has one more at most, and the
    last tokens. Hashable."""

    @property
    def num_pages(self) -> int: ...
    @property
    def num_columns(self) -> int: ...
    @property
    def num_recent(self) -> int: ...
    @property
    def page_size(self) -> int: ...


class SingleRows(NamedTuple):
    """Sequences with one new token each: int32 [S], their rows, and their keys with the new one, 0 for none; page
    tables int32 [S, C]."""

    rows: jax.Array
    kv_lengths: jax.Array
    page_tables: jax.Array


class PartRows(NamedTuple):
    """Parts of sequences that lie in one page each, N of which `count` are used; positions are places in the page
    table, int32 [S, C]."""

    parts: RowParts
    count: jax.Array
    page_tables: jax.Array


class SummedRows(NamedTuple):
    """The rows of a pass whose probabilities are added: those of sequences with one, together, and of others."""

    singles: SingleRows | None
    parts: PartRows | None


def abstract_sums(pages: Any, num_kv_heads: int) -> jax.ShapeDtypeStruct:
    """Sums of attention to each key of a layer's pages, float32 [pages, Hkv, page size]."""
    num_pages, page_size = jax.tree.leaves(pages)[0].shape[:2]
    return jax.ShapeDtypeStruct((num_pages, num_kv_heads, page_size), jnp.float32)


def num_dropped(heavy: H2OPages, num_stored: Int32[Array, " S"]) -> Int32[Array, " S"]:
    """`H2O.num_dropped` of arrays."""
    return jnp.maximum(num_stored // heavy.page_size - heavy.num_pages, 0) * heavy.page_size


def attend_decoding(
    heavy: H2OPages,
    config: ModelConfig,
    cache: PagedCache,
    page_tables: PageTables,
    positions: Int32[Array, " S"],
    lengths: Int32[Array, " S"],
) -> HeavyAttention:
    """The attention of a decode step: `lengths` (0 or 1) new tokens of answers at `positions`."""
    table = page_tables[0][:, : heavy.num_columns]
    cut = _Cut.of(heavy, positions, lengths, lengths > 0)
    rows = jnp.arange(lengths.shape[0])
    attend = attend_ragged(cache.bare, (table,), rows, lengths, cut.stored, max_query_length=1)
    singles = SingleRows(rows, cut.stored, table)
    return HeavyAttention(attend, cache, SummedRows(singles, None), partial(cut.evict, heavy, config, table))


def attend_step(
    heavy: H2OPages,
    config: ModelConfig,
    cache: PagedCache,
    page_tables: PageTables,
    rows: StepRows,
) -> HeavyAttention:
    """The attention of a step of decoding slots, prompts, and answers that are computed again after a preemption: these
    have rows of one page at most, and no row beside those of their prompt. Raises ValueError for a step without the
    lengths of prompts."""
    if rows.prompt_lengths is None:
        raise ValueError("a step under this policy of the cache needs the lengths of prompts")
    table, starts = page_tables[0], rows.ends - rows.lengths
    is_answer = rows.is_decoding | (starts >= rows.prompt_lengths)
    cut = _Cut.of(heavy, starts, rows.lengths, is_answer, rows.ends == rows.prompt_lengths)
    ragged = rows.query_starts, rows.lengths, cut.stored
    attend = attend_ragged(cache.bare, (table,), *ragged, is_uniform=rows.is_uniform)
    # Those of decoding slots at once, unless every row is to have the same arithmetic.
    is_single = rows.is_decoding & (not rows.is_uniform)
    narrow = table[:, : heavy.num_columns]
    singles = SingleRows(rows.query_starts, jnp.where(is_single, cut.stored, 0), narrow)
    own = jnp.where(is_single, 0, rows.lengths)
    parts = parts_in_pages(heavy.page_size, rows.token_slots, rows.query_starts, own, cut.stored)
    summed = SummedRows(None if rows.is_uniform else singles, PartRows(parts, jnp.sum(parts.lengths > 0), table))
    return HeavyAttention(attend, cache, summed, partial(cut.evict, heavy, config, table))


class _Cut(NamedTuple):
    """int32 [S]: tokens that are stored of each sequence after a pass, and how many of them are then kept; bool [S],
    whether they are an answer's, else a prompt's; whether the pass may end prompts."""

    stored: jax.Array
    kept: jax.Array
    is_answer: jax.Array
    has_prompts: bool

    @classmethod
    def of(cls, heavy: H2OPages, starts, lengths, is_answer, ends_prompt: jax.Array | None = None) -> _Cut:
        ends = starts + lengths
        dropped = jnp.where(is_answer, num_dropped(heavy, starts), 0)
        drops = is_answer if ends_prompt is None else is_answer | ends_prompt
        then = jnp.where(drops, num_dropped(heavy, ends), dropped)
        stored, kept = (jnp.where(lengths > 0, ends - count, 0) for count in (dropped, then))
        return cls(stored, kept, is_answer, ends_prompt is not None)

    def evict(self, heavy: H2OPages, config: ModelConfig, table: jax.Array, cache: PagedCache) -> PagedCache:
        widths = tuple(map(config.head_dim_of, range(config.num_layers)))
        kept = jnp.where(self.is_answer, self.kept, self.stored)
        cache = evict(heavy, widths, cache, table[:, : heavy.num_columns], self.stored, kept, is_prompt=False)
        if not self.has_prompts:
            return cache
        kept = jnp.where(self.is_answer, self.stored, self.kept)
        return evict(heavy, widths, cache, table, self.stored, kept, is_prompt=True)


class HeavyAttention(AttentionByLayer):
    """`attend` over the bare pages of `cache` that adds up what queries attend to. `cache`, read once after the pass,
    has the keys and the sums of what is kept: `evict` gets the cache with all of them."""

    def __init__(self, attend: Any, cache: PagedCache, rows: SummedRows, evict: Callable[[PagedCache], PagedCache]):
        self._attend, self._scales, self._layers, self._rows = attend, cache.scales, list(cache.layers), rows
        self._evict = evict

    def of_layer(self, layer: int) -> SummingLayer:
        """The attention of one layer. Raises ValueError for a cache without sums."""
        if not isinstance(pages := self._layers[layer], LeafedPages):
            raise ValueError("a cache without sums of probabilities cannot evict by them")
        scales = scales_of_layer(self._scales, layer)
        return SummingLayer(self._attend.of_layer(layer), pages.leaves, scales, self._rows)

    def update(self, layer: int, state: LeafedPages) -> None:
        """Takes over what a layer has stored."""
        self._layers[layer] = state
        self._attend.update(layer, state.pages)

    @property
    def cache(self) -> PagedCache:
        return self._evict(self._attend.cache.with_leafed(self._layers))

    def commit(self, num_committed: jax.Array) -> PagedCache:
        """Raises NotImplementedError: what was read of rejected tokens cannot be taken back."""
        raise NotImplementedError("sums of what queries attend to cannot be taken back from rejected tokens")


@jax.tree_util.register_pytree_node_class
class SummingLayer:
    """One layer of `HeavyAttention`: a pytree. `state` are its pages and sums, and after a call what they are then."""

    def __init__(self, attend: LayerAttention, sums: Any, scales: Any, rows: SummedRows):
        self._attend, self._sums, self._scales, self._rows = attend, sums, scales, rows

    def tree_flatten(self):
        return (self._attend, self._sums, self._scales, self._rows), None

    @classmethod
    def tree_unflatten(cls, static, children) -> SummingLayer:
        return cls(*children)

    def __call__(
        self,
        q: Float[Array, "T Hq K"],
        k: Float[Array, "T Hkv K"],
        v: Float[Array, "T Hkv W"],
        window: int | None,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Float[Array, " Hq"] | None = None,
    ) -> Float[Array, "T Hq W"]:
        if window is not None:
            raise NotImplementedError("sums of what queries attend to are of layers without a window")
        out = self._attend(q, k, v, window, scale=scale, soft_cap=soft_cap, sinks=sinks)
        q = divide_by_scales(self._scales, q, k, v)[0]
        shape = page_shape(self._attend.state, k.shape[-2], k.shape[-1])
        score = partial(_scores, shape, q.shape[-1] ** -0.5 if scale is None else scale, soft_cap)
        q = queries_for(q.astype(jnp.float32), shape.dtype)
        sums = self._sums
        if (singles := self._rows.singles) is not None:
            sums = _add_singles(score, sums, self._attend.state, q, sinks, singles)
        if (parts := self._rows.parts) is not None:
            sums = _add_parts(score, sums, self._attend.state, q, sinks, parts)
        self._sums = sums
        return out

    @property
    def state(self) -> LeafedPages:
        return LeafedPages(self._attend.state, self._sums)


def _scores(shape: PageShape, scale: float, soft_cap: float | None, q: jax.Array, pages: Pages, ids: jax.Array):
    """float32 [..., Hkv, G, R, C * page size]: q [..., R, Hq, K] with the keys of pages `ids` int32 [..., C]."""
    stored = gather(pages, ids, shape)
    scales = None if stored.k_scales is None else stored.k_scales.swapaxes(-1, -2)
    keys = from_stored(stored.k, scales)
    keys = keys.reshape(*ids.shape[:-1], -1, *keys.shape[-2:])
    groups = q.reshape(*q.shape[:-2], shape.num_kv_heads, -1, q.shape[-1])
    scores = jnp.einsum("...rhgk,...shk->...hgrs", groups, keys, precision="highest") * scale
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _sinks_of(sinks: jax.Array | None, num_kv_heads: int) -> jax.Array | None:
    """float32 [Hkv, G, 1]."""
    return None if sinks is None else sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1)


def _add_singles(score, sums, pages: Pages, q: jax.Array, sinks, rows: SingleRows) -> jax.Array:
    num_pages, num_heads, size = sums.shape
    num_slots, num_columns = rows.page_tables.shape
    place = jnp.arange(num_columns * size)
    is_seen = (place < rows.kv_lengths[:, None])[:, None, None, None]
    scores = jnp.where(is_seen, score(q[rows.rows][:, None], pages, rows.page_tables), -jnp.inf)
    most = jnp.maximum(scores.max(axis=-1), -1e30)  # sequences that take no part see nothing
    if (own := _sinks_of(sinks, num_heads)) is not None:
        most = jnp.maximum(most, own)
    weights = jnp.exp(scores - most[..., None])
    total = weights.sum(axis=-1) + (0 if own is None else jnp.exp(own - most))
    shares = (weights / total[..., None]).mean(axis=2)[:, :, 0]
    slot_sums = sums[rows.page_tables].swapaxes(1, 2).reshape(num_slots, num_heads, -1)
    is_own = (place == rows.kv_lengths[:, None] - 1)[:, None]  # whatever its place had is another token's
    slot_sums = jnp.where(is_own, 0, slot_sums) + shares
    is_used = jnp.arange(num_columns) * size < rows.kv_lengths[:, None]
    target = jnp.where(is_used, rows.page_tables, num_pages)
    return sums.at[target].set(slot_sums.reshape(num_slots, num_heads, -1, size).swapaxes(1, 2), mode="drop")


def _add_parts(score, sums, pages: Pages, q: jax.Array, sinks, rows: PartRows) -> jax.Array:
    """One part after another, in blocks of keys at fixed places. Twice over the keys: first the normalizers."""
    num_pages, num_heads, size = sums.shape
    num_columns = max(1, BLOCK_TOKENS // size)
    padding = -rows.page_tables.shape[1] % num_columns
    tables = jnp.pad(rows.page_tables, ((0, 0), (0, padding)))
    column, row = jnp.arange(num_columns), jnp.arange(size)
    start = None if (own := _sinks_of(sinks, num_heads)) is None else own

    def add_part(number: jax.Array, sums: jax.Array) -> jax.Array:
        first, count, slot, position = (field[number] for field in rows.parts)
        offset, page = position % size, position // size
        is_row = (row >= offset) & (row < offset + count)
        # Row i is that of the page's token i, so that its sums are the same ones whatever else is in the pass.
        queries = q[jnp.clip(first + row - offset, 0, q.shape[0] - 1)]
        places = page * size + row

        def block(at: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            ids = lax.dynamic_slice_in_dim(tables[slot], at * num_columns, num_columns)
            keys = at * num_columns * size + jnp.arange(num_columns * size)
            return ids, keys, jnp.where(keys <= places[:, None], score(queries, pages, ids), -jnp.inf)

        def normalize(at: jax.Array, normalizer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            most, total = normalizer
            scores = block(at)[2]
            higher = jnp.maximum(most, scores.max(axis=-1))
            return higher, total * jnp.exp(most - higher) + jnp.exp(scores - higher[..., None]).sum(axis=-1)

        num_blocks = page // num_columns + 1
        shape = (num_heads, q.shape[1] // num_heads, size)
        nothing = jnp.full(shape, -1e30), jnp.zeros(shape)
        if start is not None:
            nothing = jnp.broadcast_to(start, shape), jnp.ones(shape)
        most, total = lax.fori_loop(0, num_blocks, normalize, nothing)

        def add(at: jax.Array, sums: jax.Array) -> jax.Array:
            ids, keys, scores = block(at)
            shares = (jnp.exp(scores - most[..., None]) / total[..., None]).mean(axis=1)

            def add_row(number: jax.Array, page_sums: jax.Array) -> jax.Array:
                new = jnp.where(keys == places[number], 0, page_sums) + shares[:, number]
                return jnp.where(is_row[number], new, page_sums)

            page_sums = sums[ids].swapaxes(0, 1).reshape(num_heads, -1)
            page_sums = lax.fori_loop(0, size, add_row, page_sums).reshape(num_heads, num_columns, size)
            target = jnp.where(at * num_columns + column <= page, ids, num_pages)
            return sums.at[target].set(page_sums.swapaxes(0, 1), mode="drop")

        return lax.fori_loop(0, num_blocks, add, sums)

    return lax.fori_loop(0, rows.count, add_part, sums)


def evict(
    heavy: H2OPages,
    head_dims: tuple[int, ...],
    cache: PagedCache,
    page_table: Int32[Array, "S C"],
    stored: Int32[Array, " S"],
    kept: Int32[Array, " S"],
    *,
    is_prompt: bool,
) -> PagedCache:
    """Keeps `kept` of the `stored` tokens of each sequence where that is fewer: the last `heavy.num_recent`, and of the
    older ones those with the highest sums; at a prompt's end (`is_prompt`), with the highest mean over the queries
    that saw them (as kvpress's observed attention). They move to the first pages, in order, with their sums.

    `head_dims` are of the layers. Loops over such sequences alone: where there is none, nothing is read.
    """
    slots = jnp.nonzero(stored > kept, size=stored.shape[0], fill_value=0)[0]

    def one(number: jax.Array, layers: tuple[Any, ...]) -> tuple[Any, ...]:
        slot = slots[number]
        sequence = page_table[slot], stored[slot], kept[slot]
        return tuple(
            None if pages is None else _evict_layer(heavy, head_dim, is_prompt, pages, *sequence)
            for head_dim, pages in zip(head_dims, layers, strict=True)
        )

    return replace(cache, layers=lax.fori_loop(0, jnp.sum(stored > kept), one, cache.layers))


@partial(jax.jit, static_argnums=(0, 1, 2), inline=False)  # traced once for layers of the same shapes
def _evict_layer(
    heavy: H2OPages,
    head_dim: int,
    is_prompt: bool,
    leafed: LeafedPages,
    table: jax.Array,
    stored: jax.Array,
    kept: jax.Array,
) -> LeafedPages:
    pages, sums = leafed
    num_pages, num_heads, size = sums.shape
    shape = page_shape(pages, num_heads, head_dim)
    place = jnp.arange(table.shape[0] * size)
    stored_sums = sums[table].swapaxes(0, 1).reshape(num_heads, -1)
    scores = stored_sums / jnp.maximum(stored - place, 1) if is_prompt else stored_sums
    scores = jnp.where(place >= stored - heavy.num_recent, jnp.inf, scores)
    scores = jnp.where(place >= stored, -jnp.inf, scores)
    target = jnp.arange(min(heavy.num_columns, table.shape[0]) * size)
    is_kept = target < kept
    chosen = jnp.where(is_kept, kept_positions(scores, target.shape[0], kept), 0)
    page, slot = jnp.where(is_kept, table[target // size], num_pages), target % size
    moved = jnp.take_along_axis(stored_sums, chosen, axis=1).T
    sums = sums.at[page[:, None], jnp.arange(num_heads), slot[:, None]].set(moved, mode="drop")
    return LeafedPages(compact(pages, shape, table, chosen, kept, table[: heavy.num_columns]), sums)
