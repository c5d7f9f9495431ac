"""Inputs and outputs of the programs over a paged cache: slots, the work of a step or of decoding, and their output.

Shapes use the legend of jaxinfer/README.md.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxinfer.cache import PageTables
from jaxinfer.sampling import SampleOutput, SamplingState
from jaxinfer.speculative import DraftSlots

NO_TOKEN, INVALID_LOGITS = -1, -2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """State that S slots carry from step to step beside their pages, all on the device.

    Attributes:
      tokens: int32[S], each slot's newest token, not yet stored; its position is `positions` int32[S].
      remaining: int32[S], tokens the slot may still generate.
      is_active: bool[S], whether the slot decodes: its prompt is stored and its answer has not ended.
      history: tokens so far, for penalties. The sampling parameters, a `SamplingBatch`, travel beside: decoding only
        reads them.
      draft: what drafting needs to know of each slot; None in an engine that never speculates.
      adapters: int32[S], the adapter of each slot's request; None for a model whose weights hold none. adapter_starts:
        int32[S], the position from which it changes the model.
      steering: float32[S, D] by layer ("3"), what each slot's request adds to the hidden states after it, zeros for
        nothing; None in an engine without `steered_layers`.
    """

    tokens: jax.Array
    positions: jax.Array
    remaining: jax.Array
    is_active: jax.Array
    history: SamplingState
    draft: DraftSlots | None = None
    adapters: jax.Array | None = None
    adapter_starts: jax.Array | None = None
    steering: dict[str, jax.Array] | None = None

    def adapters_of(self, slot: jax.Array, positions: jax.Array) -> jax.Array | None:
        """int32[T], the adapters of rows of slots int32[T] at positions int32[T]; None where there are none."""
        if self.adapters is None or self.adapter_starts is None:
            return None
        return jnp.where(positions >= self.adapter_starts[slot], self.adapters[slot], 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepSlots:
    """The work of one step for each of B slots, made on the host.

    Attributes:
      query_starts, query_lengths: int32[B], each slot's rows; length 0 takes no part.
      starts: int32[B], tokens of the slot that are stored already (of a prompt; a decoding slot knows).
      is_prompt: bool[B], whether the rows are a prompt's. is_last: bool[B], whether the prompt ends with them.
      remaining: int32[B], tokens to generate after a prompt.
      prompt_lengths: int32[B], tokens of the prompts, where the policy of the cache asks; after a preemption, rows of a
        prompt may be an answer's.
    """

    query_starts: jax.Array
    query_lengths: jax.Array
    starts: jax.Array
    is_prompt: jax.Array
    is_last: jax.Array
    remaining: jax.Array
    prompt_lengths: jax.Array | None = None

    def is_decoding(self, slots: Slots) -> jax.Array:
        """bool[B]: the slots whose newest token is computed."""
        return slots.is_active & ~self.is_prompt & (self.query_lengths > 0)

    def lengths(self, slots: Slots) -> jax.Array:
        """int32[B]: rows of each slot."""
        return jnp.where(self.is_prompt, self.query_lengths, self.is_decoding(slots))

    def ends(self, slots: Slots) -> jax.Array:
        """int32[B]: tokens of each slot that are stored after the step."""
        return jnp.where(self.is_prompt, self.starts, slots.positions) + self.lengths(slots)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepWork:
    """One step of B slots over T tokens, made on the host.

    Attributes:
      tokens: int32[T], the prompts' tokens; what stands in a decoding slot's row is replaced by its newest token.
      token_slots: int32[T], the slot of each row, B for padding. The rows of a slot are adjacent.
      page_tables: int32[B, P] of each group of layers.
    """

    tokens: jax.Array
    token_slots: jax.Array
    slots: StepSlots
    page_tables: PageTables


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeWork:
    """Decode steps of B slots: is_scheduled bool[B], the slots that take part if active, page_tables
    int32[B, P] of each group of layers, and
    num_steps, an int32 scalar."""

    is_scheduled: jax.Array
    page_tables: PageTables
    num_steps: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """Results of N steps of B slots; leaves are [N, B, ...].

    Attributes:
      tokens: int32, the token; or NO_TOKEN where the slot took no part or its prompt goes on; or INVALID_LOGITS where
        its logits hold a NaN or infinity, or leave no token. All that most requests need, in one array.
      samples: the rest, for requests that ask for log-probabilities.
      states: of passes that store one token of a slot, the tapped hidden states [N, B, D] of that token by name; else
        {}. A slot's steps stand together at the beginning, as its tokens do.
    """

    tokens: jax.Array
    samples: SampleOutput
    states: dict[str, jax.Array] = field(default_factory=dict)


def decoding_work(work: DecodeWork, num_rows: int, has_prompt_lengths: bool) -> StepWork:
    """The work of a step of `num_rows` rows in which each slot that is scheduled decodes in the row of its number."""
    num_slots = work.is_scheduled.shape[0]
    none, no_slot, slot = jnp.zeros(num_slots, jnp.int32), jnp.zeros(num_slots, bool), jnp.arange(num_slots)
    rows = jnp.where(work.is_scheduled, slot, num_slots)
    lengths = work.is_scheduled.astype(jnp.int32)
    return StepWork(
        tokens=jnp.zeros(num_rows, jnp.int32),
        token_slots=jnp.pad(rows, (0, num_rows - num_slots), constant_values=num_slots),
        slots=StepSlots(slot, lengths, none, no_slot, no_slot, none, none if has_prompt_lengths else None),
        page_tables=work.page_tables,
    )
