"""Dense paged attention, the oracle in tests of every implementation: in float32, or in float64 where q is.

Memory is T x S x P x page.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import layout
from pallas_kernels.paged_attention.parts import PagePart
from pallas_kernels.paged_attention.specs import DIVIDED_PAGES, MAX_TREE_TOKENS, PagedOperands, PagedSpec


def make_schedule(spec: PagedSpec, page_table, query_starts, query_lengths, kv_lengths):
    """None: dense attention needs no schedule."""
    return None


def unsupported(spec: PagedSpec, platform: str) -> str | None:
    return DIVIDED_PAGES if spec.num_parts > 1 else None


def attention(operands: PagedOperands, spec: PagedSpec, schedule=None) -> tuple[jax.Array, layout.Pages]:
    places = token_places(spec, operands.query_starts, operands.query_lengths, operands.kv_lengths)
    sequence, is_real = places.sequence, places.is_real
    pages = append_new_tokens(operands, spec)
    logical = layout.unpack(pages, spec.num_kv_heads, spec.head_dim)
    if not spec.page.has_values:
        logical = logical._replace(v=logical.k[..., : spec.value_dim], v_scales=logical.k_scales)
    keys = jnp.arange(spec.max_kv_length)
    visible = visible_keys(operands, spec, sequence, places.position, keys) & is_real[:, None]
    # Pages that no query of the sequence sees may have any id.
    seen = jnp.zeros((spec.num_sequences, spec.max_kv_length), bool).at[sequence].max(visible)
    seen = seen.reshape(spec.num_sequences, spec.pages_per_sequence, spec.page_size)
    table = jnp.where(seen.any(-1), operands.page_table, 0)
    wide = jnp.promote_types(operands.q.dtype, jnp.float32)
    k, v = (
        _rows(values, scales, table, spec, wide)
        for values, scales in ((logical.k, logical.k_scales), (logical.v, logical.v_scales))
    )
    seen = seen.reshape(spec.num_sequences, -1, 1, 1)
    k, v = jnp.where(seen, k, 0)[sequence], jnp.where(seen, v, 0)[sequence]

    q = operands.q.astype(wide).reshape(spec.num_tokens, spec.num_kv_heads, spec.num_groups, spec.head_dim)
    scores = jnp.einsum("thgk,tshk->thgs", q, k, precision="highest") * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    if spec.has_sinks:
        sinks = operands.sinks.reshape(1, spec.num_kv_heads, spec.num_groups, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : spec.max_kv_length]
    out = jnp.einsum("thgs,tshk->thgk", weights, v, precision="highest")
    out = out.reshape(*operands.q.shape[:2], spec.value_dim)
    return jnp.where(is_real[:, None, None], out, 0).astype(operands.q.dtype), pages


class TokenPlaces(NamedTuple):
    """The place of each of the T tokens: its sequence, its number among the sequence's new tokens, its position among
    all keys, and whether it is no padding."""

    sequence: jax.Array
    index: jax.Array
    position: jax.Array
    is_real: jax.Array


def token_places(spec: PagedSpec, query_starts, query_lengths, kv_lengths) -> TokenPlaces:
    tokens = jnp.arange(spec.num_tokens, dtype=jnp.int32)
    inside = (tokens[:, None] >= query_starts) & (tokens[:, None] < query_starts + query_lengths)
    sequence = jnp.argmax(inside, axis=1).astype(jnp.int32)
    index = tokens - query_starts[sequence]
    return TokenPlaces(sequence, index, (kv_lengths - query_lengths)[sequence] + index, inside.any(axis=1))


def write_places(
    spec: PagedSpec, page_table: jax.Array, places: TokenPlaces, part: PagePart | None = None
) -> tuple[jax.Array, jax.Array]:
    """The page and the slot in it that each token is written to; padding has a page beyond the last, and a token of
    another part a slot beyond the last."""
    entry = jnp.clip(places.position // (spec.page_size * spec.num_parts), 0, spec.pages_per_sequence - 1)
    page = jnp.where(places.is_real, page_table[places.sequence, entry], spec.page.num_pages)
    if part is not None:
        return page, part.slot_of(places.position, spec.page_size)
    return page, places.position % spec.page_size


def append_new_tokens(operands: PagedOperands, spec: PagedSpec) -> layout.Pages:
    """Writes the new tokens of every sequence to its pages; padding is dropped."""
    places = token_places(spec, operands.query_starts, operands.query_lengths, operands.kv_lengths)
    page, slot = write_places(spec, operands.page_table, places)
    return layout.append(operands.pages, operands.k_new, operands.v_new, page, slot)


def visible_keys(operands: PagedOperands, spec: PagedSpec, sequence, position, keys):
    """True if the query of each token sees each key position: bool [T, keys]. Ancestors need the `sequence` of each."""
    visible = keys <= position[:, None]
    if spec.window is not None:
        visible &= keys > position[:, None] - spec.window
    if spec.has_ancestors:
        query_length = operands.query_lengths[sequence][:, None]
        first_new = operands.kv_lengths[sequence][:, None] - query_length
        bits = operands.ancestors[:, None]
        new_index = jnp.clip(keys - first_new, 0, MAX_TREE_TOKENS - 1).astype(jnp.uint32)
        is_ancestor = (bits >> new_index) & 1 == 1
        is_ancestor &= (keys >= first_new) & (keys < first_new + query_length)
        is_old = keys < first_new
        if spec.window is not None:
            depth = jax.lax.population_count(operands.ancestors).astype(jnp.int32)[:, None] - 1
            is_old &= keys > first_new + depth - spec.window
        visible = jnp.where(query_length > MAX_TREE_TOKENS, visible, is_old | is_ancestor)
    return visible


def _rows(values, scales, table, spec: PagedSpec, dtype):
    """Keys or values of each sequence in `dtype`, [S, P * page, Hkv, K]."""
    scales = None if scales is None else scales.swapaxes(1, 2)
    rows = layout.from_stored(values, scales, dtype)
    return rows[table].reshape(spec.num_sequences, -1, *rows.shape[2:])
