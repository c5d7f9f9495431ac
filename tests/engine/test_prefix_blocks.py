"""The cached blocks that other programs are told of, against the prefix tree: an index that only hears events."""

import random
from collections.abc import Sequence

import pytest

from jaxinfer.engine.pages import PagePool
from jaxinfer.engine.prefix import PrefixNode
from jaxinfer.engine.prefix_blocks import BlockCame, BlocksCleared, BlockWent, PrefixBlocks
from jaxinfer.engine.scheduler import Scheduler, SchedulerOptions
from tests.engine.random_work import RandomWork
from tests.engine.sequences import make_sequence
from tests.engine.test_prefix import single_tree

Path = tuple[str, tuple[bytes, ...]]


class Index:
    """An index as a router makes it of events: the texts that are cached, by hash; it knows no tree and no page."""

    def __init__(self):
        self.paths: dict[int, Path] = {}
        self.media: dict[int, set[bool]] = {}
        self.num_events = self.num_cleared = self.num_on_host = 0

    def __call__(self, events) -> None:
        for event in events:
            self.take(event)

    def take(self, event) -> None:
        self.num_events += 1
        if isinstance(event, BlocksCleared):
            self.num_cleared += 1
            self.paths, self.media = {}, {}
        elif isinstance(event, BlockWent):
            media = self.media[event.hash]
            media.remove(event.is_on_host)
            if not media:
                del self.media[event.hash], self.paths[event.hash]
        else:
            self.num_on_host += event.is_on_host
            salt, before = (event.salt, ()) if event.parent is None else self.paths[event.parent]
            assert salt == event.salt
            path = salt, (*before, event.key)
            assert self.paths.setdefault(event.hash, path) == path
            assert event.is_on_host not in self.media.setdefault(event.hash, set())
            self.media[event.hash].add(event.is_on_host)

    def view(self) -> dict[Path, set[bool]]:
        assert len(set(self.paths.values())) == len(self.paths)
        return {self.paths[hash]: media for hash, media in self.media.items()}


def truth(scheduler: Scheduler) -> dict[Path, set[bool]]:
    """The texts that the tree has, and whether on the device (False) or in host memory (True)."""
    tree, found = scheduler.prefixes, {}
    full = tree.full_groups
    nodes: list[tuple[PrefixNode, Path]] = [(root, (salt, ())) for salt, root in tree._roots.items()]
    while nodes:
        node, (salt, keys) = nodes.pop()
        nodes += [(child, (salt, (*keys, key))) for key, child in node.children.items()]
        media = {False} if all(node.pages[group] for group in full) else set()
        if all(node.has(group) for group in full) and any(node.hosts[group] for group in full):
            media.add(True)
        if media and keys:
            found[salt, keys] = media
    return found


def run_random_work(seeds: Sequence[int], num_operations: int, **kinds: bool) -> int:
    """So many operations, less those of work without blocks; after each step the index has what the tree has. Returns
    their number."""
    done = events = cleared = on_host = retained = checks = most = 0
    for seed in seeds:
        work, chance = RandomWork(seed, **kinds), random.Random(seed)
        engine, index = work.engine, Index()
        scheduler = engine.scheduler
        if not (scheduler.options.reuses_prefixes and scheduler.prefixes.full_groups):
            continue
        blocks = scheduler.observe_blocks(index)
        start = engine.num_operations
        while engine.num_operations - start < num_operations // len(seeds):
            for _ in range(chance.choice([3, 40])):
                work.step()
                view = index.view()
                assert view == truth(scheduler)
                checks, most = checks + 1, max(most, len(view))
            if chance.random() < 0.3:
                while engine.in_flight:
                    engine.deliver()
                retained += len(scheduler.running)
                scheduler.drop_prefixes()
                assert index.view() == {}
            if chance.random() < 0.5:
                engine.drain()
            again = Index()  # one that begins now
            again(blocks.all())
            assert again.view() == index.view() == truth(scheduler)
        done += engine.num_operations - start
        events, cleared, on_host = events + index.num_events, cleared + index.num_cleared, on_host + index.num_on_host
    assert min(events, cleared, most, retained) > 0
    assert (on_host > 0) == kinds.get("has_host", False)
    print(f"{done} operations, {events} events, {checks} comparisons of up to {most} blocks: all equal")
    return done


def test_an_index_that_hears_events_has_what_the_tree_has():
    run_random_work(range(6), 2000, has_host=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [(), ("has_host",), ("has_windows", "has_host"), ("has_states", "has_host"), ("has_budgets",)],
    ids=" and ".join,
)
def test_an_index_has_what_the_tree_has_after_many_operations(kinds):
    assert run_random_work(range(40), 200_000, **dict.fromkeys(kinds, True)) >= 100_000


# Examples.


def test_blocks_of_two_salts_are_two_chains():
    pool, events = PagePool(9), []
    tree = single_tree(pool)
    tree.observer = PrefixBlocks(tree.full_groups, events.extend)
    for salt in ("", "tenant"):
        pages = pool.allocate(2)
        tree.insert([b"a", b"b"], [pages], salt)
        pool.release(pages)
    plain, after, other, last = events
    assert [event.parent for event in events] == [None, plain.hash, None, other.hash]
    assert len({event.hash for event in events}) == 4
    assert (plain.key, plain.salt, other.key, other.salt) == (b"a", "", b"a", "tenant")
    pool.drop_idle()
    assert events[4:] == [BlockWent(event.hash, False) for event in (after, plain, last, other)]


def test_pages_that_a_running_sequence_keeps_are_told_of_no_more():
    pool, events = PagePool(9), []
    tree = single_tree(pool)
    tree.observer = PrefixBlocks(tree.full_groups, events.extend)
    tree.insert([b"a"], [pages := pool.allocate(1)])
    tree.hide()
    pool.release(pages)
    pool.drop_idle()
    assert [type(event) for event in events] == [BlockCame, BlocksCleared]


def test_what_was_cached_before_is_told_of_and_what_cannot_be_is_refused():
    options = SchedulerOptions(num_pages=9, page_size=2, max_seqs=1, prefill_chunk=8)
    scheduler, events = Scheduler(options), []
    scheduler.add(sequence := make_sequence([1, 2, 3, 4, 5], 2))
    scheduler.schedule()
    scheduler.confirm(sequence, 5)
    scheduler.observe_blocks(events.extend)
    assert [event.key for event in events] == [sequence.keys(2, 4)[0], sequence.keys(2, 4)[1]]
    for changes, message in (({"reuses_prefixes": False}, "no prefixes"), ({"window": 4}, "all layers have windows")):
        with pytest.raises(ValueError, match=message):
            Scheduler(SchedulerOptions(9, 2, 1, 8, **changes)).observe_blocks(events.extend)
