"""Rejection sampling gives the target's distribution: by enumerating every draft and verdict, and by drawing.

Seeds are fixed, so the statistical tests give the same result in each run. Their threshold, chi-square at one in a
thousand, is the chance that a correct rule would have been given seeds that fail.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import gammaincc

from jaxinfer.sampling import SamplingParams, SamplingRow, choose, derive_seed, gumbel_noise, make_batch, seed_words
from jaxinfer.speculative import maximal

V = 8
FALSE_ALARM = 1e-3
NUM_DRAWS = 20_000
SEEDS = np.stack([seed_words(derive_seed(7, i)) for i in range(NUM_DRAWS)])
WIDTHS = [*(pytest.param(width, marks=pytest.mark.slow) for width in (1, 2)), 3]
TOLERANCE = 1e-6  # of total variation: 8 probabilities in float32


def logits(probabilities):
    with np.errstate(divide="ignore"):
        return np.log(np.float32(probabilities))


def softmax(x):
    x = np.exp(np.float64(x) - np.max(np.float64(x)))
    return x / x.sum()


def distributions():
    """(target, draft) of 8 tokens as logits: near and far, with zeros on either side, and disjoint."""
    rng = np.random.default_rng(0)
    near = rng.normal(0, 1, V)
    halves = np.array([1, 2, 3, 4, 0, 0, 0, 0]) / 10
    pairs = {
        "near": (near, near + rng.normal(0, 0.3, V)),
        "far": (rng.normal(0, 2, V), rng.normal(0, 2, V)),
        "sharp": (rng.normal(0, 6, V), rng.normal(0, 6, V)),
        "equal": (near, near),
        "shifted": (near, near + 3),
        "target_zeros": (logits([0.5, 0, 0.2, 0, 0.3, 0, 0, 0]), rng.normal(0, 1, V)),
        "draft_zeros": (rng.normal(0, 1, V), logits([0.5, 0, 0, 0.4, 0.1, 0, 0, 0])),
        "both_zeros": (logits([0.5, 0, 0.2, 0.1, 0.2, 0, 0, 0]), logits([0, 0.4, 0.3, 0, 0.3, 0, 0, 0])),
        "disjoint": (logits(halves), logits(halves[::-1])),
        "one_token": (logits(np.eye(V)[2]), logits(np.eye(V)[2])),
        "two_tokens": (logits(np.eye(V)[2]), logits(np.eye(V)[3])),
        "almost_one": (rng.normal(0, 1, V), np.float32([40, 0, -2, 1, 0, 0, 0, 0])),
    }
    return {name: (np.float32(p), np.float32(q)) for name, (p, q) in pairs.items()}


PAIRS = distributions()


# By enumeration


def enumerated(target, draft, width):
    """The distribution float64[V] of the token that comes out, over all drafts in all orders and all verdicts."""
    p, q = softmax(target), softmax(draft)
    width = min(width, int(np.count_nonzero(q)))
    drafts = np.array(list(itertools.permutations(np.flatnonzero(q), width)), np.int32)
    chance = np.ones(len(drafts))
    for j in range(width):
        left = np.array([sum(q[x] for x in range(V) if x not in d[:j]) for d in drafts])
        chance *= q[drafts[:, j]] / left
    assert abs(chance.sum() - 1) < 1e-12
    log_p, log_q = (maximal.exact.log_softmax(jnp.tile(x, (len(drafts), 1))) for x in (target, draft))
    out = np.zeros(V)
    for j in range(width):
        token = drafts[:, j]
        is_accepted = np.float64(maximal.acceptance(log_p, log_q, token))
        np.add.at(out, token, chance * is_accepted)
        chance = chance * (1 - is_accepted)
        log_p = maximal.residual(log_p, log_q, token)
        log_q = maximal.without(log_q, token)
    return out + chance @ np.exp(np.float64(log_p)), p


def total_variation(p, q):
    return np.abs(p - q).sum() / 2


@pytest.mark.matrix
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAIRS)
def test_all_drafts_and_verdicts_together_are_the_target(name, width):
    out, p = enumerated(*PAIRS[name], width)
    assert total_variation(out, p) < TOLERANCE


@pytest.mark.parametrize("name", PAIRS)
def test_one_draft_is_accepted_as_often_as_the_distributions_overlap(name):
    target, draft = PAIRS[name]
    p, q = softmax(target), softmax(draft)
    log_p, log_q = (maximal.exact.log_softmax(jnp.tile(x, (V, 1))) for x in (target, draft))
    accepted = q @ np.float64(maximal.acceptance(log_p, log_q, np.arange(V)))
    assert abs(accepted - (1 - total_variation(p, q))) < TOLERANCE


@pytest.mark.matrix
@pytest.mark.parametrize("width", [1, 2, 3])
def test_given_drafts_leave_the_target_as_it_is(width):
    """A draft that was not drawn, as n-grams': every choice of it gives the target's distribution."""
    for target, _ in PAIRS.values():
        drafts = np.array(list(itertools.permutations(range(V), width)), np.int32)
        log_p = maximal.exact.log_softmax(jnp.tile(target, (len(drafts), 1)))
        out, rest = np.zeros((len(drafts), V)), np.ones(len(drafts))
        for j in range(width):
            is_accepted = np.float64(maximal.acceptance(log_p, None, drafts[:, j]))
            out[np.arange(len(drafts)), drafts[:, j]] += rest * is_accepted
            rest = rest * (1 - is_accepted)
            log_p = maximal.residual(log_p, None, drafts[:, j])
        out += rest[:, None] * np.exp(np.float64(log_p))
        assert np.abs(out - softmax(target)).sum(axis=1).max() / 2 < TOLERANCE


# By drawing


def chi_square_p(tokens, expected):
    """The chance of counts at least this far from `expected`; 0 where a token came that cannot."""
    counts = np.bincount(np.ravel(tokens), minlength=expected.size)
    expected = np.ravel(expected)
    if len(counts) > expected.size or counts[expected == 0].any():
        return 0.0
    counts, wanted = counts[expected > 0], expected[expected > 0] * tokens.size
    if len(counts) == 1:
        return 1.0
    # Cells too thin for the approximation are taken together.
    thin = wanted < 5
    if thin.any():
        counts, wanted = (np.append(x[~thin], x[thin].sum()) for x in (counts, wanted))
    statistic = np.sum((counts - wanted) ** 2 / np.maximum(wanted, 1e-9))
    return float(gammaincc((len(counts) - 1) / 2, statistic / 2))


def draw_children(draft, seeds, positions, width):
    """As the draft draws children in maximal mode: `width` tokens without replacement, false for impossible ones."""
    noise = gumbel_noise(seeds, positions, draft.shape[1], stream=maximal.DRAFT_STREAM)
    scores, tokens = jax.lax.top_k(draft + noise, width)
    return tokens, scores > -jnp.inf


def draw(target, draft, seeds, positions, width, is_given):
    target, draft = (jnp.tile(x, (len(seeds), 1)) for x in (target, draft))
    children, is_child = draw_children(draft, seeds, positions, width)
    return maximal.accept(target, None if is_given else draft, children, is_child, seeds, positions)


jitted = jax.jit(draw, static_argnums=(4, 5))


def draws(target, draft, width, *, is_given=False, draw=jitted):
    """20,000 tokens and the children that they are, each row with its own seed and one of many positions."""
    positions = np.arange(NUM_DRAWS, dtype=np.int32) % 1009
    return jax.tree.map(np.asarray, draw(target, draft, SEEDS, positions, width, is_given))


@pytest.mark.matrix("almost_one-3")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAIRS)
def test_tokens_are_distributed_as_the_targets(name, width):
    target, draft = PAIRS[name]
    tokens, child = draws(target, draft, width)
    assert chi_square_p(tokens, softmax(target)) > FALSE_ALARM
    p, q = softmax(target), softmax(draft)
    if width == 1:
        assert chi_square_p(child, np.array([1 - total_variation(p, q), total_variation(p, q)]).round(7)) > FALSE_ALARM
    else:
        assert np.mean(child < width) >= 1 - total_variation(p, q) - 5 / np.sqrt(NUM_DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_tokens_after_given_drafts_are_distributed_as_the_targets(width):
    tokens, _ = draws(*PAIRS["near"], width, is_given=True)
    # The drafts are drawn all the same: seen with all of them, the target's distribution does not change.
    assert chi_square_p(tokens, softmax(PAIRS["near"][0])) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_two_tokens_are_distributed_as_the_targets(width):
    """The second comes from the same round if the first was the first child, and else from the next round, which
    draws its children with the noise of the position again, or drafts nothing."""
    rng = np.random.default_rng(1)
    target, draft = (np.float32(rng.normal(0, 1.5, (V + 1, V))) for _ in range(2))
    target[2, 5] = draft[3, 4] = draft[0, 1] = -np.inf

    @jax.jit
    def draw(root, seeds, positions):
        def node(last, children, is_child, positions):
            return maximal.accept(
                jnp.asarray(target)[last], jnp.asarray(draft)[last], children, is_child, seeds, positions
            )

        def drafted(last, positions):
            return draw_children(jnp.asarray(draft)[last], seeds, positions, width)

        children, is_child = drafted(root, positions)
        grandchildren, is_grandchild = drafted(children[:, 0], positions + 1)
        first, child = node(root, children, is_child, positions)
        same_round, _ = node(first, grandchildren, is_grandchild, positions + 1)
        again, is_again = drafted(first, positions + 1)
        is_again &= (seeds[:, 1] % 3 > 0)[:, None]
        next_round, _ = node(first, again, is_again, positions + 1)
        return first, jnp.where(child == 0, same_round, next_round)

    root = np.full(NUM_DRAWS, V, np.int32)
    first, second = jax.tree.map(np.asarray, draw(root, SEEDS, np.arange(NUM_DRAWS, dtype=np.int32) % 1009))
    expected = softmax(target[V])[:, None] * np.stack([softmax(row) for row in target[:V]])
    assert chi_square_p(first * V + second, expected) > FALSE_ALARM
    # The check sees a second token that does not depend on the first.
    assert chi_square_p(first * V + np.roll(second, 1), expected) < FALSE_ALARM


def test_children_are_drawn_without_replacement():
    draft = logits([0.4, 0, 0.3, 0.2, 0.1, 0, 0, 0])
    q = softmax(draft)
    children, is_child = jax.jit(draw_children, static_argnums=3)(
        jnp.tile(draft, (NUM_DRAWS, 1)), SEEDS, np.zeros(NUM_DRAWS, np.int32), 5
    )
    assert np.array_equal(is_child, np.tile([True] * 4 + [False], (NUM_DRAWS, 1)))
    assert np.array_equal(np.sort(children[:, :4]), np.tile([0, 2, 3, 4], (NUM_DRAWS, 1)))
    pairs = np.array([[q[x] * q[y] / (1 - q[x]) if x != y else 0 for y in range(V)] for x in range(V)])
    assert chi_square_p(np.asarray(children[:, 0] * V + children[:, 1]), pairs) > FALSE_ALARM


# Planted errors


def inverted(log_p, log_q, token):
    return right["acceptance"](log_q, log_p, token)


def unsigned(log_p, log_q, token):
    return maximal.exact.log_softmax(jnp.log(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q))))


def unchanged(log_q, token):
    return log_q


right = {name: getattr(maximal, name) for name in ("acceptance", "residual", "without")}
ERRORS = {"acceptance": inverted, "residual": unsigned, "without": unchanged}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", ERRORS)
def test_planted_errors_are_found_by_both(name, monkeypatch):
    monkeypatch.setattr(maximal, name, ERRORS[name])
    target, draft = PAIRS["far"]
    out, p = enumerated(target, draft, 2)
    assert total_variation(out, p) > 100 * TOLERANCE
    faulty = jax.jit(lambda *operands: draw(*operands), static_argnums=(4, 5))
    assert chi_square_p(draws(target, draft, 2, draw=faulty)[0], p) < FALSE_ALARM


# Rows

accept = jax.jit(maximal.accept)


def random_rows(num_rows, width, vocab_size=V):
    rng = np.random.default_rng(2)
    target, draft = (np.float32(rng.normal(0, 3, (num_rows, vocab_size))) for _ in range(2))
    children = np.argsort(-target - draft)[:, :width].astype(np.int32)
    is_child = rng.random((num_rows, width)) < 0.7
    positions = rng.integers(0, 2**20, num_rows).astype(np.int32)
    return target, draft, np.where(is_child, children, vocab_size), is_child, SEEDS[:num_rows], positions


@pytest.mark.slow
def test_a_row_without_children_is_sampled_plainly():
    num_rows, vocab_size = 64, 1000
    rows = [SamplingRow(SamplingParams(temperature=1.0, seed=i)) for i in range(num_rows)]
    batch = make_batch(rows, vocab_size)
    target, draft, children, is_child, _, positions = random_rows(num_rows, 3, vocab_size)
    is_child[::2] = False
    plain = jax.jit(choose)(target, positions, batch)
    tokens, child = accept(target, draft, children, is_child, batch.seed, positions)
    is_plain = ~is_child.any(axis=1)
    np.testing.assert_array_equal(tokens[is_plain], plain[is_plain])
    assert np.all(child[is_plain] == 3)
    assert np.any(tokens != plain)
    nothing = np.zeros((num_rows, 0))
    tokens, child = accept(target, draft, np.int32(nothing), nothing > 0, batch.seed, positions)
    np.testing.assert_array_equal(tokens, plain)
    assert np.all(child == 0)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("is_given", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(is_given):
    target, draft, *others = random_rows(64, 3, 1000)
    rows = [target, None if is_given else draft, *others]
    tokens, child = accept(*rows)
    assert len(set(child.tolist())) == 4
    for i in range(0, 64, 5):
        alone = accept(*(None if x is None else x[i : i + 1] for x in rows))
        assert (alone[0][0], alone[1][0]) == (tokens[i], child[i])


@pytest.mark.slow
def test_what_comes_out_is_the_child_that_it_says():
    target, draft, children, is_child, seed, positions = random_rows(512, 3)
    tokens, child = map(np.asarray, accept(target, draft, children, is_child, seed, positions))
    assert set(child.tolist()) == {0, 1, 2, 3}
    for i in range(512):
        if child[i] < 3:
            assert is_child[i, child[i]]
            assert tokens[i] == children[i, child[i]]
        else:
            assert tokens[i] not in children[i][is_child[i]]


def test_noise_of_draft_residual_and_verdicts_is_told_apart():
    width = 31
    streams = [maximal.DRAFT_STREAM, maximal.RESIDUAL_STREAM, *range(maximal.ACCEPTANCE_STREAM, width + 2)]
    assert len(set(streams)) == width + 2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_sound_harm_no_other(value):
    rows = random_rows(512, 3)
    right_tokens, right_child = accept(*rows)
    for which in (0, 1):
        bad = [x.copy() for x in rows]
        bad[which][3] = value
        bad[which][5, 2] = value
        tokens, child = accept(*bad)
        others = ~np.isin(np.arange(512), [3, 5])
        np.testing.assert_array_equal(tokens[others], right_tokens[others])
        np.testing.assert_array_equal(child[others], right_child[others])
        assert np.all((tokens >= 0) & (tokens <= V))


def test_rounding_that_leaves_nothing_draws_from_the_target():
    """p a hair below q at every token, as rounding may have it, and a child rejected all the same."""
    log_p = jnp.log(jnp.full((1, V), np.float32(0.124999)))
    log_q = jnp.log(jnp.full((1, V), np.float32(0.125)))
    np.testing.assert_array_equal(maximal.residual(log_p, log_q, jnp.zeros(1, jnp.int32)), log_p)


def test_a_token_that_the_draft_cannot_have_drawn():
    target, draft = (jnp.asarray(logits([row])) for row in ([0.5, 0, 0.5, 0], [0, 0, 0.5, 0.5]))
    log_p, log_q = maximal.exact.log_softmax(target), maximal.exact.log_softmax(draft)
    found = [float(maximal.acceptance(log_p, log_q, jnp.array([x]))[0]) for x in range(4)]
    assert found == [1, 0, 1, 0]


def test_operands_that_do_not_fit_raise():
    target, draft, children, is_child, seed, positions = random_rows(4, 2)
    for change in (
        {"target": np.float64(target).astype(np.float16)},
        {"draft": draft[:, 1:]},
        {"children": children[:3]},
        {"children": children.astype(np.uint32)},
        {"is_child": is_child[:, :1]},
        {"is_child": is_child.astype(np.int32)},
    ):
        named = {"target": target, "draft": draft, "children": children, "is_child": is_child} | change
        with pytest.raises(ValueError, match=f"^{next(iter(change))}"):
            maximal.accept(**named, seed=seed, positions=positions)
