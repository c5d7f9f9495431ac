"""Scores of keys: the positions that they keep are kvpress's, from golden/policy_scores.safetensors."""

import json
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints_convert import load
from jaxinfer.cache.policy.prompt_budget import pyramid_budgets
from jaxinfer.cache.policy.scores import (
    FUTURE_POSITIONS,
    NUM_SINKS,
    QueryMoments,
    expected_attention_scores,
    kept_positions,
    keydiff_scores,
    snapkv_scores,
)
from jaxinfer.models import bind
from jaxinfer.models.rope import rotate, rotation
from tests.oracle.policy_cases import CONFIG, METHODS, NUM_TOKENS, SCORED, SCORES, SEEDS, WINDOW, tensors, tokens


@cache
def golden() -> dict[str, np.ndarray]:
    return load_file(SCORES)


@pytest.fixture(scope="module", params=SEEDS)
def layers(request, tmp_path_factory):
    """The seed, the rotation, and rotated queries and keys, and values, of each layer of a prompt."""
    folder = tmp_path_factory.mktemp("scores")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(request.param), folder / "model.safetensors")
    config, params = load(folder)[:2]
    found = []

    def attend(layer, q, k, v, window):
        found.append((q, k, v))
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhk,shk->hqs", q, k, precision="highest") * q.shape[-1] ** -0.5
        at = jnp.arange(q.shape[0])
        weights = jnp.exp(scores - scores.max(-1, keepdims=True)) * (at <= at[:, None])
        return jnp.einsum("hqs,shk->qhk", weights / weights.sum(-1, keepdims=True), v, precision="highest")

    bind(config, params)(jnp.asarray(tokens(request.param)), jnp.arange(NUM_TOKENS), attend)
    return request.param, config.rope_of(0), found


def kept(method: str, budget: int, layer: int, rope, q, k, v) -> list[list[int]]:
    if method == "keydiff":
        return kept_positions(keydiff_scores(k), budget).tolist()
    if method == "expected_attention":
        cos, sin = rotation(rope, jnp.arange(NUM_TOKENS))
        future = rotation(rope, NUM_TOKENS + jnp.arange(FUTURE_POSITIONS))
        moments = QueryMoments.none(*q.shape[1:]).add(rotate(q, cos, -sin)[NUM_SINKS:])
        return kept_positions(expected_attention_scores(moments, k, v, future), budget).tolist()
    if method == "pyramidkv":
        budget = pyramid_budgets(budget, NUM_TOKENS, CONFIG["num_hidden_layers"], window=WINDOW)[layer]
    found = kept_positions(snapkv_scores(q[-WINDOW:], k), budget - WINDOW)
    return [[*row, *range(NUM_TOKENS - WINDOW, NUM_TOKENS)] for row in found.tolist()]


@pytest.mark.matrix("1-snapkv", "1-expected_attention", "1-keydiff")
@pytest.mark.parametrize("method", METHODS)
def test_the_same_positions_are_kept(layers, method):
    seed, rope, found = layers
    for budget in SCORED:
        for layer, arrays in enumerate(found):
            wanted = [row[row >= 0].tolist() for row in golden()[f"{seed}.{method}.{budget}"][layer]]
            assert kept(method, budget, layer, rope, *arrays) == wanted, (budget, layer)


def test_methods_and_heads_differ():
    """Else equal positions would tell little."""
    for budget in SCORED:
        rows = [golden()[f"1.{method}.{budget}"] for method in ("snapkv", "keydiff", "expected_attention")]
        assert len({row.tobytes() for row in rows}) == 3
        assert all((row[0, 0] != row[0, 1]).any() for row in rows)


def test_pyramids():
    """The mean is the budget; a prompt that is hardly longer flattens it, and a shorter one needs none."""
    budgets = pyramid_budgets(1000, 100_000, 32, window=8)
    assert abs(sum(budgets) / 32 - 1000) < 1
    assert (budgets[0], budgets[-1]) == (1950, 50)
    assert pyramid_budgets(24, 120, 2, window=16) == (24, 24)  # 24 / 20 tokens are fewer than the window
    assert pyramid_budgets(90, 120, 2, window=16) == (104, 76)
    assert pyramid_budgets(1000, 40_000, 1, window=8) == (1950,)


def test_scores_need_tokens_before_the_window():
    k = jnp.ones((16, 2, 8))
    with pytest.raises(ValueError, match="the tokens before the last 16, and the prompt has 16"):
        snapkv_scores(jnp.ones((16, 4, 8)), k)


def test_equal_scores_keep_the_first():
    assert kept_positions(jnp.array([[1.0, 2.0, 2.0, 2.0, 0.0]]), 2).tolist() == [[1, 2]]
