"""Random pools and random requests, from a seed: they drive a fake engine much faster than hypothesis does."""

import random
from dataclasses import replace
from typing import Any

from jaxinfer.engine.cache_groups import CacheGroup, most_pages
from jaxinfer.engine.scheduler import SchedulerOptions
from jaxinfer.engine.tiers.host_tier import HostPoolSize
from tests.engine.fake_device import VOCAB, Engine, FakeEnd


class RandomWork:
    """An engine and what its users do. Half of the engines are thrashed: they admit more than their pages can bear."""

    def __init__(
        self,
        seed: int,
        abort_rate: float = 0.02,
        has_windows: bool = False,
        has_states: bool = False,
        has_host: bool = False,
        has_budgets: bool = False,
    ):
        self.random = rng = random.Random(seed)
        self.abort_rate = abort_rate
        self.num_aborts = 0
        self.is_thrashed = rng.random() < 0.5
        self.beginnings = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
        self.num_live_wanted = rng.choice([2, 8, 30])
        options = SchedulerOptions(
            num_pages=rng.choice([6, 9, 14, 24, 40] if self.is_thrashed else [3, 4, 6, 9, 14, 24, 60, 200]),
            page_size=rng.choice([1, 2, 4] if self.is_thrashed else [1, 2, 3, 4, 8, 16]),
            max_seqs=rng.choice([3, 8, 16] if self.is_thrashed else [1, 2, 3, 4, 8, 16]),
            prefill_chunk=rng.choice([1, 2, 3, 5, 8, 16, 64]),
            steps_per_dispatch=rng.choice([1, 1, 2, 3, 8]),
            max_waiting=rng.choice([None, None, 1, 3]),
            reuses_prefixes=rng.random() < 0.9,
            shuffle_seed=rng.choice([None, rng.randrange(1000)]),
        )
        options = with_windows(options, rng) if has_windows else options
        options = with_states(options, rng) if has_states else options
        options = with_budgets(options, rng) if has_budgets else options
        options = with_host(options, rng) if has_host else options
        self.engine = Engine(
            options,
            slot_buckets=rng.choice([None, (1, 2, 4, 8)]),
            seed=seed + 1,
            failure_rate=0 if self.is_thrashed else rng.choice([0, 0, 0.01, 0.1]),
            stop_rate=0 if self.is_thrashed else rng.choice([0, 0.02]),
            known_pages_every=8,
            tokens_per_step=rng.choice([1, 2, 5]),
        )
        if self.is_thrashed:
            self.engine.scheduler._num_spare = lambda: [0] * len(options.groups)
        self.capacity = min((options.num_pages - 1) * options.page_size if options.window is None else 70, 70)
        if has_budgets:  # prompts that are compacted have pages twice for a while
            self.capacity = min(self.capacity, (options.num_pages - 1) * options.page_size // 2)

    def run(self, num_operations: int) -> Engine:
        """Phases of work; the engine is idle after each."""
        while self.engine.num_operations < num_operations:
            for _ in range(self.random.choice([3, 40, 200])):
                self.step()
            self.engine.drain()
        return self.engine

    def step(self) -> None:
        if len(self.engine.live) < self.num_live_wanted and self.random.random() < 0.5:
            self.add()
        if self.engine.live and self.random.random() < self.abort_rate:
            self.num_aborts += 1
            self.engine.abort(self.random.choice(list(self.engine.live)))
        self.engine.step()

    def add(self) -> None:
        """A prompt that starts like others, asked for once or several times."""
        rng = self.random
        prompt = rng.choice(self.beginnings)[: rng.randint(0, 40)] + self.tokens(rng.randint(1, 6))
        prompt = prompt[: rng.randint(1, 2 if self.is_thrashed else self.capacity)]
        longest = min(self.capacity + 1 - len(prompt), 60 if self.is_thrashed else rng.choice([2, 24, 60]))
        max_tokens, priority, salt = (
            rng.randint(1, longest),
            rng.choice([0, 0, 0, 1, -1]),
            rng.choice(["", "", "1", "2"]),
        )
        more = {"priority": priority, "salt": salt, **self.more_arguments()}
        leader = self.engine.add(prompt, max_tokens, can_reuse=rng.random() < 0.9, **more)
        for _ in range(rng.choice([0, 0, 0, 1, 3]) if leader else 0):
            self.engine.add(prompt, max_tokens, leader=leader, **more)

    def more_arguments(self) -> dict[str, Any]:
        """More arguments of a request, chosen by a subclass."""
        return {}

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(count)]


def with_windows(options: SchedulerOptions, rng: random.Random) -> SchedulerOptions:
    """Other pools beside that of all tokens, or in its place, some of which are as small as can be, or keep sinks."""
    windows = rng.choice([(None, 5), (None, 1), (None, 17), (None, 9, 4), (6,), (12, 3)])
    sinks = [0 if window is None else rng.choice([0, 0, 1, 2]) for window in windows]
    pairs = list(zip(windows, sinks, strict=True))
    smallest = [most_pages(window, 70, 1, options.page_size, count) + 1 for window, count in pairs]
    counts = [rng.choice([least, least + 2, 2 * least, 60]) for least in smallest]
    groups = [CacheGroup(count, window, num_sinks=kept) for count, (window, kept) in zip(counts, pairs, strict=True)]
    first = options.num_pages if windows[0] is None else counts[0]
    own = {"window": windows[0], "num_sinks": sinks[0]}
    return replace(options, num_pages=first, **own, more_groups=tuple(groups[1:]))


def with_budgets(options: SchedulerOptions, rng: random.Random) -> SchedulerOptions:
    """Prompts are compacted, in one group or in several, by as much or differently, or not in the first."""
    size, observed = options.page_size, rng.choice([1, 2, 5])
    ends = [FakeEnd(observed + rng.randint(0, 20), observed, size) for _ in range(rng.choice([1, 1, 2, 3]))]
    groups = [CacheGroup(options.num_pages, at_end=one) for one in ends]
    if rng.random() < 0.3:
        return replace(options, more_groups=tuple(groups))
    return replace(options, at_end=ends[0], more_groups=tuple(groups[1:]))


def with_states(options: SchedulerOptions, rng: random.Random) -> SchedulerOptions:
    """A state of each sequence, and few or many places for those that are saved."""
    interval = options.page_size * rng.choice([1, 1, 2, 3])
    return replace(options, has_states=True, num_saved_states=rng.choice([1, 2, 3, 8, 30]), save_interval=interval)


def with_host(options: SchedulerOptions, rng: random.Random) -> SchedulerOptions:
    """Host pages, fewer or more than there are on the device."""
    if not options.reuses_prefixes:
        return options
    counts = [group.num_pages for group in options.groups] + [options.num_saved_states] * options.has_states
    sizes = tuple(HostPoolSize(max(int(count * rng.choice([0.1, 0.5, 1, 4])), 1), 8) for count in counts)
    return replace(options, host_pools=sizes)
