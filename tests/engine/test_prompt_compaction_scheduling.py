"""Compaction of prompts on the scheduler's fake device: one answer whatever the pool and the luck, and planted faults.

The device decides what stays by the numbers that it stores, so a page that is released early, shared or known, or a
prompt that is compacted at another place, changes an answer.
"""

import pytest

from jaxinfer.engine.prompt_ends import PromptEnds
from tests.engine.random_work import RandomWork


def run_random_work(seeds: range, num_operations: int) -> None:
    """At least `num_operations` in all, of which enough compact a prompt."""
    done = compacted = preemptions = reused = failed = back = 0
    for seed in seeds:
        work = RandomWork(seed, has_budgets=True, has_host=seed % 3 == 0)
        engine = work.run(num_operations // len(seeds))
        done += engine.num_operations
        compacted += engine.num_compacted
        preemptions += engine.scheduler.counters.num_preemptions
        reused += engine.scheduler.counters.reused_tokens
        failed += engine.num_failed
        back += engine.num_back
    assert done >= num_operations
    assert compacted > num_operations / 200
    assert min(preemptions, reused, failed, back) > 0


def test_random_work_gives_one_answer():
    run_random_work(range(60), 20_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(4))
def test_a_million_operations_give_one_answer(part):
    run_random_work(range(1000 + 100 * part, 1100 + 100 * part), 250_000)


def let_compacted_pages_be_found(monkeypatch):
    def faulty(self, sequence):
        old = sequence.prompt_tables or [[] for _ in sequence.tables]
        return [one or table for one, table in zip(old, sequence.tables, strict=True)]

    monkeypatch.setattr(PromptEnds, "known_tables", faulty)


def reuse_tokens_whose_queries_are_needed(monkeypatch):
    monkeypatch.setattr(PromptEnds, "num_shareable", lambda self, sequence: len(sequence.tokens) - 1)


def compact_one_position_early(monkeypatch):
    next_stop = PromptEnds.next_stop
    monkeypatch.setattr(
        PromptEnds, "next_stop", lambda self, one: next_stop(self, one) - self.is_due(one) * (one.num_prompt > 5)
    )


def never_give_back_the_prompt(monkeypatch):
    monkeypatch.setattr(PromptEnds, "finish", lambda self, sequence: sequence.prompt_tables.clear())


def give_back_the_prompt_at_once(monkeypatch):
    start = PromptEnds.start

    def faulty(self, sequence):
        moves = start(self, sequence)
        self.finish(sequence)
        return moves

    monkeypatch.setattr(PromptEnds, "start", faulty)


def count_pages_once(monkeypatch):
    monkeypatch.setattr(PromptEnds, "num_fresh", lambda self, sequence, group: 0)


FAULTS = [
    let_compacted_pages_be_found,
    reuse_tokens_whose_queries_are_needed,
    compact_one_position_early,
    never_give_back_the_prompt,
    give_back_the_prompt_at_once,
    count_pages_once,
]


def work(num_seeds: int) -> None:
    for seed in range(num_seeds):
        RandomWork(seed, has_budgets=True).run(500)


@pytest.mark.matrix
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)) as caught:
        work(60)
    print(f"{caught.value!r}"[:120])
