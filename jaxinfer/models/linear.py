"""The linear layer."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.quantization.matmul import matmul


class Linear(nnx.Module):
    """x @ weight + bias, with weight [inputs, outputs], which may be quantized.

    `scope` is the module's name in the model, set by `bind`, and the name of its operations in compiled programs.
    """

    scope = "linear"

    def __init__(self, inputs: int, outputs: int, axes: tuple[str, str], *, bias: bool, dtype, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.weight = nnx.Param(init(rngs.params(), (inputs, outputs), dtype), axes=axes)
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype), axes=axes[1:]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.named_scope(self.scope):
            y = matmul(x, self.weight.get_value())
            return y if self.bias is None else y + self.bias[...]
