"""A device and an engine for the scheduler's tests: they execute plans and nothing else, but check all they see.

The device stores one number per token: what it is, where it stands and whose salt it has. Its "model" reads all numbers
of a sequence back from the pages of each group of layers, or of a group with a window the last ones and those of its
sinks; so a page that was wrongly shared, overwritten, forgotten, given back or not copied changes the answer. With
states it also reads its slot's state, a number that depends on all tokens in their order. Where a prompt is compacted,
which of its numbers stay depends on them. The same model run on the prompt alone says what the answer must be.
"""

import functools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.cache_groups import MAX_IN_FLIGHT
from jaxinfer.engine.pages import NULL_PAGE
from jaxinfer.engine.plans import AdapterMove, GroupMove
from jaxinfer.engine.request import MAX_PREEMPTIONS, SequenceState
from jaxinfer.engine.scheduler import DispatchPlan, PageCopy, QueueFullError, Scheduler, SchedulerOptions
from jaxinfer.engine.tiers.host_tier import PageMove
from tests.engine.sequences import make_sequence

VOCAB = 97
EOS = 0
GARBAGE = -1  # what a row that failed stores
SCRATCH = 3  # tokens that a step of several stores beyond those that it may keep


def stored(token: int, position: int, salt: str) -> int:
    """The contents of the cache for a token; `salt` is the text of a number, of a sequence with an adapter a hash."""
    return (int(salt or "0", 16) << 40) | (position << 16) | token


def next_token(history: list[tuple[int, ...]]) -> int:
    """The model, from what each group of layers sees: any change of any number changes the answer. Hashes of tuples of
    int are the same in every run."""
    return hash(tuple(history)) % VOCAB


def next_state(state: int, number: int) -> int:
    """The state after another token."""
    return hash((state, number))


def places_seen(count: int, window: int | None, num_first: int = 0) -> list[int]:
    """What the newest of `count` tokens sees of them: the last ones, and the `num_first` first ones."""
    first = 0 if window is None else max(count - window, 0)
    return [*range(min(num_first, first)), *range(first, count)]


@dataclass(frozen=True)
class FakeEnd:
    """A `PromptEnd`: `num_kept` tokens of a prompt stay, or less than a page more."""

    num_kept: int
    num_observed: int
    page_size: int

    def num_dropped(self, num_prompt: int) -> int:
        return max(num_prompt - self.num_kept, 0) // self.page_size

    def kept_places(self, numbers: Sequence[int | None]) -> list[int]:
        """Where what stays of a prompt lay: the last numbers, and the best of the others, whichever those are."""
        count, first = len(numbers) - self.num_dropped(len(numbers)) * self.page_size, len(numbers) - self.num_observed
        best = sorted(range(first), key=lambda at: (hash((numbers[at],)), at))[: count - self.num_observed]
        return [*sorted(best), *range(first, len(numbers))]


def expected_answer(
    prompt: list[int],
    salt: str,
    max_tokens: int,
    windows: Sequence[tuple[int | None, int]] = ((None, 0),),
    has_states: bool = False,
    budgets: Sequence[Any] = (),
) -> list[int]:
    """One answer: that of the prompt alone. `windows` as `places_seen` takes them; `budgets` of the groups, if any."""
    own = {group: one for group, one in enumerate(budgets) if one is not None and one.num_dropped(len(prompt))}
    history = tuple(stored(token, position, salt) for position, token in enumerate(prompt))
    state, answer = functools.reduce(next_state, history, 0), []
    while len(answer) < max_tokens and (not answer or answer[-1] != EOS):
        seen = [tuple(history[at] for at in places_seen(len(history), *window)) for window in windows]
        for group, budget in own.items() if answer else ():
            numbers = history[: len(prompt)]
            seen[group] = (*(numbers[at] for at in budget.kept_places(numbers)), *history[len(prompt) :])
        answer.append(next_token([*seen, *[(state,)] * has_states]))
        history += (stored(answer[-1], len(history), salt),)
        state = next_state(state, history[-1])
    return answer


@dataclass
class Row:
    """A slot on the device. Its state is another's, or one that was saved, until a sequence begins at 0."""

    salt: str
    position: int
    remaining: int
    state: int | None = GARBAGE
    newest: int = -1
    is_active: bool = False
    is_ok: bool = True
    num_dropped: tuple[int, ...] = ()  # pages of its prompt, by group, once it is compacted


@dataclass(frozen=True)
class ScoredChunk:
    """What a dispatch carries for one sequence: everything as it was when the plan was made."""

    sequence: SequenceState
    slot: int
    tables: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...] = ()
    start: int = 0
    is_last: bool = False
    must_fail: bool = False
    saves_to: int = NULL_PAGE
    end_moves: tuple[GroupMove, ...] = ()


@dataclass
class Result:
    """What comes back: the end of a chunk (None for a decode), the tokens that were chosen, whether all were sound."""

    sequence: SequenceState
    chunk_end: int | None
    tokens: list[int] = field(default_factory=list)
    is_ok: bool = True
    planned: tuple[int, int] | None = None  # steps, and tokens of each at most


class Device:
    def __init__(self, options: SchedulerOptions):
        groups, page_size, max_seqs = options.groups, options.page_size, options.max_seqs
        self.groups, self.page_size, self.has_states = groups, page_size, options.has_states
        self.saved: list[int | None] = [None] * (options.num_saved_states + 1)
        self.contents: list[list[list[int | None]]] = [
            [[None] * page_size for _ in range(group.num_pages)] for group in groups
        ]
        self.rows: list[Row | None] = [None] * max_seqs
        self.adapters = [""] * (options.num_adapters + 1)  # fingerprints by slot
        self.host: dict[tuple[int, int], list[int | None]] = {}  # contents by group and host page

    def move_out(self, moves: Sequence[PageMove]) -> None:
        """Reads all pages before anything is written."""
        assert len({(one.group, one.host) for one in moves}) == len(moves), f"moves depend on their order: {moves}"
        for one in moves:
            self.host[one.group, one.host] = self._contents(one.group, one.page)

    def move_back(self, moves: Sequence[PageMove]) -> None:
        assert len({(one.group, one.page) for one in moves}) == len(moves), f"moves depend on their order: {moves}"
        for one in moves:
            data = self.host[one.group, one.host]
            if one.group == len(self.groups):
                (self.saved[one.page],) = data
            else:
                self.contents[one.group][one.page] = list(data)

    def _contents(self, group: int, page: int) -> list[int | None]:
        return [self.saved[page]] if group == len(self.groups) else list(self.contents[group][page])

    def write_adapters(self, moves: Sequence[AdapterMove]) -> None:
        for slot, adapter in moves:
            assert 1 <= slot < len(self.adapters), f"an adapter is written to slot {slot}"
            self.adapters[slot] = adapter.fingerprint

    def move(self, moves: list[tuple[int, int]]) -> None:
        slots = [slot for pair in moves for slot in pair]
        assert len(set(slots)) == len(slots), f"moves depend on their order: {moves}"
        for old, new in moves:
            self.rows[new], self.rows[old] = self.rows[old], None

    def copy(self, copies: list[PageCopy]) -> None:
        sources = {(one.group, one.source) for one in copies}
        targets = {(one.group, one.destination) for one in copies}
        assert len(targets) == len(copies), f"copies depend on their order: {copies}"
        assert not sources & targets, f"copies depend on their order: {copies}"
        read = [list(self.contents[one.group][one.source]) for one in copies]
        for one, data in zip(copies, read, strict=True):
            self.contents[one.group][one.destination] = data

    def run_chunk(self, piece: ScoredChunk) -> Result:
        row = self.rows[piece.slot]
        assert row is not None, "a chunk for a row that was not written"
        assert not row.is_active, "a chunk for a row that decodes"
        assert row.position == piece.start, "a chunk that does not go on where the last one ended"
        if row.is_ok:
            self._check_windows(piece, row.salt)
        row.is_ok &= not piece.must_fail
        row.state = row.state if piece.start else 0
        for position, token in enumerate(piece.tokens, piece.start):
            self._store(piece.tables, position, stored(token, position, row.salt) if row.is_ok else GARBAGE, row)
        row.position += len(piece.tokens)
        if piece.saves_to != NULL_PAGE:
            self.saved[piece.saves_to] = row.state
        result = Result(piece.sequence, row.position, is_ok=row.is_ok)
        if piece.is_last and row.is_ok:
            row.is_active = True
            self._choose(row, piece.tables, result)
        if piece.end_moves:
            self._compact(row, piece.end_moves)
        return result

    def _compact(self, row: Row, moves: tuple[GroupMove, ...]) -> None:
        """Moves what stays of a prompt, of which every token is stored."""
        for group, (sources, targets, num_dropped) in enumerate(moves):
            if num_dropped:
                numbers = self._read(group, sources, range(row.position))
                kept = [numbers[at] for at in self.groups[group].at_end.kept_places(numbers)]
                assert len(targets) == -(-len(kept) // self.page_size)
                for at, number in enumerate(kept):
                    self.contents[group][targets[at // self.page_size]][at % self.page_size] = number
        row.num_dropped = tuple(move.num_dropped for move in moves)

    def run_decodes(self, pieces: list[ScoredChunk], num_steps: int, width: int, chance: random.Random) -> list[Result]:
        """Each step makes 1 to `width` tokens, and may store more than it keeps."""
        results = [Result(piece.sequence, None, planned=(num_steps, width)) for piece in pieces]
        for step in range(num_steps):
            for piece, result in zip(pieces, results, strict=True):
                row = self.rows[piece.slot]
                assert row is not None, "a decode in a slot that nobody has"
                if not row.is_active:
                    result.is_ok &= row.is_ok
                    continue
                if piece.must_fail and step == num_steps - 1:
                    row.is_ok = row.is_active = result.is_ok = False
                    self._store(piece.tables, row.position, GARBAGE)
                    continue
                drafted = range(row.position, row.position + min(width + SCRATCH * (width > 1), row.remaining))
                for position in drafted:
                    self._store(piece.tables, position, GARBAGE)
                for _ in range(chance.randint(1, width)):
                    if row.is_active:
                        self._store(piece.tables, row.position, stored(row.newest, row.position, row.salt), row)
                        row.position += 1
                        self._choose(row, piece.tables, result)
        return results

    def _check_windows(self, piece: ScoredChunk, salt: str) -> None:
        """The first token of a piece of a prompt sees what it should; the last is checked by what is chosen."""
        for group in range(len(self.groups)):
            row, tokens = self.rows[piece.slot], piece.sequence.tokens
            places = places_seen(piece.start + 1, *self._window(group))[:-1]
            expected = [stored(tokens[at], at, salt) for at in places]
            if row is not None and any(row.num_dropped[group : group + 1]):
                places = self._places(group, row)
                prompt = [stored(token, at, salt) for at, token in enumerate(piece.sequence.request.token_ids)]
                kept = [prompt[at] for at in self.groups[group].at_end.kept_places(prompt)]
                expected = kept + expected[len(prompt) :]
            found = self._read(group, piece.tables[group], places)
            assert found == expected, f"tokens {places} of group {group} are not in their pages"

    def _window(self, group: int) -> tuple[int | None, int]:
        """Its window, and the tokens of its sinks."""
        return self.groups[group].window, self.groups[group].num_sinks * self.page_size

    def _places(self, group: int, row: Row) -> list[int]:
        """What a group sees of a row's tokens, as places in its table."""
        if any(row.num_dropped[group : group + 1]):
            return [*range(row.num_dropped[group] * self.page_size, row.position)]
        return places_seen(row.position, *self._window(group))

    def _read(self, group: int, table: tuple[int, ...], places: Sequence[int]) -> list[int | None]:
        size = self.page_size
        return [self.contents[group][table[at // size]][at % size] for at in places]

    def _choose(self, row: Row, tables: tuple[tuple[int, ...], ...], result: Result) -> None:
        history = []
        for number in range(len(self.groups)):
            history.append(tuple(self._read(number, tables[number], self._places(number, row))))
        row.newest = next_token([*history, *[(row.state,)] * self.has_states])
        row.remaining -= 1
        row.is_active = row.newest != EOS and row.remaining > 0
        result.tokens.append(row.newest)

    def _store(self, tables: tuple[tuple[int, ...], ...], position: int, value: int, row: Row | None = None) -> None:
        """Stores a token, and adds it to a row's state."""
        if row is not None:
            row.state = next_state(GARBAGE if row.state is None else row.state, value)
        for contents, table in zip(self.contents, tables, strict=True):
            page = table[position // self.page_size]
            assert page > 0, "the null page is written"
            contents[page][position % self.page_size] = value


class Engine:
    """Runs a scheduler on the device, up to two results late. Every public method checks what it did.

    `num_operations` counts calls of add, schedule, confirm, append and finish. `failure_rate`: of pieces of a dispatch;
    `stop_rate`: of tokens after which a sequence ends early, as with a stop string. `known_pages_every`: of how many
    checks one compares all known pages with the device. `tokens_per_step`: of some dispatches' steps, at most.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        slot_buckets: tuple[int, ...] | None = None,
        seed: int = 0,
        failure_rate: float = 0.0,
        stop_rate: float = 0.0,
        known_pages_every: int = 1,
        tokens_per_step: int = 1,
    ):
        self.options = options
        self.scheduler = Scheduler(options, slot_buckets)
        self.device = Device(options)
        self.random = random.Random(seed)
        self.failure_rate, self.stop_rate, self.known_pages_every = failure_rate, stop_rate, known_pages_every
        self.tokens_per_step = tokens_per_step
        self.has_budgets = any(group.at_end is not None for group in options.groups)
        self.live: dict[SequenceState, list[int]] = {}  # with the answer that each must give
        self.in_flight: deque[list[Result]] = deque()
        self.num_operations = self.num_schedules = self.num_checks = 0
        self.num_answers = self.num_failed = self.num_refused = 0
        self.num_stored_by_plans = self.num_found_by_plans = 0
        self.num_compacted = 0  # prompts
        self.num_left = self.num_back = 0  # pages that moved to the host, and back
        self.max_preemptions = 0  # of one sequence

    # What a user does.

    def add(self, prompt: list[int], max_tokens: int, **arguments) -> SequenceState | None:
        sequence = make_sequence(prompt, max_tokens, **arguments)
        self.num_operations += 1
        try:
            self.scheduler.add(sequence)
        except QueueFullError:
            free = self.options.max_seqs - len(self.scheduler.running)
            assert len(self.scheduler.waiting) - free >= (self.options.max_waiting or 0)
            self.num_refused += 1
            return None
        windows = [(group.window, group.num_sinks * self.options.page_size) for group in self.options.groups]
        has_states, budgets = self.options.has_states, [group.at_end for group in self.options.groups]
        self.live[sequence] = expected_answer(prompt, sequence.salt, max_tokens, windows, has_states, budgets)
        self.check()
        return sequence

    def abort(self, sequence: SequenceState) -> None:
        self._finish(sequence)
        self.check()

    # What the loop of an engine does.

    def dispatch(self) -> bool:
        """Plans and runs one dispatch; false when there was nothing to run."""
        assert len(self.in_flight) < MAX_IN_FLIGHT
        plan = self._schedule(can_preempt=not self.in_flight)
        if plan is None:
            assert self.in_flight, "no plan, though it may preempt"
            while self.in_flight:
                self.deliver()
            plan = self._schedule(can_preempt=True)
        assert plan is not None
        if plan.is_empty:
            assert self.has_budgets or not [*plan.admitted, *plan.moves, *plan.copies, *plan.from_host]
            self._run(plan)
            assert self.in_flight or plan.admitted or not self.scheduler.has_work, "work waits for ever"
            return False
        self.in_flight.append(self._run(plan))
        self.check()
        return True

    def deliver(self) -> None:
        """Reports the oldest results to the scheduler."""
        for result in self.in_flight.popleft():
            sequence = result.sequence
            if sequence.is_finished:
                continue
            if result.chunk_end is not None and result.is_ok:
                self.num_operations += 1
                self.scheduler.confirm(sequence, result.chunk_end)
            for token in result.tokens:
                self.num_operations += 1
                self.scheduler.append(sequence, token)
                answer = sequence.tokens[sequence.num_prompt :]
                expected = self.live[sequence]
                assert answer[-1] == expected[len(answer) - 1], f"token {len(answer) - 1} of {sequence} is wrong"
                is_whole = len(answer) == len(expected)
                if is_whole or self.random.random() < self.stop_rate:
                    self.num_answers += is_whole
                    self._finish(sequence)
                    break
            if result.planned is not None:
                self.scheduler.reconcile(sequence, *result.planned, len(result.tokens))
            if not result.is_ok and not sequence.is_finished:
                self.num_failed += 1
                self._finish(sequence)
        self.check()

    def step(self) -> None:
        """A dispatch or a delivery, by chance."""
        is_full = len(self.in_flight) == MAX_IN_FLIGHT
        wants_result = self.in_flight and self.random.random() < 0.3
        if (is_full or wants_result or not self.dispatch()) and self.in_flight:
            self.deliver()

    def drain(self, max_schedules: int | None = None) -> None:
        """Runs to the end of all work. The bound: every token of everybody, again after each preemption."""
        work = sum(len(sequence.tokens) + sequence.request.max_tokens for sequence in self.live)
        limit = self.num_schedules + (max_schedules or 50 + (MAX_PREEMPTIONS + 2) * work)
        while self.scheduler.has_work or self.in_flight:
            self.step()
            assert self.num_schedules <= limit, f"{len(self.live)} sequences are still not finished"
        self.check_idle()

    # What must hold.

    def check(self) -> None:
        self.scheduler.check()
        self.num_checks += 1
        if self.num_checks % self.known_pages_every == 0:
            self.check_known_pages()

    def check_idle(self) -> None:
        counters = self.scheduler.counters
        assert not self.live
        for pool, group in zip(self.scheduler.pools.all, self.options.groups, strict=True):
            assert pool.num_owned == 0
            assert pool.num_available == group.num_pages - 1
        for pool in self.scheduler.saved.pools:
            assert pool.num_owned == 0
            assert pool.num_available == self.options.num_saved_states
        assert counters.num_added == counters.num_finished
        assert counters.computed_prompt_tokens == self.num_stored_by_plans
        assert counters.reused_tokens == self.num_found_by_plans
        self.check_known_pages()

    def check_known_pages(self) -> None:
        """The device holds in each known page, and in each place of a state, what the prefix tree says."""
        width, num_groups = 4, len(self.options.groups)
        for salt, root in self.scheduler.prefixes._roots.items():
            stack = [(root, 0, 0)]
            while stack:
                node, position, state = stack.pop()
                for key, child in node.children.items():
                    tokens = [int.from_bytes(key[i : i + width], "little") for i in range(0, len(key), width)]
                    expected = [stored(token, position + i, salt) for i, token in enumerate(tokens)]
                    after = functools.reduce(next_state, expected, state)
                    for place in child.pages[num_groups:]:
                        assert place == NULL_PAGE or self.device.saved[place] == after, "not the state after its tokens"
                    for group, page in enumerate(child.pages[:num_groups]):
                        found = self.device.contents[group][page]
                        assert page == NULL_PAGE or found == expected, f"page {page} is not what is known of it"
                    for group, host in enumerate(child.hosts):
                        wanted = [after] if group == num_groups else expected
                        is_there = host == NULL_PAGE or (group, host) in self.scheduler.tier._leaving
                        assert is_there or self.device.host[group, host] == wanted, f"host page {host} is another's"
                    stack.append((child, position + len(tokens), after))

    # Inside.

    def _schedule(self, can_preempt: bool) -> DispatchPlan | None:
        self.num_operations += 1
        self.num_schedules += 1
        before = {one: (one.num_stored, one.num_preemptions) for one in self.scheduler.running}
        width = self.random.choice([1, self.tokens_per_step])
        max_steps = self.random.choice([None, None, 1, 3])
        plan = self.scheduler.schedule(
            max_steps, can_preempt=can_preempt, tokens_per_step=width, num_scratch=SCRATCH * (width > 1)
        )
        gave_way = [count for one, (_, count) in before.items() if one.num_preemptions > count]
        assert can_preempt or not gave_way
        self.max_preemptions = max(self.max_preemptions, *(count + 1 for count in gave_way), 0)
        if gave_way and max(gave_way) >= MAX_PREEMPTIONS:
            stayed = [one for one in before if one.slot is not None and one.num_preemptions == before[one][1]]
            assert all(one.num_preemptions >= MAX_PREEMPTIONS for one in stayed), "a spared sequence gave way"
        if plan is not None:
            self._check_plan(plan, {one: num_stored for one, (num_stored, _) in before.items()})
        return plan

    def _check_plan(self, plan: DispatchPlan, before: dict[SequenceState, int]) -> None:
        """It keeps to the limits; the pages that it writes are one sequence's own, and nobody else can find them."""
        assert sum(0 if one.end_moves else one.length for one in plan.chunks) <= self.options.prefill_chunk
        assert len(plan.chunks) + len(plan.decodes) == 1 or not any(chunk.end_moves for chunk in plan.chunks)
        assert 1 <= plan.num_steps <= (1 if plan.chunks else self.options.steps_per_dispatch)
        assert 1 <= plan.tokens_per_step <= (1 if plan.chunks else self.tokens_per_step)
        waiting = {one.slot for one in plan.admitted if self.scheduler.ends.is_next(one)}
        assert {one.slot for one in plan.admitted} - waiting <= {chunk.sequence.slot for chunk in plan.chunks}
        ranges = [(one.sequence, one.start, one.start + one.length) for one in plan.chunks]
        # What is planned may begin anywhere between the least and the most that is stored.
        ranges += [(one, before[one], min(one.num_reserved, one.num_storable)) for one in plan.decodes]
        size = self.options.page_size
        written: list[tuple[int, int]] = []
        for sequence, start, end in ranges:
            assert end > start
            assert sequence.slot is not None
            moves = next((one.end_moves for one in plan.chunks if one.sequence is sequence), ())
            for group, pool in enumerate(self.scheduler.pools.all):
                table = moves[group].sources if moves else sequence.tables[group]
                pages = table[start // size : -(-end // size)] + (moves[group].targets if moves else type(table)())
                assert all(pool.num_owners(page) == 1 and not pool.is_kept(page) for page in pages), (
                    "a shared page is written"
                )
                written += [(group, page) for page in pages]
            self._check_held(sequence)
        assert len(set(written)) == len(written), "two sequences write the same page"
        for place in (chunk.saves_to for chunk in plan.chunks if chunk.saves_to != NULL_PAGE):
            (pool,) = self.scheduler.saved.pools
            assert pool.num_owners(place) == 1, "a state is saved in a place that it does not own"
            assert not pool.is_kept(place), "a state is saved over one that others find"
        admitted = {(group, page) for one in plan.admitted for group, table in enumerate(one.tables) for page in table}
        assert {(one.group, one.destination) for one in plan.copies} <= admitted

    def _check_held(self, sequence: SequenceState) -> None:
        """Of a window it holds no more than that, what is not confirmed yet, and what was allocated for later."""
        size = self.options.page_size
        for group, table in zip(self.options.groups, sequence.tables, strict=True):
            first = 0 if group.window is None else max(sequence.num_confirmed + 1 - group.window, 0)
            given = first // size - group.sinks_before(first // size)
            if group.at_end is not None and sequence.is_compacted:
                given = group.at_end.num_dropped(sequence.num_prompt)
            assert table.count(NULL_PAGE) == given, "a page behind the window is not given back, or one of the sinks is"

    def _run(self, plan: DispatchPlan) -> list[Result]:
        device = self.device
        self.num_left, self.num_back = self.num_left + len(plan.to_host), self.num_back + len(plan.from_host)
        device.move_out(plan.to_host)
        device.move_back(plan.from_host)
        device.move(plan.moves)
        device.copy(plan.copies)
        device.write_adapters(plan.adapters)
        for one in plan.admitted:
            assert one.slot is not None
            device.rows[one.slot] = Row(
                one.salt, one.num_reused, one.num_prompt + one.request.max_tokens - len(one.tokens)
            )
            self.num_found_by_plans += one.num_reused
            if one.restore_from != NULL_PAGE:
                device.rows[one.slot].state = device.saved[one.restore_from]
        results = []
        for chunk in plan.chunks:
            tokens = tuple(chunk.sequence.tokens[chunk.start : chunk.start + chunk.length])
            self.num_stored_by_plans += len(tokens)
            piece = self._piece(chunk.sequence, tokens, chunk.start, chunk.is_last)
            if chunk.end_moves:
                self.num_compacted += 1
                tables = tuple(move.sources for move in chunk.end_moves)
                piece = replace(piece, tables=tables, end_moves=chunk.end_moves)
            results.append(device.run_chunk(replace(piece, saves_to=chunk.saves_to)))
        decodes = [self._piece(one) for one in plan.decodes]
        return results + device.run_decodes(decodes, plan.num_steps, plan.tokens_per_step, self.random)

    def _piece(
        self, one: SequenceState, tokens: tuple[int, ...] = (), start: int = 0, is_last: bool = False
    ) -> ScoredChunk:
        assert one.slot is not None
        adapter = one.request.adapter
        wanted = adapter.fingerprint if isinstance(adapter, LoadedAdapter) else ""
        assert self.device.adapters[one.adapter_slot] == wanted, f"{one} runs with the adapter of another"
        must_fail = self.failure_rate > 0 and self.random.random() < self.failure_rate
        tables = tuple(tuple(table) for table in one.tables)
        return ScoredChunk(one, one.slot, tables, tokens, start, is_last, must_fail)

    def _finish(self, sequence: SequenceState) -> None:
        self.num_operations += 1
        self.scheduler.finish(sequence, "stop")
        del self.live[sequence]
