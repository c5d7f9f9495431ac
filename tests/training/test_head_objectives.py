"""Heads are trained on what they draft, against the library that publishes them; losses, closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints_convert
from jaxinfer.speculative import HeadDraft, head_for
from jaxinfer.training.head_objectives import (
    NOT_DRAFTED,
    HeadBatch,
    block_logits,
    block_places,
    chain_logits,
    chain_places,
    drafted_tokens,
    head_objective,
    lk_loss,
)
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


def test_a_step_of_a_chain_weighs_what_it_is_given_and_undraftable_tokens_nothing(tmp_path):
    """The loss of a batch by hand, from the logits and the target's distribution."""
    case = CASES["eagle3_llama"]
    head = opened(case, 0, tmp_path)
    batch = batch_of(case, 0, [2, 5, 9, 40])  # the last is no place of the row
    random = np.random.default_rng(1)
    log_probs = jax.nn.log_softmax(jnp.asarray(3 * random.standard_normal((*batch.tokens.shape, 40)), jnp.float32))
    best = np.where(random.random(batch.tokens.shape) < 0.3, NOT_DRAFTED, np.argmax(log_probs, axis=-1))
    weights = random.random(batch.tokens.shape)
    batch = batch._replace(
        log_probs=log_probs, best=jnp.asarray(best, jnp.int32), weights=jnp.asarray(weights, jnp.float32)
    )
    steps = np.array([1.0, 0.8, 0.64], np.float32)
    logits, total, counted = np.asarray(chain_logits(head, batch, NUM_STEPS), np.float64), 0.0, 0.0
    for row in range(2):
        for number, anchor in enumerate([2, 5, 9]):
            for step in range(NUM_STEPS):
                place = anchor + 1 + step
                if best[row, place] == NOT_DRAFTED:
                    continue
                p = np.exp(np.asarray(log_probs[row, place], np.float64))
                q = np.exp(logits[row, number, step]) / np.exp(logits[row, number, step]).sum()
                share = weights[row, place] * steps[step]
                total += share * np.sum(p * np.log(p / q))
                counted += share
    params = head_params(tmp_path, case)
    value, metrics = head_objective(head.config, "kl", NUM_STEPS, steps)(params, batch, {})
    assert float(value) == pytest.approx(total / counted, rel=1e-4)
    assert set(metrics) == {"loss", "agreement_1", "agreement_2", "agreement_3"}
    assert not np.asarray(drafted_tokens(head.config, params, batch, NUM_STEPS).counts)[:, 3].any()


def test_bfloat16_is_of_products_and_not_of_gradients(tmp_path):
    case = CASES["eagle3_llama"]
    head = opened(case, 0, tmp_path)
    batch = batch_of(case, 0, [2, 5, 9])
    logits = 3 * np.random.default_rng(1).standard_normal((*batch.tokens.shape, 40))
    batch = batch._replace(log_probs=jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)))
    params = {name: leaf for name, leaf in head_params(tmp_path, case).items() if name != "draft_index"}
    fixed = {"draft_index": head_params(tmp_path, case)["draft_index"]}
    losses, gradients = {}, {}
    for dtype in ("float32", "bfloat16"):
        objective = head_objective(head.config, "kl", NUM_STEPS, np.ones(NUM_STEPS, np.float32), dtype)
        (losses[dtype], _), gradients[dtype] = jax.value_and_grad(objective, has_aux=True)(params, batch, fixed)
    assert 0 < abs(losses["bfloat16"] / losses["float32"] - 1) < 0.01
    for one, other in zip(*map(jax.tree.leaves, gradients.values()), strict=True):
        assert one.dtype == other.dtype == jnp.float32
        assert np.linalg.norm(other - one) <= 0.05 * np.linalg.norm(one)


def head_params(folder, case):
    config, params = checkpoints_convert.load(folder / "head", dtype="float32")
    target = checkpoints_convert.load(folder / "target", dtype="float32")
    config, taps = head_for(config, target[0])
    ((_, whole),) = HeadDraft(case.name, config, params, taps).models(*target)
    return whole


def test_places_of_drafts():
    anchors = jnp.array([[3, 8]])
    np.testing.assert_array_equal(chain_places(anchors, 3), [[[4, 5, 6], [9, 10, 11]]])
    np.testing.assert_array_equal(block_places(anchors, 4), [[[3, 4, 5], [8, 9, 10]]])


def test_lk_loss_is_the_chance_of_acceptance():
    p, q = np.array([0.5, 0.3, 0.1]), np.array([0.2, 0.2, 0.6])  # another token of the target has the rest
    assert float(lk_loss(jnp.log(p), jnp.log(q))) == pytest.approx(-np.log(0.2 + 0.2 + 0.1), rel=1e-5)


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="loss='ce' is none of kl, lk"):
        head_objective(None, "ce", 3, np.ones(3))  # type: ignore[arg-type]
