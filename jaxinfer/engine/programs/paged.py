"""The jitted programs over a paged cache: one step of prompts and decode together, many decode steps, and upkeep.

Shapes use the legend of jaxinfer/README.md. Every program exists once for each bucket of tokens and slots and never
retraces when values change. Slots are used from the first up, so a program of B slots takes the first B rows of the
arrays of all. What is donated is named in each docstring.
"""

from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer import parallel
from jaxinfer.cache import PagedCache, PageTables, StateCache
from jaxinfer.cache.policy.contract import SlotRows, StepRows
from jaxinfer.engine.compiling import LargeProgram
from jaxinfer.engine.programs import ProgramModel, Weights, uniform_logits
from jaxinfer.engine.programs.work import (
    INVALID_LOGITS,
    NO_TOKEN,
    DecodeWork,
    Slots,
    StepOutput,
    StepSlots,
    StepWork,
    decoding_work,
)
from jaxinfer.grammar.device import GrammarTables
from jaxinfer.models import Decoder, collect
from jaxinfer.request_arrays import RequestArrays, default_rows
from jaxinfer.sampling import (
    BoundProcessors,
    ProcessorRows,
    SampleOutput,
    SamplingBatch,
    SamplingState,
    advance,
    is_stop,
    make_batch,
    make_state,
    sample,
    set_row,
    with_sequences,
)
from jaxinfer.sampling.packed import pack, unpack
from jaxinfer.speculative import DraftSlots, ObservedRows, ObservingDraft, init_draft_slots, record
from pallas_kernels import copy_pages as _copy_pages

# A slot's rows over the vocabulary, which only requests with a bias or penalties need.
WIDE_ROWS = ("bias", "output_counts", "prompt_mask")
Tree = TypeVar("Tree")
BothCaches = tuple[PagedCache, PagedCache | None]  # the target's, and that of a draft that observes its passes
OUTPUT: Any = StepOutput(0, SampleOutput(0, 0, 0, 0, 0, 0))  # its structure  # pyright: ignore[reportArgumentType]


def _output_of(model: ProgramModel) -> Any:
    """The structure of an output with the model's tapped states."""
    return replace(OUTPUT, states=dict.fromkeys(model.taps, 0))


def init_slots(
    num_slots: int,
    vocab_size: int,
    draft_length: int | None = None,
    has_adapters: bool = False,
    processors: BoundProcessors | None = None,
    steering: RequestArrays | None = None,
) -> tuple[Slots, SamplingBatch]:
    """Empty slots, and sampling parameters that do nothing. `draft_length`: tokens of the longest sequence, in an
    engine that speculates. `has_adapters`: of a model whose weights hold adapters. `processors`: functions of users.
    `steering`: the vectors that requests may add, by layer."""
    counts = (np.zeros((num_slots,), np.int32) for _ in range(3))
    history = make_state([None] * num_slots, vocab_size)
    draft = None if draft_length is None else init_draft_slots(num_slots, draft_length)
    adapters = (np.zeros((num_slots,), np.int32), np.zeros((num_slots,), np.int32)) if has_adapters else (None, None)
    batch = make_batch([None] * num_slots, vocab_size)
    if processors is not None:
        history = with_sequences(history, [()] * num_slots, [0] * num_slots, processors.length)
        arrays: dict[str, Any] = default_rows(processors.arrays, num_slots)
        batch = replace(batch, processors=ProcessorRows(processors, arrays))
    added: Any = default_rows(steering, num_slots) if steering else None
    slots = Slots(*counts, np.zeros((num_slots,), bool), history, draft, *adapters, added)  # pyright: ignore
    # Filled here and sent: a fill on the device is a program to compile, for each shape.
    return jax.device_put((slots, batch), may_alias=False)


def empty_work(num_tokens: int, num_slots: int, has_prompt_lengths: bool = False) -> dict[str, np.ndarray]:
    """The arrays of a step in which nothing takes part, without the page table; with `prompt_lengths` if the policy
    of the cache needs them."""
    counts = ("query_starts", "query_lengths", "starts", "remaining", *("prompt_lengths",) * has_prompt_lengths)
    return {
        "tokens": np.zeros(num_tokens, np.int32),
        "token_slots": np.full(num_tokens, num_slots, np.int32),
        **{name: np.zeros(num_slots, np.int32) for name in counts},
        "is_prompt": np.zeros(num_slots, np.bool_),
        "is_last": np.zeros(num_slots, np.bool_),
    }


def step_work(arrays: dict[str, Any], page_tables: PageTables) -> StepWork:
    """The work of a step of the arrays of `empty_work`."""
    tokens = {name: arrays[name] for name in ("tokens", "token_slots")}
    slots = {name: array for name, array in arrays.items() if name not in tokens}
    return StepWork(**tokens, slots=StepSlots(**slots), page_tables=page_tables)


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


def _given(arguments: tuple[Any, ...], place: int) -> Any:
    """The argument at a place; None where it was left out."""
    return arguments[place] if place < len(arguments) else None


@partial(
    LargeProgram,
    outputs=lambda *given: (given[2], 0, 0, _given(given, 8), dict.fromkeys(given[0].taps, 0)),
    static_argnums=(0, 5, 6),
    donate_argnums=(2, 8),
)
def step(
    model: ProgramModel,
    weights: Weights,
    cache: PagedCache,
    slots: Slots,
    work: StepWork,
    is_uniform: bool = False,
    num_hidden: int | None = None,
    observer: ObservingDraft | None = None,
    own: PagedCache | None = None,
) -> tuple[PagedCache, jax.Array, jax.Array, PagedCache | None, dict[str, jax.Array]]:
    """Stores prompt tokens and the newest ones of decoding slots, in one pass over the weights, which `observer`
    observes with a cache of its own. Donates both caches.

    Returns the cache, the logits float32 [B, V] of each slot's last row, for `sample_step`, the final hidden states
    [T, D], or [num_hidden, D] with zeros at the end, so that one program scores those of every step, the observer's
    cache, and the model's tapped states, float32 [T, D] by name. `is_uniform` gives every token the same arithmetic,
    whether it comes with its prompt's other tokens or alone.
    """
    slots = take_rows(slots, work.page_tables[0].shape[0])
    caches = cache, own
    (cache, own), logits, hidden, states = _one_pass(
        model, model.bind(weights), caches, slots, work, is_uniform, observer
    )
    num_tokens = work.tokens.shape[0]
    if num_hidden is not None and num_hidden > num_tokens:
        hidden = jnp.pad(hidden, ((0, num_hidden - num_tokens), (0, 0)))
    return cache, logits, replicate(model.mesh, hidden), own, replicate(model.mesh, states)


def _one_pass(
    model: ProgramModel,
    decoder: Decoder,
    caches: BothCaches,
    slots: Slots,
    work: StepWork,
    is_uniform: bool,
    observer: ObservingDraft | None,
) -> tuple[BothCaches, jax.Array, jax.Array, dict[str, jax.Array]]:
    """The caches, logits, hidden and tapped states of `step`, for the slots of its rows."""
    cache, own = caches
    num_tokens, num_slots, rows = work.tokens.shape[0], work.page_tables[0].shape[0], work.slots
    lengths, ends = rows.lengths(slots), rows.ends(slots)
    newest = jnp.where(rows.is_decoding(slots), rows.query_starts, num_tokens)
    tokens = work.tokens.at[newest].set(slots.tokens, mode="drop")
    slot = jnp.minimum(work.token_slots, num_slots - 1)
    positions = (ends - lengths)[slot] + jnp.arange(num_tokens) - rows.query_starts[slot]
    positions = jnp.where(work.token_slots < num_slots, positions, 0)

    ragged = work.token_slots, rows.query_starts, lengths, ends, rows.is_decoding(slots), rows.prompt_lengths
    ragged = StepRows(*ragged, is_uniform, model.mesh)
    attend = model.policy.attend_step(model.config, cache, work.page_tables, ragged)
    if model.mesh is not None and parallel.axis_of(model.mesh, "tokens") is not None:  # each device has its rows
        cut = parallel.array_shardings(model.mesh, (tokens, positions), (("tokens",), ("tokens",)))
        tokens, positions = lax.with_sharding_constraint((tokens, positions), cut)
    tapped, tap = collect(all_taps(model, observer))
    target = decoder.for_rows(slots.adapters_of(slot, positions)).steered(slots.steering, slot)
    hidden = target(tokens, positions, attend, tap)
    if observer is not None:
        pass_rows = tokens, positions, rows.query_starts, lengths
        own = _observe(model, observer, own, slots, pass_rows, work.page_tables, tapped)
    last = jnp.clip(rows.query_starts + lengths - 1, 0, num_tokens - 1)
    head = uniform_logits if is_uniform else _logits
    logits = head(decoder, hidden[last], slots.adapters)
    if model.mesh is not None:
        logits = lax.with_sharding_constraint(logits, logits_sharding(model.mesh, logits))
    return (attend.cache, own), logits, hidden, returned_taps(model, tapped)


def all_taps(model: ProgramModel, observer: ObservingDraft | None) -> tuple[str, ...]:
    """Names of the hidden states that a pass collects: those that it returns, and those that a draft observes."""
    return model.taps if observer is None else (*model.taps, *observer.proposer.taps)


def returned_taps(model: ProgramModel, tapped: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The collected states that a pass returns, in float32."""
    return {name: tapped[name].astype(jnp.float32) for name in model.taps}


def _logits(decoder: Decoder, hidden: jax.Array, adapters: jax.Array | None) -> jax.Array:
    """As `uniform_logits`, by a product of as many rows."""
    return decoder.for_rows(adapters).logits(hidden)


def _observe(
    model: ProgramModel,
    observer: ObservingDraft,
    own: PagedCache | None,
    slots: Slots,
    rows: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    page_tables: PageTables,
    taps: dict[str, jax.Array],
) -> PagedCache | None:
    """The observer's cache after a pass over the rows (the first four fields of `ObservedRows`) of all slots."""
    drafting: Any = slots.draft
    slot_fields = jnp.arange(slots.tokens.shape[0]), drafting.num_drafted
    return observer.bind(model.config.vocab_size).observe(own, ObservedRows(*rows, *slot_fields, page_tables[0], taps))


def logits_sharding(mesh: Mesh, logits: Any) -> NamedSharding:
    """Sharding in which `step` leaves logits [B, V]: the vocabulary is cut as the sampler's rows over it are."""
    return parallel.array_shardings(mesh, logits, (None, "vocab"))


_sample = jax.jit(sample, inline=True)  # traced once for `sample_step` and `decode` of as many slots


@partial(
    LargeProgram,
    outputs=lambda mesh, slots, *_: (slots, OUTPUT),
    static_argnums=0,
    donate_argnums=1,
)
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
    new_slots, output = _sample_rows(slots, batch, rows, logits, tables)
    output = jax.tree.map(lambda leaf: leaf[None], output)
    return constrain_sharding(mesh, write_rows(all_slots, new_slots)), replicate(mesh, output)


def _sample_rows(
    slots: Slots, batch: SamplingBatch, rows: StepSlots, logits: jax.Array, tables: GrammarTables | None
) -> tuple[Slots, StepOutput]:
    """The slots after a pass, and its output, of one step without an axis for it."""
    is_decoding, ends = rows.is_decoding(slots), rows.ends(slots)
    takes_part = is_decoding | rows.is_prompt
    samples = _sample(logits, ends, batch, slots.history, tables, is_used=takes_part)

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
        adapters=slots.adapters,
        adapter_starts=slots.adapter_starts,
        steering=slots.steering,
    )
    return new_slots, StepOutput(encode_tokens(samples, is_produced, takes_part), samples)


def _uniform_step(
    model: ProgramModel,
    decoder: Decoder,
    caches: BothCaches,
    slots: Slots,
    batch: SamplingBatch,
    work: DecodeWork,
    num_rows: int,
    tables: GrammarTables | None,
    observer: ObservingDraft | None,
) -> tuple[BothCaches, Slots, StepOutput]:
    """The pass of `step` and `sample_step` where all slots that are scheduled decode."""
    rows = decoding_work(work, num_rows, model.policy.needs_prompt_lengths)
    caches, logits, _, states = _one_pass(model, decoder, caches, slots, rows, True, observer)
    new_slots, output = _sample_rows(slots, batch, rows.slots, logits, tables)
    # Each slot decodes in the row of its number.
    states = {name: of_rows[: slots.tokens.shape[0]] for name, of_rows in states.items()}
    return caches, new_slots, replace(output, states=states)


@partial(
    LargeProgram,
    outputs=lambda *given: (*given[2:4], _output_of(given[0]), _given(given, 10)),
    static_argnums=(0, 6, 8),
    donate_argnums=(2, 3, 10),
)
def decode(
    model: ProgramModel,
    weights: Weights,
    cache: PagedCache,
    slots: Slots,
    batch: SamplingBatch,
    work: DecodeWork,
    max_steps: int,
    tables: GrammarTables | None = None,
    num_rows: int | None = None,
    observer: ObservingDraft | None = None,
    own: PagedCache | None = None,
) -> tuple[PagedCache, Slots, StepOutput, PagedCache | None]:
    """Up to `work.num_steps` (at most the static `max_steps`) tokens for every held, active slot, in one loop on the
    device that ends early when none is left. Donates the caches and the slots; nothing passes through the host. With
    the static `num_rows` each step is a uniform one of so many rows, with the same arithmetic as in `step`; `observer`
    and its cache `own` as there."""
    decoder = model.bind(weights)
    num_slots = work.is_scheduled.shape[0]
    all_slots, slots, batch = slots, take_rows(slots, num_slots), take_rows(batch, num_slots)
    rows = jnp.arange(num_slots)

    @partial(jax.jit, inline=True)  # traced once for the shapes of its output and the loop
    def one_step(caches: BothCaches, slots: Slots) -> tuple[BothCaches, Slots, StepOutput]:
        if num_rows is not None:
            return _uniform_step(model, decoder, caches, slots, batch, work, num_rows, tables, observer)
        cache, own = caches
        is_decoding = slots.is_active & work.is_scheduled
        lengths = is_decoding.astype(jnp.int32)
        newest = SlotRows(rows, slots.positions, lengths, 1, mesh=model.mesh)
        attend = model.policy.attend_slots(model.config, cache, work.page_tables, newest)
        target = decoder.for_rows(slots.adapters).steered(slots.steering)
        tapped, tap = collect(all_taps(model, observer))
        hidden = target(slots.tokens, slots.positions, attend, tap)
        if observer is not None:
            pass_rows = slots.tokens, slots.positions, rows, lengths
            own = _observe(model, observer, own, slots, pass_rows, work.page_tables, tapped)
        samples = _sample(target.logits(hidden), slots.positions + 1, batch, slots.history, tables, is_used=is_decoding)
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
            adapters=slots.adapters,
            adapter_starts=slots.adapter_starts,
            steering=slots.steering,
        )
        states = returned_taps(model, tapped)
        output = StepOutput(encode_tokens(samples, is_decoding, is_decoding), samples, states)
        return (attend.cache, own), new_slots, output

    def body(carry):
        count, caches, slots, outputs = carry
        caches, slots, output = one_step(caches, slots)
        return count + 1, caches, slots, lax.dynamic_update_index_in_dim(outputs, pack(output), count, 0)

    def keep_going(carry):
        count, _, slots, _ = carry
        return (count < work.num_steps) & jnp.any(slots.is_active & work.is_scheduled)

    caches = cache, own
    _, _, shapes = jax.eval_shape(one_step, caches, slots)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    nothing = pack(replace(nothing, tokens=nothing.tokens + NO_TOKEN))
    carry = jnp.int32(0), caches, slots, jnp.broadcast_to(nothing, (max_steps, *nothing.shape))
    _, (cache, own), slots, packed = lax.while_loop(keep_going, body, carry)
    outputs = unpack(packed, shapes)
    return cache, constrain_sharding(model.mesh, write_rows(all_slots, slots)), replicate(model.mesh, outputs), own


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def write_slot(
    mesh: Mesh | None, slots: Slots, batch: SamplingBatch, slot: jax.Array, row: SamplingBatch, history: SamplingState
) -> tuple[Slots, SamplingBatch]:
    """Gives a slot (int32 scalar) a new request: one row of parameters and of history. Donates slots and batch."""
    slots = replace(slots, is_active=slots.is_active.at[slot].set(False), history=set_row(slots.history, slot, history))
    written = set_row(replace(batch, processors=None), slot, row)  # their arrays are written by `write_arrays`
    return constrain_sharding(mesh, (slots, replace(written, processors=batch.processors)))


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


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def write_adapter(mesh: Mesh | None, slots: Slots, slot: jax.Array, adapter: jax.Array, start: jax.Array) -> Slots:
    """Gives a slot its request's adapter, and the position from which it changes the model (int32 scalars). Donates the
    slots."""
    adapters, starts = (
        set_row(rows, slot, value[None]) for rows, value in ((slots.adapters, adapter), (slots.adapter_starts, start))
    )
    return constrain_sharding(mesh, replace(slots, adapters=adapters, adapter_starts=starts))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def write_arrays(
    mesh: Mesh | None, arrays: dict[str, jax.Array], slot: jax.Array, row: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Gives a slot (int32 scalar) its request's arrays [1, ...] by name (`request_arrays.row_of`). Donates the arrays
    [S, ...] of all slots."""
    return replicate(mesh, set_row(arrays, slot, row))


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
            row = lax.dynamic_index_in_dim(other, sources[index], keepdims=True)
            return lax.dynamic_update_slice_in_dim(leaf, row, destinations[index], axis=0)

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
    """Copies arrays that the host, or a program for other rows, reads: whole on every device of a mesh."""
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
