"""Rules of TMA descriptors: each is broken by a made-up descriptor, and by it alone."""

from dataclasses import replace

import pytest

from benchmarks.tma_rules import TmaDescriptor, broken_rules

# Blocks of 64 keys of 128 features in bfloat16, in tiles of 8 x 64.
RIGHT = TmaDescriptor(16, (4096, 8, 2, 8, 64), (8192, 1024, 64, 128, 1), (1, 8, 2, 8, 64), 128, shared=[1024, 2048])
PLAIN = TmaDescriptor(8, (1024, 256), (256, 1), (16, 256), shared=[128])

BROKEN = {
    "6 dimensions": replace(PLAIN, shape=(1,) * 5 + (16,), strides=(16,) * 5 + (1,), box=(1,) * 5 + (16,)),
    "2 sizes, 1 strides": replace(PLAIN, strides=(1,)),
    "a row of half a byte": replace(PLAIN, bits=4, shape=(1024, 257), strides=(512, 1)),
    "a side is not 1 to 256": replace(PLAIN, box=(16, 272)),
    "(0, 256): a side": replace(PLAIN, box=(0, 256)),
    "a size is not 1 to 2^32": replace(PLAIN, shape=(2**32 + 1, 256)),
    "elements 2 apart": replace(PLAIN, strides=(256, 2)),
    "no multiple of 16 bytes": replace(PLAIN, strides=(264, 1)),
    "2^40 bytes or more": replace(PLAIN, strides=(2**40, 1)),
    "rows of the window of 24.0 bytes, no": replace(PLAIN, box=(16, 24)),
    "swizzle of 16 bytes": replace(PLAIN, box=(16, 16), swizzle=16),
    "bytes, swizzle of 64": replace(RIGHT, swizzle=64),
    "global address at a multiple of 8": replace(PLAIN, address=8),
    "shared address at a multiple of 64 bytes, not 128": replace(PLAIN, shared=[128, 64]),
    "shared address at a multiple of 512 bytes, not 1024": replace(RIGHT, shared=[512]),
}


@pytest.mark.parametrize("one", [RIGHT, PLAIN, replace(PLAIN, bits=4, box=(16, 512), shape=(1024, 512))])
def test_right_descriptors(one):
    assert broken_rules(one) == []


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_is_noticed(rule):
    (sentence,) = broken_rules(BROKEN[rule])
    assert rule in sentence
