"""Recurrent layers: gated delta net, Mamba 2, short convolution. Shapes use the legend of jaxinfer/README.md.

A layer calls `states.convolve` and `states.recur`, and does not know where the states live.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.models.attend import RecurrentStates
from jaxinfer.models.basic import Linear, normal, project
from jaxinfer.models.recurrent_config import ConvConfig, DeltaConfig, MambaConfig
from pallas_kernels.recurrence import RecurrentTokens

_L2_EPS = 1e-6  # of the norms of queries and keys (Transformers' `l2norm`)


class GatedDeltaNet(nnx.Module):
    """A gated delta net (Yang et al. 2024): a short convolution over queries, keys and values, the gated delta rule,
    and an output norm of each head with a gate."""

    def __init__(self, width: int, delta: DeltaConfig, norm_eps: float, *, dtype, rngs: nnx.Rngs | None):
        kwargs = {"bias": False, "dtype": dtype, "rngs": rngs}
        key_width, value_width = delta.key_width, delta.value_width
        self.q_proj = Linear(width, key_width, ("hidden", "state"), **kwargs)
        self.k_proj = Linear(width, key_width, ("hidden", "state"), **kwargs)
        self.v_proj = Linear(width, value_width, ("hidden", "state"), **kwargs)
        self.gate_proj = Linear(width, value_width, ("hidden", "state"), **kwargs)
        self.beta_proj = Linear(width, delta.num_value_heads, ("hidden", "state"), **kwargs)
        self.decay_proj = Linear(width, delta.num_value_heads, ("hidden", "state"), **kwargs)
        self.out_proj = Linear(value_width, width, ("state", "hidden"), **kwargs)
        self.conv_weight = _conv_weight(delta.conv_shape, dtype, rngs)
        self.decay_log = _vector(delta.num_value_heads, dtype)
        self.decay_bias = _vector(delta.num_value_heads, dtype)
        self.out_norm = nnx.Param(np.ones((delta.value_size,), dtype), axes=("state",))
        self.delta, self.norm_eps = delta, norm_eps

    def __call__(self, x: jax.Array, states: RecurrentStates) -> jax.Array:
        delta, lead = self.delta, x.shape[:-1]
        linears = (self.q_proj, self.k_proj, self.v_proj, self.gate_proj, self.decay_proj, self.beta_proj)
        *parts, gate, decay, beta = project(x, linears)
        with jax.named_scope("convolve"):
            mixed = jax.nn.silu(states.convolve(jnp.concatenate(parts, axis=-1), _taps(self.conv_weight), None))
        q, k, v = jnp.split(mixed, (delta.key_width, 2 * delta.key_width), axis=-1)
        q, k = (_unit(y.reshape(*lead, delta.num_key_heads, delta.key_size)) for y in (q, k))
        v = v.reshape(*lead, delta.num_value_heads, delta.value_size)
        steps = jax.nn.softplus(decay.astype(jnp.float32) + self.decay_bias[...].astype(jnp.float32))
        g = -jnp.exp(self.decay_log[...].astype(jnp.float32)) * steps
        beta = jax.nn.sigmoid(beta).astype(jnp.float32)
        with jax.named_scope("recur"):
            out = states.recur(RecurrentTokens(q * delta.key_size**-0.5, k, v, g, beta)).astype(x.dtype)
        out = _normalized(out, self.norm_eps).astype(x.dtype) * self.out_norm[...]
        gate = gate.reshape(out.shape).astype(jnp.float32)
        out = (out.astype(jnp.float32) * jax.nn.silu(gate)).astype(x.dtype)
        return self.out_proj(out.reshape(*lead, -1))


class Mamba2(nnx.Module):
    """Mamba 2 (Dao & Gu 2024): h <- exp(dt A) h + dt B x', y = C h + D x, after a short convolution over x, B and C."""

    def __init__(self, width: int, mamba: MambaConfig, norm_eps: float, *, dtype, rngs: nnx.Rngs | None):
        kwargs = {"dtype": dtype, "rngs": rngs}
        self.in_proj = Linear(width, sum(mamba.part_widths), ("hidden", "state"), bias=mamba.has_bias, **kwargs)
        self.out_proj = Linear(mamba.width, width, ("state", "hidden"), bias=mamba.has_output_bias, **kwargs)
        self.conv_weight = _conv_weight(mamba.conv_shape, dtype, rngs)
        self.conv_bias = _vector(mamba.conv_shape[1], dtype) if mamba.has_conv_bias else None
        self.decay_log = _vector(mamba.num_heads, dtype)
        self.step_bias = _vector(mamba.num_heads, dtype)
        self.skip = nnx.Param(np.ones((mamba.num_heads,), dtype), axes=("state",))
        self.out_norm = nnx.Param(np.ones((mamba.width,), dtype), axes=("state",)) if mamba.has_norm else None
        self.mamba, self.norm_eps = mamba, norm_eps

    def __call__(self, x: jax.Array, states: RecurrentStates) -> jax.Array:
        mamba, lead = self.mamba, x.shape[:-1]
        projected = self.in_proj(_scaled(x, mamba.in_multiplier))
        if mamba.part_multipliers:
            factors = np.repeat(np.array(mamba.part_multipliers, np.float32), mamba.part_widths)
            projected = projected * jnp.asarray(factors, projected.dtype)
        ends = np.cumsum((mamba.width, mamba.conv_shape[1]))
        gate, mixed, steps = jnp.split(projected, ends, axis=-1)
        bias = None if self.conv_bias is None else self.conv_bias[...]
        with jax.named_scope("convolve"):
            mixed = jax.nn.silu(states.convolve(mixed, _taps(self.conv_weight), bias))
        inner, b, c = jnp.split(mixed, np.cumsum(mamba.part_widths[1:3]), axis=-1)
        inner = inner.reshape(*lead, mamba.num_heads, mamba.head_size).astype(jnp.float32)
        b, c = (y.reshape(*lead, mamba.num_groups, mamba.state_size) for y in (b, c))
        steps = jax.nn.softplus(steps.astype(jnp.float32) + self.step_bias[...].astype(jnp.float32))
        steps = jnp.clip(steps, mamba.time_step_min, mamba.time_step_max)
        g = -jnp.exp(self.decay_log[...].astype(jnp.float32)) * steps
        with jax.named_scope("recur"):
            out = states.recur(RecurrentTokens(c, b, steps[..., None] * inner, g))
        out = out + self.skip[...].astype(jnp.float32)[:, None] * inner
        out = self._gated(out.reshape(*lead, -1), gate.astype(jnp.float32)).astype(x.dtype)
        return _scaled(self.out_proj(out), mamba.out_multiplier)

    def _gated(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        gate = jax.nn.silu(gate)
        if self.out_norm is None:
            return x * gate
        x = x if self.mamba.gates_after_norm else x * gate
        grouped = _normalized(x.reshape(*x.shape[:-1], self.mamba.num_groups, -1), self.norm_eps)
        x = grouped.reshape(x.shape) * self.out_norm[...].astype(jnp.float32)
        return x * gate if self.mamba.gates_after_norm else x


class ShortConv(nnx.Module):
    """out(c * conv(b * x)), where b, c and x are projections (LFM2)."""

    def __init__(self, width: int, conv: ConvConfig, *, dtype, rngs: nnx.Rngs | None):
        kwargs = {"bias": conv.has_bias, "dtype": dtype, "rngs": rngs}
        self.in_proj = Linear(width, 3 * conv.num_channels, ("hidden", "state"), **kwargs)
        self.out_proj = Linear(conv.num_channels, width, ("state", "hidden"), **kwargs)
        self.conv_weight = _conv_weight(conv.conv_shape, dtype, rngs)
        self.conv_bias = _vector(conv.num_channels, dtype) if conv.has_bias else None

    def __call__(self, x: jax.Array, states: RecurrentStates) -> jax.Array:
        b, c, inner = jnp.split(self.in_proj(x), 3, axis=-1)
        bias = None if self.conv_bias is None else self.conv_bias[...]
        with jax.named_scope("convolve"):
            out = states.convolve(b * inner, _taps(self.conv_weight), bias)
        return self.out_proj(c * out)


def _conv_weight(conv_shape: tuple[int, int], dtype: Any, rngs: nnx.Rngs | None) -> nnx.Param:
    """[C, 1, W], as checkpoints store it. Not quantized."""
    columns, channels = conv_shape
    return nnx.Param(normal(rngs, (channels, 1, columns + 1), dtype), axes=("state", None, None))


def _taps(weight: nnx.Param) -> jax.Array:
    """[C, W]."""
    return weight[...][:, 0]


def _vector(size: int, dtype: Any) -> nnx.Param:
    return nnx.Param(np.zeros((size,), dtype), axes=("state",))


def _unit(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _L2_EPS)


def _normalized(x: jax.Array, eps: float) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)
