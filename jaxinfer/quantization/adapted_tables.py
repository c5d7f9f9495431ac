"""An embedding, a head, or both in one table, with adapters of which each row has one or none. As `adapted`, which has
the rules that leaves of weights with adapters follow."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.quantization.adapted import Adapted, kind, register
from jaxinfer.quantization.matmul import KINDS, matmul, rows
from pallas_kernels.adapter_matmul import add_adapters

_EXACT = lax.Precision.HIGHEST


class TableStack(NamedTuple):
    """Changes of a table of V tokens, each None where no adapter has any.

    Attributes:
      a, b: of an embedding [S, V, R] and [S, R, D], of a head [S, R, D] and [S, R, V]; the scale is in b.
      columns: float32 [S, D] of an embedding, [S, V] of a head: factors less 1 of what the pairs change (DoRA).
      tokens: int32 [S, T], 1 + the ids of tokens whose rows [S, T, D] stand in place of the base's; 0 for none.
      whole: [S, V, D], in place of the base's where is_whole, bool [S].
      added: [S, N, D], the rows of tokens V, V + 1, ... that adapters add, of which each has its first num_added,
        int32 [S]. Logits then have V + N tokens, of which all that a row's adapter does not add are -inf.
    """

    a: Any = None
    b: Any = None
    columns: Any = None
    tokens: Any = None
    rows: Any = None
    whole: Any = None
    is_whole: Any = None
    added: Any = None
    num_added: Any = None


class TableStacks(NamedTuple):
    """Changes of the table where tokens are read, and where logits are computed. None for what a table is not used for,
    and for no change; an embedding on a mesh has no None for `embed`."""

    embed: TableStack | None = None
    lm_head: TableStack | None = None


@register
@dataclass(frozen=True)
class AdaptedTable(Adapted):
    """An embedding [V, D], which may be the head too, or a head [D, V], with `TableStacks`. A pytree."""


def _read(table: AdaptedTable, indices: jax.Array, dtype: Any) -> jax.Array:
    stack, place = table.stack.embed, None
    if stack is not None and stack.added is not None:
        place, indices = indices - table.shape[0], jnp.minimum(indices, table.shape[0] - 1)
    taken = rows(table.base, indices, dtype)
    if table.ids is None or stack is None or all(part is None for part in stack):
        return taken
    ids = table.ids_of(indices.shape)
    slots, changed = jnp.maximum(ids - 1, 0), taken.astype(jnp.float32)
    if stack.whole is not None:
        changed = jnp.where(stack.is_whole[slots][..., None], stack.whole[slots, indices].astype(jnp.float32), changed)
    if stack.a is not None:
        inner, b = stack.a[slots, indices].astype(jnp.float32), stack.b.astype(jnp.float32)
        is_own = jnp.arange(len(b)) == ids[..., None] - 1
        by_slot = jnp.where(is_own[..., None], inner[..., None, :], 0)
        changed = changed + jnp.einsum("...sr,srd->...d", by_slot, b, precision=_EXACT)
    if stack.columns is not None:
        changed = changed + changed * stack.columns[slots]
    if stack.tokens is not None:
        is_token = stack.tokens[slots] == indices[..., None] + 1
        own = stack.rows[slots, jnp.argmax(is_token, axis=-1)].astype(jnp.float32)
        changed = jnp.where(jnp.any(is_token, axis=-1)[..., None], own, changed)
    if stack.added is not None and place is not None:
        own = stack.added[slots, jnp.maximum(place, 0)].astype(jnp.float32)
        changed = jnp.where((place >= 0)[..., None], own, changed)
    return jnp.where((ids > 0)[..., None], changed.astype(taken.dtype), taken)


def _logits(x: jax.Array, table: AdaptedTable, out_dtype: Any, *, is_transposed: bool = False) -> jax.Array:
    product, stack = matmul(x, table.base, out_dtype, is_transposed=is_transposed), table.stack.lm_head
    if stack is None:
        return product
    if table.ids is None:
        return product if stack.added is None else _padded(product, stack.added.shape[1])
    ids, changed = table.ids_of(x.shape[:-1]), product
    if stack.whole is not None:
        changed = _by_whole(x, changed, stack, ids)
    if stack.a is not None:
        (changed,) = add_adapters(x, [changed], [(stack.a, stack.b)], ids, table.ranks)
    if stack.columns is not None:
        wide = changed.astype(jnp.float32)
        columns = _fitting(stack.columns[jnp.maximum(ids - 1, 0)], changed.shape[-1])
        changed = (wide + wide * columns).astype(changed.dtype)
    if stack.tokens is not None:
        slots = jnp.maximum(ids - 1, 0)
        by_slot = jnp.einsum("...d,std->...st", x, stack.rows, precision=_EXACT, preferred_element_type=jnp.float32)
        own = jnp.take_along_axis(by_slot, slots[..., None, None], axis=-2)[..., 0, :]
        width = changed.shape[-1]
        tokens = stack.tokens[slots].reshape(-1, own.shape[-1])
        place = jnp.where(tokens > 0, tokens - 1, width)
        flat = changed.reshape(-1, width)
        flat = flat.at[jnp.arange(len(flat))[:, None], place].set(
            own.reshape(-1, own.shape[-1]).astype(flat.dtype), mode="drop"
        )
        changed = flat.reshape(changed.shape)
    changed = jnp.where((ids > 0)[..., None], changed, product)
    return changed if stack.added is None else _with_added(x, changed, stack, ids)


def _fitting(array: jax.Array, width: int) -> jax.Array:
    """An array [..., V] with zeros for what a wider product has behind the vocabulary."""
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])])


def _padded(logits: jax.Array, count: int) -> jax.Array:
    return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, count)], constant_values=-jnp.inf)


def _with_added(x: jax.Array, logits: jax.Array, stack: TableStack, ids: jax.Array) -> jax.Array:
    """Logits with those of the tokens that the rows' adapters add: -inf for what a row's does not."""
    slots = jnp.maximum(ids - 1, 0)
    by_slot = jnp.einsum("...d,snd->...sn", x, stack.added, precision=_EXACT, preferred_element_type=jnp.float32)
    own = jnp.take_along_axis(by_slot, slots[..., None, None], axis=-2)[..., 0, :].astype(logits.dtype)
    is_own = (ids > 0)[..., None] & (jnp.arange(own.shape[-1]) < stack.num_added[slots][..., None])
    return jnp.concatenate([logits, jnp.where(is_own, own, -jnp.inf)], axis=-1)


def _by_whole(x: jax.Array, product: jax.Array, stack: TableStack, ids: jax.Array) -> jax.Array:
    """The logits, by a head of its own for rows whose adapter has one: heads that no row has are not read."""

    def one(slot: jax.Array, logits: jax.Array) -> jax.Array:
        is_own = (ids == slot + 1) & stack.is_whole[slot]

        def own(logits: jax.Array) -> jax.Array:
            head = lax.dynamic_index_in_dim(stack.whole, slot, keepdims=False)
            its = matmul(x, head, logits.dtype, is_transposed=True)
            its = _fitting(its, logits.shape[-1])
            return jnp.where(is_own[..., None], its, logits)

        return lax.cond(jnp.any(is_own), own, lambda logits: logits, logits)

    return lax.fori_loop(0, stack.is_whole.shape[0], one, product)


KINDS[AdaptedTable] = kind(_logits, rows=_read)
