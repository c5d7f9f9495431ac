"""Shardings of a model's parameters: the rules of `jaxinfer.parallel` applied to its logical axes."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Params, logical_axes
from jaxinfer.models.experts import stack_specs
from jaxinfer.parallel import AnyMesh, axis_of, axis_size, is_axes, shardings
from jaxinfer.quantization import QuantizedArray
from jaxinfer.quantization.tree import is_quantized

# Field of the configuration that counts each sharded logical dimension.
_COUNTS = {
    "vocab": "vocab_size",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "ffn": "intermediate_size",
}


def parameter_shardings(
    mesh: AnyMesh, config: ModelConfig, params: Params | None = None, *, whole_if_uneven: bool = False
) -> Params:
    """A `NamedSharding` for every parameter; in the structure of `params`, which may be quantized, if given.

    Args:
      whole_if_uneven: replicates what does not divide into equal parts, for `fit_to_mesh` to pad, instead of raising.

    Raises ValueError as `check_divides`.
    """
    axes = logical_axes(config)
    if whole_if_uneven:
        uneven = {name for name, _, _ in _uneven(mesh, config)}
        axes = jax.tree.map(
            lambda leaf: tuple(None if name in uneven else name for name in leaf), axes, is_leaf=is_axes
        )
    else:
        check_divides(mesh, config)
    plain = shardings(mesh, axes)
    return plain if params is None else jax.tree.map(leaf_shardings, params, plain, is_leaf=is_quantized)


def leaf_shardings(leaf: Any, sharding: NamedSharding) -> Any:
    """The shardings of a parameter's arrays: `sharding` itself, or a `QuantizedArray` of shardings."""
    if not is_quantized(leaf):
        return sharding
    return _quantized_stack(leaf, sharding) if leaf.ndim > 2 else _quantized(leaf, sharding)


def check_divides(mesh: AnyMesh, config: ModelConfig) -> None:
    """Raises ValueError, with both numbers, if a dimension other than the vocabulary cannot be sharded equally."""
    for name, field, count in _uneven(mesh, config):
        if name != "vocab":
            raise ValueError(
                f"{field}={count} cannot be cut into {axis_size(mesh, name)} equal parts, the size of mesh axis "
                f"{axis_of(mesh, name)!r}"
            )


def leaves_by_path(tree: Params) -> dict[tuple[str, ...], Any]:
    """The leaves of nested dicts by their paths."""
    return {tuple(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _quantized(array: QuantizedArray, sharding: NamedSharding) -> QuantizedArray:
    """Values are sharded as the weight; scales, zeros and minima as well if shards hold complete blocks. Everything
    else (permutations, codebooks, nested scales) is replicated."""
    mesh = sharding.mesh
    replicated = NamedSharding(mesh, PartitionSpec())

    def of_blocks(leaf: jax.Array) -> NamedSharding:
        if leaf.shape != array.scales.shape:  # a part of nested scales
            return replicated
        names = []
        for name, length, block in zip(sharding.spec, array.shape, array.scheme.block, strict=True):
            is_sharded = name is not None and length % (mesh.shape[name] * block) == 0
            names.append(name if is_sharded else None)
        return NamedSharding(mesh, PartitionSpec(*names))

    def sharding_of(path: Any, leaf: jax.Array) -> NamedSharding:
        if path[0].name == "values":
            return sharding
        return of_blocks(leaf) if path[0].name in ("scales", "zeros", "minima") else replicated

    return jax.tree_util.tree_map_with_path(sharding_of, array)


def _quantized_stack(array: QuantizedArray, sharding: NamedSharding) -> QuantizedArray:
    """Stacks are sharded along the axis of experts, or heads."""
    specs = stack_specs(array, sharding.spec[0])
    return jax.tree.map(lambda leaf, spec: NamedSharding(sharding.mesh, spec), array, specs)


def _uneven(mesh: AnyMesh, config: ModelConfig) -> list[tuple[str, str, int]]:
    """(logical name, field, count) of the dimensions that the mesh does not divide."""
    counts = [(name, field, getattr(config, field)) for name, field in _COUNTS.items()]
    if config.mla is not None:
        counts.remove(("kv_heads", "num_kv_heads", config.num_kv_heads))  # one head, replicated
    if config.moe is not None:
        counts.append(("expert", "num_experts", config.moe.num_experts))
        if config.moe.shared_size:
            counts.append(("ffn", "shared_size", config.moe.shared_size))
        if len(config.moe.layers) == config.num_layers:
            counts.remove(("ffn", "intermediate_size", config.intermediate_size))
    return [(name, field, count) for name, field, count in counts if count % axis_size(mesh, name)]
