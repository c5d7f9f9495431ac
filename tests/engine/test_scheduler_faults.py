"""Faults planted in the scheduler, the pool and the prefix tree: the checks of random work catch each of them.

Without a fault the same work passes.
"""

from dataclasses import replace

import pytest

from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.pools import PagePools
from jaxinfer.engine.prefix import PrefixMatch, PrefixTree
from jaxinfer.engine.saved_states import SavedStates
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.tiers.host_tier import HostPool, HostTier
from tests.engine.random_work import RandomWork


def forget_copies(monkeypatch):
    schedule = Scheduler.schedule

    def faulty(self, *args, **kwargs):
        plan = schedule(self, *args, **kwargs)
        return plan and replace(plan, copies=[])

    monkeypatch.setattr(Scheduler, "schedule", faulty)


def share_what_is_written(monkeypatch):
    admit = Scheduler._admit

    def faulty(self, sequence, copies):
        is_admitted = admit(self, sequence, copies)
        for group, shared, own in copies:
            pool, table = self.pools.all[group], sequence.tables[group]
            if own in table:
                pool.share([shared])
                pool.release([own])
                table[table.index(own)] = shared
        copies.clear()
        return is_admitted

    monkeypatch.setattr(Scheduler, "_admit", faulty)


def make_the_unconfirmed_known(monkeypatch):
    leave = Scheduler._leave

    def faulty(self, sequence):
        sequence.num_confirmed = min(sequence.num_stored, len(sequence.tokens))
        leave(self, sequence)

    monkeypatch.setattr(Scheduler, "_leave", faulty)


def follow_before_the_prompt_is_stored(monkeypatch):
    monkeypatch.setattr(Scheduler, "_has_prompt", lambda self, one: one.slot is not None)


def release_twice(monkeypatch):
    leave = Scheduler._leave

    def faulty(self, sequence):
        pages = list(sequence.pages)
        leave(self, sequence)
        self.pool.release([page for page in pages if self.pool.num_owners(page)])

    monkeypatch.setattr(Scheduler, "_leave", faulty)


def release_nothing(monkeypatch):
    release = PagePool.release
    monkeypatch.setattr(PagePool, "release", lambda self, pages: release(self, pages[1:]))


def release_beginnings_first(monkeypatch):
    release = PagePool.release
    monkeypatch.setattr(PagePool, "release", lambda self, pages: release(self, list(pages)[::-1]))


def keep_what_was_computed_twice(monkeypatch):
    insert = PrefixTree.insert

    def faulty(self, keys, tables, salt, place):
        return insert(self, keys, [list(table) for table in tables], salt, place)

    monkeypatch.setattr(PrefixTree, "insert", faulty)


def ignore_salts(monkeypatch):
    walk, insert = PrefixTree._walk, PrefixTree.insert
    monkeypatch.setattr(PrefixTree, "_walk", lambda self, keys, salt: walk(self, keys, ""))
    monkeypatch.setattr(PrefixTree, "insert", lambda self, keys, pages, _, place: insert(self, keys, pages, "", place))


def match_without_owning(monkeypatch):
    def faulty(self, keys, salt=""):
        nodes = self._walk(keys, salt)
        return PrefixMatch([[node.pages[group] for node in nodes] for group in range(len(self._groups))])

    monkeypatch.setattr(PrefixTree, "match", faulty)


def preempt_the_first(monkeypatch):
    preempt = Scheduler.preempt
    monkeypatch.setattr(
        Scheduler, "preempt", lambda self, _: preempt(self, min(self.running, key=lambda one: one.rank))
    )


def preempt_while_results_are_coming(monkeypatch):
    schedule = Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda self, *_, **__: schedule(self))


def store_a_page_too_few(monkeypatch):
    give_room = Scheduler._allocate_pages
    monkeypatch.setattr(Scheduler, "_allocate_pages", lambda self, decodes, steps: give_room(self, decodes, steps - 1))


def keep_the_slot(monkeypatch):
    monkeypatch.setattr(
        Scheduler, "_plan_moves", lambda self, decodes: [(one.slot, one.slot + 1) for one in decodes[:1]]
    )


def give_back_a_token_early(monkeypatch):
    release_behind = PagePools.release_behind

    def faulty(self, sequence, prefixes):
        sequence.num_confirmed += 1
        release_behind(self, sequence, prefixes)
        sequence.num_confirmed -= 1

    monkeypatch.setattr(PagePools, "release_behind", faulty)
    monkeypatch.setattr(PagePools, "has_behind", lambda self, sequence: True)


def give_back_what_is_planned(monkeypatch):
    """By what is stored once everything planned has run, which speculation takes back."""

    def release(self, sequence, prefixes):
        confirmed, sequence.num_confirmed = sequence.num_confirmed, min(sequence.num_reserved, sequence.num_storable)
        release_behind(self, sequence, prefixes)
        sequence.num_confirmed = confirmed

    release_behind = PagePools.release_behind
    monkeypatch.setattr(PagePools, "release_behind", release)


def never_give_back(monkeypatch):
    monkeypatch.setattr(PagePools, "release_behind", lambda self, sequence, prefixes: None)


def match_without_the_last_window(monkeypatch):
    """The longest path of the tree, whether or not the pages of the last window are still there."""

    def walk(self, keys, salt):
        node, found = self._roots.get(salt), []
        for key in keys if node is not None else ():
            node = node.children.get(key)
            if node is None or any(node.pages[group] == 0 for group in self._full):
                break
            found.append(node)
        return found

    def match(self, keys, salt=""):
        nodes, tables = self._walk(keys, salt), []
        for index, (group, pool) in enumerate(zip(self._groups, self._pools, strict=True)):
            first = group.first_needed(len(nodes) * self._page_size, self._page_size)
            pages = [node.pages[index] or 1 for node in nodes[first:]]
            pool.share([page for page in pages if pool.num_owners(page) or page in pool._idle])
            tables.append([0] * min(first, len(nodes)) + pages)
        return PrefixMatch(tables)

    monkeypatch.setattr(PrefixTree, "_walk", walk)
    monkeypatch.setattr(PrefixTree, "match", match)


def copy_in_the_first_group_only(monkeypatch):
    schedule = Scheduler.schedule

    def faulty(self, *args, **kwargs):
        plan = schedule(self, *args, **kwargs)
        return plan and replace(plan, copies=[one for one in plan.copies if one.group == 0])

    monkeypatch.setattr(Scheduler, "schedule", faulty)


def share_a_window_that_is_beyond(monkeypatch):
    """A leader that has slid on shares what it has left."""

    def share(self, sequence, num_tokens):
        first_needed, end = self.first_needed(num_tokens), self.pages_for(num_tokens)
        tables = []
        for pool, table, first in zip(self.all, sequence.tables, first_needed, strict=True):
            pages = [page or 1 for page in table[first:end]]
            pool.share([page for page in pages if pool.num_owners(page) or page in pool._idle])
            tables.append([0] * first + pages)
        return tables

    monkeypatch.setattr(PagePools, "share_beginning", share)


FAULTS = [
    forget_copies,
    share_what_is_written,
    make_the_unconfirmed_known,
    follow_before_the_prompt_is_stored,
    release_twice,
    release_nothing,
    release_beginnings_first,
    keep_what_was_computed_twice,
    ignore_salts,
    match_without_owning,
    preempt_the_first,
    preempt_while_results_are_coming,
    store_a_page_too_few,
    keep_the_slot,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)) as caught:
        work(20)
    print(f"{caught.value!r}"[:120])


def work(num_seeds: int, has_windows: bool = False) -> None:
    for seed in range(num_seeds):
        RandomWork(seed, has_windows=has_windows).run(500)


@pytest.mark.slow
@pytest.mark.parametrize("has_windows", [False, True])
def test_without_a_fault_nothing_is_raised(has_windows):
    work(20, has_windows)


WINDOW_FAULTS = [
    give_back_a_token_early,
    give_back_what_is_planned,
    never_give_back,
    match_without_the_last_window,
    copy_in_the_first_group_only,
    share_a_window_that_is_beyond,
]


@pytest.mark.parametrize("plant", WINDOW_FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_of_windows_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    # Only what the device reads may tell: the checks of the scheduler know the rule themselves.
    monkeypatch.setattr(Scheduler, "check", lambda self: None)
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)) as caught:
        work(40, has_windows=True)
    print(f"{caught.value!r}"[:120])


def bring_nothing_back(monkeypatch):
    monkeypatch.setattr(HostTier, "move_back", lambda self, group, page, host: self.unpin(group, host))


def bring_back_one_place_wrong(monkeypatch):
    move_back = HostTier.move_back

    def faulty(self, group, page, host):
        other = next((one for one in self.pools[group]._on_evict if one != host), host)
        self.unpin(group, host)
        self.pin(group, other)
        move_back(self, group, page, other)

    monkeypatch.setattr(HostTier, "move_back", faulty)


def copy_after_the_page_is_overwritten(monkeypatch):
    """The moves of one plan are made with the next."""
    take_moves, late = HostTier.take_moves, {}

    def faulty(self):
        leaving, coming = take_moves(self)
        before, late[self] = late.get(self, []), leaving
        return before, coming

    monkeypatch.setattr(HostTier, "take_moves", faulty)


def give_away_what_is_wanted_back(monkeypatch):
    monkeypatch.setattr(HostPool, "pin", lambda self, page, count: None)


def free_a_place_before_it_is_restored(monkeypatch):
    init = SavedStates.__init__
    monkeypatch.setattr(
        SavedStates, "__init__", lambda self, *states, holds_restored: init(self, *states, holds_restored=False)
    )


HOST_FAULTS = [
    bring_nothing_back,
    bring_back_one_place_wrong,
    copy_after_the_page_is_overwritten,
    give_away_what_is_wanted_back,
    free_a_place_before_it_is_restored,
]


@pytest.mark.slow
@pytest.mark.parametrize("plant", HOST_FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_of_host_pages_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)) as caught:
        work_with_host_pages(120)
    print(f"{caught.value!r}"[:120])


def work_with_host_pages(num_seeds: int) -> None:
    for seed in range(num_seeds):
        RandomWork(seed, has_states=seed % 2 == 1, has_windows=seed % 4 > 1, has_host=True).run(500)


@pytest.mark.slow
def test_without_a_fault_of_host_pages_nothing_is_raised():
    work_with_host_pages(20)
