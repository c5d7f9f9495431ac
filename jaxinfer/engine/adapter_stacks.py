"""The low-rank adapters that a model's weights hold on the device: one array for all of them at each weight, so that
another adapter in a slot is other data for the same programs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.adapter_slots import WEIGHT, AdapterSizes
from jaxinfer.models import ModelConfig, Params, compute_dtype
from jaxinfer.models.adapter import Adapter, LowRank
from jaxinfer.quantization.adapted import AdaptedWeight, AdapterStack
from jaxinfer.quantization.side_by_side import weight_at
from jaxinfer.quantization.tree import is_weight

_SHOWN = 3  # names in a message
Path = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class HostStack:
    """What an adapter puts into a slot of a stack: float [r, K] and [r, N], factors and offsets float32 [N] or None."""

    a: np.ndarray
    b: np.ndarray
    columns: np.ndarray | None = None
    offset: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class HostAdapter:
    """An adapter as it is copied into a slot.

    Attributes:
      fingerprint: of the adapter, by which it is known. stacks: by the name of the weight. rank: the largest one.
    """

    fingerprint: str
    stacks: Mapping[str, HostStack]
    rank: int

    @property
    def num_bytes(self) -> int:
        """Bytes in the host's memory."""
        arrays = [array for stack in self.stacks.values() for array in vars(stack).values() if array is not None]
        return sum(array.nbytes for array in arrays)


class AdapterStacks:
    """The stacks of a model's weights. `params` may be abstract, of which nothing can be written."""

    def __init__(self, config: ModelConfig, params: Params, sizes: AdapterSizes):
        self.config, self.sizes, self.dtype = config, sizes, jnp.dtype(compute_dtype(params))
        self._is_abstract = isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct)
        self._shapes = {_name(path): leaf.shape for path, leaf in _leaves(params) if sizes.takes(path, leaf.ndim)}
        if not self._shapes:
            wanted = "linear layers" if sizes.modules is None else ", ".join(sizes.modules)
            raise ValueError(f"adapters: {config.architecture} has no weights of {wanted}")
        self._ranks = self._zeros((sizes.num_slots,), jnp.int32)
        self._stacks = {name: self._empty(*shape) for name, shape in self._shapes.items()}

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) if self._is_abstract else jnp.zeros(shape, dtype)

    def _empty(self, inputs: int, outputs: int) -> AdapterStack:
        sizes = self.sizes
        slots = sizes.num_slots
        return AdapterStack(
            self._zeros((slots, sizes.max_rank, inputs), self.dtype),
            self._zeros((slots, sizes.max_rank, outputs), self.dtype),
            None,
            self._zeros((slots, outputs), jnp.float32) if sizes.has_columns else None,
            self._zeros((slots, outputs), jnp.float32) if sizes.has_offset else None,
        )

    def on(self, params: Params) -> Params:
        """The parameters with the stacks at their weights, as they are now."""

        def adapted(path: Any, leaf: Any) -> Any:
            name = _name(tuple(key.key for key in path))
            if name not in self._stacks:
                return leaf
            return AdaptedWeight(leaf, self._stacks[name]._replace(ranks=self._ranks))

        return jax.tree_util.tree_map_with_path(adapted, params, is_leaf=is_weight)

    def write(self, slot: int, adapter: HostAdapter) -> None:
        """Puts an adapter in the place of what a slot had. `on` has to be called again: the arrays before are gone."""
        arrays = {name: self._padded(name, adapter.stacks.get(name)) for name in self._stacks}
        written = _write(self._stacks, self._ranks, np.int32(slot), arrays, np.int32(adapter.rank))
        self._stacks, self._ranks = written

    def _padded(self, name: str, stack: HostStack | None) -> AdapterStack:
        """What a slot gets, of the shapes that it has."""
        (inputs, outputs), sizes = self._shapes[name], self.sizes

        def rows(array: np.ndarray | None, width: int) -> np.ndarray:
            if array is not None and len(array) == sizes.max_rank:
                return array
            padded = np.zeros((sizes.max_rank, width), self.dtype)
            if array is not None:
                padded[: len(array)] = array
            return padded

        def row(array: np.ndarray | None, default: float, is_there: bool) -> np.ndarray | None:
            if not is_there:
                return None
            return np.full((outputs,), default, np.float32) if array is None else array

        a, b = (None, None) if stack is None else (stack.a, stack.b)
        columns, offset = (None, None) if stack is None else (stack.columns, stack.offset)
        vectors = row(columns, 1.0, sizes.has_columns), row(offset, 0.0, sizes.has_offset)
        return AdapterStack(rows(a, inputs), rows(b, outputs), None, *vectors)

    def prepared(self, adapter: Adapter, params: Params, *, what: str) -> HostAdapter:
        """An adapter for these stacks. `params`: of the base, which DoRA and trained biases need; `what` names the
        adapter in messages.

        Raises ValueError, with names and numbers, for an adapter that has no room, or changes what has none.
        """
        self._check(adapter, what)
        biases = {name.removesuffix(".bias"): bias for name, bias in adapter.replaced.items()}
        stacks = {}
        for name in dict.fromkeys([*adapter.low_rank, *biases]):
            stacks[name] = self._host_stack(name, adapter.low_rank.get(name), biases.get(name), params, what)
        return HostAdapter(adapter.fingerprint, stacks, adapter.max_rank)

    def _check(self, adapter: Adapter, what: str) -> None:
        sizes = self.sizes

        def refuse(reason: str) -> None:
            raise ValueError(f"adapter {what}: {reason}")

        if adapter.invocation_tokens:
            refuse(f"it begins with the invocation tokens {list(adapter.invocation_tokens)}, which is not served")
        if (rank := adapter.max_rank) > sizes.max_rank:
            refuse(f"its rank is {rank}, and there is room for {sizes.max_rank}: max_adapter_rank={rank}")
        if adapter.token_rows:
            refuse(
                f"it has trained tokens of {_listed(adapter.token_rows)}: merge it with jaxinfer convert --merge-lora"
            )
        wholes = [name for name in adapter.replaced if not name.endswith(".bias")]
        if wholes:
            refuse(f"it brings {_listed(wholes)} whole: merge it with jaxinfer convert --merge-lora")
        names = [*adapter.low_rank, *(name.removesuffix(".bias") for name in adapter.replaced)]
        if without := [name for name in names if name not in self._shapes]:
            wanted = "" if sizes.modules is None else f", only {', '.join(sizes.modules)} have (adapter_modules)"
            refuse(f"there is no room for adapters of {_listed(without)}{wanted}")
        if not sizes.has_columns and any(pair.magnitude is not None for pair in adapter.low_rank.values()):
            refuse("it has magnitudes (DoRA), for which there is no room: adapter_parts=('dora',)")
        if not sizes.has_offset and (
            adapter.replaced or any(pair.bias is not None for pair in adapter.low_rank.values())
        ):
            refuse("it has biases, for which there is no room: adapter_parts=('bias',)")

    def _host_stack(
        self, name: str, pair: LowRank | None, bias: np.ndarray | None, params: Params, what: str
    ) -> HostStack:
        inputs, outputs = self._shapes[name]
        if pair is None:
            pair = LowRank(np.zeros((inputs, 0), np.float32), np.zeros((0, outputs), np.float32), 1.0)
        if (change := (pair.a.shape[0], pair.b.shape[-1])) != (inputs, outputs) or pair.a.ndim != 2:
            raise ValueError(
                f"adapter {what}: {name!r} has a change of {list(change)}, the weight is {inputs, outputs}"
            )
        a = np.ascontiguousarray(pair.a.T, self.dtype)
        b = np.ascontiguousarray(np.float32(pair.scale) * pair.b.astype(np.float32), self.dtype)
        columns = offset = None
        if pair.magnitude is not None:
            weight = _dense(params, name) + np.float32(pair.scale) * (
                pair.a.astype(np.float32) @ pair.b.astype(np.float32)
            )
            columns = pair.magnitude.astype(np.float32) / np.linalg.norm(weight, axis=0)
        if pair.bias is not None:
            offset = np.float32(pair.scale) * pair.bias.astype(np.float32)
        if bias is not None:
            own = _parent(params, name).get("bias")
            if own is None:
                raise ValueError(f"adapter {what}: {name!r} has a bias, and the base has none")
            changed = bias.astype(np.float32) - np.asarray(own, np.float32)
            offset = changed if offset is None else offset + changed
        arrays = {"A": a, "B": b, "magnitudes": columns, "biases": offset}
        for kind, array in arrays.items():
            if array is not None and (count := int(np.sum(~np.isfinite(array.astype(np.float32))))):
                raise ValueError(f"adapter {what}: {count} of {array.size} {kind} of {name!r} are not finite")
        return HostStack(a, b, columns, offset)


@partial(jax.jit, donate_argnums=(0, 1))
def _write(stacks: Any, ranks: jax.Array, slot: jax.Array, arrays: Any, rank: jax.Array) -> Any:
    return jax.tree.map(lambda stack, array: stack.at[slot].set(array), stacks, arrays), ranks.at[slot].set(rank)


def _leaves(params: Params) -> Iterator[tuple[Path, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight):
        yield tuple(key.key for key in path), leaf


def _name(path: Path) -> str:
    return ".".join(path[:-1] if path[-1] == WEIGHT else path)


def _parent(params: Params, name: str) -> Any:
    node: Any = params
    for part in name.split("."):
        node = node[part]
    return node


def _dense(params: Params, name: str) -> np.ndarray:
    """float32 [K, N] of a weight of any kind."""
    weight = weight_at(params, [*name.split("."), WEIGHT])
    return np.asarray(weight.dequantize(jnp.float32) if is_weight(weight) else weight, np.float32)


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
