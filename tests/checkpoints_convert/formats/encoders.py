"""Weights packed as other libraries do, the slow and obvious way: one Python integer for each packed row.

Every function takes a weight [N, K] and gives the tensors of a module, by suffix, with the float32 weight [N, K] that
the format's formula makes of them.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import ml_dtypes
import numpy as np

from checkpoints_convert.formats.module import Method
from jaxinfer.quantization import QuantizedArray

DTYPE_NAMES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int64": "I64", "int8": "I8",
    "uint8": "U8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32,
)  # fmt: skip
FP4 = (np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12).astype(np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
Encoded = tuple[dict[str, np.ndarray], np.ndarray]


def read(method: Method, tensors: dict[str, np.ndarray], shape: tuple[int, int], module: str = "layer"):
    """The weight that the method makes of a module, of the types and shapes that the reader says."""
    headers = {suffix: (DTYPE_NAMES[array.dtype.name], array.shape) for suffix, array in tensors.items()}
    reader = method.reader(module, shape, headers, "Linear")
    assert reader is not None
    weight = reader.read({suffix: tensors[suffix] for suffix in reader.suffixes})
    assert shapes(reader.form.abstract()) == shapes(weight)
    return weight


def shapes(weight: Any) -> Any:
    """Shapes and dtypes of a weight's arrays, but for those that depend on values."""
    if isinstance(weight, QuantizedArray):
        weight = replace(weight, zeros=None, permutation=None)
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), weight)


def dense(weight: Any) -> np.ndarray:
    """float32 [N, K] of what a reader gives."""
    weight = weight if isinstance(weight, np.ndarray) else np.asarray(weight.dequantize())
    return np.ascontiguousarray(weight.T)


def words(values: Sequence[int], bits: int, per_word: int | None = None) -> list[int]:
    """Unsigned values in 32-bit words, lowest bits first: one long number, or `per_word` values in each."""
    if per_word is not None:
        parts = [values[first : first + per_word] for first in range(0, len(values), per_word)]
        return [sum(int(value) << (bits * place) for place, value in enumerate(part)) for part in parts]
    number = sum(int(value) << (bits * place) for place, value in enumerate(values))
    return [(number >> (32 * place)) & 0xFFFFFFFF for place in range(-(-len(values) * bits // 32))]


def pack_rows(codes: np.ndarray, bits: int, per_word: int | None = None) -> np.ndarray:
    """int32 [rows, words] of codes [rows, values]."""
    return np.array([words(row.tolist(), bits, per_word) for row in codes], np.uint32).view(np.int32)


def groups_of(inputs: int, group: int) -> np.ndarray:
    return np.arange(inputs) // (inputs if group == -1 else group)


def quantize(weight: np.ndarray, g_idx: np.ndarray, bits: int, symmetric: bool, dtype: Any = np.float16):
    """Codes [N, K] in [0, 2^bits), scales and zeros [N, groups], by the range of every group."""
    top, groups = 2**bits - 1, int(g_idx.max()) + 1
    scales, zeros = np.empty((len(weight), groups), dtype), np.empty((len(weight), groups), np.int64)
    for group in range(groups):
        part = weight[:, g_idx == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(np.abs(low), high)
            low = -high
        scales[:, group] = (high - low) / top
        zeros[:, group] = (top + 1) // 2 if symmetric else np.clip(np.round(-low / ((high - low) / top)), 0, top)
    spread = scales[:, g_idx].astype(np.float32)
    codes = np.clip(np.round(weight / spread) + zeros[:, g_idx], 0, top).astype(np.int64)
    return codes, scales, zeros


def affine(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, g_idx: np.ndarray) -> np.ndarray:
    """scale * (code - zero) in float32."""
    return scales[:, g_idx].astype(np.float32) * (codes - zeros[:, g_idx]).astype(np.float32)


def gptq(
    weight: np.ndarray,
    *,
    bits: int = 4,
    group: int = 32,
    version: int = 1,
    symmetric: bool = True,
    g_idx: np.ndarray | None = None,
    zeros: np.ndarray | None = None,
) -> Encoded:
    order = groups_of(weight.shape[1], group) if g_idx is None else g_idx
    codes, scales, found = quantize(weight, order, bits, symmetric)
    zeros = found if zeros is None else zeros
    stored = (zeros - (1 if version == 1 else 0)) % 2**bits
    tensors = {
        "qweight": np.ascontiguousarray(pack_rows(codes, bits).T),
        "qzeros": pack_rows(stored.T, bits),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": order.astype(np.int32),
    }
    return tensors, affine(codes, scales, zeros, order)


def awq(weight: np.ndarray, *, group: int = 32) -> Encoded:
    order = groups_of(weight.shape[1], group)
    codes, scales, zeros = quantize(weight, order, 4, False)
    column = [8 * (n // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[n % 8] for n in range(len(weight))]
    tensors = {
        "qweight": pack_rows(codes.T[:, column], 4),
        "qzeros": pack_rows(zeros.T[:, column], 4),
        "scales": np.ascontiguousarray(scales.T),
    }
    return tensors, affine(codes, scales, zeros, order)


def bitsandbytes4(
    weight: np.ndarray, *, kind: str = "nf4", nested: bool = False, size: int = 64, inner: int = 16
) -> Encoded:
    table = NF4 if kind == "nf4" else FP4
    flat = np.pad(weight.reshape(-1), (0, -weight.size % size)).reshape(-1, size)
    absmax = np.abs(flat).max(1).astype(np.float32)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {"weight.absmax": absmax, "weight.quant_map": table}
    if nested:
        offset = np.float32(absmax.mean())
        outer = np.pad(absmax - offset, (0, -len(absmax) % inner)).reshape(-1, inner)
        maxima = np.abs(outer).max(1).astype(np.float32)
        levels = np.linspace(-1, 1, 256, dtype=np.float32)
        each = np.repeat(maxima, inner)[: len(absmax)]
        chosen = np.abs((absmax - offset)[:, None] / each[:, None] - levels).argmin(1).astype(np.uint8)
        absmax = levels[chosen] * each + offset
        tensors |= {"weight.absmax": chosen, "weight.nested_absmax": maxima, "weight.nested_quant_map": levels}
        state |= {"nested_blocksize": inner, "nested_dtype": "float32", "nested_offset": float(offset)}
    codes = np.abs(flat[:, :, None] / absmax[:, None, None] - table).argmin(-1).reshape(-1)[: weight.size]
    padded = np.pad(codes, (0, weight.size % 2))
    tensors["weight"] = (padded[0::2] << 4 | padded[1::2]).astype(np.uint8)[:, None]
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors, (table[codes] * np.repeat(absmax, size)[: weight.size]).reshape(weight.shape)


def bitsandbytes8(weight: np.ndarray) -> Encoded:
    rows = np.abs(weight).max(1).astype(np.float32)
    codes = np.round(weight * 127 / rows[:, None]).astype(np.int8)
    tensors = {"weight": codes, "SCB": rows, "weight_format": np.array(0, np.uint8)}
    return tensors, codes.astype(np.float32) * (rows / np.float32(127))[:, None]


def packed(
    weight: np.ndarray,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    is_old: bool = False,
    g_idx: np.ndarray | None = None,
    dtype: Any = np.float32,
) -> Encoded:
    """compressed-tensors pack-quantized, or as it packed 3, 5, 6 and 7 bits until 2025."""
    order = groups_of(weight.shape[1], group) if g_idx is None else g_idx
    codes, scales, zeros = quantize(weight, order, bits, symmetric, dtype)
    per_word = 32 // bits if is_old else None
    tensors = {
        "weight_packed": pack_rows(codes, bits, per_word),
        "weight_scale": scales,
        "weight_shape": np.array(weight.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(pack_rows(zeros.T, bits, per_word).T)
    if g_idx is not None:
        tensors["weight_g_idx"] = g_idx.astype(np.int32)
    return tensors, affine(codes, scales, zeros, order)


def int8(weight: np.ndarray, *, per_tensor: bool = False) -> Encoded:
    """compressed-tensors int-quantized."""
    scale = (np.abs(weight).max(None if per_tensor else 1, keepdims=True) / 127).astype(np.float32)
    codes = np.round(weight / scale).astype(np.int8)
    stored = scale.reshape(1) if per_tensor else scale
    return {"weight": codes, "weight_scale": stored}, codes.astype(np.float32) * scale


def float8(weight: np.ndarray, *, block: tuple[int, int] | None = None, suffix: str = "weight_scale") -> Encoded:
    """float8_e4m3fn with a scale for each block of (outputs, inputs); None is one for all."""
    outputs, inputs = weight.shape
    bn, bk = block or weight.shape
    scale = np.empty((-(-outputs // bn), -(-inputs // bk)), np.float32)
    for n in range(scale.shape[0]):
        for k in range(scale.shape[1]):
            scale[n, k] = np.abs(weight[n * bn : (n + 1) * bn, k * bk : (k + 1) * bk]).max() / 448
    spread = np.repeat(np.repeat(scale, bn, 0), bk, 1)[:outputs, :inputs]
    codes = np.clip(weight / spread, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    stored = scale.reshape(1) if block is None else scale
    return {"weight": codes, suffix: stored}, codes.astype(np.float32) * spread


def mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes [N, K / 2], exponents [N, K / 32] and the float32 weight."""
    outputs, inputs = weight.shape
    parts = weight.reshape(outputs, inputs // 32, 32)
    exponents = np.clip(np.floor(np.log2(np.abs(parts).max(-1))) - 2 + 127, 0, 254).astype(np.uint8)
    scale = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)[..., None]
    codes = np.abs(parts[..., None] / scale[..., None] - E2M1).argmin(-1).reshape(outputs, inputs)
    packed_bytes = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return packed_bytes, exponents, (E2M1[codes].reshape(parts.shape) * scale).reshape(weight.shape)


def nvfp4(weight: np.ndarray, *, is_modelopt: bool = False) -> Encoded:
    """4-bit floats in groups of 16 with scales in FP8 and one of the tensor, as ModelOpt or compressed-tensors."""
    outputs, inputs = weight.shape
    parts = weight.reshape(outputs, inputs // 16, 16)
    whole = np.float32(np.abs(weight).max() / (6 * 448))
    scales = (np.abs(parts).max(-1) / 6 / whole).astype(ml_dtypes.float8_e4m3fn)
    inverse = np.float32(1) / whole
    spread = scales.astype(np.float32) * whole if is_modelopt else scales.astype(np.float32) / inverse
    codes = np.abs(parts[..., None] / np.maximum(spread, 1e-30)[..., None, None] - E2M1).argmin(-1)
    flat = codes.reshape(outputs, inputs)
    packed_bytes = (flat[:, 0::2] | flat[:, 1::2] << 4).astype(np.uint8)
    tensors = {"weight_scale": scales}
    if is_modelopt:
        tensors |= {"weight": packed_bytes, "weight_scale_2": whole, "input_scale": np.float32(0.5)}
    else:
        tensors |= {"weight_packed": packed_bytes, "weight_global_scale": inverse.reshape(1)}
    arrays = {suffix: np.asarray(array) for suffix, array in tensors.items()}
    return arrays, (E2M1[codes] * spread[..., None]).reshape(weight.shape)
