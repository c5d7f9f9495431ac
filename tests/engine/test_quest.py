"""One answer under `kv_policy="quest(N)"`: alone and together, however prompts are cut, with prefix hits, preemption,
and drafts.

Oracle: dense attention under a mask of the chosen pages (tests/engine/dense_quest.py). Inverse tests plant faults,
which must change answers.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.cache.paged import LeafedPages
from jaxinfer.cache.policy import best_pages
from jaxinfer.cache.policy.best_pages import query_parts_of_step
from jaxinfer.cache.policy.kinds import parse_policy
from jaxinfer.engine.tiers import host_pages
from jaxinfer.sampling import SamplingRow, make_batch, make_state, sample
from tests.engine.dense_quest import dense_logits
from tests.engine.test_policies import (
    DRAFTS,
    MAX_TOKENS,
    NUM_PROMPTS,
    PAGE,
    PARAMS,
    PROMPTS,
    VARIANTS,
    answers,
    check_everything,
    model_of,
    open_llm,
)
from tests.engine.test_windows import check_idle
from tests.pallas_kernels.quick import quick

POLICY = "quest(16)"
MODELS = {"full": (None,) * 4, "windows and full": (8, None, None, 16, None)}
QUICK = "windows and full"
LENGTH = 128  # of the longest sequence


@pytest.fixture(scope="module", params=quick(MODELS, QUICK))
def model(request):
    return model_of(MODELS[request.param])


def open_quest(model, **options):
    return open_llm(model, **{"kv_policy": POLICY, **options})


@pytest.fixture(scope="module")
def expected(model):
    """Tokens of all answers to each prompt alone, the prompt in one step."""
    with open_quest(model, prefill_chunk=LENGTH) as llm:
        return [answers(llm, [number])[0] for number in range(NUM_PROMPTS)]


def rows_of(model, best, prompt, answer) -> np.ndarray:
    """float32 [128, V], the logits after each token of a prompt and its answer."""
    tokens = np.array(([*prompt, *answer] + [0] * LENGTH)[:LENGTH])
    return np.asarray(dense_logits(*model, best, tokens, np.int32(len(prompt))))


def dense_choices(model, pairs, best):
    """What the sampler chooses from dense attention, after each (number, answer)."""
    found, rows = [], np.arange(MAX_TOKENS)
    for number, tokens in pairs:
        logits = rows_of(model, best, PROMPTS[number], tokens)
        positions = np.minimum(len(PROMPTS[number]) + rows, LENGTH - 1).astype(np.int32)
        batch = make_batch([SamplingRow(PARAMS[number], PARAMS[number].seed or 0)] * MAX_TOKENS, model[0].vocab_size)
        state = make_state([PROMPTS[number]] * MAX_TOKENS, model[0].vocab_size, [tokens[:k] for k in rows])
        chosen = jax.jit(sample)(logits[positions - 1], positions, batch, state).tokens
        found.append(chosen.tolist()[: len(tokens)])
    return found


@pytest.mark.slow
def test_alone_is_what_dense_attention_to_the_chosen_pages_gives(model, expected):
    pairs = [(number, found[0]) for number, found in enumerate(expected)]
    best = parse_policy(POLICY).bound(PAGE, None)
    assert dense_choices(model, pairs, best) == [tokens for _, tokens in pairs]
    assert len({str(one) for one in expected}) > 9  # different enough to tell a mistake
    for other in (replace(best, budget=PAGE), replace(best, budget=16 * PAGE), replace(best, num_dense_layers=0)):
        assert dense_choices(model, pairs, other) != [tokens for _, tokens in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("budget", quick((1, 16, 25, 64), 16))
@pytest.mark.parametrize("seed", quick((1, 2, 3), 1))
def test_log_probabilities_are_those_of_the_dense_form(seed, budget):
    model, prompt = model_of(MODELS["full"], seed=seed), PROMPTS[seed][:40]
    params = SamplingParams(max_tokens=80, temperature=0, logprobs=3, ignore_eos=True)
    with open_quest(model, kv_policy=f"quest({budget})", max_seqs=1) as llm:
        output = llm.generate([prompt], params)[0].outputs[0]
    logits = rows_of(model, parse_policy(f"quest({budget})").bound(PAGE, None), prompt, output.token_ids)
    expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))[len(prompt) - 1 :]
    differences = [
        abs(value.logprob - expected[row, token])
        for row, step in enumerate(output.logprobs)
        for token, value in step.items()
    ]
    print(f"seed {seed}, quest({budget}): {len(differences)} log-probabilities, at most {max(differences):.1e} apart")
    assert max(differences) < 1e-4


@pytest.mark.slow
def test_a_budget_for_everything_is_no_policy(model):
    found = []
    for policy in (None, "quest(128)", POLICY):
        with open_quest(model, kv_policy=policy) as llm:
            found.append(answers(llm, range(NUM_PROMPTS)))
    assert found[0] == found[1] != found[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", quick(VARIANTS, "chunks of 16"))
def test_however_it_is_cut_and_stored(model, expected, variant):
    with open_quest(model, **VARIANTS[variant]) as llm:
        check_everything(llm, expected)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", quick(DRAFTS, "ngram"))
def test_drafts_change_no_answer(model, expected, name):
    with open_quest(model, **DRAFTS[name]) as llm:
        check_everything(llm, expected)


@pytest.mark.slow
def test_streamed(model, expected):
    with open_quest(model) as llm:
        for number in (1, 6):
            found = [token for delta in llm.stream(PROMPTS[number], PARAMS[number]) for token in delta.token_ids]
            assert found == expected[number][0]


def from_host_memory(model) -> list:
    """Answers to prompts that were asked before, whose pages are in host memory in between."""
    with open_quest(model, host_cache_gib=0.01, num_pages=40, max_seqs=2) as llm:
        for _ in range(2):
            found = [answers(llm, [number])[0] for number in range(NUM_PROMPTS)]
        assert llm.engine.scheduler.counters.host_hit_tokens > 100
        check_idle(llm)
    return found


@pytest.mark.slow
def test_pages_come_back_from_host_memory_with_their_bounds(model, expected, monkeypatch):
    assert from_host_memory(model) == expected
    scatter = host_pages.scatter_pages

    def without_bounds(mesh, parts, rows, ids):
        parts = scatter(mesh, parts, rows, ids)

        def forget(pages):
            leafed = isinstance(pages, LeafedPages)
            return pages._replace(leaves=pages.leaves.at[ids].set(0, mode="drop")) if leafed else pages

        return jax.tree.map(forget, parts, is_leaf=lambda part: isinstance(part, LeafedPages))

    monkeypatch.setattr(host_pages, "scatter_pages", without_bounds)
    assert from_host_memory(model) != expected


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", quick(("int8", "fp8_e4m3", "bfloat16"), "int8"))
def test_rounded_keys_change_no_answer(kv_dtype):
    model, prompt = model_of(MODELS["full"]), [*range(60)]
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
    found = []
    for options in ({"prefill_chunk": 128}, {"prefill_chunk": 5, "draft": "ngram", "num_draft_tokens": 3}):
        with open_quest(model, max_seqs=2, kv_dtype=kv_dtype, **options) as llm:
            found.append(llm.generate(prompt, params)[0].outputs[0].token_ids)
    assert found[0] == found[1]


def test_an_answer_in_a_later_prompt_is_computed_as_a_prompt(model):
    """Pages of answers, which depend on choices, are not those of a text that begins alike; nor the other way."""
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with open_quest(model, prefix_cache=False) as llm:
        first = llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids
        longer = [*PROMPTS[0], *first[:20]]
        second = llm.generate(longer, params)[0].outputs[0].token_ids
    assert second[:8] != first[20:28]  # otherwise nothing is tested
    with open_quest(model) as llm:
        assert llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids == first
        for _ in range(2):
            assert llm.generate(longer, params)[0].outputs[0].token_ids == second
        # And an answer that is computed anew finds the longer prompt.
        sequence = llm.submit(llm.prepare(PROMPTS[0], params))[0]
        while sequence.num_output < 12:
            llm.step()
        llm.engine._commit_all()
        llm.engine.scheduler.preempt(sequence)
        while llm.engine.has_work:
            llm.step()
        assert sequence.output == first


@pytest.mark.parametrize("prefill_chunk", quick((128, 50, 7), 50))
def test_a_preempted_answer_is_replayed_token_by_token(model, prefill_chunk, monkeypatch):
    """More tokens than one step replays, beside a prompt and another answer; and the inverse test: were they computed
    as tokens of a prompt, the rest would differ."""
    params = SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)
    with open_quest(model, steps_per_dispatch=1, prefill_chunk=prefill_chunk) as llm:
        wanted = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in PROMPTS[:3]]
        num_replayed = llm.engine.spec.policy.num_replayed

        def found() -> list[list[int]]:
            first, second, third = (llm.submit(llm.prepare(prompt, params))[0] for prompt in PROMPTS[:3])
            while first.num_output < 45 or second.num_output < 20:
                llm.step()
            llm.engine._commit_all()
            for sequence in (first, second):
                llm.engine.scheduler.preempt(sequence)
            while llm.engine.has_work:
                llm.step()
            return [sequence.output for sequence in (first, second, third)]

        assert num_replayed < 45
        assert found() == wanted
        monkeypatch.setattr(
            best_pages,
            "query_parts_of_step",
            lambda best, table, rows: query_parts_of_step(
                best, table, replace(rows, prompt_lengths=rows.prompt_lengths + 1000)
            ),
        )
        jax.clear_caches()
        assert found() != wanted
        jax.clear_caches()
        check_idle(llm)
