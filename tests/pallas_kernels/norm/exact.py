"""Norms in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.norm import NormSpec

Operand = jax.Array | None


def stored_sum(x: jax.Array, term: Operand) -> jax.Array:
    """x + term in x's dtype, of which the norm is."""
    return x if term is None else x + term


def exact_norm(total: jax.Array, weight: Operand, bias: Operand, spec: NormSpec) -> np.ndarray:
    """The norm of a sum, float64."""
    with jax.enable_x64(True):
        return np.asarray(_formula(*_wide(total, weight, bias), spec))


def exact_gradients(total: jax.Array, weight: Operand, bias: Operand, cotangents, spec: NormSpec) -> tuple:
    """Gradients, float64, of the sum, the weight and the bias, from those of the stored sum and of the norm."""
    with jax.enable_x64(True):
        d_total, d_out = _wide(*cotangents)
        _, pull = jax.vjp(lambda *operands: _formula(*operands, spec), *_wide(total, weight, bias))
        of_total, of_weight, of_bias = pull(d_out)
        return jax.tree.map(np.asarray, (of_total + d_total, of_weight, of_bias))


def _wide(*arrays: Operand) -> tuple:
    return tuple(None if x is None else jnp.asarray(np.asarray(x, np.float64)) for x in arrays)


def _formula(total, weight, bias, spec: NormSpec):
    if spec.kind == "layer":
        total = total - total.mean(-1, keepdims=True)
    out = total / jnp.sqrt((total**2).mean(-1, keepdims=True) + spec.eps)
    if weight is not None:
        out = out * (weight + (spec.kind == "rms_zero_centred"))
    return out if bias is None else out + bias
