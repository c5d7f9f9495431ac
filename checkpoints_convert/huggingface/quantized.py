"""Reading quantized modules: a parameter from the tensors of one module, or of a stack of experts."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from checkpoints_convert.checkpoint import check_finite, numpy_dtype
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.formats.module import FormatError, host_quantized
from checkpoints_convert.host_arrays import count_nonfinite
from checkpoints_convert.outputs import OutputsError, take_outputs
from checkpoints_convert.plan import QuantizedPlan
from checkpoints_convert.safetensors_files import NUMPY_DTYPES, SafetensorsIndex
from jaxinfer.quantization import NestedScales, QuantizedArray, check


def read_quantized(index: SafetensorsIndex, plan: QuantizedPlan, dtype: str) -> QuantizedArray | np.ndarray:
    """The parameter of a quantized module, on the host; dense ones in `dtype`.

    Raises CheckpointError, naming file and tensor, for tensors that the format does not allow, and scales that are not
    finite.
    """
    if plan.experts:
        parts = [read_quantized(index, replace(expert, experts=()), dtype) for expert in plan.experts]
        return _stacked(parts, plan, index)
    reader, placement = plan.reader, plan.placement
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
    if placement.view is not None:  # the outputs are those of several heads
        dense = weight if isinstance(weight, np.ndarray) else np.asarray(weight.dequantize())
        heads = dense.T.reshape(placement.view)
        heads = heads if placement.outputs is None else heads[:, placement.outputs.index]
        return np.ascontiguousarray(heads.swapaxes(-1, -2).astype(numpy_dtype(dtype), copy=False))
    try:
        if isinstance(weight, np.ndarray):
            weight = weight if placement.outputs is None else weight[:, placement.outputs.index]
            weight = weight if placement.transpose or weight.ndim != 2 else weight.T
            return np.ascontiguousarray(weight.astype(numpy_dtype(dtype), copy=False))
        weight = _placed(weight, plan)
        check(weight, f"module {plan.module!r}")
    except OutputsError as error:
        reason = f"module {plan.module!r} holds the parameter {'.'.join(plan.target)!r} with others in {error}"
    except FormatError as error:
        reason = f"module {plan.module!r} {error}"
    except ValueError as error:
        reason = str(error)
    else:
        return weight
    raise CheckpointError(index.path_of(plan.tensors[0]), reason)


def _placed(weight: QuantizedArray, plan: QuantizedPlan) -> QuantizedArray:
    """The parameter's part of a module [K, N], with its own outputs in their order. Can be traced."""
    if plan.placement.outputs is not None:
        weight = take_outputs(weight, plan.placement.outputs)
    return weight if plan.placement.transpose or weight.ndim != 2 else _transposed(weight)


def _stacked(
    parts: list[QuantizedArray | np.ndarray], plan: QuantizedPlan, index: SafetensorsIndex
) -> QuantizedArray | np.ndarray:
    """The stack of the experts' weights. Raises CheckpointError if they are quantized differently."""
    dense = [part for part in parts if isinstance(part, np.ndarray)]
    if len(dense) == len(parts):
        return np.stack(dense)
    weights = [part for part in parts if isinstance(part, QuantizedArray)]
    first = weights[0]
    for expert, part in zip(plan.experts, parts, strict=True):
        if not isinstance(part, QuantizedArray) or not _alike(part, first):
            raise CheckpointError(
                index.path_of(next(iter(expert.sources.values()))),
                f"module {expert.module!r} is quantized otherwise than {plan.module!r}, of the same layer",
            )

    def stack(name: str) -> np.ndarray | None:
        arrays = [getattr(weight, name) for weight in weights]
        if all(array is None for array in arrays):
            return None
        if name == "permutation":  # experts without one keep the order of the inputs
            arrays = [np.arange(first.shape[0], dtype=np.int32) if array is None else array for array in arrays]
        return np.stack([np.asarray(array) for array in arrays])

    scales = first.scales
    if isinstance(scales, NestedScales):
        parts_of: dict[str, Any] = {
            name: np.stack([np.asarray(getattr(weight.scales, name)) for weight in weights])
            for name in ("codes", "outer", "offset")
        }
        scales = replace(scales, **parts_of)
    else:
        scales = stack("scales")
    return host_quantized(
        first.scheme,
        stack("values"),
        scales,
        zeros=stack("zeros"),
        codebook=first.codebook,
        permutation=stack("permutation"),
    )


def _alike(a: QuantizedArray, b: QuantizedArray) -> bool:
    same = a.scheme == b.scheme and (a.zeros is None) == (b.zeros is None) and type(a.scales) is type(b.scales)
    if isinstance(a.scales, NestedScales) and isinstance(b.scales, NestedScales):
        same = same and a.scales.inner == b.scales.inner and np.array_equal(a.scales.table, b.scales.table)
    if a.codebook is None or b.codebook is None:
        return same and a.codebook is b.codebook
    return same and np.array_equal(a.codebook, b.codebook)


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


def _transposed(weight: QuantizedArray) -> QuantizedArray:
    """An embedding's [V, D], of the [D, V] that a reader gives; each row has a scale of its own. Can be traced."""
    if weight.permutation is not None or isinstance(weight.scales, NestedScales):
        raise FormatError("is an embedding: permuted or nested scales are not read")
    (rows, columns), (inputs, outputs) = weight.scheme.block, weight.shape
    if rows < inputs and columns > 1:
        raise FormatError(f"is an embedding: blocks of {columns} x {rows} are not read, rows are")
    scheme = replace(weight.scheme, block=(1, rows), activations=None)

    def rows_of(array: Any, count: int) -> Any:
        """The transpose with each row `count` times, in C order."""
        rows = array.T if count == 1 else array.T[np.arange(outputs) // count]
        return rows if isinstance(rows, Tracer) else np.ascontiguousarray(rows)

    values = rows_of(weight.values, 1)
    scales, zeros = (None if array is None else rows_of(array, columns) for array in (weight.scales, weight.zeros))
    return host_quantized(scheme, values, scales, zeros=zeros, codebook=weight.codebook)


def abstract_quantized(plan: QuantizedPlan, dtype: str) -> Any:
    """The result of `read_quantized` as `jax.ShapeDtypeStruct`s. Raises FormatError for an embedding as it does."""
    weight = plan.reader.form.abstract()
    if plan.placement.view is not None or isinstance(weight, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(plan.shape, numpy_dtype(dtype))
    weight = jax.eval_shape(partial(_placed, plan=plan), weight)
    if not plan.experts:
        return weight

    def stacked(path: Any, array: Any) -> jax.ShapeDtypeStruct:
        is_shared = path[-1].name in ("codebook", "table")
        return array if is_shared else jax.ShapeDtypeStruct((len(plan.experts), *array.shape), array.dtype)

    return jax.tree_util.tree_map_with_path(stacked, weight)
