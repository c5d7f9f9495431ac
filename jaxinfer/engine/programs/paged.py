"""The jitted programs over a paged cache: one step of prompts and decode together, many decode steps, and upkeep.

Shapes use the legend of jaxinfer/README.md. Every program exists once for each bucket of tokens and slots and never
retraces when values change. Slots are used from the first up, so a program of B slots takes the first B rows of the
arrays of all. What is donated is named in each docstring.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer import parallel
from jaxinfer.cache import PagedCache, PageTables, StateCache, attend_ragged
from jaxinfer.cache.best_pages import parts_of_step
from jaxinfer.cache.heavy_hitters import attend_decoding, attend_step
from jaxinfer.cache.kept_pages import attend_to_pieces, pieces
from jaxinfer.engine.compiling import LargeProgram
from jaxinfer.engine.programs import ProgramModel, Weights
from jaxinfer.grammar.device import GrammarTables
from jaxinfer.sampling import (
    SampleOutput,
    SamplingBatch,
    SamplingState,
    advance,
    is_stop,
    make_batch,
    make_state,
    mask_inactive_rows,
    sample,
    set_row,
)
from jaxinfer.speculative import DraftSlots, init_draft_slots, record
from pallas_kernels import copy_pages as _copy_pages

NO_TOKEN, INVALID_LOGITS = -1, -2
# A slot's rows over the vocabulary, which only requests with a bias or penalties need.
WIDE_ROWS = ("bias", "output_counts", "prompt_mask")
Tree = TypeVar("Tree")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """What S slots carry from step to step beside their pages, all on the device.

    Attributes:
      tokens: int32[S], each slot's newest token, not yet stored; its position is `positions` int32[S].
      remaining: int32[S], tokens the slot may still generate.
      is_active: bool[S], whether the slot decodes: its prompt is stored and its answer has not ended.
      history: tokens so far, for penalties. The sampling parameters, a `SamplingBatch`, travel beside: decoding only
        reads them.
      draft: what drafting needs to know of each slot; None in an engine that never speculates.
    """

    tokens: jax.Array
    positions: jax.Array
    remaining: jax.Array
    is_active: jax.Array
    history: SamplingState
    draft: DraftSlots | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepSlots:
    """What one step does with each of B slots, made on the host.

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

    @property
    def known_prompts(self) -> jax.Array:
        """`prompt_lengths`, for a policy that asks. Raises ValueError where there are none."""
        if self.prompt_lengths is None:
            raise ValueError("a step under this policy of the cache needs the lengths of prompts")
        return self.prompt_lengths

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
    """What N steps of B slots gave; leaves are [N, B, ...].

    Attributes:
      tokens: int32, the token; or NO_TOKEN where the slot took no part or its prompt goes on; or INVALID_LOGITS where
        its logits hold a NaN or infinity, or leave no token. All that most requests need, in one array.
      samples: the rest, for requests that ask for log-probabilities.
    """

    tokens: jax.Array
    samples: SampleOutput


def init_slots(num_slots: int, vocab_size: int, draft_length: int | None = None) -> tuple[Slots, SamplingBatch]:
    """Empty slots, and sampling parameters that do nothing. `draft_length`: tokens of the longest sequence, in an
    engine that speculates."""
    counts = (np.zeros((num_slots,), np.int32) for _ in range(3))
    history = make_state([None] * num_slots, vocab_size)
    draft = None if draft_length is None else init_draft_slots(num_slots, draft_length)
    slots = Slots(*counts, is_active=np.zeros((num_slots,), bool), history=history, draft=draft)  # pyright: ignore
    # Filled here and sent: a fill on the device is a program to compile, for each shape.
    return jax.device_put((slots, make_batch([None] * num_slots, vocab_size)), may_alias=False)


def empty_work(num_tokens: int, num_slots: int, has_prompt_lengths: bool = False) -> dict[str, np.ndarray]:
    """The arrays of a step in which nothing takes part, without the page table; with `prompt_lengths` where the policy
    of the cache asks for them."""
    counts = ("query_starts", "query_lengths", "starts", "remaining", *("prompt_lengths",) * has_prompt_lengths)
    return {
        "tokens": np.zeros(num_tokens, np.int32),
        "token_slots": np.full(num_tokens, num_slots, np.int32),
        **{name: np.zeros(num_slots, np.int32) for name in counts},
        "is_prompt": np.zeros(num_slots, np.bool_),
        "is_last": np.zeros(num_slots, np.bool_),
    }


def slot_axes(slots: Slots, batch: SamplingBatch) -> tuple[Slots, SamplingBatch]:
    """The logical name of each dimension of `init_slots`' arrays, for `jaxinfer.parallel`: rows over the vocabulary
    lie where its logits are, all else is whole on every device."""
    return axes_of(slots), axes_of(batch)


def axes_of(rows):
    """`slot_axes` of slots, or of the sampling parameters."""
    if isinstance(rows, Slots):
        return replace(jax.tree.map(lambda leaf: (None,) * leaf.ndim, rows), history=axes_of(rows.history))
    wide = {name: (None, "vocab") for name in WIDE_ROWS if hasattr(rows, name)}
    return replace(jax.tree.map(lambda leaf: (None,) * leaf.ndim, rows), **wide)


@partial(LargeProgram, static_argnums=(0, 5, 6), donate_argnums=2)
def step(
    model: ProgramModel,
    weights: Weights,
    cache: PagedCache,
    slots: Slots,
    work: StepWork,
    is_uniform: bool = False,
    num_hidden: int | None = None,
) -> tuple[PagedCache, jax.Array, jax.Array]:
    """Stores prompt tokens and the newest ones of decoding slots, in one pass over the weights. Donates the cache.

    Returns it, the logits float32 [B, V] of each slot's last row, for `sample_step`, and the final hidden states
    [T, D], or [num_hidden, D] with zeros at the end, so that one program scores those of every step. `is_uniform` gives
    every token the same arithmetic, whether it comes with its prompt's other tokens or alone.
    """
    num_tokens, num_slots, rows = work.tokens.shape[0], work.page_tables[0].shape[0], work.slots
    slots = take_rows(slots, num_slots)
    lengths, ends = rows.lengths(slots), rows.ends(slots)
    newest = jnp.where(rows.is_decoding(slots), rows.query_starts, num_tokens)
    tokens = work.tokens.at[newest].set(slots.tokens, mode="drop")
    slot = jnp.minimum(work.token_slots, num_slots - 1)
    positions = (ends - lengths)[slot] + jnp.arange(num_tokens) - rows.query_starts[slot]
    positions = jnp.where(work.token_slots < num_slots, positions, 0)

    decoder = model.bind(weights)
    if model.heavy is not None:
        ragged = (work.token_slots, rows.query_starts, lengths, ends, rows.is_decoding(slots), rows.known_prompts)
        attend = attend_step(model.heavy, model.config, cache, work.page_tables, *ragged, is_uniform=is_uniform)
    elif (kept := model.kept) is None:
        tables, kv_lengths = model.seen(cache, work.page_tables, ends, lengths)
        best = None
        if model.best is not None:
            ragged = rows.known_prompts, work.token_slots, rows.query_starts, lengths, ends
            best = parts_of_step(model.best, tables[0], *ragged)
        ragged = rows.query_starts, lengths, kv_lengths
        attend = attend_ragged(cache, tables, *ragged, is_uniform=is_uniform, best=best, mesh=model.mesh)
    else:
        ragged = pieces(kept, model.config, cache, work.page_tables, work.token_slots, rows.query_starts, lengths, ends)
        attend = attend_to_pieces(cache, kept, ragged, num_tokens, is_uniform=is_uniform, mesh=model.mesh)
    if model.mesh is not None and parallel.axis_of(model.mesh, "tokens") is not None:  # each device has its rows
        cut = parallel.array_shardings(model.mesh, (tokens, positions), (("tokens",), ("tokens",)))
        tokens, positions = lax.with_sharding_constraint((tokens, positions), cut)
    hidden = decoder(tokens, positions, attend)
    last = jnp.clip(rows.query_starts + lengths - 1, 0, num_tokens - 1)
    logits = decoder.logits(hidden[last])
    if model.mesh is not None:
        logits = lax.with_sharding_constraint(logits, logits_sharding(model.mesh, logits))
    if num_hidden is not None and num_hidden > num_tokens:
        hidden = jnp.pad(hidden, ((0, num_hidden - num_tokens), (0, 0)))
    return attend.cache, logits, replicate(model.mesh, hidden)


def logits_sharding(mesh: Mesh, logits: Any) -> NamedSharding:
    """Where `step` leaves logits [B, V]: the vocabulary is cut as the sampler's rows over it are."""
    return parallel.array_shardings(mesh, logits, (None, "vocab"))


_sample = jax.jit(sample, inline=True)  # traced once for `sample_step` and `decode` of as many slots


@partial(LargeProgram, static_argnums=0, donate_argnums=1)
def sample_step(
    mesh: Mesh | None,
    slots: Slots,
    batch: SamplingBatch,
    rows: StepSlots,
    logits: jax.Array,
    tables: GrammarTables | None = None,
) -> tuple[Slots, StepOutput]:
    """The tokens of a step from its logits float32 [B, V], and the slots after it. Donates the slots.

    A program of its own, because it takes long to compile and is the same for steps of any number of tokens.
    """
    num_slots = logits.shape[0]
    all_slots, slots, batch = slots, take_rows(slots, num_slots), take_rows(batch, num_slots)
    is_decoding, ends = rows.is_decoding(slots), rows.ends(slots)
    takes_part = is_decoding | rows.is_prompt
    samples = _sample(logits, ends, mask_inactive_rows(batch, takes_part), slots.history, tables)

    is_produced = is_decoding | (rows.is_prompt & rows.is_last)
    took_part = is_produced & samples.ok
    remaining = jnp.where(rows.is_prompt, rows.remaining, slots.remaining) - took_part
    new_slots = Slots(
        tokens=jnp.where(took_part, samples.tokens, slots.tokens),
        positions=jnp.where(took_part, ends, slots.positions),
        remaining=remaining,
        # A slot without rows keeps what it is; one that was given up is written anew before it takes part again.
        is_active=jnp.where(
            is_produced, took_part & ~is_stop(samples.tokens, batch) & (remaining > 0), slots.is_active
        ),
        history=advance(slots.history, samples.tokens, took_part, tables),
        draft=record(slots.draft, ends, samples.tokens, took_part),
    )
    tokens = encode_tokens(samples, is_produced, takes_part)
    output = jax.tree.map(lambda leaf: leaf[None], StepOutput(tokens, samples))
    return constrain_sharding(mesh, write_rows(all_slots, new_slots)), replicate(mesh, output)


def _attend_newest(
    model: ProgramModel,
    cache: PagedCache,
    page_tables: PageTables,
    rows: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
) -> Any:
    """`attend` for one token, at row `rows` and position `positions`, int32 [B], of each slot whose length, int32 [B],
    is not 0."""
    if model.heavy is not None:
        return attend_decoding(model.heavy, model.config, cache, page_tables, positions, lengths)
    view = model.view(cache, page_tables, positions, lengths)
    best = model.parts(page_tables, positions, lengths, num_rows=1, is_uniform=False)
    options: Any = {"max_query_length": 1, "moved": view.moved, "best": best, "mesh": model.mesh}
    return attend_ragged(cache, view.page_tables, rows, lengths, view.kv_lengths, **options)


@partial(LargeProgram, static_argnums=(0, 6), donate_argnums=(2, 3))
def decode(
    model: ProgramModel,
    weights: Weights,
    cache: PagedCache,
    slots: Slots,
    batch: SamplingBatch,
    work: DecodeWork,
    max_steps: int,
    tables: GrammarTables | None = None,
) -> tuple[PagedCache, Slots, StepOutput]:
    """Up to `work.num_steps` (at most the static `max_steps`) tokens for every held, active slot, in one loop on the
    device that ends early when none is left. Donates the cache and the slots; nothing passes through the host."""
    decoder = model.bind(weights)
    num_slots = work.is_scheduled.shape[0]
    all_slots, slots, batch = slots, take_rows(slots, num_slots), take_rows(batch, num_slots)
    rows = jnp.arange(num_slots)

    @partial(jax.jit, inline=True)  # traced once for the shapes of its output and the loop
    def one_step(cache: PagedCache, slots: Slots) -> tuple[PagedCache, Slots, StepOutput]:
        is_decoding = slots.is_active & work.is_scheduled
        lengths = is_decoding.astype(jnp.int32)
        attend = _attend_newest(model, cache, work.page_tables, rows, slots.positions, lengths)
        hidden = decoder(slots.tokens, slots.positions, attend)
        samples = _sample(
            decoder.logits(hidden), slots.positions + 1, mask_inactive_rows(batch, is_decoding), slots.history, tables
        )
        took_part = is_decoding & samples.ok
        remaining = slots.remaining - took_part
        is_going_on = took_part & ~is_stop(samples.tokens, batch) & (remaining > 0)
        new_slots = Slots(
            tokens=jnp.where(took_part, samples.tokens, slots.tokens),
            positions=slots.positions + took_part,
            remaining=remaining,
            is_active=jnp.where(is_decoding, is_going_on, slots.is_active),
            history=advance(slots.history, samples.tokens, took_part, tables),
            draft=record(slots.draft, slots.positions + 1, samples.tokens, took_part),
        )
        output = StepOutput(encode_tokens(samples, is_decoding, is_decoding), samples)
        return attend.cache, new_slots, output

    def body(carry):
        count, cache, slots, outputs = carry
        cache, slots, output = one_step(cache, slots)
        outputs = jax.tree.map(lambda all_, new: lax.dynamic_update_index_in_dim(all_, new, count, 0), outputs, output)
        return count + 1, cache, slots, outputs

    def keep_going(carry):
        count, _, slots, _ = carry
        return (count < work.num_steps) & jnp.any(slots.is_active & work.is_scheduled)

    _, _, shapes = jax.eval_shape(one_step, cache, slots)
    outputs = jax.tree.map(lambda leaf: jnp.zeros((max_steps, *leaf.shape), leaf.dtype), shapes)
    outputs = replace(outputs, tokens=outputs.tokens + NO_TOKEN)
    _, cache, slots, outputs = lax.while_loop(keep_going, body, (jnp.int32(0), cache, slots, outputs))
    return cache, constrain_sharding(model.mesh, write_rows(all_slots, slots)), replicate(model.mesh, outputs)


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def write_slot(
    mesh: Mesh | None, slots: Slots, batch: SamplingBatch, slot: jax.Array, row: SamplingBatch, history: SamplingState
) -> tuple[Slots, SamplingBatch]:
    """Gives a slot (int32 scalar) a new request: one row of parameters and of history. Donates slots and batch."""
    slots = replace(slots, is_active=slots.is_active.at[slot].set(False), history=set_row(slots.history, slot, history))
    return constrain_sharding(mesh, (slots, set_row(batch, slot, row)))


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def write_plain_slot(
    mesh: Mesh | None,
    slots: Slots,
    batch: SamplingBatch,
    slot: jax.Array,
    row: dict[str, jax.Array],
    history: dict[str, jax.Array],
) -> tuple[Slots, SamplingBatch]:
    """`write_slot` for a request without bias and penalties, whose rows over the vocabulary nothing reads: the small
    arrays only, by name."""

    def write(rows, new):
        return replace(rows, **{name: set_row(getattr(rows, name), slot, value) for name, value in new.items()})

    slots = replace(slots, is_active=slots.is_active.at[slot].set(False), history=write(slots.history, history))
    return constrain_sharding(mesh, (slots, write(batch, row)))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def write_draft_slot(
    mesh: Mesh | None, slots: Slots, slot: jax.Array, sequence: jax.Array, num_drafted: jax.Array
) -> Slots:
    """Gives a slot (int32 scalar) its tokens int32[L], and how many leading ones the draft has stored. Donates the
    slots."""
    return constrain_sharding(
        mesh, replace(slots, draft=set_row(slots.draft, slot, DraftSlots(sequence[None], num_drafted[None])))
    )


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def move_slots(mesh: Mesh | None, slots: Slots, batch: SamplingBatch, order: jax.Array) -> tuple[Slots, SamplingBatch]:
    """Row i becomes what row order[i] was, for int32[S]. Donates slots and batch."""
    return constrain_sharding(mesh, jax.tree.map(lambda leaf: leaf[order], (slots, batch)))


@partial(jax.jit, donate_argnums=0)
def move_states(cache: PagedCache, order: jax.Array) -> PagedCache:
    """States of recurrent layers, moved as `move_slots` moves slots. Donates the cache."""
    return replace(cache, states=jax.tree.map(lambda leaf: leaf[order], cache.states))


@partial(jax.jit, donate_argnums=0)
def copy_states(
    into: StateCache, source: StateCache, sources: jax.Array, destinations: jax.Array, count: jax.Array
) -> StateCache:
    """Copies the states of the first `count` slots int32 [N] of one cache to slots of another, which is donated."""

    def body(index: jax.Array, into: StateCache) -> StateCache:
        def copy(leaf: jax.Array, other: jax.Array) -> jax.Array:
            one = lax.dynamic_index_in_dim(other, sources[index], keepdims=True)
            return lax.dynamic_update_slice_in_dim(leaf, one, destinations[index], axis=0)

        return jax.tree.map(copy, into, source)

    return lax.fori_loop(0, count, body, into)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def copy_pages(
    mesh: Mesh | None, cache: PagedCache, sources: tuple[jax.Array, ...], destinations: tuple[jax.Array, ...]
) -> PagedCache:
    """Copies page sources[g][i] to destinations[g][i] (int32 [N]; one past the last page copies nothing) in all layers
    of group g.

    Donates the cache. No page may be both, none twice a destination. On a mesh each device copies what it holds.
    """
    layers = list(cache.layers)
    for group, ids in enumerate(zip(sources, destinations, strict=True)):
        numbers = cache.of_group(group)
        if not numbers:
            continue
        own: tuple[Any, ...] = tuple(layers[number] for number in numbers)
        copy = _copy_pages
        if mesh is not None:
            specs = tuple(parallel.page_specs(mesh, pages) for pages in own)
            everywhere = PartitionSpec()
            copy = jax.shard_map(
                _copy_pages, mesh=mesh, in_specs=(specs, everywhere, everywhere), out_specs=specs, check_vma=False
            )
        for number, pages in zip(numbers, copy(own, *ids), strict=True):
            layers[number] = pages
    return replace(cache, layers=tuple(layers))


def constrain_sharding(mesh: Mesh | None, rows: Any) -> Any:
    """Slots, or slots and their parameters, that lie on a mesh where they lay before: where the compiler put them, the
    next program would be compiled once more."""
    if mesh is None:
        return rows
    axes = slot_axes(*rows) if isinstance(rows, tuple) else axes_of(rows)
    return lax.with_sharding_constraint(rows, parallel.array_shardings(mesh, rows, axes))


def replicate(mesh: Mesh | None, tree: Tree) -> Tree:
    """What the host, or a program for other rows, reads: whole on every device of a mesh."""
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())
    return lax.with_sharding_constraint(tree, everywhere)


def encode_tokens(samples: SampleOutput, is_produced: jax.Array, takes_part: jax.Array) -> jax.Array:
    """`StepOutput.tokens` of one step."""
    tokens = jnp.where(is_produced, samples.tokens, NO_TOKEN)
    return jnp.where(takes_part & ~samples.ok, INVALID_LOGITS, tokens)


def take_rows(rows, count: int):
    """The first `count` rows; the arrays themselves where that is all."""
    return jax.tree.map(lambda leaf: leaf if leaf.shape[0] == count else leaf[:count], rows)


def write_rows(rows, new):
    """`rows` with their first ones replaced."""
    return jax.tree.map(
        lambda leaf, head: head if head.shape == leaf.shape else lax.dynamic_update_slice_in_dim(leaf, head, 0, 0),
        rows,
        new,
    )
