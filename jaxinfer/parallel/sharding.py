"""The rules: which mesh axis cuts which logical dimension, for parameters, pages and slots alike.

Rows of a step are whole on every device; heads, the inner width of the MLP and the vocabulary are cut (Shoeybi et al.
2019, Megatron-LM), so a layer sums twice over the devices, and logits stay where they were computed.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxinfer.models import ModelConfig, Params, logical_axes
from jaxinfer.models.experts import stack_specs
from jaxinfer.quantization import QuantizedArray
from jaxinfer.quantization.tree import is_quantized
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
# What of a configuration each logical dimension counts, where it is cut.
_COUNTS = {
    "vocab": "vocab_size",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "ffn": "intermediate_size",
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
    return jax.tree.map(lambda leaf: NamedSharding(mesh, spec(mesh, leaf)), axes, is_leaf=_is_axes)


def parameter_shardings(
    mesh: AnyMesh, config: ModelConfig, params: Params | None = None, *, whole_if_uneven: bool = False
) -> Params:
    """A `NamedSharding` for every parameter, in the structure of `params` where some of them are quantized.

    Args:
      whole_if_uneven: makes whole on every device what does not fall into equal parts, for `fit` to pad, instead of
        raising.

    Raises ValueError as `check_divides`.
    """
    axes = logical_axes(config)
    if whole_if_uneven:
        whole = {name for name, _, _ in _uneven(mesh, config)}
        axes = jax.tree.map(
            lambda leaf: tuple(None if name in whole else name for name in leaf), axes, is_leaf=_is_axes
        )
    else:
        check_divides(mesh, config)
    plain = shardings(mesh, axes)
    return plain if params is None else jax.tree.map(leaf_shardings, params, plain, is_leaf=is_quantized)


def leaves_by_path(tree: Params) -> dict[tuple[str, ...], Any]:
    """The leaves of nested dicts by the keys that lead to them."""
    return {tuple(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def leaf_shardings(leaf: Any, sharding: NamedSharding) -> Any:
    """The shardings of one parameter's arrays, a `QuantizedArray` of them where it is one; `sharding` is the
    parameter's."""
    if not is_quantized(leaf):
        return sharding
    return _quantized_stack(leaf, sharding) if leaf.ndim > 2 else _quantized(leaf, sharding)


def _quantized(array: QuantizedArray, sharding: NamedSharding) -> QuantizedArray:
    """Values are cut as the weight is; scales, zeros and minima with them where parts hold whole blocks, else they are
    whole on every device, as permutations, codebooks and nested scales are."""
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
        return of_blocks(leaf) if path[0].name in ("scales", "zeros", "minima") else everywhere

    return jax.tree_util.tree_map_with_path(sharding_of, array)


def _quantized_stack(array: QuantizedArray, sharding: NamedSharding) -> QuantizedArray:
    """Experts, or heads, are cut as a whole, with all that is theirs."""
    specs = stack_specs(array, sharding.spec[0])
    return jax.tree.map(lambda leaf, cut: NamedSharding(sharding.mesh, cut), array, specs)


def check_divides(mesh: AnyMesh, config: ModelConfig) -> None:
    """Raises ValueError, with both numbers, where the mesh cannot cut the model into equal parts, other than its
    vocabulary, for which no part of a model is made."""
    for name, field, count in _uneven(mesh, config):
        if name != "vocab":
            raise ValueError(
                f"{field}={count} cannot be cut into {axis_size(mesh, name)} equal parts, the size of mesh axis "
                f"{axis_of(mesh, name)!r}"
            )


def _uneven(mesh: AnyMesh, config: ModelConfig) -> list[tuple[str, str, int]]:
    """(logical name, field, count) of what the mesh cannot cut into equal parts."""
    counts = [(name, field, getattr(config, field)) for name, field in _COUNTS.items()]
    if config.mla is not None:
        counts.remove(("kv_heads", "num_kv_heads", config.num_kv_heads))  # of one head, which is whole on every device
    if config.moe is not None:
        counts.append(("expert", "num_experts", config.moe.num_experts))
        if config.moe.shared_size:
            counts.append(("ffn", "shared_size", config.moe.shared_size))
        if len(config.moe.layers) == config.num_layers:
            counts.remove(("ffn", "intermediate_size", config.intermediate_size))
    return [(name, field, count) for name, field, count in counts if count % axis_size(mesh, name)]


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


def _is_axes(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and all(name is None or isinstance(name, str) for name in leaf)
