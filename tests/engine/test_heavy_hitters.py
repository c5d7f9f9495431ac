"""One answer under `kv_policy="h2o(N)"`: alone and together, however prompts are cut, preempted, streamed.

Oracle: dense attention written from the paper (tests/engine/dense_heavy.py). Inverse tests plant faults, which must
change answers.
"""

import random
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer import LLM
from jaxinfer.sampling import SamplingRow, make_batch, make_state, sample
from tests.engine.dense_heavy import DenseHeavy, dense_logits
from tests.engine.mixed_requests import mixed_params, random_prompts
from tests.engine.test_policies import model_of
from tests.engine.test_windows import check_idle
from tests.pallas_kernels.quick import quick

PAGE, BUDGET = 8, 24
NUM_PROMPTS, LENGTH = 10, 160
PROMPTS = [*random_prompts(6, 80, seed=7), [5, 7, 9], [3], [*range(20)], [*range(64)]]
PARAMS = [replace(mixed_params(number), max_tokens=12 + 8 * number) for number in range(NUM_PROMPTS)]
PARAMS[3] = replace(PARAMS[3], n=3, temperature=0.8, seed=5)
OPTIONS = {
    "max_seqs": 8,
    "max_model_len": LENGTH,
    "page_size": PAGE,
    "prefill_chunk": 40,
    "steps_per_dispatch": 6,
    "kv_policy": f"h2o({BUDGET})",
}
VARIANTS = {
    "as it is": {},
    "chunks of 16": {"prefill_chunk": 16},
    "chunks of 5, a step a dispatch": {"prefill_chunk": 5, "steps_per_dispatch": 1},
    "chunks of 64": {"prefill_chunk": 64},
    "dispatches of 20": {"steps_per_dispatch": 20},
    "deterministic": {"deterministic": True},
    "pages at random": {"shuffle_seed": 3},
}


@pytest.fixture(scope="module")
def model():
    return model_of((None, None))


def answers(llm: LLM, numbers) -> list[list[list[int]]]:
    outputs = llm.generate([PROMPTS[number] for number in numbers], [PARAMS[number] for number in numbers])
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(model):
    """Tokens of all answers to each prompt alone, the prompt in one step."""
    with LLM(model, **{**OPTIONS, "prefill_chunk": 128}) as llm:
        return [answers(llm, [number])[0] for number in range(NUM_PROMPTS)]


def dense_choices(model, number: int, tokens: list[int], **fault) -> list[int]:
    """What the sampler chooses from dense attention, after each token of an answer."""
    config, params = model
    prompt, count, rows = PROMPTS[number], len(tokens), PARAMS[-1].max_tokens
    attend = DenseHeavy(len(prompt), PAGE, BUDGET, **fault)
    logits = dense_logits(config, params, [*prompt, *tokens[:-1]], attend)[len(prompt) - 1 :]
    # As many rows for each answer: one program.
    logits = np.pad(logits, ((0, rows - count), (0, 0)))
    batch = make_batch([SamplingRow(PARAMS[number], PARAMS[number].seed or 0)] * rows, config.vocab_size)
    state = make_state([prompt] * rows, config.vocab_size, [tokens[:k] for k in range(rows)])
    positions = len(prompt) + np.arange(rows, dtype=np.int32)
    return jax.jit(sample)(logits, positions, batch, state).tokens[:count].tolist()


@pytest.mark.slow
def test_alone_is_what_dense_attention_gives(model, expected):
    for number, found in enumerate(expected):
        assert dense_choices(model, number, found[0]) == found[0], number
    assert len({str(one) for one in expected}) == NUM_PROMPTS


@pytest.mark.slow
def test_an_eviction_a_position_early_is_noticed(model, expected):
    longest = NUM_PROMPTS - 1
    assert dense_choices(model, longest, expected[longest][0], early=1) != expected[longest][0]


def check_everything(llm: LLM, expected) -> None:
    """Alone, together, again, and so short of pages that sequences are preempted."""
    scheduler, everything = llm.engine.scheduler, range(NUM_PROMPTS)
    for number in range(0, NUM_PROMPTS, 3):
        assert answers(llm, [number])[0] == expected[number], number
    assert answers(llm, everything) == expected
    (pool,) = scheduler.pools.all
    random.Random(3).shuffle(pool._free)
    spare, scheduler._num_spare = scheduler._num_spare, lambda: [0]  # admits too many
    preempted, least = scheduler.counters.num_preemptions, scheduler.pools.pages_for(90)
    hidden = pool.allocate(pool.num_available - least)
    assert answers(llm, everything) == expected
    pool.release(hidden)
    assert scheduler.counters.num_preemptions > preempted
    assert scheduler.counters.reused_tokens == 0
    scheduler._num_spare = spare
    check_idle(llm)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", quick(VARIANTS, "chunks of 16"))
def test_however_it_is_cut_and_stored(model, expected, variant):
    with LLM(model, **{**OPTIONS, **VARIANTS[variant]}) as llm:
        check_everything(llm, expected)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_preempted_anywhere(model, expected, every):
    """The prompt is computed again, and then the answer in the same pieces: pages, their sums and what is dropped."""
    with LLM(model, **{**OPTIONS, "steps_per_dispatch": 3}) as llm:
        engine = llm.engine
        for number in (2, 6, 9):
            (sequence,) = llm.submit(llm.prepare(PROMPTS[number], PARAMS[number]))
            count = 0
            while engine.has_work:
                engine.step()
                engine._commit_all()
                if sequence.slot is not None and sequence.num_output and (count := count + 1) % every == 0:
                    engine.scheduler.preempt(sequence)
                    while engine.has_work and not sequence.is_decoding:
                        engine.step()
                        engine._commit_all()
            assert sequence.num_preemptions > 2
            assert sequence.tokens[len(PROMPTS[number]) :] == expected[number][0]


def test_streamed(model, expected):
    with LLM(model, **OPTIONS) as llm:
        for number in (1, 6):
            found = [token for delta in llm.stream(PROMPTS[number], PARAMS[number]) for token in delta.token_ids]
            assert found == expected[number][0]
