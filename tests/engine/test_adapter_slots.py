"""Which adapter is in which slot: a model of what may happen, under random operations, and examples of choices."""

import random
import sys
import threading

import pytest

from jaxinfer.engine.adapter_slots import AdapterSlots, LoadedAdapter


def loaded(name: str, fingerprint: str | None = None, **more) -> LoadedAdapter:
    return LoadedAdapter(name, name if fingerprint is None else fingerprint, None, **more)


def filled(*adapters: LoadedAdapter, num_slots: int | None = None) -> AdapterSlots:
    """Slots in which these adapters are, none of which runs; the first is the least recently used one."""
    slots = AdapterSlots(num_slots or len(adapters))
    for adapter in adapters:
        use(slots, adapter)
    return slots


def use(slots: AdapterSlots, adapter: LoadedAdapter) -> tuple[int, bool] | None:
    """A sequence that runs and ends."""
    if (taken := slots.take(adapter)) is not None:
        slots.give_back(taken[0])
    return taken


def names(slots: AdapterSlots) -> list[str]:
    return [adapter.name for adapter in slots.resident]


class RandomSlots:
    """Operations on slots, and what must hold: `written` is what the device has in each slot."""

    def __init__(self, seed: int):
        self.random = rng = random.Random(seed)
        self.slots = AdapterSlots(rng.choice([1, 2, 3, 8]))
        self.written: dict[int, str] = {}
        self.running: list[tuple[int, LoadedAdapter]] = []
        self.adapters = [self.new(number) for number in range(rng.choice([2, 5, 20]))]
        self.counts = dict.fromkeys(("hit", "moved", "refused", "prefetched", "evicted pinned", "freed"), 0)

    def new(self, number: int) -> LoadedAdapter:
        """Some have the tensors of another one."""
        is_twin = self.random.random() < 0.2 and number
        fingerprint = str(self.random.randrange(number)) if is_twin else f"{number}"
        return loaded(f"a{number}", fingerprint, is_pinned=self.random.random() < 0.2)

    def step(self, number: int) -> None:
        action = self.random.choice([self.take, self.take, self.end, self.end, self.prefetch, self.unload])
        before = {adapter.fingerprint for adapter in self.slots.running}
        residents = self.slots.resident
        action(number)
        # An adapter that runs is not evicted, and each is where the device has it.
        assert before <= {one.fingerprint for one in self.slots.resident} or action == self.end
        for slot, adapter in self.running:
            assert self.slots.slot_of(adapter) == slot
            assert self.written[slot] == adapter.fingerprint
        assert len({adapter.fingerprint for _, adapter in self.running}) <= self.slots.num_slots
        assert len(self.slots.resident) <= self.slots.num_slots
        gone = [one for one in residents if self.slots.slot_of(one) is None and one.is_pinned and not one.is_unloaded]
        if gone:  # only where all had pinned ones
            assert all(one.is_pinned and not one.is_unloaded for one in residents)
            assert len(residents) == self.slots.num_slots
            self.counts["evicted pinned"] += 1
        self.slots.check(self.running)

    def take(self, number: int) -> None:
        adapter, can_take = self.random.choice(self.adapters), None
        expected = self.expected_slot(adapter, ())
        can_take = self.slots.can_take(adapter)
        taken = self.slots.take(adapter)
        assert can_take == (taken is not None) == (expected is not None)
        if taken is None:
            self.counts["refused"] += 1
            return
        slot, is_new = taken
        assert slot == expected
        assert is_new == (self.written.get(slot) != adapter.fingerprint) or is_new
        if is_new:
            self.written[slot] = adapter.fingerprint
        self.counts["moved" if is_new else "hit"] += 1
        self.running.append((slot, adapter))

    def expected_slot(self, adapter: LoadedAdapter, needed: tuple[LoadedAdapter, ...]) -> int | None:
        """Its own slot, any free one, or that of the one that was used least recently."""
        slots, resident = self.slots, self.slots.resident
        if (slot := slots.slot_of(adapter)) is not None:
            return slot
        if len(resident) < slots.num_slots:
            return slots._free[-1]
        running = {one.fingerprint for _, one in self.running}
        kept = running | {one.fingerprint for one in needed}
        idle = [one for one in resident if one.fingerprint not in kept]
        free = [one for one in idle if not one.is_pinned or one.is_unloaded]
        if not free and not needed and all(one.is_pinned and not one.is_unloaded for one in resident):
            free = idle
        return slots.slot_of(free[0]) if free else None

    def end(self, number: int) -> None:
        if self.running:
            slot, adapter = self.running.pop(self.random.randrange(len(self.running)))
            others = [one for _, one in self.running if one.fingerprint == adapter.fingerprint]
            self.slots.give_back(slot)
            if adapter.is_unloaded and not others and adapter not in self.slots.resident:
                self.counts["freed"] += 1

    def prefetch(self, number: int) -> None:
        waiting = self.random.choices(self.adapters, k=self.random.randint(1, 4))
        resident = {one.fingerprint for one in self.slots.resident}
        expected = self.expected_slot(waiting[-1], tuple(waiting))
        slot = self.slots.prefetch(waiting[-1], waiting)
        if slot is not None:
            assert slot == expected
            self.written[slot] = waiting[-1].fingerprint
            self.counts["prefetched"] += 1
            for one in waiting:  # none of those before lost its slot
                assert one.fingerprint not in resident or self.slots.slot_of(one) is not None

    def unload(self, number: int) -> None:
        if self.random.random() < 0.3:
            place = self.random.randrange(len(self.adapters))
            old, self.adapters[place] = self.adapters[place], self.new(1000 + number)
            old.is_unloaded = True
            self.slots.forget(old)
            is_running = any(one.fingerprint == old.fingerprint for _, one in self.running)
            assert is_running or old not in self.slots.resident


def test_random_operations_keep_adapters_apart():
    counts: dict[str, int] = {}
    for seed in range(60):
        work = RandomSlots(seed)
        for number in range(300):
            work.step(number)
        while work.running:
            work.end(0)
        assert not any(one.is_unloaded for one in work.slots.resident), "an adapter that was unloaded has a slot"
        work.slots.check([])
        counts = {name: counts.get(name, 0) + count for name, count in work.counts.items()}
    assert min(counts.values()) > 0, counts


def test_the_least_recently_used_one_makes_room():
    a, b, c, d = (loaded(name) for name in "abcd")
    slots = filled(a, b, c)
    use(slots, a)  # found where it is
    assert slots.num_moved == 3
    use(slots, d)
    assert names(slots) == ["c", "a", "d"]
    assert slots.num_moved == 4


def test_what_runs_stays():
    a, b, c = (loaded(name) for name in "abc")
    slots = filled(a, b)
    slot, is_new = slots.take(a) or (0, True)
    assert not is_new
    use(slots, c)
    use(slots, b)
    assert slots.slot_of(a) == slot
    slots.take(b)
    assert not slots.can_take(c)
    assert slots.take(c) is None
    assert slots.prefetch(c, [c]) is None


def test_pinned_ones_stay_unless_all_are():
    pinned, other, third = loaded("p", is_pinned=True), loaded("a"), loaded("b")
    slots = filled(pinned, other)
    use(slots, third)
    assert names(slots) == ["p", "b"]
    more = loaded("q", is_pinned=True)
    use(slots, more)
    assert slots.prefetch(other, [other]) is None  # nothing is moved ahead in their place
    assert use(slots, other) is not None  # but a request does not wait for ever
    assert names(slots) == ["q", "a"]


def test_an_unloaded_one_frees_its_slot_with_its_last_sequence():
    a, b = loaded("a", is_pinned=True), loaded("b")
    slots = filled(a, b)
    slots.take(a)
    slots.take(a)
    a.is_unloaded = True
    slots.forget(a)
    slots.give_back(1)
    assert names(slots) == ["b", "a"]
    slots.give_back(1)
    assert names(slots) == ["b"]
    slots.check([])


def test_the_same_tensors_under_two_names_share_a_slot_and_outlive_one_of_them():
    first, second = loaded("a", "x"), loaded("b", "x", is_pinned=True)
    slots = filled(first, second, num_slots=2)
    assert slots.num_moved == 1
    first.is_unloaded = True
    slots.forget(first)
    assert names(slots) == ["b"]
    use(slots, loaded("c"))
    use(slots, loaded("d"))
    assert names(slots) == ["b", "d"]  # pinned, as the one that is still loaded is


def test_moving_ahead_keeps_what_is_needed_before():
    a, b, c = (loaded(name) for name in "abc")
    slots = filled(a, b)
    assert slots.prefetch(c, [a, b, c]) is None
    assert slots.prefetch(c, [a, c]) == slots.slot_of(c)
    assert names(slots) == ["a", "c"]
    assert slots.prefetch(c, [c]) is None  # it is there


def test_other_threads_unload_while_the_scheduler_looks():
    slots, is_over, errors = AdapterSlots(4), threading.Event(), []
    adapters = [loaded(str(number)) for number in range(40)]

    def unload() -> None:
        try:
            while not is_over.is_set():
                for adapter in adapters:
                    adapter.is_unloaded = True
                    slots.forget(adapter)
                    adapter.is_unloaded = False
        except BaseException as error:
            errors.append(error)

    thread, interval = threading.Thread(target=unload), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for number in range(4000):
            adapter = adapters[number % 40]
            slots.can_take(adapter)
            slots.prefetch(adapter, [adapter])
            use(slots, adapters[(7 * number) % 40])
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not errors
    slots.check([])


@pytest.mark.parametrize(
    ("running", "message"),
    [
        ([(1, loaded("a"))], "are counted as {}"),
        ([], "are counted as {2: 1}"),
        ([(2, loaded("a"))], "'a' runs in slot 2, and is in 1"),
    ],
)
def test_check_finds_what_does_not_agree(running, message):
    slots = filled(loaded("a"), loaded("b"))
    if "{}" not in message:
        slots.take(loaded("b"))
    with pytest.raises(RuntimeError, match=message.replace("{", "\\{")):
        slots.check(running)


def test_an_adapter_that_was_not_written_is_written_next():
    a, b = loaded("a"), loaded("b")
    slots = filled(a)
    slots.lost(1)
    assert slots.take(a) == (1, True)
    assert slots.take(a) == (1, False)
    for _ in range(2):
        slots.give_back(1)
    slots.lost(1)
    assert slots.take(b) == (1, True)  # its own write
    assert slots.take(b) == (1, False)
    slots.lost(2)  # of no adapter


def test_a_slot_that_was_promised_is_given():
    """Between the two calls another thread unloads the running one, without which not all have to stay."""
    running, idle, third = loaded("r", is_pinned=True), loaded("i", is_pinned=True), loaded("t")
    slots = filled(running, idle)
    slots.take(running)
    assert slots.can_take(third)
    running.is_unloaded = True
    slots.forget(running)
    assert slots.take(third) is None
    assert slots.take(third, is_promised=True) == (2, True)
