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

# What of a configuration each logical dimension counts, where it is cut.
_COUNTS = {
    "vocab": "vocab_size",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "ffn": "intermediate_size",
}


def parameter_shardings(
    mesh: AnyMesh, config: ModelConfig, params: Params | None = None, *, whole_if_uneven: bool = False
) -> Params:
    """A `NamedSharding` for every parameter, in the structure of `params` where some of them are quantized.

    Args:
      whole_if_uneven: replicates what does not divide into equal parts, for `fit_to_mesh` to pad, instead of raising.

    Raises ValueError as `check_divides`.
    """
    axes = logical_axes(config)
    if whole_if_uneven:
        whole = {name for name, _, _ in _uneven(mesh, config)}
        axes = jax.tree.map(lambda leaf: tuple(None if name in whole else name for name in leaf), axes, is_leaf=is_axes)
    else:
        check_divides(mesh, config)
    plain = shardings(mesh, axes)
    return plain if params is None else jax.tree.map(leaf_shardings, params, plain, is_leaf=is_quantized)


def leaf_shardings(leaf: Any, sharding: NamedSharding) -> Any:
    """The shardings of one parameter's arrays, a `QuantizedArray` of them where it is one; `sharding` is the
    parameter's."""
    if not is_quantized(leaf):
        return sharding
    return _quantized_stack(leaf, sharding) if leaf.ndim > 2 else _quantized(leaf, sharding)


def check_divides(mesh: AnyMesh, config: ModelConfig) -> None:
    """Raises ValueError, with both numbers, where the mesh cannot cut the model into equal parts, other than its
    vocabulary, for which no part of a model is made."""
    for name, field, count in _uneven(mesh, config):
        if name != "vocab":
            raise ValueError(
                f"{field}={count} cannot be cut into {axis_size(mesh, name)} equal parts, the size of mesh axis "
                f"{axis_of(mesh, name)!r}"
            )


def leaves_by_path(tree: Params) -> dict[tuple[str, ...], Any]:
    """The leaves of nested dicts by the keys that lead to them."""
    return {tuple(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


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
