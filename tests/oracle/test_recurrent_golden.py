"""Parity of models with recurrent layers with Transformers, from the golden files that `make golden` writes."""

import json

import numpy as np
import pytest
from safetensors import safe_open

from tests.oracle import parity
from tests.oracle.cases import FOLDER, Case, prompt_tokens
from tests.oracle.recurrent_cases import RECURRENT_CASES

QUICK = ("qwen3_5", "nemotron_h", "nemotron_h_moe", "lfm2_moe")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RECURRENT_CASES]


def golden(case: Case) -> tuple[dict, dict[str, np.ndarray]]:
    """The metadata of the file, and its tensors."""
    with safe_open(FOLDER / f"{case.name}.safetensors", "numpy") as file:
        return json.loads(file.metadata()["made"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def checkpoint(case: Case, folder, seed: int = 0):
    """The configuration and parameters of a seed, through files under Transformers' names."""
    kind, (made, _) = "tied" if case.ties[0] else "untied", golden(case)
    path = parity.write_checkpoint(folder, made["configs"][kind], made["shapes"][kind], seed, case)
    return parity.load(path, case)


@pytest.mark.matrix("nemotron_h_moe")
@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_and_logits(name, tmp_path):
    case = RECURRENT_CASES[name]
    config, params = checkpoint(case, tmp_path)
    stored, positions = golden(case)[1], list(case.positions)
    hidden = parity.states(config, params, prompt_tokens(0)[: case.num_tokens])[:, positions]
    logits = stored[f"{'tied' if case.ties[0] else 'untied'}.0.logits"]
    assert parity.max_error(hidden, stored["0.hidden"]) <= parity.TOLERANCE
    assert parity.max_error(parity.logits(config, params, hidden[-1]), logits) <= parity.TOLERANCE


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("chunk", [pytest.param(37), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_logits_through_the_cache(name, chunk, tmp_path):
    case = RECURRENT_CASES[name]
    config, params = checkpoint(case, tmp_path)
    found = parity.cached_logits(config, params, prompt_tokens(0)[: case.num_tokens], chunk)
    logits = golden(case)[1][f"{'tied' if case.ties[0] else 'untied'}.0.logits"]
    assert parity.max_error(np.asarray(found)[list(case.positions)], logits) <= parity.TOLERANCE


@pytest.mark.parametrize("options", [{}, {"deterministic": False, "prefill_chunk": 16}], ids=["uniform", "chunks"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT_CASES])
def test_greedy_tokens_through_the_engine(name, options, tmp_path):
    """64 tokens of two prompts in one batch."""
    case = RECURRENT_CASES[name]
    made, stored = golden(case)
    seed = made["greedy"]["seed"]
    config, params = checkpoint(case, tmp_path, seed)
    prompts = [prompt_tokens(seed)[:length].tolist() for length in case.greedy_lengths]
    expected = [stored[f"greedy.{i}"].tolist() for i in range(len(prompts))]
    assert parity.greedy(config, params, case, prompts, **options) == expected
