"""Faults planted in the scheduler, the pool and the prefix tree: the checks of random work catch each of them.

Without a fault the same work passes.
"""

from dataclasses import replace

import pytest

from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.prefix import PrefixTree
from jaxinfer.engine.scheduler import Scheduler
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
        for shared, own in copies:
            if own in sequence.pages:
                self.pool.share([shared])
                self.pool.release([own])
                sequence.pages[sequence.pages.index(own)] = shared
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
    monkeypatch.setattr(PrefixTree, "insert", lambda self, keys, pages, salt: insert(self, keys, list(pages), salt))


def ignore_salts(monkeypatch):
    walk, insert = PrefixTree._walk, PrefixTree.insert
    monkeypatch.setattr(PrefixTree, "_walk", lambda self, keys, salt: walk(self, keys, ""))
    monkeypatch.setattr(PrefixTree, "insert", lambda self, keys, pages, salt: insert(self, keys, pages, ""))


def match_without_owning(monkeypatch):
    monkeypatch.setattr(PrefixTree, "match", lambda self, keys, salt="": [node.page for node in self._walk(keys, salt)])


def preempt_the_first(monkeypatch):
    preempt = Scheduler._preempt
    monkeypatch.setattr(
        Scheduler, "_preempt", lambda self, _: preempt(self, min(self.running, key=lambda one: one.rank))
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


def work(num_seeds: int) -> None:
    for seed in range(num_seeds):
        RandomWork(seed).run(500)


def test_without_a_fault_nothing_is_raised():
    work(20)
