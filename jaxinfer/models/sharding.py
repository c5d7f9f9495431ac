"""Shardings of a model's parameters: the rules of `jaxinfer.parallel` applied to its logical axes.

Adapts models to meshes that do not divide their sizes: repeats key-value heads, pads other dimensions with zeros.

Outputs do not change: a repeated head has the same keys and values for fewer query heads, and padding adds zero.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Params, abstract_params, logical_axes
from jaxinfer.models.experts import stack_specs
from jaxinfer.parallel import AnyMesh, axis_of, axis_size, is_axes, shardings, shortest
from jaxinfer.quantization import NestedScales, QuantizedArray
from jaxinfer.quantization.adapted import AdaptedExperts, AdaptedHeads, AdapterStack, is_adapted
from jaxinfer.quantization.adapted_tables import AdaptedTable, TableStack, TableStacks
from jaxinfer.quantization.tree import is_quantized, is_weight

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
    if params is None:
        return plain
    return jax.tree.map(leaf_shardings, params, plain, is_leaf=lambda leaf: is_quantized(leaf) or is_adapted(leaf))


def leaf_shardings(leaf: Any, sharding: NamedSharding) -> Any:
    """The shardings of a parameter's arrays: `sharding` itself, or a weight of several arrays with theirs."""
    if is_adapted(leaf):
        stacks, ranks = adapter_shardings(type(leaf), leaf.stack, sharding)
        return replace(leaf, base=leaf_shardings(leaf.base, sharding), stack=stacks, ranks=ranks)
    if not is_quantized(leaf):
        return sharding
    return _quantized_stack(leaf, sharding) if leaf.ndim > 2 else _quantized(leaf, sharding)


def adapter_shardings(kind: type, stack: Any, sharding: NamedSharding) -> tuple[Any, NamedSharding]:
    """The shardings of the adapters of a weight, which are cut where its inputs and outputs are, and of their ranks.

    kind: the type of the leaf. stack: its adapters' arrays, or their shapes. sharding: of the weight.
    """
    mesh, names = sharding.mesh, (*sharding.spec, None, None, None)

    def of(array: Any, *axes: Any) -> NamedSharding | None:
        return None if array is None else NamedSharding(mesh, shortest(PartitionSpec(*axes)))

    def table(parts: TableStack | None, tokens: Any, width: Any, *, is_head: bool) -> TableStack | None:
        if parts is None:
            return None
        first, second = (width, tokens) if is_head else (tokens, None)
        a = of(parts.a, None, None, first) if is_head else of(parts.a, None, first)
        b = of(parts.b, None, None, second if is_head else width)
        columns = of(parts.columns, None, tokens if is_head else width)
        rows = of(parts.tokens), of(parts.rows, None, None, width)
        added = of(parts.added, None, None, width), of(parts.num_added)
        return TableStack(a, b, columns, *rows, of(parts.whole, None, tokens, width), of(parts.is_whole), *added)

    ranks = NamedSharding(mesh, PartitionSpec())
    if kind is AdaptedTable:
        tokens, width = names[1::-1] if stack.embed is None else names[:2]
        tables = table(stack.embed, tokens, width, is_head=False), table(stack.lm_head, tokens, width, is_head=True)
        return TableStacks(*tables), ranks
    if kind is AdaptedHeads:
        pair = of(stack.a, None, None, names[1]), of(stack.b, None, names[0], None, names[2])
        return AdapterStack(*pair, of(stack.columns, None, names[0], names[2])), ranks
    if kind is AdaptedExperts:
        pair = of(stack.a, None, names[0], None, names[1]), of(stack.b, None, names[0], None, names[2])
        return AdapterStack(*pair, of(stack.columns, None, names[0], names[2])), ranks
    pair = of(stack.a, None, None, names[0]), of(stack.b, None, None, names[1])
    return AdapterStack(*pair, of(stack.columns, None, names[1]), of(stack.offset, None, names[1])), ranks


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
        for name, length, block in zip_longest(sharding.spec, array.shape, array.scheme.block):
            is_sharded = name is not None and length % (mesh.shape[name] * block) == 0
            names.append(name if is_sharded else None)
        return NamedSharding(mesh, shortest(PartitionSpec(*names)))

    def sharding_of(path: Any, leaf: jax.Array) -> NamedSharding:
        if path[0].name == "values":
            return sharding
        return of_blocks(leaf) if path[0].name in ("scales", "zeros", "minima") else replicated

    return jax.tree_util.tree_map_with_path(sharding_of, array)


def _quantized_stack(array: QuantizedArray, sharding: NamedSharding) -> QuantizedArray:
    """Stacks are sharded along the axis of experts, or heads."""
    specs = stack_specs(array, next(iter(sharding.spec), None))
    return jax.tree.map(lambda leaf, spec: NamedSharding(sharding.mesh, spec), array, specs)


def _uneven(mesh: AnyMesh, config: ModelConfig) -> list[tuple[str, str, int]]:
    """(logical name, field, count) of the dimensions that the mesh does not divide."""
    counts = [(name, field, getattr(config, field)) for name, field in _COUNTS.items()]
    if config.mla is not None:
        counts.remove(("kv_heads", "num_kv_heads", config.num_kv_heads))  # one head, replicated
    if config.num_global_kv_heads is not None:
        counts.append(("kv_heads", "num_global_kv_heads", config.num_global_kv_heads))
    if config.moe is not None:
        counts.append(("expert", "num_experts", config.moe.num_experts))
        if config.moe.shared_size:
            counts.append(("ffn", "shared_size", config.moe.shared_size))
        if len(config.moe.layers) == config.num_layers and not config.moe.is_beside_mlp:
            counts.remove(("ffn", "intermediate_size", config.intermediate_size))
    return [(name, field, count) for name, field, count in counts if count % axis_size(mesh, name)]


PAD = -1  # in an index: padding with zero


@dataclass(frozen=True)
class MeshFit:
    """The sizes and parameters of a model on a mesh.

    Attributes:
      mesh: the mesh; may be abstract if no parameters are placed.
      original: the model's configuration. config: its configuration on the mesh, with the original vocabulary size, of
        which only the parameters are padded.
      heads, kv_heads: index of the original head, or PAD, for each head on the mesh; None for no change.
    """

    mesh: AnyMesh
    original: ModelConfig
    config: ModelConfig
    heads: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None

    @cached_property
    def axes(self) -> Params:
        return logical_axes(self.config)

    @cached_property
    def changes(self) -> dict[str, str]:
        """Text that describes each changed size, by field."""
        changes = {}
        for field in ("num_kv_heads", "num_heads", "intermediate_size"):
            before, after = getattr(self.original, field), getattr(self.config, field)
            if before != after:
                changes[field] = f"{before} become {after}"
        moe, own = self.config.moe, self.original.moe
        if moe is not None and own is not None and moe.shared_size != own.shared_size:
            changes["shared_size"] = f"{own.shared_size} become {moe.shared_size}"
        vocabulary = _rounded(self.config.vocab_size, axis_size(self.mesh, "vocab"))
        if vocabulary != self.config.vocab_size:
            changes["vocab_size"] = f"{self.config.vocab_size} become {vocabulary}"
        return changes

    def index(self, name: str | None, length: int) -> np.ndarray | None:
        """The original index, or PAD, of each entry along a dimension of this logical name and length; None for no
        change."""
        if name in ("heads", "kv_heads"):
            chosen, count = (
                (self.heads, self.original.num_heads)
                if name == "heads"
                else (self.kv_heads, self.original.num_kv_heads)
            )
            if chosen is None:
                return None
            unit = length // count
            starts = np.asarray(chosen)[:, None]
            return np.where(starts == PAD, PAD, starts * unit + np.arange(unit)).reshape(-1)
        if name not in ("vocab", "ffn"):
            return None
        padded = _rounded(length, axis_size(self.mesh, name))
        return None if padded == length else np.concatenate([np.arange(length), np.full(padded - length, PAD)])

    def shape(self, axes: Sequence[str | None], shape: Sequence[int]) -> tuple[int, ...]:
        """The shape on the mesh of an array with these logical axes."""
        indices = [self.index(name, length) for name, length in zip(axes, shape, strict=True)]
        return tuple(length if index is None else len(index) for index, length in zip(indices, shape, strict=True))

    def part_shape(self, path: tuple[str, ...], shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a device's shard of a parameter with this original shape."""
        return self._shardings[path].shard_shape(self.shape(_at(self.axes, path), shape))

    def places(self, path: tuple[str, ...], shape: Sequence[int]) -> tuple[np.ndarray | None, ...]:
        """For each dimension of a parameter with this shape, the indices of the original entries (the first of repeated
        ones); None if unchanged, as in all dimensions of a parameter that is not resized yet."""
        axes, indices = _at(self.axes, path), []
        for name, length, own in zip(axes, shape, self._own_shapes[path], strict=True):
            index = self.index(name, own)
            if index is None or length != len(index):
                indices.append(None)
                continue
            entries, first = np.unique(index, return_index=True)
            indices.append(first[entries != PAD])
        return tuple(indices)

    def own_config(self, config: ModelConfig) -> ModelConfig:
        """The configuration on the mesh, or one derived from it, with the original sizes."""
        names = ("num_heads", "num_kv_heads", "intermediate_size", "moe")
        return replace(config, **{name: getattr(self.original, name) for name in names})

    def own_kv_scales(self, scales: Any) -> np.ndarray:
        """Inverse of `kv_scales`: scales [layers, heads] of the original key-value heads."""
        scales = np.asarray(scales)
        if self.kv_heads is None:
            return scales
        return scales[:, [self.kv_heads.index(head) for head in range(self.original.num_kv_heads)]]

    def kv_scales(self, scales: Any) -> np.ndarray:
        """Scales [layers, heads] of the key-value heads on the mesh, from those of the original ones; 1 for padding."""
        scales = np.asarray(scales)
        if self.kv_heads is None:
            return scales
        heads = np.asarray(self.kv_heads)
        return np.where(heads == PAD, np.float32(1), scales[:, np.maximum(heads, 0)])

    def resize(self, params: Params) -> Params:
        """The parameters with their shapes on the mesh, not moved between devices. Raises as `place`."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self.resized(tuple(key.key for key in path), leaf), params, is_leaf=is_weight
        )

    def place(self, params: Params) -> Params:
        """The parameters, resized and placed on the mesh by the sharding rules. Those already there are not copied.

        Raises ValueError, naming the parameter, for a quantized one whose blocks cannot be padded.
        """
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self.place_leaf(tuple(key.key for key in path), leaf), params, is_leaf=is_weight
        )

    def place_leaf(self, path: tuple[str, ...], leaf: Any) -> Any:
        """`place` for one parameter, given its path."""
        sharding = self._shardings[path]
        shape = jax.eval_shape(partial(self.resized, path), leaf)
        if shape.shape == leaf.shape:
            return jax.device_put(leaf, leaf_shardings(leaf, sharding))
        return jax.jit(partial(self.resized, path), out_shardings=leaf_shardings(shape, sharding))(leaf)

    def resized(self, path: tuple[str, ...], leaf: Any) -> Any:
        """`resize` for one parameter, given its path."""
        if is_weight(leaf) and not is_quantized(leaf):
            raise ValueError(f"{'.'.join(path)}: a {type(leaf).__name__} runs on one device, without a mesh")
        axes = _at(self.axes, path)
        indices = [self.index(name, length) for name, length in zip(axes, leaf.shape, strict=True)]
        if all(index is None for index in indices):
            return leaf
        try:
            return _resize_quantized(leaf, indices) if is_quantized(leaf) else _resize_array(leaf, indices)
        except ValueError as error:
            raise ValueError(
                f"{'.'.join(path)}: {error}; choose a mesh axis 'model' that divides "
                f"num_heads={self.original.num_heads} and num_kv_heads={self.original.num_kv_heads}"
            ) from None

    @cached_property
    def _own_shapes(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        return {path: leaf.shape for path, leaf in leaves_by_path(abstract_params(self.original)).items()}

    @cached_property
    def _shardings(self) -> dict[tuple[str, ...], Any]:
        return leaves_by_path(parameter_shardings(self.mesh, self.config))


def fit_to_mesh(mesh: AnyMesh, config: ModelConfig) -> MeshFit:
    """Adapts a model to a mesh.

    Key-value heads, if fewer than the devices, are repeated, each for a share of its query heads; numbers of heads,
    inner widths and vocabularies that the mesh does not divide are padded.

    Raises ValueError, with the numbers, if that would change the outputs: experts, which cannot be padded, and norms
    over all heads, which padded heads would change.
    """
    moe = config.moe
    if moe is not None and moe.num_experts % (parts := axis_size(mesh, "expert")):
        raise ValueError(
            f"num_experts={moe.num_experts} cannot be cut into {parts} equal parts, the size of the mesh axis that "
            f"experts lie on"
        )
    _check_layers_apart(mesh, config)
    changed: dict[str, Any] = {"intermediate_size": _rounded(config.intermediate_size, axis_size(mesh, "ffn"))}
    if moe is not None and moe.shared_size:
        changed["moe"] = replace(moe, shared_size=_rounded(moe.shared_size, axis_size(mesh, "ffn")))
    heads = kv_heads = None
    parts = axis_size(mesh, "heads")
    if config.mla is not None:
        count = _rounded(config.num_heads, parts)
        if count != config.num_heads:
            heads = (*range(config.num_heads), *(PAD,) * (count - config.num_heads))
            changed["num_heads"] = count
    elif config.num_kv_heads % parts:
        heads, kv_heads = _grouped_heads(config.num_heads, config.num_kv_heads, parts)
        if heads == tuple(range(config.num_heads)):
            heads = None
        changed |= {"num_heads": len(heads or range(config.num_heads)), "num_kv_heads": len(kv_heads)}
    if config.qk_norm and config.qk_norm_span == "all_heads" and PAD in (*(heads or ()), *(kv_heads or ())):
        raise ValueError(
            f"num_heads={config.num_heads} and num_kv_heads={config.num_kv_heads} cannot be cut into {parts} equal "
            f"parts, and {config.architecture} has norms over all heads, which heads added for it would change"
        )
    return MeshFit(mesh, config, replace(config, **changed), heads, kv_heads)


def _check_layers_apart(mesh: AnyMesh, config: ModelConfig) -> None:
    """Sizes that differ by layer are neither padded nor repeated."""
    sizes = {"kv_heads": {"num_kv_heads": config.num_kv_heads, "num_global_kv_heads": config.num_global_kv_heads}}
    sizes = {} if config.num_global_kv_heads is None else sizes
    if config.has_double_mlp:
        sizes["ffn"] = {"intermediate_size": config.intermediate_size}
    for axis, fields in sizes.items():
        parts = axis_size(mesh, axis)
        for field, size in fields.items():
            if size is not None and size % parts:
                raise ValueError(
                    f"{field}={size} cannot be cut into {parts} equal parts, and {config.architecture} has layers of "
                    "different sizes, which are not padded"
                )


def _grouped_heads(num_heads: int, num_kv_heads: int, parts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query and key-value heads on the mesh: an equal share for each of `parts` devices, each key-value head with its
    own query heads. Heads are repeated or padded, whichever gives fewer query heads, then fewer key-value heads."""
    group = num_heads // num_kv_heads
    times = math.lcm(num_kv_heads, parts) // num_kv_heads
    padded_group = _rounded(group, times)
    queries = [[*range(kv * group, (kv + 1) * group)] for kv in range(num_kv_heads)]
    repeated = (
        tuple(head for heads in queries for head in (*heads, *(PAD,) * (padded_group - group))),
        tuple(kv for kv in range(num_kv_heads) for _ in range(times)),
    )
    extra = _rounded(num_kv_heads, parts) - num_kv_heads
    padded = (
        (*range(num_heads), *(PAD,) * (extra * group)),
        (*range(num_kv_heads), *(PAD,) * extra),
    )
    return min(repeated, padded, key=lambda pair: (len(pair[0]), len(pair[1])))


def _resize_array(array: jax.Array, indices: Sequence[np.ndarray | None]) -> jax.Array:
    for axis, index in enumerate(indices):
        if index is not None:
            array = _take(array, index, axis)
    return array


def _take(array: jax.Array, index: np.ndarray, axis: int) -> jax.Array:
    taken = jnp.take(array, np.where(index == PAD, 0, index), axis=axis)
    if not (index == PAD).any():
        return taken
    is_real = (index != PAD).reshape([-1 if number == axis else 1 for number in range(taken.ndim)])
    return jnp.where(is_real, taken, jnp.zeros((), taken.dtype))


def _resize_quantized(array: QuantizedArray, indices: Sequence[np.ndarray | None]) -> QuantizedArray:
    """Raises ValueError for stacks, and for inputs that are not just padded at the end."""
    *stacks, inputs, outputs = indices
    if any(index is not None for index in stacks):
        raise ValueError("a stack of quantized matrices cannot be repeated or padded")
    if isinstance(array.scales, NestedScales):
        array = replace(array, scales=array.scales.dequantize())
    if outputs is not None:
        array = _with_outputs(array, outputs)
    return array if inputs is None else _with_inputs(array, inputs)


def _block_arrays(array: QuantizedArray) -> Mapping[str, jax.Array]:
    """The arrays with one entry per block: scales, zeros and minima."""
    arrays = {name: getattr(array, name) for name in ("scales", "zeros", "minima")}
    return {name: part for name, part in arrays.items() if part is not None}


def _with_outputs(array: QuantizedArray, index: np.ndarray) -> QuantizedArray:
    """Repeats or pads outputs. Padding has a scale of zero."""
    rows, columns = array.scheme.block
    numbers = _block_arrays(array)
    if columns > 1:
        block_of = np.arange(array.shape[-1]) // columns
        numbers = {name: jnp.take(part, block_of, axis=-1) for name, part in numbers.items()}
    numbers = {name: _take(part, index, part.ndim - 1) for name, part in numbers.items()}
    values = _take(array.values, index, array.ndim - 1)
    return replace(array, values=values, scheme=replace(array.scheme, block=(rows, 1)), **numbers)


def _with_inputs(array: QuantizedArray, index: np.ndarray) -> QuantizedArray:
    """Pads inputs at the end, where activations are zero."""
    length, (rows, columns) = array.shape[-2], array.scheme.block
    if not np.array_equal(index[:length], np.arange(length)):
        raise ValueError("quantized inputs lie in blocks, between which nothing can be put")
    extra = len(index) - length
    rows = len(index) if rows >= length else rows  # a single block is extended
    blocks = -(-len(index) // rows)

    def padded(part: jax.Array, count: int) -> jax.Array:
        return jnp.pad(part, [(0, 0)] * (part.ndim - 2) + [(0, count), (0, 0)])

    numbers = {name: padded(part, blocks - part.shape[-2]) for name, part in _block_arrays(array).items()}
    permutation = array.permutation
    if permutation is not None:
        last = jnp.arange(length, length + extra, dtype=permutation.dtype)
        last = jnp.broadcast_to(last, (*permutation.shape[:-1], extra))
        permutation = jnp.concatenate([permutation, last], axis=-1)
    scheme = replace(array.scheme, block=(rows, columns))
    return replace(array, values=padded(array.values, extra), permutation=permutation, scheme=scheme, **numbers)


def _at(tree: Any, path: Sequence[str]) -> Any:
    return _at(tree[path[0]], path[1:]) if path else tree


def _rounded(size: int, parts: int) -> int:
    return -(-size // parts) * parts
