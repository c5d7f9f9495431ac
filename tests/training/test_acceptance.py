"""The simulation of speculation against one that drafts token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models import ModelConfig, RopeConfig
from jaxinfer.training.acceptance import AcceptanceMeter, simulate
from jaxinfer.training.objectives import sequence_logits
from jaxinfer.training.texts import NO_TOKEN
from tests.random_params import random_params

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=8, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=8, rope=RopeConfig(rotary_dim=8), tie_word_embeddings=True,
)  # fmt: skip


LENGTH = 22
choose_all = jax.jit(lambda params, tokens: jnp.argmax(sequence_logits(CONFIG, params, tokens), axis=-1))


def choice_after(params, text: list[int]) -> int:
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(text)] = text
    return int(choose_all(params, padded)[0, len(text) - 1])


def speculate(params, row: np.ndarray, prompt_length: int, k: int) -> tuple[int, int, int]:
    """Accepted, proposed, rounds: the draft writes its own tokens, the row says what the target would choose."""
    accepted = proposed = rounds = 0
    at = prompt_length
    while at < len(row):
        text, count = row[:at].tolist(), min(k, len(row) - at)
        for _ in range(count):
            text.append(choice_after(params, text))
        run = 0
        while run < count and text[at + run] == row[at + run]:
            run += 1
        accepted, proposed, rounds, at = accepted + run, proposed + count, rounds + 1, at + run + 1
    return accepted, proposed, rounds


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("k", [1, 2, 4])
def test_measured_acceptance_is_that_of_speculation(k):
    params = jax.tree.map(lambda leaf: 8 * leaf if leaf.ndim > 1 else leaf, random_params(CONFIG, 3))
    rows = np.random.default_rng(k).integers(8, size=(3, LENGTH)).astype(np.int32)
    for row in rows:
        for i in range(6, LENGTH):
            if i % 5:  # most of the text is what the draft would say
                row[i] = choice_after(params, row[:i].tolist())
    found = AcceptanceMeter(CONFIG, rows, 6, k)(params)
    expected = np.sum([speculate(params, row, 6, k) for row in rows], axis=0)
    assert (found.num_accepted, found.num_proposed, found.num_rounds) == tuple(expected)
    assert found.num_tokens == 3 * 16
    assert 0.5 < found.agreement < 1


def test_texts_end_where_they_end():
    """Rows of different lengths, after prompts of different lengths, as the same rows one by one."""
    params = jax.tree.map(lambda leaf: 8 * leaf if leaf.ndim > 1 else leaf, random_params(CONFIG, 3))
    rows = np.random.default_rng(0).integers(8, size=(2, LENGTH)).astype(np.int32)
    rows[1, 9:] = NO_TOKEN
    both = AcceptanceMeter(CONFIG, rows, np.array([6, 3]))(params)
    one, other = (AcceptanceMeter(CONFIG, row[None], first)(params) for row, first in ((rows[0], 6), (rows[1, :9], 3)))
    for name in ("num_accepted", "num_proposed", "num_rounds", "num_tokens"):
        assert getattr(both, name) == getattr(one, name) + getattr(other, name)


def test_simulation_by_hand():
    agrees = np.array([[1, 1, 1, 1, 0, 1, 0, 0, 1, 1]], bool)
    found = simulate(agrees, 4)  # [1 1 1 1] 0 | 1 0 . . -> [1 0 0 1] | [0 1 1] | [1 1]
    rounds = [(4, 4), (1, 4), (0, 3), (2, 2)]
    assert (found.num_accepted, found.num_proposed) == tuple(np.sum(rounds, axis=0))
    assert found.num_rounds == len(rounds)
    assert found.rate == 7 / 13
    assert found.tokens_per_round == 10 / 4


def test_the_extremes():
    assert simulate(np.ones((2, 10), bool), 4).rate == 1
    assert simulate(np.ones((2, 10), bool), 4).tokens_per_round == 5
    assert simulate(np.zeros((2, 10), bool), 4).tokens_per_round == 1
    with pytest.raises(ValueError, match="at least 1, got 0"):
        simulate(np.ones((2, 10), bool), 0)
    with pytest.raises(ValueError, match="a prompt of 5 tokens leaves no continuation in a row of 5"):
        AcceptanceMeter(CONFIG, np.zeros((1, 5), np.int32), 5)
