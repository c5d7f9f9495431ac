"""Quantized products in forms that XLA fuses: the weight is read as stored, and no dequantized copy is written.

XLA:CPU fuses nothing into a product and converts the weight to float32 on every call. 1024 x 4096, one row, two cores:
0.35 ms from float32, 1.0 ms from int8, 2.6 ms from int4; a grouped product takes 15 ms from two rows on.

XLA:GPU fuses no groups into a product of its tensor cores, but does into sums over contiguous inputs: up to
`_GPU_SUM_ROWS` rows are sums of float32 products, one for each row, and the fusion of several sums reads the weight
once. It needs the layout of `jaxinfer.quantization.on_device`; of another it writes the weight in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.quantized_matmul.dequantize import code_zero, dequantize, look_up, spread
from pallas_kernels.quantized_matmul.specs import MatmulSpec, WeightReads

# XLA:CPU multiplies one row of int8 in a plain loop and 8 rows in a blocked kernel: 0.65 ms instead of 0.95 ms.
_CPU_ROWS = 8
# XLA:TPU computes a product with one row as multiply and reduce, and writes the weight in float32 for it: 500 MB moved
# for [4096, 14336] of int4 instead of 30.
_TPU_ROWS = 8
# XLA:GPU writes the weight in float32 for one row and few outputs: 38 MB moved for [4096, 1024] of int8 instead of 4.
_GPU_ROWS = 2
# XLA:GPU fuses the sums of about so many rows; each such fusion reads the weight.
_GPU_SUM_ROWS, _GPU_FUSED_ROWS = 16, 8
_ROW_MAJOR = Layout(major_to_minor=(0, 1))
INT8_MAX, FP8_MAX = 127.0, 448.0
# Avoids a scale of 0 for an all-zero token; SmoothQuant's code has the same lower bound.
SMALLEST_MAXIMUM = 1e-5


def unsupported(spec: MatmulSpec, platform: str) -> str | None:
    return None


def form(spec: MatmulSpec, platform: str) -> str:
    """A description of how the product is computed, for people."""
    tokens = "" if spec.activations is None else f"tokens to {spec.activations}, "
    if not spec.is_grouped:
        return f"{tokens}product, then scale"
    if _sums_groups(spec, platform):
        return f"{tokens}a product per group, then scale and sum"
    if _sums_rows(spec, platform):
        return f"{tokens}weights to float32 in registers, products of each row summed"
    return f"{tokens}weights to {_compute_dtype(spec, platform)}, then product"


def weight_reads(spec: MatmulSpec, platform: str) -> WeightReads:
    """How the product reads the weight."""
    if platform == "cpu":
        integers = spec.activations == "int8" and not spec.is_grouped
        copy = "float32" if not integers else None if spec.values_dtype == "int8" else "int8"
        return WeightReads(copy=copy)
    if not spec.is_grouped:
        return WeightReads()
    if _sums_groups(spec, platform):
        return WeightReads(copy=spec.values_dtype if spec.is_transposed else None)  # in the other layout
    if _sums_rows(spec, platform):
        return WeightReads(passes=-(-spec.rows // _GPU_FUSED_ROWS))
    return WeightReads(copy=_compute_dtype(spec, platform))


def matmul(x, values, scales, zeros, codebook, minima, spec: MatmulSpec, platform: str) -> jax.Array:
    """float32 [rows, N] of x [rows, K]."""
    token_scales = None
    if spec.is_transposed:
        values, scales = values.T, scales.T
        zeros, minima = (None if each is None else each.T for each in (zeros, minima))
    if _sums_groups(spec, platform):
        x = jnp.pad(x, ((0, max(_TPU_ROWS - spec.rows, 0)), (0, 0)))
    elif platform == "gpu":
        x = jnp.pad(x, ((0, max(_GPU_ROWS - spec.rows, 0)), (0, 0)))
    if spec.activations is not None:
        if platform == "cpu" and spec.rows == 1:
            x = jnp.pad(x, ((0, _CPU_ROWS - 1), (0, 0)))
        x, token_scales = quantize_tokens(x, spec.activations)
    elif platform == "cpu":
        x = x.astype(jnp.float32)
    if not spec.is_grouped:
        product = _scaled(
            _dot(x, _operand(values, codebook, x, platform)), _sums(x), values, scales, zeros, minima, spec
        )
    elif _sums_groups(spec, platform):
        product = _summed_over_groups(x, values, scales, zeros, codebook, minima, spec, platform)
    elif _sums_rows(spec, platform):
        # Without the constraint the compiler copies the weight of a loop to the layout of its shape, [K, N].
        values, scales, zeros, minima = (_row_major(array) for array in (values, scales, zeros, minima))
        block = (spec.block[1], spec.block[0])
        if codebook is None:
            weight = dequantize(values, scales, zeros, None, minima, block=block)
        else:  # a gather, which sums fuse; 15 selections for each value they do not
            entries = look_up(values, codebook, "cpu")
            weight = entries * spread(scales.astype(jnp.float32), block, values.shape)
        sums = [jnp.sum(weight * row, axis=1) for row in x[: spec.rows].astype(jnp.float32)]
        # Otherwise XLA may compute the last sum where the rows are put together, and reads the weight once more for
        # it: 192 MB for the head [262144, 640] of int8.
        product = jnp.stack(lax.optimization_barrier(sums))
    else:
        dtype = _compute_dtype(spec, platform)
        weight = dequantize(values, scales, zeros, codebook, minima, block=spec.block)
        product = _dot(x.astype(dtype), weight.astype(dtype))
    return product[: spec.rows] if token_scales is None else (product * token_scales)[: spec.rows]


def _sums_groups(spec: MatmulSpec, platform: str) -> bool:
    return platform == "tpu" and spec.inputs % spec.block[0] == 0


def _row_major(array: Any) -> Any:
    """The transposed array in the layout of its shape, None for None."""
    return None if array is None else with_layout_constraint(array.T, _ROW_MAJOR)


def _sums_rows(spec: MatmulSpec, platform: str) -> bool:
    """In float32 a row's bits must not depend on the number of rows, so that one form serves all."""
    return platform == "gpu" and spec.is_grouped and spec.x_dtype != "float32" and spec.rows <= _GPU_SUM_ROWS


def _compute_dtype(spec: MatmulSpec, platform: str) -> str:
    """The dtype of a product whose weight is dequantized first."""
    return "float32" if platform == "cpu" else spec.x_dtype


def _summed_over_groups(x, values, scales, zeros, codebook, minima, spec: MatmulSpec, platform: str) -> jax.Array:
    """Multiplies each group of inputs, then scales and sums. XLA:TPU fuses this, for 64 rows and for 512; scales
    repeated for each weight would be written to HBM, 118 MB for [4096, 14336]."""
    size = spec.block[0]
    x = x.reshape(x.shape[0], -1, size)
    weight = _operand(values, codebook, x, platform).reshape(-1, size, spec.outputs)
    products = jnp.einsum("tgk,gkn->tgn", x, weight, precision=_precision(x), preferred_element_type=_accumulator(x))
    return _scaled(products.astype(jnp.float32), _sums(x), values, scales, zeros, minima, spec).sum(-2)


def _operand(values: jax.Array, codebook: jax.Array | None, x: jax.Array, platform: str) -> jax.Array:
    """The stored values in x's dtype: exact, except that codebook entries are rounded."""
    return values.astype(x.dtype) if codebook is None else look_up(values, codebook, platform).astype(x.dtype)


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    product = jnp.matmul(x, weight, precision=_precision(x), preferred_element_type=_accumulator(x))
    return product.astype(jnp.float32)


def _sums(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1, keepdims=True, dtype=_accumulator(x)).astype(jnp.float32)


def _precision(x: jax.Array) -> lax.Precision | None:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _accumulator(x: jax.Array):
    return jnp.int32 if x.dtype == jnp.int8 else jnp.float32


def _scaled(products, sums, values, scales, zeros, minima, spec: MatmulSpec) -> jax.Array:
    """(x @ (values - zeros)) * scales, or x @ (codes * scales + minima), from float32 x @ values [..., N] and the sums
    of x [..., 1]."""
    across, shape = (1, spec.block[1]), (scales.shape[0], spec.outputs)
    if zeros is not None:
        products = products - sums * spread(zeros.astype(jnp.float32), across, shape)
    if minima is not None:
        products = products - sums * code_zero(values)
    products = products * spread(scales.astype(jnp.float32), across, shape)
    return products if minima is None else products + sums * spread(minima.astype(jnp.float32), across, shape)


def quantize_tokens(x: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """int8 or float8_e4m3fn [..., K] and float32 scales [..., 1], with x close to values * scales.

    The scale is max|x| / 127 or / 448 (Xiao et al. 2022, SmoothQuant, section 4, per-token). A token with a NaN has
    the scale NaN.
    """
    x = x.astype(jnp.float32)
    largest = INT8_MAX if kind == "int8" else FP8_MAX
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), SMALLEST_MAXIMUM) / largest
    # XLA:CPU's maximum may drop a NaN, which would then be stored as zero.
    scale = jnp.where(jnp.isnan(x).any(axis=-1, keepdims=True), jnp.nan, scale)
    # The cast to fp8 would turn values that are too large into NaN.
    scaled = jnp.clip(x / scale, -largest, largest)
    if kind == "int8":
        return jnp.round(scaled).astype(jnp.int8), scale
    return scaled.astype(jnp.float8_e4m3fn), scale
