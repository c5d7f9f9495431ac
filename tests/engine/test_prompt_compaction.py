"""One answer where prompts are compacted: alone and together, however prompts are cut, with prefix hits, preemption and
drafts.

Oracle: dense attention under a mask by head (tests/engine/dense_prompt_policy.py). Inverse tests plant faults, which
must change answers.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer import LLM
from jaxinfer.cache.policy.kinds import parse_policy
from jaxinfer.sampling import SamplingRow, make_batch, make_state, sample
from tests.engine import test_policies
from tests.engine.dense_prompt_policy import dense_logits
from tests.engine.mixed_requests import mixed_params, random_prompts
from tests.engine.test_policies import model_of
from tests.pallas_kernels.quick import quick

PAGE, LENGTH = 8, 160
POLICIES = {
    "snapkv": "snapkv(40)",
    "keydiff": "keydiff(40)",
    "pyramidkv": "pyramidkv(56)",
    "expected_attention": "expected_attention(40)",
}
LAYERS = {name: (None,) * (3 if name == "pyramidkv" else 2) for name in POLICIES}
NUM_PROMPTS = 12
LONGEST = 110
PROMPTS = random_prompts(NUM_PROMPTS - 3, LONGEST, seed=7)
PROMPTS[5] += PROMPTS[0][: LONGEST - len(PROMPTS[5])]
PROMPTS[0] = [*range(7, 97), *PROMPTS[0][:10]]
PROMPTS += [PROMPTS[0][:50] + prompt for prompt in random_prompts(3, 50, seed=8)]
MAX_TOKENS = 12 + 3 * NUM_PROMPTS
PARAMS = [replace(mixed_params(number), max_tokens=12 + 3 * number) for number in range(NUM_PROMPTS)]
PARAMS[9] = replace(PARAMS[9], n=3, temperature=0.8, seed=5)  # two answers share the pages of the first one's prompt
OPTIONS = {"max_seqs": 8, "max_model_len": LENGTH, "page_size": PAGE, "prefill_chunk": 40, "steps_per_dispatch": 6}
VARIANTS = {
    "as it is": {},
    "chunks of 16": {"prefill_chunk": 16},
    "chunks of 5, a step a dispatch": {"prefill_chunk": 5, "steps_per_dispatch": 1},
    "chunks of 64": {"prefill_chunk": 64},
    "deterministic": {"deterministic": True},
    "without prefix reuse": {"prefix_cache": False},
    "host memory": {"host_cache_gib": 0.001},
}
DRAFTS = {
    "ngram": {"draft": "ngram", "num_draft_tokens": 4},
    "ngram, adaptive": {"draft": "ngram"},
    "a model": {"draft": (None,), "num_draft_tokens": 5},
    "a model, adaptive": {"draft": (None,)},
    "a model, deterministic": {"draft": (None,), "num_draft_tokens": 3, "deterministic": True},
}


@pytest.fixture(scope="module", params=quick(POLICIES, "snapkv"))
def policy(request):
    return POLICIES[request.param]


@pytest.fixture(scope="module")
def model(policy):
    return model_of(LAYERS[parse_policy(policy).method])


def open_llm(model, policy, **options) -> LLM:
    if isinstance(windows := options.get("draft"), tuple):
        options["draft"] = model_of(windows, seed=6)
    return LLM(model, **{**OPTIONS, "kv_policy": policy, **options})


def answers(llm: LLM, numbers) -> list[list[list[int]]]:
    outputs = llm.generate([PROMPTS[number] for number in numbers], [PARAMS[number] for number in numbers])
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(model, policy):
    """Tokens of all answers to each prompt alone, the prompt in two passes."""
    with open_llm(model, policy, prefill_chunk=128) as llm:
        return [answers(llm, [number])[0] for number in range(NUM_PROMPTS)]


def dense_choices(model, policy, pairs, dropped=0):
    """What the sampler chooses from dense attention, after each (number, answer). With `dropped`, of the prompt without
    its last tokens."""
    config, params = model
    found, rows = [], np.arange(MAX_TOKENS)
    for number, tokens in pairs:
        row = ([*PROMPTS[number], *tokens] + [0] * LENGTH)[:LENGTH]
        budget, length = parse_policy(policy), len(PROMPTS[number])
        logits = np.asarray(dense_logits(config, params, budget, PAGE, np.array(row), length - dropped)[0])
        positions = np.minimum(length + rows, LENGTH - 1).astype(np.int32)  # those after the answer do not count
        batch = make_batch([SamplingRow(PARAMS[number], PARAMS[number].seed or 0)] * MAX_TOKENS, config.vocab_size)
        state = make_state([PROMPTS[number]] * MAX_TOKENS, config.vocab_size, [tokens[:k] for k in rows])
        chosen = jax.jit(sample)(logits[positions - 1], positions, batch, state).tokens
        found.append(chosen.tolist()[: len(tokens)])
    return found


@pytest.mark.slow
def test_alone_is_what_dense_attention_under_a_mask_gives(model, policy, expected):
    pairs = [(number, found[0]) for number, found in enumerate(expected)]
    assert dense_choices(model, policy, pairs) == [tokens for _, tokens in pairs]
    assert len({str(one) for one in expected}) > 9  # different enough to tell a mistake
    long = [pair for pair in pairs if len(PROMPTS[pair[0]]) > 70][:4]
    assert len(long) == 4
    early = dense_choices(model, policy, long, dropped=1)
    assert early != [tokens for _, tokens in long]
    larger = policy.replace("(", "(1")  # which keeps all of these prompts
    assert dense_choices(model, larger, long) != [tokens for _, tokens in long]


def least_pages(pools) -> list[int]:
    """By pool, for the longest prompt and answer, and for that prompt while it is compacted."""
    return list(map(max, pools.least_pages(LENGTH, LONGEST), pools.least_pages(LENGTH)))


def check_everything(llm: LLM, expected) -> None:
    test_policies.check_everything(llm, expected, answers, least_pages, num_short=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", quick(VARIANTS, "chunks of 16"))
def test_however_it_is_cut_and_stored(model, policy, expected, variant):
    with open_llm(model, policy, **VARIANTS[variant]) as llm:
        check_everything(llm, expected)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", quick(DRAFTS, "ngram"))
def test_drafts_change_no_answer(model, policy, expected, name):
    with open_llm(model, policy, **DRAFTS[name]) as llm:
        check_everything(llm, expected)


def test_streamed(model, policy, expected):
    with open_llm(model, policy) as llm:
        for number in (0, 5):
            found = [token for delta in llm.stream(PROMPTS[number], PARAMS[number]) for token in delta.token_ids]
            assert found == expected[number][0]
