"""Speculation changes no answer: six drafts, every length, chains and trees, alone and together, with prefix hits and
preemption give the tokens of plain decoding, for requests of every kind. Inverse tests show that the check can fail."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.programs import speculative as speculative_programs
from jaxinfer.models import init_params
from jaxinfer.speculative import acceptance
from tests.engine.mixed_requests import mixed_params, random_prompts
from tests.engine.shared_rows import always_share_rows
from tests.pallas_kernels.quick import quick

NUM_PROMPTS = 30
OPTIONS = {"max_model_len": 128, "num_pages": 300, "steps_per_dispatch": 6, "prefill_chunk": 64}
PROMPTS = random_prompts(NUM_PROMPTS, 60, seed=3)
# What is in the answers decides how the sampler sees them: penalties, bad words and min_tokens within the drafts.
PARAMS = [replace(mixed_params(number), max_tokens=4 + number) for number in range(NUM_PROMPTS)]
PARAMS[4] = replace(PARAMS[4], prompt_logprobs=None, logprobs=3)
PARAMS[9] = replace(PARAMS[9], n=2, temperature=0.8, seed=5)
PARAMS[10] = SamplingParams(max_tokens=40, temperature=0, repetition_penalty=1.5, presence_penalty=0.5)
PARAMS[11] = SamplingParams(max_tokens=40, temperature=0.3, seed=2, min_tokens=20, stop_token_ids=[3, 4, 5, 6, 7, 8])
DRAFTS = ("itself", "near", "random", "always wrong", "ngram", "layers:1")
TREES = ((2, 2), (3, 1, 2))


@pytest.fixture(scope="module")
def drafts(tiny):
    """The target, and what drafts for it, by name. All models have one configuration, and so the same programs."""
    config, params = tiny

    def noisy(leaf, key):
        return leaf + 0.05 * jnp.std(leaf) * jax.random.normal(key, leaf.shape) if leaf.ndim == 2 else leaf

    keys = iter(jax.random.split(jax.random.key(9), 100))
    others = init_params(config, jax.random.key(1))
    return {
        "itself": tiny,
        "near": (config, jax.tree.map(lambda leaf: noisy(leaf, next(keys)), params)),
        "random": (config, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, others)),
        "always wrong": (config, {**params, "lm_head": -params["lm_head"]}),
        "ngram": "ngram",
        "layers:1": "layers:1",
    }


@pytest.fixture(scope="module")
def expected(tiny):
    with LLM(tiny, **OPTIONS, max_seqs=16) as llm:
        found = answers(llm)
    assert len({str(one) for one in found}) > 20  # different enough to tell a mistake
    return found


def answers(llm: LLM, start: int = 0, end: int = NUM_PROMPTS) -> list:
    """Tokens and ranks of all answers to these prompts."""
    outputs = [one for output in llm.generate(PROMPTS[start:end], PARAMS[start:end]) for one in output.outputs]
    assert not llm.engine.scheduler.has_work
    return [(one.token_ids, one.finish_reason, [[*entry] for entry in one.logprobs or ()]) for one in outputs]


def check_everything(target, draft, expected, **options) -> LLM:
    """Alone, together, again with prefix hits, and so short of pages that sequences are preempted."""
    with LLM(target, draft=draft, **OPTIONS, max_seqs=16, **options) as llm:
        alone = [one for number in range(8) for one in answers(llm, number, number + 1)]
        assert alone == expected[:8]
        llm.engine.scheduler.pool.drop_idle()
        assert answers(llm) == expected
        reused = llm.engine.scheduler.counters.reused_tokens
        assert answers(llm) == expected
        assert llm.engine.scheduler.counters.reused_tokens > reused + 300
        pool = llm.engine.scheduler.pool
        pool.drop_idle()
        random.Random(3).shuffle(pool._free)
        hidden = pool.allocate(pool.num_available - 8)
        assert answers(llm) == expected
        assert llm.engine.scheduler.counters.num_preemptions > 2
        pool.release(hidden)
    return llm


def lengths(all_lengths, few):
    return [length if length in few else pytest.param(length, marks=pytest.mark.slow) for length in all_lengths]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("length", lengths(range(1, 9), (4,)))
@pytest.mark.parametrize("name", quick(DRAFTS, "itself"))
def test_chains_change_no_answer(tiny, drafts, expected, name, length):
    check_everything(tiny, drafts[name], expected, num_draft_tokens=length)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("widths", lengths(TREES, TREES[:1]), ids=str)
@pytest.mark.parametrize("name", quick((name for name in DRAFTS if name != "ngram"), "near"))
def test_trees_change_no_answer(tiny, drafts, expected, name, widths):
    check_everything(tiny, drafts[name], expected, draft_tree=widths)


@pytest.mark.slow
def test_adaptive_lengths_change_no_answer(tiny, drafts, expected):
    check_everything(tiny, drafts["near"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTS)
def test_shared_rows_change_no_answer(tiny, drafts, expected, name, monkeypatch):
    """Rounds in which slots with many accepted drafts have more rows than others."""
    used = always_share_rows(monkeypatch)
    check_everything(tiny, drafts[name], expected, draft_lengths=(2, 5), decode_slots=(1, 16))
    assert sum(len(set(lengths)) > 1 for lengths in used) > 10


def rate(llm: LLM) -> float:
    stats = llm.speculation_stats()
    assert stats is not None
    return stats.acceptance_rate


@pytest.mark.parametrize("acceptance", quick(["exact", "maximal"], "exact"))
def test_the_target_accepts_all_that_it_drafts_itself(tiny, acceptance):
    """Greedy and seeded, with every kind of parameters."""
    with LLM(tiny, draft=tiny, num_draft_tokens=4, acceptance=acceptance, **OPTIONS, max_seqs=16) as llm:
        answers(llm)
        stats = llm.speculation_stats()
        assert stats is not None
        assert stats.acceptance_rate == 1.0
        assert stats.proposed > 300


@pytest.mark.slow
def test_what_drafts_well_is_accepted_more_often(tiny, drafts):
    rates = {}
    for name in DRAFTS:
        with LLM(tiny, draft=drafts[name], num_draft_tokens=4, **OPTIONS, max_seqs=16) as llm:
            answers(llm)
            rates[name] = rate(llm)
    assert rates["near"] > 0.3 > rates["random"]
    assert rates["always wrong"] < 0.1


@pytest.mark.slow
def test_maximal_acceptance_keeps_greedy_answers_and_accepts_more(tiny, drafts, expected):
    found = {}
    for rule in ("exact", "maximal"):
        options = {"num_draft_tokens": 4, "acceptance": rule, **OPTIONS}
        with LLM(tiny, draft=drafts["near"], **options, max_seqs=16) as llm:
            outputs = answers(llm)
            greedy = [number for number in range(9) if PARAMS[number].is_greedy]
            assert [outputs[number] for number in greedy] == [expected[number] for number in greedy]
            found[rule] = rate(llm)
    assert found["maximal"] > found["exact"]


@pytest.mark.slow
def test_deterministic_speculation_keeps_every_bit(tiny, drafts, request):
    params = [replace(one, logprobs=2) for one in PARAMS]

    def bits(**options):
        options = {**OPTIONS, "deterministic": True, "max_seqs": 8, **options}
        with LLM(tiny, **options) as llm:
            return [[(one.token_ids, one.logprobs) for one in out.outputs] for out in llm.generate(PROMPTS, params)]

    plain = bits()
    assert bits(draft=drafts["near"], num_draft_tokens=4) == plain
    if request.config.getoption("--slow"):
        assert bits(draft=drafts["near"], num_draft_tokens=4, deterministic=False) != plain
    with pytest.raises(ValueError, match="summed in another order"):
        bits(draft=drafts["near"], draft_tree=(2, 2))


def test_a_broken_draft_changes_no_answer(tiny, expected):
    config, params = tiny
    broken = (config, jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), params))
    with LLM(tiny, draft=broken, num_draft_tokens=4, **OPTIONS, max_seqs=16) as llm:
        assert answers(llm) == expected


@pytest.mark.parametrize("draft", quick(["itself", "ngram"], "itself"))
def test_a_row_of_nan_fails_alone(tiny, expected, draft):
    """The target's embedding of one token is broken: requests that meet it end with an error, others as ever."""
    config, params = tiny
    broken = (config, {**params, "embed": params["embed"].at[13].set(jnp.nan)})
    draft = tiny if draft == "itself" else draft
    options = {"draft": draft, "num_draft_tokens": 4, "max_seqs": 16, **OPTIONS}
    single = [number for number in range(NUM_PROMPTS) if PARAMS[number].n == 1]
    with LLM(broken, **options) as llm, LLM(tiny, **options) as sound:
        found, right = llm.generate(PROMPTS, PARAMS), sound.generate(PROMPTS, PARAMS)
    num_failed = 0
    for number in single:
        one, other = found[number].outputs[0], right[number].outputs[0]
        meets = [*PROMPTS[number], *other.token_ids[:-1]]
        if 13 not in meets:
            assert one.token_ids == other.token_ids
            assert one.finish_reason == other.finish_reason
        else:
            num_failed += 1
            assert one.finish_reason == "error"
            known = meets.index(13) - len(PROMPTS[number]) + 1
            assert one.token_ids == other.token_ids[: max(known, 0)]
    assert 2 < num_failed < len(single) - 2


def planted(monkeypatch, module, name, wrong, tiny, draft) -> list:
    """The answers with a mistake in the jitted round."""
    monkeypatch.setattr(module, name, wrong)
    jax.clear_caches()
    try:
        with LLM(tiny, draft=draft, num_draft_tokens=4, **OPTIONS, max_seqs=16) as llm:
            return answers(llm)
    finally:
        monkeypatch.undo()
        jax.clear_caches()


@pytest.mark.slow
def test_a_planted_off_by_one_is_caught(tiny, expected, monkeypatch):
    """The token after an accepted draft is chosen from the logits before it."""
    right = speculative_programs._logits_at

    def wrong(*arguments):
        at = right(*arguments)
        return lambda node: at(jnp.maximum(node - 1, 0))

    found = planted(monkeypatch, speculative_programs, "_logits_at", wrong, tiny, tiny)
    assert sum(one != other for one, other in zip(found, expected, strict=True)) > 10


@pytest.mark.slow
def test_penalties_that_forget_the_drafts_are_caught(tiny, expected, monkeypatch):
    found = planted(monkeypatch, acceptance, "advance", lambda history, *_: history, tiny, tiny)
    differ = [number for number, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    assert 11 in differ  # PARAMS[10], after the two answers of PARAMS[9]
    assert 0 not in differ
