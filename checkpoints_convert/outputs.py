"""Index maps between the outputs of a stored tensor and those of a parameter, on arrays and on `QuantizedArray`s."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxinfer.quantization import NestedScales, QuantizedArray


@dataclass(frozen=True)
class Outputs:
    """Which of a stored tensor's outputs a parameter has, and in which order. Data only, so that it can be inverted and
    cut: output i of the parameter is output `index[i]` of the stored tensor.

    Attributes:
      stored: outputs of the stored tensor.
      groups: equal runs that they fall into, such as one for each key-value head. start, stop: which outputs of each
        run are the parameter's; None is the run's end.
      head_dim, rotary_dim: the first `rotary_dim` outputs of each head are stored as neighbours that rotate together
        and become halves that do, as `jaxinfer.models.rope.rotate` wants them; 0 where they are stored so.
    """

    stored: int
    groups: int = 1
    start: int = 0
    stop: int | None = None
    head_dim: int = 0
    rotary_dim: int = 0

    @cached_property
    def index(self) -> np.ndarray:
        """int64 [outputs of the parameter]."""
        runs = np.arange(self.stored).reshape(self.groups, -1)
        index = runs[:, self.start : self.stop].reshape(-1)
        if not self.rotary_dim:
            return index
        heads = index.reshape(-1, self.head_dim)
        rotated = [heads[:, : self.rotary_dim : 2], heads[:, 1 : self.rotary_dim : 2]]
        return np.concatenate([*rotated, heads[:, self.rotary_dim :]], axis=1).reshape(-1)

    @property
    def is_run(self) -> bool:
        """Whether the parameter's outputs lie side by side, in order."""
        return bool((np.diff(self.index) == 1).all())

    def bounds(self) -> tuple[int, int]:
        """The stored outputs from the first to the last of the parameter's, the end exclusive."""
        return int(self.index.min()), int(self.index.max()) + 1


class OutputsError(ValueError):
    """Outputs of a quantized weight that cannot be told apart, or joined; the message says why."""


def taken(weight: QuantizedArray, outputs: Outputs) -> QuantizedArray:
    """The parameter's part of a stored weight [..., K, N] of host arrays; exact.

    Scales that are quantized themselves are dequantized, and blocks of outputs that the part cuts through become single
    outputs, which repeat the block's scale.
    """
    index = outputs.index
    if isinstance(weight.scales, NestedScales):
        weight = replace(weight, scales=np.asarray(weight.scales.dequantize()))
    blocks = _blocks(index, weight.scheme.block[1], outputs.stored)
    if blocks is None:
        weight = _by_output(weight)
        blocks = index
    values, scales, zeros = (
        None if x is None else np.ascontiguousarray(np.asarray(x)[..., columns])
        for x, columns in ((weight.values, index), (weight.scales, blocks), (weight.zeros, blocks))
    )
    block = (weight.scheme.block[0], min(weight.scheme.block[1], len(index)))
    return replace(weight, values=values, scales=scales, zeros=zeros, scheme=replace(weight.scheme, block=block))


def joined(weights: Sequence[QuantizedArray], outputs: Sequence[Outputs]) -> QuantizedArray:
    """The inverse: the stored weight of host arrays that the parameters are parts of; exact.

    Raises OutputsError for parts that are quantized differently.
    """
    plain = [jax.tree.map(np.asarray, weight) for weight in weights]
    if any(isinstance(weight.scales, NestedScales) for weight in plain):
        raise OutputsError("parts whose scales are quantized themselves")
    plain = [_by_output(weight) for weight in plain]
    first, stored = plain[0], outputs[0].stored
    for other in plain[1:]:
        same = other.scheme == first.scheme and (other.zeros is None) == (first.zeros is None)
        if not (same and _equal(other.permutation, first.permutation) and _equal(other.codebook, first.codebook)):
            raise OutputsError(f"parts that are quantized differently, {first.scheme} and {other.scheme}")

    def put(parts: Sequence[np.ndarray]) -> np.ndarray:
        whole = np.empty((parts[0].shape[0], stored), parts[0].dtype)
        for part, one in zip(parts, outputs, strict=True):
            whole[:, one.index] = part
        return whole

    zeros = None if first.zeros is None else put([np.asarray(weight.zeros) for weight in plain])
    values, scales = (put([np.asarray(getattr(weight, name)) for weight in plain]) for name in ("values", "scales"))
    return replace(first, values=values, scales=scales, zeros=zeros)


def _by_output(weight: QuantizedArray) -> QuantizedArray:
    """The same weight with a scale for each output, repeated where a block had one."""
    rows, columns = weight.scheme.block
    if columns == 1:
        return weight
    outputs = np.arange(weight.shape[1]) // columns
    scales, zeros = (None if x is None else np.asarray(x)[:, outputs] for x in (weight.scales, weight.zeros))
    return replace(weight, scales=scales, zeros=zeros, scheme=replace(weight.scheme, block=(rows, 1)))


def _blocks(index: np.ndarray, block: int, stored: int) -> np.ndarray | None:
    """Which block of outputs each block of the part is; None where the part cuts through blocks."""
    if block == 1:
        return index
    if block >= stored:
        return np.array([0])
    starts = index[::block]
    run = np.concatenate([np.arange(start, min(start + block, stored)) for start in starts])[: len(index)]
    is_cut = (starts % block).any() or not np.array_equal(run, index)
    # The last block may be shorter where the tensor ends, or where the part does.
    return None if is_cut else starts // block


def _equal(a: Any, b: Any) -> bool:
    return a is b is None or (a is not None and b is not None and np.array_equal(a, b))
