"""The engine: continuous batching over a paged cache. Each request gets the tokens it would get alone."""

import heapq
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer import compilation_cache
from jaxinfer.cache import KVScales, applied_scales, init_paged_cache, page_bytes, stored_dtype
from jaxinfer.engine import paged_programs, programs, results
from jaxinfer.engine.events import Dispatch, Observer, Observers, SlotWork, Snapshot
from jaxinfer.engine.lockstep import operation
from jaxinfer.engine.memory import available_bytes, plan_pool
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.paged_programs import INVALID_LOGITS, WIDE_ROWS, DecodeWork, StepOutput, StepWork
from jaxinfer.engine.placement import DevicePlacement
from jaxinfer.engine.request import Generation
from jaxinfer.engine.scheduler import Chunk, DispatchPlan, Scheduler, SchedulerOptions, SequenceState
from jaxinfer.engine.scoring import DeviceScorer, PendingScores, PromptScorer, ScoredChunk, ScoreWork, needs_scores
from jaxinfer.engine.speculation import RoundChoice, Speculation
from jaxinfer.engine.speculative_programs import RoundCounts
from jaxinfer.models import ModelConfig, Params, compute_dtype
from jaxinfer.parallel import hosts
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.sampling import (
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    SamplingRow,
    SamplingState,
    TokenLogprobs,
    make_batch,
    make_state,
)
from jaxinfer.speculative import Draft, SpeculationStats, TokenTree
from pallas_kernels.paged_attention import Pages, platform_layout

MAX_IN_FLIGHT = 2  # one dispatch computes while the other's results are read
COPIES = 8  # pages of one copy program


@dataclass(frozen=True)
class _Flight:
    """A dispatch whose results are not read yet, with who was in which slot."""

    chunks: list[tuple[int, Chunk]]
    decodes: list[tuple[int, SequenceState]]
    output: StepOutput
    num_slots: int
    num_rows: int  # of tokens of a step, padding included
    sent_at: float  # seconds of time.perf_counter
    scores: PendingScores | None = None
    rounds: "_Rounds | None" = None


@dataclass(frozen=True)
class _Rounds:
    """What was planned of a speculative dispatch, and what came of it."""

    num_rounds: int
    tree: TokenTree
    counts: RoundCounts
    num_behind: int  # tokens that the draft caught up with


class PagedEngine:
    """Runs `Generation`s to their end, with a draft beside the model if there is one. Owns its cache (`close` frees
    it); the parameters belong to the caller.

    Every `step` plans a dispatch, sends it, and reads the one before, so that the device never waits for the host.
    Raises OutOfMemoryError when made, if model and cache do not fit; `available` bytes stand in for the device's own
    figure. `kv_scales` are the checkpoint's, for an fp8 cache; others leave them. With a `mesh`, configuration and
    parameters are as `parallel.fit` makes them, and figures in bytes are those of one device.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        options: EngineOptions,
        *,
        draft: Draft | None = None,
        available: int | None = None,
        kv_scales: KVScales | None = None,
        mesh: Mesh | None = None,
    ):
        self.config, self.options = config, options
        self.publish: Callable[[str, Sequence[Any]], None] | None = None  # to the other hosts, set by `Lockstep`
        self.replica = 0  # its number, set by `Replicas`
        self.placement = DevicePlacement(mesh)
        self.model, self.weights = programs.program_model(config, params, mesh)
        self.dtype = compute_dtype(params)
        self.device = self.weights[0].addressable_shards[0].device
        platform = self.device.platform
        self.kv_dtype = stored_dtype(options.kv_dtype, self.dtype)
        self.kv_scales = applied_scales(kv_scales, self.kv_dtype, config)
        self.page_size = options.page_size or default_page_size(platform, self.kv_dtype)
        layout = platform_layout(platform, self.kv_dtype, has_values=config.caches_values)
        self.speculation = None
        if draft is not None:
            self.speculation = Speculation(
                config, params, draft, options, page_size=self.page_size, platform=platform, placement=self.placement
            )
        if available is None:
            available = available_bytes(self.device)
            if not self.placement.is_of_this_process and (others := hosts.current()) is not None:
                available = others.least(available)  # a page has the same number on all hosts
        self.memory = plan_pool(
            config,
            options,
            page_size=self.page_size,
            page_bytes=page_bytes(config, self.page_size, self.kv_dtype, layout, mesh)
            + (self.speculation.page_bytes if self.speculation is not None else 0),
            dtype_bytes=self.dtype.itemsize,
            weights=num_bytes(self.weights) + (self.speculation.weight_bytes if self.speculation is not None else 0),
            available=available,
            fills_memory=self.device.platform != "cpu",
        )
        self.scheduler = Scheduler(
            SchedulerOptions(
                num_pages=self.memory.num_pages,
                page_size=self.page_size,
                max_seqs=options.max_seqs,
                prefill_chunk=options.chunk,
                steps_per_dispatch=1 if options.deterministic else options.steps_per_dispatch,
                max_waiting=options.max_waiting,
                reuses_prefixes=options.prefix_cache,
                shuffle_seed=options.shuffle_seed,
            ),
            options.decode_slots,
        )
        self._cache = init_paged_cache(
            config, self.memory.num_pages, self.page_size, self.kv_dtype, layout, mesh, self.kv_scales
        )
        if self.speculation is not None:
            self.speculation.allocate(self.memory.num_pages)
        draft_length = None if self.speculation is None else self.speculation.length
        slots, batch = paged_programs.init_slots(options.max_seqs, config.vocab_size, draft_length)
        self._slots, self._batch = self.placement.slots(slots, batch)
        self._table = np.zeros((options.max_seqs, -(-options.max_model_len // self.page_size)), np.int32)
        self._sent_table: jax.Array | None = None  # what the device has, None where `_table` is newer
        self._scorer = PromptScorer(config.vocab_size, self)
        self._scores = DeviceScorer(self.model, self.weights, self.placement)
        self._hidden: jax.Array | None = None  # final hidden states of the step just sent, where they are scored
        self._sequences: dict[Generation, SequenceState] = {}
        self._num_with_logprobs = 0  # of the unfinished ones
        self._in_flight: deque[_Flight] = deque()
        self._deadlines: list[tuple[float, int, Generation]] = []
        self._numbers = itertools.count()
        self._read_at = 0.0  # when the last results were read
        self._observers = Observers()
        self._busy_since = 0.0
        self._has_answered = False

    # What callers do.

    def check_fits(self, num_prompt: int, max_tokens: int) -> None:
        """Raises RequestTooLargeError, with both numbers, where the pool could never hold the request."""
        self.scheduler.check_fits(num_prompt, max_tokens)

    def add(self, generation: Generation) -> None:
        """Queues a generation; it must fit: len(prompt) + max_tokens <= max_model_len.

        Raises QueueFullError when max_waiting requests wait, RequestTooLargeError for what the pool cannot hold.
        """
        generation.arrival = time.monotonic()
        generation.rounds = None if self.speculation is None else Counter()
        sequence = SequenceState(
            tokens=list(generation.prompt),
            num_prompt=len(generation.prompt),
            max_tokens=generation.max_tokens,
            priority=generation.priority,
            salt=generation.cache_salt,
            can_reuse=not needs_scores(generation),
            owner=generation,
            leader=None if generation.leader is None else self._sequences.get(generation.leader),
        )
        self.scheduler.add(sequence)
        if not self._sequences:
            self._busy_since = time.perf_counter()
        self._sequences[generation] = sequence
        self._num_with_logprobs += generation.params.logprobs is not None
        if generation.deadline is not None:
            heapq.heappush(self._deadlines, (generation.deadline, next(self._numbers), generation))

    def observe(self, observer: Observer) -> AbstractContextManager[None]:
        """While the block runs, `observer` is called with every `Dispatch` when it has been sent, on the thread that
        steps the engine. It must not wait for it there. On several hosts only those of host 0 hear anything."""
        return self._observers.including(observer)

    def snapshot(self) -> Snapshot:
        """Who holds which slot and pages, and the totals. To be asked between steps, on the thread that makes them."""
        return Snapshot.of(self.scheduler, self.replica)

    @property
    def abstract_pages(self) -> Pages:
        """Shapes and dtypes of one layer's pages."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self._cache.layers[0])

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self, max_steps: int | None = None) -> list[Generation]:
        """One turn: plan, send, read what was sent before. Returns who made progress.

        `max_steps` shortens the dispatch, for a caller who shows every token as it comes.
        """
        progressed = self._expire()
        if not self._has_answered and any(chunk.is_last for flight in self._in_flight for _, chunk in flight.chunks):
            # What comes next may be a program's first run, a second of tracing or many of compiling: the first token
            # of all is not kept waiting for that.
            self._has_answered = True
            while self._in_flight:
                progressed += self._commit(self._in_flight.popleft())
            return progressed
        plan, choice = self._plan(max_steps, can_preempt=not self._in_flight)
        if plan is None:
            while self._in_flight:
                progressed += self._commit(self._in_flight.popleft())
            plan, choice = self._plan(max_steps, can_preempt=True)
        if plan is not None:
            self._prepare(plan)
            if not plan.is_empty:
                self._in_flight.append(self._dispatch(plan, choice))
                if self._observers:
                    self._tell(plan, self._in_flight[-1])
                if len(self._in_flight) < MAX_IN_FLIGHT:
                    return progressed
        if self._in_flight:
            progressed += self._commit(self._in_flight.popleft())
        return progressed

    def finish(self, generation: Generation, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a generation from outside (a stop string, an abort), in any phase; its slot and pages are free at
        once. What the device still computes for it is dropped."""
        sequence = self._sequences.pop(generation, None)
        if sequence is None:
            return
        self.scheduler.finish(sequence)
        if self.speculation is not None:
            self.speculation.ended(sequence)
        self._num_with_logprobs -= generation.params.logprobs is not None
        self._scorer.stop(generation)
        generation.finish_reason, generation.stop_reason = reason, stop_reason
        generation.finished = time.monotonic()
        if not self._sequences:
            self._in_flight.clear()  # nobody waits for what is still coming

    def num_known_tokens(self, sequence: SequenceState) -> int:
        """Leading tokens of a sequence that the cache holds, and it could reuse."""
        return self.scheduler.num_known_tokens(sequence)

    @property
    def speculation_stats(self) -> SpeculationStats | None:
        """Of all answers since the start; None without a draft."""
        return None if self.speculation is None else self.speculation.stats

    def warm_up(self, progress: Callable[[Iterator], Iterable] | None = None) -> int:
        """Compiles every program, so that none compiles later; returns how many. Raises RuntimeError while requests
        run. `progress` may wrap the iteration over the calls."""
        if self.has_work:
            raise RuntimeError(f"warm_up while {len(self._sequences)} requests are unfinished")
        calls = self.warm_up_calls()
        for call in progress(iter(calls)) if progress else calls:
            call()
        return self.warmed_up()

    def warmed_up(self) -> int:
        """After all of `warm_up_calls`: waits for the devices; how many programs there are."""
        jax.block_until_ready(self._slots)
        self._has_answered = True
        # The call for the slots runs three programs, and each for scores two.
        return self.num_warm_up_calls + 2 + len(self.options.token_buckets)

    @property
    def num_warm_up_calls(self) -> int:
        """How many steps `warm_up` has, for a progress bar."""
        return len(self.warm_up_calls())

    def hidden_states(self, tokens: list[int], taps: tuple[str, ...]) -> dict[str, np.ndarray]:
        """The tapped hidden states [len(tokens), D] of a token sequence, without touching the cache."""
        return programs.tapped_states(self.model, self.weights, tokens, taps, self.kv_dtype, self.kv_scales)

    def close(self) -> None:
        """Frees the cache's memory now; everything still running is aborted."""
        for generation in list(self._sequences):
            self.finish(generation, "abort")
        self._in_flight.clear()
        for leaf in jax.tree.leaves((self._cache, self._slots, self._batch)):
            leaf.delete()
        if self.speculation is not None:
            self.speculation.close()

    # Before a dispatch.

    def _plan(self, max_steps: int | None, can_preempt: bool) -> tuple[DispatchPlan | None, RoundChoice | None]:
        """The next dispatch, and what it drafts if anything."""
        choice = None
        if self.speculation is not None:
            decodes = [one for one in self.scheduler.running if one.is_decoding and one.num_left > 0]
            sizes = self.options.step_slots if self.options.deterministic else self.options.decode_slots
            choice = self.speculation.choose(decodes, next(size for size in sizes if size >= len(decodes)))
        if choice is None:
            return self.scheduler.schedule(max_steps, can_preempt=can_preempt), None
        num_rounds = min(max_steps or choice.max_rounds, choice.max_rounds)
        width = choice.tree.depth + 1
        plan = self.scheduler.schedule(
            num_rounds,
            can_preempt=can_preempt,
            tokens_per_step=width,
            num_scratch=choice.tree.num_nodes - width,
        )
        return plan, choice if plan is not None and plan.tokens_per_step > 1 else None

    def _expire(self) -> list[Generation]:
        expired = []
        now = time.monotonic()
        if len(self._deadlines) > 2 * len(self._sequences) + 64:  # of generations that have ended long before
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._sequences]
            heapq.heapify(self._deadlines)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, generation = heapq.heappop(self._deadlines)
            if generation in self._sequences:
                generation.error = f"its deadline passed, {now - generation.arrival:.3f} s after it arrived"
                self.finish(generation, "abort")
                expired.append(generation)
        return expired

    def _prepare(self, plan: DispatchPlan) -> None:
        """Brings the device's arrays to where the plan starts from."""
        if plan.moves:
            order = np.arange(self.options.max_seqs, dtype=np.int32)
            for old, new in plan.moves:
                order[[old, new]] = order[[new, old]]
            self._move_slots(order)
        for sequence in plan.admitted:
            self._write_slot(sequence)
        for start in range(0, len(plan.copies), COPIES):
            self._copy(plan.copies[start : start + COPIES])

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        destinations = np.full(COPIES, self.memory.num_pages, np.int32)
        destinations[: len(pairs)] = [destination for _, destination in pairs]
        self._copy_pages(results.padded([source for source, _ in pairs], COPIES), destinations)

    def _write_slot(self, sequence: SequenceState) -> None:
        generation: Generation = sequence.owner
        generation.admitted = generation.admitted or time.monotonic()
        if not sequence.can_reuse:
            self._scorer.start(generation)
        params, vocab_size = generation.params, self.config.vocab_size
        has_penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        is_plain = not (has_penalties or params.logit_bias or params.allowed_token_ids is not None)
        rows = make_batch([generation.row], vocab_size)
        history = make_state([() if is_plain else generation.prompt], vocab_size, [generation.output])
        slot = _slot(sequence)
        if is_plain:
            row, small = (
                {name: part for name, part in vars(one).items() if name not in WIDE_ROWS} for one in (rows, history)
            )
            self._write_plain_row(slot, row, small)
        else:
            self._write_row(slot, rows, history)
        if self.speculation is not None:
            self._write_draft_row(slot, *self.speculation.slot_row(sequence))

    # Dispatching.

    def _dispatch(self, plan: DispatchPlan, choice: RoundChoice | None) -> _Flight:
        chunks = [(_slot(chunk.sequence), chunk) for chunk in plan.chunks]
        decodes = [(_slot(sequence), sequence) for sequence in plan.decodes]
        slots = [slot for slot, _ in decodes]
        highest = max(max(slots, default=0), max((slot for slot, _ in chunks), default=0))
        is_step = bool(chunks) or (self.options.deterministic and choice is None)
        sizes = self.options.step_slots if is_step or self.options.deterministic else self.options.decode_slots
        num_slots = next(size for size in sizes if size > highest)
        self._list_pages(plan, num_slots)
        sent_at = time.perf_counter()
        num_behind = 0
        if self.speculation is not None:
            num_behind = self.speculation.started(plan.decodes, choice, plan.num_steps)
        if is_step:
            return self._dispatch_step(chunks, decodes, num_slots, sent_at)
        is_scheduled = np.zeros(num_slots, np.bool_)
        is_scheduled[slots] = True
        if self.speculation is not None and choice is not None:
            num_drafts = np.zeros(num_slots, np.int32)
            num_drafts[slots] = [choice.length_of(sequence) for _, sequence in decodes]
            work = {"is_scheduled": is_scheduled, "num_rounds": np.int32(plan.num_steps), "num_drafts": num_drafts}
            output, counts = self._run_rounds(work, self.speculation.number_of(choice.tree))
            rounds = _Rounds(plan.num_steps, choice.tree, counts, num_behind)
            least = self.options.token_buckets[-1] if self.options.deterministic else 0
            num_rows = max(num_slots * choice.tree.num_nodes, least)
            return _Flight(chunks, decodes, output, num_slots, num_rows, sent_at, rounds=rounds)
        output = self._run_decode(is_scheduled, plan.num_steps)
        return _Flight(chunks, decodes, output, num_slots, num_slots, sent_at)

    def _dispatch_step(
        self, chunks: list[tuple[int, Chunk]], decodes: list[tuple[int, SequenceState]], num_slots: int, sent_at: float
    ) -> _Flight:
        """One step: the decoding slots' rows come first, then the prompts' tokens."""
        num_rows = len(decodes) + sum(chunk.length for _, chunk in chunks)
        size = next(bucket for bucket in self.options.token_buckets if bucket >= num_rows)
        work = _empty_work(size, num_slots)
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
            work["remaining"][slot] = sequence.num_prompt + sequence.max_tokens - end
            pieces.append(ScoredChunk(sequence.owner, row, chunk.start, chunk.length))
            row += chunk.length
        is_scored = any(needs_scores(piece.generation) for piece in pieces)
        output = self._run_step(work, is_scored)
        scores = None
        if is_scored and self._hidden is not None:
            scores, self._hidden = self._scorer.score(tuple(pieces), self._hidden), None
        return _Flight(chunks, decodes, output, num_slots, size, sent_at, scores)

    def _tell(self, plan: DispatchPlan, flight: _Flight) -> None:
        chunks = (SlotWork(one.sequence.owner, slot, one.start, one.length) for slot, one in flight.chunks)
        decodes = (SlotWork(one.owner, slot, len(one.tokens), 0) for slot, one in flight.decodes)
        # A deterministic engine decodes with the program for prompts, and that is no other kind of work.
        kind = "rounds" if flight.rounds is not None else "step" if flight.chunks else "decode"
        dispatch = Dispatch(
            kind=kind,
            num_steps=plan.num_steps,
            work=(*chunks, *decodes),
            num_rows=flight.num_rows,
            num_drafted=0 if flight.rounds is None else flight.rounds.tree.num_nodes - 1,
            replica=self.replica,
            sent_at=time.perf_counter(),
            busy_since=self._busy_since,
            output=flight.output.tokens,
        )
        self._observers.tell(dispatch)

    def _list_pages(self, plan: DispatchPlan | None, num_slots: int) -> None:
        """Sees to it that the device has the first rows of the table; they are sent only where they have changed."""
        for sequence in plan.sequences if plan is not None else ():
            start, end = sequence.num_listed, len(sequence.pages)
            if start < end:
                self._table[_slot(sequence), start:end] = sequence.pages[start:end]
                if self.speculation is not None:
                    num_found = sequence.num_reused // self.page_size
                    self.speculation.clear_draft_pages(sequence.pages[max(start, num_found) : end])
                sequence.num_listed = end
                self._sent_table = None
        if self._sent_table is None or self._sent_table.shape[0] != num_slots:
            # A copy: the device may read the host's memory for as long as it computes.
            self._send_table(self._table[:num_slots].copy())

    # What runs on the devices, on those of all hosts alike: arguments are host values.

    @operation
    def _move_slots(self, order: np.ndarray) -> None:
        mesh = self.placement.mesh
        self._slots, self._batch = paged_programs.move_slots(mesh, self._slots, self._batch, self.placement.put(order))

    @operation
    def _copy_pages(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        arguments = self.placement.put((sources, destinations))
        self._cache = paged_programs.copy_pages(self.placement.mesh, self._cache, *arguments)
        if self.speculation is not None:
            self.speculation.copy_pages(*arguments)

    @operation
    def _write_plain_row(self, slot: int, row: dict[str, np.ndarray], history: dict[str, np.ndarray]) -> None:
        arguments = self.placement.put((np.int32(slot), row, history))
        self._slots, self._batch = paged_programs.write_plain_slot(
            self.placement.mesh, self._slots, self._batch, *arguments
        )

    @operation
    def _write_row(self, slot: int, row: SamplingBatch, history: SamplingState) -> None:
        arguments = self.placement.put((np.int32(slot), row, history))
        self._slots, self._batch = paged_programs.write_slot(self.placement.mesh, self._slots, self._batch, *arguments)

    @operation
    def _write_draft_row(self, slot: int, tokens: np.ndarray, num_drafted: int) -> None:
        arguments = self.placement.put((np.int32(slot), tokens, np.int32(num_drafted)))
        self._slots = paged_programs.write_draft_slot(self.placement.mesh, self._slots, *arguments)

    @operation
    def _send_table(self, table: np.ndarray) -> None:
        self._sent_table = self.placement.put(table)

    @property
    def _listed(self) -> jax.Array:
        if self._sent_table is None:
            raise RuntimeError("a dispatch was planned without a page table")
        return self._sent_table

    @operation
    def _run_step(self, work: dict[str, np.ndarray], is_scored: bool) -> StepOutput:
        device_work = StepWork(**self.placement.put(work), page_table=self._listed)
        self._cache, self._slots, output, hidden = paged_programs.step(
            self.model, self.weights, self._cache, self._slots, self._batch, device_work, self.options.deterministic
        )
        self._hidden = hidden if is_scored else None
        return output

    @operation
    def _run_decode(self, is_scheduled: np.ndarray, num_steps: int) -> StepOutput:
        held, steps = self.placement.put((is_scheduled, np.int32(num_steps)))
        self._cache, self._slots, output = paged_programs.decode(
            self.model,
            self.weights,
            self._cache,
            self._slots,
            self._batch,
            DecodeWork(held, self._listed, steps),
            self.options.steps_per_dispatch,
        )
        return output

    @operation
    def _run_rounds(self, work: dict[str, Any], tree: int) -> tuple[StepOutput, RoundCounts]:
        speculation = _checked(self.speculation)
        self._cache, self._slots, output, counts = speculation.run(
            self.model, self.weights, self._cache, self._slots, self._batch, work, self._listed, tree
        )
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
    def run_scores(self, work: ScoreWork) -> tuple[TokenLogprobs | None, tuple[jax.Array | None, ...]]:
        """As `DeviceScorer.run`, of the step just sent."""
        if self._hidden is None:
            raise RuntimeError("scores were planned of a step that keeps no hidden states")
        hidden, self._hidden = self._hidden, None
        return self._scores.run(work, hidden)

    @operation
    def _keep_empty_hidden(self, size: int) -> None:
        self._hidden = self.placement.put(np.zeros((size, self.config.hidden_size), self.dtype))

    # Reading results.

    def _commit(self, flight: _Flight) -> list[Generation]:
        rows = jax.device_get(flight.output.tokens).T.tolist()
        # It began when it was sent, or when the one before it had ended.
        now = time.perf_counter()
        seconds, self._read_at = now - max(flight.sent_at, self._read_at), now
        wants_logprobs = self._num_with_logprobs > 0
        samples = jax.device_get(flight.output.samples) if wants_logprobs else None
        if flight.scores is not None:
            flight.scores.deliver()
        progressed = []
        if self.speculation is not None:
            self._note_decodes(flight, rows, seconds)
        for slot, chunk in flight.chunks:
            sequence = chunk.sequence
            if sequence.is_finished:
                continue
            tokens = rows[slot][:1]
            if tokens[0] != INVALID_LOGITS:
                self.scheduler.confirm(sequence, chunk.start + chunk.length)
                if not chunk.is_last:
                    continue
                self._scorer.stop(sequence.owner)
                sequence.owner.first_token = sequence.owner.first_token or time.monotonic()
            self._take(sequence, slot, tokens, samples)
            progressed.append(sequence.owner)
        for slot, sequence in flight.decodes:
            if not sequence.is_finished:
                self._take(sequence, slot, rows[slot], samples)
                if self.speculation is not None and flight.rounds is not None:
                    self.speculation.mark_draft_pages(sequence)
                progressed.append(sequence.owner)
        return progressed

    def _note_decodes(self, flight: _Flight, tokens: list[list[int]], seconds: float) -> None:
        """For the draft's sake: what a dispatch of decoding sequences made, before they take it."""
        speculation = _checked(self.speculation)
        num_made = [sum(token >= 0 for token in tokens[slot]) for slot, _ in flight.decodes]
        rounds = flight.rounds
        if rounds is None:
            plain = [(sequence, count) for (_, sequence), count in zip(flight.decodes, num_made, strict=True)]
            plain += [(chunk.sequence, 1) for slot, chunk in flight.chunks if tokens[slot][0] >= 0]
            for sequence, count in plain:
                sequence.owner.num_plain += count
                speculation.num_plain += count
            if not flight.chunks:
                speculation.record_time(flight.num_slots, None, seconds, max(num_made, default=0), 1.0)
            return
        counts = jax.device_get((rounds.counts.proposed, rounds.counts.accepted))
        proposed, accepted = (array.T.tolist() for array in counts)
        num_rounds = 0
        for (slot, sequence), count in zip(flight.decodes, num_made, strict=True):
            pairs = [pair for pair in zip(proposed[slot], accepted[slot], strict=True) if pair[0] >= 0]
            num_rounds += len(pairs)
            speculation.record_rounds(sequence, pairs, rounds.tree)
            self.scheduler.reconcile(sequence, rounds.num_rounds, rounds.tree.depth + 1, count)
        most = int((counts[0] >= 0).any(axis=1).sum())
        tokens_per_round = sum(num_made) / max(num_rounds, 1)
        speculation.record_time(flight.num_slots, rounds.tree, seconds, most, tokens_per_round, rounds.num_behind)

    def _take(self, sequence: SequenceState, slot: int, tokens: list[int], samples: SampleOutput | None) -> None:
        """A slot's tokens of a dispatch, one each step; NOT_SOUND and NO_TOKEN stand after the last one."""
        generation: Generation = sequence.owner
        for step, token in enumerate(tokens):
            if token < 0:
                if token == INVALID_LOGITS:
                    self.finish(generation, *results.take_error(generation))
                return
            self.scheduler.append(sequence, token)
            end = results.take_token(generation, token)
            if samples is not None:
                results.take_logprobs(generation, samples, (step, slot))
            if end is not None:
                self.finish(generation, *end)
                return

    # Compiling.

    def warm_up_calls(self) -> list[Callable[[], object]]:
        """Every program once, with nothing to do."""
        calls: list[Callable[[], object]] = [self._warm_up_slots, partial(self._copy, [])]
        for num_slots in self.options.step_slots:
            calls += [partial(self._warm_up_step, size, num_slots) for size in self.options.token_buckets]
        if not self.options.deterministic:
            calls += [partial(self._warm_up_decode, num_slots) for num_slots in self.options.decode_slots]
        if self.speculation is not None:
            sizes = self.options.step_slots if self.options.deterministic else self.options.decode_slots
            calls += [
                partial(self._warm_up_rounds, num_slots, tree)
                for num_slots in sizes
                for tree in self.speculation.drafters
            ]
        return calls + [partial(self._warm_up_scores, size) for size in self.options.token_buckets]

    def _warm_up_step(self, size: int, num_slots: int) -> None:
        self._list_pages(None, num_slots)
        self._run_step(_empty_work(size, num_slots), False)

    def _warm_up_decode(self, num_slots: int) -> None:
        self._list_pages(None, num_slots)
        self._run_decode(np.zeros(num_slots, np.bool_), 0)

    def _warm_up_rounds(self, num_slots: int, tree: TokenTree) -> None:
        work = {"is_scheduled": np.zeros(num_slots, np.bool_), "num_rounds": np.int32(0)}
        work["num_drafts"] = np.zeros(num_slots, np.int32)
        self._list_pages(None, num_slots)
        self._run_rounds(work, _checked(self.speculation).number_of(tree))

    def _warm_up_slots(self) -> None:
        compilation_cache.fix_trace_context()
        for params in (SamplingParams(seed=0), SamplingParams(seed=0, presence_penalty=1.0)):
            generation = Generation([0], SamplingRow(params), max_tokens=1)
            self._write_slot(SequenceState([0], 1, 1, owner=generation, slot=0))
        self._move_slots(np.arange(self.options.max_seqs, dtype=np.int32))

    def _warm_up_scores(self, size: int) -> None:
        generation = Generation([0], SamplingRow(SamplingParams(seed=0, prompt_logprobs=0)), 1, score_from=0)
        self._keep_empty_hidden(size)
        self._scorer.start(generation)
        if self._hidden is not None:
            scores = self._scorer.score((ScoredChunk(generation, 0, 0, 1),), self._hidden)
            # The first request would otherwise wait for scores that nobody reads: up to 2 s with JAX 0.12 on a CPU.
            jax.block_until_ready((scores.raw, scores.processed) if scores is not None else ())
        self._scorer.stop(generation)


def default_page_size(platform: str, kv_dtype: str) -> int:
    """Tokens of a page. The scales of a page and head, of int8, must fill a copy of the GPU's kernel: 128 bytes."""
    if platform == "tpu":
        return 64
    return 32 if platform == "gpu" and kv_dtype == "int8" else 16


def _checked(speculation: Speculation | None) -> Speculation:
    if speculation is None:
        raise RuntimeError("rounds were planned without a draft")
    return speculation


def _slot(sequence: SequenceState) -> int:
    if sequence.slot is None:
        raise RuntimeError("a sequence without a slot was planned")
    return sequence.slot


def _empty_work(num_tokens: int, num_slots: int) -> dict[str, np.ndarray]:
    """The arrays of a step in which nothing takes part, without the page table."""
    counts = ("query_starts", "query_lengths", "starts", "remaining")
    return {
        "tokens": np.zeros(num_tokens, np.int32),
        "token_slots": np.full(num_tokens, num_slots, np.int32),
        **{name: np.zeros(num_slots, np.int32) for name in counts},
        "is_prompt": np.zeros(num_slots, np.bool_),
        "is_last": np.zeros(num_slots, np.bool_),
    }
