"""Packs weights for the kernels of CPUs, and unpacks them: both without loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from cpu_kernels import kernels
from cpu_kernels.packed_matmul.forms import CODES, LANES, OUTER, STEP, PackedArrays, PackedForm
from pallas_kernels.platform import num_cores

_FLOATS = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
ALIGNMENT = 64  # of buffers that JAX does not copy, bytes
_EMPTY = np.zeros(0, np.int8)
_SHARED_SIZE = 2**22  # codes from which on threads share the work


def why_not(values: Any, block: tuple[int, int]) -> str | None:
    """The reason why a weight [K, N] (a transposed one's arrays transposed) cannot be packed, or None."""
    inputs, outputs = values.shape
    if 0 in (inputs, outputs):
        return "the weight is empty"
    if block[1] != 1 and not (block[1] >= outputs and block[0] >= inputs):
        return f"{block[1]} outputs share a scale"
    if block[0] < inputs and block[0] % STEP:
        return f"groups of {block[0]} inputs are no multiple of {STEP}"
    return None


def pack(
    values: np.ndarray,
    scales: np.ndarray | None = None,
    zeros: np.ndarray | None = None,
    codebook: np.ndarray | None = None,
    minima: np.ndarray | None = None,
    *,
    block: tuple[int, int],
    activations: str | None = None,
) -> tuple[PackedForm, PackedArrays]:
    """Packs a weight.

    Args:
      values: [K, N]: int4, int8, float8, or 16- and 32-bit floats, which have no scales; a view of a transposed array
        costs no copy. The others are as in `pallas_kernels.quantized_matmul.dequantize`.
      block: (inputs, outputs) that share a scale.
      activations: "int8" for products with activations rounded to 8 bits.

    Raises ValueError with the reason where `why_not` has one.
    """
    if (reason := why_not(values, block)) is not None:
        raise ValueError(f"cannot pack: {reason}")
    inputs, outputs = values.shape
    group = block[0] if block[0] < inputs else -(-inputs // STEP) * STEP
    is_nibble = values.dtype == ml_dtypes.int4
    if is_nibble:
        kind = "nibbles" if codebook is None else "codebook"
    elif values.dtype == np.int8:
        kind = "int8" if activations is None else "quads"
    else:
        kind, activations = values.dtype.name, None
    if kind == "codebook":
        activations = None
    codes = _pack_codes(values, kind)
    unit, offset_kind, offsets, outer_offsets = 0, "none", _EMPTY, _EMPTY
    scale_kind, packed_scales, outer_scales = "none", _EMPTY, _EMPTY
    if scales is not None:
        numbers = _panels(np.broadcast_to(scales, (-(-inputs // group), outputs)))
        scale_kind, packed_scales, outer_scales = _pack_numbers(numbers, group)
    if minima is not None:
        minima = _panels(np.broadcast_to(minima, (-(-inputs // group), outputs)))
        offset_kind, offsets, outer_offsets = _pack_numbers(minima, group)
    elif zeros is not None:
        own = -zeros.astype(np.int16) - (8 if is_nibble else 0)
        own = _panels(np.broadcast_to(own, (-(-inputs // group), outputs)))
        if own.min() < -128 or own.max() > 127:
            offset_kind, offsets = (
                "float32",
                own.astype(np.float32) * _values_of(scale_kind, packed_scales, outer_scales, group),
            )
        else:
            offset_kind, offsets = "units", own.astype(np.int8)
    elif kind == "nibbles":
        offset_kind, unit = "unit", -8
    form = PackedForm(inputs, outputs, group, kind, scale_kind, offset_kind, unit, activations)
    table = _EMPTY if codebook is None else np.ascontiguousarray(codebook, np.float32)
    return form, PackedArrays(codes, packed_scales, outer_scales, offsets, outer_offsets, table)


def _pack_codes(values: np.ndarray, kind: str) -> np.ndarray:
    inputs, outputs = values.shape
    panels, padded = -(-outputs // LANES), -(-inputs // STEP) * STEP
    shape = {"nibbles": (padded // 8, LANES), "codebook": (padded // 8, LANES), "quads": (padded // 4, LANES, 4)}
    packed = _aligned_zeros((panels, *shape.get(kind, (padded, LANES))), CODES[kind])
    name = {"nibbles": "pack_words", "codebook": "pack_words", "quads": "pack_quads"}.get(kind)
    _copy_to_panels(name or _READERS[values.dtype.itemsize], values, packed, padded)
    return packed


_READERS = {1: "pack_bytes", 2: "pack_halves", 4: "pack_ints"}


def _copy_to_panels(name: str, values: np.ndarray, packed: np.ndarray, padded: int) -> None:
    """Runs a kernel over values [inputs, outputs], of which panels have `padded` inputs."""
    inputs, outputs = values.shape
    panels, run = len(packed), _kernel(name)
    arguments = _address(values), _address(packed), inputs, padded, outputs, *values.strides
    if packed.size < _SHARED_SIZE:
        run(*arguments, 0, panels)
        return
    with ThreadPoolExecutor(num_cores()) as executor:
        bounds = [panels * part // num_cores() for part in range(num_cores() + 1)]
        list(executor.map(lambda first, last: run(*arguments, first, last), bounds, bounds[1:]))


def _kernel(name: str) -> Callable[..., int]:
    def compile_kernel() -> kernels.Compiled:
        from cpu_kernels.packed_matmul.packing import KERNELS

        return KERNELS[name]()

    return kernels.function(name, 9, compile_kernel)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that JAX on a CPU uses in place."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.zeros(size + ALIGNMENT, np.uint8)
    first = -buffer.ctypes.data % ALIGNMENT
    return buffer[first : first + size].view(dtype).reshape(shape)


def _panels(numbers: np.ndarray) -> np.ndarray:
    """[panels, groups, 64] of [groups, outputs]."""
    groups, outputs = numbers.shape
    panels = -(-outputs // LANES)
    packed = _aligned_zeros((panels, groups, LANES), numbers.dtype)
    _copy_to_panels(_READERS[numbers.dtype.itemsize], numbers, packed, groups)
    return packed


def _pack_numbers(numbers: np.ndarray, group: int) -> tuple[str, np.ndarray, np.ndarray]:
    """The kind of scales or minima, and their arrays: of the smallest kinds, one that holds them all exactly."""
    numbers = numbers.astype(np.float32)
    if (bits := _exponents(numbers)) is not None:
        return "exponents", bits, _EMPTY
    is_factored = 4 * group <= OUTER and OUTER % group == 0
    if is_factored and (factors := _factored(numbers, group)) is not None:
        return "factored", *factors
    for name in ("float16", "bfloat16"):
        with np.errstate(over="ignore"):
            rounded = numbers.astype(_FLOATS[name])
        if (rounded.astype(np.float32) == numbers).all():
            return name, rounded.view(np.uint16), _EMPTY
    return "float32", numbers, _EMPTY


def _exponents(numbers: np.ndarray) -> np.ndarray | None:
    """E8M0 of normal powers of two and of 0; None of other numbers."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    if any((part & 0x807FFFFF).any() for part in (bits[:1], bits)):  # most end at the first panel
        return None
    return (bits >> 23).astype(np.uint8)


def _factored(numbers: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray] | None:
    """int8 [panels, groups, 64] and the bits of float16 [panels, ceil(groups * group / 256), 64], whose products are
    the numbers; None where there are none."""
    panels, groups, _ = numbers.shape
    numbers = np.ascontiguousarray(numbers)
    inner = np.zeros(numbers.shape, np.int8)
    outer = np.zeros((panels, -(-groups * group // OUTER), LANES), np.uint16)
    arguments = _address(numbers), panels, groups, group, _address(outer), _address(inner)
    return (inner, outer) if _kernel("factor")(*arguments, 0, 0, 0) else None


def _values_of(kind: str, numbers: Any, outer: Any, group: int, scales: Any = None, unit: int = 0) -> Any:
    """float32 [..., groups, 64] of packed numbers, by NumPy or JAX."""
    xp = jnp if isinstance(numbers, jax.Array) else np
    if kind == "factored":
        per_outer = OUTER // group
        spread = xp.repeat(_as_float(outer, "float16", xp), per_outer, axis=-2)[..., : numbers.shape[-2], :]
        return numbers.astype(np.float32) * spread
    if kind == "exponents":
        bits = numbers.astype(np.uint32) << 23
        return jax.lax.bitcast_convert_type(bits, jnp.float32) if xp is jnp else bits.view(np.float32)
    if kind == "units":
        return numbers.astype(np.float32) * scales
    if kind == "unit":
        return np.float32(unit) * scales
    return _as_float(numbers, kind, xp)


def _as_float(bits: Any, dtype: str, xp: Any) -> Any:
    """float32 of the bits of a floating-point dtype."""
    if xp is np:
        return bits.view(_FLOATS[dtype]).astype(np.float32)
    return jax.lax.bitcast_convert_type(bits, _FLOATS[dtype]).astype(jnp.float32)


def codes_of(form: PackedForm, codes: Any, codebook: Any) -> Any:
    """float32 codes [..., padded inputs, 64] of packed codes, by JAX; leading axes may be any."""
    if form.codes in ("nibbles", "codebook"):
        shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
        numbers = (codes[..., None, :] >> shifts & np.uint32(15)).astype(jnp.int32)
        numbers = numbers.reshape(*codes.shape[:-2], -1, codes.shape[-1])
        return numbers.astype(jnp.float32) if form.codes == "nibbles" else codebook[numbers]
    if form.codes == "quads":
        return jnp.swapaxes(codes, -1, -2).reshape(*codes.shape[:-3], -1, codes.shape[-2]).astype(jnp.float32)
    return codes.astype(jnp.float32) if form.codes == "int8" else _as_float(codes, form.codes, jnp)


def numbers_of(form: PackedForm, arrays: PackedArrays) -> tuple[Any, Any]:
    """float32 scales and offsets [..., groups, 64], or None where there are none."""
    scales = offsets = None
    if form.scales != "none":
        scales = _values_of(form.scales, arrays.scales, arrays.outer_scales, form.group)
    if form.offsets != "none":
        offsets = _values_of(form.offsets, arrays.offsets, arrays.outer_offsets, form.group, scales, form.unit)
    return scales, offsets


def unpack(form: PackedForm, arrays: PackedArrays) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """The values [..., K, N] that were packed, and float32 scales and offsets [..., groups, N], or None where there are
    none, by NumPy; leading axes may be any."""
    arrays = PackedArrays(*map(np.asarray, arrays))
    codes = arrays.codes
    if form.codes in ("nibbles", "codebook"):
        shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
        codes = (codes[..., None, :] >> shifts).astype(np.uint8) & np.uint8(15)
        codes = ((codes ^ 8).reshape(*arrays.codes.shape[:-2], -1, LANES)).view(ml_dtypes.int4)
    elif form.codes == "quads":
        codes = np.swapaxes(codes, -1, -2).reshape(*codes.shape[:-3], -1, LANES)
    elif form.codes != "int8":
        codes = codes.view(_FLOATS[form.codes])
    scales, offsets = numbers_of(form, arrays)

    def by_output(numbers: np.ndarray | None, length: int) -> np.ndarray | None:
        if numbers is None:
            return None
        numbers = np.moveaxis(numbers, -3, -2)
        return numbers.reshape(*numbers.shape[:-2], -1)[..., :length, : form.outputs]

    values = by_output(codes, form.inputs)
    assert values is not None
    return values, by_output(scales, form.groups), by_output(offsets, form.groups)


def dequantize(form: PackedForm, arrays: PackedArrays) -> jax.Array:
    """float32 [..., K, N], by JAX; leading axes may be any."""
    arrays = PackedArrays(*map(jnp.asarray, arrays))
    weight = _dequantized(form, arrays)
    weight = jnp.moveaxis(weight, -3, -2)
    return weight.reshape(*weight.shape[:-2], -1)[..., : form.inputs, : form.outputs]


def _dequantized(form: PackedForm, arrays: PackedArrays) -> jax.Array:
    """float32 [..., padded inputs, 64]."""
    weight = codes_of(form, arrays.codes, arrays.codebook)
    scales, offsets = numbers_of(form, arrays)
    if scales is None:
        return weight
    weight = weight * _spread(scales, form, weight.shape[-2])
    return weight if offsets is None else weight + _spread(offsets, form, weight.shape[-2])


def _spread(numbers: jax.Array, form: PackedForm, length: int) -> jax.Array:
    return jnp.repeat(numbers, form.group, axis=-2)[..., :length, :]


def take_outputs(form: PackedForm, arrays: PackedArrays, outputs: jax.Array) -> jax.Array:
    """float32 [..., K]: all inputs of the outputs at int32 indices [...], as rows of an embedding."""
    flat = outputs.reshape(-1)
    panel, lane = flat // LANES, flat % LANES

    def take(numbers: jax.Array) -> jax.Array:
        if numbers.size == 0:
            return numbers
        if numbers.ndim == 4:
            return numbers[panel, :, lane][:, :, None]
        return numbers[panel, :, lane][..., None]

    own = PackedArrays._make([*map(take, arrays[:-1]), arrays.codebook])
    return _dequantized(form, own)[:, : form.inputs, 0].reshape(*outputs.shape, form.inputs)
