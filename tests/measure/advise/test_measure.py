"""Trials of a tiny model: what is measured, what is exact, and what fails as a row."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer.engine.cache_quality import hidden_states, log_probs
from jaxinfer.llm import LLM
from jaxinfer.loading import LoadedModel, Weights
from jaxinfer.measure.advise.measure import TrialRunner, TrialSettings
from jaxinfer.measure.bench.runs import RunOptions
from jaxinfer.measure.bench.workload import Lengths, Workload
from jaxinfer.models import init_params
from tests.tiny import TINY

CONFIG = replace(TINY, vocab_size=96, max_position_embeddings=64, dtype="float32")
ARGUMENTS = {"max_model_len": 48, "max_seqs": 2, "prefill_chunk": 32}


@pytest.fixture(scope="module")
def params():
    """Weights large enough that rounding shows."""
    return jax.tree.map(lambda leaf: leaf * 6 if leaf.ndim > 1 else leaf, init_params(CONFIG, jax.random.key(0)))


@pytest.fixture
def runner(params, monkeypatch):
    """Of live parameters, where a user has a checkpoint; nothing is freed."""

    def load(model, **values):
        return LoadedModel("tiny", CONFIG, Weights(params), None)

    monkeypatch.setattr("jaxinfer.measure.advise.measure.load_model", load)
    workload = Workload(Lengths("fixed", 8, 8), Lengths("fixed", 6, 6))
    return TrialRunner(TrialSettings("tiny", dict(ARGUMENTS), workload, (), 3, 2, 4, RunOptions(limits={"e2el": 60.0})))


@pytest.mark.slow
def test_a_baseline_and_a_cache_of_8_bits(runner):
    base = runner({})
    assert len(base.ttft) == len(base.tpot) == len(base.one) == len(base.rate) == len(base.goodput) == 2
    assert all(seconds > 0 for seconds in (*base.ttft, *base.tpot))
    assert base.kl == 0
    assert runner.shared >= 2 * 4 / 36  # of 3 prompts of 12 tokens the first 4
    small = runner({"kv_dtype": "int8"})
    assert 0 < small.kl < 0.5
    assert small.token_bytes < base.token_bytes
    assert small.needed_bytes < base.needed_bytes
    assert small.cache_tokens > base.cache_tokens


@pytest.mark.slow
def test_policies_and_caches_of_4_bits(runner):
    """A policy's loss is measured on texts that are longer than what it keeps; its sequences take less memory."""
    runner.settings = replace(runner.settings, workload=Workload(Lengths("fixed", 36, 36), Lengths("fixed", 6, 6)))
    runner.settings.arguments.update(page_size=4, steps_per_dispatch=1)
    base = runner({})
    policy = runner({"kv_policy": "sinks(4)+window(8)"})
    assert policy.reason is None
    assert policy.kl > 0
    assert policy.cache_tokens > base.cache_tokens
    small = runner({"kv_dtype": "int4"})
    assert small.kl != policy.kl
    assert small.kl > 0
    assert small.cache_tokens > 1.5 * base.cache_tokens
    row = runner({"kv_policy": "sinks(4)+window(44)"})
    assert row.reason == "failed: no KL can be measured: the longest text has 47 tokens, and the policy keeps 52"
    refused = runner({"kv_policy": "sinks(4)+window(8)", "mesh": "model=2"})
    assert "kv_policy='sinks(4)+window(8)' runs on one device, not 2" in refused.reason


@pytest.mark.slow
def test_what_fails_is_a_row_and_a_baseline_that_fails_is_an_error(runner):
    row = runner({"draft": "layers:9"})
    assert row.reason is not None
    assert row.reason.startswith("failed: ")
    assert "layers" in row.reason
    runner.settings.arguments["max_model_len"] = 4
    with pytest.raises(ValueError, match=r"max_model_len=4|4 tokens"):
        runner({})


def test_an_engine_has_the_log_probabilities_that_it_scores_with(params):
    text = np.random.default_rng(0).integers(0, 96, 40).tolist()
    with LLM((CONFIG, params), **ARGUMENTS) as llm:
        [states] = hidden_states(llm.engine, [text])
        found = log_probs(llm.engine, states)
        [score] = llm.score([text[:1]], [text[1:]], use_tqdm=False)
    assert found.shape == (40, 96)
    np.testing.assert_allclose([row[token] for row, token in zip(found, text[1:], strict=False)], score.raw, atol=1e-5)
    np.testing.assert_allclose(np.exp(found).sum(-1), 1, atol=1e-5)
