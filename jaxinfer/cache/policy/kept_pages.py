"""Which pages the tokens of a pass attend to under a policy that keeps sinks and a window: shorter page tables.

Kernels take causality from a key's place in the page table. A table without the dropped pages, and a length without
their tokens, is all that a kernel needs; positions of rotations are those of the whole sequence. Only beyond the length
that a model was trained for, sinks are moved (`moved_sinks`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxinfer.cache.moved_sinks import MovedSinks
from jaxinfer.cache.paged import PagedCache, PageTables
from jaxinfer.cache.policy.contract import StepRows
from jaxinfer.cache.policy.row_parts import parts_in_pages
from jaxinfer.cache.ragged import attend_ragged
from jaxinfer.models import ModelConfig
from jaxinfer.models.rope import inverse_frequencies
from pallas_kernels.paged_attention.specs import SHORT_QUERIES


class SinkWindowPages(Protocol):
    """Pages that a policy keeps of a sequence: the first ones, those before a token's own, and that one; tokens of a
    page. Beyond `trained` tokens sinks are moved."""

    @property
    def num_sinks(self) -> int: ...
    @property
    def num_window(self) -> int: ...
    @property
    def num_columns(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def trained(self) -> int | None: ...


class KeptView(NamedTuple):
    """The pages that S sequences attend to: page tables int32 [S, P] of each group, kv_lengths int32 [S], or those of
    each group, and by layer the sinks that are moved; none where sequences are no longer than the model's."""

    page_tables: PageTables
    kv_lengths: Any
    moved: dict[int, MovedSinks]


class Pieces(NamedTuple):
    """N parts of sequences, each within a page, as a ragged batch: starts and lengths int32 [N], and what each attends
    to. Unused ones have length 0."""

    starts: jax.Array
    lengths: jax.Array
    view: KeptView


def kept_view(
    kept: SinkWindowPages,
    config: ModelConfig,
    cache: PagedCache,
    page_tables: PageTables,
    positions: jax.Array,
    lengths: jax.Array,
) -> KeptView:
    """The pages that `lengths` int32 [S] tokens from `positions` int32 [S] on attend to once stored; those of a
    sequence lie in one page.

    `page_tables` int32 [S, pages of a sequence] are whole; entries of dropped pages may be anything.
    """
    page = positions // kept.page_size
    num_dropped = jnp.maximum(page - kept.num_window - kept.num_sinks, 0)
    column = jnp.arange(min(kept.num_columns, page_tables[0].shape[1]))
    columns = jnp.where(column < kept.num_sinks, column, column + num_dropped[:, None])
    tables = [jnp.take_along_axis(table, columns, axis=1, mode="clip") for table in page_tables]
    kv_lengths = jnp.where(lengths > 0, positions + lengths - num_dropped * kept.page_size, 0)
    if kept.trained is None:
        return KeptView(tuple(tables), kv_lengths, {})
    is_beyond = (page + 1) * kept.page_size > kept.trained
    shifts = jnp.where(is_beyond & (lengths > 0), num_dropped * kept.page_size, 0)
    layers = [layer for layer in config.cached_layers if config.window(layer) is None]
    group = cache.group_of(layers[0])
    sources = tables[group][:, : kept.num_sinks]
    num_pages = jax.tree.leaves(cache.layers[layers[0]])[0].shape[0]
    own = num_pages - sources.size + jnp.arange(sources.size, dtype=jnp.int32).reshape(sources.shape)
    is_moved = shifts[:, None] > 0
    tables[group] = tables[group].at[:, : kept.num_sinks].set(jnp.where(is_moved, own, sources))
    targets = jnp.where(is_moved, own, num_pages)
    moved = {layer: MovedSinks(sources, targets, *_rotation(config, layer, shifts)) for layer in layers}
    return KeptView(tuple(tables), kv_lengths, moved)


def _rotation(config: ModelConfig, layer: int, shifts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [S, rotary_dim / 2], of a layer's rotation by `shifts` int32 [S] tokens."""
    rope = config.rope_of(layer)
    if rope is None:
        nothing = jnp.zeros((shifts.shape[0], 0))
        return nothing, nothing
    angles = shifts[:, None].astype(jnp.float32) * inverse_frequencies(rope)[0]
    return jnp.cos(angles), jnp.sin(angles)


def pieces(
    kept: SinkWindowPages, config: ModelConfig, cache: PagedCache, page_tables: PageTables, rows: StepRows
) -> Pieces:
    """The parts of a step's rows that lie in one page each."""
    parts = parts_in_pages(kept.page_size, rows.token_slots, rows.query_starts, rows.lengths, rows.ends)
    tables = tuple(table[parts.slots] for table in page_tables)
    view = kept_view(kept, config, cache, tables, parts.positions, parts.lengths)
    return Pieces(parts.starts, parts.lengths, view)


def attend_to_pieces(cache: PagedCache, kept: SinkWindowPages, ragged: Pieces, rows: StepRows) -> Any:
    """`attend_ragged` for the pieces of a step's rows. A piece reads pages that earlier ones of the same pass write
    to."""
    view = ragged.view
    return attend_ragged(
        cache,
        view.page_tables,
        ragged.starts,
        ragged.lengths,
        view.kv_lengths,
        # With pages of few tokens too as for prompts: kernels for few append while others read.
        max_query_length=min(max(kept.page_size, SHORT_QUERIES + 1), rows.token_slots.shape[0]),
        is_uniform=rows.is_uniform,
        appends_first=True,
        moved=view.moved,
        mesh=rows.mesh,
    )
