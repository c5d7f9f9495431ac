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
from jaxinfer.cache.policies import parse_policy
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


def test_alone_is_what_dense_attention_to_the_chosen_pages_gives(model, expected):
    pairs = [(number, found[0]) for number, found in enumerate(expected)]
    best = parse_policy(POLICY).pages(PAGE)
    assert dense_choices(model, pairs, best) == [tokens for _, tokens in pairs]
    assert len({str(one) for one in expected}) > 9  # different enough to tell a mistake
    for other in (replace(best, num_pages=1), replace(best, num_pages=16), replace(best, num_dense_layers=0)):
        assert dense_choices(model, pairs, other) != [tokens for _, tokens in pairs]


@pytest.mark.parametrize("budget", quick((1, 16, 25, 64), 16))
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_log_probabilities_are_those_of_the_dense_form(seed, budget):
    model, prompt = model_of(MODELS["full"], seed=seed), PROMPTS[seed][:40]
    params = SamplingParams(max_tokens=80, temperature=0, logprobs=3, ignore_eos=True)
    with open_quest(model, kv_policy=f"quest({budget})", max_seqs=1) as llm:
        output = llm.generate([prompt], params)[0].outputs[0]
    logits = rows_of(model, parse_policy(f"quest({budget})").pages(PAGE), prompt, output.token_ids)
    expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))[len(prompt) - 1 :]
    differences = [
        abs(value.logprob - expected[row, token])
        for row, step in enumerate(output.logprobs)
        for token, value in step.items()
    ]
    print(f"seed {seed}, quest({budget}): {len(differences)} log-probabilities, at most {max(differences):.1e} apart")
    assert max(differences) < 1e-4


def test_a_budget_for_everything_is_no_policy(model):
    found = []
    for policy in (None, "quest(128)", POLICY):
        with open_quest(model, kv_policy=policy) as llm:
            found.append(answers(llm, range(NUM_PROMPTS)))
    assert found[0] == found[1] != found[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", quick(VARIANTS, "chunks of 16"))
def test_however_it_is_cut_and_stored(model, expected, variant):
    with open_quest(model, **VARIANTS[variant]) as llm:
        check_everything(llm, expected)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", quick(DRAFTS, "a model", "ngram"))
def test_drafts_change_no_answer(model, expected, name):
    with open_quest(model, **DRAFTS[name]) as llm:
        check_everything(llm, expected)


def test_streamed(model, expected):
    with open_quest(model) as llm:
        for number in (1, 6):
            found = [token for delta in llm.stream(PROMPTS[number], PARAMS[number]) for token in delta.token_ids]
            assert found == expected[number][0]
