"""The form of a weight that is packed for the kernels of CPUs, and its arrays.

A weight of K inputs and N outputs is divided into panels of 64 outputs. A panel holds all its inputs in order, so that
a kernel reads it as one stream and a vector's lanes are outputs: no shuffles and no sums across lanes.

    weight[k, n] = code[k, n] * scale[k // group, n] + offset[k // group, n]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

LANES = 64  # outputs of a panel
STEP = 8  # inputs are padded with zeros to a multiple
OUTER = 256  # inputs that share an outer scale of factored numbers

CODES = {
    "nibbles": np.dtype(np.uint32),
    "codebook": np.dtype(np.uint32),
    "int8": np.dtype(np.int8),
    "quads": np.dtype(np.int8),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.uint16),
    "float32": np.dtype(np.float32),
}
NUMBERS = ("none", "float32", "float16", "bfloat16", "factored", "units", "unit", "exponents")
# Kernels by codes and activations, in the order of the codes' bits: 4, 8, 16 and 32.
KERNELS = (
    "nibbles",
    "codebook",
    "nibbles_int8",
    "int8",
    "quads",
    "float8_e4m3fn",
    "float8_e5m2",
    "bfloat16",
    "float16",
    "float32",
)
INT8_KERNELS = ("nibbles_int8", "quads")  # of activations rounded to 8 bits
# Whose weights are scaled before they are multiplied, so that one chain of sums runs over all inputs. A row alone is
# bound by memory there; with nibbles it is bound by instructions, and a segment's sum is scaled instead.
CHAINED_KERNELS = ("int8", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32")


class PackedArrays(NamedTuple):
    """The arrays of a packed weight; those that its form does not have are empty.

    Attributes:
      codes: nibbles and codebook: uint32 [panels, inputs / 8, 64], input 8 i + j in bits 4 j to 4 j + 3 of word i;
        quads: int8 [panels, inputs / 4, 64, 4]; others: [panels, inputs, 64], floating-point numbers as their bits.
      scales, offsets: [panels, groups, 64], float32, the bits of 16-bit floats, or int8.
      outer_scales, outer_offsets: the bits of float16 [panels, ceil(inputs / 256), 64], for factored numbers.
      codebook: float32 [16].
    """

    codes: Any
    scales: Any
    outer_scales: Any
    offsets: Any
    outer_offsets: Any
    codebook: Any


@dataclass(frozen=True)
class PackedForm:
    """Static description of a packed weight.

    Attributes:
      inputs, outputs: of the weight, without padding.
      group: inputs that share a scale, a multiple of 8; at least `inputs`: one scale for each output.
      codes: "nibbles" (0 to 15), "codebook" (indices of 16 numbers), "int8", "quads" (int8, four inputs of an output
        together, for int8 activations), or a floating-point dtype.
      scales: "none" (1), a floating-point dtype, "exponents" (powers of two, E8M0), or "factored": int8 times a float16
        that 256 inputs share.
      offsets: "none" (0), as scales, "units" (int8, in units of the scale), or "unit": `unit` times the scale.
      activations: None, or "int8": rows are rounded to 8 bits in groups of 32 inputs.
    """

    inputs: int
    outputs: int
    group: int
    codes: str
    scales: str = "none"
    offsets: str = "none"
    unit: int = 0
    activations: str | None = None

    @property
    def panels(self) -> int:
        return -(-self.outputs // LANES)

    @property
    def padded_inputs(self) -> int:
        return -(-self.inputs // STEP) * STEP

    @property
    def groups(self) -> int:
        return -(-self.inputs // self.group)

    @property
    def kernel(self) -> str:
        return "nibbles_int8" if self.codes == "nibbles" and self.activations == "int8" else self.codes

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.codes in ("nibbles", "codebook") else 8 * CODES[self.codes].itemsize
