"""Parity of every dense family with Transformers in this process: other seeds, bfloat16, and what is saved back.

Needs torch and Transformers: `make test-oracle`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import CASES, GREEDY_LENGTHS, Case, prompt_tokens
from safetensors.numpy import load_file
from test_live import divergence

import checkpoints_convert

pytestmark = pytest.mark.oracle
FIRST_SEED = 1000  # beyond any that a golden file uses


@pytest.fixture(scope="module")
def oracle(reference_module):
    """What builds models and computes with them."""
    import make_family_golden

    return make_family_golden


@pytest.fixture(params=list(CASES), scope="module")
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def checkpoints(oracle, case, tmp_path_factory):
    """(model, folder) for each value of tie_word_embeddings."""
    found = []
    for tied in case.ties:
        model = oracle.build(case, tied, FIRST_SEED)
        folder = tmp_path_factory.mktemp(case.name)
        model.save_pretrained(folder)
        found.append((model, folder))
    return found


def test_hidden_states_and_logits(oracle, case, checkpoints):
    import family_parity as parity

    worst = 0.0
    for model, folder in checkpoints:
        config, params = parity.load(folder)
        tokens = prompt_tokens(FIRST_SEED)
        logits, hidden = oracle.states(model, tokens)
        found = parity.states(config, params, tokens)
        worst = max(worst, parity.max_error(found, hidden))
        worst = max(worst, parity.max_error(parity.logits(config, params, found[-1]), logits))
    print(f"{case.name}: max |difference| {worst:.1e}")
    assert worst <= parity.TOLERANCE


def test_greedy_tokens(oracle, case, tmp_path):
    import family_parity as parity

    seed, margin, answers = oracle.clear_greedy(case, max(FIRST_SEED, case.live_seed))
    print(f"{case.name}: seed {seed}, margin {margin:.4f}")
    oracle.build(case, case.ties[0], seed).save_pretrained(tmp_path)
    config, params = parity.load(tmp_path)
    prompts = [prompt_tokens(seed)[:length].tolist() for length in GREEDY_LENGTHS]
    assert parity.greedy(config, params, prompts, is_deterministic=False) == [output for _, output in answers]


def test_bfloat16_is_as_close_to_float32_as_transformers_is(oracle, case, checkpoints):
    import family_parity as parity
    from reference import forward, in_bfloat16

    model, folder = checkpoints[0]
    config, params = parity.load(folder)
    tokens = prompt_tokens(FIRST_SEED)
    exact, theirs = forward(model, tokens), forward(in_bfloat16(model), tokens)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    ours = parity.logits(config, params, jnp.asarray(parity.states(config, params, tokens)[-1]))
    noise, found, between = divergence(exact, theirs), divergence(exact, ours), divergence(theirs, ours)
    print(f"{case.name}: KL from float32 {found:.1e} (Transformers {noise:.1e}), between {between:.1e}")
    assert found <= 1.5 * noise
    assert between <= 1e-3


def test_saved_again_it_is_the_same_bit_for_bit(oracle, case, checkpoints, tmp_path):
    import torch
    import transformers
    from reference import forward

    for number, (model, folder) in enumerate(checkpoints):
        saved = tmp_path / str(number)
        checkpoints_convert.convert(folder, saved, to="huggingface", progress=None)
        before, after = load_file(folder / "model.safetensors"), load_file(saved / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        again = transformers.AutoModelForCausalLM.from_pretrained(
            saved, dtype=torch.float32, attn_implementation="eager"
        )
        assert type(again) is type(model)
        tokens = prompt_tokens(FIRST_SEED)
        assert np.array_equal(forward(again, tokens), forward(model, tokens))
