"""The decoder, and the plain-dict form of its parameters that crosses `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.checks import did_you_mean
from jaxinfer.models.basic import Linear, hidden_norm, normal
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.experts import SparseMoE
from jaxinfer.models.layers import Attend, DecoderLayer, Tap
from jaxinfer.models.rope import Positions
from jaxinfer.quantization.matmul import matmul, rows, transposed

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

# Nested dict of arrays or `QuantizedArray`s, with the modules' names as keys; layers by their number as a string.
Params = dict[str, Any]
_NUM_NAMED = 5  # most missing, and most unexpected, parameters named in a message


class Decoder(nnx.Module):
    """A decoder-only transformer for any leading shape: [B, T] in training and contiguous caches, [T] with pages."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None, dtype=None):
        dtype = jnp.dtype(dtype or config.dtype)
        shape = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(normal(rngs, shape, dtype), axes=("vocab", "hidden"))
        self.position_embed = None if not config.has_position_embedding else _positions(config, rngs, dtype)
        self.layers = nnx.List([DecoderLayer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_layers)])
        self.final_norm = hidden_norm(config, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Param(normal(rngs, shape[::-1], dtype), axes=("hidden", "vocab"))
        has_bias = config.lm_head_bias
        self.lm_head_bias = nnx.Param(np.zeros((config.vocab_size,), dtype), axes=("vocab",)) if has_bias else None
        self.config = config

    def __call__(
        self, tokens: Int[Array, "*rows"], positions: Int[Array, "*rows"], attend: Attend, tap: Tap | None = None
    ) -> Float[Array, "*rows D"]:
        """Final hidden states [..., D] of int32 tokens [...] at int32 positions [...]."""
        tap = tap or (lambda name, value: None)
        dtype = self.final_norm.weight.get_value().dtype
        with jax.named_scope("embed"):
            x = rows(self.embed.get_value(), tokens, dtype)
            x = scale_embedding(
                self.config, x, None if self.position_embed is None else self.position_embed[...][positions]
            )
        tap("embed", x)
        shared = Positions(positions)
        for layer in self.layers:
            with jax.named_scope(layer.name):
                x = layer(x, shared, attend, tap)
        with jax.named_scope("final_norm"):
            x = self.final_norm(x)
        tap("final_norm", x)
        return x

    @jax.named_scope("logits")
    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """float32 logits [..., V] of hidden states [..., D]."""
        config = self.config
        weight = transposed(self.embed.get_value()) if config.tie_word_embeddings else self.lm_head.get_value()
        logits = matmul(hidden, weight, jnp.float32)
        if self.lm_head_bias is not None:
            logits = logits + self.lm_head_bias[...].astype(jnp.float32)
        logits = logits[..., : config.vocab_size]  # on a mesh the vocabulary may be padded
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        if config.logit_softcap is not None:
            logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
        return logits


def scale_embedding(config: ModelConfig, x: jax.Array, position_rows: jax.Array | None) -> jax.Array:
    """Hidden states [..., D] before the first layer, from rows of the embedding and of the position embedding."""
    if config.embedding_multiplier != 1.0:
        x = x * jnp.asarray(config.embedding_multiplier, x.dtype)  # rounded to x's dtype, as in Gemma
    return x if position_rows is None else x + position_rows


def _positions(config: ModelConfig, rngs: nnx.Rngs | None, dtype) -> nnx.Param:
    shape = (config.max_position_embeddings, config.hidden_size)
    return nnx.Param(normal(rngs, shape, dtype), axes=("positions", "hidden"))


def split(decoder: Decoder) -> Params:
    """The parameters of a module as a plain nested dict."""
    return _string_keys(nnx.to_pure_dict(nnx.state(decoder, nnx.Param)))


def bind(config: ModelConfig, params: Params, experts_over: tuple[Mesh, str] | None = None) -> Decoder:
    """A decoder with `params`; called while tracing, so that modules never cross a jit boundary.

    `experts_over` is the mesh, and its axis, over which experts are sharded. Raises ValueError, with names, for missing
    or unexpected parameters.
    """
    graph, state, names = _definition(config)
    found = frozenset(_leaf_names(params))
    if found != names:
        raise ValueError(_mismatch(config, names, found))
    state = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(state, _integer_keys(params))
    decoder = nnx.merge(graph, state)
    for path, module in nnx.iter_modules(decoder):
        if isinstance(module, Linear):
            module.scope = str(path[-1])
    if experts_over is not None:
        for layer in decoder.layers:
            if isinstance(layer.mlp, SparseMoE):
                layer.mlp.over = experts_over
    return decoder


def compute_dtype(params: Params) -> Any:
    """The dtype of hidden states: that of the norms, which are never quantized."""
    return params["final_norm"]["weight"].dtype


def keeps_float32(path: Sequence[str]) -> bool:
    """Whether a parameter is float32 for any dtype of the model: the correction bias of a router, to which float32
    scores are added."""
    return tuple(path[-2:]) == ("router", "correction")


def init_params(config: ModelConfig, key: jax.Array, dtype=None) -> Params:
    """Random parameters: normal(0, 0.02) weights, unit norms, zero biases."""

    @jax.jit
    def make(key):
        return split(Decoder(config, rngs=nnx.Rngs(params=key), dtype=dtype))

    return make(key)


def abstract_params(config: ModelConfig, dtype=None) -> Params:
    """Shapes and dtypes of the parameters (`jax.ShapeDtypeStruct` leaves); allocates nothing."""
    if dtype is None:
        return _string_keys(nnx.to_pure_dict(_definition(config)[1]))
    return abstract_params(replace(config, dtype=jnp.dtype(dtype).name))


def logical_axes(config: ModelConfig) -> Params:
    """The logical name of every dimension of every parameter, for the sharding rules of `jaxinfer.parallel`."""
    axes: Params = {}
    # float32, as in other callers, to hit the cache of `_definition`: tracing 80 layers takes seconds.
    for path, variable in nnx.to_flat_state(_definition(replace(config, dtype="float32"))[1]):
        node = axes
        for part in path[:-1]:
            node = node.setdefault(str(part), {})
        node[str(path[-1])] = variable.axes
    return axes


def tap_names(config: ModelConfig) -> list[str]:
    """Names of the hidden states that a forward pass can return."""
    per_layer = ("attention", "mlp", "residual")
    layers = [f"layers.{i}.{name}" for i in range(config.num_layers) for name in per_layer]
    return ["embed", *layers, "final_norm"]


def check_taps(config: ModelConfig, taps: Sequence[str]) -> tuple[str, ...]:
    """The taps as a tuple. Raises ValueError for an unknown name, with the nearest known one."""
    known = tap_names(config)
    for tap in taps:
        if tap not in known:
            raise ValueError(f"no tap {tap!r}{did_you_mean(tap, known)}")
    return tuple(taps)


def collect(taps: Sequence[str]) -> tuple[dict[str, jax.Array], Callable[[str, jax.Array], None]]:
    """A dict, and a tap function that stores the named hidden states in it."""
    found: dict[str, jax.Array] = {}

    def tap(name: str, value: jax.Array) -> None:
        if name in taps:
            found[name] = value

    return found, tap


@lru_cache(maxsize=32)
def _definition(config: ModelConfig):
    graph, state = nnx.split(Decoder(config, rngs=None))
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    return graph, state, frozenset(_leaf_names(_string_keys(nnx.to_pure_dict(state))))


def _leaf_names(tree: Params, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaf_names(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _mismatch(config: ModelConfig, wanted: frozenset[str], found: frozenset[str]) -> str:
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    parts = [f"parameter {name!r} is missing" for name in missing[:_NUM_NAMED]]
    parts += [f"parameter {name!r} is not of this model" for name in extra[:_NUM_NAMED]]
    left_out = len(missing) + len(extra) - len(parts)
    return f"{config.architecture}: {'; '.join(parts)}" + (f"; and {left_out} more" if left_out else "")


def _string_keys(tree: Any) -> Any:
    return {str(key): _string_keys(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def _integer_keys(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {int(key) if key.isdigit() else key: _integer_keys(value) for key, value in tree.items()}
