"""The jitted programs over a contiguous cache: prefill one row, decode all rows.

Shapes use the legend of jaxinfer/README.md. Each program exists once per (rows, chunk) bucket and never retraces
when values change; parameters cross as plain arrays, the state is donated.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache import CachedAttention, ContiguousCache, KVScales, init_cache
from jaxinfer.engine.programs import ProgramModel, Weights
from jaxinfer.models import ModelConfig
from jaxinfer.sampling import (
    SampleOutput,
    SamplingBatch,
    SamplingState,
    advance,
    is_stop,
    make_batch,
    make_state,
    sample,
    set_row,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """What S slots carry from step to step, all on the device. Programs take it donated and return it.

    Attributes:
      cache: keys and values of the slots.
      tokens: int32[S], each slot's newest token, not yet in the cache; its position is `positions` int32[S].
      remaining: int32[S], tokens the slot may still generate.
      is_active: bool[S], whether the slot generates at the next step.
      history: tokens so far, for penalties. The sampling parameters, a `SamplingBatch`, travel beside the state:
        decoding only reads them, and every array a program returns costs the host time.
    """

    cache: ContiguousCache
    tokens: jax.Array
    positions: jax.Array
    remaining: jax.Array
    is_active: jax.Array
    history: SamplingState

    @property
    def num_slots(self) -> int:
        return self.tokens.shape[0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillRequest:
    """One prompt chunk for one slot. Integer scalars are int32 arrays, so that their values do not retrace.

    Attributes:
      tokens: int32[T], of which `length` are real; the first has position `start`.
      slot: the slot to fill. is_last: whether the prompt ends here, so that the first token is sampled.
      max_tokens: tokens to generate. batch, history: one row each; histories know the whole prompt.
    """

    tokens: jax.Array
    start: jax.Array
    length: jax.Array
    slot: jax.Array
    is_last: jax.Array
    max_tokens: jax.Array
    batch: SamplingBatch
    history: SamplingState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeOutput:
    """Tokens of up to N steps: leaves of `samples` are [N, S, ...]; `is_produced` bool[N, S] says which are real."""

    samples: SampleOutput
    is_produced: jax.Array


def init_state(
    config: ModelConfig, num_slots: int, max_length: int, dtype, scales: KVScales | None = None
) -> tuple[DecodeState, SamplingBatch]:
    """Empty slots, with a cache of `dtype`; everything is allocated on the device here and never again."""
    state = DecodeState(
        cache=init_cache(config, num_slots, max_length, dtype, scales),
        tokens=jnp.zeros((num_slots,), jnp.int32),
        positions=jnp.zeros((num_slots,), jnp.int32),
        remaining=jnp.zeros((num_slots,), jnp.int32),
        is_active=jnp.zeros((num_slots,), bool),
        history=jax.tree.map(jnp.array, make_state([None] * num_slots, config.vocab_size)),
    )
    return state, jax.tree.map(jnp.array, make_batch([None] * num_slots, config.vocab_size))


@partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
def prefill(
    model: ProgramModel, weights: Weights, state: DecodeState, batch: SamplingBatch, request: PrefillRequest
) -> tuple[DecodeState, SamplingBatch, SampleOutput, jax.Array]:
    """Appends a chunk to a slot; after the last chunk the slot is active with its first token.

    Returns the state, the batch, the first token's sample of one row (zeros before the last chunk), and the final
    hidden states [T, D] of the chunk. The row's numbers do not depend on other slots: only this row is computed.
    """
    decoder = model.bind(weights)
    num_tokens = request.tokens.shape[0]
    start, length = request.start[None], request.length[None]
    attend = CachedAttention(state.cache, request.slot[None], start, length, num_tokens)
    positions = request.start + jnp.arange(num_tokens)
    hidden = decoder(request.tokens[None], positions[None], attend)[0]
    end = request.start + request.length

    def first_token() -> SampleOutput:
        last = lax.dynamic_slice_in_dim(hidden, request.length - 1, 1)
        return sample(decoder.logits(last), end[None], request.batch, request.history)

    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(first_token))
    first = lax.cond(request.is_last, first_token, lambda: empty)
    history = advance(request.history, first.tokens, request.is_last[None] & first.ok)
    remaining = request.max_tokens - 1
    is_active = request.is_last & first.ok[0] & ~is_stop(first.tokens, request.batch)[0] & (remaining > 0)
    slot = request.slot
    state = DecodeState(
        cache=attend.cache,
        tokens=state.tokens.at[slot].set(first.tokens[0]),
        positions=state.positions.at[slot].set(end),
        remaining=state.remaining.at[slot].set(remaining),
        is_active=state.is_active.at[slot].set(is_active),
        history=set_row(state.history, slot, history),
    )
    return state, set_row(batch, slot, request.batch), first, hidden


@partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def decode(
    model: ProgramModel,
    weights: Weights,
    state: DecodeState,
    batch: SamplingBatch,
    max_steps: int,
    num_steps: jax.Array,
) -> tuple[DecodeState, DecodeOutput]:
    """Up to `num_steps` (int32 scalar, at most the static `max_steps`) tokens for every active slot.

    One loop on the device: it ends early when no slot is active. Nothing passes through the host between steps.
    """
    decoder = model.bind(weights)
    slots = jnp.arange(state.num_slots)

    def one_step(state: DecodeState) -> tuple[DecodeState, SampleOutput]:
        lengths = state.is_active.astype(jnp.int32)
        attend = CachedAttention(state.cache, slots, state.positions, lengths, 1)
        hidden = decoder(state.tokens[:, None], state.positions[:, None], attend)[:, 0]
        output = sample(decoder.logits(hidden), state.positions + 1, batch, state.history)
        took_part = state.is_active & output.ok
        remaining = state.remaining - took_part
        new_state = replace(
            state,
            cache=attend.cache,
            tokens=jnp.where(took_part, output.tokens, state.tokens),
            positions=state.positions + took_part,
            remaining=remaining,
            is_active=took_part & ~is_stop(output.tokens, batch) & (remaining > 0),
            history=advance(state.history, output.tokens, took_part),
        )
        return new_state, output

    def body(carry):
        step, state, outputs = carry
        is_active = state.is_active
        state, output = one_step(state)
        new = DecodeOutput(samples=output, is_produced=is_active)
        outputs = jax.tree.map(lambda rows, row: lax.dynamic_update_index_in_dim(rows, row, step, 0), outputs, new)
        return step + 1, state, outputs

    def keep_going(carry):
        step, state, _ = carry
        return (step < num_steps) & jnp.any(state.is_active)

    shapes = jax.eval_shape(lambda s: DecodeOutput(samples=one_step(s)[1], is_produced=s.is_active), state)
    outputs = jax.tree.map(lambda leaf: jnp.zeros((max_steps, *leaf.shape), leaf.dtype), shapes)
    _, state, outputs = lax.while_loop(keep_going, body, (jnp.int32(0), state, outputs))
    return state, outputs


@partial(jax.jit, donate_argnums=0)
def deactivate(state: DecodeState, slot: jax.Array) -> DecodeState:
    """Stops a slot (int32 scalar) from generating; what it still computes in flight is dropped by the host."""
    return replace(state, is_active=state.is_active.at[slot].set(False))
