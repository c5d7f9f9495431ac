"""Rules that map stored tensors to parameters, shared by loading and saving.

A rule names stored tensors, the parameters in them, and the operations between the two: transposition, slices of a
fused tensor, de-interleaving of rotary dimensions, stacking, and an offset, which only GGUF files that are read have.
All except the offset are index maps, so a rule can be inverted without rounding, and applied to a part of a tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from checkpoints_convert.checkpoint import DRAFT_INDEX, ParamPath, param_shapes
from checkpoints_convert.outputs import Outputs
from jaxinfer.models import ModelConfig

LAYER, INDEX = "{layer}", "{index}"


@dataclass(frozen=True)
class TensorRule:
    """A stored tensor and the parameters in it.

    Attributes:
      source: its name; with "{layer}" for each layer, "{index}" for each entry of the first axis, such as
        an expert or a head, along which the tensors are stacked.
      targets: the parameters; of a fused tensor, in the order of their outputs.
      transpose: the last two axes are transposed, as Linear weights [out, in] are stored.
      groups: field of ModelConfig, or of a configuration in it ("delta.num_key_heads"), with the number of groups of
        outputs, each a share of every target; None for one.
      is_rotated: the outputs are those of queries or keys, which some families store interleaved.
      add: added to the stored values.
      when: a field of ModelConfig and the value for which the rule holds.
      stack: field of ModelConfig with the number of equal runs of outputs that become the first axis.
      stored: shape of the stored tensor where it differs by axes of length 1; -1 is the parameter's only axis.
    """

    source: str
    targets: tuple[str, ...]
    transpose: bool = False
    groups: str | None = None
    is_rotated: bool = False
    add: float = 0.0
    when: tuple[str, Any] | None = None
    stack: str | None = None
    stored: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TensorPlacement:
    """Place of a parameter in a stored tensor.

    Attributes:
      target: path of the parameter. stored: shape of the stored tensor.
      transpose: the stored matrix is the parameter's transpose, as every Linear's is.
      outputs: the stored outputs that are the parameter's; None for all. add: added to the stored values.
      view: the shape that the tensor is reshaped to, before `transpose` and `outputs` apply; None for `stored`.
    """

    target: ParamPath
    stored: tuple[int, ...]
    transpose: bool
    outputs: Outputs | None = None
    add: float = 0.0
    view: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ParameterPlan:
    """A parameter of a shape that is read from stored tensors, and its placement in each of them."""

    placement: TensorPlacement
    shape: tuple[int, ...]

    @property
    def target(self) -> ParamPath:
        return self.placement.target


@dataclass(frozen=True)
class Stacked(Sequence[str]):
    """The names of the tensors of a stack, made on access, because a configuration may have any number of experts."""

    source: str
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return tuple(map(self.__getitem__, range(*number.indices(self.count))))
        return self.source.replace(INDEX, str(range(self.count)[number]))


@dataclass(frozen=True)
class TensorGroup:
    """Stored tensors and the parameters in them: one tensor of one or several parameters, or a stack for one."""

    sources: Sequence[str]
    placements: tuple[TensorPlacement, ...]
    is_stacked: bool = False

    def placement_of(self, target: ParamPath) -> TensorPlacement:
        return next(placement for placement in self.placements if placement.target == target)

    def assemble(self, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """The stored tensors, in C order, made of the parameters in the order of `placements`."""
        if not self.is_stacked:
            return {self.sources[0]: self._assembled(arrays)}
        return {name: self._assembled([array[i] for array in arrays]) for i, name in enumerate(self.sources)}

    def _assembled(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        whole: np.ndarray | None = None
        for placement, array in zip(self.placements, arrays, strict=True):
            array = array.swapaxes(-1, -2) if placement.transpose else array
            if placement.outputs is None:
                return np.ascontiguousarray(array).reshape(placement.stored)
            if whole is None:
                whole = np.empty(placement.view or placement.stored, array.dtype)
            axis = -2 if placement.transpose and array.ndim > 1 else -1  # of the outputs
            np.moveaxis(whole, axis, 0)[placement.outputs.index] = np.moveaxis(array, axis, 0)
        assert whole is not None
        return whole.reshape(self.placements[0].stored)


@dataclass(frozen=True)
class TensorLayout:
    """All tensor groups of a model.

    Attributes:
      tensor_groups: those that are written, in the order of computation.
      of_target: the tensor groups that may hold each parameter, the one that is written first.
    """

    tensor_groups: tuple[TensorGroup, ...]
    of_target: Mapping[ParamPath, tuple[TensorGroup, ...]]


@lru_cache(maxsize=8)
def layout(rules: tuple[TensorRule, ...], config: ModelConfig, pairs_neighbours: bool = False) -> TensorLayout:
    """The tensor groups that `rules` make of a model.

    With `pairs_neighbours` the outputs of queries and keys are stored interleaved. Raises ValueError for a parameter
    that no rule has.
    """
    shapes = param_shapes(config)
    of_target: dict[ParamPath, tuple[TensorGroup, ...]] = dict.fromkeys(shapes, ())
    for rule in rules:
        for group in _tensor_groups(rule, config, shapes, pairs_neighbours):
            for placement in group.placements:
                of_target[placement.target] += (group,)
    of_target.pop(DRAFT_INDEX, None)  # it is computed
    lost = [".".join(path) for path, tensor_groups in of_target.items() if not tensor_groups]
    if lost:
        raise ValueError(f"{config.architecture}: no rule has the parameter {lost[0]!r}")
    written = dict.fromkeys(tensor_groups[0] for tensor_groups in of_target.values())
    return TensorLayout(tuple(written), of_target)


def _tensor_groups(
    rule: TensorRule, config: ModelConfig, shapes: Mapping[ParamPath, tuple[int, ...]], pairs_neighbours: bool
) -> Iterator[TensorGroup]:
    if rule.when is not None and getattr(config, rule.when[0]) != rule.when[1]:
        return
    for layer in range(config.num_layers) if LAYER in rule.source else (0,):
        paths = [tuple(target.replace(LAYER, str(layer)).split(".")) for target in rule.targets]
        if not all(path in shapes for path in paths):
            continue
        first = 0 if config.draft_head is None else config.draft_head.first_layer
        source = rule.source.replace(LAYER, str(first + layer))
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
    groups = 1 if rule.groups is None else attrgetter(rule.groups)(config)
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
        if rule.stored is not None:
            view, stored = stored, tuple(total if size == -1 else size for size in rule.stored)
        if rule.stack is not None:
            view = (getattr(config, rule.stack), *stored)
            axis = -2 if rule.transpose else -1
            merged = list(stored)
            merged[axis] *= view[0]
            stored = tuple(merged)
        yield TensorPlacement(path, stored, rule.transpose, outputs, rule.add, view)
        start += size


def linear(source: str, *targets: str, transpose: bool = True, **options: Any) -> tuple[TensorRule, TensorRule]:
    """Rules for weight and bias of a Linear, which may be several layers fused."""
    weights, biases = (tuple(f"{target}.{kind}" for target in targets) for kind in ("weight", "bias"))
    return (
        TensorRule(f"{source}.weight", weights, transpose=transpose, **options),
        TensorRule(f"{source}.bias", biases, **options),
    )


def norm(source: str, target: str, **options: Any) -> tuple[TensorRule, TensorRule]:
    """Rules for weight and bias of a norm."""
    return linear(source, target, transpose=False, **options)
