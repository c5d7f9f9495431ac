"""Reading one quantized module: its tensors, whole, and what its format makes of them."""

from dataclasses import replace

import numpy as np

from checkpoints_convert.arrays import count_nonfinite
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.formats import FormatError
from checkpoints_convert.formats.module import host_quantized
from checkpoints_convert.plan import QuantizedPlan
from checkpoints_convert.safetensors_file import NUMPY_DTYPES
from checkpoints_convert.safetensors_index import SafetensorsIndex
from checkpoints_convert.source import check_finite, numpy_dtype
from jaxinfer.quantization import NestedScales, QuantizedArray, check


def read_quantized(index: SafetensorsIndex, plan: QuantizedPlan, dtype: str) -> QuantizedArray | np.ndarray:
    """The parameter of a quantized module, on the host; dense ones in `dtype`.

    Raises CheckpointError, naming file and tensor, for tensors that do not hold what the format says, and scales that
    are not finite.
    """
    reader = plan.reader
    tensors = {
        suffix: read_whole(index, name, is_checked=suffix not in reader.raw) for suffix, name in plan.sources.items()
    }
    if plan.zero_bias is not None and (values := read_whole(index, plan.zero_bias)).any():
        raise CheckpointError(
            index.path_of(plan.zero_bias),
            f"tensor {plan.zero_bias!r}: {np.count_nonzero(values)} of {values.size} values are not zero, and the"
            " model has no such bias",
        )
    try:
        weight = reader.read(tensors)
    except FormatError as error:
        known = next((suffix for suffix in plan.sources if suffix == error.suffix), next(iter(plan.sources)))
        what = f"module {plan.module!r}" if error.suffix is None else f"tensor '{plan.module}.{error.suffix}'"
        raise CheckpointError(index.path_of(plan.sources[known]), f"{what} {error}") from None
    if not plan.transpose:
        weight = weight.T if isinstance(weight, np.ndarray) else _transposed(weight, plan, index)
    if isinstance(weight, np.ndarray):
        return np.ascontiguousarray(weight.astype(numpy_dtype(dtype), copy=False))
    try:
        check(weight, f"module {plan.module!r}")
    except ValueError as error:
        raise CheckpointError(index.path_of(next(iter(plan.sources.values()))), str(error)) from None
    return weight


def read_whole(index: SafetensorsIndex, name: str, *, is_checked: bool = True) -> np.ndarray:
    """One tensor as stored. Raises CheckpointError for dtypes numpy lacks and, if checked, NaN and infinite values."""
    entry = index.entry(name)
    if entry.dtype not in NUMPY_DTYPES:
        raise CheckpointError(index.path_of(name), f"tensor {name!r} is stored as {entry.dtype}, which is not read")
    array = np.empty(entry.shape, NUMPY_DTYPES[entry.dtype])
    if array.nbytes:
        index.read_into(name, 0, array.reshape(-1).view(np.uint8).data)
    if is_checked and entry.dtype.startswith(("F", "BF")) and entry.dtype != "F8_E8M0":  # powers of two: their reader
        check_finite(index.path_of(name), name, count_nonfinite(array), array.size)
    return array


def _transposed(weight: QuantizedArray, plan: QuantizedPlan, index: SafetensorsIndex) -> QuantizedArray:
    """An embedding's [V, D], of the [D, V] that a reader gives; each row has a scale of its own."""
    if weight.permutation is not None or isinstance(weight.scales, NestedScales):
        where = index.path_of(next(iter(plan.sources.values())))
        raise CheckpointError(where, f"module {plan.module!r} is an embedding: permuted or nested scales are not read")
    (rows, columns), (inputs, outputs) = weight.scheme.block, weight.shape
    if rows < inputs and columns > 1:
        where = index.path_of(next(iter(plan.sources.values())))
        raise CheckpointError(
            where, f"module {plan.module!r} is an embedding: blocks of {columns} x {rows} are not read, rows are"
        )
    scheme = replace(weight.scheme, block=(1, rows), activations=None)
    values = np.ascontiguousarray(np.asarray(weight.values).T)
    scales, zeros = (
        None if array is None else np.ascontiguousarray(np.repeat(np.asarray(array).T, columns, axis=0)[:outputs])
        for array in (weight.scales, weight.zeros)
    )
    return host_quantized(scheme, values, scales, zeros=zeros, codebook=weight.codebook)
