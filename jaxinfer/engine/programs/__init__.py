"""The jitted programs of an engine; here what they share: how a model crosses `jax.jit`, and scoring.

Shapes use the legend of jaxinfer/README.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxinfer import parallel
from jaxinfer.cache import KVScales, attend_as_stored
from jaxinfer.cache.policy.contract import CachePolicy
from jaxinfer.cache.policy.kinds import KEEPS_ALL
from jaxinfer.models import Decoder, ModelConfig, Params, bind, bind_draft_head, collect
from jaxinfer.sampling import (
    SamplingBatch,
    SamplingState,
    TokenLogprobs,
    advance,
    processed_logprobs,
    token_logprobs,
)
from jaxinfer.training.fixed_forward import FixedShape, states_fixed

if TYPE_CHECKING:
    from jaxinfer.models.draft_head import DraftHead

SCORE_ELEMENTS = 2**24  # logits held at once while scoring: 64 MiB of float32
# Rows of a product with the output layer in a deterministic engine, at least: XLA:CPU sums the product of one row with
# a bfloat16 matrix in another order than those of several.
MIN_HEAD_ROWS = 2


Weights = tuple[jax.Array, ...]


@dataclass(frozen=True, eq=False)
class ProgramModel:
    """The model that programs are compiled for: a configuration, the structure of its parameters, the mesh that they
    are cut over, None for a single device, the policy of the cache, and names of the hidden states that passes return.

    A call passes it as a static argument beside the parameters' leaves. Both save the host time on every dispatch: it
    is hashed by identity (get one from `program_model`, which returns the same object for equal arguments), and a
    tuple of 400 leaves crosses `jax.jit` in 0.14 ms where the nested dict takes 0.23 ms.
    """

    config: ModelConfig
    structure: Any
    mesh: Mesh | None = None
    policy: CachePolicy = KEEPS_ALL
    taps: tuple[str, ...] = ()

    def bind(self, weights: Weights) -> Decoder:
        """The decoder over the leaves; called while tracing."""
        axis = None if self.mesh is None else parallel.axis_of(self.mesh, "expert")
        over = None if self.mesh is None or axis is None else (self.mesh, axis)
        return bind(self.config, jax.tree.unflatten(self.structure, weights), over)

    def bind_head(self, weights: Weights) -> "DraftHead":
        """As `bind`, of a head that drafts."""
        return bind_draft_head(self.config, jax.tree.unflatten(self.structure, weights))


@lru_cache(maxsize=64)
def _program_model(
    config: ModelConfig, structure: Any, mesh: Mesh | None, policy: CachePolicy, taps: tuple[str, ...]
) -> ProgramModel:
    return ProgramModel(config, structure, mesh, policy, taps)


def program_model(
    config: ModelConfig,
    params: Params,
    mesh: Mesh | None = None,
    policy: CachePolicy = KEEPS_ALL,
    taps: tuple[str, ...] = (),
) -> tuple[ProgramModel, Weights]:
    """The static and the array half of a model, as every program takes them. With a mesh, the parameters are where
    `parallel.parameter_shardings` says."""
    leaves, structure = jax.tree.flatten(params)
    return _program_model(config, structure, mesh, policy, taps), tuple(leaves)


def uniform_logits(decoder: Decoder, hidden: jax.Array, adapters: jax.Array | None) -> jax.Array:
    """Logits float32 [S, V] of hidden states [S, D] of rows with the adapters int32 [S], or None, by a product of at
    least `MIN_HEAD_ROWS` rows."""
    count = hidden.shape[0]
    missing = max(MIN_HEAD_ROWS - count, 0)
    hidden = jnp.pad(hidden, ((0, missing), (0, 0)))
    adapters = None if adapters is None else jnp.pad(adapters, (0, missing))
    return decoder.for_rows(adapters).logits(hidden)[:count]


@partial(jax.jit, static_argnums=(0, 5, 7))
def score(
    model: ProgramModel,
    weights: Weights,
    hidden: jax.Array,
    targets: jax.Array,
    num_rows: jax.Array,
    num_top: int,
    adapters: jax.Array | None = None,
    head_rows: int | None = None,
) -> TokenLogprobs:
    """Raw log-probabilities of int32 targets [T] under the final hidden states [T, D] that predict them; zeros well
    beyond the first `num_rows` (an int32 scalar). `adapters` int32 [T] where weights hold any.

    Logits exist for `head_rows` positions at a time, or for `SCORE_ELEMENTS` / V, whatever T and V are.
    """
    decoder, num_tokens = model.bind(weights), hidden.shape[0]
    size = head_rows or _score_block(model.config, num_tokens)
    hidden, targets, adapters = _whole_blocks(size, (hidden, targets, adapters))

    def block(number: jax.Array) -> TokenLogprobs:
        of_all = hidden, targets, adapters
        states, tokens, own = jax.tree.map(lambda rows: lax.dynamic_slice_in_dim(rows, number * size, size), of_all)
        return token_logprobs(decoder.for_rows(own).logits(states), tokens, num_top)

    def add(number: jax.Array, scores: TokenLogprobs) -> TokenLogprobs:
        return jax.tree.map(
            lambda rows, new: lax.dynamic_update_slice_in_dim(rows, new, number * size, 0), scores, block(number)
        )

    shapes = jax.eval_shape(block, jnp.int32(0))
    scores = jax.tree.map(lambda leaf: jnp.zeros((hidden.shape[0], *leaf.shape[1:]), leaf.dtype), shapes)
    scores = lax.fori_loop(0, (num_rows + size - 1) // size, add, scores)
    return jax.tree.map(lambda leaf: leaf[:num_tokens], scores)


@partial(jax.jit, static_argnums=(0, 8))
def score_processed(
    model: ProgramModel,
    weights: Weights,
    hidden: jax.Array,
    targets: jax.Array,
    rows: jax.Array,
    batch: SamplingBatch,
    history: SamplingState,
    adapters: jax.Array | None = None,
    head_rows: int | None = None,
) -> tuple[SamplingState, jax.Array]:
    """Log-probabilities of the targets under one row's sampling parameters, each seeing the ones before it.

    hidden [T, D], targets int32[T]; `rows` int32[2], the first row that is scored and one past the last: the others do
    not enter the history and get 0. Logits exist for `head_rows` positions at a time, or for one. `adapters` int32 [T]
    where weights hold any.
    """
    decoder, num_tokens, size = model.bind(weights), hidden.shape[0], head_rows or 1
    hidden, targets, adapters = _whole_blocks(size, (hidden, targets, adapters))

    def block(number: jax.Array, carry: tuple[SamplingState, jax.Array]) -> tuple[SamplingState, jax.Array]:
        first = number * size
        of_all = hidden, adapters
        states, own = jax.tree.map(lambda rows: lax.dynamic_slice_in_dim(rows, first, size), of_all)
        logits = decoder.for_rows(own).logits(states)

        def one(row: jax.Array, carry: tuple[SamplingState, jax.Array]) -> tuple[SamplingState, jax.Array]:
            history, logprobs_so_far = carry
            target = lax.dynamic_slice_in_dim(targets, row, 1)
            logprobs = processed_logprobs(lax.dynamic_slice_in_dim(logits, row - first, 1), batch, history)
            logprobs_so_far = lax.dynamic_update_slice_in_dim(logprobs_so_far, logprobs[0, target], row, 0)
            return advance(history, target, jnp.ones(1, bool)), logprobs_so_far

        return lax.fori_loop(jnp.maximum(rows[0], first), jnp.minimum(rows[1], first + size), one, carry)

    carry = history, jnp.zeros(targets.shape, jnp.float32)
    history, logprobs = lax.fori_loop(rows[0] // size, (rows[1] + size - 1) // size, block, carry)
    return history, logprobs[:num_tokens]


@jax.jit
def pool(hidden: jax.Array, rows: jax.Array) -> jax.Array:
    """float32 [S, D], sums of hidden states [T, D]: row i is the sum of those from rows[i, 0] up to rows[i, 1] (int32
    [S, 2]), in float32; zeros where there are none.

    Rows outside are not added with weight 0: what is not finite in one request would reach the others.
    """
    numbers = jnp.arange(hidden.shape[0])

    def total(first: jax.Array, last: jax.Array) -> jax.Array:
        is_inside = (numbers >= first) & (numbers < last)
        return jnp.sum(jnp.where(is_inside[:, None], hidden.astype(jnp.float32), 0), axis=0)

    def one(pair: jax.Array) -> jax.Array:
        first, last = pair[0], pair[1]
        # A single row, which most kinds of pooling take, costs no pass over all.
        return lax.cond(
            last - first <= 1,
            lambda: jnp.where(first < last, hidden[jnp.minimum(first, numbers[-1])].astype(jnp.float32), 0),
            lambda: total(first, last),
        )

    return lax.map(one, rows)


@partial(jax.jit, static_argnums=0)
def logits_of(
    model: ProgramModel,
    weights: Weights,
    states: jax.Array,
    token_ids: jax.Array,
    adapters: jax.Array | None = None,
) -> jax.Array:
    """float32 [S, N], the logits of int32 token ids [S, N] after the final hidden states [S, D]; `adapters` int32 [S]
    where weights hold any."""
    logits = model.bind(weights).for_rows(adapters).logits(states)
    return jnp.take_along_axis(logits, token_ids, axis=-1)


@partial(jax.jit, static_argnums=(0, 3, 4))
def hidden_states(
    model: ProgramModel,
    weights: Weights,
    tokens: jax.Array,
    taps: tuple[str, ...],
    kv_dtype: str,
    scales: KVScales | None = None,
    adapters: jax.Array | None = None,
    steering: dict[str, jax.Array] | None = None,
) -> dict[str, jax.Array]:
    """The tapped hidden states [T, D] of int32 tokens [T], computed without a cache, over the keys and values that one
    of `kv_dtype` would give back. `adapters` int32 [T] where weights hold any. `steering`: by layer, float32 [D] to add
    to hidden states."""
    tapped, tap = collect(taps)
    positions = jnp.arange(tokens.shape[0])[None]
    decoder = model.bind(weights).for_rows(adapters).steered(steering)
    decoder(tokens[None], positions, attend_as_stored(kv_dtype, scales), tap)
    return {name: value[0] for name, value in tapped.items()}


@partial(jax.jit, static_argnums=(0, 3, 4))
def uniform_states(
    model: ProgramModel, weights: Weights, tokens: jax.Array, taps: tuple[str, ...], shape: FixedShape
) -> dict[str, jax.Array]:
    """As `hidden_states`, with the bits of a deterministic engine of that shape."""
    params = jax.tree.unflatten(model.structure, weights)
    states = states_fixed(model.config, params, tokens[None], taps, shape=shape)
    return {name: value[0] for name, value in states.items()}


def tapped_states(
    model: ProgramModel,
    weights: Weights,
    tokens: Sequence[int],
    taps: tuple[str, ...],
    kv_dtype: str,
    scales: KVScales | None = None,
    adapters: np.ndarray | None = None,
    shape: FixedShape | None = None,
    steering: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """The tapped hidden states [len(tokens), D] on the host; lengths are rounded up to few programs. `adapters`: int32
    [len(tokens)] where weights hold any. `shape`: of a deterministic engine, for `uniform_states`, without `steering`,
    which is as of `hidden_states`."""
    size = 32
    while size < len(tokens):
        size *= 2
    own, rows = None if adapters is None else jnp.asarray(padded(adapters, size)), jnp.asarray(padded(tokens, size))
    if shape is not None and steering is None:
        tapped = uniform_states(model, weights, rows, taps, shape)
    else:
        added = None if steering is None else jax.device_put(steering)
        tapped = hidden_states(model, weights, rows, taps, kv_dtype, scales, own, added)
    return {name: np.asarray(value)[: len(tokens)] for name, value in tapped.items()}


def padded(tokens: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
    """int32[size], zeros after the tokens."""
    array = np.zeros(size, np.int32)
    array[: len(tokens)] = tokens
    return array


def _whole_blocks(size: int, rows: Any) -> Any:
    """Arrays [T, ...] with zeros after their rows, up to a multiple of `size`."""
    return jax.tree.map(lambda x: jnp.pad(x, ((0, -x.shape[0] % size), *[(0, 0)] * (x.ndim - 1))), rows)


def _score_block(config: ModelConfig, num_tokens: int) -> int:
    """The largest power of two that divides the bucket and keeps its logits within `SCORE_ELEMENTS`."""
    block = 1
    while block * 2 * config.vocab_size <= SCORE_ELEMENTS and num_tokens % (block * 2) == 0:
        block *= 2
    return block
