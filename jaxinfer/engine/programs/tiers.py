"""Programs that read pages for host memory and write them back: one gather and few large arrays, not one a layer."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxinfer import parallel
from jaxinfer.cache.state import LayerState

Rows = tuple[jax.Array, ...]


def kinds_of(mesh: Mesh | None, parts: Any) -> list[list[int]]:
    """The leaves of some layers' pages or states, by number: those of a list have equal shapes, dtypes and shardings,
    and are stacked."""
    kinds: dict[Any, list[int]] = {}
    specs = leaf_specs(mesh, parts)
    for number, (leaf, spec) in enumerate(zip(jax.tree.leaves(parts), specs, strict=True)):
        kinds.setdefault((leaf.shape[1:], jnp.dtype(leaf.dtype).name, spec), []).append(number)
    return list(kinds.values())


def leaf_specs(mesh: Mesh | None, parts: Any) -> list[PartitionSpec]:
    """How each leaf is cut over a mesh; the same for all where there is none."""
    if mesh is None:
        return [PartitionSpec()] * len(jax.tree.leaves(parts))
    # A layer's pages may be a named tuple.
    layers = jax.tree.leaves(parts, is_leaf=lambda part: type(part) not in (tuple, list))
    if any(isinstance(layer, LayerState) for layer in layers):
        raise ValueError("states run on one device")
    specs = [parallel.page_specs(mesh, layer) for layer in layers if layer is not None]
    return jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))


def row_specs(mesh: Mesh | None, parts: Any) -> tuple[PartitionSpec, ...]:
    """How the arrays of `gather_pages` are cut over a mesh: as the leaves that they are stacked from."""
    specs = leaf_specs(mesh, parts)
    return tuple(PartitionSpec(None, None, *specs[numbers[0]][1:]) for numbers in kinds_of(mesh, parts))


def abstract_rows(mesh: Mesh | None, parts: Any) -> list[jax.ShapeDtypeStruct]:
    """Shape and dtype of a single page in the arrays of `gather_pages`; leaves may be abstract."""
    leaves = jax.tree.leaves(parts)
    return [
        jax.ShapeDtypeStruct((len(numbers), *leaves[numbers[0]].shape[1:]), _unsigned(leaves[numbers[0]].dtype))
        for numbers in kinds_of(mesh, parts)
    ]


@partial(jax.jit, static_argnums=0)
def gather_pages(mesh: Mesh | None, parts: Any, ids: jax.Array) -> Rows:
    """Pages `ids` int32 [N] of all layers: their bits as unsigned integers [N, leaves, ...], an array for each kind."""
    kinds = kinds_of(mesh, parts)

    def gather(leaves: list[jax.Array], ids: jax.Array) -> Rows:
        taken = [_bits(leaf.at[ids].get(mode="promise_in_bounds")) for leaf in leaves]
        return tuple(jnp.stack([taken[number] for number in numbers], axis=1) for numbers in kinds)

    if mesh is not None:
        specs = leaf_specs(mesh, parts)
        gather = jax.shard_map(
            gather, mesh=mesh, in_specs=(specs, PartitionSpec()), out_specs=row_specs(mesh, parts), check_vma=False
        )
    return gather(jax.tree.leaves(parts), ids)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def scatter_pages(mesh: Mesh | None, parts: Any, rows: Rows, ids: jax.Array) -> Any:
    """Writes what `gather_pages` read to pages `ids` int32 [N]; one past the last page writes nothing. Donates the
    layers."""
    kinds = kinds_of(mesh, parts)

    def scatter(leaves: list[jax.Array], rows: Rows, ids: jax.Array) -> list[jax.Array]:
        written = list(leaves)
        for numbers, row in zip(kinds, rows, strict=True):
            for place, number in enumerate(numbers):
                leaf = leaves[number]
                values = lax.bitcast_convert_type(row[:, place], leaf.dtype)
                written[number] = leaf.at[ids].set(values, mode="drop")
        return written

    if mesh is not None:
        specs = leaf_specs(mesh, parts)
        inputs = (specs, row_specs(mesh, parts), PartitionSpec())
        scatter = jax.shard_map(scatter, mesh=mesh, in_specs=inputs, out_specs=specs, check_vma=False)
    return jax.tree.unflatten(jax.tree.structure(parts), scatter(jax.tree.leaves(parts), rows, ids))


def _unsigned(dtype: Any) -> jnp.dtype:
    return jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")


def _bits(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, _unsigned(values.dtype))
