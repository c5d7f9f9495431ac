"""The arrays and compiled programs of one engine: runs planned dispatches, reads their results, warms up.

On several hosts, methods marked with `operation` run on each of them, in the same order; they take host values only.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.stages import Lowered

from jaxinfer import compilation_cache
from jaxinfer.cache import KVScales, PagedCache, PageTables, StateCache, applied_scales, init_paged_cache
from jaxinfer.cache.state import zeros_of
from jaxinfer.engine.adapter_stacks import AdapterStacks, HostAdapter
from jaxinfer.engine.cache_groups import MAX_IN_FLIGHT
from jaxinfer.engine.compiling import Program, Report, compile_programs, default_jobs
from jaxinfer.engine.lockstep import operation
from jaxinfer.engine.memory import PoolPlan, available_bytes, plan_pool
from jaxinfer.engine.page_tables import HostTables, PageTableRows, copy_ids, state_copies
from jaxinfer.engine.placement import DevicePlacement
from jaxinfer.engine.plans import Chunk, DispatchPlan, GroupMove, slot_of
from jaxinfer.engine.programs import grammar as grammars
from jaxinfer.engine.programs import padded, program_model, tapped_states
from jaxinfer.engine.programs import paged as programs
from jaxinfer.engine.programs.compaction import CompactionWork, compact_prompt, compaction_work
from jaxinfer.engine.programs.paged import WIDE_ROWS
from jaxinfer.engine.programs.speculative import RoundCounts, SpeculativeWork, empty_rounds, speculate
from jaxinfer.engine.programs.work import DecodeWork, StepOutput, StepSlots, StepWork
from jaxinfer.engine.request import Request, SequenceState
from jaxinfer.engine.scoring import DeviceScorer, DeviceScores, PendingScores, PromptScorer, ScoredChunk, ScoreWork
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.engine.steering import Steering
from jaxinfer.engine.tiers.host_pages import Caches, HostPages, check_host_cache, host_pools
from jaxinfer.engine.tiers.link_rates import decide_host_cache
from jaxinfer.engine.weights import WeightsView, leaves_of
from jaxinfer.grammar.device import empty_tables
from jaxinfer.models import ModelConfig, Params
from jaxinfer.parallel import hosts
from jaxinfer.quantization.adapted import without_adapters
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.request_arrays import row_of
from jaxinfer.sampling import (
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    SamplingState,
    make_batch,
    make_state,
    with_sequences,
)
from jaxinfer.speculative import NO_DRAFT, Draft, ObservingDraft
from jaxinfer.training.fixed_forward import FixedShape, refusal

COPIES = 8  # pages of one copy program


@dataclass(frozen=True)
class Flight:
    """A dispatch whose results are not read yet.

    Attributes:
      plan: what was dispatched. chunks, decodes: its sequences with the slots that they had.
      output: tokens and samples; counts: of speculative rounds. scores: of prompts. states: of a step with prompts, the
        tapped hidden states [rows, D] by name; its decoding slots come first.
      num_slots: of the program. num_rows: of tokens of a step, padding included.
      sent_at: seconds of `time.perf_counter`.
    """

    plan: DispatchPlan
    chunks: list[tuple[int, Chunk]]
    decodes: list[tuple[int, SequenceState]]
    output: StepOutput
    num_slots: int
    num_rows: int
    sent_at: float
    counts: RoundCounts | None = None
    scores: PendingScores | None = None
    states: dict[str, jax.Array] = field(default_factory=dict)


@dataclass(frozen=True)
class FlightResults:
    """Results of a dispatch, on the host.

    Attributes:
      tokens: by slot, one a step; INVALID_LOGITS and NO_TOKEN stand after the last one.
      samples: for log-probabilities, leaves [steps, slots, ...]; None if no request has any.
      proposed, accepted: drafted and accepted tokens of each slot's rounds, -1 where it took no part.
      seconds: from when the dispatch began to when it was read. It began when it was sent, or when the one before it
        had ended.
    """

    tokens: list[list[int]]
    samples: SampleOutput | None
    proposed: np.ndarray | None
    accepted: np.ndarray | None
    seconds: float


class ModelRunner:
    """Runs dispatches for one engine. Owns the caches and slots (`close` frees them); weights are views.

    Args:
      spec: what to allocate; without `num_pages` its pool is as large as the memory allows.
      weights, draft: the concrete parameters of the spec. adapters: of the stacks in these weights, if there are any.
      kv_scales: a checkpoint's, for an fp8 cache; ignored by others.
      available: free bytes, in place of the device's own figure.

    Raises OutOfMemoryError if model and cache do not fit. Figures in bytes are those of one device.
    """

    def __init__(
        self,
        spec: EngineSpec,
        weights: WeightsView[Params],
        draft: Draft | None = None,
        *,
        adapters: AdapterStacks | None = None,
        kv_scales: KVScales | None = None,
        available: int | None = None,
    ):
        self.is_without_cache = True
        self.publish: Callable[[str, Sequence[Any]], None] | None = None  # to the other hosts, set by `Lockstep`
        mesh, params, config, draft = spec.mesh, weights.value, spec.config, draft or NO_DRAFT
        self.placement, self.weights = DevicePlacement(mesh), leaves_of(weights)
        self.adapters, self._adapted = adapters, weights
        self.model, _ = program_model(config, params, mesh, spec.policy, spec.taps)
        self.device = self.weights.value[0].addressable_shards[0].device
        self._draft = draft
        self._replaced_names: frozenset[str] | None = frozenset()  # of the draft's weights; None where they are dropped
        models = weights.view(lambda params: self._models_of_draft(config, without_adapters(params)))
        self._draft_models = models
        programmed = [program_model(own, its, mesh)[0] for own, its in models.value]
        self.draft_weights = leaves_of(models.view(lambda models: {"draft": [params for _, params in models]}))
        self.drafters = spec.drafters(*programmed)
        self._observing = spec.observer(programmed, ())  # of the weights that there are then
        check_host_cache(spec)
        spec, self.host_rule = decide_host_cache(spec, self.device)
        self.memory = self._plan_pool(spec, available)
        self.spec = spec = spec.with_pages(self.memory.num_pages)
        self.host_pages = HostPages(spec, host_pools(spec), mesh)
        self.kv_scales = applied_scales(kv_scales, spec.kv_dtype, spec.config)
        self.take_cache()
        sizes = spec.max_seqs, spec.config.vocab_size, spec.draft_length
        slots, batch = programs.init_slots(*sizes, spec.has_adapters, spec.processors, spec.steering_arrays)
        self._slots, self._batch = self.placement.slots(slots, batch)
        self._tables = self.placement.put(empty_tables(spec.table_sizes))
        self._rows = PageTableRows(spec.groups, spec.max_seqs, spec.pages_per_sequence)
        self._sent_tables: PageTables | None = None  # what the device has, None where the host's are newer
        self._scorer = PromptScorer(spec.config.vocab_size, spec.max_seqs, self, spec.has_adapters)
        self._scores = DeviceScorer(self.model, self.weights, self.placement, spec.head_rows)
        self._hidden: jax.Array | None = None  # final hidden states of the step just sent, where they are scored
        self._states: dict[str, jax.Array] = {}  # its tapped ones
        self._read_at = 0.0
        self._has_decoded = False
        self._compiled_steps: set[tuple[int, int]] = set()  # numbers of tokens and slots

    def _plan_pool(self, spec: EngineSpec, available: int | None) -> PoolPlan:
        if available is None:
            available = available_bytes(self.device)
            if not self.placement.is_of_this_process and (others := hosts.current()) is not None:
                available = others.least(available)  # a page has the same number on all hosts
        weights = num_bytes(self.weights.value) + num_bytes(spec.own_draft_params) - spec.host_bytes
        return plan_pool(spec, weights=weights, available=available)

    def take_cache(self) -> None:
        """Allocates the caches, unless they are there."""
        if not self.is_without_cache:
            return
        spec, draft = self.spec, self._draft
        counts = tuple(group.num_allocated for group in spec.groups)
        stored = spec.kv_dtype, self.kv_scales, counts, spec.layer_groups, spec.page_leaves
        self._cache = self._init_cache(spec.config, spec.states, *stored)
        self._saved: StateCache | None = zeros_of(spec.saved_states)
        self._draft_cache: PagedCache | None = None
        for own, _ in draft.own:
            scales = applied_scales(draft.own_scales, spec.draft_kv_dtype, own)
            stored = spec.draft_kv_dtype, scales, counts[:1]
            self._draft_cache = self._init_cache(own, spec.draft_states, *stored)
        self.is_without_cache = False

    def free_cache(self) -> None:
        """Frees the caches' memory now, until `take_cache`."""
        if not self.is_without_cache:
            self.is_without_cache = True
            for leaf in jax.tree.leaves((self._cache, self._saved, self._draft_cache)):
                leaf.delete()

    def _init_cache(
        self, config: Any, states: Any, kv_dtype: str, scales: KVScales | None, counts: Any, *groups: Any
    ) -> PagedCache:
        spec, layout = self.spec, self.spec.layout_of(config, kv_dtype)
        pages = init_paged_cache(config, counts, spec.page_size, kv_dtype, layout, spec.mesh, scales, *groups)
        return dataclasses.replace(pages, states=zeros_of(states))

    def close(self) -> None:
        """Frees the caches' and slots' memory now."""
        if self.adapters is not None:
            self.adapters.close()
        for leaf in jax.tree.leaves((self._slots, self._batch, self._tables)):
            leaf.delete()
        self.free_cache()

    def replace_draft(self, params: Params) -> None:
        """Gives the draft other weights of its own, like those before; tables that it was given stay."""
        self._replaced_names = frozenset(params)
        self._draft = self._draft.with_params(lambda config, own: (config, {**own, **params}))
        if self.weights.value is not None:
            self._draft_models.remake()

    def drop_draft(self) -> None:
        """Frees the weights that `replace_draft` gave, until it gives others."""
        names, self._replaced_names = self._replaced_names or (), None
        self._draft = self._draft.with_params(
            lambda config, own: (config, {name: leaf for name, leaf in own.items() if name not in names})
        )
        self._draft_models.drop()

    def _models_of_draft(self, config: ModelConfig, params: Params) -> Any:
        """`Draft.models` of the draft that there is; None while its weights are dropped."""
        return None if self._replaced_names is None else self._draft.models(config, params)

    @property
    def max_in_flight(self) -> int:
        """Dispatches that may be sent before the oldest is read: one until a decode program has run, since tracing and
        compiling it keeps the host from reading the first token."""
        return MAX_IN_FLIGHT if self._has_decoded else 1

    # A dispatch.

    def run(self, plan: DispatchPlan) -> Flight | None:
        """Sends a planned dispatch; None where the plan only admits and moves sequences."""
        self._update_slots(plan)
        if plan.is_empty:
            return None
        chunks = [(slot_of(chunk.sequence), chunk) for chunk in plan.chunks]
        if any(chunk.end_moves for _, chunk in chunks):
            sent = partial(Flight, plan, chunks, [], num_slots=self.spec.max_seqs, sent_at=time.perf_counter())
            sent = partial(sent, num_rows=chunks[0][1].length)
            return self._sent_pieces(sent, *self._compact(*chunks[0]))
        decodes = [(slot_of(sequence), sequence) for sequence in plan.decodes]
        is_step = bool(chunks)
        highest = max(slot for slot, _ in (*chunks, *decodes))
        num_rows = len(decodes) + sum(chunk.length for _, chunk in chunks)
        num_tokens = next(bucket for bucket in self.spec.token_buckets if bucket >= num_rows)
        sizes = self.spec.step_slots_of(num_tokens) if is_step else self.spec.decode_slots
        num_slots = next(size for size in sizes if size > highest)
        self._update_tables(plan, num_slots)
        sent = partial(Flight, plan, chunks, decodes, num_slots=num_slots, sent_at=time.perf_counter())
        self._has_decoded |= not chunks
        if is_step:
            return self._send_step(sent, chunks, decodes, num_tokens, num_slots)
        is_scheduled = np.zeros(num_slots, np.bool_)
        slots = [slot for slot, _ in decodes]
        is_scheduled[slots] = True
        if plan.draft is None:
            return sent(output=self._run_decode(is_scheduled, plan.num_steps), num_rows=num_slots)
        form = self.spec.form_of(plan.draft.tree, plan.draft.shares_rows, num_slots)
        num_drafts = np.zeros(num_slots, np.int32)
        num_drafts[slots] = [plan.draft.length_of(sequence) for _, sequence in decodes]
        work = {"is_scheduled": is_scheduled, "num_rounds": np.int32(plan.num_steps), "num_drafts": num_drafts}
        output, counts = self._run_rounds(work, form)
        drafter = self.drafters[form]
        num_rows = max(num_slots * (drafter.rows_per_slot or drafter.tree.num_nodes), drafter.min_rows)
        return sent(output=output, num_rows=num_rows, counts=counts)

    def read(self, flight: Flight, *, with_samples: bool) -> FlightResults:
        """Waits for a dispatch and reads its results; scores of prompts are delivered to their sequences."""
        tokens = jax.device_get(flight.output.tokens).T.tolist()
        now = time.perf_counter()
        seconds, self._read_at = now - max(flight.sent_at, self._read_at), now
        samples = jax.device_get(flight.output.samples) if with_samples else None
        if flight.scores is not None:
            flight.scores.deliver()
        proposed = accepted = None
        if flight.counts is not None:
            proposed, accepted = jax.device_get((flight.counts.proposed, flight.counts.accepted))
        return FlightResults(tokens, samples, proposed, accepted, seconds)

    def stop_scoring(self, sequence: SequenceState) -> None:
        """Drops what scoring keeps of a sequence."""
        self._scorer.stop(sequence)

    def hidden_states(
        self,
        tokens: list[int],
        taps: tuple[str, ...],
        adapter: int = 0,
        start: int = 0,
        steering: Steering | None = None,
    ) -> dict[str, np.ndarray]:
        """The tapped hidden states [len(tokens), D] of a token sequence, without touching the cache; of a deterministic
        engine with the bits of its passes, unless `refusal` has a reason or vectors are added (`steering`). `adapter`:
        the number of the one that changes the model from position `start` on."""
        stored, own = (self.spec.kv_dtype, self.kv_scales), None
        if self.spec.has_adapters:
            own = np.full(len(tokens), adapter, np.int32)
            own[:start] = 0
        shape = None if refusal(self.spec) else FixedShape.of(self.spec)
        added = None if steering is None else steering.arrays
        return tapped_states(self.model, self.weights.value, tokens, taps, *stored, own, shape, added)

    # Before a dispatch: slots and page table.

    def _update_slots(self, plan: DispatchPlan) -> None:
        if plan.moves:
            order = np.arange(self.spec.max_seqs, dtype=np.int32)
            for old, new in plan.moves:
                order[[old, new]] = order[[new, old]]
            self._move_slots(order)
        self._move_pages(plan)
        for slot, adapter in plan.adapters:
            self.write_stacks(slot, adapter.host)
        for sequence in plan.admitted:
            self._write_slot(sequence)
        if restored := [
            (sequence.restore_from - 1, slot_of(sequence)) for sequence in plan.admitted if sequence.restore_from
        ]:
            self._copy_states(False, state_copies(restored, self.spec.max_seqs))
        for start in range(0, len(plan.copies), COPIES):
            self._copy_pages(*copy_ids(plan.copies[start : start + COPIES], self.spec.groups, COPIES))
        for part in plan.grammar:
            self._write_table(part) if isinstance(part, grammars.TableBlock) else self._set_rows(part)

    def _write_slot(self, sequence: SequenceState) -> None:
        if sequence.request.reads_hidden:
            self._scorer.start(sequence)
        params, vocab_size = sequence.params, self.spec.config.vocab_size
        has_penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        is_plain = not (has_penalties or params.logit_bias or params.allowed_token_ids is not None)
        rows = make_batch([sequence.row], vocab_size)
        history = make_state([() if is_plain else sequence.request.token_ids], vocab_size, [sequence.output])
        slot, processors = slot_of(sequence), self.spec.processors
        if processors is not None:
            history = with_sequences(history, [sequence.tokens], [sequence.num_prompt], processors.length)
            self._write_arrays(slot, row_of(processors.arrays, sequence.request.arrays))
        if is_plain:
            row, small = (
                {name: part for name, part in vars(fields).items() if name not in WIDE_ROWS and part is not None}
                for fields in (rows, history)
            )
            self._write_plain_row(slot, row, small)
        else:
            self._write_row(slot, rows, history)
        if (length := self.spec.draft_length) is not None:
            tokens = [*sequence.tokens, *sequence.request.claimed[sequence.num_output :]]
            self._write_draft_row(slot, padded(tokens[:length], length), sequence.num_drafted)
        if self.spec.has_adapters:
            self._write_adapter(slot, sequence.adapter_slot, sequence.request.adapter_start)
        if self.spec.steered_layers:
            self._write_steering(slot, row_of(self.spec.steering_arrays, sequence.request.added_vectors))

    def write_stacks(self, slot: int, adapter: HostAdapter) -> None:
        """Writes an adapter into a slot, 1 for the first. One behind the last slot is written nowhere."""
        if self.adapters is None:
            raise RuntimeError("an adapter was planned for weights without room for any")
        self.adapters.write(slot - 1, adapter)
        self._adapted.remake()

    def _update_tables(self, plan: DispatchPlan | None, num_slots: int) -> None:
        """Brings the first rows of the page tables to the device, where they have changed."""
        if plan is not None and self._rows.update(plan.sequences):
            self._sent_tables = None
        if self._sent_tables is None or self._sent_tables[0].shape[0] != num_slots:
            self._send_tables(self._rows.first(num_slots))

    def _send_step(
        self,
        sent: Callable[..., Flight],
        chunks: list[tuple[int, Chunk]],
        decodes: list[tuple[int, SequenceState]],
        num_tokens: int,
        num_slots: int,
    ) -> Flight:
        work, pieces = step_rows(chunks, decodes, num_tokens, num_slots, self.spec.policy.needs_prompt_lengths)
        output = self._run_step(work, any(piece.is_read for piece in pieces))
        if saved := [(slot, chunk.saves_to - 1) for slot, chunk in chunks if chunk.saves_to]:
            self._copy_states(True, state_copies(saved, self.spec.max_seqs))
        return self._sent_pieces(partial(sent, num_rows=num_tokens), output, pieces)

    def _sent_pieces(self, sent: Callable[..., Flight], output: StepOutput, pieces: list[ScoredChunk]) -> Flight:
        """The flight of pieces of prompts, whose scoring begins if a request needs it."""
        scores = None
        if self._hidden is not None:
            scores, self._hidden = self._scorer.score(tuple(pieces), self._hidden, pieces[-1].end), None
        return sent(output=output, scores=scores, states=self._states)

    # What runs on the devices, on those of all hosts alike: arguments are host values.

    @operation
    def _move_slots(self, order: np.ndarray) -> None:
        mesh = self.placement.mesh
        order = self.placement.put(order)
        self._slots, self._batch = programs.move_slots(mesh, self._slots, self._batch, order)
        self._cache, self._draft_cache = (
            _moved(self._cache, order),
            self._draft_cache and _moved(self._draft_cache, order),
        )

    @operation
    def _write_plain_row(self, slot: int, row: dict[str, np.ndarray], history: dict[str, np.ndarray]) -> None:
        arguments = self.placement.put((np.int32(slot), row, history))
        self._slots, self._batch = programs.write_plain_slot(self.placement.mesh, self._slots, self._batch, *arguments)

    @operation
    def _write_row(self, slot: int, row: SamplingBatch, history: SamplingState) -> None:
        arguments = self.placement.put((np.int32(slot), row, history))
        self._slots, self._batch = programs.write_slot(self.placement.mesh, self._slots, self._batch, *arguments)

    @operation
    def _write_arrays(self, slot: int, row: dict[str, np.ndarray]) -> None:
        own: Any = self._batch.processors
        arrays = programs.write_arrays(self.placement.mesh, own.arrays, *self.placement.put((np.int32(slot), row)))
        self._batch = dataclasses.replace(self._batch, processors=dataclasses.replace(own, arrays=arrays))

    @operation
    def _write_draft_row(self, slot: int, tokens: np.ndarray, num_drafted: int) -> None:
        arguments = self.placement.put((np.int32(slot), tokens, np.int32(num_drafted)))
        self._slots = programs.write_draft_slot(self.placement.mesh, self._slots, *arguments)

    @operation
    def _write_adapter(self, slot: int, adapter: int, start: int) -> None:
        arguments = self.placement.put((np.int32(slot), np.int32(adapter), np.int32(start)))
        self._slots = programs.write_adapter(self.placement.mesh, self._slots, *arguments)

    @operation
    def _write_steering(self, slot: int, row: dict[str, np.ndarray]) -> None:
        arguments = self.placement.put((np.int32(slot), row))
        steering = programs.write_arrays(self.placement.mesh, self._slots.steering or {}, *arguments)
        self._slots = dataclasses.replace(self._slots, steering=steering)

    @operation
    def _write_table(self, block: grammars.TableBlock) -> None:
        self._tables = grammars.write_table(self.placement.mesh, self._tables, self.placement.put(block))

    @operation
    def _set_rows(self, rows: grammars.GrammarRows) -> None:
        arguments = self._slots, self._batch, self._tables, self.placement.put(rows)
        self._slots, self._batch, self._tables = grammars.set_rows(self.placement.mesh, *arguments)

    @operation
    def _send_tables(self, tables: HostTables) -> None:
        self._sent_tables = self.placement.put(tables)

    @property
    def _page_tables(self) -> PageTables:
        if self._sent_tables is None:
            raise RuntimeError("a dispatch was planned without page tables")
        return self._sent_tables

    def _step_work(self, work: dict[str, np.ndarray], page_tables: PageTables) -> StepWork:
        return programs.step_work(self.placement.put(work), page_tables)

    def _step_arguments(self, work: StepWork) -> tuple[Any, ...]:
        arrays = (self.model, self.weights.value, self._cache, self._slots, work)
        return *arrays, self.spec.is_deterministic, self.spec.token_buckets[-1], *self._observer

    @property
    def _observer(self) -> tuple[ObservingDraft | None, PagedCache | None]:
        """A draft that observes what a program computes, and its cache."""
        if self._observing is None:
            return None, None
        return dataclasses.replace(self._observing, weights=self.draft_weights.value), self._draft_cache

    def _observed(self, own: PagedCache | None) -> None:
        """Takes back the cache of `_observer`."""
        if self._observing is not None:
            self._draft_cache = own

    @operation
    def _run_step(self, work: dict[str, np.ndarray], is_scored: bool) -> StepOutput:
        step = self._step_work(work, self._page_tables)
        self._compile_step(step)
        self._cache, logits, hidden, own, self._states = programs.step(*self._step_arguments(step))
        self._observed(own)
        arguments = self._slots, self._batch, step.slots, logits, self._tables
        self._slots, output = programs.sample_step(self.placement.mesh, *arguments)
        self._hidden = hidden if is_scored else None
        return output

    def _compile_step(self, work: StepWork) -> None:
        """Compiles the two programs of a step that comes for the first time, side by side."""
        num_tokens, num_slots = work.tokens.shape[0], work.page_tables[0].shape[0]
        if (num_tokens, num_slots) in self._compiled_steps:
            return
        self._compiled_steps.add((num_tokens, num_slots))
        step = Program("", lambda: programs.step.lower(*self._step_arguments(work)))
        # Sampling is traced in a moment, and is compiled while the step is traced.
        compile_programs([Program("", partial(self._lower_sampling, num_slots)), step], default_jobs())

    def _decode_arguments(self, is_scheduled: np.ndarray, num_steps: int, page_tables: PageTables) -> tuple[Any, ...]:
        scheduled, steps = self.placement.put((is_scheduled, np.int32(num_steps)))
        arrays = (self.model, self.weights.value, self._cache, self._slots, self._batch)
        static = self.spec.steps_per_dispatch, self._tables, *(self.spec.determinism.rows or (None,))
        return *arrays, DecodeWork(scheduled, page_tables, steps), *static, *self._observer

    @operation
    def _run_decode(self, is_scheduled: np.ndarray, num_steps: int) -> StepOutput:
        arguments = self._decode_arguments(is_scheduled, num_steps, self._page_tables)
        self._cache, self._slots, output, own = programs.decode(*arguments)
        self._observed(own)
        return output

    def _rounds_arguments(self, work: dict[str, Any], form: int, page_tables: PageTables) -> tuple[Any, ...]:
        device_work = SpeculativeWork(**self.placement.put(work), page_tables=page_tables)
        models = (self.model, self.weights.value, self.drafters[form], self.draft_weights.value)
        rows = (self._cache, self._draft_cache, self._slots, self._batch)
        return *models, *rows, device_work, self.spec.max_rounds, self._tables

    @operation
    def _run_rounds(self, work: dict[str, Any], form: int) -> tuple[StepOutput, RoundCounts]:
        """Speculative rounds of the form of this number."""
        arguments = self._rounds_arguments(work, form, self._page_tables)
        self._cache, self._draft_cache, self._slots, output, counts = speculate(*arguments)
        return output, counts

    @operation
    def start_scores(self, number: int, history: SamplingState) -> None:
        """As `DeviceScorer.start`."""
        self._scores.start(number, history)

    @operation
    def stop_scores(self, number: int) -> None:
        """As `DeviceScorer.stop`."""
        self._scores.stop(number)

    @operation
    def run_scores(self, work: ScoreWork) -> DeviceScores:
        """As `DeviceScorer.run`, of the step just sent."""
        if self._hidden is None:
            raise RuntimeError("scores were planned of a step that keeps no hidden states")
        hidden, self._hidden = self._hidden, None
        return self._scores.run(work, hidden)

    @operation
    def _keep_empty_hidden(self) -> None:
        shape = (self.spec.token_buckets[-1], self.spec.config.hidden_size)
        self._hidden = self.placement.put(np.zeros(shape, self.spec.dtype))

    # Copies of pages and states between places of the caches, and of pages to host memory and back.

    def _move_pages(self, plan: DispatchPlan) -> None:
        """Pages that leave for the host, then those that come back; in one process, so it is no operation."""
        if plan.to_host or plan.from_host:
            self.caches = self.host_pages.move(self.caches, plan.to_host, plan.from_host)

    @property
    def caches(self) -> Caches:
        """Arrays of pages and saved states, valid until the next dispatch."""
        return Caches(self._cache, self._draft_cache, self._saved)

    @caches.setter
    def caches(self, caches: Caches) -> None:
        self._cache, self._draft_cache, self._saved = caches

    @operation
    def _copy_states(self, saves: bool, copies: HostTables) -> None:
        """Saves states of slots, or restores them: `state_copies`."""
        if self._saved is None or self._cache.states is None:
            return
        copies = self.placement.put(copies)
        if saves:
            self._saved = programs.copy_states(self._saved, self._cache.states, *copies)
        else:
            restored = programs.copy_states(self._cache.states, self._saved, *copies)
            self._cache = dataclasses.replace(self._cache, states=restored)

    @operation
    def _copy_pages(self, sources: HostTables, destinations: HostTables) -> None:
        arguments = self.placement.put((sources, destinations))
        self._cache = programs.copy_pages(self.placement.mesh, self._cache, *arguments)
        first = tuple(ids[:1] for ids in arguments)  # where a draft's keys are
        self._draft_cache = self._draft_cache and programs.copy_pages(self.placement.mesh, self._draft_cache, *first)

    # The passes that end prompts, for policies that drop some of them there.

    def _compact(self, slot: int, chunk: Chunk) -> tuple[StepOutput, list[ScoredChunk]]:
        """Runs the pass of a prompt's last tokens; where they are in the hidden states."""
        spec, sequence = self.spec, chunk.sequence
        rows, pieces = step_rows([(slot, chunk)], [], chunk.length, spec.max_seqs)
        del rows["tokens"], rows["token_slots"]
        prompt = sequence.tokens[: sequence.num_prompt]
        of = {"slot": slot, "num_found": sequence.num_reused, "adapter": sequence.adapter_slot}
        work = self._end_work(prompt, chunk.length, chunk.end_moves, **of, added=sequence.request.added_vectors)
        return self._run_compaction(rows, work, pieces[0].is_read), pieces

    @operation
    def _run_compaction(self, rows: dict[str, np.ndarray], work: CompactionWork, is_scored: bool) -> StepOutput:
        self._cache, logits, hidden, own, self._states = compact_prompt(*self._compaction_arguments(work))
        self._observed(own)
        slots = StepSlots(**self.placement.put(rows))
        arguments = self._slots, self._batch, slots, logits, self._tables
        self._slots, output = programs.sample_step(self.placement.mesh, *arguments)
        self._hidden = hidden if is_scored else None
        return output

    def _compaction_arguments(self, work: CompactionWork) -> tuple[Any, ...]:
        spec = self.spec
        static = spec.max_seqs, spec.is_deterministic, spec.token_buckets[-1]
        return self.model, self.weights.value, self._cache, self.placement.put(work), *static, *self._observer

    @property
    def _compaction_programs(self) -> list[Program]:
        """The program, if prompts are compacted."""
        if not self.spec.ends_prompts:
            return []
        return [Program("compaction of a prompt", self._lower_compaction, self._warm_up_compaction)]

    def _empty_compaction(self) -> CompactionWork:
        """Work that writes nothing that is read: to the null page."""
        moves = tuple(GroupMove((), (), 0) for _ in self.spec.groups)
        observed = max(group.at_end.num_observed for group in self.spec.groups if group.at_end is not None)
        return self._end_work([0] * observed, observed, moves)

    def _end_work(
        self,
        prompt: list[int],
        window: int,
        moves: tuple[GroupMove, ...],
        slot: int = 0,
        num_found: int = 0,
        adapter: int = 0,
        added: dict[str, np.ndarray] | None = None,
    ) -> CompactionWork:
        spec, observed = self.spec, None if self._observing is None else (slot, num_found)
        sizes = spec.groups, spec.pages_per_sequence, spec.policy
        own = adapter if spec.has_adapters else None
        steering = {name: row[0] for name, row in row_of(spec.steering_arrays, added or {}).items()} or None
        return compaction_work(prompt, window, moves, *sizes, observed, own, steering)

    def _lower_compaction(self) -> Lowered:
        return compact_prompt.lower(*self._compaction_arguments(self._empty_compaction()))

    def _warm_up_compaction(self) -> None:
        rows = programs.empty_work(1, self.spec.max_seqs)
        slots = {name: rows[name] for name in StepSlots.__dataclass_fields__ if name in rows}
        self._run_compaction(slots, self._empty_compaction(), False)

    # Compiling.

    @property
    def all_programs(self) -> list[Program]:
        """All programs but those of `_warm_up_small`: how each is traced, and run with nothing to do."""
        spec, program_list = self.spec, []
        for num_slots in spec.step_slots:
            program_list.append(Program(f"sampling of {num_slots} slots", partial(self._lower_sampling, num_slots)))
        for sizes in [(size, num_slots) for size in spec.token_buckets for num_slots in spec.step_slots_of(size)]:
            name = "step of {} tokens, {} slots".format(*sizes)
            program_list.append(Program(name, partial(self._lower_step, *sizes), partial(self._warm_up_step, *sizes)))
        for num_slots in spec.decode_slots:
            calls = partial(self._lower_decode, num_slots), partial(self._warm_up_decode, num_slots)
            program_list.append(Program(f"decode of {num_slots} slots", *calls))
        for num_slots in spec.decode_slots:
            for form in spec.forms_of(num_slots):
                drafter = self.drafters[form]
                shared = f" in {drafter.rows_per_slot * num_slots} rows" if drafter.rows_per_slot else ""
                name = f"speculation of {drafter.tree.num_nodes} tokens, {num_slots} slots{shared}"
                calls = partial(self._lower_rounds, num_slots, form), partial(self._warm_up_rounds, num_slots, form)
                program_list.append(Program(name, *calls))
        program_list += self._compaction_programs
        raw, processed = self._scores.lower(spec.token_buckets[-1], spec.dtype, spec.has_adapters)
        scores = Program("scores", raw), Program("scores under parameters", processed, self._warm_up_scores)
        return [*program_list, *scores]

    def warm_up(self, num_jobs: int, report: Report) -> int:
        """Compiles every program, `num_jobs` at once, and runs each with nothing to do; returns how many there are.

        `report` gets the name of each of `all_programs` when it is compiled.
        """
        self._warm_up_small()
        is_only_host = self.publish is None  # others would run what this one does as soon as they can, in another order
        self._compile(num_jobs, report=report, runs=is_only_host)
        for program in () if is_only_host else self.all_programs:
            program.run()
        jax.block_until_ready(self._slots)
        self._has_decoded = True
        has_draft, has_draft_cache = bool(self.spec.trees), self._draft_cache is not None
        num_small = 6 + has_draft + has_draft_cache + self.spec.has_adapters + bool(self.spec.steered_layers)
        num_small += self.spec.processors is not None
        num_small += 0 if self.adapters is None else len(self.adapters.nothing())
        num_small += 2 * (self._saved is not None)
        self.caches, num_tiers = self.host_pages.warm_up(self.caches)
        return len(self.all_programs) + num_small + num_tiers

    @operation
    def _compile(self, num_jobs: int, report: Report = lambda name: None, runs: bool = False) -> None:
        compilation_cache.end_start()
        compile_programs(self.all_programs, num_jobs, report, runs=runs)

    def _lower_step(self, size: int, num_slots: int) -> Lowered:
        self._compiled_steps.add((size, num_slots))
        work = self._step_work(self._empty_work(size, num_slots), self._empty_tables(num_slots))
        return programs.step.lower(*self._step_arguments(work))

    def _lower_sampling(self, num_slots: int) -> Lowered:
        mesh, shape = self.placement.mesh, (num_slots, self.spec.config.vocab_size)
        logits = jax.ShapeDtypeStruct(shape, np.float32)
        if mesh is not None:
            logits = jax.ShapeDtypeStruct(shape, np.float32, sharding=programs.logits_sharding(mesh, logits))
        work = self._step_work(self._empty_work(1, num_slots), self._empty_tables(num_slots))
        return programs.sample_step.lower(mesh, self._slots, self._batch, work.slots, logits, self._tables)

    def _lower_decode(self, num_slots: int) -> Lowered:
        idle = np.zeros(num_slots, np.bool_)
        return programs.decode.lower(*self._decode_arguments(idle, 0, self._empty_tables(num_slots)))

    def _lower_rounds(self, num_slots: int, form: int) -> Lowered:
        return speculate.lower(*self._rounds_arguments(empty_rounds(num_slots), form, self._empty_tables(num_slots)))

    def _empty_work(self, num_tokens: int, num_slots: int) -> dict[str, np.ndarray]:
        return programs.empty_work(num_tokens, num_slots, self.spec.policy.needs_prompt_lengths)

    def _empty_tables(self, num_slots: int) -> PageTables:
        return self.placement.put(self._rows.empty(num_slots))

    def _warm_up_step(self, size: int, num_slots: int) -> None:
        self._update_tables(None, num_slots)
        self._run_step(self._empty_work(size, num_slots), False)

    def _warm_up_decode(self, num_slots: int) -> None:
        self._update_tables(None, num_slots)
        self._run_decode(np.zeros(num_slots, np.bool_), 0)

    def _warm_up_rounds(self, num_slots: int, form: int) -> None:
        self._update_tables(None, num_slots)
        self._run_rounds(empty_rounds(num_slots), form)

    def _warm_up_small(self) -> None:
        """Compiles what writes and moves slots, copies pages, and writes grammars."""
        compilation_cache.fix_trace_context()
        for params in (SamplingParams(seed=0), SamplingParams(seed=0, presence_penalty=1.0)):
            self._write_slot(SequenceState(Request([0], params, max_tokens=1), slot=0))
        self._move_slots(np.arange(self.spec.max_seqs, dtype=np.int32))
        self._copy_pages(*copy_ids((), self.spec.groups, COPIES))
        for saves in (False, True):
            self._copy_states(saves, state_copies((), self.spec.max_seqs))
        if self.adapters is not None:
            # Behind the last slot, where nothing is stored: a slot may have an adapter.
            for adapter in self.adapters.nothing():
                self.write_stacks(self.adapters.sizes.num_slots + 1, adapter)
        self._write_table(grammars.empty_block(self.spec.table_sizes))
        self._set_rows(
            grammars.empty_rows(self.spec.max_seqs, self.spec.config.vocab_size, self.spec.max_tokens_per_dispatch)
        )

    def _warm_up_scores(self) -> None:
        request = Request([0], SamplingParams(seed=0, prompt_logprobs=0, top_k=1), max_tokens=1, score_from=0)
        sequence = SequenceState(request)
        self._keep_empty_hidden()
        self._scorer.start(sequence)
        if self._hidden is not None:
            scores = self._scorer.score((ScoredChunk(sequence, 0, 0, 1),), self._hidden, 1)
            # The first request would otherwise wait for these unread scores: up to 2 s with JAX 0.12 on a CPU.
            jax.block_until_ready(scores.arrays if scores is not None else ())
        self._scorer.stop(sequence)


def _moved(cache: PagedCache, order: Any) -> PagedCache:
    """The cache with its states in other slots."""
    return cache if cache.states is None else programs.move_states(cache, order)


def step_rows(
    chunks: list[tuple[int, Chunk]],
    decodes: list[tuple[int, SequenceState]],
    num_tokens: int,
    num_slots: int,
    has_prompt_lengths: bool = False,
) -> tuple[dict[str, np.ndarray], list[ScoredChunk]]:
    """The arrays of a step's work by name, and where the pieces of prompts are in it; `has_prompt_lengths` as
    `empty_work`."""
    work = programs.empty_work(num_tokens, num_slots, has_prompt_lengths)
    slots = [slot for slot, _ in decodes]
    work["token_slots"][: len(slots)] = slots
    work["query_starts"][slots] = np.arange(len(slots))
    work["query_lengths"][slots] = 1
    row, pieces = len(slots), []
    for slot, chunk in chunks:
        sequence, rows = chunk.sequence, slice(row, row + chunk.length)
        end = chunk.start + chunk.length
        work["tokens"][rows] = sequence.tokens[chunk.start : end]
        work["token_slots"][rows] = slot
        work["query_starts"][slot], work["query_lengths"][slot] = row, chunk.length
        work["starts"][slot], work["is_prompt"][slot], work["is_last"][slot] = chunk.start, True, chunk.is_last
        work["remaining"][slot] = sequence.num_storable + 1 - end
        if has_prompt_lengths:
            work["prompt_lengths"][slot] = sequence.num_prompt
        pieces.append(ScoredChunk(sequence, row, chunk.start, chunk.length))
        row += chunk.length
    return work, pieces
