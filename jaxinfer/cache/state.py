"""States of recurrent layers: a slot of fixed size per sequence, beside keys and values."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxinfer.models import ModelConfig, Params, bind_layer, compute_dtype
from jaxinfer.models.host_layers import layer_of
from pallas_kernels.recurrence import (
    RaggedBatch,
    RecurrentTokens,
    causal_conv,
    commit_conv,
    commit_recurrence,
    linear_recurrence,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerState:
    """State that one layer keeps of S sequences.

    Attributes:
      columns: [S, W - 1, C], the last inputs of the convolution, see `causal_conv`, in the dtype of the model.
      matrices: float32 [S, Hk, K, E], the recurrent states, see `linear_recurrence`; None for a layer that has a
        convolution only.
      conv_inputs, tokens: inputs of the convolution and operands of the recurrence for the rows of a pass that defers
        its states, kept until `commit` computes the states from them; else None.
    """

    columns: jax.Array
    matrices: jax.Array | None
    conv_inputs: jax.Array | None = None
    tokens: RecurrentTokens | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateCache:
    """States of all layers by slot: a pytree. Programs take it donated and return it.

    A slot of a new sequence need not be cleared: a sequence that begins at 0 begins with a zero state. A sequence's
    state is of all its tokens so far and cannot be cut: a rejected draft must not reach it.

    Attributes:
      layers: a `LayerState` per layer, None for a layer without a state.
    """

    layers: tuple[LayerState | None, ...]

    @property
    def num_slots(self) -> int:
        return jax.tree.leaves(self.layers)[0].shape[0]

    def first(self, num_layers: int) -> StateCache | None:
        """The states of the first layers; None where these have none."""
        layers = self.layers[:num_layers]
        return StateCache(layers) if any(layer is not None for layer in layers) else None

    def take(self, slots: Int32[Array, " N"]) -> StateCache:
        """The states of some slots."""
        return jax.tree.map(lambda leaf: leaf[slots], self)

    def put(self, slots: Int32[Array, " N"], states: StateCache) -> StateCache:
        """Replaces the states of some slots; one past the last is no slot. Donate the cache."""
        return jax.tree.map(lambda leaf, new: leaf.at[slots].set(new, mode="drop"), self, states)

    def copy(self, sources: Int32[Array, " N"], destinations: Int32[Array, " N"]) -> StateCache:
        """Copies slots; a destination one past the last copies nothing. Donate the cache."""
        return self.put(destinations, self.take(sources))


def abstract_state_cache(config: ModelConfig, num_slots: int, dtype: Any) -> StateCache | None:
    """The cache as `jax.ShapeDtypeStruct`s; None for no slots, and for a model without recurrent layers."""
    if not config.recurrent_layers or num_slots == 0:
        return None

    def of(layer: int) -> LayerState | None:
        recurrent = config.recurrent_of(layer)
        if recurrent is None:
            return None
        shape = recurrent.state_shape
        matrices = None if shape is None else jax.ShapeDtypeStruct((num_slots, *shape), jnp.float32)
        columns = jax.ShapeDtypeStruct((num_slots, *recurrent.conv_shape), jnp.dtype(dtype))
        return LayerState(columns, matrices)  # pyright: ignore[reportArgumentType]

    return StateCache(tuple(of(layer) for layer in range(config.num_layers)))


def init_state_cache(config: ModelConfig, num_slots: int, dtype: Any) -> StateCache | None:
    """A zeroed cache, or None: see `abstract_state_cache`. `dtype` is that of hidden states."""
    return zeros_of(abstract_state_cache(config, num_slots, dtype))


def zeros_of(states: Any) -> Any:
    """Zeros of the shapes, where their shardings say."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), states)


def deferred_bytes(config: ModelConfig, params: Params) -> int:
    """Bytes that each row of a pass with `defers` keeps in all layers until `commit`; of abstract parameters too."""
    hidden = jax.ShapeDtypeStruct((1, config.hidden_size), compute_dtype(params))
    state = abstract_state_cache(config, 1, hidden.dtype)
    if state is None:
        return 0
    count = 0
    for layer, of_layers in Counter(config.kinds[layer] for layer in config.recurrent_layers).items():
        kept = jax.eval_shape(
            partial(_deferred_row, config, layer), layer_of(params, layer), hidden, state.layers[layer]
        )
        count += of_layers * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
    return count


def _deferred_row(config: ModelConfig, layer: int, params: Params, x: jax.Array, state: LayerState) -> Any:
    """Row that a layer's state keeps of hidden states [1, D]."""
    none, one = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    batch = RaggedBatch(query_starts=none, query_lengths=one, starts=none)
    states = LayerStates(state, batch, StateOptions(max_query_length=1, defers=True))
    bind_layer(config, layer, params).recurrent(x, states)  # pyright: ignore[reportOptionalCall]
    return states.state.conv_inputs, states.state.tokens


def state_bytes(config: ModelConfig, dtype: Any) -> int:
    """Bytes of one sequence's states in all layers."""
    leaves = jax.tree.leaves(abstract_state_cache(config, 1, dtype))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


@dataclass(frozen=True)
class StateOptions:
    """Static facts of a pass, see `linear_recurrence`.

    Attributes:
      short_tokens: rows of a sequence that run in one pass over all slots: 1, or those of a verified draft.
      max_query_length: bound of the rows of a sequence; None for the rows of the batch.
      defers: states of sequences of up to `short_tokens` rows wait for `commit`.
      is_uniform: the recurrence runs one token at a time, so that results are the same bits however a sequence is split
        into passes.
    """

    short_tokens: int = 1
    max_query_length: int | None = None
    defers: bool = False
    is_uniform: bool = False

    @property
    def defers_all(self) -> bool:
        """True if no state changes in the pass, as every sequence's waits."""
        return self.defers and self.max_query_length is not None and self.max_query_length <= self.short_tokens


@partial(jax.tree_util.register_dataclass, data_fields=["state", "batch"], meta_fields=["options"])
@dataclass
class LayerStates:
    """The states of one layer in a pass over a ragged batch: a pytree. `state` is what they are after the calls."""

    state: LayerState
    batch: RaggedBatch
    options: StateOptions

    def convolve(
        self, x: Float[Array, "T C"], weight: Float[Array, "C W"], bias: Float[Array, " C"] | None
    ) -> Float[Array, "T C"]:
        """The convolution of the rows, after which the state has their last inputs."""
        out = causal_conv(x, weight, self.state.columns, self.batch, bias)
        kept, columns = self.batch.query_lengths, self.state.columns
        if self.options.defers:
            kept = jnp.where(kept <= self.options.short_tokens, 0, kept)
        if not self.options.defers_all:
            columns = commit_conv(columns, x, self.batch, kept)
        self.state = replace(self.state, columns=columns, conv_inputs=x if self.options.defers else None)
        return out

    def recur(self, tokens: RecurrentTokens) -> Float32[Array, "T H V"]:
        """The recurrence of the rows, after which the state is theirs."""
        if self.state.matrices is None:
            raise ValueError("this layer has a convolution and no recurrent state")
        options = self.options
        out, matrices = linear_recurrence(
            tokens,
            self.state.matrices,
            self.batch,
            max_query_length=options.max_query_length,
            short_tokens=options.short_tokens,
            defers=options.defers,
            is_uniform=options.is_uniform,
        )
        self.state = replace(self.state, matrices=matrices, tokens=tokens if options.defers else None)
        return out


def commit(
    cache: StateCache, batch: RaggedBatch, num_committed: Int32[Array, " S"], options: StateOptions
) -> StateCache:
    """The states after the first `num_committed` rows of each sequence whose rows waited in a pass with `defers`.

    `batch` and `options` are those of the pass. Sequence s has slot s; there may be more slots than sequences. Rows
    that are not committed leave no trace. Donate the cache.
    """
    waits = batch.query_lengths <= options.short_tokens
    kept, count = jnp.where(waits, num_committed, 0), batch.query_lengths.shape[0]

    def of(state: LayerState | None) -> LayerState | None:
        if state is None:
            return None
        columns, matrices = _first(state.columns, count), state.matrices
        if state.conv_inputs is not None:
            columns = commit_conv(columns, state.conv_inputs, batch, kept)
        if matrices is not None and state.tokens is not None:
            static = {"short_tokens": options.short_tokens, "is_uniform": options.is_uniform}
            matrices = commit_recurrence(_first(matrices, count), state.tokens, batch, kept, **static)
        return _with_first(state, LayerState(columns, matrices))

    return StateCache(tuple(of(state) for state in cache.layers))


class StateAttention:
    """`attend` for a ragged batch of a model with recurrent layers: keys and values go where `attend` puts them, states
    to their slots. Sequence s has slot s; there may be more slots than sequences. After the pass, `states` are the
    updated states.

    Args:
      attend: of the layers with attention, such as a `PagedAttention`.
      batch: the rows of each sequence, and the tokens its state has seen.
    """

    def __init__(self, attend: Any, states: StateCache, batch: RaggedBatch, options: StateOptions | None = None):
        self._attend, self._layers, self._batch = attend, list(states.layers), batch
        self._options, self._num_sequences = options or StateOptions(), batch.query_lengths.shape[0]

    def __call__(self, layer: int, *args: Any, **kwargs: Any) -> jax.Array:
        return self._attend(layer, *args, **kwargs)

    def of_layer(self, layer: int) -> HybridLayer:
        """The attention and the states of one layer."""
        state = self._layers[layer]
        if state is not None:  # the first slots', which the batch is of
            state = jax.tree.map(lambda leaf: _first(leaf, self._num_sequences), state)
        own = None if state is None else LayerStates(state, self._batch, self._options)
        return HybridLayer(self._attend.of_layer(layer), own)

    def update(self, layer: int, state: Any) -> None:
        """Takes over what a layer has stored."""
        stored, new = state
        self._attend.update(layer, stored)
        former = self._layers[layer]
        if former is None:
            return
        if self._options.defers_all:
            new = replace(new, columns=former.columns, matrices=former.matrices)
        self._layers[layer] = _with_first(former, new)

    @property
    def states(self) -> StateCache:
        return StateCache(tuple(self._layers))

    @property
    def cache(self) -> Any:
        """The cache of `attend`, with the states where it has some."""
        return replace(self._attend.cache, states=self.states)

    def commit(self, num_committed: Int32[Array, " S"]) -> Any:
        """The cache after a pass with `defers`, with the states after so many rows of each sequence; see `commit`."""
        return replace(self._attend.cache, states=commit(self.states, self._batch, num_committed, self._options))


def _first(leaf: jax.Array, count: int) -> jax.Array:
    return leaf if leaf.shape[0] == count else leaf[:count]


def _with_first(state: LayerState, first: LayerState) -> LayerState:
    """The state with those of its first slots replaced, and what waits for `commit`."""

    def put(leaf: jax.Array | None, new: jax.Array | None) -> jax.Array | None:
        if leaf is None or new is None or leaf.shape == new.shape:
            return new
        return jax.lax.dynamic_update_slice_in_dim(leaf, new, 0, axis=0)

    columns = put(state.columns, first.columns)
    return replace(first, columns=columns, matrices=put(state.matrices, first.matrices))


@jax.tree_util.register_pytree_node_class
class HybridLayer:
    """One layer of `StateAttention`: a pytree."""

    def __init__(self, attend: Any, states: LayerStates | None):
        self._attend, self._states = attend, states

    def tree_flatten(self):
        return (self._attend, self._states), None

    @classmethod
    def tree_unflatten(cls, static, children) -> HybridLayer:
        return cls(*children)

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        return self._attend(*args, **kwargs)

    def convolve(self, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        return self._own.convolve(x, weight, bias)

    def recur(self, tokens: RecurrentTokens) -> jax.Array:
        return self._own.recur(tokens)

    @property
    def _own(self) -> LayerStates:
        if self._states is None:
            raise ValueError("this layer has no state")
        return self._states

    @property
    def state(self) -> tuple[Any, LayerState | None]:
        return self._attend.state, None if self._states is None else self._states.state
