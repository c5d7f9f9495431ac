"""The tensors of one module of a compressed-tensors checkpoint.

    pack-quantized  weight_packed int32 [N, words], value + 2^(bits - 1) packed along the inputs; weight_scale;
                    weight_shape int64 [2]; weight_zero_point int32 packed along the outputs; weight_g_idx
    int-quantized, float-quantized, naive-quantized
                    weight int8 or float8_e4m3fn [N, K], weight_scale, weight_zero_point
    mxfp4-pack-quantized  weight_packed uint8 [N, K / 2], weight_scale uint8 [N, K / 32]

W = (value - zero) * scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from checkpoints_convert.formats.bits import num_words, signed, transposed, unpack
from checkpoints_convert.formats.module import (
    FLOATS,
    FormatError,
    ModuleReader,
    Tensors,
    has_shape,
    host_quantized,
    order_of_groups,
)
from checkpoints_convert.formats.mxfp4 import BLOCK, mxfp4_weight
from checkpoints_convert.safetensors_index import TensorHeader
from jaxinfer.quantization import QuantizedArray, Scheme

_ACTIVATION_TENSORS = ("input_scale", "input_zero_point", "input_global_scale")


@dataclass(frozen=True)
class Weights:
    """block: (outputs, inputs), of the strategy "block"."""

    bits: int
    kind: Literal["int", "float"]
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None


@dataclass(frozen=True)
class Activations:
    bits: int
    kind: str
    strategy: str | None
    is_dynamic: bool
    symmetric: bool = True


@dataclass(frozen=True)
class _Layout:
    """shape [N, K]; scales: their stored shape. per_word: values of a word, None for the dense stream."""

    form: str
    weights: Weights
    scheme: Scheme
    shape: tuple[int, ...]
    scales: tuple[int, int]
    per_word: int | None = None


def module_reader(
    form: str,
    weights: Weights,
    activations: Activations | None,
    shape: tuple[int, ...],
    headers: Mapping[str, TensorHeader],
) -> ModuleReader:
    """The reader of a quantized module stored in the format `form`. Raises FormatError as `Method.reader` does."""
    if form == "mxfp4-pack-quantized":
        return _mxfp4(weights, shape, headers)
    outputs, inputs = shape
    block = _block(weights, outputs, inputs)
    scales = (-(-outputs // block[1]), -(-inputs // block[0]))
    quantized, notes = _quantized_activations(weights, activations)
    layout = _Layout(form, weights, Scheme(weights.kind, weights.bits, block, quantized), shape, scales)
    also = {"tensor": ((), (1,)), "channel": (scales[:1],)}.get(weights.strategy, ())
    has_shape(headers, "weight_scale", FLOATS, scales, *also)
    if form == "pack-quantized":
        layout, suffixes = _packed(layout, headers)
    else:
        suffixes = _plain(layout, headers)
    static = tuple(suffix for suffix in _ACTIVATION_TENSORS if suffix in headers)
    return ModuleReader((*suffixes, "weight_scale", *static), partial(_read, layout), notes=notes)


def _block(weights: Weights, outputs: int, inputs: int) -> tuple[int, int]:
    """Inputs and outputs that share a scale."""
    if weights.block is not None:
        return weights.block[1], weights.block[0]
    if weights.strategy == "tensor":
        return inputs, outputs
    return min(weights.group_size or inputs, inputs), 1


def _packed(layout: _Layout, headers: Mapping[str, TensorHeader]) -> tuple[_Layout, tuple[str, ...]]:
    if layout.weights.kind != "int":
        raise FormatError(
            f"pack-quantized holds integers, the configuration says {layout.weights.kind}", "weight_packed"
        )
    (outputs, inputs), bits = layout.shape, layout.weights.bits
    per_word = 32 // bits
    # Until 2025 a word held whole values, and left bits over for 3, 5, 6 and 7.
    which = has_shape(
        headers, "weight_packed", ["I32"], (outputs, num_words(inputs, bits)), (outputs, -(-inputs // per_word))
    )
    layout = _Layout(**{**layout.__dict__, "per_word": per_word if which == 1 else None})
    has_shape(headers, "weight_shape", ["I64", "I32"], (2,))
    suffixes = ["weight_packed", "weight_shape"]
    if not layout.weights.symmetric:
        rows = num_words(outputs, bits) if which == 0 else -(-outputs // per_word)
        if headers.get("weight_zero_point", ("",))[0] == "I8":
            has_shape(headers, "weight_zero_point", ["I8"], layout.scales)
        else:
            has_shape(headers, "weight_zero_point", ["I32"], (rows, layout.scales[1]))
    if "weight_zero_point" in headers:
        suffixes.append("weight_zero_point")
    if "weight_g_idx" in headers:
        has_shape(headers, "weight_g_idx", ["I32", "I64"], (inputs,))
        suffixes.append("weight_g_idx")
    return layout, tuple(suffixes)


def _plain(layout: _Layout, headers: Mapping[str, TensorHeader]) -> tuple[str, ...]:
    weights = layout.weights
    wanted = {"int-quantized": "int", "float-quantized": "float"}.get(layout.form, weights.kind)
    if weights.kind != wanted or (weights.kind == "float" and weights.bits != 8):
        raise FormatError(f"{layout.form} does not hold {weights.bits}-bit {weights.kind} weights", "weight")
    has_shape(headers, "weight", ["I8" if weights.kind == "int" else "F8_E4M3"], layout.shape)
    if "weight_zero_point" not in headers:
        if not weights.symmetric:
            raise FormatError("is missing, and symmetric is false", "weight_zero_point")
        return ("weight",)
    shapes = (layout.scales, layout.scales[:1], ())
    has_shape(headers, "weight_zero_point", ["I8", "F8_E4M3"] if weights.symmetric else ["I8"], *shapes)
    return ("weight", "weight_zero_point")


def _quantized_activations(
    weights: Weights, activations: Activations | None
) -> tuple[Literal["int8", "fp8"] | None, tuple[str, ...]]:
    """What a `Scheme` says of the activations, and what it cannot say. Static ones are quantized per token instead."""
    if activations is None:
        return None, ()
    notes = () if activations.is_dynamic else ("static scales of activations are not applied: each token has its own",)
    if (weights.kind, activations.kind, activations.bits, activations.symmetric) == ("int", "int", 8, True):
        return "int8", notes
    is_fp8 = (weights.kind, activations.kind, activations.bits, weights.bits) == ("float", "float", 8, 8)
    if is_fp8 and activations.symmetric and activations.strategy in ("token", "tensor"):
        return "fp8", notes
    symmetric = "" if activations.symmetric else "asymmetric "
    kind = f"{symmetric}{activations.bits}-bit {activations.kind} ({activations.strategy})"
    return None, (f"activations declared as {kind} stay floating-point with {weights.bits}-bit {weights.kind} weights",)


def _read(layout: _Layout, tensors: Tensors) -> QuantizedArray:
    weights, (outputs, inputs) = layout.weights, layout.shape
    scales = np.ascontiguousarray(tensors["weight_scale"].reshape(layout.scales).T)
    order = None
    if layout.form == "pack-quantized":
        if (says := tensors["weight_shape"].tolist()) != [outputs, inputs]:
            raise FormatError(f"says {says}, config.json makes it {[outputs, inputs]}", "weight_shape")
        codes = _unpacked(tensors["weight_packed"], layout, inputs, axis=1).T
        group = tensors.get("weight_g_idx")
        if group is not None and layout.scheme.block[0] < inputs and not (group == -1).all():
            order = order_of_groups(group, layout.scheme.block[0], "weight_g_idx")
        values = signed(np.ascontiguousarray(codes) if order is None else codes[order], weights.bits)
    else:
        values = _narrowed(transposed(tensors["weight"]), weights)
    return host_quantized(layout.scheme, values, scales, zeros=_zeros(layout, tensors), permutation=order)


def _unpacked(words: np.ndarray, layout: _Layout, count: int, *, axis: int) -> np.ndarray:
    """The dense stream, or the old one: each word by itself."""
    bits, per_word = layout.weights.bits, layout.per_word
    if per_word is None or 32 % bits == 0:
        return unpack(words, bits, count, axis=axis)
    words = np.moveaxis(words.view(np.uint32), axis, 0)
    shifts = (np.arange(per_word, dtype=np.uint32) * np.uint32(bits)).reshape(-1, *[1] * (words.ndim - 1))
    codes = ((words[:, None] >> shifts) & np.uint32(2**bits - 1)).astype(np.uint8)
    return np.moveaxis(codes.reshape(-1, *words.shape[1:])[:count], 0, axis)


def _narrowed(values: np.ndarray, weights: Weights) -> np.ndarray:
    if weights.kind != "int" or weights.bits == 8:
        return values
    half = 2 ** (weights.bits - 1)
    if bad := int(((values < -half) | (values >= half)).sum()):
        raise FormatError(f"{bad} of {values.size} values do not fit {weights.bits} bits", "weight")
    return signed((values + np.int8(half)).view(np.uint8), weights.bits)


def _zeros(layout: _Layout, tensors: Tensors) -> np.ndarray | None:
    stored = tensors.get("weight_zero_point")
    if stored is None:
        return None
    if stored.dtype == np.int32:
        bits = layout.weights.bits
        codes = _unpacked(stored, layout, layout.scales[0], axis=0)
        stored = (codes - np.uint8(2 ** (bits - 1))).view(np.int8)
    if layout.weights.symmetric:
        if stored.astype(np.float32).any():
            raise FormatError("is not zero, and symmetric is true", "weight_zero_point")
        return None
    return np.ascontiguousarray(stored.reshape(layout.scales).T)


def _mxfp4(weights: Weights, shape: tuple[int, ...], headers: Mapping[str, TensorHeader]) -> ModuleReader:
    outputs, inputs = shape
    if (weights.bits, weights.kind, weights.group_size) != (4, "float", BLOCK) or inputs % BLOCK:
        raise FormatError(f"mxfp4-pack-quantized holds 4-bit floats in groups of {BLOCK}", "weight_packed")
    has_shape(headers, "weight_packed", ["U8"], (outputs, inputs // 2))
    has_shape(headers, "weight_scale", ["U8", "F8_E8M0"], (outputs, inputs // BLOCK))
    return ModuleReader(("weight_packed", "weight_scale"), _read_mxfp4)


def _read_mxfp4(tensors: Tensors) -> QuantizedArray:
    try:
        return mxfp4_weight(tensors["weight_packed"], tensors["weight_scale"])
    except FormatError as error:
        raise FormatError(str(error), "weight_scale") from None
