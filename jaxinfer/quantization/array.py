"""`QuantizedArray`: a quantized weight, as a leaf of the parameters."""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_matmul import dequantize

Kind = Literal["int", "affine", "codebook", "float"]
STORED = {
    "int": ("int4", "int8"),
    "affine": ("int4", "int8"),
    "codebook": ("int4",),
    "float": ("float8_e4m3fn", "float8_e5m2"),
}


@dataclass(frozen=True)
class Scheme:
    """Static description of the values of a `QuantizedArray`.

    Attributes:
      kind: "int": (value - zero) * scale; "affine": code * scale + minimum, where a minimum need not be a multiple of
        the scale (GGUF's Q4_1, Q5_1, Q4_K, Q5_K) and the code is value + 8 in int4, value in int8; "codebook":
        codebook[value + 8] * scale (NF4, FP4, MXFP4); "float": value * scale (FP8).
      bits: bits of a quantized value, 2 to 8; values of 2 or 3 bits are stored in 4.
      block: (inputs, outputs) that share a scale: (K, 1) per output channel, (128, 1) group-wise, (128, 128)
        block-wise, (1, D) per row of an embedding, (K, N) per tensor. The last block of an axis may be smaller.
      activations: None for floating-point activations; "int8" and "fp8" quantize the activations of each token at run
        time (W8A8), and multiply in that type.
    """

    kind: Kind
    bits: int
    block: tuple[int, int]
    activations: Literal["int8", "fp8"] | None = None

    def __post_init__(self) -> None:
        if self.kind not in STORED:
            raise ValueError(f"kind must be one of {', '.join(STORED)}, got {self.kind!r}")
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits must be 2 to 8, got {self.bits}")
        if len(self.block) != 2 or min(self.block) < 1:
            raise ValueError(f"block must be two positive numbers, got {self.block}")


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "table", "outer", "offset"], meta_fields=["inner"])
@dataclass(frozen=True)
class NestedScales:
    """Quantized scales (Dettmers et al. 2023, QLoRA, section 3: double quantization).

    scale[k, n] = table[codes[k, n]] * outer[(n * codes.shape[-2] + k) // inner] + offset: blocks of `inner` scales run
    along the inputs of one output, then of the next.

    Attributes:
      codes: uint8 [..., K blocks, N blocks]. table: float32 [256]. outer: float32 [..., ceil(blocks / inner)].
      offset: float32 [...].
    """

    codes: jax.Array
    table: jax.Array
    outer: jax.Array
    offset: jax.Array
    inner: int = 256

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def dequantize(self, *, by_output: bool = False) -> jax.Array:
        """float32 [..., K blocks, N blocks], or [..., N blocks, K blocks]."""
        rows, columns = self.codes.shape[-2:]
        index, codes = (jnp.arange(columns) * rows + jnp.arange(rows)[:, None]) // self.inner, self.codes
        if by_output:
            index, codes = index.T, jnp.swapaxes(codes, -1, -2)
        products = self.table[codes] * self.outer[..., index]
        # Compilers contract product and sum to one operation, which rounds once instead of twice. A maximum without
        # effect keeps them apart (XLA:CPU 0.10 looks through optimization_barrier and reduce_precision).
        products = jnp.maximum(products, jnp.finfo(products.dtype).min)
        return products + self.offset[..., None, None]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales", "zeros", "codebook", "permutation", "minima"],
    meta_fields=["scheme"],
)
@dataclass(frozen=True)
class QuantizedArray:
    """A quantized weight [..., K, N] (inputs, outputs); leading axes are experts. A pytree.

    Invariants, which `check` verifies:
      values [..., K, N]: int4 or int8 where the kind is "int" or "affine" (int4 up to 4 bits), signed: unsigned codes
        of a file are stored less 2^(bits-1), in int8 of the kind "affine" as they are; int4 where it is "codebook"
        (index - 8); float8_e4m3fn or float8_e5m2 where it is "float".
      scales [..., ceil(K / block[0]), ceil(N / block[1])], floating point, finite; or `NestedScales` of that shape.
      zeros: int8, shaped as scales, in the units of values; None where the scheme is symmetric.
      codebook: float32 [16]; None unless the kind is "codebook".
      permutation: int32 [K] or [..., K], a permutation: row i of values belongs to input permutation[i], so that
        x @ w = x[..., permutation] @ values (GPTQ's act-order). None where it is the identity.
      minima: floating point, finite, shaped as scales; None unless the kind is "affine".
    """

    values: jax.Array
    scales: jax.Array | NestedScales
    zeros: jax.Array | None = None
    codebook: jax.Array | None = None
    permutation: jax.Array | None = None
    scheme: Scheme = field(default_factory=lambda: Scheme("int", 8, (1, 1)))
    minima: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def has_zeros(self) -> bool:
        return self.zeros is not None

    @property
    def size(self) -> int:
        """Numbers of the weight."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes on a TPU or GPU, where two 4-bit values share a byte."""
        return sum(-(-leaf.size * jax.dtypes.itemsize_bits(leaf.dtype) // 8) for leaf in jax.tree.leaves(self))

    def dequantize(self, dtype=jnp.float32) -> jax.Array:
        """The weight [..., K, N], with rows in the order of the inputs, computed in float32 and rounded to `dtype`."""
        scales = self.scales.dequantize() if isinstance(self.scales, NestedScales) else self.scales
        weight = dequantize(self.values, scales, self.zeros, self.codebook, self.minima, block=self.scheme.block)
        if self.permutation is not None:
            order = jnp.argsort(self.permutation, axis=-1)
            weight = jnp.take_along_axis(weight, jnp.broadcast_to(order[..., None], weight.shape), axis=-2)
        return weight.astype(dtype)


def check(array: QuantizedArray, name: str) -> None:
    """Raises ValueError, with `name` and what is wrong, unless the invariants of `QuantizedArray` hold.

    Reads the scales and the permutation, so the arrays must be concrete.
    """
    scheme, values = array.scheme, array.values
    if values.ndim < 2:
        raise ValueError(f"{name}: quantized values need at least two axes, got shape {values.shape}")
    if values.dtype.name not in STORED[scheme.kind] or (scheme.kind in ("int", "affine") and scheme.bits > 4) != (
        values.dtype == jnp.int8
    ):
        raise ValueError(f"{name}: {values.dtype.name} does not hold {scheme.bits}-bit {scheme.kind} values")
    blocks = tuple(-(-size // block) for size, block in zip(values.shape[-2:], scheme.block, strict=True))
    expected = (*values.shape[:-2], *blocks)
    if array.scales.shape != expected:
        raise ValueError(f"{name}: scales {array.scales.shape}, expected {expected} for blocks of {scheme.block}")
    scales = array.scales.dequantize() if isinstance(array.scales, NestedScales) else array.scales
    bad = int((~np.isfinite(np.asarray(scales, np.float32))).sum())
    if bad:
        raise ValueError(f"{name}: {bad} of {scales.size} scales are not finite")
    if array.zeros is not None and (array.zeros.shape != expected or array.zeros.dtype != jnp.int8):
        raise ValueError(f"{name}: zeros {array.zeros.dtype.name} {array.zeros.shape}, expected int8 {expected}")
    if (array.minima is not None) != (scheme.kind == "affine"):
        raise ValueError(f"{name}: minima belong to the kind 'affine' and to no other")
    if array.minima is not None:
        if array.minima.shape != expected or array.zeros is not None:
            raise ValueError(f"{name}: minima {array.minima.shape}, expected {expected} and no zeros")
        bad = int((~np.isfinite(np.asarray(array.minima, np.float32))).sum())
        if bad:
            raise ValueError(f"{name}: {bad} of {array.minima.size} minima are not finite")
    if (array.codebook is not None) != (scheme.kind == "codebook"):
        raise ValueError(f"{name}: a codebook belongs to the kind 'codebook' and to no other")
    if array.permutation is not None:
        order = np.sort(np.asarray(array.permutation), axis=-1)
        if order.shape[-1] != values.shape[-2] or not (order == np.arange(values.shape[-2])).all():
            raise ValueError(f"{name}: the permutation does not contain each of {values.shape[-2]} inputs once")
