"""Derived seeds: reproducible, distinct, order matters."""

import pytest

from jaxinfer.sampling.seeds import derive_seed, sample_seed


def test_known_values_never_change():
    # The first two outputs of SplitMix64 seeded with 0, which its finalizer maps to 0.
    assert derive_seed(0, 0) == 0xE220A8397B1DCDAF
    assert derive_seed(0, 1) == 0x6E789E6AA1B965F4
    assert derive_seed(5) == 5


def test_seeds_are_distinct_over_parents_and_children():
    seeds = {derive_seed(parent, child) for parent in range(100) for child in range(100)}
    seeds |= {sample_seed(parent, i) for parent in range(100) for i in range(16)}
    assert len(seeds) == 100 * 100 + 100 * 16


def test_order_matters():
    assert derive_seed(3, 5) != derive_seed(5, 3)
    assert derive_seed(1, 2, 3) == derive_seed(derive_seed(1, 2), 3) != derive_seed(1, 3, 2)


def test_the_first_answer_keeps_the_requests_seed():
    assert sample_seed(123, 0) == 123
    assert sample_seed(123, 1) not in (123, derive_seed(123, 1))


@pytest.mark.parametrize("arguments", [(-1,), (2**64,), (0, -1), (0, 2**64)])
def test_out_of_range_raises(arguments):
    with pytest.raises(ValueError, match=r"in 0\.\.2\*\*64-1"):
        derive_seed(*arguments)


def test_the_limits_are_allowed():
    assert 0 <= derive_seed(2**64 - 1, 2**64 - 1) < 2**64
