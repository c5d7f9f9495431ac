"""Divergences against closed forms, and the attention that training uses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import attend_without_cache
from jaxinfer.models import init_params
from jaxinfer.training.objectives import (
    DIVERGENCES,
    attend_by_head,
    distillation,
    forward_kl,
    next_token,
    reverse_kl,
    sequence_logits,
    total_variation,
)
from tests.tiny import TINY


def logits(*probabilities: float) -> jax.Array:
    return jnp.log(jnp.asarray(probabilities)) + 3.0  # a constant changes no distribution


def test_divergences_of_explicit_distributions():
    target, draft = logits(0.5, 0.25, 0.25), logits(0.25, 0.25, 0.5)
    # By hand: 0.5 log 2 + 0 - 0.25 log 2; the other way it is the same by symmetry.
    assert float(forward_kl(target, draft)) == pytest.approx(0.25 * np.log(2), abs=1e-6)
    assert float(reverse_kl(target, draft)) == pytest.approx(0.25 * np.log(2), abs=1e-6)
    assert float(total_variation(target, draft)) == pytest.approx(0.25, abs=1e-6)
    target, draft = logits(0.9, 0.1), logits(0.5, 0.5)
    assert float(forward_kl(target, draft)) == pytest.approx(0.9 * np.log(1.8) + 0.1 * np.log(0.2), abs=1e-6)
    assert float(reverse_kl(target, draft)) == pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(5), abs=1e-6)
    assert float(total_variation(target, draft)) == pytest.approx(0.4, abs=1e-6)


def test_divergences_work_position_by_position():
    random = np.random.default_rng(0)
    target, draft = (jnp.asarray(random.normal(size=(2, 3, 7)), jnp.float32) for _ in range(2))
    for divergence in DIVERGENCES.values():
        values = divergence(target, draft)
        assert values.shape == (2, 3)
        assert float(values[1, 2]) == pytest.approx(float(divergence(target[1, 2], draft[1, 2])), abs=1e-6)
        assert float(values.min()) > 0


@pytest.mark.matrix
@pytest.mark.parametrize("name", DIVERGENCES)
def test_at_equality_nothing_pulls(name):
    values = jnp.asarray(np.random.default_rng(1).normal(size=(5, 11)), jnp.float32)
    divergence = lambda draft: DIVERGENCES[name](values, draft).sum()  # noqa: E731
    assert float(divergence(values)) == pytest.approx(0, abs=1e-5)
    assert float(jnp.abs(jax.grad(divergence)(values)).max()) < 1e-6
    elsewhere = values.at[0, 0].add(1.0)
    assert float(jnp.abs(jax.grad(divergence)(elsewhere)).max()) > 1e-3


@pytest.mark.matrix
@pytest.mark.parametrize(("num_kv_heads", "window"), [(1, None), (2, 5), (4, 1)])
def test_attention_by_head_is_that_of_scoring(window, num_kv_heads):
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 13, 4, 8))
    k, v = (jax.random.normal(key, (2, 13, num_kv_heads, 8)) for key in keys[1:])

    def with_gradients(attend):
        def total(*qkv):
            out = attend(0, *qkv, window)
            return (out**2).sum(), out

        return jax.tree.leaves(jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v))

    for found, expected in zip(with_gradients(attend_by_head), with_gradients(attend_without_cache), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_losses_are_those_of_the_positions_that_count():
    """The label of a position is the token after it; a distillation's positions count as their weights say."""
    params, target = (
        jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, init_params(TINY, jax.random.key(seed)))
        for seed in range(2)
    )
    tokens = jax.random.randint(jax.random.key(2), (2, 9), 0, TINY.vocab_size)
    logprobs = jax.nn.log_softmax(sequence_logits(TINY, params, tokens))
    of_labels = np.take_along_axis(np.asarray(logprobs[:, :-1]), np.asarray(tokens)[:, 1:, None], axis=2)
    assert float(next_token(TINY)(params, tokens)[0]) == pytest.approx(-of_labels.mean(), rel=1e-5)

    weights = np.zeros((2, 9), np.float32)
    weights[0, 3:], weights[1, 7] = 1, 2
    batch = {"tokens": tokens, "weights": jnp.asarray(weights)}
    loss, metrics = distillation(TINY, TINY, "fkl", temperature=0.5)(params, batch, target)
    divergence = forward_kl(2 * sequence_logits(TINY, target, tokens), logprobs)
    assert float(loss) == pytest.approx(np.average(divergence, weights=weights), rel=1e-4)
    assert float(loss) != pytest.approx(float(divergence.mean()), rel=1e-2)
    assert 0 <= float(metrics["agreement"]) <= 1
