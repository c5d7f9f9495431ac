"""Which tensors of a checkpoint are which parameters: rules that loading and saving share.

A rule names stored tensors and the parameters they hold. Between them lie operations that are data: a transposition,
parts of a fused tensor, neighbours that rotate together made halves, an offset, a stack. All are index maps but the
offset, so a rule works in both directions without a rounding, and on a part of a tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from checkpoints_convert.outputs import Outputs
from checkpoints_convert.source import ParamPath, param_shapes
from jaxinfer.models import ModelConfig

LAYER, INDEX = "{layer}", "{index}"


@dataclass(frozen=True)
class TensorRule:
    """One stored tensor and the parameters it holds.

    Attributes:
      source: its name; with "{layer}" one for each layer, with "{index}" one for each entry of the parameter's first
        axis, such as an expert or a head, which they are stacked along.
      targets: the parameters, in the order of their outputs where the tensor is fused.
      transpose: of the last two axes, as Linear weights [out, in] are stored.
      groups: a field of ModelConfig: so many times the outputs of all targets follow one another, a share of each;
        None for once.
      is_rotated: the outputs are those of queries or keys, which some families store in another order.
      add: what is added to the stored values.
      when: a field of ModelConfig and the value for which the rule holds.
      stack: a field of ModelConfig: so many equal runs of outputs are the first axis of the parameters, such as heads.
    """

    source: str
    targets: tuple[str, ...]
    transpose: bool = False
    groups: str | None = None
    is_rotated: bool = False
    add: float = 0.0
    when: tuple[str, Any] | None = None
    stack: str | None = None


@dataclass(frozen=True)
class TensorPlacement:
    """Where a parameter is in stored tensors of the shape `stored`: in all their outputs, or in some. With a `view` the
    tensor is looked at in that shape, and `transpose` and `outputs` are of it."""

    target: ParamPath
    stored: tuple[int, ...]
    transpose: bool
    outputs: Outputs | None = None
    add: float = 0.0
    view: tuple[int, ...] | None = None

    @property
    def axis(self) -> int:
        """The axis of the outputs as stored."""
        return -2 if self.transpose else -1


@dataclass(frozen=True)
class Stacked(Sequence[str]):
    """The names of the tensors of a stack, made one by one when they are asked for: a configuration may say any number
    of experts, and many files hold them in one tensor."""

    source: str
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return tuple(self[one] for one in range(*number.indices(self.count)))
        return self.source.replace(INDEX, str(range(self.count)[number]))


@dataclass(frozen=True)
class TensorGroup:
    """Stored tensors and the parameters in them: one tensor for one or several, or several stacked in one."""

    sources: Sequence[str]
    placements: tuple[TensorPlacement, ...]
    is_stacked: bool = False

    def assemble(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """The stored tensors, of the parameters in the order of `placements`; C order."""
        if not self.is_stacked:
            return {self.sources[0]: self._assembled(arrays)}
        return {name: self._assembled([array[i] for array in arrays]) for i, name in enumerate(self.sources)}

    def _assembled(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        whole: np.ndarray | None = None
        for placement, array in zip(self.placements, arrays, strict=True):
            if placement.add:
                array = (array.astype(np.float32) - np.float32(placement.add)).astype(array.dtype)
            array = array.swapaxes(-1, -2) if placement.transpose else array
            if placement.outputs is None:
                return np.ascontiguousarray(array).reshape(placement.stored)
            if whole is None:
                whole = np.empty(placement.view or placement.stored, array.dtype)
            np.moveaxis(whole, _axis(placement, whole.ndim), 0)[placement.outputs.index] = np.moveaxis(
                array, _axis(placement, array.ndim), 0
            )
        assert whole is not None
        return whole.reshape(self.placements[0].stored)


def _axis(placement: TensorPlacement, ndim: int) -> int:
    return placement.axis if ndim > 1 else 0


@dataclass(frozen=True)
class Layout:
    """All bundles of a model.

    Attributes:
      bundles: those that are written, in the order of computation.
      of_target: for each parameter the bundles that may hold it, the one that is written first.
    """

    bundles: tuple[TensorGroup, ...]
    of_target: Mapping[ParamPath, tuple[TensorGroup, ...]]


@lru_cache(maxsize=8)
def layout(rules: tuple[TensorRule, ...], config: ModelConfig, pairs_neighbours: bool = False) -> Layout:
    """The bundles that `rules` make of a model.

    Args:
      pairs_neighbours: whether the outputs of queries and keys are stored with those that rotate together side by side.

    Raises ValueError for a parameter that no rule holds.
    """
    shapes = param_shapes(config)
    of_target: dict[ParamPath, tuple[TensorGroup, ...]] = dict.fromkeys(shapes, ())
    for rule in rules:
        for bundle in _bundles(rule, config, shapes, pairs_neighbours):
            for placement in bundle.placements:
                of_target[placement.target] += (bundle,)
    lost = [".".join(path) for path, bundles in of_target.items() if not bundles]
    if lost:
        raise ValueError(f"{config.architecture}: no rule holds the parameter {lost[0]!r}")
    written = dict.fromkeys(bundles[0] for bundles in of_target.values())
    return Layout(tuple(written), of_target)


def _bundles(
    rule: TensorRule, config: ModelConfig, shapes: Mapping[ParamPath, tuple[int, ...]], pairs_neighbours: bool
) -> Iterator[TensorGroup]:
    if rule.when is not None and getattr(config, rule.when[0]) != rule.when[1]:
        return
    for layer in range(config.num_layers) if LAYER in rule.source else (0,):
        paths = [tuple(target.replace(LAYER, str(layer)).split(".")) for target in rule.targets]
        if not all(path in shapes for path in paths):
            continue
        source = rule.source.replace(LAYER, str(layer))
        is_stacked = INDEX in source
        count = shapes[paths[0]][0]
        names = Stacked(source, count) if is_stacked else (source,)
        of_one = [shapes[path][1:] if is_stacked or rule.stack else shapes[path] for path in paths]
        yield TensorGroup(names, tuple(_placements(rule, config, paths, of_one, pairs_neighbours)), is_stacked)


def _placements(
    rule: TensorRule,
    config: ModelConfig,
    paths: Sequence[ParamPath],
    shapes: Sequence[tuple[int, ...]],
    pairs_neighbours: bool,
) -> Iterator[TensorPlacement]:
    groups = 1 if rule.groups is None else getattr(config, rule.groups)
    total, start = sum(shape[-1] for shape in shapes), 0
    is_paired = rule.is_rotated and pairs_neighbours
    for path, shape in zip(paths, shapes, strict=True):
        stored = (*shape[:-1], total)
        stored = (*stored[:-2], *stored[:-3:-1]) if rule.transpose else stored
        size = shape[-1] // groups
        outputs = None
        if len(paths) > 1 or is_paired:
            rotary = {"head_dim": config.head_dim, "rotary_dim": config.rope.rotary_dim} if is_paired else {}
            outputs = Outputs(total, groups, start, start + size, **rotary)
        view = None
        if rule.stack is not None:
            view = (getattr(config, rule.stack), *stored)
            axis = -2 if rule.transpose else -1
            merged = list(stored)
            merged[axis] *= view[0]
            stored = tuple(merged)
        yield TensorPlacement(path, stored, rule.transpose, outputs, rule.add, view)
        start += size


def linear(source: str, *targets: str, transpose: bool = True, **options: Any) -> tuple[TensorRule, TensorRule]:
    """Weight and bias of a Linear that is one layer, or several side by side."""
    weights, biases = (tuple(f"{target}.{kind}" for target in targets) for kind in ("weight", "bias"))
    return (
        TensorRule(f"{source}.weight", weights, transpose=transpose, **options),
        TensorRule(f"{source}.bias", biases, **options),
    )


def norm(source: str, target: str, **options: Any) -> tuple[TensorRule, TensorRule]:
    """Weight and bias of a norm."""
    return linear(source, target, transpose=False, **options)
