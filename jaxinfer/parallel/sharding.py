"""The rules: which mesh axis cuts which logical dimension, for parameters, pages and slots alike.

Rows of a step are whole on every device; heads, the inner width of the MLP and the vocabulary are cut (Shoeybi et al.
2019, Megatron-LM), so a layer sums twice over the devices, and logits stay where they were computed.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.paged_attention import InterleavedPages, Pages

MODEL = "model"
EXPERT = "expert"
DATA = "data"
# Logical dimension: the mesh axes that may cut it, of which the first that a mesh has does; none for a dimension that
# is whole on every device.
RULES = {
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
}

Axes = tuple[str | None, ...]  # the logical name of each dimension of an array, None for one that is never cut
AnyMesh = Mesh | AbstractMesh


def axis_of(mesh: AnyMesh, name: str) -> str | None:
    """The mesh axis that cuts a logical dimension; None where no axis does."""
    return next((axis for axis in RULES[name] if axis in mesh.shape), None)


def axis_size(mesh: AnyMesh, name: str) -> int:
    """The number of equal parts that a logical dimension is cut into."""
    axis = axis_of(mesh, name)
    return 1 if axis is None else mesh.shape[axis]


def spec(mesh: AnyMesh, axes: Axes) -> PartitionSpec:
    """How an array of these dimensions is cut. An axis that the mesh does not have cuts nothing."""
    return PartitionSpec(*(None if name is None else axis_of(mesh, name) for name in axes))


def spec_of_shape(mesh: AnyMesh, axes: Axes, shape: Sequence[int]) -> PartitionSpec:
    """As `spec`, but a dimension that does not fall into equal parts is whole on every device, and in the form in which
    programs return it."""
    return shortest(
        PartitionSpec(
            *(
                None if name is None or size % axis_size(mesh, name) else axis_of(mesh, name)
                for name, size in zip(axes, shape, strict=True)
            )
        )
    )


def array_shardings(mesh: AnyMesh, arrays: Any, axes: Any) -> Any:
    """A `NamedSharding`, as `spec_of_shape` says, for every array of a pytree; `axes` has their `Axes`."""
    return jax.tree.map(lambda leaf, names: NamedSharding(mesh, spec_of_shape(mesh, names, leaf.shape)), arrays, axes)


def shortest(cut: PartitionSpec) -> PartitionSpec:
    """The same without what it says of last dimensions that are whole: as programs return it. JAX takes P(None) and P()
    for different, and traces a program for each."""
    names = list(cut)
    while names and names[-1] is None:
        names.pop()
    return PartitionSpec(*names)


def shardings(mesh: AnyMesh, axes: Any) -> Any:
    """`NamedSharding`s of a pytree whose leaves are `Axes`."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, spec(mesh, leaf)), axes, is_leaf=is_axes)


def page_specs(mesh: AnyMesh, pages: Pages) -> Pages:
    """How one layer's pages are cut: by key heads, which are dimension 2 of keys and values and 1 of scales. Keys that
    hold the values are of one head, and whole on every device."""
    if not isinstance(pages, InterleavedPages) and pages.v is None:
        return jax.tree.map(lambda leaf: PartitionSpec(*(None,) * leaf.ndim), pages)
    return jax.tree.map(
        lambda leaf: (
            spec(mesh, (None, None, "kv_heads", *(None,) * (leaf.ndim - 3)))
            if leaf.ndim > 3
            else spec(mesh, (None, "kv_heads", None))
        ),
        pages,
    )


def local_shapes(mesh: AnyMesh, arrays: Any, specs: Any) -> Any:
    """What one device holds of each array of a pytree, as `jax.ShapeDtypeStruct`s."""

    def local(array, spec):
        return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(array.shape), array.dtype)

    return jax.tree.map(local, arrays, specs)


def is_axes(leaf: Any) -> bool:
    """Whether a leaf of a pytree is the `Axes` of an array."""
    return isinstance(leaf, tuple) and all(name is None or isinstance(name, str) for name in leaf)
