"""Static facts of a product with a quantized weight."""

import math
from dataclasses import dataclass

import jax

# Blocks of the weights that the kernel for a GPU reads; it takes scales and zeros row by row of groups.
GPU_KERNEL_BLOCKS = ((64, 1), (128, 1))

Shaped = jax.Array | jax.ShapeDtypeStruct


@dataclass(frozen=True)
class MatmulSpec:
    """Static facts of one call, from `make_spec`.

    rows, inputs, outputs: x is [rows, inputs], the result [rows, outputs].
    block: numbers of inputs and outputs that share a scale.
    activations: "int8" or "fp8", the type that x is quantized to, or None.
    is_transposed: the weight is stored as [outputs, inputs], with blocks of (outputs, inputs) in its arrays.
    """

    rows: int
    inputs: int
    outputs: int
    x_dtype: str
    values_dtype: str
    block: tuple[int, int]
    has_zeros: bool
    has_codebook: bool
    has_minima: bool
    activations: str | None
    is_transposed: bool = False

    @property
    def is_grouped(self) -> bool:
        """True if an output has several scales, for groups of inputs."""
        return self.block[0] < self.inputs


@dataclass(frozen=True)
class WeightReads:
    """How a product reads its weight.

    passes: how often the stored arrays are read.
    copy: dtype of a copy of the whole weight that is written on every call and read instead, or None.
    """

    passes: int = 1
    copy: str | None = None


def make_spec(
    x: Shaped,
    values: Shaped,
    zeros,
    codebook,
    minima=None,
    *,
    block: tuple[int, int],
    activations: str | None,
    is_transposed: bool = False,
) -> MatmulSpec:
    """Checks arrays or `jax.ShapeDtypeStruct`s; raises ValueError for shapes or dtypes that do not fit."""
    if x.ndim < 1 or values.ndim != 2 or x.shape[-1] != values.shape[is_transposed]:
        form = "[N, K]" if is_transposed else "[K, N]"
        raise ValueError(f"x {x.shape} @ values {values.shape}: x is [..., K] and values {form}")
    if activations not in (None, "int8", "fp8"):
        raise ValueError(f"activations={activations!r} is neither None, 'int8' nor 'fp8'")
    wanted = {"int8": ("int4", "int8"), "fp8": ("float8_e4m3fn",)}
    is_plain = codebook is None and minima is None
    if activations is not None and not (is_plain and values.dtype.name in wanted[activations]):
        kind = values.dtype.name if is_plain else "codebook" if minima is None else "affine"
        raise ValueError(f"activations={activations!r} cannot multiply {kind} values")
    rows, (inputs, outputs) = math.prod(x.shape[:-1]), values.shape[::-1] if is_transposed else values.shape
    return MatmulSpec(
        rows,
        inputs,
        outputs,
        x.dtype.name,
        values.dtype.name,
        block,
        zeros is not None,
        codebook is not None,
        minima is not None,
        activations,
        is_transposed,
    )
