"""Norms as XLA's operations, for every platform."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.norm.api import NormSpec


def unsupported(spec: NormSpec, platform: str) -> str | None:
    return None


def norm(x, weight, bias, term, spec: NormSpec) -> tuple[jax.Array, jax.Array]:
    if term is not None:
        x = x + term
    x32 = x.astype(jnp.float32)
    if spec.kind == "layer":
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + spec.eps)
    if weight is None:
        return x, normed.astype(x.dtype)
    if spec.kind == "rms":
        return x, normed.astype(x.dtype) * weight
    weight = weight.astype(jnp.float32)
    out = normed * (1 + weight if spec.kind == "rms_zero_centred" else weight)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return x, out.astype(x.dtype)
