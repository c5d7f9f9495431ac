"""Products with integer weights on a CPU, read as stored: XLA:CPU writes a float32 copy of the weight first."""

import jax
import jax.numpy as jnp

from cpu_kernels import kernels
from pallas_kernels import cpu_calls
from pallas_kernels.quantized_matmul.dequantize import code_zero
from pallas_kernels.quantized_matmul.specs import MatmulSpec, WeightReads

STEP, UNIT = 8, 32  # inputs that the kernel takes at once, and where the weight is transposed


def unsupported(spec: MatmulSpec, platform: str) -> str | None:
    if (reason := cpu_calls.unsupported(platform)) is not None:
        return reason
    if spec.values_dtype not in ("int8", "int4") or spec.has_codebook:
        return f"it reads int8 and int4, not {'codebooks' if spec.has_codebook else spec.values_dtype}"
    if spec.activations is not None:
        return f"tokens quantized to {spec.activations} are multiplied by XLA"
    if 0 in (spec.rows, spec.inputs, spec.outputs):
        return "the product is empty"
    if spec.block[1] != 1:
        return f"{spec.block[1]} outputs share a scale"
    if spec.is_transposed and (spec.is_grouped or spec.inputs % UNIT):
        return f"a transposed weight has one scale for each output and a multiple of {UNIT} inputs, not {spec.inputs}"
    if spec.is_transposed:
        return None
    if spec.inputs % STEP or (spec.is_grouped and spec.block[0] % STEP):
        return (
            f"it takes whole blocks of {STEP} inputs, not {spec.inputs} in groups of {min(spec.block[0], spec.inputs)}"
        )
    if spec.values_dtype == "int4" and spec.outputs % 2:
        return f"two int4 of an input share a byte, so that outputs are even, not {spec.outputs}"
    return None


def form(spec: MatmulSpec, platform: str) -> str:
    """A description of how the product is computed, for people."""
    per = "a product per group, then scale and sum" if spec.is_grouped else "product, then scale"
    return f"weights converted in registers, {per}"


def weight_reads(spec: MatmulSpec, platform: str) -> WeightReads:
    """The kernel reads the integers, and writes none."""
    return WeightReads()


def matmul(x, values, scales, zeros, codebook, minima, spec: MatmulSpec, platform: str) -> jax.Array:
    """float32 [rows, N] of x [rows, K]."""
    operands = [x.astype(jnp.float32), values, scales.astype(jnp.float32)]
    # The last, where there is one: what a weight is where the stored value is 0.
    if minima is not None:
        operands.append(minima.astype(jnp.float32) - code_zero(values) * operands[2])
    elif zeros is not None:
        operands.append(-zeros.astype(jnp.float32) * operands[2])
    shape = jax.ShapeDtypeStruct((spec.rows, spec.outputs), jnp.float32)
    return cpu_calls.call(
        register(spec.values_dtype, is_transposed=spec.is_transposed),
        shape,
        operands,
        group=min(spec.block[0], spec.inputs),
    )


def register(dtype: str, *, is_transposed: bool) -> str:
    """The registered name of the kernel for weights of a dtype."""
    from cpu_kernels import quantized_matmul

    kernel = f"{'transposed_' if is_transposed else ''}{dtype}"
    return kernels.register(f"jaxinfer_matmul_{kernel}", getattr(quantized_matmul, kernel))
