"""float32 products on a CPU by the kernel of `quantized_matmul`.

XLA:CPU packs the weight in every call of 2 rows and more: 60 products of 576 x 1,536 and back on two cores take 13.0 ms
with 5 rows and 27.9 with 32; this kernel takes 7.6 and 20.0.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import cpu_calls
from pallas_kernels.dense_matmul import xla
from pallas_kernels.dense_matmul.api import DenseSpec
from pallas_kernels.quantized_matmul.numba_cpu import STEP, UNIT, register


def unsupported(spec: DenseSpec, platform: str) -> str | None:
    if (reason := cpu_calls.unsupported(platform)) is not None:
        return reason
    if spec.dtypes != ("float32",) * 3:
        return f"it multiplies float32, not {' and '.join(dict.fromkeys(spec.dtypes))}"
    if spec.num_axes != 2:
        return f"a weight has two axes, not {spec.num_axes}"
    if 0 in (spec.rows, spec.inputs, spec.outputs):
        return "the product is empty"
    if spec.is_transposed:
        return f"inputs are a multiple of {UNIT}, not {spec.inputs}" if spec.inputs % UNIT else None
    return f"it takes whole blocks of {STEP} inputs, not {spec.inputs}" if spec.inputs % STEP else None


def matmul(x: jax.Array, weight: jax.Array, spec: DenseSpec) -> jax.Array:
    """A derivative is XLA's."""

    @jax.custom_jvp
    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((spec.rows, spec.outputs), jnp.float32)
        name = register("float32", is_transposed=spec.is_transposed)
        rows = cpu_calls.call(name, shape, (x.reshape(spec.rows, -1), weight), group=spec.inputs)
        return rows.reshape(*x.shape[:-1], spec.outputs)

    @product.defjvp
    def derivative(primals, tangents):
        (x, weight), (of_x, of_weight) = primals, tangents
        return product(x, weight), xla.matmul(of_x, weight, spec) + xla.matmul(x, of_weight, spec)

    return product(x, weight)
