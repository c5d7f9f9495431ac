"""A replica in whose time decode steps of unchanged sequences pass at once, which gives what `SimulatedReplica` gives.

While nothing waits that could begin, a dispatch is one step of each decoding sequence, and the scheduler need not be
called for it. Such dispatches are counted in *ticks*; what a sequence has is a function of the tick, written to it when
the scheduler looks at it next. Times are whole picoseconds: those of `SimulatedReplica`, to the last one.
"""

import heapq
from collections.abc import Sequence
from typing import Any

from jaxinfer.cache.policy.kinds import KEEPS_ALL
from jaxinfer.engine.cache_groups import MAX_IN_FLIGHT
from jaxinfer.engine.plans import Chunk, DispatchPlan
from jaxinfer.engine.scheduler import SchedulerOptions
from jaxinfer.fleet.simulate.replica import SimulatedFlight, SimulatedReplica
from jaxinfer.fleet.simulate.sequence import SimulatedSequence
from jaxinfer.fleet.simulate.times import StepTimes


def can_jump(options: SchedulerOptions, times: StepTimes) -> bool:
    """True if `JumpingReplica` takes these options: all keys are kept, in one group of layers without a window."""
    is_plain = options.policy == KEEPS_ALL and not options.has_states and not options.host_pools
    groups = options.groups
    return is_plain and len(groups) == 1 and groups[0].window is None and groups[0].at_end is None and times.is_linear


class JumpingReplica(SimulatedReplica):
    """As `SimulatedReplica`, for options of which `can_jump` is true."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        if not can_jump(self.options, self.times):
            raise ValueError("windows, states and policies of the cache are simulated step by step")
        self._pool = self.scheduler.pool
        sizes = range(1, self.options.max_seqs + 1)
        self._decode_times = [0, *(self.times.products(size, size) for size in sizes)]
        self._tick = 0  # dispatches with decode steps that were planned
        self._read_tick = 0  # the last of them whose results were read
        self._num_decoding = 0  # sequences of the next such dispatch
        self._attended = 0  # tokens that they attended to in the last one
        self._ends: dict[int, list[SimulatedSequence]] = {}  # by their last tick
        self._end_ticks: list[int] = []  # a heap of them
        self._prefilling: dict[Any, None] = {}
        self._num_chunk_flights = 0
        self._is_blocked = False  # nothing that waits can begin before a sequence ends
        self._written_tick = 0  # until which running sequences have what is planned for them, at least
        self._num_jumped = 0  # dispatches that pass at once, before `wake_at`

    @property
    def due_at(self) -> int | None:
        if self._num_jumped:
            return self._in_flight[1].end + self._picoseconds_of(self._num_jumped)
        if self._is_short or len(self._in_flight) < MAX_IN_FLIGHT:
            return self.wake_at
        first, second = self._in_flight
        ends_soon = first.tick in self._ends or any(chunk.sequence.request.max_tokens == 1 for chunk in first.chunks)
        return first.end if ends_soon else second.end

    def num_sent(self, sequence: SimulatedSequence) -> int:
        if sequence.slot is None or not sequence.is_decoding or len(sequence.tokens) <= sequence.base:
            return sequence.num_output
        decoded = max(min(self._read_tick, sequence.last) - sequence.joined, 0)
        return sequence.base + 1 + decoded - sequence.num_prompt

    # Many dispatches at once.

    def _step(self, now: int) -> None:
        if self._num_jumped:
            self._advance(self._num_jumped)
        super()._step(now)
        self._jump()

    def _pass(self, now: int) -> None:
        super()._pass(now)
        if self._num_jumped:
            self._advance(self._num_sent_before(now))

    def _jump(self) -> None:
        """Plans as many dispatches of the sequences that decode as none of them ends in, and the pages last for."""
        if len(self._in_flight) < MAX_IN_FLIGHT or self._num_chunk_flights or self._inbox or not self._num_decoding:
            return
        first, second = self._in_flight
        if self._is_short or first.tick in self._ends or second.tick in self._ends or self._needs_scheduler():
            return
        while self._end_ticks[0] <= second.tick:
            heapq.heappop(self._end_ticks)
        number = len(self.scheduler.running)
        lasting = self._written_tick + self._pool.num_available // number * self.options.page_size - 1
        count = min(self._end_ticks[0], lasting) - self._tick
        if count > 1:
            self._num_jumped = count
            self.wake_at = second.end + self._picoseconds_of(count - 1)

    def _picoseconds_of(self, count: int) -> int:
        """Time of the next `count` dispatches."""
        number = self._num_decoding
        attended = count * self._attended + number * (count * (count + 1) // 2)
        return count * self._decode_times[number] + self.times.key * attended

    def _num_sent_before(self, now: int) -> int:
        """Dispatches of those that were planned at once that are sent before this time: one when the one two before it
        ends."""
        first, second = self._in_flight
        if first.end >= now:
            return 0
        low, high = 1, self._num_jumped
        while low < high:
            middle = (low + high + 1) // 2
            if second.end + self._picoseconds_of(middle - 2) < now:
                low = middle
            else:
                high = middle - 1
        return low

    def _advance(self, count: int) -> None:
        """Passes `count` of the dispatches that were planned at once, and plans no more of them."""
        self._num_jumped = 0
        end = self._in_flight[1].end
        if count:
            ends = end + self._picoseconds_of(count - 1), end + self._picoseconds_of(count)
            self._attended += count * self._num_decoding
            self._tick += count
            self._read_tick = self._tick - MAX_IN_FLIGHT
            self.num_steps += count
            self._in_flight.clear()
            self._in_flight.append(SimulatedFlight(ends[0], (), None, self._tick - 1))
            self._in_flight.append(SimulatedFlight(ends[1], (), None, self._tick))
            self._device_free_at = ends[1]
            self._leave_at_end()
        self.wake_at = self._in_flight[0].end

    # A step.

    def _needs_scheduler(self) -> bool:
        """True if the next dispatch may be another one than a step of each decoding sequence."""
        if self._prefilling or (self.scheduler.waiting and not self._is_blocked):
            return True
        return self._most_pages(self._tick + 1) > self._pool.num_available

    def _most_pages(self, tick: int) -> int:
        """Pages that running sequences take until a tick, at most, beyond those that they have."""
        return len(self.scheduler.running) * ((tick - self._written_tick) // self.options.page_size + 1)

    def _has_plenty(self) -> bool:
        """True if free pages do for all that may begin, whatever running sequences have taken meanwhile: pages would be
        evicted in the order of the steps."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        if len(waiting) > 8 and self.options.reuses_prefixes:
            return (
                False  # those that wait for a common beginning are passed over, which makes it hard to say who begins
            )
        size, starting = self.options.page_size, waiting[: self.options.max_seqs - len(running)]
        needed = sum(len(sequence.tokens) // size + 2 for sequence in starting) + len(running)
        needed += sum(sequence.target // size + 1 - len(sequence.tables[0]) for sequence in self._prefilling)
        return self._num_free - self._most_pages(self._tick + 1) >= needed

    def _take_inbox(self) -> None:
        if self._inbox and not self.scheduler.waiting:
            self._is_blocked = False
        super()._take_inbox()

    def _plan(self, now: int) -> SimulatedFlight | None:
        self._is_short = False
        if self._needs_scheduler():
            if self._has_plenty():
                return self._planned(now, self.scheduler.schedule_prompts(self._num_decoding))
            return self._plan_by_scheduler(now)
        return self._sent_decodes(now, ()) if self._num_decoding else None

    def _plan_by_scheduler(self, now: int) -> SimulatedFlight | None:
        scheduler = self.scheduler
        self._write_sequences()
        if not self._in_flight:
            self._write_tokens()  # they may be computed anew
        num_preemptions = scheduler.counters.num_preemptions
        plan = scheduler.schedule(can_preempt=not self._in_flight)
        self._is_short = plan is None
        if plan is None:
            return None
        if scheduler.counters.num_preemptions != num_preemptions:
            self._begin_anew(set(plan.decodes))
        if len(plan.decodes) != self._num_decoding:
            raise RuntimeError(f"{len(plan.decodes)} sequences decode, {self._num_decoding} were expected")
        self._written_tick += bool(plan.decodes)
        return self._planned(now, plan)

    def _planned(self, now: int, plan: DispatchPlan) -> SimulatedFlight | None:
        for sequence in plan.admitted:
            self._prefilling[sequence] = None
        is_empty = not (plan.chunks or self._num_decoding)
        flight = None if is_empty else self._sent_decodes(now, plan.chunks)
        for chunk in plan.chunks:
            if chunk.is_last:
                del self._prefilling[chunk.sequence]
                self._join(chunk.sequence)
        self._num_chunk_flights += bool(plan.chunks)
        self._is_blocked = not (plan.admitted or self._prefilling or self._num_chunk_flights)
        return flight

    def _sent_decodes(self, now: int, chunks: Sequence[Chunk]) -> SimulatedFlight:
        number = self._num_decoding
        if number:
            self._tick += 1
            self._attended += number
        flight = self._sent(now, chunks, None, number, self.times.key * self._attended, self._tick)
        if number:
            self._leave_at_end()
        return flight

    def _join(self, sequence: Any) -> None:
        """Its next dispatch is a decode step."""
        sequence.base, sequence.joined = sequence.num_stored, self._tick
        sequence.last = self._tick + sequence.num_left
        if sequence.num_left:
            self._num_decoding += 1
            self._attended += sequence.num_stored
            self._end_at(sequence)

    def _end_at(self, sequence: SimulatedSequence) -> None:
        if sequence.last not in self._ends:
            self._ends[sequence.last] = []
            heapq.heappush(self._end_ticks, sequence.last)
        self._ends[sequence.last].append(sequence)

    def _leave_at_end(self) -> None:
        """Those whose last step is planned take part in no other."""
        for sequence in self._ends.get(self._tick, ()):
            self._num_decoding -= 1
            self._attended -= sequence.num_storable

    def _begin_anew(self, decodes: set[Any]) -> None:
        """Counts what runs, of which some was preempted in a plan with these decode steps."""
        self._ends, self._end_ticks = {}, []
        self._num_decoding = self._attended = 0
        self._prefilling = {}
        for sequence in self.scheduler.running:
            if sequence in decodes:
                sequence.num_stored -= 1
                self._join(sequence)
                sequence.num_stored += 1
            else:
                self._prefilling[sequence] = None

    def _commit(self, flight: SimulatedFlight, now: int) -> None:
        if flight.chunks:
            self._num_chunk_flights -= 1
            self._is_blocked = False
            self._write_before_release()
            self._commit_chunks(flight, now)
        self._read_tick = flight.tick
        for sequence in self._ends.pop(flight.tick, ()):
            self._finish(sequence, now)

    def _finish(self, sequence: SimulatedSequence, now: int) -> None:
        self._write_before_release()
        self._write(sequence)
        missing = sequence.num_prompt + sequence.request.max_tokens - len(sequence.tokens)
        sequence.tokens += bytes(missing)  # type: ignore[operator]
        sequence.num_confirmed = len(sequence.tokens) - 1
        self._is_blocked = False
        super()._finish(sequence, now)

    # What the scheduler looks at.

    def _write_before_release(self) -> None:
        """Idle pages must be evicted in the order of the steps: before others are released, if free ones may not do."""
        if self._pool.num_idle and self._most_pages(self._tick) > self._num_free:
            self._write_sequences()

    @property
    def _num_free(self) -> int:
        return self._pool.num_available - self._pool.num_idle

    def _write_sequences(self) -> None:
        """Brings the running sequences' counts and pages up to the tick."""
        if self._written_tick != self._tick:
            self._written_tick = self._tick
            for sequence in self.scheduler.running:
                if sequence.num_stored >= sequence.target:
                    self._write(sequence)

    def _write(self, sequence: Any) -> None:
        tick, last = self._tick, sequence.last
        stored = sequence.base + (tick if tick < last else last) - sequence.joined
        sequence.num_stored = sequence.num_reserved = stored
        table = sequence.tables[0]
        missing = -(-stored // self.options.page_size) - len(table)
        if missing > 0:
            table += self._pool.allocate(missing)

    def _write_tokens(self) -> None:
        """Gives the decoding sequences the tokens that they have, where all results were read."""
        for sequence in self.scheduler.running:
            if sequence.is_decoding:
                sequence.tokens += bytes(sequence.num_stored + 1 - len(sequence.tokens))  # type: ignore[operator]
                sequence.num_confirmed = sequence.num_stored
