"""Compaction of prompts: pages that are given back, caches of few bits, log-probabilities, what is refused, what
`explain` says, and programs without it."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.cache import paged as paged_cache
from jaxinfer.engine.model_runner import ModelRunner
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.prompt_ends import PromptEnds
from jaxinfer.engine.scheduler import RequestTooLargeError
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import abstract_params
from jaxinfer.planning.compiled import planned_programs
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.speculative import NO_DRAFT, LayersDraft
from tests.engine.test_mixtures import CONFIG as LATENT
from tests.engine.test_policies import model_of
from tests.engine.test_prompt_compaction import LAYERS, OPTIONS, PAGE, POLICIES
from tests.engine.test_windows import check_idle
from tests.models.test_recurrent import DELTA
from tests.pallas_kernels.quick import quick
from tests.tiny import TINY

PROMPT = [*range(90)]
NO_SECOND_PASS = [name for name in POLICIES if name != "expected_attention"]
GREEDY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


def open_llm(policy="snapkv(40)", layers=(None, None), **options) -> LLM:
    return LLM(model_of(layers), **{**OPTIONS, "kv_policy": policy, **options})


# Pages.


@pytest.mark.matrix
@pytest.mark.parametrize("name", quick(POLICIES, *NO_SECOND_PASS))
def test_an_answer_owns_what_stays(name):
    """While it decodes: the pages that the policy keeps and those of its own tokens. Others found the prompt's."""
    prompt = [*PROMPT, *range(20)]
    with open_llm(POLICIES[name], LAYERS[name]) as llm:
        (sequence,) = llm.submit(llm.prepare(prompt, GREEDY))
        while sequence.num_output < 20:
            llm.step()
        llm.engine.scheduler.check()
        num_stored = len(prompt) + sequence.num_output - 1
        counts = []
        for group, table in zip(llm.engine.spec.groups, sequence.tables, strict=True):
            lost = group.at_end.num_dropped(len(prompt))
            assert lost > 0
            owned = [page for page in table if page]
            assert len(owned) == len(table) - lost
            assert -(-num_stored // PAGE) - lost <= len(owned) <= -(-(num_stored + 12) // PAGE) - lost
            counts.append(len(owned))
        for pool, table in zip(llm.engine.scheduler.pools.all, sequence.tables, strict=True):
            assert pool.num_owned == len([page for page in table if page])
            assert pool.num_idle == len(prompt) // PAGE  # what the prefix tree keeps of the prompt
        assert (len(set(counts)) > 1) == (name == "pyramidkv")
        llm.engine.finish(sequence, "abort")
        check_idle(llm)


def test_the_last_tokens_are_computed_after_a_prefix_hit():
    with open_llm() as llm:
        first = llm.generate(PROMPT, GREEDY)[0]
        second = llm.generate(PROMPT, GREEDY)[0]
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, (len(PROMPT) - 32) // PAGE * PAGE)
        # What follows the prompt is cached nowhere: its keys were computed with fewer tokens.
        longer = llm.generate([*PROMPT, *first.outputs[0].token_ids, 5], GREEDY)[0]
        assert longer.num_cached_tokens == len(PROMPT) // PAGE * PAGE


@pytest.mark.slow
def test_a_request_that_has_pages_for_its_prompt_once_is_refused():
    """12 pages of the prompt, and beside them the 6 to which 90 tokens are compacted."""
    params = replace(GREEDY, max_tokens=8)
    with open_llm(num_pages=19, max_model_len=128, max_seqs=2) as llm:
        assert len(llm.generate(PROMPT, params)[0].outputs[0].token_ids) == 8
        check_idle(llm)
    with (
        open_llm(num_pages=18, max_model_len=128, max_seqs=2) as llm,
        pytest.raises(RequestTooLargeError, match="90 prompt tokens and max_tokens=8 need 18 pages"),
    ):
        llm.generate(PROMPT, params)


@pytest.mark.slow
def test_an_abort_at_any_time_frees_all():
    with open_llm(max_seqs=2, prefill_chunk=16, steps_per_dispatch=1) as llm:
        for num_steps in range(1, 14):
            (sequence,) = llm.submit(llm.prepare([*PROMPT[:-1], num_steps], GREEDY))
            for _ in range(num_steps):
                llm.step()
                llm.engine.scheduler.check()
            llm.engine.finish(sequence, "abort")
            llm.engine.scheduler.check()
            assert llm.engine.scheduler.pool.num_owned == 0


def test_a_pass_without_finite_logits_ends_the_answer_and_leaks_nothing(monkeypatch):
    with open_llm() as llm:
        wanted = llm.generate([PROMPT, PROMPT[:20]], GREEDY)
        run = ModelRunner._run_compaction

        def spoiled(self, *arguments):
            weights = self.weights.value
            self.weights.value = tuple(leaf * np.nan for leaf in weights)
            try:
                return run(self, *arguments)
            finally:
                self.weights.value = weights

        monkeypatch.setattr(ModelRunner, "_run_compaction", spoiled)
        broken, other = llm.generate([PROMPT, PROMPT[:20]], GREEDY)
        assert broken.outputs[0].finish_reason == "error"
        assert other.outputs[0].token_ids == wanted[1].outputs[0].token_ids
        monkeypatch.undo()
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == wanted[0].outputs[0].token_ids
        check_idle(llm)


# Caches of few bits, and log-probabilities.


@pytest.mark.slow
@pytest.mark.parametrize(
    "kv_dtype",
    ["int4", *(pytest.param(one, marks=pytest.mark.slow) for one in ("int8", "bfloat16", "fp8_e4m3", "int8_int4"))],
)
def test_rounded_keys_change_no_answer(kv_dtype):
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True)
    found = []
    for options in ({"prefill_chunk": 128}, {"prefill_chunk": 5, "draft": "ngram", "num_draft_tokens": 3}):
        with open_llm(max_seqs=2, kv_dtype=kv_dtype, **options) as llm:
            found += [llm.generate(PROMPT, params)[0].outputs[0].token_ids for _ in range(2)]
    assert found == found[:1] * 4


@pytest.mark.slow
def test_deterministic_log_probabilities_are_equal_bit_for_bit():
    found = []
    params = replace(GREEDY, logprobs=3, prompt_logprobs=2)
    for options in ({}, {"prefill_chunk": 7}, {"draft": "ngram", "num_draft_tokens": 3}):
        with open_llm(deterministic=True, **options) as llm:
            for prompts in ([PROMPT], [PROMPT[:30], PROMPT, PROMPT[5:80]]):
                output = llm.generate(prompts, params)[prompts.index(PROMPT)]
                found.append((output.outputs[0].logprobs, output.prompt_logprobs))
    assert all(one == found[0] for one in found)
    assert len(found[0][1]) == len(PROMPT)


@pytest.mark.slow
def test_log_probabilities_of_a_prompt_are_those_of_the_full_cache():
    """A prompt attends to all of itself."""
    params, found = replace(GREEDY, max_tokens=1, prompt_logprobs=0), []
    for policy in (None, "snapkv(40)"):
        with open_llm(policy) as llm:
            output = llm.generate(PROMPT, params)[0]
            rows = zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True)
            found.append([row[token].logprob for token, row in rows])
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


# Planted faults.


@pytest.mark.slow
def test_a_compacted_page_in_the_prefix_tree_changes_answers(monkeypatch):
    """A second prompt goes on with the first one's answer, whose keys were computed with fewer tokens."""
    found, params = [], replace(GREEDY, max_tokens=6, logprobs=0)
    for _ in range(2):
        with open_llm(max_seqs=2) as llm:
            first = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
            second = llm.generate([*PROMPT, *first, *range(32)], params)[0]
        answer = second.outputs[0]
        found.append([step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)])
        monkeypatch.setattr(
            PromptEnds,
            "known_tables",
            lambda self, one: [
                old or table for old, table in zip(one.prompt_tables or [[]] * len(one.tables), one.tables, strict=True)
            ],
        )
    assert max(abs(a - b) for a, b in zip(*found, strict=True)) > 1e-3


# What is refused.

REFUSED = [
    ({"cache": "contiguous"}, {}, None, "it is for cache='paged' only"),
    ({"draft_tree": (2, 1)}, {}, LayersDraft(1), r"cannot be combined with draft_tree=\(2, 1\)"),
    ({}, {}, LayersDraft(1), "cannot be combined with draft='layers:1'"),
    ({}, {"sliding_windows": (8, None)}, None, "has layers with a window"),
    ({}, {"max_position_embeddings": 100}, None, "max_model_len=160 may be at most the 100 tokens"),
    ({}, {"has_sinks": True}, None, "has attention sinks"),
    ({}, {"kv_sources": (0, 0)}, None, "has layers that read the keys of others"),
    ({"kv_policy": "expected_attention(40)"}, {"attention_softcap": 30.0}, None, "caps its scores"),
]


def spec_of(config, draft=None, **options) -> EngineSpec:
    options = {"kv_policy": "snapkv(40)", "max_model_len": 160, "max_seqs": 4, "page_size": PAGE, **options}
    if options.get("cache") == "contiguous":
        del options["page_size"]
    return EngineSpec(
        config, abstract_params(config, "float32"), EngineOptions(**options), "cpu", draft=draft or NO_DRAFT
    )


@pytest.mark.parametrize(("options", "changes", "draft", "message"), REFUSED, ids=[one[3][:40] for one in REFUSED])
def test_what_cannot_be_combined_is_refused_by_name(options, changes, draft, message):
    config = replace(TINY, **{"max_position_embeddings": 512, **changes})
    with pytest.raises(ValueError, match=message):
        spec_of(config, draft=draft, **options)


def test_other_models_and_several_devices_are_refused():
    for config, message in ((DELTA, "has recurrent layers"), (LATENT, "has latent attention")):
        with pytest.raises(ValueError, match=message):
            spec_of(replace(config, max_position_embeddings=512))
    with open_llm() as llm, pytest.raises(ValueError, match=r"over all tokens, not kv_policy='snapkv\(40\)'"):
        llm.generate([1, 2, 3], SamplingParams(max_tokens=1), taps=["embed"])


# Bytes and programs.


@pytest.mark.matrix
@pytest.mark.parametrize("name", quick(POLICIES, *NO_SECOND_PASS))
def test_explain_counts_what_is_allocated(name):
    with open_llm(POLICIES[name], LAYERS[name]) as llm:
        facts, spec = llm.explain().to_dict()["cache"], llm.engine.spec
        arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.runner._cache))
        assert facts["bytes"] == arrays == spec.parts["cache"] == num_bytes(spec.cache)
        assert facts["policy"].startswith(f"{POLICIES[name]}: each key head keeps ")
        assert len(spec.groups) == (3 if name == "pyramidkv" else 1)


@pytest.mark.slow
def test_nothing_is_compiled_after_warm_up():
    with open_llm("pyramidkv(56)", (None, None, None), max_seqs=2) as llm:
        llm.warm_up()
        with jax.no_tracing():
            llm.generate([PROMPT, PROMPT[:20]], GREEDY)


def test_without_a_policy_nothing_of_it_is_traced(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("traced")

    monkeypatch.setattr(paged_cache, "_shorter", refuse)
    config = replace(TINY, max_position_embeddings=512)
    for one in planned_programs(spec_of(config, kv_policy=None, prefill_chunk=23)).values():
        one.function.lower(*one.arguments)
    decode = planned_programs(spec_of(config, prefill_chunk=21))["decode"]
    with pytest.raises(AssertionError, match="traced"):
        decode.function.lower(*decode.arguments)
