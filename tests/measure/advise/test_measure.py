"""Trials of a tiny model: what is measured, what is exact, and what fails as a row."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer.api.llm import LLM
from jaxinfer.engine.cache_quality import hidden_states, log_probs
from jaxinfer.engine.weights import ModelWeights
from jaxinfer.loading import LoadedModel
from jaxinfer.measure.advise.measure import TrialRunner, TrialSettings
from jaxinfer.measure.advise.search import after_one
from jaxinfer.measure.bench.runs import RunOptions
from jaxinfer.measure.bench.workload import BenchWorkload, Lengths
from jaxinfer.models import init_params
from jaxinfer.training.corpus import held_out_files
from tests.tiny import TINY

CONFIG = replace(TINY, vocab_size=96, max_position_embeddings=256, dtype="float32")
ARGUMENTS = {"max_model_len": 48, "max_seqs": 2, "prefill_chunk": 32}


NAMES = (("quantize", "int4-g128"), ("method", "gptq"), ("method", "awq"))


@pytest.fixture(scope="module")
def params():
    """Weights large enough that rounding shows."""
    return jax.tree.map(lambda leaf: leaf * 6 if leaf.ndim > 1 else leaf, init_params(CONFIG, jax.random.key(0)))


@pytest.fixture
def runner(params, monkeypatch):
    """Of live parameters, where a user has a checkpoint; nothing is freed."""

    def load(model, **values):
        return LoadedModel("tiny", CONFIG, ModelWeights(params), None)

    monkeypatch.setattr("jaxinfer.measure.advise.measure.load_model", load)
    workload = BenchWorkload(Lengths("fixed", 8, 8), Lengths("fixed", 6, 6))
    return TrialRunner(
        TrialSettings("tiny", dict(ARGUMENTS), workload, (), (), 3, 2, 4, RunOptions(limits={"e2el": 60.0}))
    )


@pytest.mark.slow
def test_a_baseline_and_a_cache_of_8_bits(runner):
    base = runner({})
    assert len(base.ttft) == len(base.tpot) == len(base.one) == len(base.rate) == len(base.goodput) == 2
    assert all(seconds > 0 for seconds in (*base.ttft, *base.tpot))
    assert base.kl == 0
    shared = runner.facts([2], 2, ()).shared
    assert (shared or 0) >= 2 * 4 / 36  # of 3 prompts of 12 tokens the first 4
    small = runner({"kv_dtype": "int8"})
    assert 0 < small.kl < 0.5
    assert small.token_bytes < base.token_bytes
    assert small.needed_bytes < base.needed_bytes
    assert small.cache_tokens > base.cache_tokens


@pytest.mark.slow
def test_policies_and_caches_of_4_bits(runner):
    """A policy's loss is measured on texts that are longer than what it keeps; its sequences take less memory."""
    runner.settings = replace(runner.settings, workload=BenchWorkload(Lengths("fixed", 36, 36), Lengths("fixed", 6, 6)))
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


@pytest.mark.parametrize("policy", ["snapkv(40)", pytest.param("h2o(40)", marks=pytest.mark.slow)])
def test_a_policy_of_prompts_is_measured_on_what_follows(runner, policy):
    """After a prompt of the first half of each text, and before anything is timed."""
    runner.settings.arguments.update(max_model_len=160, page_size=4)
    text = np.random.default_rng(1).integers(0, 96, 400).tolist()
    runner.prepare([text])
    asked = []
    row = runner({"kv_policy": policy}, lambda row: asked.append(row.kl) or "enough")
    assert row.stopped == "stopped after 0 of 2 repeats: enough"
    assert (row.rate, row.one) == ((), ())
    [kl] = asked
    assert kl == row.kl > 0.001
    refused = runner({"kv_policy": policy.replace("40", "80")})
    assert refused.reason == "failed: no KL can be measured: the longest prompt has 79 tokens, and the policy keeps 80"


@pytest.mark.slow
def test_calibrated_weights_lose_less_than_rounded_ones():
    documents = [text for _, text in held_out_files(6)]
    lengths = Lengths("fixed", 8, 8)
    settings = TrialSettings(
        "demo", {"max_seqs": 2}, BenchWorkload(lengths, lengths), tuple(documents[:2]), (*documents[2:],)
    )
    runner = TrialRunner(settings)
    runner.prepare()
    assert runner.facts((1,), 2, ("ngram",)).has_calibration
    rows = {name: runner({key: name}, lambda row: "enough") for key, name in NAMES}
    assert all(row.reason is None for row in rows.values()), rows
    assert 0 < rows["gptq"].kl < rows["int4-g128"].kl
    assert 0 < rows["awq"].kl < 1.1 * rows["int4-g128"].kl


@pytest.mark.slow
def test_layers_in_the_hosts_memory_are_not_on_the_device(runner, params):
    base = runner({}, after_one)
    runner.settings = replace(runner.settings, model=(CONFIG, params))
    row = runner({"offload": 2}, after_one)
    assert row.reason is None
    assert row.weight_bytes < base.weight_bytes
    assert len(row.rate) == 1


@pytest.mark.slow
def test_what_fails_is_a_row_and_a_baseline_that_fails_is_an_error(runner):
    row = runner({"draft": "layers:9"})
    assert row.reason is not None
    assert row.reason.startswith("failed: ")
    assert "layers" in row.reason
    runner.settings.arguments["max_model_len"] = 4
    with pytest.raises(ValueError, match=r"max_model_len=4|4 tokens"):
        runner({})


@pytest.mark.slow
def test_an_engine_has_the_log_probabilities_that_it_scores_with(params):
    text = np.random.default_rng(0).integers(0, 96, 40).tolist()
    with LLM((CONFIG, params), **ARGUMENTS) as llm:
        [states] = hidden_states(llm.engine, [text])
        found = log_probs(llm.engine, states)
        [score] = llm.score([text[:1]], [text[1:]], use_tqdm=False)
    assert found.shape == (40, 96)
    np.testing.assert_allclose([row[token] for row, token in zip(found, text[1:], strict=False)], score.raw, atol=1e-5)
    np.testing.assert_allclose(np.exp(found).sum(-1), 1, atol=1e-5)
