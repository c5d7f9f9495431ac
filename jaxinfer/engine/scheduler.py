"""Plans dispatches: continuous batching, chunked prefill, prefix reuse, preemption.

Plain Python: no JAX here, so that millions of its steps can be tested. A step plans one dispatch of the device: every
running sequence that decodes makes a token (or several, when nothing else is to do), and up to `prefill_chunk` tokens
of prompts go with them (Yu et al. 2022, Orca; Agrawal et al. 2024, Sarathi-Serve, section 4).

The scheduler runs ahead of the results: what it has planned it counts as stored, the engine reports tokens later.
"""

import heapq
import itertools
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxinfer.cache.policy.contract import CachePolicy, PromptEnd
from jaxinfer.cache.policy.kinds import KEEPS_ALL
from jaxinfer.engine.adapter_slots import AdapterSlots, LoadedAdapter
from jaxinfer.engine.cache_groups import CacheGroup
from jaxinfer.engine.pages import NULL_PAGE, PagePool
from jaxinfer.engine.plans import AdapterMove, Chunk, DispatchPlan, PageCopy, num_expected
from jaxinfer.engine.pools import PagePools
from jaxinfer.engine.prefix import PrefixMatch, PrefixPlace, PrefixTree
from jaxinfer.engine.prefix_blocks import BlockEvent, PrefixBlocks
from jaxinfer.engine.prompt_ends import PromptEnds
from jaxinfer.engine.request import SequenceState
from jaxinfer.engine.saved_states import SavedStates, num_common
from jaxinfer.engine.tiers.host_tier import HostPoolSize, HostTier

if TYPE_CHECKING:
    from jaxinfer.engine.spec import EngineSpec


MAX_QUEUE_SCAN = 256  # waiting requests that one step looks at
HOST_STEPS = 0.25  # a dispatch under masks from the host takes 0.25 to 0.4 steps longer
MAX_SCANNED_ANSWERS = 16 * MAX_QUEUE_SCAN  # waiting answers of these requests
MAX_COMPARED = 8  # waiting answers whose beginnings are compared with that of one which is admitted
MAX_OVERTAKEN = 64  # answers that are admitted before one whose adapter finds no slot; then the slots drain
MAX_PREFETCHED = 16  # waiting answers whose adapters move to the device ahead of use


class QueueFullError(RuntimeError):
    """Too many sequences wait; try again later."""


class RequestTooLargeError(ValueError):
    """A sequence that the pool could never hold, even alone. `code`: OpenAI's, for programs."""

    code = "context_length_exceeded"


@dataclass
class Counters:
    """Totals since the start; tokens unless said otherwise."""

    num_added: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    reused_tokens: int = 0
    copied_pages: int = 0
    host_hit_tokens: int = 0  # of the reused ones, those whose pages came back from host memory
    disk_read_tokens: int = 0  # whose pages were read from `prefix_store`
    host_bytes_out: int = 0
    host_bytes_in: int = 0


@dataclass(frozen=True)
class SchedulerOptions:
    """Attributes:
    num_pages, page_size: the pool, null page included, and tokens of a page. window: of the layers whose keys it has;
      None where they see all. num_sinks: its first pages of a sequence that are never given back. more_groups: further
      pools, of layers with other windows.
    max_seqs: sequences that run at once.
    prefill_chunk: prompt tokens of a step. steps_per_dispatch: decode steps of a dispatch with nothing else to do.
    max_waiting: sequences that may wait for a slot, None for any number. reuses_prefixes: whether pages of finished
      work are kept and found again. shuffle_seed: orders the pages at random (for tests). has_states: whether layers
      keep a state of each sequence. num_saved_states: places for states that are kept, without which a model with
      states reuses nothing; save_interval: they are of multiples of so many tokens, and of pages. host_pools: host
      pages of each group of layers, and of saved states; () for none. at_end: what a prompt loses at its end in the
      first group. policy: of the cache. max_step_tokens: tokens of a step in all; None for prefill_chunk beside
      decoding sequences. num_ahead: tokens after a page that a part of it follows from, which a draft stores.
      num_adapters: adapters on the device at once.
    """

    num_pages: int
    page_size: int
    max_seqs: int
    prefill_chunk: int
    steps_per_dispatch: int = 1
    max_waiting: int | None = None
    reuses_prefixes: bool = True
    has_states: bool = False
    num_saved_states: int = 0
    save_interval: int = 0
    shuffle_seed: int | None = None
    window: int | None = None
    more_groups: tuple[CacheGroup, ...] = ()
    host_pools: tuple[HostPoolSize, ...] = ()
    num_sinks: int = 0
    at_end: PromptEnd | None = None
    policy: CachePolicy = KEEPS_ALL
    max_step_tokens: int | None = None
    num_ahead: int = 0
    num_adapters: int = 0

    @classmethod
    def of(cls, spec: "EngineSpec", host_pools: tuple[HostPoolSize, ...] = ()) -> "SchedulerOptions":
        """Those of an engine."""
        return cls(
            num_pages=spec.num_pages,
            page_size=spec.page_size,
            max_seqs=spec.max_seqs,
            prefill_chunk=spec.prefill_chunk,
            steps_per_dispatch=spec.steps_per_dispatch,
            max_waiting=spec.options.max_waiting,
            reuses_prefixes=spec.reuses_prefixes,
            has_states=spec.has_states,
            num_saved_states=spec.num_saved_states,
            save_interval=spec.save_interval,
            shuffle_seed=spec.options.shuffle_seed,
            window=spec.windows[0],
            num_sinks=spec.groups[0].num_sinks,
            at_end=spec.groups[0].at_end,
            more_groups=spec.groups[1:],
            host_pools=host_pools,
            policy=spec.policy,
            max_step_tokens=spec.token_buckets[-1],
            num_ahead=spec.draft.num_ahead,
            num_adapters=spec.options.max_adapters or 0,
        )

    @property
    def can_rewind(self) -> bool:
        """True if tokens that are refused can be taken back."""
        return not self.has_states and self.policy.can_rewind

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """All groups of layers, each with a pool."""
        first = CacheGroup(self.num_pages, self.window, num_sinks=self.num_sinks, at_end=self.at_end)
        return (first, *self.more_groups)

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size", "max_seqs", "prefill_chunk", "steps_per_dispatch", "max_waiting"):
            value = getattr(self, name)
            if value is None and name == "max_waiting":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.has_states and self.reuses_prefixes and not self.num_saved_states:
            raise ValueError("prefixes of a model with states are reused from saved states: there are none")
        if self.reuses_prefixes and not self.policy.reuses_prefixes:
            raise ValueError("pages in which tokens are dropped cannot be those of a prefix")
        if self.num_saved_states and (self.save_interval < 1 or self.save_interval % self.page_size):
            raise ValueError(f"save_interval={self.save_interval} is no multiple of page_size={self.page_size}")


class Scheduler:
    """Plans dispatches over a pool of pages. `add`, then `schedule` until there is no work; report with `confirm`,
    `append` and `finish`."""

    def __init__(self, options: SchedulerOptions, slot_buckets: Sequence[int] | None = None):
        self.options = options
        self.policy = options.policy
        self.pools = PagePools(options.groups, options.page_size, options.shuffle_seed, self.policy)
        self.ends = PromptEnds(self.pools)
        num_places = options.num_saved_states if options.reuses_prefixes else 0
        self.tier = HostTier(options.host_pools)
        states = num_places, options.save_interval, options.page_size, options.shuffle_seed
        self.saved = SavedStates(*states, holds_restored=bool(self.tier))
        groups = (*options.groups, *self.saved.groups)
        self.prefixes = PrefixTree((*self.pools.all, *self.saved.pools), groups, options.page_size, self.tier)
        self.adapters = AdapterSlots(options.num_adapters)
        self._adapter_moves: list[AdapterMove] = []  # of the dispatch that is planned
        self.counters = Counters()
        # Parts that are in use; the others are not called.
        self._has_ends, self._has_saved, self._has_tier = bool(self.ends), bool(self.saved), bool(self.tier)
        parts = (self.saved, self._has_saved), (self.ends, self._has_ends), (self.policy, self.policy != KEEPS_ALL)
        self._stopping = [part for part, is_used in parts if is_used]
        self._most_replayed = self.policy.num_replayed
        self.waiting: list[SequenceState] = []  # sorted by rank
        self.running: list[SequenceState] = []
        self._slot_buckets = sorted({*(slot_buckets or ()), options.max_seqs})
        self._free_slots = list(range(options.max_seqs))
        self._orders = itertools.count()

    @property
    def pool(self) -> PagePool:
        """The pool of the first group: of layers without a window, where there are any."""
        return self.pools.all[0]

    # Called by the engine.

    def check_fits(self, num_prompt: int, max_tokens: int) -> None:
        """Raises RequestTooLargeError, with both numbers, for a sequence that could never run to its end."""
        if num_prompt < 1 or max_tokens < 1:
            raise ValueError(f"a prompt token and max_tokens >= 1 are needed, got {num_prompt} and {max_tokens}")
        for pool, needed in zip(
            self.pools.all, self.pools.least_pages(num_prompt + max_tokens - 1, num_prompt), strict=True
        ):
            if needed > (available := pool.num_pages - 1):
                raise RequestTooLargeError(
                    f"{num_prompt} prompt tokens and max_tokens={max_tokens} need {needed} pages of "
                    f"{self.options.page_size} tokens, but the cache has {available}: raise num_pages or "
                    f"memory_fraction, or lower max_tokens"
                )

    def add(self, sequence: SequenceState) -> None:
        """Queues a sequence that fits (`check_fits`). Raises QueueFullError when max_waiting sequences wait."""
        limit = self.options.max_waiting
        # Those for whom a slot is free go on with the next step.
        num_waiting = len(self.waiting) - len(self._free_slots)
        if limit is not None and num_waiting >= limit:
            raise QueueFullError(f"{num_waiting} requests wait already, the limit is max_waiting={limit}")
        sequence.order = next(self._orders)
        if self.options.has_states:
            sequence.leader = None  # its state is not that of the prompt
        self.counters.num_added += 1
        self.counters.prompt_tokens += sequence.num_prompt
        insort(self.waiting, sequence, key=_rank)

    def num_known_tokens(self, sequence: SequenceState) -> int:
        """Leading tokens of a sequence that is not queued yet, whose pages are known."""
        if not self.can_reuse(sequence):
            return 0
        keys = self._keys(sequence, self._num_shareable(sequence))
        return self.prefixes.num_known(keys, sequence.salt) * self.options.page_size

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(
        self,
        max_steps: int | None = None,
        *,
        can_preempt: bool = True,
        tokens_per_step: int = 1,
        num_scratch: int = 0,
    ) -> DispatchPlan | None:
        """The next dispatch, or None when pages are short and `can_preempt` is false.

        The engine then reads all results that are still coming, which may free pages, and asks again: a sequence is
        preempted only when everything that it was given is known, so that it can be computed anew. Where steps may make
        several tokens, report with `reconcile` how many it were; a plan with prompts, or with few pages left, has none.
        Such a step may store `num_scratch` tokens more than it keeps, if the sequence may still grow so long.
        """
        self._release_behind_windows()
        if (last_tokens := self._plan_end()) is not None:
            return self._with_moves(DispatchPlan([], [], [], [last_tokens], [], 1))
        while True:
            width = tokens_per_step
            decodes = [sequence for sequence in self.running if sequence.can_decode]
            is_busy = any(not sequence.is_decoding for sequence in self.running) or self._can_admit()
            steps = 1 if is_busy else self._num_steps(decodes, max_steps)
            has_pages = not is_busy and self._allocate_pages(decodes, steps * width + num_scratch)
            if not has_pages:
                steps = width = 1
            if has_pages or self._allocate_pages(decodes, 1):
                admitted: list[SequenceState] = []
                copies: list[PageCopy] = []
                chunks = self._plan_prompts(admitted, copies, len(decodes))
                if self._has_saved:
                    self.saved.release_restored()
                if chunks or decodes or admitted or all(sequence.is_decoding for sequence in self.running):
                    break
            if not can_preempt:
                return None
            # The last in rank is preempted. The first always continues, so every sequence ends.
            self.preempt(max(self.running, key=_rank))
        if chunks:
            steps = width = 1
        moves = [] if chunks or self.waiting else self._plan_moves(decodes)
        for sequence in decodes:
            sequence.num_stored += min(steps, sequence.num_left)
            sequence.num_reserved += steps * width
        self.counters.copied_pages += len(copies)
        return self._with_moves(DispatchPlan(admitted, moves, copies, chunks, decodes, steps, width))

    def schedule_prompts(self, num_decoding: int) -> DispatchPlan:
        """The part of `schedule` that admits sequences and plans pieces of prompts, beside `num_decoding` decode steps,
        of which the caller keeps count (a simulation); there must be pages for all of it."""
        admitted: list[SequenceState] = []
        copies: list[PageCopy] = []
        chunks = self._plan_prompts(admitted, copies, num_decoding)
        self.counters.copied_pages += len(copies)
        return self._with_moves(DispatchPlan(admitted, [], copies, chunks, [], 1))

    def confirm(self, sequence: SequenceState, num_stored: int) -> None:
        """The keys of the sequence's first `num_stored` tokens are in the cache and sound: others may use them."""
        if sequence.is_finished or sequence.slot is None:
            return
        sequence.num_confirmed = num_stored
        self._cache_prefix(sequence)
        if sequence.prompt_tables and num_stored >= sequence.num_prompt:
            self.ends.finish(sequence)

    def append(self, sequence: SequenceState, token: int) -> None:
        """A token was chosen; all tokens before it are stored."""
        sequence.tokens.append(token)
        sequence.num_confirmed = len(sequence.tokens) - 1

    def reconcile(self, sequence: SequenceState, num_steps: int, tokens_per_step: int, num_made: int) -> None:
        """Corrects planned steps to the number of tokens that they made."""
        if not sequence.is_finished and sequence.slot is not None:
            sequence.num_stored = min(sequence.num_stored + num_made - num_steps, sequence.num_storable)
            sequence.num_reserved -= num_steps * tokens_per_step - num_made

    def rewind(self, sequence: SequenceState) -> None:
        """Tokens of a sequence were taken back, of which nothing is planned: what is stored is what is known."""
        sequence.num_stored = sequence.num_reserved = len(sequence.tokens) - 1

    def preempt(self, sequence: SequenceState) -> None:
        """Ends the run of a sequence of which nothing is planned; it waits to be computed anew."""
        self._leave(sequence)
        sequence.num_preemptions += 1
        self.counters.num_preemptions += 1
        insort(self.waiting, sequence, key=_rank)

    def finish(self, sequence: SequenceState, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a sequence, wherever it is; its slot and pages are free at once."""
        if sequence.is_finished:
            return
        if sequence.slot is None:
            self.waiting.remove(sequence)
            if (adapter := _loaded(sequence)) is not None:
                self.adapters.forget(adapter)  # it may have been moved ahead for this one
        else:
            self._leave(sequence)
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        sequence.leader = None
        self.counters.num_finished += 1

    def set_aside(self, sequence: SequenceState) -> None:
        """Ends the run of a sequence of which nothing is planned, whose turn comes before those that wait."""
        self._leave(sequence)
        insort(self.waiting, sequence, key=_rank)

    def drop_prefixes(self) -> None:
        """Gives up all cached beginnings, on the device and in host memory. Sequences that run go on with theirs, which
        no other finds."""
        for pool in (*self.pools.all, *self.saved.pools):
            pool.drop_idle()
        self.prefixes.drop_hosts()
        self.prefixes.hide()
        for sequence in self.running:
            sequence.is_retained = True
            if self._has_saved:
                self.saved.release_all(sequence)  # which would wait for a place in the tree until its end

    def observe_blocks(self, sink: Callable[[list[BlockEvent]], None]) -> PrefixBlocks:
        """Tells `sink` of each block that prompts find, those that are cached already included, in place of what was
        told before.

        Raises ValueError where there are no blocks: without prefix reuse, or without a layer that sees all tokens.
        """
        if not self.options.reuses_prefixes:
            raise ValueError("no prefixes are reused, so that there are no cached blocks to tell of")
        if not self.prefixes.full_groups:
            told = ", ".join(group.name for group in self.options.groups)
            raise ValueError(f"all layers have windows ({told}): a cached page alone is no block that a prompt finds")
        blocks = PrefixBlocks(self.prefixes.full_groups, sink)
        for node in self.prefixes.nodes():
            blocks.changed(node)
        self.prefixes.observer = blocks
        return blocks

    def check(self) -> None:
        """Raises RuntimeError where pages, slots or lists do not agree."""
        self.pools.check(self.running)
        self.ends.check(self.running)
        self.saved.check(self.running)
        pairs = ((sequence.adapter_slot, _loaded(sequence)) for sequence in self.running)
        self.adapters.check([(slot, adapter) for slot, adapter in pairs if adapter is not None])
        self.prefixes.check()
        slots = [sequence.slot for sequence in self.running]
        owned = sorted([*self._free_slots, *(slot for slot in slots if slot is not None)])
        if owned != list(range(self.options.max_seqs)):
            raise RuntimeError(f"slots {slots} are held and {sorted(self._free_slots)} are free")
        for sequence in self.waiting:
            if (
                sequence.slot is not None
                or any((*sequence.tables, *sequence.prompt_tables))
                or sequence.saved
                or sequence.is_finished
            ):
                raise RuntimeError(
                    f"sequence {sequence.order} waits with {len(sequence.pages)} pages, slot {sequence.slot}"
                )
        if self.waiting != sorted(self.waiting, key=_rank):
            raise RuntimeError("the queue is out of order")
        for sequence in self.running:
            if self.pools.pages_of(sequence, min(sequence.num_reserved, sequence.num_storable)) > len(sequence.pages):
                raise RuntimeError(f"{sequence.num_reserved} tokens may be stored in {len(sequence.pages)} pages")
            if sequence.num_stored > min(sequence.num_reserved, sequence.num_storable):
                raise RuntimeError(
                    f"{sequence.num_stored} tokens are stored, at most {sequence.num_reserved} are planned"
                )
            first = sequence.num_confirmed // self.options.page_size
            for tables in filter(None, (sequence.tables, sequence.prompt_tables)):
                for pool, table in zip(self.pools.all, tables, strict=True):
                    for page in table[first:]:
                        if pool.num_owners(page) > 1 or pool.is_kept(page):
                            raise RuntimeError(f"page {page} is still written, but it is shared or known")

    # Planning.

    def _with_moves(self, plan: DispatchPlan) -> DispatchPlan:
        """The plan with the adapters that move to the device, and the pages that move to host memory and back."""
        if self._adapter_moves:
            plan, self._adapter_moves = replace(plan, adapters=self._adapter_moves), []
        if not self._has_tier:
            return plan
        leaving, coming = self.tier.take_moves()
        self.counters.host_bytes_out += self.tier.bytes_of(leaving)
        self.counters.host_bytes_in += self.tier.bytes_of(coming)
        return replace(plan, to_host=leaving, from_host=coming) if leaving or coming else plan

    def _plan_end(self) -> Chunk | None:
        """The pass that compacts the prompt of a sequence, the first in rank, that waits for it and has room for it."""
        nothing = [0] * len(self.pools.all)
        for sequence in sorted(filter(self.ends.is_next, self.running), key=_rank) if self._has_ends else ():
            if self.pools.has_room(self.ends.missing(sequence), nothing):
                start, end = sequence.num_stored, sequence.num_prompt
                moves = self.ends.start(sequence)
                sequence.num_stored = sequence.num_reserved = end
                self.counters.computed_prompt_tokens += end - start
                return Chunk(sequence, start, end - start, end == sequence.target, end_moves=moves)
        return None

    def _num_steps(self, decodes: list[SequenceState], max_steps: int | None) -> int:
        """Decode steps of a dispatch; while a sequence waits, at most until the first running one is known to end."""
        steps = min(max_steps or self.options.steps_per_dispatch, self.options.steps_per_dispatch)
        if self.waiting and decodes:
            steps = min(steps, *(sequence.num_left for sequence in decodes))
        if any(sequence.grammar is not None and sequence.grammar.is_on_host for sequence in decodes):
            if not self.options.can_rewind:
                return 1
            steps = max(range(1, steps + 1), key=lambda count: num_expected(decodes, count) / (count + HOST_STEPS))
        return max(steps, 1)

    def _can_admit(self) -> bool:
        """True if the first that waits could start now; a guess, `_admit` decides."""
        if not self.waiting or not self._free_slots:
            return False
        first = next(filter(self._has_adapter, self.waiting[:MAX_COMPARED]), None)
        return first is not None and self.pools.has_room(
            self.pools.least_pages(len(first.tokens), first.num_prompt), self._num_spare()
        )

    def _num_spare(self) -> list[int]:
        """By group, pages left for those that run when another is admitted, lest it is preempted at once."""
        spare = self.pools.num_spare(self.running)
        for sequence in self.running if self._has_ends else ():
            spare = [count + self.ends.num_fresh(sequence, group) for group, count in enumerate(spare)]
        return spare

    def _allocate_pages(self, decodes: list[SequenceState], num_tokens: int) -> bool:
        """Allocates pages for this many more tokens of each; takes none and returns false if there are too few."""
        missing = [self.pools.num_missing(sequence, num_tokens) for sequence in decodes]
        if sum(missing) > self.pools.num_available:
            return False
        for sequence, count in zip(decodes, missing, strict=True):
            if count:
                self.pools.extend(sequence, count)
        return True

    def _plan_prompts(self, admitted: list[SequenceState], copies: list[PageCopy], num_decoding: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        budget = self.options.prefill_chunk
        if self.options.max_step_tokens is not None:
            budget = min(budget, self.options.max_step_tokens - num_decoding)
        for sequence in sorted((running for running in self.running if not running.is_decoding), key=_rank):
            budget -= self._plan_chunk(sequence, budget, chunks)
        num_scanned, overtaken = 0, []
        for sequence in self.waiting[:MAX_SCANNED_ANSWERS]:
            if budget <= 0 or not self._free_slots or num_scanned == MAX_QUEUE_SCAN:
                break
            num_scanned += sequence.leader is None  # the other answers to a prompt need no comparison
            if self._should_wait(sequence):
                continue
            if not self._has_adapter(sequence):
                if sequence.num_overtaken >= MAX_OVERTAKEN:
                    break
                overtaken.append(sequence)
                continue
            if not self._admit(sequence, copies):
                break  # the order is kept: a large one is not overtaken for ever by small ones
            admitted.append(sequence)
            for other in overtaken:
                other.num_overtaken += 1
            budget -= self._plan_chunk(sequence, budget, chunks)
            if any(other.num_overtaken >= MAX_OVERTAKEN for other in overtaken):
                break
        self._prefetch_adapter()
        return chunks

    def _has_adapter(self, sequence: SequenceState) -> bool:
        """True if its adapter is in a slot, or if there is one for it."""
        adapter = _loaded(sequence)
        return adapter is None or self.adapters.can_take(adapter)

    def _take_adapter(self, sequence: SequenceState) -> None:
        if (adapter := _loaded(sequence)) is None:
            sequence.adapter_slot = sequence.request.adapter  # pyright: ignore[reportAttributeAccessIssue]
        else:
            if (taken := self.adapters.take(adapter, is_promised=True)) is None:
                raise RuntimeError(f"a sequence was admitted, and its adapter {adapter.name!r} has no slot")
            sequence.adapter_slot, is_new = taken
            if is_new:
                self._adapter_moves.append(AdapterMove(sequence.adapter_slot, adapter))

    def _prefetch_adapter(self) -> None:
        """Moves the adapter of one that waits to the device, where none of those before it needs the slot."""
        if not self.options.num_adapters or self._adapter_moves:
            return
        needed: list[LoadedAdapter] = []
        for sequence in self.waiting[:MAX_PREFETCHED]:
            if (adapter := _loaded(sequence)) is None:
                continue
            needed.append(adapter)
            if self.adapters.slot_of(adapter) is None:
                if (slot := self.adapters.prefetch(adapter, needed)) is not None:
                    self._adapter_moves.append(AdapterMove(slot, adapter))
                return

    def _plan_chunk(self, sequence: SequenceState, budget: int, chunks: list[Chunk]) -> int:
        """As much of a prompt as the budget and the pages allow; returns how many tokens."""
        start = sequence.num_stored
        num_pages = len(sequence.pages) + self.pools.num_available
        room = num_pages * self.options.page_size - self.pools.write_offset(sequence)
        stop = min((part.next_stop(sequence) for part in self._stopping), default=sequence.target)
        length = min(budget, min(stop, self._replay_stop(sequence, chunks)) - start, room)
        if length > 0:
            missing = self.pools.pages_of(sequence, start + length) - len(sequence.pages)
            self.pools.extend(sequence, max(missing, 0))
            end = sequence.num_stored + length
            saves_to = self.saved.save(sequence, end) if self._has_saved else NULL_PAGE
            chunks.append(Chunk(sequence, sequence.num_stored, length, end == sequence.target, saves_to))
            sequence.num_stored = end
            sequence.num_reserved += length
            self.counters.computed_prompt_tokens += length
        return length

    def _should_wait(self, sequence: SequenceState) -> bool:
        """True if a running sequence is computing more of its beginning than is cached: it is then cheaper to wait."""
        if not self.can_reuse(sequence):
            return False
        if self._has_live_leader(sequence):
            return not self._has_prompt(sequence.leader)
        page_size, num_ahead = self.options.page_size, self.options.num_ahead
        computing = [
            running
            for running in self.running
            if running.num_confirmed < running.target and running.salt == sequence.salt and not running.is_retained
        ]
        if not computing:
            return False
        keys = self._keys(sequence, self._num_shareable(sequence))
        num_known = self.prefixes.num_known(keys, sequence.salt)
        if self._has_saved:
            shared = (page_size * num_common(keys, self._keys(other, other.target)) for other in computing)
            pairs = zip(computing, shared, strict=True)
            return any(self.saved.request_from(other, num_known * page_size, count) for other, count in pairs)
        num_wanted = num_known + 1
        return num_wanted <= len(keys) and any(
            keys[:num_wanted] == self._keys(other, min(self._num_known(other), num_wanted * page_size + num_ahead))
            for other in computing
        )

    def can_reuse(self, sequence: SequenceState) -> bool:
        """True if cached pages may be used for its first tokens."""
        return self.options.reuses_prefixes and not sequence.request.needs_whole_prompt

    def _keys(self, sequence: SequenceState, num_tokens: int) -> list[bytes]:
        return sequence.keys(self.options.page_size, num_tokens, self.options.num_ahead)

    def _num_shareable(self, sequence: SequenceState) -> int:
        """Leading tokens that it may take from the prefix tree."""
        count = self.ends.num_shareable(sequence) if self._has_ends else len(sequence.tokens) - 1
        return self._num_alike(sequence, count)

    def _num_known(self, sequence: SequenceState) -> int:
        """Tokens of which others may find pages, once they are confirmed."""
        return self._num_alike(sequence, self.ends.num_known(sequence) if self._has_ends else sequence.target)

    def _num_alike(self, sequence: SequenceState, num_tokens: int) -> int:
        """Number of a sequence's first `num_tokens` tokens whose pages any text that begins alike may have: only the
        prompt's where an answer's tokens attend to other keys than a prompt's."""
        return num_tokens if self._most_replayed is None else min(num_tokens, sequence.num_prompt)

    def _replay_stop(self, sequence: SequenceState, chunks: Sequence[Chunk]) -> int:
        """Upper bound of the end of its next piece, in a step that has `chunks` already: a step takes few tokens of an
        answer that is computed again after a preemption, where each chooses what it reads."""
        if self._most_replayed is None:
            return sequence.target
        left = self._most_replayed - sum(map(_num_replayed, chunks))
        return max(sequence.num_stored, sequence.num_prompt) + left

    def _has_live_leader(self, sequence: SequenceState) -> bool:
        """True if its leader, whose prompt pages it will share, has not ended. A leader is never behind in rank."""
        leader = sequence.leader
        is_live = leader is not None and not leader.is_finished and not leader.is_retained
        return is_live and len(sequence.tokens) == sequence.num_prompt

    def _has_prompt(self, sequence: SequenceState | None) -> bool:
        return sequence is not None and sequence.slot is not None and sequence.num_confirmed >= sequence.num_prompt

    def _admit(self, sequence: SequenceState, copies: list[PageCopy]) -> bool:
        """Gives a waiting sequence a slot, if there are pages for all tokens that it has; it takes them as it goes."""
        num_tokens, page_size = len(sequence.tokens), self.options.page_size
        match = self._find_known(sequence)
        num_known = min(len(match.tables[0]) * page_size, num_tokens - 1)
        num_whole = num_known // page_size
        missing = self.pools.num_missing_at_start(num_tokens, num_known, sequence.num_prompt)
        missing = [count + match.num_absent(group) for group, count in enumerate(missing)]
        if not self.pools.has_room(missing, self._num_spare()):
            self.prefixes.release_match(match)
            return False
        self.counters.host_hit_tokens += match.num_absent(0) * page_size
        tables = self.prefixes.restore(match)
        sequence.restore_from = self.saved.take(tables) if len(tables) > len(self.pools.all) else NULL_PAGE
        # It will write into a page that is known in part, so it gets a copy of its own (copy-on-write).
        for group, (pool, table) in enumerate(zip(self.pools.all, tables, strict=True)):
            shared, table[num_whole:] = table[num_whole:], pool.allocate(len(table) - num_whole)
            copies += [PageCopy(group, *pair) for pair in zip(shared, table[num_whole:], strict=True)]
            pool.release(shared)
        sequence.num_released = self.pools.first_needed(num_known)
        sequence.tables, sequence.place = tables, PrefixPlace()
        sequence.num_stored = sequence.num_reserved = num_known
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.slot = heapq.heappop(self._free_slots)
        self._take_adapter(sequence)
        sequence.target = num_tokens
        sequence.num_confirmed = sequence.num_reused = num_known
        if sequence.num_cached is None:  # later it finds its own pages
            sequence.num_cached = num_known
        self.counters.reused_tokens += num_known
        if self._has_saved:
            self.saved.plan(sequence, self._num_shared(sequence))
        return True

    def _num_shared(self, sequence: SequenceState) -> int:
        """Tokens, of whole pages, that a sequence has in common with what is cached, runs or waits next."""
        page_size, others = self.options.page_size, [*self.running, *self.waiting[:MAX_COMPARED]]
        keys = self._keys(sequence, len(sequence.tokens))
        counts = [
            num_common(keys, self._keys(other, len(other.tokens)))
            for other in others
            if other is not sequence and other.salt == sequence.salt
        ]
        return page_size * max(self.prefixes.num_stored(keys, sequence.salt), *counts, 0)

    def _find_known(self, sequence: SequenceState) -> PrefixMatch:
        """Pages (shared now) that hold the beginning of its tokens; at least one is left over, as the next token is
        chosen from what that one gives."""
        if not self.can_reuse(sequence):
            return PrefixMatch([[] for _ in self.pools.all])
        num_useful = self._num_shareable(sequence)
        if sequence.leader is not None and self._has_live_leader(sequence):
            tables = self.pools.share_beginning(sequence.leader, num_useful)
            if tables is not None:
                return PrefixMatch(tables)
        return self.prefixes.match(self._keys(sequence, num_useful), sequence.salt)

    def _plan_moves(self, decodes: list[SequenceState]) -> list[tuple[int, int]]:
        """Moves sequences to lower slots where that lets a smaller program run."""
        if not decodes or len(self.running) != len(decodes):
            return []
        used = [sequence.slot for sequence in decodes if sequence.slot is not None]
        bucket = next(size for size in self._slot_buckets if size >= len(used))
        if max(used) < bucket:
            return []
        moves = []
        for sequence in decodes:
            if sequence.slot is not None and sequence.slot >= bucket:
                new = heapq.heappop(self._free_slots)
                heapq.heappush(self._free_slots, sequence.slot)
                moves.append((sequence.slot, new))
                sequence.slot, sequence.num_listed = new, 0
        return moves

    # Leaving.

    def _leave(self, sequence: SequenceState) -> None:
        if sequence.slot is None:
            raise RuntimeError("a sequence without a slot cannot leave one")
        self._cache_prefix(sequence)
        self.running.remove(sequence)
        self.pools.release_all(sequence)
        if self._has_ends:
            self.ends.finish(sequence)
        if self._has_saved:
            self.saved.release_all(sequence)
        heapq.heappush(self._free_slots, sequence.slot)
        if _loaded(sequence):
            self.adapters.give_back(sequence.adapter_slot)
        sequence.slot, sequence.place, sequence.adapter_slot = None, None, 0
        sequence.is_compacted = sequence.is_retained = False
        sequence.num_stored = sequence.num_reserved = sequence.num_confirmed = sequence.num_listed = 0

    def _cache_prefix(self, sequence: SequenceState) -> None:
        """Full pages of what is confirmed enter the prefix tree."""
        if not self.options.reuses_prefixes or sequence.is_retained:
            return
        tables = self.ends.known_tables(sequence) if self._has_ends else sequence.tables
        if tables is None:
            return
        keys = self._keys(sequence, self._num_alike(sequence, sequence.num_confirmed))
        saved = self.saved.tables(sequence, len(keys)) if self._has_saved else []
        if self.prefixes.insert(keys, [*tables, *saved], sequence.salt, sequence.place):
            sequence.num_listed = 0
        if saved and self.saved.release_known(sequence, saved):
            self.prefixes.touch(sequence.place, len(self.options.groups))

    def _release_behind_windows(self) -> None:
        """Gives back pages that nothing reads any more; what may be reused of them is in the prefix tree first."""
        for sequence in self.running if self.pools.gives_back else ():
            self.pools.release_evicted(sequence)
            if self.pools.has_behind(sequence):
                self._cache_prefix(sequence)
                self.pools.release_behind(sequence, self.prefixes)


def _rank(sequence: SequenceState) -> tuple[bool, int, int]:
    return sequence.rank


def _loaded(sequence: SequenceState) -> LoadedAdapter | None:
    """The adapter that needs a slot."""
    adapter = sequence.request.adapter
    return adapter if isinstance(adapter, LoadedAdapter) else None


def _num_replayed(chunk: Chunk) -> int:
    """Tokens of an answer in a chunk."""
    end = chunk.start + chunk.length
    return max(end - max(chunk.start, chunk.sequence.num_prompt), 0)
