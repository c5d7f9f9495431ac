"""AWQ checkpoints (Lin et al. 2023) in AutoAWQ's "gemm" layout: 4 bits, packed along the outputs, interleaved.

    qweight int32 [K, N / 8]; qzeros int32 [K / g, N / 8]; scales [K / g, N]

Nibble i of word c is output 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]; zeros are stored as they are.
W[k, n] = (code[k, n] - zero[k // g, n]) * scales[k // g, n].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from checkpoints_convert.formats.module import (
    FLOATS,
    FormatError,
    Method,
    ModuleReader,
    Tensors,
    flag,
    has_shape,
    host_quantized,
    positive_int,
    signed,
    transposed,
    unpack,
)
from checkpoints_convert.safetensors_files import TensorHeader
from jaxinfer.quantization import QuantizedArray, Scheme

_NIBBLE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)
_SUFFIXES = ("qweight", "qzeros", "scales")


@dataclass(frozen=True)
class Awq(Method):
    """group_size: -1 for one group. overrides: group sizes of single modules (auto-round)."""

    group_size: int
    overrides: tuple[tuple[str, dict[str, Any]], ...] = ()
    name: str = "awq"

    def reader(
        self, module: str, shape: tuple[int, ...], headers: Mapping[str, TensorHeader], kind: str
    ) -> ModuleReader | None:
        if "qweight" not in headers:
            return None
        outputs, inputs = shape
        asked = next((positive_int(own, ["group_size"], self.group_size) for name, own in self.overrides
                      if name == module), self.group_size)  # fmt: skip
        size = inputs if asked == -1 else min(asked, inputs)
        groups = -(-inputs // size)
        if outputs % 8:
            raise FormatError(f"has {outputs} outputs, not a multiple of the 8 of a word", "qweight")
        has_shape(headers, "qweight", ["I32"], (inputs, outputs // 8))
        has_shape(headers, "qzeros", ["I32"], (groups, outputs // 8))
        has_shape(headers, "scales", FLOATS, (groups, outputs))
        return ModuleReader(_SUFFIXES, partial(_read, outputs, size))


def awq(data: Mapping[str, Any]) -> Awq:
    """The method a quantization_config declares. Raises FormatError for other layouts, by name."""
    version = str(data.get("version") or data.get("format") or "gemm").lower()
    if version != "gemm":
        raise FormatError(f"version {version!r} is not supported, only 'gemm' is")
    if (bits := positive_int(data, ["bits", "w_bit"], 4)) != 4:
        raise FormatError(f"bits {bits} is not supported, AWQ's gemm layout has 4")
    if not flag(data, "zero_point", True):
        raise FormatError("zero_point false is not supported: the gemm layout stores zero points")
    return Awq(positive_int(data, ["group_size", "q_group_size"], 128))


def _read(outputs: int, size: int, tensors: Tensors) -> QuantizedArray:
    codes = transposed(_outputs_first(tensors["qweight"], outputs))
    zeros = (_outputs_first(tensors["qzeros"], outputs).T - np.uint8(8)).view(np.int8)
    return host_quantized(
        Scheme("int", 4, (size, 1)),
        signed(codes, 4),
        tensors["scales"],
        zeros=np.ascontiguousarray(zeros) if zeros.any() else None,
    )


def _outputs_first(words: np.ndarray, outputs: int) -> np.ndarray:
    """uint8 [N, rows] of int32 [rows, N / 8]."""
    codes = unpack(words, 4, outputs, axis=1).T
    return codes.reshape(outputs // 8, 8, -1)[:, _NIBBLE_OF_OUTPUT].reshape(outputs, -1)
