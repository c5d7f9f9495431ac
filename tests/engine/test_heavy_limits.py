"""`kv_policy="h2o(N)"`: constant memory, log-probabilities, caches of few bits, what is refused, planted faults, and
programs without it."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache.policy import heavy_hitters
from jaxinfer.cache.policy.contract import PolicyUse
from jaxinfer.cache.policy.h2o import H2O
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import abstract_params
from jaxinfer.planning.compiled import planned_programs
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.speculative import NO_DRAFT, LayersDraft, NgramDraft
from tests.engine.dense_heavy import DenseHeavy, dense_logits
from tests.engine.grammars import make_compiler, make_sequence, random_params, run
from tests.engine.mixed_requests import random_prompts
from tests.engine.test_heavy_hitters import BUDGET, OPTIONS, PAGE
from tests.engine.test_mixtures import CONFIG as LATENT
from tests.engine.test_policies import model_of
from tests.engine.test_windows import check_idle, most_owned
from tests.models.test_recurrent import DELTA
from tests.tiny import TINY

POLICY = f"h2o({BUDGET})"


@pytest.fixture(scope="module")
def model():
    return model_of((None, None))


# Constant memory.


def check_constant(num_tokens: int) -> None:
    """A sequence owns the same few pages however long its answer is: the pool has no more."""
    config, params = model_of((None, None), num_tokens)
    options = {**OPTIONS, "max_model_len": num_tokens, "max_seqs": 1, "num_pages": 5}
    with LLM((config, params), **options) as llm:
        assert most_owned(llm, num_tokens) == [BUDGET // PAGE + 1]
        check_idle(llm)


def test_an_answer_takes_constant_memory():
    check_constant(500)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_answer_of_5000_tokens_takes_constant_memory():
    check_constant(5000)


@pytest.mark.slow
def test_a_prompt_gives_its_pages_back_at_its_end(model):
    """Another one that needs them waits no longer."""
    with LLM(model, **{**OPTIONS, "num_pages": 15}) as llm:
        (pool,), params = llm.engine.scheduler.pools.all, SamplingParams(max_tokens=60, ignore_eos=True)
        (answer,) = llm.submit(llm.prepare([*range(90)], params))
        most = 0
        while answer.num_output < 4:
            llm.step()
            most = max(most, pool.num_owned)
        assert (most, pool.num_owned) == (12, 4)
        (other,) = llm.submit(llm.prepare([*range(80)], params))
        while not other.num_output:
            llm.step()
        assert (answer.num_preemptions, other.num_preemptions) == (0, 0)


# Log-probabilities, and planted faults.


def logprobs_of(llm: LLM, prompt) -> tuple[list[int], list[float]]:
    params = SamplingParams(max_tokens=70, temperature=0, logprobs=0, ignore_eos=True)
    output = llm.generate(prompt, params)[0].outputs[0]
    return output.token_ids, [
        step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)
    ]


def test_logprobs_are_those_of_dense_attention(model):
    prompt = random_prompts(1, 60, seed=3)[0]
    with LLM(model, **OPTIONS) as llm:
        tokens, found = logprobs_of(llm, prompt)
    logits = dense_logits(*model, [*prompt, *tokens[:-1]], DenseHeavy(len(prompt), PAGE, BUDGET))[len(prompt) - 1 :]
    wanted = np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(len(tokens)), tokens]
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.slow
def test_an_eviction_a_position_early_changes_answers(model, monkeypatch):
    """On the device: of programs of other sizes, as those before are compiled."""
    found, rule = [], heavy_hitters.num_dropped
    for number in range(3):
        if number == 2:
            monkeypatch.setattr(heavy_hitters, "num_dropped", lambda heavy, stored: rule(heavy, stored + 1))
        with LLM(model, **{**OPTIONS, "max_seqs": 1, "steps_per_dispatch": 5 + number, "prefill_chunk": 50}) as llm:
            found.append(logprobs_of(llm, [*range(60)])[1])
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    assert np.abs(np.subtract(found[1], found[2])).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "kv_dtype", ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bfloat16", "int4", "fp8_e4m3"))]
)
def test_rounded_keys_change_no_answer(model, kv_dtype):
    found = []
    for options in ({"prefill_chunk": 128}, {"prefill_chunk": 5, "steps_per_dispatch": 1}):
        with LLM(model, **{**OPTIONS, "max_seqs": 2, "kv_dtype": kv_dtype, **options}) as llm:
            found.append(logprobs_of(llm, [*range(70)])[0])
    assert found[0] == found[1]


# Grammars under masks from the host: refused tokens are in no sum.


def test_grammars_change_nothing(model):
    compiler, found = make_compiler(), []
    prompts, params = random_prompts(24, 60, seed=5), [random_params(number) for number in range(24)]
    for options in ({}, {"grammar_memory": 0}):
        engine = Engine(*model, EngineOptions(**{**OPTIONS, "max_seqs": 4, **options}))
        pairs = zip(prompts, params, strict=True)
        found.append(run(engine, [make_sequence(compiler, *pair, waits=not options) for pair in pairs]))
        engine.close()
    assert found[0] == found[1]


# What is refused.


def spec_of(config, draft=None, **options) -> EngineSpec:
    options = {"kv_policy": POLICY, "max_model_len": 128, "max_seqs": 4, "page_size": PAGE, **options}
    return EngineSpec(
        config, abstract_params(config, "float32"), EngineOptions(**options), "cpu", draft=draft or NO_DRAFT
    )


REFUSED = [
    ({"max_model_len": 600}, {}, None, r"trained for 512 tokens, .*: max_model_len=600 is more"),
    ({"draft_tree": (2, 1)}, {}, NgramDraft(), r"cannot be combined with draft_tree=\(2, 1\)"),
    ({}, {}, NgramDraft(), r"kv_policy='h2o\(24\)' cannot be combined with a draft"),
    ({}, {}, LayersDraft(1), "cannot be combined with a draft"),
    ({}, {"sliding_windows": (8, None)}, None, "have a window of 8 tokens"),
    ({"host_cache_gib": 1.0}, {}, None, "reuses no prefixes, .* cannot be combined with host_cache_gib=1.0"),
]


@pytest.mark.parametrize(("options", "changes", "draft", "message"), REFUSED, ids=[one[3][:40] for one in REFUSED])
def test_what_cannot_be_combined_is_refused_by_name(options, changes, draft, message):
    config = replace(TINY, **{"max_position_embeddings": 512, **changes})
    with pytest.raises(ValueError, match=message):
        spec_of(config, draft=draft, **options)


def test_other_models_and_several_devices_are_refused():
    with pytest.raises(ValueError, match="has recurrent layers, whose states are of all tokens"):
        spec_of(DELTA)
    with pytest.raises(ValueError, match="has latent attention, whose cache is kept whole"):
        spec_of(LATENT)
    with pytest.raises(ValueError, match="runs on one device, not 2"):
        H2O(24, page_size=8).check(PolicyUse(POLICY, TINY, 128, num_devices=2))
    sources = replace(TINY, max_position_embeddings=512, num_layers=2, kv_sources=(0, 0))
    with pytest.raises(ValueError, match="read the keys of other layers"):
        H2O(24, page_size=8).check(PolicyUse(POLICY, sources, 128))


def test_a_store_of_prefixes_and_taps_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match=r"h2o\(24\)' reuses no prefixes"):
        LLM(model, **OPTIONS, prefix_store=str(tmp_path), host_cache_gib=0.01)
    with LLM(model, **OPTIONS) as llm, pytest.raises(ValueError, match=r"not kv_policy='h2o\(24\)'"):
        llm.generate([1, 2, 3], SamplingParams(max_tokens=1), taps=["embed"])


# Bytes and programs.


def test_explain_counts_what_is_allocated(model):
    with LLM(model, **OPTIONS) as llm:
        facts, spec = llm.explain().to_dict()["cache"], llm.engine.spec
        arrays = jax.tree.leaves(llm.engine.runner._cache)
        assert facts["bytes"] == sum(leaf.nbytes for leaf in arrays) == spec.parts["cache"] == num_bytes(spec.cache)
        sums = [layer.leaves for layer in llm.engine.runner._cache.layers]
        assert all(one.shape == (spec.num_pages, TINY.num_kv_heads, PAGE) for one in sums)
        assert facts["  of these sums"] == len(sums) * TINY.num_kv_heads * 4
        assert facts["bytes"] == spec.num_pages * spec.page_bytes
        assert facts["policy"].startswith("h2o(24): each key head keeps at most 32 tokens")
        assert "no prefix is reused" in facts["policy"]
        assert spec.pool_sizes.sequence_bytes == 4 * spec.page_bytes


@pytest.mark.slow
def test_without_the_policy_nothing_of_it_is_traced(monkeypatch):
    config = replace(TINY, max_position_embeddings=512)

    def refuse(*args, **kwargs):
        raise AssertionError("traced")

    for name in ("attend_step", "attend_decoding"):
        monkeypatch.setattr(heavy_hitters, name, refuse)
    for policy in (None, "sinks(4)+window(16)"):
        for one in planned_programs(spec_of(config, kv_policy=policy, prefill_chunk=19)).values():
            one.function.lower(*one.arguments)
    for one in planned_programs(spec_of(config, prefill_chunk=19)).values():
        with pytest.raises(AssertionError, match="traced"):
            one.function.lower(*one.arguments)
