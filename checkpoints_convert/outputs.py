"""Index maps between the outputs of a stored tensor and those of a parameter, for arrays and `QuantizedArray`s."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxinfer.quantization import NestedScales, QuantizedArray


@dataclass(frozen=True)
class Outputs:
    """The outputs of a stored tensor that a parameter has: its output i is output `index[i]` of the stored tensor.

    Attributes:
      stored: number of outputs of the stored tensor.
      groups: number of equal runs of outputs, such as one for each key-value head. start, stop: the outputs of each run
        that are the parameter's; None for the run's end.
      head_dim, rotary_dim: if not 0, the first `rotary_dim` outputs of each head are stored interleaved (pairs that
        rotate together are neighbours), and reordered into the halves that `jaxinfer.models.rope.rotate` takes.
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

    def bounds(self) -> tuple[int, int]:
        """The stored outputs from the first to the last of the parameter's, the end exclusive."""
        return int(self.index.min()), int(self.index.max()) + 1


class OutputsError(ValueError):
    """Outputs of quantized weights that cannot be joined; the message says why."""


def take_outputs(weight: QuantizedArray, outputs: Outputs) -> QuantizedArray:
    """The outputs of a stored weight [..., K, N] of host arrays that belong to a parameter; exact. Can be traced.

    Nested scales are dequantized, and blocks of several outputs that are cut become blocks of one output with the same
    scale.
    """
    index = outputs.index
    if isinstance(weight.scales, NestedScales):
        weight = replace(weight, scales=weight.scales.dequantize())
    blocks = _blocks(index, weight.scheme.block[1], outputs.stored)
    if blocks is None:
        weight = _by_output(weight)
        blocks = index
    values, scales, zeros = (
        None if x is None else _columns(x, columns)
        for x, columns in ((weight.values, index), (weight.scales, blocks), (weight.zeros, blocks))
    )
    block = (weight.scheme.block[0], min(weight.scheme.block[1], len(index)))
    return replace(weight, values=values, scales=scales, zeros=zeros, scheme=replace(weight.scheme, block=block))


def join_outputs(weights: Sequence[QuantizedArray], outputs: Sequence[Outputs]) -> QuantizedArray:
    """The stored weight that parameters are the outputs of, of host arrays; exact. The inverse of `take_outputs`.

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
        for part, output in zip(parts, outputs, strict=True):
            whole[:, output.index] = part
        return whole

    zeros = None if first.zeros is None else put([np.asarray(weight.zeros) for weight in plain])
    values, scales = (put([np.asarray(getattr(weight, name)) for weight in plain]) for name in ("values", "scales"))
    return replace(first, values=values, scales=scales, zeros=zeros)


def _by_output(weight: QuantizedArray) -> QuantizedArray:
    """The weight with blocks of one output each, which repeat the scales of larger blocks."""
    rows, columns = weight.scheme.block
    if columns == 1:
        return weight
    outputs = np.arange(weight.shape[1]) // columns
    scales, zeros = (None if x is None else _columns(x, outputs) for x in (weight.scales, weight.zeros))
    return replace(weight, scales=scales, zeros=zeros, scheme=replace(weight.scheme, block=(rows, 1)))


def _columns(array: Any, columns: np.ndarray) -> Any:
    """Columns of a host array, in C order."""
    return array[..., columns] if isinstance(array, Tracer) else np.ascontiguousarray(np.asarray(array)[..., columns])


def _blocks(index: np.ndarray, block: int, stored: int) -> np.ndarray | None:
    """The stored block of each block of the outputs `index`; None if blocks are cut."""
    if block == 1:
        return index
    if block >= stored:
        return np.array([0])
    starts = index[::block]
    run = np.concatenate([np.arange(start, min(start + block, stored)) for start in starts])[: len(index)]
    is_cut = (starts % block).any() or not np.array_equal(run, index)
    # The last block may be shorter.
    return None if is_cut else starts // block


def _equal(a: Any, b: Any) -> bool:
    return a is b is None or (a is not None and b is not None and np.array_equal(a, b))
