"""Random quantized weights, and their products in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_matmul import dequantize

Arrays = tuple  # values, scales, zeros, codebook and minima


def head(inputs: int, outputs: int, group: int, dtype: str, extra: str | None) -> Arrays:
    """A product with a tied embedding [outputs, inputs]; `extra` is what its groups have beside scales."""
    rng = np.random.default_rng(0)
    shape, largest = (outputs, inputs // group), 8 if dtype == "int4" else 128
    return (
        jnp.asarray(rng.integers(-largest, largest, (outputs, inputs)), dtype),
        jnp.asarray(rng.uniform(0.5, 1, shape), jnp.float32),
        jnp.asarray(rng.integers(-8, 8, shape), jnp.int8) if extra == "zeros" else None,
        jnp.asarray(rng.normal(size=16), jnp.float32) if extra == "codebook" else None,
        jnp.asarray(rng.normal(size=shape), jnp.float32) if extra == "minima" else None,
    )


def transposed(arrays: Arrays) -> Arrays:
    """A product with a weight [inputs, outputs]."""
    values, scales, zeros, codebook, minima = arrays
    values, scales, zeros, minima = (None if x is None else x.T for x in (values, scales, zeros, minima))
    return values, scales, zeros, codebook, minima


def exact_product(x: jax.Array, arrays: Arrays, group: int) -> np.ndarray:
    """x @ the head's transpose, float64."""
    return np.asarray(x, np.float64) @ np.asarray(dequantize(*arrays, block=(1, group)), np.float64).T
