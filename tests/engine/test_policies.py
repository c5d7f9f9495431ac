"""One answer under `kv_policy`: alone and together, however prompts are cut, with prefix hits, preemption and drafts.

Oracle: dense attention under a mask (tests/engine/dense_policy.py). Inverse tests plant faults, which must change
answers.
"""

import random
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer import LLM
from jaxinfer.cache.policy.kinds import parse_policy
from jaxinfer.models import init_params
from jaxinfer.sampling import SamplingRow, make_batch, make_state, sample
from tests.engine.dense_policy import dense_logits
from tests.engine.mixed_requests import mixed_params, random_prompts
from tests.engine.test_windows import check_idle
from tests.pallas_kernels.quick import quick
from tests.tiny import TINY

POLICY = "sinks(4)+window(16)"
PAGE = 8
WINDOWS = {"full": (None, None), "a window and full": (8, None, 16)}
LENGTHS = {"as trained": 512, "beyond": 48}  # what the model was trained for; sequences have up to 128 tokens
MODELS = {f"{windows}, {length}": (WINDOWS[windows], LENGTHS[length]) for windows in WINDOWS for length in LENGTHS}
QUICK = "a window and full, beyond"
NUM_PROMPTS = 12
PROMPTS = random_prompts(NUM_PROMPTS - 3, 70, seed=7)
PROMPTS += [PROMPTS[0][:30] + prompt for prompt in random_prompts(3, 50, seed=8)]
MAX_TOKENS = 12 + 3 * NUM_PROMPTS
PARAMS = [replace(mixed_params(number), max_tokens=12 + 3 * number) for number in range(NUM_PROMPTS)]
PARAMS[9] = replace(PARAMS[9], n=3, temperature=0.8, seed=5)  # two answers share the prompt of the first
OPTIONS = {
    "max_seqs": 8,
    "max_model_len": 128,
    "page_size": PAGE,
    "prefill_chunk": 40,
    "steps_per_dispatch": 6,
    "kv_policy": POLICY,
}
VARIANTS = {
    "as it is": {},
    "chunks of 16": {"prefill_chunk": 16},
    "chunks of 5, a step a dispatch": {"prefill_chunk": 5, "steps_per_dispatch": 1},
    "chunks of 64": {"prefill_chunk": 64},
    "deterministic": {"deterministic": True},
    "without prefix reuse": {"prefix_cache": False},
}
DRAFTS = {
    "ngram": {"draft": "ngram", "num_draft_tokens": 4},
    "ngram, adaptive": {"draft": "ngram"},
    "a model": {"draft": (None,), "num_draft_tokens": 5},
    "a model with a window, adaptive": {"draft": (11, 3)},
    "a model, deterministic": {"draft": (None,), "num_draft_tokens": 3, "deterministic": True},
}


def model_of(windows: tuple[int | None, ...], length: int = 512, seed: int = 5):
    config = replace(TINY, num_layers=len(windows), sliding_windows=windows, max_position_embeddings=length)
    params = init_params(config, jax.random.key(seed))
    return config, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params)


@pytest.fixture(scope="module", params=quick(MODELS, QUICK))
def model(request):
    return model_of(*MODELS[request.param])


def kept_of(model):
    return parse_policy(POLICY).bound(PAGE, model[0].max_length if model[0].max_length < 128 else None)


def open_llm(model, **options) -> LLM:
    if isinstance(windows := options.get("draft"), tuple):
        options["draft"] = model_of(windows, seed=6)
    return LLM(model, **{**OPTIONS, **options})


def answers(llm: LLM, numbers) -> list[list[list[int]]]:
    outputs = llm.generate([PROMPTS[number] for number in numbers], [PARAMS[number] for number in numbers])
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(model):
    """Tokens of all answers to each prompt alone, the prompt in one step."""
    with open_llm(model, prefill_chunk=128) as llm:
        return [answers(llm, [number])[0] for number in range(NUM_PROMPTS)]


def dense_choices(model, pairs, kept):
    """What the sampler chooses from dense attention, after each (number, answer)."""
    config, params = model
    found, rows = [], np.arange(MAX_TOKENS)
    for number, tokens in pairs:
        row = ([*PROMPTS[number], *tokens] + [0] * 128)[:128]
        logits = np.asarray(dense_logits(config, params, kept, np.array(row)))
        positions = np.minimum(len(PROMPTS[number]) + rows, 127).astype(np.int32)  # those after the answer do not count
        batch = make_batch([SamplingRow(PARAMS[number], PARAMS[number].seed or 0)] * MAX_TOKENS, config.vocab_size)
        state = make_state([PROMPTS[number]] * MAX_TOKENS, config.vocab_size, [tokens[:k] for k in rows])
        chosen = jax.jit(sample)(logits[positions - 1], positions, batch, state).tokens
        found.append(chosen.tolist()[: len(tokens)])
    return found


def test_alone_is_what_dense_attention_under_a_mask_gives(model, expected):
    pairs = [(number, found[0]) for number, found in enumerate(expected)]
    kept = kept_of(model)
    assert dense_choices(model, pairs, kept) == [tokens for _, tokens in pairs]
    assert len({str(one) for one in expected}) > 9  # different enough to tell a mistake
    one_more = replace(kept, window=kept.window + PAGE)
    assert dense_choices(model, pairs[:4], one_more) != [tokens for _, tokens in pairs[:4]]
    if kept.trained is not None:
        at_their_own = replace(kept, trained=None)
        assert dense_choices(model, pairs[:4], at_their_own) != [tokens for _, tokens in pairs[:4]]


def check_everything(
    llm: LLM, expected, answers=answers, least_of=lambda pools: pools.least_pages(128), num_short=None
) -> None:
    """Alone, together, again with prefix hits, and so short of pages that sequences are preempted: one after another,
    the first `num_short` pools, by default all, have what `least_of` says, which suffices for any one sequence."""
    scheduler, everything = llm.engine.scheduler, range(NUM_PROMPTS)
    for number in range(0, NUM_PROMPTS, 4):
        assert answers(llm, [number])[0] == expected[number], number
    for pool in scheduler.pools.all:
        pool.drop_idle()
        random.Random(3).shuffle(pool._free)
    assert answers(llm, everything) == expected
    assert answers(llm, everything) == expected
    reused = scheduler.counters.reused_tokens
    for _ in range(2):
        assert answers(llm, range(4)) == expected[:4]
    assert (scheduler.counters.reused_tokens > reused + 60) == llm.engine.spec.reuses_prefixes
    spare, scheduler._num_spare = scheduler._num_spare, lambda: [0] * len(scheduler.pools.all)  # admits too many
    preempted = scheduler.counters.num_preemptions
    for index, pool in enumerate(scheduler.pools.all[:num_short]):
        least = least_of(scheduler.pools)[index]
        pool.drop_idle()
        hidden = pool.allocate(pool.num_available - least - 1)
        assert answers(llm, everything) == expected, scheduler.pools.groups[index].name
        pool.release(hidden)
    assert scheduler.counters.num_preemptions > preempted
    scheduler._num_spare = spare
    check_idle(llm)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", quick(VARIANTS, "chunks of 16"))
def test_however_it_is_cut_and_stored(model, expected, variant):
    with open_llm(model, **VARIANTS[variant]) as llm:
        check_everything(llm, expected)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", quick(DRAFTS, "a model"))
def test_drafts_change_no_answer(model, expected, name):
    with open_llm(model, **DRAFTS[name]) as llm:
        check_everything(llm, expected)


@pytest.mark.slow
@pytest.mark.matrix
def test_streamed(model, expected):
    with open_llm(model) as llm:
        for number in (1, 6):
            found = [token for delta in llm.stream(PROMPTS[number], PARAMS[number]) for token in delta.token_ids]
            assert found == expected[number][0]
