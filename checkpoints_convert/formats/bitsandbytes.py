"""bitsandbytes checkpoints: NF4 and FP4 (Dettmers et al. 2023, QLoRA) and int8 (Dettmers et al. 2022, LLM.int8()).

4 bits: `weight` holds two codes a byte, the first in the high nibble, of [N, K] in C order; blocks of 64 values, which
run on from row to row, share an absmax. `weight.absmax` is float32, or uint8 beside `weight.nested_absmax` and
`weight.nested_quant_map`; `weight.quant_state.bitsandbytes__nf4` is JSON. W = quant_map[code] * absmax[block].

int8: `weight` int8 [N, K] and `SCB` float32 [N]; W = weight * (SCB / 127). Columns with large activations, which
bitsandbytes multiplies in float16, have the same weights and are not treated apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import parse_json
from checkpoints_convert.formats.module import (
    DenseModule,
    FormatError,
    Headers,
    Method,
    ModuleReader,
    Tensors,
    WeightForm,
    has_shape,
    host_quantized,
    is_named,
    names_list,
    transposed,
)
from checkpoints_convert.safetensors_files import DTYPE_BITS, TensorHeader
from jaxinfer.quantization import NestedScales, QuantizedArray, Scheme

_STATE = "weight.quant_state."
_KINDS = ("bitsandbytes__nf4", "bitsandbytes__fp4")
_STORAGE = ("U8", "BF16", "F16", "F32")
# What Transformers quantizes with; blocks of nested absmax are of bitsandbytes.
_USUAL_BLOCK, _USUAL_NESTED = 64, 256
_BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class BitsAndBytes(Method):
    """Tensors decide which modules are quantized, since declared exceptions are incomplete; the fields are
    for a configuration without tensors. bits: 4, 8, or None if not declared. quant_type: "nf4" or "fp4"."""

    bits: int | None = None
    is_nested: bool = False
    quant_type: str = "fp4"
    excluded: tuple[str, ...] = ()
    name: str = "bitsandbytes"

    def reader(self, module: str, shape: tuple[int, ...], headers: Headers, kind: str) -> ModuleReader | None:
        states = [suffix for suffix in headers if suffix.startswith(_STATE)]
        if states:
            if len(states) > 1 or states[0].removeprefix(_STATE) not in _KINDS:
                raise FormatError(f"is not one of {', '.join(_KINDS)}, alone", states[-1])
            return _four_bit(states[0], shape, headers)
        for suffix in ("weight_quant_state", "weight_scb"):
            if suffix in headers:
                raise FormatError("is GPTQModel's naming of bitsandbytes tensors, which is not supported", suffix)
        if "SCB" in headers:
            return _eight_bit(shape, headers)
        if headers.get("weight", ("F32",))[0] in ("U8", "I8"):
            raise FormatError(f"is stored as {headers['weight'][0]} with neither a quant_state nor SCB", "weight")
        return None

    def stored(self, module: DenseModule) -> dict[str, TensorHeader] | None:
        if self.bits is None:
            raise FormatError("has neither load_in_4bit nor load_in_8bit")
        if module.role != "linear" or is_named(module.name, self.excluded):
            return None
        outputs, inputs = module.shape
        if self.bits == 8:
            return {"weight": ("I8", module.shape), "SCB": ("F32", (outputs,)), "weight_format": ("U8", ())}
        num_blocks = -(-outputs * inputs // _USUAL_BLOCK)
        headers: dict[str, TensorHeader] = {
            "weight": ("U8", (-(-outputs * inputs // 2), 1)),
            "weight.quant_map": ("F32", (16,)),
            f"{_STATE}bitsandbytes__{self.quant_type}": ("U8", (1,)),
        }
        if not self.is_nested:
            return {**headers, "weight.absmax": ("F32", (num_blocks,))}
        return {
            **headers,
            "weight.absmax": ("U8", (num_blocks,)),
            "weight.nested_absmax": ("F32", (-(-num_blocks // _USUAL_NESTED),)),
            "weight.nested_quant_map": ("F32", (256,)),
        }


def bitsandbytes(data: Mapping[str, Any]) -> BitsAndBytes:
    """The method a quantization_config declares."""
    flags = [any(data.get(f"{prefix}load_in_{bits}bit") for prefix in ("", "_")) for bits in (4, 8)]
    return BitsAndBytes(
        bits=4 if flags[0] else 8 if flags[1] else None,
        is_nested=bool(data.get("bnb_4bit_use_double_quant")),
        quant_type="nf4" if data.get("bnb_4bit_quant_type") == "nf4" else "fp4",
        excluded=names_list("llm_int8_skip_modules", data.get("llm_int8_skip_modules")),
    )


def _four_bit(state: str, shape: tuple[int, ...], headers: Headers) -> ModuleReader:
    outputs, inputs = shape
    num_bytes = -(-outputs * inputs // 2)
    dtype = headers["weight"][0] if "weight" in headers else "U8"
    num_items = -(-num_bytes * 8 // DTYPE_BITS.get(dtype, 8))
    has_shape(headers, "weight", _STORAGE, (num_items, 1), (1, num_items))
    has_shape(headers, "weight.quant_map", ["F32"], (16,))
    if state not in headers or headers[state][0] != "U8" or len(headers[state][1]) != 1:
        raise FormatError("is not a list of bytes", state)
    absmax = headers.get("weight.absmax", ("", ()))
    if len(absmax[1]) != 1:
        raise FormatError("is missing or not a list", "weight.absmax")
    num_blocks = absmax[1][0]
    suffixes = ["weight", "weight.absmax", "weight.quant_map", state]
    if "weight.nested_absmax" in headers:
        has_shape(headers, "weight.absmax", ["U8"], (num_blocks,))
        has_shape(headers, "weight.nested_quant_map", ["F32"], (256,))
        if headers["weight.nested_absmax"][0] != "F32" or len(headers["weight.nested_absmax"][1]) != 1:
            raise FormatError("is not a list of F32", "weight.nested_absmax")
        suffixes += ["weight.nested_absmax", "weight.nested_quant_map"]
    else:
        has_shape(headers, "weight.absmax", ["F32"], (num_blocks,))
    fitting = [size for size in _BLOCKSIZES if -(-outputs * inputs // size) == num_blocks]
    if not fitting:
        raise FormatError(f"has {num_blocks} values, no block size makes that of {outputs * inputs}", "weight.absmax")
    notes, form = (), WeightForm((inputs, outputs))
    if inputs % fitting[0] == 0:
        (num_outer,) = headers.get("weight.nested_absmax", ("", (0,)))[1]
        nested = (num_outer, _block_size(num_blocks, num_outer)) if num_outer else None
        form = WeightForm((inputs, outputs), Scheme("codebook", 4, (fitting[0], 1)), nested=nested)
    if any(inputs % size for size in fitting):
        notes = (f"rows of {inputs} values are not whole blocks of {fitting[0]}: such weights are dequantized",)
    return ModuleReader(tuple(suffixes), partial(_read_four_bit, state, shape), form, frozenset({"weight"}), notes)


def _block_size(num_values: int, num_blocks: int) -> int:
    """The power of two that divides `num_values` into `num_blocks` blocks."""
    return 1 << max(-(-num_values // num_blocks) - 1, 0).bit_length()


def _read_four_bit(state: str, shape: tuple[int, ...], tensors: Tensors) -> QuantizedArray | np.ndarray:
    outputs, inputs = shape
    fields = _state(state, shape, tensors)
    size, num_blocks = fields["blocksize"], tensors["weight.absmax"].size
    if -(-outputs * inputs // size) != num_blocks:
        raise FormatError(f"says blocksize {size}, of {outputs * inputs} values there are {num_blocks} absmax", state)
    packed = np.ascontiguousarray(tensors["weight"]).reshape(-1).view(np.uint8)[: -(-outputs * inputs // 2)]
    codes = np.empty(2 * len(packed), np.uint8)
    codes[0::2], codes[1::2] = packed >> 4, packed & 15
    codes = codes[: outputs * inputs].reshape(outputs, inputs)
    if inputs % size:
        absmax = np.repeat(_absmax(fields, state, tensors), size)[: codes.size].reshape(codes.shape)
        return transposed(tensors["weight.quant_map"][codes] * absmax)
    return host_quantized(
        Scheme("codebook", 4, (size, 1)),
        (transposed(codes) ^ np.uint8(8)).view(ml_dtypes.int4),
        _scales(fields, state, outputs, tensors),
        codebook=tensors["weight.quant_map"],
    )


def _state(state: str, shape: tuple[int, ...], tensors: Tensors) -> dict[str, Any]:
    try:
        fields = parse_json(tensors[state].tobytes(), state)
    except CheckpointError as error:
        raise FormatError(str(error), state) from None
    if fields.get("shape") != list(shape):
        raise FormatError(f"says shape {fields.get('shape')}, config.json makes it {list(shape)}", state)
    if fields.get("quant_type") != state[-3:]:
        raise FormatError(f"says quant_type {fields.get('quant_type')!r}", state)
    for name in ("blocksize", *(["nested_blocksize"] if "weight.nested_absmax" in tensors else [])):
        if isinstance(fields.get(name), bool) or not isinstance(fields.get(name), int) or fields[name] < 1:
            raise FormatError(f"says {name} {fields.get(name)!r}", state)
    return fields


def _nested(fields: Mapping[str, Any], state: str, tensors: Tensors) -> tuple[np.ndarray, np.float32, int]:
    """nested_absmax, offset, and the number of absmax per value of nested_absmax."""
    inner, num_blocks = fields["nested_blocksize"], tensors["weight.absmax"].size
    offset = fields.get("nested_offset")
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not np.isfinite(offset):
        raise FormatError(f"says nested_offset {offset!r}", state)
    outer = tensors["weight.nested_absmax"]
    if outer.size != -(-num_blocks // inner):
        raise FormatError(
            f"has {outer.size} values for {num_blocks} absmax in blocks of {inner}", "weight.nested_absmax"
        )
    return outer, np.float32(offset), inner


def _absmax(fields: Mapping[str, Any], state: str, tensors: Tensors) -> np.ndarray:
    absmax = tensors["weight.absmax"]
    if "weight.nested_absmax" not in tensors:
        return absmax
    outer, offset, inner = _nested(fields, state, tensors)
    return tensors["weight.nested_quant_map"][absmax] * np.repeat(outer, inner)[: absmax.size] + offset


def _scales(fields: Mapping[str, Any], state: str, outputs: int, tensors: Tensors) -> Any:
    blocks = transposed(tensors["weight.absmax"].reshape(outputs, -1))
    if "weight.nested_absmax" not in tensors:
        return blocks
    outer, offset, inner = _nested(fields, state, tensors)
    return NestedScales(blocks, tensors["weight.nested_quant_map"], outer, np.asarray(offset), inner)  # pyright: ignore


def _eight_bit(shape: tuple[int, ...], headers: Headers) -> ModuleReader:
    outputs, inputs = shape
    has_shape(headers, "weight", ["I8"], shape)
    has_shape(headers, "SCB", ["F32"], (outputs,))
    suffixes = ("weight", "SCB", *(["weight_format"] if "weight_format" in headers else []))
    if "weight_format" in headers:
        has_shape(headers, "weight_format", ["U8"], (), (1,))
    form = WeightForm((inputs, outputs), Scheme("int", 8, (inputs, 1)))
    return ModuleReader(suffixes, partial(_read_eight_bit, inputs), form)


def _read_eight_bit(inputs: int, tensors: Tensors) -> QuantizedArray:
    if "weight_format" in tensors and (layout := int(tensors["weight_format"].reshape(()))):
        raise FormatError(f"is {layout}: only 0, rows as they are, is supported", "weight_format")
    return host_quantized(
        Scheme("int", 8, (inputs, 1)),
        transposed(tensors["weight"]),
        (tensors["SCB"] / np.float32(127))[None],
    )
