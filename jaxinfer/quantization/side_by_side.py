"""Weights of one input side by side in one array, as a GPU multiplies them: one product instead of two or three.

At one row XLA:GPU multiplies a weight of few columns (keys, values) by way of a temporary of its size. On a mesh the
parts of a shard lie side by side, so that no device needs another's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jaxinfer.quantization.array import NestedScales, QuantizedArray, Scheme
from jaxinfer.quantization.matmul import KINDS, WeightKind, matmul

# Linear layers of a module that read the same input, in the order of the calls of `models.basic.project`.
GROUPS = (
    ("q_proj", "k_proj", "v_proj", "gate_proj", "decay_proj", "beta_proj"),
    ("gate_proj", "up_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "k_proj"),
    ("q_a_proj", "kv_a_proj"),
    ("q_proj", "kv_a_proj"),
)
WEIGHT = "weight"


@partial(jax.tree_util.register_dataclass, data_fields=["whole"], meta_fields=["sizes", "num_shards"])
@dataclass(frozen=True)
class SideBySide:
    """The first weight of a group, which holds all of them. A pytree.

    Attributes:
      whole: an array or a `QuantizedArray` [K, sum(sizes)]. sizes: the outputs of each weight.
      num_shards: into how many parts the outputs are cut: each holds its part of every weight, in their order.
    """

    whole: Any
    sizes: tuple[int, ...]
    num_shards: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.whole.shape[0], self.sizes[0]

    @property
    def ndim(self) -> int:
        return 2

    @property
    def scheme(self) -> Scheme | None:
        return getattr(self.whole, "scheme", None)

    def split(self, outputs: jax.Array) -> list[jax.Array]:
        """Outputs [..., N] of each weight, of those of all [..., sum(sizes)]."""
        *lead, width = outputs.shape
        if self.num_shards == 1:
            return jnp.split(outputs, [*accumulate(self.sizes[:-1])], axis=-1)
        by_shard = outputs.reshape(*lead, self.num_shards, width // self.num_shards)
        ends = [*accumulate(size // self.num_shards for size in self.sizes[:-1])]
        return [part.reshape(*lead, -1) for part in jnp.split(by_shard, ends, axis=-1)]

    def part(self, number: int) -> Any:
        """The weight of that number in the group, as it was."""
        begin, total = sum(self.sizes[:number]), sum(self.sizes)

        def cut(array: Any) -> Any:
            # Scales are fewer than outputs where several outputs share one.
            first, size = (count * array.shape[1] // total for count in (begin, self.sizes[number]))
            shape = (array.shape[0], size)
            if isinstance(array, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(shape, array.dtype, sharding=array.sharding)
            by_shard = array.reshape(array.shape[0], self.num_shards, -1)
            first, size = first // self.num_shards, size // self.num_shards
            return by_shard[..., first : first + size].reshape(shape)

        return jax.tree.map(cut, self.whole)


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["first", "number", "shape", "scheme"])
@dataclass(frozen=True)
class InFirst:
    """Another weight [K, N] of a group, which the module named `first` holds. A pytree without arrays."""

    first: str
    number: int
    shape: tuple[int, int]
    scheme: Scheme | None = None

    @property
    def ndim(self) -> int:
        return 2


def products(x: jax.Array, weights: Sequence[Any]) -> list[jax.Array]:
    """The products of x [..., K] with each of the weights, one for each array that holds some of them."""
    outputs: list[jax.Array] = []
    while len(outputs) < len(weights):
        first = weights[len(outputs)]
        outputs += first.split(matmul(x, first.whole)) if isinstance(first, SideBySide) else [matmul(x, first)]
    return outputs


def join(params: Any, *, donate: bool = False) -> Any:
    """The parameters, arrays or shapes, with the weights of each group side by side where they are alike: plain
    matrices of one dtype, or quantized alike, and cut alike on a mesh.

    donate: frees the arrays that were joined, group by group.
    """
    if not isinstance(params, Mapping):
        return params
    joined = {name: join(child, donate=donate) for name, child in params.items()}
    for names in GROUPS:
        group = [joined[name].get("weight") for name in names if isinstance(joined.get(name), Mapping)]
        if len(group) < len(names) or any(weight is None for weight in group) or not _are_alike(group):
            continue
        if (num_shards := _num_shards(group[0])) is None:
            continue
        whole = jax.tree.map(lambda *arrays, num_shards=num_shards: _joined(arrays, num_shards), *group)
        held = SideBySide(whole, tuple(weight.shape[1] for weight in group), num_shards)
        others = [InFirst(names[0], number, weight.shape, held.scheme) for number, weight in enumerate(group)]
        if donate:
            for array in jax.tree.leaves(group):
                array.delete()
        joined |= {
            name: {**joined[name], "weight": weight} for name, weight in zip(names, (held, *others[1:]), strict=True)
        }
    return joined


def separate(params: Any) -> Any:
    """The parameters with each weight of a group on its own, cut out of the array of all; the others are shared."""
    if not has_groups(params):
        return params
    paths = jax.tree_util.tree_map_with_path
    return paths(lambda path, _: weight_at(params, [key.key for key in path]), params, is_leaf=_is_leaf)


def weight_at(params: Any, path: Sequence[str]) -> Any:
    """The leaf of the parameters at a path, a weight of a group on its own."""
    parent = reduce(lambda tree, name: tree[name], path[:-2], params)
    leaf = reduce(lambda tree, name: tree[name], path[-2:], parent)
    if isinstance(leaf, InFirst):
        return parent[leaf.first]["weight"].part(leaf.number)
    return leaf.part(0) if isinstance(leaf, SideBySide) else leaf


def has_groups(params: Any) -> bool:
    """True if some weights of the parameters are side by side."""
    return any(isinstance(leaf, SideBySide) for leaf in jax.tree.leaves(params, is_leaf=_is_leaf))


def _is_leaf(leaf: Any) -> bool:
    return type(leaf) in KINDS


def _are_alike(group: Sequence[Any]) -> bool:
    """True for matrices of equal inputs whose arrays can lie side by side."""
    first = group[0]
    if isinstance(first, tuple(KINDS)) and not isinstance(first, QuantizedArray):
        return False
    kinds = {(type(weight), weight.ndim, weight.shape[0], _num_shards(weight)) for weight in group}
    dtypes = {tuple(array.dtype for array in jax.tree.leaves(weight)) for weight in group}
    if len(kinds) > 1 or len(dtypes) > 1 or first.ndim != 2:
        return False
    if not isinstance(first, QuantizedArray):
        return True
    # A codebook, an order of the inputs and nested scales are those of a whole weight.
    if first.codebook is not None or any(
        isinstance(weight.scales, NestedScales) or weight.permutation is not None for weight in group
    ):
        return False
    across = first.scheme.block[1]
    return len({weight.scheme for weight in group}) == 1 and all(weight.shape[1] % across == 0 for weight in group)


def _num_shards(weight: Any) -> int | None:
    """Parts into which a weight's outputs are cut, 1 without a mesh; None if its arrays are cut differently."""

    def of_array(array: Any) -> int:
        sharding = getattr(array, "sharding", None)
        return 1 if sharding is None else array.shape[-1] // sharding.shard_shape(array.shape)[-1]

    counts = {of_array(array) for array in jax.tree.leaves(weight)}
    return counts.pop() if len(counts) == 1 else None


def _joined(arrays: Sequence[Any], num_shards: int) -> Any:
    """Arrays [K, N] side by side, shard by shard, where the first one lies."""
    first, width = arrays[0], sum(array.shape[1] for array in arrays)
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((first.shape[0], width), first.dtype, sharding=first.sharding)
    if num_shards == 1:
        return jnp.concatenate(arrays, axis=1)
    return jax.jit(partial(_by_shard, num_shards), out_shardings=first.sharding)(arrays)


def _by_shard(num_shards: int, arrays: Sequence[jax.Array]) -> jax.Array:
    parts = [array.reshape(array.shape[0], num_shards, -1) for array in arrays]
    return jnp.concatenate(parts, axis=-1).reshape(arrays[0].shape[0], -1)


def _not_alone(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("a weight that lies beside others is multiplied with them: see quantization.side_by_side")


KINDS |= {SideBySide: WeightKind(_not_alone), InFirst: WeightKind(_not_alone)}
