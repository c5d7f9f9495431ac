"""What heads are trained on is what they draft: against the libraries that publish them, and against the engine's rounds."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.training.head_objectives import HeadBatch, block_logits, chain_logits
from tests.models.test_draft_head import CASES, TOLERANCE, log_softmax, opened
from tests.oracle.head_cases import NUM_STATES, NUM_STEPS, golden, inputs


def batch_of(case, seed, anchors, num_rows=2, shift=0) -> HeadBatch:
    """Rows with the inputs of a golden file, after `shift` tokens of another text and before some of a third."""
    given = inputs(case, seed)
    size = len(given["tokens"])
    length = size + shift + 3
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 90, (num_rows, length))
    tokens[:, shift : shift + size] = given["tokens"]
    texts = np.repeat(np.r_[[0] * shift, [1] * size, [2] * 3][None], num_rows, axis=0)
    positions = np.concatenate([np.arange(shift), np.arange(size), np.arange(3)])
    taps = random.standard_normal((len(case.taps), num_rows, length, given["taps"].shape[1] // len(case.taps)))
    for number, tap in enumerate(np.split(given["taps"], len(case.taps), axis=1)):
        taps[number, :, shift : shift + NUM_STATES] = tap
    anchors = np.repeat(np.asarray(anchors)[None] + shift, num_rows, axis=0)
    shape = tokens.shape
    return HeadBatch(
        *(jnp.asarray(x, jnp.int32) for x in (tokens, np.broadcast_to(positions, shape), texts)),
        jnp.ones(shape),
        jnp.asarray(anchors, jnp.int32),
        tuple(jnp.asarray(tap, jnp.float32) for tap in taps),
        jnp.zeros((0,)),
        jnp.zeros(shape, jnp.int32),
    )


@pytest.mark.parametrize("shift", [0, 5])
@pytest.mark.parametrize("name", ["eagle3_llama", "eagle3_norm_before_residual"])
def test_unrolled_chains_are_those_of_the_speculators_library(tmp_path, name, shift):
    """Whatever text is before in the row, and for some rows of states as for all."""
    case = CASES[name]
    head, wanted = opened(case, 0, tmp_path), golden(case)[1]["0.logits"]
    rows = [1, 2, 3, 8, 15, NUM_STATES - 1]
    found = chain_logits(head, batch_of(case, 0, rows, shift=shift), NUM_STEPS)
    expected = log_softmax(wanted[:, rows].swapaxes(0, 1))
    for row in found:
        assert np.abs(log_softmax(row) - expected).max() <= 2 * TOLERANCE


@pytest.mark.parametrize("shift", [0, 5])
def test_blocks_are_those_of_the_speculators_library(tmp_path, shift):
    case = CASES["dflash"]
    head, wanted = opened(case, 0, tmp_path), golden(case)[1]["0.logits"]
    found = block_logits(head, batch_of(case, 0, case.anchors, shift=shift))
    for row in found:
        assert np.abs(log_softmax(row) - log_softmax(wanted[:, 1:])).max() <= 2 * TOLERANCE
