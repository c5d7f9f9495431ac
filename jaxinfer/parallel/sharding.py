"""The sharding rules: which mesh axis shards which logical dimension, for parameters, pages and slots.

Heads, the inner width of the MLP and the vocabulary are sharded by axis "model", rows of a step are not (Shoeybi et al.
2019, Megatron-LM): a layer has two all-reduces, and logits stay sharded. Axis "sequence" shards the rows of prompts and
the tokens of pages; parameters are replicated along it.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.paged_attention import InterleavedPages, Pages

MODEL = "model"
EXPERT = "expert"
DATA = "data"
SEQUENCE = "sequence"
# Mesh axes that may shard each logical dimension; the first one that the mesh has is used; without one: replicated.
RULES = {
    "tokens": (SEQUENCE,),  # rows of a step of prompts, and the tokens of a page
    "vocab": (MODEL,),
    "positions": (),
    "hidden": (),
    "heads": (MODEL,),
    "kv_heads": (MODEL,),
    "ffn": (MODEL,),
    "head_dim": (),
    "latent": (),
    "expert": (EXPERT, MODEL),
    "expert_ffn": (),
    "state": (),  # recurrent layers: a convolution spans queries, keys and values of all heads
}

Axes = tuple[str | None, ...]  # logical name of each dimension of an array, None for one that is never sharded
AnyMesh = Mesh | AbstractMesh


def axis_of(mesh: AnyMesh, name: str) -> str | None:
    """The mesh axis that shards a logical dimension, or None."""
    return next((axis for axis in RULES[name] if axis in mesh.shape), None)


def axis_size(mesh: AnyMesh, name: str) -> int:
    """The number of shards of a logical dimension."""
    axis = axis_of(mesh, name)
    return 1 if axis is None else mesh.shape[axis]


def spec(mesh: AnyMesh, axes: Axes) -> PartitionSpec:
    """The `PartitionSpec` of an array with these logical dimensions."""
    return PartitionSpec(*(None if name is None else axis_of(mesh, name) for name in axes))


def spec_of_shape(mesh: AnyMesh, axes: Axes, shape: Sequence[int]) -> PartitionSpec:
    """As `spec`, in the form that programs return, but a dimension whose size its mesh axis does not divide is
    replicated."""
    return shortest(
        PartitionSpec(
            *(
                None if name is None or size % axis_size(mesh, name) else axis_of(mesh, name)
                for name, size in zip(axes, shape, strict=True)
            )
        )
    )


def array_shardings(mesh: AnyMesh, arrays: Any, axes: Any) -> Any:
    """`NamedSharding`s, by `spec_of_shape`, of the arrays of a pytree; `axes` is a pytree of their `Axes`."""
    return jax.tree.map(lambda leaf, names: NamedSharding(mesh, spec_of_shape(mesh, names, leaf.shape)), arrays, axes)


def shortest(spec: PartitionSpec) -> PartitionSpec:
    """The spec without trailing None, as programs return it. JAX treats P(None) and P() as different, and traces a
    program for each."""
    names = list(spec)
    while names and names[-1] is None:
        names.pop()
    return PartitionSpec(*names)


def shardings(mesh: AnyMesh, axes: Any) -> Any:
    """`NamedSharding`s of a pytree whose leaves are `Axes`, in the form that programs return: JAX gives a result the
    form of an argument with an equal sharding."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, shortest(spec(mesh, leaf))), axes, is_leaf=is_axes)


def page_specs(mesh: AnyMesh, pages: Pages) -> Pages:
    """`PartitionSpec`s of one layer's pages: sharded by key heads, dimension 2 of keys and values and 1 of scales, and
    by the tokens of a page, dimension 1 of keys and values and 2 of scales. Pages without values (latent attention)
    have one head."""
    heads = "kv_heads" if isinstance(pages, InterleavedPages) or pages.v is not None else None
    return jax.tree.map(
        lambda leaf: (
            spec(mesh, (None, "tokens", heads, *(None,) * (leaf.ndim - 3)))
            if leaf.ndim > 3
            else spec(mesh, (None, heads, "tokens"))
        ),
        pages,
    )


def local_shapes(mesh: AnyMesh, arrays: Any, specs: Any) -> Any:
    """Shapes of the shards of one device, as `jax.ShapeDtypeStruct`s, for each array of a pytree."""

    def local(array, spec):
        return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(array.shape), array.dtype)

    return jax.tree.map(local, arrays, specs)


def is_axes(leaf: Any) -> bool:
    """True if a leaf of a pytree is the `Axes` of an array."""
    return isinstance(leaf, tuple) and all(name is None or isinstance(name, str) for name in leaf)
