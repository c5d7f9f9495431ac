"""The layers of a decoder. Shapes use the legend of jaxinfer/README.md."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.rope import rotate
from jaxinfer.quantization.matmul import matmul

# attend(layer, q [..., Hq, K], k [..., Hkv, K], v [..., Hkv, K], window) -> [..., Hq, K]
Attend = Callable[[int, jax.Array, jax.Array, jax.Array, int | None], jax.Array]
Tap = Callable[[str, jax.Array], None]


class Linear(nnx.Module):
    """x @ weight + bias, with weight [inputs, outputs], which may be quantized."""

    def __init__(self, inputs: int, outputs: int, axes: tuple[str, str], *, bias: bool, dtype, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.weight = nnx.Param(init(rngs.params(), (inputs, outputs), dtype), axes=axes)
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype), axes=axes[1:]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = matmul(x, self.weight.get_value())
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Zhang & Sennrich 2019. Statistics in float32; the result is rounded to x's dtype before the weight
    multiplies it, as Llama does."""

    def __init__(self, width: int, axes: tuple[str], *, eps: float, dtype):
        self.weight = nnx.Param(jnp.ones((width,), dtype), axes=axes)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.weight[...]


class Attention(nnx.Module):
    """Grouped-query attention; where keys and values live is `attend`'s business."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype, rngs: nnx.Rngs):
        width, head_dim = config.hidden_size, config.head_dim
        query_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
        kwargs = {"dtype": dtype, "rngs": rngs}
        self.q_proj = Linear(width, query_width, ("hidden", "heads"), bias=config.qkv_bias, **kwargs)
        self.k_proj = Linear(width, kv_width, ("hidden", "kv_heads"), bias=config.qkv_bias, **kwargs)
        self.v_proj = Linear(width, kv_width, ("hidden", "kv_heads"), bias=config.qkv_bias, **kwargs)
        self.o_proj = Linear(query_width, width, ("heads", "hidden"), bias=config.output_bias, **kwargs)
        norm = (head_dim, ("head_dim",))
        self.q_norm = RMSNorm(*norm, eps=config.norm_eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(*norm, eps=config.norm_eps, dtype=dtype) if config.qk_norm else None
        self.layer, self.head_dim, self.window = layer, head_dim, config.window(layer)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend) -> jax.Array:
        q, k, v = (
            proj(x).reshape(*x.shape[:-1], -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(self.layer, rotate(q, cos, sin), rotate(k, cos, sin), v, self.window)
        return self.o_proj(out.reshape(*x.shape[:-1], -1))


class GatedMLP(nnx.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        kwargs = {"bias": config.mlp_bias, "dtype": dtype, "rngs": rngs}
        self.gate_proj = Linear(width, inner, ("hidden", "ffn"), **kwargs)
        self.up_proj = Linear(width, inner, ("hidden", "ffn"), **kwargs)
        self.down_proj = Linear(inner, width, ("ffn", "hidden"), **kwargs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype, rngs: nnx.Rngs):
        norm = {"eps": config.norm_eps, "dtype": dtype}
        self.attention_norm = RMSNorm(config.hidden_size, ("hidden",), **norm)
        self.attention = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, ("hidden",), **norm)
        self.mlp = GatedMLP(config, dtype=dtype, rngs=rngs)
        self.name = f"layers.{layer}"

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend, tap: Tap) -> jax.Array:
        attended = self.attention(self.attention_norm(x), cos, sin, attend)
        tap(f"{self.name}.attention", attended)
        x = x + attended
        transformed = self.mlp(self.mlp_norm(x))
        tap(f"{self.name}.mlp", transformed)
        x = x + transformed
        tap(f"{self.name}.residual", x)
        return x
