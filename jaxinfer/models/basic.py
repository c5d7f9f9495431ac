"""Linear layers and norms."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.models.config import ModelConfig, NormKind
from jaxinfer.models.hidden import Hidden, Pending
from jaxinfer.quantization.adapted import base_of, with_adapters
from jaxinfer.quantization.matmul import is_joinable, matmul, matmul_several
from jaxinfer.quantization.side_by_side import SideBySide
from jaxinfer.quantization.side_by_side import products as side_by_side_products
from pallas_kernels.norm import choose as choose_norm
from pallas_kernels.norm import make_spec as norm_spec
from pallas_kernels.norm import norm


def normal(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype) -> Any:
    """Weights of normal(0, 0.02); without `rngs` a zero broadcast to `shape`, which takes no memory, for modules of
    which only shapes are used (tracing the random numbers of 30 layers takes over a second)."""
    if rngs is None:
        return np.broadcast_to(np.zeros((), dtype), shape)
    return _normal(rngs.params(), shape, jnp.dtype(dtype))


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return nnx.initializers.normal(0.02)(key, shape, dtype)


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last axis (`pallas_kernels.norm`). The weight may have leading axes (one row per
    head)."""

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        kind: NormKind,
        *,
        eps: float,
        bias: bool,
        dtype,
        has_weight: bool = True,
    ):
        # A zero-stride view: an untrusted configuration may claim a huge width, and no memory is allocated.
        initial = np.zeros((), dtype) if kind == "rms_zero_centred" else np.ones((), dtype)
        self.weight = nnx.Param(np.broadcast_to(initial, shape), axes=axes) if has_weight else None
        self.bias = nnx.Param(np.zeros(shape, dtype), axes=axes) if bias else None
        self.kind, self.eps = kind, eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return self._normed(x, None)[1]

    def after(self, x: jax.Array, term: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x + term, and its norm."""
        return self._normed(x, term)

    def adds(self, x: jax.Array) -> bool:
        """True if a kernel computes x + term with the norm, so that it pays to leave the addition to it."""
        spec = norm_spec(x, self._value(self.weight), self._value(self.bias), x, kind=self.kind, eps=self.eps)
        return choose_norm(spec).implementation != "xla"

    def _normed(self, x: jax.Array, term: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        weight, bias = self._value(self.weight), self._value(self.bias)
        return norm(x, weight, bias, term, kind=self.kind, eps=self.eps)

    @staticmethod
    def _value(parameter: nnx.Param | None) -> jax.Array | None:
        return None if parameter is None else parameter[...]


def normed(norm: Norm, x: Hidden) -> tuple[jax.Array, jax.Array]:
    """Hidden states as an array, and their norm."""
    return norm.after(*x) if isinstance(x, Pending) else (x, norm(x))


def scaled_logits(config: ModelConfig, logits: jax.Array) -> jax.Array:
    """Logits with the factor and the soft cap of a model."""
    if config.logit_scale != 1.0:
        logits = logits * config.logit_scale
    if config.logit_softcap is not None:
        logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
    return logits


def logits_at(logits: jax.Array, index: jax.Array) -> jax.Array:
    """Logits [..., V'] of another vocabulary, by the place int32[V'] of each of its tokens in logits [..., V]; -inf for
    those at V, which have none."""
    padded = jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, 1)], constant_values=-jnp.inf)
    return jnp.take(padded, index, axis=-1)


def hidden_norm(config: ModelConfig, dtype) -> Norm:
    """A norm of hidden states."""
    return Norm(
        (config.hidden_size,), ("hidden",), config.norm, eps=config.norm_eps, bias=config.norm_bias, dtype=dtype
    )


def head_norm(
    config: ModelConfig, head_dim: int, num_heads: int, heads_axis: str, *, dtype, is_rotated: bool = True
) -> Norm | None:
    """The norm of queries or keys [..., H, K], or of [..., H * K] if it spans all heads; None if the layer has none."""
    if not config.qk_norm or (config.is_qk_norm_after_rotation and not is_rotated):
        return None
    shape, axes = {
        "head": ((head_dim,), ("head_dim",)),
        "each_head": ((num_heads, head_dim), (heads_axis, "head_dim")),
        "all_heads": ((num_heads * head_dim,), (heads_axis,)),
    }[config.qk_norm_span]
    options = {"bias": config.qk_norm_bias, "has_weight": config.has_qk_norm_weight}
    return Norm(shape, axes, config.norm, eps=config.norm_eps, dtype=dtype, **options)


class XIELU(nnx.Module):
    """xIELU (Huang & Schlag 2024, section 3), with trained slopes of its two halves. All parameters have shape [1]."""

    def __init__(self, dtype):
        def scalar(value: float) -> nnx.Param:
            return nnx.Param(np.full((1,), value, dtype), axes=(None,))

        # Published initial values of 0.8 for both, stored as the inverse of softplus; alpha_n after subtracting beta.
        self.alpha_p, self.alpha_n = scalar(np.log(np.expm1(0.8))), scalar(np.log(np.expm1(0.3)))
        self.beta, self.eps = scalar(0.5), scalar(-1e-6)

    def __call__(self, x: jax.Array) -> jax.Array:
        beta = self.beta[...]
        positive = jax.nn.softplus(self.alpha_p[...]) * x * x
        slope = beta + jax.nn.softplus(self.alpha_n[...])
        negative = (jnp.expm1(jnp.minimum(x, self.eps[...])) - x) * slope
        return jnp.where(x > 0, positive, negative) + beta * x


class Linear(nnx.Module):
    """x @ weight + bias, with weight [inputs, outputs], which may be quantized.

    `scope` is the module's name in the model, set by `bind`, and the name of its operations in compiled programs.
    """

    scope = "linear"

    def __init__(
        self,
        inputs: int,
        outputs: int,
        axes: tuple[str | None, str | None],
        *,
        bias: bool,
        dtype,
        rngs: nnx.Rngs | None,
    ):
        self.weight = nnx.Param(normal(rngs, (inputs, outputs), dtype), axes=axes)
        self.bias = nnx.Param(np.zeros((outputs,), dtype), axes=axes[1:]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.named_scope(self.scope):
            return self._biased(matmul(x, self.weight.get_value()))

    def _biased(self, y: jax.Array) -> jax.Array:
        return y if self.bias is None else y + self.bias[...]


def is_side_by_side(linear: Linear) -> bool:
    """True for the first of several linear layers whose weights lie in one array."""
    return isinstance(linear, Linear) and isinstance(base_of(linear.weight.get_value()), SideBySide)


def project(x: jax.Array, linears: Sequence[Linear]) -> list[jax.Array]:
    """The outputs of linear layers of the same x: in one call where all their weights are packed for a CPU, in one
    product where they lie side by side for a GPU."""
    # Calibration puts recorders in the place of linear layers: they have no weight and are called one by one.
    weights = [linear.weight.get_value() for linear in linears if isinstance(linear, Linear)]
    bases = [base_of(weight) for weight in weights]
    is_side_by_side = any(isinstance(base, SideBySide) for base in bases)
    if len(weights) < len(linears) or not (is_side_by_side or all(map(is_joinable, bases))):
        return [linear(x) for linear in linears]
    with jax.named_scope("_".join(linear.scope for linear in linears)):
        products = side_by_side_products(x, bases) if is_side_by_side else matmul_several(x, bases)
        products = with_adapters(x, products, weights)
        return [linear._biased(y) for linear, y in zip(linears, products, strict=True)]
