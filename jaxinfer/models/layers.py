"""The layers of a decoder. Shapes use the legend of jaxinfer/README.md."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxinfer.models.attend import Attend, RecurrentStates, Tap, attention_options
from jaxinfer.models.basic import XIELU, Linear, Norm, head_norm, hidden_norm, is_side_by_side, normal, normed, project
from jaxinfer.models.config import Activation, MLAConfig, ModelConfig, MoEConfig, NormKind
from jaxinfer.models.hidden import Hidden, Pending, summed
from jaxinfer.models.indexer import Choice
from jaxinfer.models.moe import SparseMoE
from jaxinfer.models.recurrent import GatedDeltaNet, Mamba2, ShortConv
from jaxinfer.models.recurrent_config import DeltaConfig, MambaConfig
from jaxinfer.models.rope import Positions, rotate
from jaxinfer.quantization.adapted import AdaptedHeads, base_of


def _relu2(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


_ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": _relu2,
}


def activate(kind: Activation, x: jax.Array) -> jax.Array:
    """The activation function of x, in x's dtype. GELU (Hendrycks & Gimpel 2016) is computed in float32."""
    if not kind.startswith("gelu"):
        return _ACTIVATIONS[kind](x)
    return _ACTIVATIONS[kind](x.astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention. `attend` stores keys and values, and reads them; a layer that reads an earlier one's
    has none to store, and calls it with None. `inputs` is the width of what is projected, config.hidden_size by
    default."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype, rngs: nnx.Rngs | None, inputs: int | None = None):
        width, head_dim, num_kv_heads = config.hidden_size, config.head_dim_of(layer), config.num_kv_heads_of(layer)
        query_width, kv_width = config.num_heads * head_dim, num_kv_heads * head_dim
        kwargs = {"dtype": dtype, "rngs": rngs}
        gates = 2 if config.is_attention_gated else 1
        inputs = inputs or width
        self.q_proj = Linear(inputs, gates * query_width, ("hidden", "heads"), bias=config.qkv_bias, **kwargs)
        has_keys = config.kv_source(layer) == layer
        has_values = has_keys and not (config.global_values_are_keys and config.window(layer) is None)
        keys = partial(Linear, inputs, kv_width, ("hidden", "kv_heads"), bias=config.qkv_bias, **kwargs)
        self.k_proj, self.v_proj = keys() if has_keys else None, keys() if has_values else None
        self.o_proj = Linear(query_width, width, ("heads", "hidden"), bias=config.output_bias, **kwargs)
        self.rope = config.rope_of(layer)
        is_rotated = self.rope is not None
        norm = partial(head_norm, config, head_dim, dtype=dtype, is_rotated=is_rotated)
        self.q_norm = norm(config.num_heads, "heads")
        self.k_norm = norm(num_kv_heads, "kv_heads") if has_keys else None
        no_weight = {"eps": config.norm_eps, "bias": False, "dtype": dtype, "has_weight": False}
        has_norm = has_keys and config.has_value_norm
        self.v_norm = Norm((head_dim,), ("head_dim",), config.norm, **no_weight) if has_norm else None
        self.head_dim, self.window = head_dim, config.window(layer)
        self.qk_norm_span, self.is_norm_after_rotation = config.qk_norm_span, config.is_qk_norm_after_rotation
        self.clip = config.qkv_clip
        self.temperature = None if is_rotated else config.query_temperature
        self.temperature_period = config.query_temperature_period
        sinks = np.zeros((config.num_heads,), dtype) if config.has_sinks else None
        self.sinks = None if sinks is None else nnx.Param(sinks, axes=("heads",))
        self.options, self.is_gated = attention_options(config), config.is_attention_gated
        self.multipliers = (config.attention_in_multiplier, config.attention_out_multiplier)

    def __call__(self, x: jax.Array, positions: Positions, attend: Attend) -> jax.Array:
        x = _scaled(x, self.multipliers[0])
        q, *keys = project(
            x, [projection for projection in (self.q_proj, self.k_proj, self.v_proj) if projection is not None]
        )
        gate = None
        if self.is_gated:
            q, gate = jnp.split(q.reshape(*x.shape[:-1], -1, 2 * self.head_dim), 2, axis=-1)
            q = q.reshape(*x.shape[:-1], -1)
        q = self._prepared(q, self.q_norm, positions)
        if self.rope is not None:
            q = positions.scaled_queries(self.rope, q)
        if self.temperature is not None:
            q = positions.temperature_scaled(q, self.temperature, self.temperature_period)
        k, v = self._stored(keys, positions) if keys else (None, None)
        sinks = {} if self.sinks is None else {"sinks": self.sinks[...].astype(jnp.float32)}
        with jax.named_scope("attend"):
            out = attend(q, k, v, self.window, **self.options, **sinks)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        return _scaled(self.o_proj(out.reshape(*x.shape[:-1], -1)), self.multipliers[1])

    def keys_and_values(self, x: jax.Array, positions: Positions) -> tuple[jax.Array, jax.Array]:
        """Keys and values [..., Hkv, K] of x [..., D], as `attend` stores them."""
        parts = [projection for projection in (self.k_proj, self.v_proj) if projection is not None]
        if is_side_by_side(self.q_proj):
            parts = [self.q_proj, *parts]
        projected = project(_scaled(x, self.multipliers[0]), parts)
        return self._stored(projected[-2:] if self.v_proj is not None else projected[-1:], positions)

    def _stored(self, keys: Sequence[jax.Array], positions: Positions) -> tuple[jax.Array, jax.Array]:
        """Keys and values of what the projections give; keys are the values too where a layer has no others."""
        v = self._heads(self._clipped(keys[-1]))
        return self._prepared(keys[0], self.k_norm, positions), v if self.v_norm is None else self.v_norm(v)

    def _prepared(self, y: jax.Array, norm: Norm | None, positions: Positions) -> jax.Array:
        """Queries or keys [..., H, K] of a projection's output [..., H * K]: normalized, clipped and rotated."""
        is_norm_over_heads = self.qk_norm_span == "all_heads"
        if norm is not None and is_norm_over_heads:
            y = norm(y)
        y = self._heads(self._clipped(y))
        if norm is not None and not (is_norm_over_heads or self.is_norm_after_rotation):
            y = norm(y)
        if self.rope is not None:
            y = rotate(y, *positions.rotation(self.rope))
        return norm(y) if norm is not None and self.is_norm_after_rotation else y

    def _clipped(self, y: jax.Array) -> jax.Array:
        return y if self.clip is None else jnp.clip(y, -self.clip, self.clip)

    def _heads(self, y: jax.Array) -> jax.Array:
        return y.reshape(*y.shape[:-1], -1, self.head_dim)


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020), or without a gate down(activation(up(x))). `inner` is the inner
    width, config.intermediate_size by default."""

    def __init__(self, config: ModelConfig, inner: int | None = None, *, dtype, rngs: nnx.Rngs | None):
        width, inner = config.hidden_size, inner or config.intermediate_size
        kwargs = {"bias": config.mlp_bias, "dtype": dtype, "rngs": rngs}
        self.gate_proj = Linear(width, inner, ("hidden", "ffn"), **kwargs) if config.is_mlp_gated else None
        self.up_proj = Linear(width, inner, ("hidden", "ffn"), **kwargs)
        self.down_proj = Linear(inner, width, ("ffn", "hidden"), **kwargs)
        self.act = XIELU(dtype) if config.activation == "xielu" else None
        self.activation: Activation = config.activation
        self.multipliers = config.mlp_multipliers

    def __call__(self, x: jax.Array) -> jax.Array:
        on_gate, on_output = self.multipliers
        if self.gate_proj is None:
            return _scaled(self.down_proj(self._activate(self.up_proj(x))), on_output)
        gate, up = project(x, (self.gate_proj, self.up_proj))
        gated = self._activate(_scaled(gate, on_gate))
        return _scaled(self.down_proj(gated * up), on_output)

    def _activate(self, x: jax.Array) -> jax.Array:
        return activate(self.activation, x) if self.act is None else self.act(x)


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


def _recurrent_layer(config: ModelConfig, layer: int, *, dtype, rngs: nnx.Rngs | None) -> nnx.Module | None:
    recurrent, kwargs = config.recurrent_of(layer), {"dtype": dtype, "rngs": rngs}
    if recurrent is None:
        return None
    if isinstance(recurrent, DeltaConfig):
        return GatedDeltaNet(config.hidden_size, recurrent, config.norm_eps, **kwargs)
    if isinstance(recurrent, MambaConfig):
        return Mamba2(config.hidden_size, recurrent, config.norm_eps, **kwargs)
    return ShortConv(config.hidden_size, recurrent, **kwargs)


def _feed_forward(config: ModelConfig, layer: int, *, dtype, rngs: nnx.Rngs | None) -> nnx.Module:
    """The MLP of a layer, or its experts with their shared MLP."""
    moe = config.experts_of(layer)
    if moe is None or moe.is_beside_mlp:
        return MLP(config, config.mlp_size(layer), dtype=dtype, rngs=rngs)
    shared = MLP(config, moe.shared_size, dtype=dtype, rngs=rngs) if moe.shared_size else None
    activation = partial(activate, config.activation)
    kwargs = {"is_gated": config.is_mlp_gated, "dtype": dtype, "rngs": rngs}
    return SparseMoE(moe, config.hidden_size, activation, shared=shared, **kwargs)


class ExpertsBeside(nnx.Module):
    """Experts beside an MLP (Gemma 4): the sum of both, each with a norm of its own. The router reads hidden states
    before any norm."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, *, dtype, rngs: nnx.Rngs | None):
        activation = partial(activate, config.activation)
        kwargs = {"norm_eps": config.norm_eps, "dtype": dtype, "rngs": rngs}
        self.moe = SparseMoE(moe, config.hidden_size, activation, shared=None, **kwargs)
        self.mlp_norm, self.input_norm, self.output_norm = (hidden_norm(config, dtype) for _ in range(3))

    def __call__(self, x: jax.Array, fed: jax.Array, tap: Tap | None = None) -> jax.Array:
        """[..., D] of hidden states [..., D] and what the MLP made of them."""
        return self.mlp_norm(fed) + self.output_norm(self.moe(self.input_norm(x), x, tap))


class LayerInput(nnx.Module):
    """Adds to hidden states what a layer makes of its own input of the token (Gemma 3n, per-layer embeddings)."""

    def __init__(self, config: ModelConfig, size: int, *, dtype, rngs: nnx.Rngs | None):
        kwargs = {"bias": False, "dtype": dtype, "rngs": rngs}
        self.gate_proj = Linear(config.hidden_size, size, ("hidden", None), **kwargs)
        self.out_proj = Linear(size, config.hidden_size, (None, "hidden"), **kwargs)
        self.norm = hidden_norm(config, dtype)
        self.activation: Activation = config.activation

    def __call__(self, x: jax.Array, own: jax.Array) -> jax.Array:
        """Hidden states [..., D] with the layer's input [..., P]."""
        return x + self.norm(self.out_proj(activate(self.activation, self.gate_proj(x)) * own))


class DecoderLayer(nnx.Module):
    """Attention and MLP, with norms and residuals in the order of config.block."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype, rngs: nnx.Rngs | None):
        has_before, has_after = config.block != "post_norm", config.block in ("post_norm", "sandwich_norm")
        has_mixer, has_mlp = config.layer_kind(layer) != "none", config.has_mlp(layer)
        has_mlp_norm = has_mlp and has_before and config.block != "parallel_one_norm"
        self.attention_norm = hidden_norm(config, dtype) if has_before and has_mixer else None
        attention = Attention if config.mla is None else LatentAttention
        self.attention = attention(config, layer, dtype=dtype, rngs=rngs) if config.has_attention(layer) else None
        self.recurrent = _recurrent_layer(config, layer, dtype=dtype, rngs=rngs)
        self.attention_post_norm = hidden_norm(config, dtype) if has_after else None
        self.mlp_norm = hidden_norm(config, dtype) if has_mlp_norm else None
        self.mlp = _feed_forward(config, layer, dtype=dtype, rngs=rngs) if has_mlp else None
        self.mlp_post_norm = hidden_norm(config, dtype) if has_after else None
        moe, inputs = config.experts_of(layer), config.layer_inputs
        kwargs = {"dtype": dtype, "rngs": rngs}
        self.beside = ExpertsBeside(config, moe, **kwargs) if moe is not None and moe.is_beside_mlp else None
        self.layer_input = None if inputs is None else LayerInput(config, inputs.size, **kwargs)
        self.scalar = nnx.Param(np.ones((1,), dtype), axes=(None,)) if config.has_layer_scalar else None
        self.block, self.residual_multiplier = config.block, config.residual_multiplier

    def __call__(
        self,
        x: jax.Array,
        positions: Positions,
        attend: Attend,
        tap: Tap | None = None,
        layer_input: jax.Array | None = None,
    ) -> jax.Array:
        """Hidden states [..., D] after the layer. The taps "attention" and "mlp" are the terms added to the
        residual, "experts" is as of `SparseMoE`. `layer_input` [..., P] is of a model with `layer_inputs`."""
        return summed(self.run(x, positions, attend, tap, layer_input))

    def run(
        self,
        x: Hidden,
        positions: Positions,
        attend: Attend,
        tap: Tap | None = None,
        layer_input: jax.Array | None = None,
    ) -> Hidden:
        """As the call, of hidden states whose last addition may be left to the next norm."""
        if self.attention is None or self.recurrent is not None or self.mlp is None:
            return self._run_hybrid(x, positions, attend, tap)
        x, read = (summed(x),) * 2 if self.attention_norm is None else normed(self.attention_norm, x)
        with jax.named_scope("attention"):
            attended = self.attention(read, positions, attend)
        attended = self._residual_term("attention", attended, self.attention_post_norm, tap)
        if self.block in ("pre_norm", "post_norm", "sandwich_norm"):
            x, read = (x + attended,) * 2 if self.mlp_norm is None else self.mlp_norm.after(x, attended)
        else:
            read = read if self.mlp_norm is None else self.mlp_norm(x)
            x = x + attended
        with jax.named_scope("mlp"):
            fed = self._fed(read, tap) if self.beside is None else self.beside(x, self.mlp(read), tap)
        x = self._with_term(x, self._residual_term("mlp", fed, self.mlp_post_norm, tap))
        if self.layer_input is not None and layer_input is not None:
            with jax.named_scope("layer_input"):
                x = self.layer_input(summed(x), layer_input)
        if self.scalar is not None:
            x = summed(x) * self.scalar[...]
        return x

    def _run_hybrid(self, x: Hidden, positions: Positions, attend: Any, tap: Tap | None) -> Hidden:
        """A layer of block "pre_norm" that is not attention and MLP. The tap "attention" is what its mixers add."""
        if self.attention_norm is not None:
            (x, read), mixed = normed(self.attention_norm, x), []
            if self.recurrent is not None:
                states: RecurrentStates = attend
                with jax.named_scope("recurrent"):
                    mixed.append(self.recurrent(read, states))
            if self.attention is not None:
                with jax.named_scope("attention"):
                    mixed.append(self.attention(read, positions, attend))
            x = self._with_term(x, self._residual_term("attention", sum(mixed[1:], start=mixed[0]), None, tap))
        if self.mlp is not None and self.mlp_norm is not None:
            x, read = normed(self.mlp_norm, x)
            with jax.named_scope("mlp"):
                fed = self._fed(read, tap)
            x = self._with_term(x, self._residual_term("mlp", fed, None, tap))
        return x

    def _fed(self, read: jax.Array, tap: Tap | None) -> jax.Array:
        """[..., D] that the MLP, or the experts, make of hidden states [..., D]."""
        mlp: Any = self.mlp
        return mlp(read, tap=tap) if isinstance(mlp, SparseMoE) else mlp(read)

    def _with_term(self, x: jax.Array, term: jax.Array) -> Hidden:
        """The sum, left to the next norm where a kernel of the layer's own norms would compute it."""
        norm = self.mlp_norm or self.attention_norm
        return Pending(x, term) if norm is not None and norm.adds(x) else x + term

    def _residual_term(
        self, name: str, y: jax.Array, norm: Callable[[jax.Array], jax.Array] | None, tap: Tap | None
    ) -> jax.Array:
        y = y if norm is None else norm(y)
        if self.residual_multiplier != 1.0:
            y = (y.astype(jnp.float32) * self.residual_multiplier).astype(y.dtype)
        if tap is not None:
            tap(name, y)
        return y


class LatentAttention(nnx.Module):
    """Multi-head latent attention (DeepSeek-V2, section 2.1). R is the width of the latent vector.

    A head's key is [k_up c, r] and its value is v_up c, where c is the latent vector and r the rotated key that all
    heads share. The matrices are absorbed into queries and outputs (section 2.1.2): Hq queries [k_up q, q_r] attend to
    one key head [c, r], whose first R entries are the values. Only that is cached, and `attend` stores and reads it:
    576 numbers per token in DeepSeek-V3, instead of 40,960 for keys and values of all heads.
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype, rngs: nnx.Rngs | None):
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
        self.kv_a_proj = Linear(width, mla.latent_size + mla.rope_size, ("hidden", "latent"), **biased)
        self.kv_a_norm = _norm(mla.latent_size, config.norm, mla.norm_eps, dtype)
        self.k_up = HeadStack(num_heads, mla.latent_size, mla.nope_size, **kwargs)
        self.v_up = HeadStack(num_heads, mla.latent_size, mla.value_size, **kwargs)
        self.o_proj = Linear(num_heads * mla.value_size, width, ("heads", "hidden"), **biased)
        self.indexer = Indexer(width, mla, **kwargs) if mla.has_indexer else None
        self.mla, self.window, self.rope = mla, config.window(layer), config.rope
        self.num_heads, self.scale = num_heads, config.attention_scale

    def __call__(self, x: jax.Array, positions: Positions, attend) -> jax.Array:
        mla = self.mla
        cos, sin = positions.rotation(self.rope)
        q, query_latent, kv = self._projected(x)
        q = q.reshape(*x.shape[:-1], self.num_heads, mla.query_size)
        q_nope, q_rope = jnp.split(q, [mla.nope_size], axis=-1)
        q = jnp.concatenate([self.k_up.to_latent(q_nope), rotate(self._paired(q_rope), cos, sin)], axis=-1)
        q = positions.scaled_queries(self.rope, q)
        k, latent = self._stored(kv, positions)
        options = {}
        if self.indexer is not None and query_latent is not None:
            options["choice"], index_key = self.indexer(x, query_latent, cos, sin)
            k = jnp.concatenate([k, index_key], axis=-1)
            q = jnp.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, mla.index_size)])  # which does not change its scores
        with jax.named_scope("attend"):
            out = attend(q, k, latent, self.window, scale=self.scale, **options)
        return self.o_proj(self.v_up.from_latent(out).reshape(*x.shape[:-1], -1))

    def keys_and_values(self, x: jax.Array, positions: Positions) -> tuple[jax.Array, jax.Array]:
        """Keys and values [..., 1, K] of x [..., D], as `attend` stores them. An indexer's keys are not among them."""
        return self._stored(self.kv_a_proj(x), positions)

    def _stored(self, kv: jax.Array, positions: Positions) -> tuple[jax.Array, jax.Array]:
        """Keys, and the latent vectors, of what the projection gives."""
        latent, k_rope = jnp.split(kv, [self.mla.latent_size], axis=-1)
        latent, k_rope = self.kv_a_norm(latent)[..., None, :], k_rope[..., None, :]
        rotated = rotate(self._paired(k_rope), *positions.rotation(self.rope))
        return jnp.concatenate([latent, rotated], axis=-1), latent

    def _projected(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """Queries, the latent vector that they are projected from, if they are, and what becomes keys and values."""
        first = self.q_proj if self.q_a_proj is None else self.q_a_proj
        q, kv = project(x, (first, self.kv_a_proj))  # pyright: ignore[reportArgumentType]
        if self.q_proj is not None:
            return q, None, kv
        latent = self.q_a_norm(q)  # pyright: ignore[reportOptionalCall]
        return self.q_b_proj(latent), latent, kv  # pyright: ignore[reportOptionalCall]

    def _paired(self, x: jax.Array) -> jax.Array:
        """The rotated dimensions of x in the order of `rotate`."""
        return deinterleave(x) if self.mla.is_interleaved else x


def _norm(width: int, kind: NormKind, eps: float, dtype) -> Norm:
    return Norm((width,), ("latent",), kind, eps=eps, bias=False, dtype=dtype)


class HeadStack(nnx.Module):
    """A matrix [R, outputs] for each head. Not quantized, because it is also used transposed."""

    def __init__(self, num_heads: int, inputs: int, outputs: int, *, dtype, rngs: nnx.Rngs | None):
        self.weight = nnx.Param(normal(rngs, (num_heads, inputs, outputs), dtype), axes=("heads", None, None))

    def from_latent(self, x: jax.Array) -> jax.Array:
        """[..., Hq, outputs] of x [..., Hq, R]."""
        return self._product("...hr,hrn->...hn", x, is_transposed=False)

    def to_latent(self, x: jax.Array) -> jax.Array:
        """[..., Hq, R] of x [..., Hq, outputs]."""
        return self._product("...hn,hrn->...hr", x, is_transposed=True)

    def _product(self, equation: str, x: jax.Array, *, is_transposed: bool) -> jax.Array:
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        weight = self.weight.get_value()
        x = weight.scaled(x) if is_transposed and isinstance(weight, AdaptedHeads) else x
        product = jnp.einsum(equation, x, base_of(weight), precision=precision, preferred_element_type=x.dtype)
        return weight.add(product, x, is_transposed=is_transposed) if isinstance(weight, AdaptedHeads) else product


class Indexer(nnx.Module):
    """Index queries and keys of tokens. The first dimensions are rotated, as wide as those of the attention."""

    def __init__(self, width: int, mla: MLAConfig, *, dtype, rngs: nnx.Rngs | None):
        if mla.query_rank is None:
            raise ValueError("an indexer reads the latent vector of queries, and query_rank is None")
        heads, size = mla.index_heads, mla.index_size
        kwargs = {"bias": False, "dtype": dtype, "rngs": rngs}
        self.q_proj = Linear(mla.query_rank, heads * size, ("latent", "latent"), **kwargs)
        self.k_proj = Linear(width, size, ("hidden", "latent"), **kwargs)
        self.k_norm = Norm((size,), ("latent",), "layer", eps=1e-6, bias=True, dtype=dtype)
        self.weights_proj = Linear(width, heads, ("hidden", "latent"), **kwargs)
        self.mla = mla

    def __call__(self, x: jax.Array, latent: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[Choice, jax.Array]:
        """The choice, and index keys [..., 1, Di], of hidden states [..., D] and latent vectors of queries."""
        mla = self.mla
        q = self.q_proj(latent).reshape(*x.shape[:-1], mla.index_heads, mla.index_size)
        k, weights = project(x, (self.k_proj, self.weights_proj))
        k = self.k_norm(k)[..., None, :]
        weights = weights.astype(jnp.float32) * mla.index_heads**-0.5
        return Choice(self._rotated(q, cos, sin), weights, mla.index_topk), self._rotated(k, cos, sin)

    def _rotated(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        turned, rest = jnp.split(x, [self.mla.rope_size], axis=-1)
        if self.mla.is_index_interleaved:
            turned = deinterleave(turned)
        return jnp.concatenate([rotate(turned, cos, sin), rest], axis=-1)


def deinterleave(x: jax.Array) -> jax.Array:
    """Dimensions [..., 2 N] that rotate in pairs of neighbours in the order of `rotate`. Scores do not change, as
    queries and keys are permuted alike."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return jnp.concatenate([pairs[..., 0], pairs[..., 1]], axis=-1)
