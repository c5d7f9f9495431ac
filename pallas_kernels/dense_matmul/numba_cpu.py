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
    return None


def matmul(x: jax.Array, weight: jax.Array, spec: DenseSpec) -> jax.Array:
    """A derivative is XLA's. Inputs that are no whole blocks get zeros after them, as where weights are packed: each
    row has the same bits in both, and XLA's would depend on how many rows there are."""
    inputs = spec.inputs + -spec.inputs % (UNIT if spec.is_transposed else STEP)

    @jax.custom_jvp
    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((spec.rows, spec.outputs), jnp.float32)
        name = register("float32", is_transposed=spec.is_transposed)
        missing = (0, inputs - spec.inputs)
        rows = jnp.pad(x.reshape(spec.rows, -1), ((0, 0), missing))
        weight = jnp.pad(weight, ((0, 0), missing) if spec.is_transposed else (missing, (0, 0)))
        rows = cpu_calls.call(name, shape, (rows, weight), group=inputs)
        return rows.reshape(*x.shape[:-1], spec.outputs)

    @product.defjvp
    def derivative(primals, tangents):
        (x, weight), (of_x, of_weight) = primals, tangents
        return product(x, weight), xla.matmul(of_x, weight, spec) + xla.matmul(x, of_weight, spec)

    return product(x, weight)
