"""Products with integer weights on a CPU, read as stored: XLA:CPU writes a float32 copy of the weight first."""

import jax
import jax.numpy as jnp

from pallas_kernels.numba_cpu import calls
from pallas_kernels.platform import current_platform
from pallas_kernels.quantized_matmul.dequantize import code_zero
from pallas_kernels.quantized_matmul.specs import MatmulSpec

FEW_ROWS = range(2, 12)  # of float32, that are faster than as XLA's product
UNIT, STEP = 32, 8  # outputs and inputs that the kernel takes at once
MIN_PART = 2**16  # weights of a part


def unsupported(spec: MatmulSpec, platform: str) -> str | None:
    if (reason := calls.unsupported(platform)) is not None:
        return reason
    if spec.values_dtype not in ("int8", "int4") or spec.has_codebook:
        return f"it reads int8 and int4, not {'codebooks' if spec.has_codebook else spec.values_dtype}"
    if spec.activations is not None:
        return f"tokens quantized to {spec.activations} are multiplied by XLA"
    if spec.block[1] != 1:
        return f"{spec.block[1]} outputs share a scale"
    if spec.is_transposed and (spec.is_grouped or spec.inputs % UNIT):
        return f"a transposed weight has one scale for each output and a multiple of {UNIT} inputs, not {spec.inputs}"
    if spec.is_transposed:
        return None
    if spec.outputs % UNIT or spec.inputs % STEP or (spec.is_grouped and spec.block[0] % STEP):
        return f"it takes whole blocks of {STEP} inputs and {UNIT} outputs, not {spec.inputs} and {spec.outputs}"
    return None


def form(spec: MatmulSpec, platform: str) -> str:
    """A description of how the product is computed, for people."""
    per = "a product per group, then scale and sum" if spec.is_grouped else "product, then scale"
    return f"weights converted in registers, {per}"


def matmul(x, values, scales, zeros, codebook, minima, spec: MatmulSpec, platform: str) -> jax.Array:
    """float32 [rows, N] of x [rows, K]."""
    scales = scales.astype(jnp.float32)
    offsets = ()  # what a weight is where the stored value is 0
    if minima is not None:
        offsets = (minima.astype(jnp.float32) - code_zero(values) * scales,)
    elif zeros is not None:
        offsets = (-zeros.astype(jnp.float32) * scales,)
    return _product(x, values, (scales, *offsets), min(spec.block[0], spec.inputs), spec.is_transposed)


def can_multiply_floats(x: jax.Array, weight: jax.Array, *, is_transposed: bool) -> bool:
    """Whether `float_matmul` takes x [..., K] and a weight [K, N], or [N, K] if transposed: few float32 rows, but more
    than one."""
    rows, inputs = x.size // x.shape[-1], x.shape[-1]
    is_float32 = x.dtype == weight.dtype == jnp.float32 and weight.ndim == 2
    is_whole = inputs % UNIT == 0 if is_transposed else inputs % STEP == 0 and weight.shape[1] % UNIT == 0
    return is_float32 and rows in FEW_ROWS and is_whole and calls.unsupported(current_platform()) is None


def float_matmul(x: jax.Array, weight: jax.Array, *, is_transposed: bool) -> jax.Array:
    """x [..., K] @ weight, both float32. XLA:CPU copies the weight in blocks for each call: for 5 rows, 1.3 times the
    time of reading it."""
    product = _product(x.reshape(-1, x.shape[-1]), weight, (), x.shape[-1], is_transposed)
    return product.reshape(*x.shape[:-1], product.shape[-1])


def _product(x, values, of_blocks: tuple[jax.Array, ...], group: int, is_transposed: bool) -> jax.Array:
    """float32 [rows, N] of x [rows, K]; `of_blocks` are no arrays, scales, or scales and offsets."""
    inputs, outputs = values.shape[::-1] if is_transposed else values.shape
    unit = 1 if is_transposed else UNIT
    attributes = {"bits": jax.dtypes.itemsize_bits(values.dtype), "group": group, "outputs": outputs}
    attributes |= {"has_scales": len(of_blocks) > 0, "has_offsets": len(of_blocks) > 1, "is_transposed": is_transposed}
    operands = x.astype(jnp.float32), values, *of_blocks
    found, parts = [], calls.num_parts(outputs // unit, -(-MIN_PART // (unit * inputs)))
    for first, end in calls.ranges(outputs // unit, parts):
        shape = jax.ShapeDtypeStruct((x.shape[0], unit * (end - first)), jnp.float32)
        found.append(calls.call(_register(), shape, operands, first=unit * first, **attributes))
    return found[0] if parts == 1 else jnp.concatenate(found, axis=1)


def _register() -> str:
    from pallas_kernels.numba_cpu.frames import register
    from pallas_kernels.quantized_matmul.numba_kernel import matmul_handler

    return register("jaxinfer_quantized_matmul", matmul_handler)
