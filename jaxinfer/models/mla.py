"""Multi-head latent attention (DeepSeek-V2, section 2.1). Shapes use the legend of jaxinfer/README.md; R is the width
of the latent vector.

A head's key is [k_up c, r] and its value is v_up c, where c is the latent vector and r the rotated key that all heads
share. The matrices are absorbed into queries and outputs (section 2.1.2): Hq queries [k_up q, q_r] attend to one key
head [c, r], whose first R entries are the values. Only that is cached: 576 numbers per token in DeepSeek-V3, instead of
40,960 for keys and values of all heads.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.models.config import ModelConfig, NormKind
from jaxinfer.models.linear import Linear
from jaxinfer.models.norms import Norm
from jaxinfer.models.rope import Positions, rotate


class LatentAttention(nnx.Module):
    """Attention with one cached vector per token. `attend` stores and reads it."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype, rngs: nnx.Rngs):
        mla = config.mla
        if mla is None:
            raise ValueError(f"{config.architecture} has no latent attention")
        width, num_heads = config.hidden_size, config.num_heads
        kwargs = {"dtype": dtype, "rngs": rngs}
        biased = {"bias": config.output_bias, **kwargs}
        query_width = num_heads * mla.query_size
        if mla.query_rank is None:
            self.q_a_proj = self.q_a_norm = self.q_b_proj = None
            self.q_proj = Linear(width, query_width, ("hidden", "heads"), bias=False, **kwargs)
        else:
            self.q_proj = None
            self.q_a_proj = Linear(width, mla.query_rank, ("hidden", "latent"), **biased)
            self.q_a_norm = _norm(mla.query_rank, config.norm, mla.norm_eps, dtype)
            self.q_b_proj = Linear(mla.query_rank, query_width, ("latent", "heads"), bias=False, **kwargs)
        self.kv_a_proj = Linear(width, mla.key_size, ("hidden", "latent"), **biased)
        self.kv_a_norm = _norm(mla.latent_size, config.norm, mla.norm_eps, dtype)
        self.k_up = HeadStack(num_heads, mla.latent_size, mla.nope_size, **kwargs)
        self.v_up = HeadStack(num_heads, mla.latent_size, mla.value_size, **kwargs)
        self.o_proj = Linear(num_heads * mla.value_size, width, ("heads", "hidden"), **biased)
        self.mla, self.layer, self.window, self.rope = mla, layer, config.window(layer), config.rope
        self.num_heads, self.scale = num_heads, config.attention_scale

    def __call__(self, x: jax.Array, positions: Positions, attend) -> jax.Array:
        mla = self.mla
        cos, sin = positions.rotation(self.rope)
        q = self._queries(x).reshape(*x.shape[:-1], self.num_heads, mla.query_size)
        q_nope, q_rope = jnp.split(q, [mla.nope_size], axis=-1)
        latent, k_rope = jnp.split(self.kv_a_proj(x), [mla.latent_size], axis=-1)
        latent, k_rope = self.kv_a_norm(latent)[..., None, :], k_rope[..., None, :]
        q = jnp.concatenate([self.k_up.to_latent(q_nope), rotate(self._paired(q_rope), cos, sin)], axis=-1)
        k = jnp.concatenate([latent, rotate(self._paired(k_rope), cos, sin)], axis=-1)
        with jax.named_scope("attend"):
            out = attend(self.layer, q, k, latent, self.window, scale=self.scale)
        return self.o_proj(self.v_up.from_latent(out).reshape(*x.shape[:-1], -1))

    def _queries(self, x: jax.Array) -> jax.Array:
        if self.q_proj is not None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))  # pyright: ignore[reportOptionalCall]

    def _paired(self, x: jax.Array) -> jax.Array:
        """The rotated dimensions of x in the order of `rotate`. Scores do not change, as queries and keys are permuted
        alike."""
        if not self.mla.is_interleaved:
            return x
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        return jnp.concatenate([pairs[..., 0], pairs[..., 1]], axis=-1)


def _norm(width: int, kind: NormKind, eps: float, dtype) -> Norm:
    return Norm((width,), ("latent",), kind, eps=eps, bias=False, dtype=dtype)


class HeadStack(nnx.Module):
    """A matrix [R, outputs] for each head. Not quantized, because it is also used transposed."""

    def __init__(self, num_heads: int, inputs: int, outputs: int, *, dtype, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.weight = nnx.Param(init(rngs.params(), (num_heads, inputs, outputs), dtype), axes=("heads", None, None))

    def from_latent(self, x: jax.Array) -> jax.Array:
        """[..., Hq, outputs] of x [..., Hq, R]."""
        return self._product("...hr,hrn->...hn", x)

    def to_latent(self, x: jax.Array) -> jax.Array:
        """[..., Hq, R] of x [..., Hq, outputs]."""
        return self._product("...hn,hrn->...hr", x)

    def _product(self, equation: str, x: jax.Array) -> jax.Array:
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        weight = self.weight.get_value()
        return jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=x.dtype)
