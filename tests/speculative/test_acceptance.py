"""The walk down the token tree: both rules, for greedy and sampled rows side by side, on a vocabulary of 8.

The "models" are tables: the logits after a token depend on that token alone.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling import SamplingParams, SamplingRow, advance, choose_several, make_batch, make_state, transform
from jaxinfer.speculative import DraftRows, Proposal, TokenTree, walk
from jaxinfer.speculative.maximal import DRAFT_STREAM

VOCAB, ROOT, POSITION = 8, 3, 10
NUM_DRAWS = 30_000
SAMPLED = SamplingParams(temperature=0.8, top_k=6, logit_bias={2: 1.0})
# 99.9 % of chi-square's distributions lie below: 1 in 1,000 sound draws would fail, but seeds are fixed.
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(VOCAB, VOCAB), scale=1.3).astype(np.float32)


TARGET, DRAFT = table(1), table(1) * 0.4 + table(2) * 0.6


def rows_of(params: list[SamplingParams], seeds: np.ndarray):
    """As many rows as seeds, with the parameters in turn."""
    kinds = make_batch([SamplingRow(one, seed=0) for one in params], VOCAB)
    kind = np.arange(len(seeds)) % len(params)
    batch = jax.tree.map(lambda leaf: np.asarray(leaf)[kind], kinds)
    words = np.stack([np.zeros_like(seeds), seeds], axis=1).astype(np.uint32)
    histories = jax.tree.map(lambda leaf: np.asarray(leaf)[np.zeros(len(seeds), int)], make_state([[1]], VOCAB))
    return kind, replace(batch, seed=jnp.asarray(words)), histories


@partial(jax.jit, static_argnums=(0, 1))
def one_round(tree: TokenTree, is_maximal: bool, batch, history, num_nodes=None):
    """Tokens int32[D + 1, S] that came out, -1 where none did, of a round drafted by DRAFT: the whole tree, or the
    first `num_nodes` int32[S] of it."""
    num_slots = batch.num_slots
    positions = jnp.full((num_slots,), POSITION, jnp.int32)
    rows = DraftRows(
        positions,
        jnp.ones((num_slots,), bool),
        jnp.full((num_slots,), tree.num_nodes, jnp.int32) if num_nodes is None else num_nodes,
        jnp.zeros((num_slots, 1), jnp.int32),
        batch,
        history,
    )
    tokens = jnp.full((num_slots, tree.num_nodes), ROOT, jnp.int32)
    scores = []
    for node in range(tree.num_nodes):
        children = [int(child) for child in tree.children[node] if child < tree.num_nodes]
        if not children:
            continue
        transformed = transform(jnp.asarray(DRAFT)[tokens[:, node]], batch, history)
        stream = DRAFT_STREAM if is_maximal else None
        place = positions + int(tree.depths[node]) + 1
        tokens = tokens.at[:, jnp.array(children)].set(
            choose_several(transformed, place, batch, len(children), stream=stream)
        )
        scores.append(transformed)
    proposal = Proposal(tokens, rows.num_nodes, jnp.stack(scores, axis=1) if is_maximal else None)

    def logits_at(node):
        return jnp.asarray(TARGET)[tokens[jnp.arange(num_slots), node]]

    def keep(kept, samples, chose, took_part, num_before):
        depths = jnp.arange(tree.depth + 1)[:, None]
        return jnp.where((depths == num_before) & chose, samples.tokens, kept)

    nothing = jnp.full((tree.depth + 1, num_slots), -1, jnp.int32)
    many = jnp.full((num_slots,), 100, jnp.int32)
    state, kept = walk(logits_at, proposal, rows, tree, many, keep, nothing, is_maximal=is_maximal)
    return kept, state


# Called outside of a program, each of their operations would be compiled by itself.
transformed_of = jax.jit(transform)
chosen_of = jax.jit(choose_several, static_argnums=3, static_argnames="stream")


def distribution(token: int) -> np.ndarray:
    """What a sampled row should draw after a token, in float64."""
    _, batch, history = rows_of([SAMPLED], np.zeros(1, int))
    logits = np.asarray(transformed_of(jnp.asarray(TARGET)[None, token], batch, history))[0].astype(np.float64)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def chi_square(tokens: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    counts = np.bincount(tokens, minlength=VOCAB)
    is_possible = expected > 0
    if counts[~is_possible].any():
        return float("inf"), int(is_possible.sum()) - 1
    mean = expected[is_possible] * len(tokens)
    return float(((counts[is_possible] - mean) ** 2 / mean).sum()), int(is_possible.sum()) - 1


TREES = (pytest.param(TokenTree((1, 1)), marks=pytest.mark.slow), TokenTree((3, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree.widths))
def test_maximal_tokens_have_the_target_s_distribution_beside_greedy_rows(tree):
    kind, batch, history = rows_of([SAMPLED, SAMPLED, SamplingParams(temperature=0)], np.arange(NUM_DRAWS * 3 // 2))
    kept, state = jax.device_get(one_round(tree, True, batch, history))
    greedy, sampled = kept[:, kind == 2], kept[:, kind != 2]
    assert sampled.shape[1] == NUM_DRAWS
    assert (greedy == greedy[:, :1]).all()
    assert greedy[0, 0] == TARGET[ROOT].argmax()
    statistic, freedom = chi_square(sampled[0], distribution(ROOT))
    assert statistic < CRITICAL[freedom]
    for first in range(VOCAB):
        after = sampled[1, sampled[0] == first]
        after = after[after >= 0]  # the draft was accepted, so another token came
        if len(after) > 200:
            statistic, freedom = chi_square(after, distribution(first))
            assert statistic < CRITICAL[freedom] + 10, first  # eight tests: each may fail 1 in 100,000 times
    assert 0.3 < (sampled[1] >= 0).mean() < 0.99
    assert state.num_accepted.max() == tree.depth


@pytest.mark.slow
def test_the_draft_s_own_tokens_would_not_pass():
    """The inverse: had every draft been accepted, the check would tell."""
    _, batch, history = rows_of([SAMPLED], np.arange(NUM_DRAWS))
    transformed = transformed_of(jnp.asarray(DRAFT)[np.full(NUM_DRAWS, ROOT)], batch, history)
    place = jnp.full((NUM_DRAWS,), POSITION + 1, jnp.int32)
    drafted = np.asarray(chosen_of(transformed, place, batch, 1, stream=DRAFT_STREAM))[:, 0]
    statistic, freedom = chi_square(drafted, distribution(ROOT))
    assert statistic > 100 * CRITICAL[freedom]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree.widths))
def test_exact_tokens_are_those_of_plain_sampling(tree):
    """Whatever was drafted, the first token is the plain one; and every later one, given those before it."""
    params = [SAMPLED, SamplingParams(temperature=0), SamplingParams(temperature=1.5, min_p=0.05)]
    _, batch, history = rows_of(params, np.arange(3000))
    kept, state = jax.device_get(one_round(tree, False, batch, history))
    before = np.full(3000, ROOT)
    for depth in range(tree.depth + 1):
        transformed = transformed_of(jnp.asarray(TARGET)[before], batch, history)
        place = jnp.full((3000,), POSITION + depth + 1, jnp.int32)
        plain = np.asarray(chosen_of(transformed, place, batch, 1))[:, 0]
        came = kept[depth] >= 0
        np.testing.assert_array_equal(kept[depth][came], plain[came])
        before = np.where(came, kept[depth], 0)
    assert (state.num_tokens == 1 + state.num_accepted).all()
    assert 0.2 < state.num_accepted.mean() < tree.depth


def test_penalties_and_min_tokens_count_within_the_drafted_run():
    """Three tokens of a chain are those of three plain steps, each after the ones before it."""
    tree, num_rows = TokenTree((1, 1)), 300
    params = [
        SamplingParams(temperature=0, frequency_penalty=2.0),
        SamplingParams(temperature=0.8, presence_penalty=1.5),
        SamplingParams(temperature=0.8, min_tokens=2, stop_token_ids=[int(TARGET[ROOT].argmax())]),
    ]
    _, batch, history = rows_of(params, np.arange(num_rows))
    kept, state = jax.device_get(one_round(tree, False, batch, history))
    before = np.full(num_rows, ROOT)
    for depth in range(tree.depth + 1):
        transformed = transformed_of(jnp.asarray(TARGET)[before], batch, history)
        place = jnp.full((num_rows,), POSITION + depth + 1, jnp.int32)
        plain = np.asarray(chosen_of(transformed, place, batch, 1))[:, 0]
        came = kept[depth] >= 0
        np.testing.assert_array_equal(kept[depth][came], plain[came])
        history = advance(history, jnp.asarray(plain), jnp.asarray(came))
        before = np.where(came, kept[depth], 0)
    assert (np.bincount(state.num_tokens, minlength=4)[1:] > 10).all()


def test_no_row_accepts_more_than_it_drafted():
    tree, num_rows = TokenTree((3, 2)), 3000
    _, batch, history = rows_of([SAMPLED], np.arange(num_rows))
    num_nodes = np.arange(num_rows, dtype=np.int32) % tree.num_nodes + 1
    _, state = jax.device_get(one_round(tree, False, batch, history, jnp.asarray(num_nodes)))
    assert (state.path.max(axis=1) < num_nodes).all()
    assert (state.num_accepted[num_nodes == 1] == 0).all()
    assert (state.num_accepted[num_nodes == tree.num_nodes] == 2).any()
