"""Routing by prefix: conversations stay where they began, load is bounded, and what caches forget is forgotten."""

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.fleet.routing import PrefixRouter, block_keys


def keys_of(*tokens: int) -> list[int]:
    return block_keys(array("i", tokens).tobytes(), 8)


def test_keys_are_equal_as_far_as_prompts_are():
    assert keys_of(1, 2, 3, 4, 5) == keys_of(1, 2, 3, 4)
    assert keys_of(1, 2, 3, 4)[0] == keys_of(1, 2, 9, 4)[0]
    assert not set(keys_of(1, 2, 3, 4)) & set(keys_of(9, 2, 3, 4))
    assert not set(block_keys(b"ab" * 9, 4)) & set(block_keys(b"ab" * 9, 4, b"tenant"))
    assert block_keys(b"abc", 4) == []


def test_a_conversation_stays_unless_its_replica_is_too_busy():
    router = PrefixRouter[str](max_imbalance=2)
    assert router.choose(keys_of(1, 2, 3, 4), {"a": 1, "b": 0}) == "b"
    assert router.choose(keys_of(1, 2, 3, 4, 5, 6), {"a": 0, "b": 2}) == "b"
    assert router.choose(keys_of(7, 8), {"a": 0, "b": 2}) == "a"
    assert router.choose(keys_of(1, 2, 3, 4, 5, 6), {"a": 0, "b": 3}) == "a"  # too busy
    assert router.num_known(keys_of(1, 2, 3, 4, 5, 6), "ab") == {"a": 3, "b": 3}
    assert router.choose(keys_of(1, 2), {"a": 0, "b": 2}, avoided={"a"}) == "b"
    assert router.choose(keys_of(1, 2), {"a": 0}, avoided={"a"}) == "a"
    router.remove("a")
    assert router.num_known(keys_of(1, 2, 3, 4), "ab") == {"b": 2}
    with pytest.raises(ValueError, match="no replica"):
        router.choose([], {})


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 2), max_size=12), st.booleans()), max_size=40)
)
def test_the_index_is_that_of_caches_which_forget_the_oldest(steps):
    """Against lists of whole prompts, the newest first, of which each replica keeps the first blocks."""
    router, kept = PrefixRouter[str](max_blocks=5), {name: [] for name in "abc"}
    for name, tokens, is_removed in steps:
        keys = keys_of(*tokens)
        router.record(name, keys)
        kept[name] = [*keys, *(key for key in kept[name] if key not in keys)][:5]
        if is_removed:
            router.remove(name)
            kept[name] = []
        for owner, own in kept.items():
            expected = next((count for count, key in enumerate(keys) if key not in own), len(keys))
            assert router.num_known(keys, [owner]).get(owner, 0) == expected
    assert sum(map(len, router._owners.values())) == sum(map(len, kept.values()))


def test_hits_are_nearly_those_of_one_cache_three_times_as_large():
    """Conversations of several turns over three replicas, each with a third of the blocks; round robin is beside it."""
    generator = random.Random(0)
    talks = [[generator.randrange(1000) for _ in range(40)] for _ in range(120)]
    turns = [(talk, length) for talk in talks for length in range(8, 41, 8)]
    order = sorted(turns, key=lambda turn: turn[1] // 8 * 30 + talks.index(turn[0]) + generator.random() * 30)
    hits = {}
    for kind, num in (("one", 1), ("prefix", 3), ("round robin", 3)):
        caches, router = PrefixRouter[int](max_blocks=1200 // num), PrefixRouter[int](max_blocks=1200 // num)
        hits[kind] = 0
        for number, (talk, length) in enumerate(order):
            keys = keys_of(*talk[:length])
            loads = dict.fromkeys(range(num), 0) | {number % num: -1}  # of equal ones, the next in turn
            chosen = number % num if kind == "round robin" else router.choose(keys, loads)
            hits[kind] += caches.num_known(keys, [chosen]).get(chosen, 0)
            caches.record(chosen, keys)
    assert hits["prefix"] >= 0.95 * hits["one"] > 1.5 * hits["round robin"]
