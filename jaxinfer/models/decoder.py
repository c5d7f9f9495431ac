"""The one decoder, and the plain-dict form of its parameters that crosses `jax.jit`."""

import difflib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.layers import Attend, DecoderLayer, RMSNorm, Tap
from jaxinfer.models.rope import rotation
from jaxinfer.quantization.matmul import matmul, rows, transposed

# Nested dict of arrays, or `QuantizedArray`s, keyed like the modules; layers by their number as a string.
Params = dict[str, Any]


class Decoder(nnx.Module):
    """A decoder-only transformer over any leading shape: [B, T] for training and contiguous caches, [T] for pages."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype=None):
        dtype = jnp.dtype(dtype or config.dtype)
        init = nnx.initializers.normal(0.02)
        shape = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(init(rngs.params(), shape, dtype), axes=("vocab", "hidden"))
        self.layers = nnx.List([DecoderLayer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_layers)])
        self.final_norm = RMSNorm(config.hidden_size, ("hidden",), eps=config.norm_eps, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Param(init(rngs.params(), shape[::-1], dtype), axes=("hidden", "vocab"))
        self.config = config

    def __call__(self, tokens: jax.Array, positions: jax.Array, attend: Attend, tap: Tap | None = None) -> jax.Array:
        """Final hidden states [..., D] of int32 tokens [...] at int32 positions [...]."""
        tap = tap or (lambda name, value: None)
        x = rows(self.embed.get_value(), tokens, self.final_norm.weight.get_value().dtype)
        tap("embed", x)
        cos, sin = rotation(self.config.rope, positions)
        for layer in self.layers:
            with jax.named_scope(layer.name):
                x = layer(x, cos, sin, attend, tap)
        x = self.final_norm(x)
        tap("final_norm", x)
        return x

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 logits [..., V] of hidden states [..., D]."""
        tied = self.config.tie_word_embeddings
        weight = transposed(self.embed.get_value()) if tied else self.lm_head.get_value()
        return matmul(hidden, weight, jnp.float32)


def split(decoder: Decoder) -> Params:
    """The parameters of a module as a plain nested dict."""
    return _string_keys(nnx.to_pure_dict(nnx.state(decoder, nnx.Param)))


def bind(config: ModelConfig, params: Params) -> Decoder:
    """The decoder over `params`; called while tracing, so modules never cross a jit boundary."""
    graph, state = _definition(config)
    state = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(state, _integer_keys(params))
    return nnx.merge(graph, state)


def compute_dtype(params: Params) -> Any:
    """The dtype of hidden states. Weights may be quantized, norms never are."""
    return params["final_norm"]["weight"].dtype


def init_params(config: ModelConfig, key: jax.Array, dtype=None) -> Params:
    """Random parameters: normal(0, 0.02) weights, unit norms, zero biases."""

    @jax.jit
    def make(key):
        return split(Decoder(config, rngs=nnx.Rngs(params=key), dtype=dtype))

    return make(key)


def abstract_params(config: ModelConfig, dtype=None) -> Params:
    """Shapes and dtypes of the parameters (`jax.ShapeDtypeStruct` leaves); allocates nothing."""
    return jax.eval_shape(lambda: split(Decoder(config, rngs=nnx.Rngs(0), dtype=dtype)))


def logical_axes(config: ModelConfig) -> Params:
    """The name of every dimension of every parameter, for sharding rules."""
    module = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    axes: Params = {}
    for path, variable in flat:
        node = axes
        for part in path[:-1]:
            node = node.setdefault(str(part), {})
        node[str(path[-1])] = variable.axes
    return axes


def tap_names(config: ModelConfig) -> list[str]:
    """Every hidden state a forward pass can return."""
    per_layer = ("attention", "mlp", "residual")
    layers = [f"layers.{i}.{name}" for i in range(config.num_layers) for name in per_layer]
    return ["embed", *layers, "final_norm"]


def check_taps(config: ModelConfig, taps: Sequence[str]) -> tuple[str, ...]:
    """Raises ValueError for a name the model does not have, with the nearest one it has."""
    known = tap_names(config)
    for tap in taps:
        if tap not in known:
            near = difflib.get_close_matches(str(tap), known, n=1)
            raise ValueError(f"no tap {tap!r}" + (f": did you mean {near[0]!r}?" if near else ""))
    return tuple(taps)


def collect(taps: Sequence[str]) -> tuple[dict[str, jax.Array], Callable[[str, jax.Array], None]]:
    """A dict, and the tap function that fills it with the named hidden states."""
    found: dict[str, jax.Array] = {}

    def tap(name: str, value: jax.Array) -> None:
        if name in taps:
            found[name] = value

    return found, tap


@lru_cache(maxsize=32)
def _definition(config: ModelConfig):
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def _string_keys(tree: Any) -> Any:
    return {str(key): _string_keys(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def _integer_keys(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {int(key) if key.isdigit() else key: _integer_keys(value) for key, value in tree.items()}
