"""Parity of every family with Transformers in this process: other seeds, bfloat16, and what is saved back.

Needs torch and Transformers: `make test-oracle`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import checkpoints_convert
from tests.oracle import parity
from tests.oracle.cases import CASES, Case, prompt_tokens

pytestmark = [pytest.mark.oracle, pytest.mark.optimized]
FIRST_SEED = 1000  # beyond any that a golden file uses


@pytest.fixture(params=list(CASES), scope="module")
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def checkpoints(reference, case, tmp_path_factory):
    """(model, folder) for each value of tie_word_embeddings: through the files that Transformers writes."""
    found = []
    for tied in case.ties:
        model = reference.build(case, tied, FIRST_SEED)
        folder = tmp_path_factory.mktemp(case.name)
        model.save_pretrained(folder)
        found.append((model, folder))
    return found


def tokens_of(case: Case) -> np.ndarray:
    return prompt_tokens(FIRST_SEED)[: case.num_tokens]


@pytest.mark.matrix
def test_hidden_states_and_logits(reference, case, checkpoints):
    worst = 0.0
    for model, folder in checkpoints:
        config, params = parity.load(folder, case)
        logits, hidden = reference.states(model, tokens_of(case))
        found = parity.states(config, params, tokens_of(case))
        worst = max(worst, parity.max_error(found, hidden))
        worst = max(worst, parity.max_error(parity.logits(config, params, found[-1]), logits))
    print(f"{case.name}: max |difference| {worst:.1e}")
    assert worst <= parity.TOLERANCE


@pytest.mark.matrix
def test_greedy_tokens(reference, case, tmp_path):
    seed, margin, answers = reference.clear_greedy(case, max(FIRST_SEED, case.live_seed))
    print(f"{case.name}: seed {seed}, margin {margin:.4f}")
    reference.build(case, case.ties[0], seed).save_pretrained(tmp_path)
    config, params = parity.load(tmp_path, case)
    prompts, expected = zip(*answers, strict=True)
    assert parity.greedy(config, params, case, list(prompts), deterministic=False) == list(expected)


def divergences(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence of softmax(logits) from softmax(reference), in nats, of each position."""
    p, q = (jax.nn.log_softmax(jnp.asarray(x, jnp.float32)) for x in (reference, logits))
    return np.asarray(jnp.sum(jnp.exp(p) * (p - q), axis=-1))


def of_the_same_experts(noise: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Positions of which rounding moved no token to other experts: where it does, in Transformers as much as here, the
    divergence is some hundred times that of the others. At most a fifth of the positions are left out."""
    is_usual = (noise < 20 * np.median(noise)) & (found < 20 * np.median(noise))
    assert is_usual.mean() >= 0.8
    return is_usual


@pytest.mark.matrix
def test_bfloat16_is_as_close_to_float32_as_transformers_is(reference, case, checkpoints):
    model, folder = checkpoints[0]
    config, params = parity.load(folder, case)
    exact = reference.forward(model, tokens_of(case))
    theirs = reference.forward(reference.in_bfloat16(model), tokens_of(case))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    ours = parity.logits(config, params, jnp.asarray(parity.states(config, params, tokens_of(case))[-1]))
    each = [divergences(exact, theirs), divergences(exact, ours), divergences(theirs, ours)]
    is_usual = np.ones(len(exact), bool) if config.moe is None else of_the_same_experts(*each[:2])
    noise, found, between = (float(np.mean(one) if is_usual.all() else np.median(one)) for one in each)
    print(f"{case.name}: KL from float32 {found:.1e} (Transformers {noise:.1e}), between {between:.1e}")
    assert found <= 1.5 * noise
    assert between <= 1e-3
    # Where the best token leads by far more than rounding moves a logit, all choose the same.
    second, best = np.sort(exact, -1)[:, -2:].T
    is_clear = is_usual & (best - second > 6 * np.std((theirs - exact)[is_usual]))
    assert np.array_equal(theirs.argmax(-1)[is_clear], ours.argmax(-1)[is_clear])


@pytest.mark.matrix
def test_saved_again_it_is_the_same_bit_for_bit(reference, case, checkpoints, tmp_path):
    import torch
    import transformers

    for number, (model, folder) in enumerate(checkpoints):
        saved = tmp_path / str(number)
        checkpoints_convert.convert(folder, saved, to="huggingface", progress=None)
        before, after = load_file(folder / "model.safetensors"), load_file(saved / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        config = transformers.AutoConfig.from_pretrained(saved)
        assert type(config) is type(model.config)
        again = type(model).from_pretrained(saved, dtype=torch.float32, attn_implementation="eager")
        assert np.array_equal(reference.forward(again, tokens_of(case)), reference.forward(model, tokens_of(case)))
