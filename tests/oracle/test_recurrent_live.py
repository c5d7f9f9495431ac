"""Parity of models with recurrent layers with Transformers in this process.

Needs torch and Transformers: `make test-oracle`.
"""

import numpy as np
import pytest
from safetensors.numpy import load_file

import checkpoints_convert
from tests.oracle import parity
from tests.oracle.cases import Case, prompt_tokens
from tests.oracle.recurrent_cases import RECURRENT_CASES

pytestmark = [pytest.mark.oracle, pytest.mark.optimized]


@pytest.fixture(params=list(RECURRENT_CASES), scope="module")
def case(request) -> Case:
    return RECURRENT_CASES[request.param]


@pytest.fixture(scope="module")
def checkpoints(reference, case, tmp_path_factory):
    """(model, folder, tokens) for each seed, and for the other value of tie_word_embeddings."""
    found = []
    for seed, tied in (*((seed, case.ties[0]) for seed in case.seeds), *((0, tied) for tied in case.ties[1:])):
        model = reference.build(case, tied, seed)
        folder = tmp_path_factory.mktemp(case.name)
        model.save_pretrained(folder)
        found.append((model, folder, prompt_tokens(seed)[: case.num_tokens]))
    return found


def test_hidden_states_and_logits(reference, case, checkpoints):
    worst = 0.0
    for model, folder, tokens in checkpoints:
        config, params = parity.load(folder, case)
        logits, hidden = reference.states(model, tokens)
        found = parity.states(config, params, tokens)
        worst = max(worst, parity.max_error(found, hidden))
        worst = max(worst, parity.max_error(parity.logits(config, params, found[-1]), logits))
    print(f"{case.name}: max |difference| {worst:.1e}")
    assert worst <= parity.TOLERANCE


@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_chunks_through_a_cache(reference, case, checkpoints, chunk):
    model, folder, tokens = checkpoints[0]
    config, params = parity.load(folder, case)
    found = parity.cached_logits(config, params, tokens, chunk)
    assert parity.max_error(found, reference.forward(model, tokens)) <= parity.TOLERANCE


def test_saved_again_it_is_the_same_bit_for_bit(reference, case, checkpoints, tmp_path):
    import torch
    import transformers

    for number, (model, folder, tokens) in enumerate(checkpoints):
        saved = tmp_path / str(number)
        checkpoints_convert.convert(folder, saved, to="huggingface", progress=None)
        before, after = load_file(folder / "model.safetensors"), load_file(saved / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        again = transformers.AutoModelForCausalLM.from_pretrained(
            saved, dtype=torch.float32, attn_implementation="eager"
        )
        assert type(again) is type(model)
        assert np.array_equal(reference.forward(again, tokens), reference.forward(model, tokens))
