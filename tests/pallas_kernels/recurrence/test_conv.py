"""Causal convolutions of ragged batches equal those of full sequences."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrence import RaggedBatch, causal_conv, commit_conv, conv_of_sequences
from pallas_kernels.recurrence.reference import convolution

RNG = np.random.default_rng(0)
WIDTH, CHANNELS = 4, 6
WEIGHT, BIAS = RNG.normal(size=(CHANNELS, WIDTH)).astype(np.float32), RNG.normal(size=CHANNELS).astype(np.float32)
X = RNG.normal(size=(3, 20, CHANNELS)).astype(np.float32)


def batch_of(starts, lengths, query_starts=None) -> RaggedBatch:
    first = np.cumsum(lengths) - lengths if query_starts is None else query_starts
    return RaggedBatch(*(jnp.asarray(x, jnp.int32) for x in (first, lengths, starts)))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("sizes", [pytest.param([20], marks=pytest.mark.slow), [1] * 20, [2, 7, 1, 10]])
def test_chunks_equal_full_sequences(bias, sizes):
    """Three sequences, one of which rests in each step; slots begin with garbage."""
    state, seen, outputs = jnp.full((3, WIDTH - 1, CHANNELS), jnp.nan), [0, 0, 0], [[], [], []]
    for turn, size in enumerate(sizes * 2):
        lengths = [size if seen[s] + size <= 20 and (turn + s) % 3 else 0 for s in range(3)]
        rows = np.concatenate([X[s, seen[s] : seen[s] + lengths[s]] for s in range(3)] + [np.zeros((2, CHANNELS))])
        batch = batch_of(seen, lengths)
        out = causal_conv(jnp.asarray(rows, jnp.float32), WEIGHT, state, batch, bias)
        state = commit_conv(state, jnp.asarray(rows, jnp.float32), batch, batch.query_lengths)
        for s, part in enumerate(np.split(np.asarray(out), np.cumsum(lengths))[:3]):
            outputs[s].append(part)
            seen[s] += lengths[s]
    full = conv_of_sequences(X, WEIGHT, bias)
    for s in range(3):
        expected, last = convolution(X[s, : seen[s]], WEIGHT, bias)
        found = np.concatenate(outputs[s])
        np.testing.assert_array_equal(found, full[s, : seen[s]])
        np.testing.assert_allclose(found, expected, atol=1e-5)
        if seen[s]:
            kept = range(max(seen[s] - 3, 0), seen[s])  # the column of each position is its own
            np.testing.assert_array_equal(
                np.asarray(state[s])[[p % 3 for p in kept]], last.astype(np.float32)[3 - len(kept) :]
            )
    assert max(seen) > 0


def test_rejected_rows_leave_no_trace():
    before = jnp.asarray(RNG.normal(size=(2, WIDTH - 1, CHANNELS)), jnp.float32)
    rows = jnp.asarray(X[0, :10])
    batch = batch_of([9, 0], [5, 5])
    for kept in range(6):
        found = commit_conv(before, rows, batch, jnp.array([kept, kept], jnp.int32))
        expected = np.array(before)
        for index in range(kept):
            expected[0, (9 + index) % 3], expected[1, index % 3] = rows[index], rows[5 + index]
        np.testing.assert_array_equal(found, expected)
