"""The pool against a model: a dictionary of owners, and a list of what is idle, the longest first."""

import random
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.engine.pages import NULL_PAGE, OutOfPagesError, PagePool


class Pool(RuleBasedStateMachine):
    """Tables of pages, as sequences hold them, allocated, shared, kept and released in any order."""

    @initialize(num_pages=st.integers(2, 12), shuffle_seed=st.none() | st.integers(0, 9))
    def start(self, num_pages, shuffle_seed):
        self.pool = PagePool(num_pages, shuffle_seed)
        self.owners = dict.fromkeys(range(1, num_pages), 0)
        self.idle: list[int] = []
        self.kept: set[int] = set()
        self.forgotten: list[int] = []
        self.tables: list[list[int]] = []
        self.num_evictions = 0

    def forget(self, page: int) -> None:
        assert page == self.idle.pop(0), "not the longest idle"
        self.kept.remove(page)
        self.num_evictions += 1

    @rule(count=st.integers(0, 13))
    def allocate(self, count):
        num_free = sum(self.owners[page] == 0 and page not in self.kept for page in self.owners)
        num_available = num_free + len(self.idle)
        if count > num_available:
            with pytest.raises(OutOfPagesError, match=f"{count} pages needed, {num_available} of"):
                self.pool.allocate(count)
            return
        num_idle = len(self.idle)
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert num_idle - len(self.idle) == max(0, count - num_free), (
            "what is idle is given away only when none is free"
        )
        assert all(self.owners[page] == 0 and page not in self.kept for page in pages)
        self.owners.update(dict.fromkeys(pages, 1))
        self.tables.append(pages)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data):
        table = data.draw(st.sampled_from(self.tables))
        self.add_owner(table[: data.draw(st.integers(0, len(table)))])

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def wake(self, data):
        self.add_owner(data.draw(st.lists(st.sampled_from(self.idle), unique=True)))

    def add_owner(self, pages):
        self.pool.share(pages)
        for page in pages:
            self.owners[page] += 1
        self.idle = [page for page in self.idle if page not in pages]
        self.tables.append(list(pages))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        for page in reversed(table):
            self.owners[page] -= 1
            if self.owners[page] == 0 and page in self.kept:
                self.idle.append(page)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def keep(self, data):
        page = data.draw(st.sampled_from([page for table in self.tables for page in table]))
        if page in self.kept:
            with pytest.raises(ValueError, match=f"page {page} is kept"):
                self.pool.keep(page, lambda: None)
        else:
            self.pool.keep(page, lambda: self.forget(page))
            self.kept.add(page)

    @rule()
    def drop_idle(self):
        count = len(self.idle)
        assert self.pool.drop_idle() == count
        assert not self.idle

    @invariant()
    def agrees_with_the_model(self):
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check(self.tables)
        assert {page: pool.num_owners(page) for page in self.owners} == self.owners
        assert {page for page in self.owners if pool.is_kept(page)} == self.kept
        assert pool.num_owned == sum(count > 0 for count in self.owners.values())
        assert pool.num_available == pool.num_pages - 1 - pool.num_owned
        assert pool.num_idle == len(self.idle)
        assert pool.num_evictions == self.num_evictions


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# Examples.


def test_pages_come_in_order_and_the_null_page_never():
    assert PagePool(5).allocate(4) == [1, 2, 3, 4]
    assert sorted(PagePool(5, shuffle_seed=1).allocate(4)) == [1, 2, 3, 4]
    assert PagePool(100, shuffle_seed=1).allocate(9) != PagePool(100, shuffle_seed=2).allocate(9)


def test_pages_allocated_together_are_consecutive_where_such_are_free():
    pool = PagePool(10)
    tables = [pool.allocate(count) for count in (2, 3, 2)]
    pool.release(tables[0])
    pool.release(tables[1])
    assert pool.allocate(1) == [1]
    assert pool.allocate(3) == [2, 3, 4]
    pool.release(tables[2])
    pool.release([3])
    assert pool.allocate(4) == [5, 6, 7, 8]
    assert pool.allocate(2) == [3, 9], "the lowest, where none are consecutive"


def test_idle_pages_that_are_given_away_come_in_order():
    pool = PagePool(6)
    table = pool.allocate(3)
    for page in table:
        pool.keep(page, lambda: None)
    pool.release(table)
    assert pool.allocate(5) == [1, 2, 3, 4, 5]


def test_most_pages_stay_consecutive_while_sequences_come_and_go():
    """32 slots for 3,000 steps: prompts of 1 to 16 pages, answers that take one more each 16 steps. Pages taken in the
    order in which they came back are never consecutive here, the lowest ones in one case of seven."""
    numbers, pool = random.Random(0), PagePool(769)
    tables, steps = [[] for _ in range(32)], [0] * 32
    for step in range(3000):
        for slot, table in enumerate(tables):
            if steps[slot] == 0:
                pool.release(table)
                tables[slot], steps[slot] = pool.allocate(numbers.randint(1, 16)), numbers.randint(32, 128)
            elif (step + slot) % 16 == 0:
                table += pool.allocate(1)
            steps[slot] -= 1
    pairs = [pair for table in tables for pair in pairwise(table)]
    assert sum(after == before + 1 for before, after in pairs) > 0.6 * len(pairs)


def test_the_longest_idle_goes_first_and_ends_before_beginnings():
    pool, gone = PagePool(5), []
    tables = [pool.allocate(2), pool.allocate(2)]
    for table in tables:
        for page in table:
            pool.keep(page, lambda page=page: gone.append(page))
    pool.release(tables[1])
    pool.release(tables[0])
    pool.allocate(3)
    assert gone == [4, 3, 2]


def test_too_few_pages_take_none():
    pool = PagePool(4)
    pool.allocate(1)
    with pytest.raises(OutOfPagesError, match="3 pages needed, 2 of 3 available"):
        pool.allocate(3)
    assert pool.num_available == 2


def test_a_pool_of_the_null_page_alone_is_refused():
    with pytest.raises(ValueError, match="num_pages=1"):
        PagePool(1)


@pytest.mark.parametrize("page", [NULL_PAGE, 1])
def test_nobodys_page_cannot_be_shared_released_or_kept(page):
    pool = PagePool(3)
    with pytest.raises(ValueError, match=f"page {page} is shared"):
        pool.share([page])
    with pytest.raises(ValueError, match=f"page {page} is released"):
        pool.release([page])
    with pytest.raises(ValueError, match=f"page {page} is kept"):
        pool.keep(page, lambda: None)


# Planted faults.


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pool: pool._owners.__setitem__(1, 2), "page 1 has 1 owners, the pool counts 2"),
        (lambda pool: pool._free.append(1), "while it is owned"),
        (lambda pool: pool._free.append(4), "free or idle twice"),
        (lambda pool: pool._free.append(NULL_PAGE), "null page"),
        (lambda pool: pool._free.clear(), "5 pages, but"),
        (lambda pool: pool._on_evict.pop(3), "idle page is not kept"),
        (lambda pool: pool._on_evict.update({4: print}), "a free one is kept"),
    ],
)
def test_check_sees_what_is_spoilt(spoil, message):
    pool = PagePool(6)
    owned, idle = pool.allocate(2), pool.allocate(1)
    pool.keep(*idle, lambda: None)
    pool.release(idle)
    pool.check([owned])
    spoil(pool)
    with pytest.raises(RuntimeError, match=message):
        pool.check([owned])


@pytest.mark.parametrize("tables", [[], [[1]], [[1, 2], [2]], [[1, 2, 2]], [[1, 2], [3]]])
def test_check_sees_tables_that_are_not_the_owners(tables):
    pool = PagePool(6)
    pool.allocate(2)
    with pytest.raises(RuntimeError):
        pool.check(tables)
