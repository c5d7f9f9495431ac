"""Other libraries' trees read by the tables of `rules`, weight by weight."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_convert.trees.rules import LORA_A, LORA_B, TreeForm, TreeRule, base_name
from jaxinfer.models import ModelConfig, Params, abstract_params
from jaxinfer.models.adapter import Adapter, LowRank

Path = tuple[str, ...]
# Dicts that wrap the whole tree: Linen's collection, MaxText's train state, Gemma's checkpoints.
_WRAPPERS = ("params.", "transformer.")
_NUM_NAMED = 4


@dataclass(frozen=True)
class TreeWeight:
    """A weight of ours that is made of an array of theirs when it is called. `index` is its place on the array's axis
    of layers, None without one."""

    name: str
    array: Any
    rule: TreeRule
    config: ModelConfig
    layer: int | None
    index: int | None

    def check(self, form: str) -> None:
        """Raises ValueError, with both shapes, for an array of another shape, and for one whose owner has freed it."""
        if isinstance(self.array, jax.Array) and self.array.is_deleted():
            raise ValueError(f"{form}'s {self.name!r} was deleted, or donated, by its owner")
        shape = tuple(np.shape(self.array))
        own = shape if self.index is None else (shape[:1] + shape[2:])
        wanted = self.rule.shape(self.config, self.layer)
        if own != wanted:
            raise ValueError(
                f"{form}'s {self.name!r} has shape {list(shape)}, and the model's has {list(wanted)} "
                f"({self.rule.theirs})" + ("" if self.index is None else " with the layers on axis 1")
            )

    @property
    def shape_dtype(self) -> jax.ShapeDtypeStruct:
        """Its shape and dtype."""
        read = partial(_shape_of, self.rule, self.config, self.layer, self.index is not None)
        return read(tuple(np.shape(self.array)), np.dtype(self.array.dtype))

    def __call__(self) -> Any:
        """The weight: the array itself where nothing changes, else another one of its kind (JAX's or NumPy's)."""
        array = self.array if self.index is None else self.array[:, self.index]
        return self.rule.read(array, self.config, self.layer)


@lru_cache(maxsize=4096)
def _shape_of(
    rule: TreeRule, config: ModelConfig, layer: int | None, is_stacked: bool, shape: tuple[int, ...], dtype: np.dtype
) -> jax.ShapeDtypeStruct:
    own = shape[:1] + shape[2:] if is_stacked else shape
    return jax.eval_shape(lambda array: rule.read(array, config, layer), jax.ShapeDtypeStruct(own, dtype))


@dataclass(frozen=True)
class OtherTree:
    """A tree of another library for a model.

    Attributes:
      form: the library's name. weights: by our path.
      pairs: LoRA pairs by the name of what they change, below which are the rules that read them, and the layer.
      num_arrays: of the tree. left_over: names of arrays that are none of the model's. missing: names of weights that
        it lacks.
    """

    form: str
    config: ModelConfig
    weights: Mapping[Path, TreeWeight]
    pairs: Mapping[str, tuple[dict[str, Any], Sequence[TreeRule], int | None]]
    num_arrays: int
    left_over: Sequence[str]
    missing: Sequence[str]

    def check(self, *, is_partial: bool = False, has_pairs: bool = False) -> None:
        """Raises ValueError, with names and counts, for arrays that have no place in the model, weights that are
        missing unless `is_partial`, other shapes, and LoRA pairs unless `has_pairs`."""
        problems = []
        if self.left_over:
            problems.append(
                f"{len(self.left_over)} of its {self.num_arrays} arrays have no place: {_few(self.left_over)}"
            )
        if self.missing and not is_partial:
            count = len(self.missing) + len(self.weights)
            problems.append(f"{len(self.missing)} of the model's {count} weights are missing: {_few(self.missing)}")
        if problems:
            raise ValueError(f"the tree, in {self.form}'s form, does not fit the model: {'; '.join(problems)}")
        for weight in self.weights.values():
            weight.check(self.form)
        if self.pairs and not has_pairs:
            raise ValueError(
                f"the tree has LoRA pairs of {len(self.pairs)} weights ({_few(list(self.pairs))}), whose scale it does "
                "not say: give the weights without them, and the pairs as an adapter (docs/adapters.md)"
            )

    def each(self) -> Iterator[tuple[Path, Any]]:
        """The weights by path, one after another, each made when it is taken."""
        return ((path, weight()) for path, weight in self.weights.items())

    def shapes(self) -> dict[Path, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the weights by path."""
        return {path: weight.shape_dtype for path, weight in self.weights.items()}

    def params(self, *, copies: bool = False) -> Params:
        """All weights as a tree of ours. `copies`: also of arrays that stay as they are, which their owner may free."""
        params: Params = {}
        for path, weight in self.each():
            node = params
            for name in path[:-1]:
                node = node.setdefault(name, {})
            is_theirs = weight is self.weights[path].array
            node[path[-1]] = jnp.array(weight, copy=True) if copies and is_theirs else weight
        return params

    def adapter(self, scale: float) -> Adapter:
        """The LoRA pairs as an adapter of host arrays; `scale` is alpha / rank. Raises ValueError for one without its
        other half, and for sizes that are not the model's."""
        low_rank = {}
        for name, (halves, rules, layer) in self.pairs.items():
            if len(halves) != 2:
                raise ValueError(f"{self.form}'s LoRA pair of {name!r} has {' and '.join(halves)} alone")
            a, b = (np.asarray(halves[which]) for which in (LORA_A, LORA_B))
            for rule in rules:
                target = ".".join(_path(rule, layer)).removesuffix(".weight")
                low_rank[target] = LowRank(*rule.read_pair(a, b, self.config, layer), scale)
        return Adapter(low_rank)


def named_arrays(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by their names, joined by dots, without the dicts around it and the states of random
    numbers; of an `nnx.Module` its parameters."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(tree, nnx.Module):
        tree = nnx.state(tree, nnx.Param)
    arrays = {name: _array(leaf) for name, leaf in _leaves(tree, "") if not _is_random_state(leaf)}
    while prefix := next((prefix for prefix in _WRAPPERS if arrays and all(n.startswith(prefix) for n in arrays)), ""):
        arrays = {name.removeprefix(prefix): array for name, array in arrays.items()}
    return arrays


def _leaves(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        children = [(str(key).replace("/", "."), child) for key, child in node.items()]
    elif isinstance(node, (list, tuple)):
        children = [(str(number), child) for number, child in enumerate(node)]
    else:
        if node is not None:
            yield name, node
        return
    for key, child in children:
        yield from _leaves(child, f"{name}.{key}" if name else key)


def _array(leaf: Any) -> Any:
    """The array in an `nnx.Variable` or a box of Linen."""
    take: Callable[[], Any] | None = getattr(leaf, "get_value", None) or getattr(leaf, "unbox", None)
    return leaf if take is None else take()


def _is_random_state(leaf: Any) -> bool:
    return any(base.__name__ == "RngState" for base in type(leaf).__mro__)


def read_as(form: TreeForm, arrays: Mapping[str, Any], config: ModelConfig) -> OtherTree:
    """Arrays that have a library's names. Raises as `TreeForm.check`."""
    if form.check is not None:
        form.check(config)
    paths = jax.tree_util.tree_leaves_with_path(abstract_params(config))
    wanted = {tuple(key.key for key in path) for path, _ in paths}
    weights: dict[Path, TreeWeight] = {}
    pairs: dict[str, tuple[dict[str, Any], Sequence[TreeRule], int | None]] = {}
    left_over = []
    for name, array in arrays.items():
        base = base_name(name)
        below, span = form.place(base, config.num_layers)
        numbers = (None,) if span is None else span.numbers
        is_stacked = span is not None and span.is_stacked
        rules = [rule for rule in form.rules(below, span is not None) if {_path(rule, n) for n in numbers} <= wanted]
        if not rules or (base != name and is_stacked):
            left_over.append(name)
        elif base != name:
            own = pairs.setdefault(base, ({}, _fitting(rules, config, numbers[0], None), numbers[0]))
            own[0][name[len(base) :]] = array
        else:
            shape = tuple(np.shape(array))
            own = shape[:1] + shape[2:] if is_stacked else shape
            if is_stacked and (len(shape) < 2 or shape[1] != len(numbers)):
                raise ValueError(
                    f"{form.name}'s {name!r} has shape {list(shape)}, and is of {len(numbers)} layers, which are read "
                    "on its axis 1 (param_scan_axis=1)"
                )
            for index, number in enumerate(numbers):
                for rule in _fitting(rules, config, number, own):
                    place = index if is_stacked else None
                    weights[_path(rule, number)] = TreeWeight(name, array, rule, config, number, place)
    missing = sorted(".".join(path) for path in wanted - weights.keys())
    return OtherTree(form.name, config, weights, pairs, len(arrays), left_over, missing)


def _fitting(
    rules: Sequence[TreeRule], config: ModelConfig, layer: int | None, shape: tuple[int, ...] | None
) -> list[TreeRule]:
    """One rule for each target: of several the first whose shape it is, or the first."""
    chosen: dict[str, TreeRule] = {}
    for rule in sorted(rules, key=lambda rule: rule.shape(config, layer) != shape):
        chosen.setdefault(rule.target, rule)
    return list(chosen.values())


def _path(rule: TreeRule, layer: int | None) -> Path:
    return (*(() if layer is None else ("layers", str(layer))), *rule.target.split("."))


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more
