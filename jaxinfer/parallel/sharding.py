"""The rules: which mesh axis cuts which logical dimension, for parameters, pages and slots alike.

Rows of a step are whole on every device; heads, the inner width of the MLP and the vocabulary are cut (Shoeybi et al.
2019, Megatron-LM), so a layer sums twice over the devices, and logits stay where they were computed.
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.models import ModelConfig, Params, logical_axes
from jaxinfer.quantization import QuantizedArray
from jaxinfer.quantization.tree import is_quantized
from pallas_kernels.paged_attention import Pages

MODEL = "model"
# Logical dimension: mesh axis, or None for a dimension that is whole on every device.
RULES = {"vocab": MODEL, "hidden": None, "heads": MODEL, "kv_heads": MODEL, "ffn": MODEL, "head_dim": None}
# What of a configuration each logical dimension counts, where it is cut.
_COUNTS = {
    "vocab": "vocab_size",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "ffn": "intermediate_size",
}

Axes = tuple[str | None, ...]  # the logical name of each dimension of an array, None for one that is never cut


def spec(mesh: Mesh, axes: Axes) -> PartitionSpec:
    """How an array of these dimensions is cut. An axis that the mesh does not have cuts nothing."""
    names = (None if name is None else RULES[name] for name in axes)
    return PartitionSpec(*(name if name in mesh.shape else None for name in names))


def shardings(mesh: Mesh, axes: Any) -> Any:
    """`NamedSharding`s of a pytree whose leaves are `Axes`."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, spec(mesh, leaf)), axes, is_leaf=_is_axes)


def parameter_shardings(mesh: Mesh, config: ModelConfig, params: Params | None = None) -> Params:
    """A `NamedSharding` for every parameter, in the structure of `params` where some of them are quantized.

    Raises ValueError as `check_divides`.
    """
    check_divides(mesh, config)
    plain = shardings(mesh, logical_axes(config))
    if params is None:
        return plain

    def of_leaf(leaf: Any, sharding: NamedSharding) -> Any:
        return _quantized(leaf, sharding) if is_quantized(leaf) else sharding

    return jax.tree.map(of_leaf, params, plain, is_leaf=is_quantized)


def _quantized(array: QuantizedArray, sharding: NamedSharding) -> QuantizedArray:
    """Values are cut as the weight is; scales and zeros with them where parts hold whole blocks, else they are whole on
    every device, as permutations, codebooks and nested scales are."""
    mesh, cut = sharding.mesh, sharding.spec
    everywhere = NamedSharding(mesh, PartitionSpec())

    def of_blocks(leaf: jax.Array) -> NamedSharding:
        if leaf.shape != array.scales.shape:  # a part of nested scales
            return everywhere
        names = []
        for name, length, block in zip(cut, array.shape, array.scheme.block, strict=True):
            is_cut = name is not None and length % (mesh.shape[name] * block) == 0
            names.append(name if is_cut else None)
        return NamedSharding(mesh, PartitionSpec(*names))

    def sharding_of(path: Any, leaf: jax.Array) -> NamedSharding:
        if path[0].name == "values":
            return sharding
        return of_blocks(leaf) if path[0].name in ("scales", "zeros") else everywhere

    return jax.tree_util.tree_map_with_path(sharding_of, array)


def check_divides(mesh: Mesh, config: ModelConfig) -> None:
    """Raises ValueError, with both numbers, where the mesh cannot cut the model into equal parts."""
    for name, field in _COUNTS.items():
        axis = RULES[name]
        count, parts = getattr(config, field), mesh.shape.get(axis, 1)
        if count % parts:
            raise ValueError(f"{field}={count} cannot be cut into {parts} equal parts, the size of mesh axis {axis!r}")


def page_specs(mesh: Mesh, pages: Pages) -> Pages:
    """How one layer's pages are cut: by key heads, which are dimension 2 of keys and values and 1 of scales."""
    return jax.tree.map(
        lambda leaf: (
            spec(mesh, (None, None, "kv_heads", *(None,) * (leaf.ndim - 3)))
            if leaf.ndim > 3
            else spec(mesh, (None, "kv_heads", None))
        ),
        pages,
    )


def local_shapes(mesh: Mesh, arrays: Any, specs: Any) -> Any:
    """What one device holds of each array of a pytree, as `jax.ShapeDtypeStruct`s."""

    def local(array, spec):
        return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(array.shape), array.dtype)

    return jax.tree.map(local, arrays, specs)


def _is_axes(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and all(name is None or isinstance(name, str) for name in leaf)
