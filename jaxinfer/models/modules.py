"""The Flax modules of a decoder over its parameters.

Flax takes half a second to import, so that `decoder` imports this only where something is traced or initialized.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.models.basic import Linear, Norm, hidden_norm, logits_at, normal, normed, scaled_logits
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.draft_head import DraftHead, Ends, layer_kind
from jaxinfer.models.hidden import Hidden
from jaxinfer.models.layers import DecoderLayer
from jaxinfer.models.moe import SparseMoE
from jaxinfer.quantization.adapted import is_adapted
from jaxinfer.quantization.matmul import matmul, rows

# Nested dict of arrays or `QuantizedArray`s, with the modules' names as keys; layers by their number as a string.
Params = dict[str, Any]
ExpertsOver = tuple[Mesh, str]


class Embedding(nnx.Module):
    """Hidden states [..., D] before the first layer, of int32 tokens [...] at int32 positions [...]."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs | None):
        self.embed = nnx.Param(normal(rngs, (config.vocab_size, config.hidden_size), dtype), axes=("vocab", "hidden"))
        shape = (config.max_position_embeddings, config.hidden_size)
        table = normal(rngs, shape, dtype) if config.has_position_embedding else None
        self.position_embed = None if table is None else nnx.Param(table, axes=("positions", "hidden"))
        if (inputs := config.layer_inputs) is not None:
            width, kwargs = inputs.count * inputs.size, {"bias": False, "dtype": dtype}
            self.layer_embed = nnx.Param(normal(rngs, (inputs.vocab_size, width), dtype), axes=("vocab", None))
            self.layer_embed_proj = Linear(config.hidden_size, width, ("hidden", None), rngs=rngs, **kwargs)
            self.layer_embed_norm = Norm((inputs.size,), (None,), config.norm, eps=config.norm_eps, **kwargs)
        if (tokens := config.token_map) is not None:
            self.token_pieces = nnx.Param(np.zeros((tokens.num_tokens, tokens.num_pieces), np.int32), axes=(None, None))
        self.config = config

    def layer_inputs(self, tokens: jax.Array, positions: jax.Array, x: jax.Array) -> jax.Array | None:
        """Inputs [..., L, P] of layers (`LayerInputConfig`), of the embedding x [..., D] of tokens [...] at positions
        [...]; None for a model without them. Scales are rounded as in Transformers' `Gemma4TextModel`."""
        if (inputs := self.config.layer_inputs) is None:
            return None
        project, norm = self.layer_embed_proj, self.layer_embed_norm
        shape = (*tokens.shape, inputs.count, inputs.size)
        own = self._rows(self.layer_embed.get_value(), tokens, positions, x.dtype)
        own = own * jnp.asarray(inputs.size**0.5, x.dtype)
        projected = (project(x) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)).reshape(shape)
        return (norm(projected) + own.reshape(shape)) * jnp.asarray(2**-0.5, x.dtype)

    def __call__(self, tokens: jax.Array, positions: jax.Array, dtype) -> jax.Array:
        x = self._rows(self.embed.get_value(), tokens, positions, dtype)
        return scale_embedding(
            self.config, x, None if self.position_embed is None else self.position_embed[...][positions]
        )

    def _rows(self, table: Any, tokens: jax.Array, positions: jax.Array, dtype) -> jax.Array:
        """Rows [..., D] of a table [V, D] for tokens [...]: of those of another tokenizer the mean of their pieces'."""
        if (token_map := self.config.token_map) is None:
            return rows(table, tokens, dtype)
        pieces = self.token_pieces[...][tokens]
        if token_map.first_token is not None:
            first = np.full(token_map.num_pieces, self.config.vocab_size, np.int32)
            first[0] = token_map.first_token
            pieces = jnp.where((positions == 0)[..., None], first, pieces)
        is_piece = pieces < self.config.vocab_size
        taken = rows(table, jnp.where(is_piece, pieces, 0), dtype)
        count = jnp.maximum(jnp.sum(is_piece, axis=-1, keepdims=True), 1).astype(dtype)
        return jnp.sum(taken * is_piece[..., None].astype(dtype), axis=-2) / count


class Head(nnx.Module):
    """The last norm, and the projection to logits."""

    def __init__(self, config: ModelConfig, *, dtype, rngs: nnx.Rngs | None):
        self.final_norm = hidden_norm(config, dtype)
        if not config.tie_word_embeddings:
            shape = (config.hidden_size, config.vocab_size)
            self.lm_head = nnx.Param(normal(rngs, shape, dtype), axes=("hidden", "vocab"))
        has_bias = config.lm_head_bias
        self.lm_head_bias = nnx.Param(np.zeros((config.vocab_size,), dtype), axes=("vocab",)) if has_bias else None
        if (tokens := config.token_map) is not None:
            self.token_index = nnx.Param(np.zeros((tokens.num_tokens,), np.int32), axes=(None,))
        self.config = config

    def normed(self, x: Hidden) -> jax.Array:
        """The norm [..., D] of what the last layer returns."""
        return normed(self.final_norm, x)[1]

    def __call__(self, hidden: jax.Array, embed: Any) -> jax.Array:
        """float32 logits [..., V] of hidden states [..., D]; `embed` [V, D] is used if the embeddings are tied. With a
        `token_map` those of the other tokenizer's tokens, -inf for one that is no own token."""
        config = self.config
        is_tied = config.tie_word_embeddings
        table = embed if is_tied else self.lm_head.get_value()
        logits = matmul(hidden, table, jnp.float32, is_transposed=is_tied)
        if self.lm_head_bias is not None:
            logits = logits + self.lm_head_bias[...].astype(jnp.float32)
        logits = logits[..., : config.vocab_size]  # on a mesh the vocabulary may be padded
        scaled = scaled_logits(config, logits)
        if config.logit_softcap is not None and is_adapted(table):  # a token that no adapter of the row adds stays -inf
            scaled = jnp.where(jnp.isneginf(logits), logits, scaled)
        logits = scaled
        return logits if config.token_map is None else logits_at(logits, self.token_index[...])


def scale_embedding(config: ModelConfig, x: jax.Array, position_rows: jax.Array | None) -> jax.Array:
    """Hidden states [..., D] before the first layer, from rows of the embedding and of the position embedding."""
    if config.embedding_multiplier != 1.0:
        x = x * jnp.asarray(config.embedding_multiplier, x.dtype)  # rounded to x's dtype, as in Gemma
    return x if position_rows is None else x + position_rows


def bound_ends(config: ModelConfig, params: Params) -> tuple[Embedding, Head]:
    """The parts before and after the layers, with their parameters."""
    return _bound(Embedding, config, params), _bound(Head, config, params)


def bound_layer(config: ModelConfig, number: int, params: Params, experts_over: ExpertsOver | None) -> DecoderLayer:
    """One layer with its own `params`."""
    layer = _bound(DecoderLayer, config, params, number)
    for experts in (layer.mlp, None if layer.beside is None else layer.beside.moe):
        if isinstance(experts, SparseMoE):
            experts.over = experts_over
    return layer


def bound_draft_head(config: ModelConfig, params: Params) -> DraftHead:
    """`decoder.bind_draft_head`."""
    layers = [
        _bound(layer_kind(config, number), config, params["layers"][str(number)], number)
        for number in range(config.num_layers)
    ]
    return DraftHead(config, _bound(Ends, config, params), layers)


def init_params(config: ModelConfig, key: jax.Array, dtype=None) -> Params:
    """`decoder.init_params`. Weights of one shape share a program: XLA takes seconds to compile one of all weights."""
    options = {"dtype": jnp.dtype(dtype or config.dtype), "rngs": nnx.Rngs(params=key)}
    first, kinds, last = _parts(config)
    made = [_params(part(config, **options)) for part in first]
    layers = {str(i): _params(kind(config, i, **options)) for i, kind in enumerate(kinds)}
    made += [{"layers": layers}, *(_params(part(config, **options)) for part in last)]
    return jax.tree.map(jnp.asarray, {name: leaf for part in made for name, leaf in part.items()})


def _parts(config: ModelConfig) -> tuple[list[Any], list[Any], list[Any]]:
    """The modules before the layers, of each layer, and after them."""
    if config.draft_head is not None:
        return [Ends], [layer_kind(config, number) for number in range(config.num_layers)], []
    return [Embedding], [DecoderLayer] * config.num_layers, [Head]


def shapes(config: ModelConfig) -> Params:
    """`jax.ShapeDtypeStruct`s of the parameters."""
    return _assembled(config, nnx.to_pure_dict)


def axes(config: ModelConfig) -> Params:
    """The logical names of the parameters' dimensions."""

    def read(state: Any) -> Params:
        return nnx.to_pure_dict(nnx.map_state(lambda path, variable: variable.axes, state))

    return _assembled(config, read)


@lru_cache(maxsize=256)
def _definition(part: Callable[..., nnx.Module], config: ModelConfig, *number: int) -> tuple[Any, Any]:
    """The graph of a module, and its parameters as `jax.ShapeDtypeStruct`s."""
    module = part(config, *number, dtype=jnp.dtype(config.dtype), rngs=None)
    for path, inner in nnx.iter_modules(module):
        if isinstance(inner, Linear):
            inner.scope = str(path[-1])
    graph, state = nnx.split(module)
    return graph, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


def _bound(part: Callable[..., nnx.Module], config: ModelConfig, params: Params, *number: int) -> Any:
    """A module with those of `params` that it has."""
    graph, state = _definition(part, config, *number)
    state = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(state, {name: value for name, value in params.items() if name in state})
    return nnx.merge(graph, state)


def _assembled(config: ModelConfig, read: Callable[[Any], Params]) -> Params:
    """A tree like the parameters', from what `read` makes of the state of each module."""

    def part(kind: Callable[..., nnx.Module], *number: int) -> Params:
        return read(_definition(kind, config, *number)[1])

    first, kinds, last = _parts(config)
    numbers = config.kinds if config.draft_head is None else range(config.num_layers)
    layers = {str(i): part(kind, number) for i, (kind, number) in enumerate(zip(kinds, numbers, strict=True))}
    made = [*map(part, first), {"layers": layers}, *map(part, last)]
    return {name: leaf for tree in made for name, leaf in tree.items()}


def _params(module: nnx.Module) -> Params:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))
