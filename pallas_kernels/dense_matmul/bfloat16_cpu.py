"""bfloat16 products on a CPU, summed in float32 and rounded afterwards.

XLA:CPU takes a processor's matrix units (AMX) for products of bfloat16 that are wanted in float32, and not for those
that are wanted in bfloat16, or whose first operand it transposes: [2048, 576] x [576, 1536] at 1,200, 180 and 200
GFLOP in two CPU seconds of a Xeon (JAX 0.10.2).
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dense_matmul.api import DenseSpec

_PARTS = 8, 4, 2  # of the rows that are transposed


def unsupported(spec: DenseSpec, platform: str) -> str | None:
    if platform != "cpu":
        return f"it is for CPUs, not for {platform}"
    if spec.dtypes[:2] != ("bfloat16",) * 2:
        return f"it multiplies bfloat16, not {' and '.join(dict.fromkeys(spec.dtypes[:2]))}"
    if spec.num_axes != 2:
        return f"a weight has two axes, not {spec.num_axes}"
    return "a row alone is no work for matrix units" if spec.rows < 2 else None


def matmul(x: jax.Array, weight: jax.Array, spec: DenseSpec) -> jax.Array:
    """Gradients are products of the same kind: of bfloat16, in float32 before they are rounded."""

    @jax.custom_vjp
    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return _summed(x, weight, 1 if spec.is_transposed else 0).astype(spec.dtypes[2])

    def forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return product(x, weight), (x, weight)

    def backward(operands: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        (x, weight), gradient = operands, gradient.astype(jnp.bfloat16)
        of_x = _summed(gradient, weight, 0 if spec.is_transposed else 1)
        first, second = (gradient, x) if spec.is_transposed else (x, gradient)
        of_weight = _summed(_transposed(first), second, 0)
        return of_x.astype(x.dtype), of_weight.astype(weight.dtype)

    product.defvjp(forward, backward)
    rows = product(x.reshape(-1, spec.inputs), weight)
    return rows.reshape(*x.shape[:-1], spec.outputs)


def _summed(x: jax.Array, weight: jax.Array, axis: int) -> jax.Array:
    """float32 products of x [T, K] with a weight whose `axis` has size K."""
    return lax.dot_general(x, weight, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _transposed(x: jax.Array) -> jax.Array:
    """x [T, K] as [K, T], a copy where T is even: XLA makes a transposed matrix part of a product, but not one of three
    axes. What makes x stays out of the copy, in which nothing is vectorized."""
    x = lax.optimization_barrier(x)
    parts = next((parts for parts in _PARTS if len(x) % parts == 0), 1)
    return x.reshape(parts, -1, x.shape[1]).transpose(2, 0, 1).reshape(x.shape[::-1])
