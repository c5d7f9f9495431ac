"""Top-k and top-p: a sort as the oracle, and the two implementations against each other."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.sampling import transforms

S, V = 4, 300
IMPLEMENTATIONS = {name: jax.jit(getattr(transforms, name)) for name in ("by_search", "by_candidates")}


def kept_by_sort(logits, top_k, top_p):
    """bool[V], whose logits are kept, and whether float32 could decide otherwise: one row, float64, by sorting."""
    logits = logits.astype(np.float64)
    kept = logits > -np.inf
    if 0 < top_k < logits.size:
        kept &= logits >= np.sort(logits)[-top_k]
    if top_p >= 1:
        return kept, False
    weights = np.where(kept, np.exp(logits - logits[kept].max()), 0)
    # The mass above each value decides, so that equal values go together.
    above = np.array([weights[logits > x].sum() for x in logits]) / weights.sum()
    is_close = bool(np.any(np.abs(above[kept] - top_p) < 1e-6))
    return kept & (above < top_p), is_close


def assert_kept(name, logits, top_k, top_p):
    got = np.asarray(IMPLEMENTATIONS[name](logits, np.int32(top_k), np.float32(top_p)))
    for row in range(logits.shape[0]):
        kept, is_close = kept_by_sort(logits[row], top_k[row], top_p[row])
        if not is_close:
            assert np.array_equal(got[row] > -np.inf, kept), (name, row, top_k[row], top_p[row])
        assert np.array_equal(got[row][got[row] > -np.inf], logits[row][got[row] > -np.inf])
    return got


rows_of_filters = st.tuples(
    st.lists(st.sampled_from([0, 1, 2, 5, 127, 128, 129, 250, V, 10_000]), min_size=S, max_size=S),
    st.lists(st.sampled_from([1.0, 0.9999, 0.9, 0.5, 0.1, 1e-6, 1e-38]), min_size=S, max_size=S),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.01, 1.0, 8.0]), st.sampled_from([None, 0.5, 2.0]), rows_of_filters)
def test_both_agree_with_a_sort(seed, spread, rounding, filters_of_rows):
    """Steep and flat rows, ties by the hundred (rounding), masked tokens; every mix of filters in one batch."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, (S, V)).astype(np.float32)
    if rounding:
        logits = np.round(logits / rounding) * rounding
    logits[rng.random((S, V)) < 0.2] = -np.inf
    logits[:, 0] = 0
    results = [assert_kept(name, logits, *filters_of_rows) for name in IMPLEMENTATIONS]
    assert np.array_equal(*results)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_mass_that_is_met_exactly_is_enough(name):
    """Weights of exactly 1, 1/2, 1/4 and 1/4: half of the mass is one token's, three quarters are two tokens'."""
    logits = np.full((S, V), -np.inf, np.float32)
    logits[:, :4] = np.log(np.float32([1, 0.5, 0.25, 0.25]))
    assert np.exp(logits[0, :4]).tolist() == [1, 0.5, 0.25, 0.25]
    top_p = np.float32([0.5, 0.75, 0.5000001, 0.7500001])
    got = IMPLEMENTATIONS[name](logits, np.zeros(S, np.int32), top_p)
    assert (np.asarray(got) > -np.inf).sum(axis=1).tolist() == [1, 2, 2, 4]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
class TestEach:
    def test_off_changes_nothing(self, name):
        logits = np.random.default_rng(0).normal(0, 8, (S, V)).astype(np.float32)
        logits[0, 3], logits[1, 2] = -np.inf, -0.0
        got = IMPLEMENTATIONS[name](logits, np.zeros(S, np.int32), np.ones(S, np.float32))
        assert np.asarray(got).tobytes() == logits.tobytes()

    def test_ties_at_the_threshold_are_kept_together(self, name):
        logits = np.full((S, V), -5.0, np.float32)
        logits[:, [10, 20, 30]] = 1.0
        logits[:, 40] = 2.0
        got = assert_kept(name, logits, [2, 1, 0, 0], [1.0, 1.0, 0.6, 0.2])
        assert [np.flatnonzero(row > -np.inf).tolist() for row in got] == [
            [10, 20, 30, 40],
            [40],
            [10, 20, 30, 40],
            [40],
        ]

    def test_both_zeros_are_one_value(self, name):
        logits = np.full((S, V), -5.0, np.float32)
        logits[:, 1], logits[:, 2] = 0.0, -0.0
        got = assert_kept(name, logits, [1] * S, [1.0, 0.3, 1.0, 0.3])
        assert all(np.flatnonzero(row > -np.inf).tolist() == [1, 2] for row in got)

    def test_a_masked_row_stays_masked_and_its_neighbours_are_right(self, name):
        logits = np.random.default_rng(0).normal(0, 2, (S, V)).astype(np.float32)
        logits[2] = -np.inf
        got = np.asarray(IMPLEMENTATIONS[name](logits, np.full(S, 3, np.int32), np.full(S, 0.9, np.float32)))
        assert np.all(got[2] == -np.inf)
        assert [int(np.sum(row > -np.inf)) for row in got[[0, 1, 3]]] != [0, 0, 0]

    def test_top_p_counts_only_what_top_k_left(self, name):
        logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1] + [1e-9] * (V - 4)] * S, np.float32))
        got = assert_kept(name, logits, [2, 2, 3, 0], [0.55, 0.6, 0.8, 0.95])
        # After top-2 the first token has 0.571 of the mass.
        assert [int(np.sum(row > -np.inf)) for row in got] == [1, 2, 3, 4]


def test_a_nan_row_does_not_change_its_neighbours():
    logits = np.random.default_rng(0).normal(0, 2, (S, V)).astype(np.float32)
    broken = logits.copy()
    broken[1, 7] = np.nan
    top_k, top_p = np.full(S, 40, np.int32), np.full(S, 0.9, np.float32)
    for apply in IMPLEMENTATIONS.values():
        sound, got = np.asarray(apply(logits, top_k, top_p)), np.asarray(apply(broken, top_k, top_p))
        assert np.array_equal(sound[[0, 2, 3]], got[[0, 2, 3]])


def test_the_chosen_implementation_is_that_of_the_platform():
    logits = np.random.default_rng(0).normal(0, 2, (S, V)).astype(np.float32)
    top_k, top_p = np.full(S, 40, np.int32), np.full(S, 0.9, np.float32)
    assert np.array_equal(
        jax.jit(transforms.top_k_top_p)(logits, top_k, top_p), IMPLEMENTATIONS["by_candidates"](logits, top_k, top_p)
    )
