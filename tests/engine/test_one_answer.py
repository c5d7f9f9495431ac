"""One answer: the tokens of a request whatever runs beside it, however its prompt is cut, wherever its pages lie.

30 requests of every kind are answered alone over a contiguous cache; every other way must give the same tokens. In
deterministic mode every bit of the log-probabilities must agree too, and a last test shows that this check can fail.
"""

import random
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.models import init_params
from jaxinfer.sampling import SamplingRow, make_batch, make_state, sample
from jaxinfer.training.objectives import sequence_logits
from tests.engine.mixed_requests import mixed_params, random_prompts
from tests.pallas_kernels.quick import quick

NUM_PROMPTS = 30
MAX_MODEL_LEN = 192
PROMPTS = random_prompts(NUM_PROMPTS, 150, seed=7)
PARAMS = [replace(mixed_params(number), max_tokens=6 + number) for number in range(NUM_PROMPTS)]
# One set of shapes for most tests, so that they share their compiled programs.
OPTIONS = {"max_seqs": 8, "num_pages": 200, "max_model_len": MAX_MODEL_LEN}
# What differs from the default engine, whose prompts are computed whole, in pages of 16 tokens.
VARIANTS = {
    "pages of 64": {"page_size": 64},
    "chunks of 16": {"prefill_chunk": 16},
    "chunks of 64": {"prefill_chunk": 64},
    "chunks of 64, pages of 64": {"prefill_chunk": 64, "page_size": 64},
    "one step a dispatch": {"steps_per_dispatch": 1},
}


@pytest.fixture(scope="module")
def model(tiny):
    config = replace(tiny[0], max_position_embeddings=512)
    params = init_params(config, jax.random.key(5))
    return config, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params)


@pytest.fixture(scope="module")
def expected(model):
    """Tokens of each prompt alone, over a contiguous cache."""
    with LLM(model, cache="contiguous", max_seqs=1, max_model_len=MAX_MODEL_LEN) as llm:
        tokens = [llm.generate(p, one)[0].outputs[0].token_ids for p, one in zip(PROMPTS, PARAMS, strict=True)]
    assert len({tuple(one) for one in tokens}) > 20  # different enough to tell a mistake
    return tokens


@pytest.mark.slow
def test_alone_is_what_the_model_gives_without_a_cache(model, expected):
    """Oracle: dense attention over each whole answer, and the sampler once over all of its positions."""
    config, params = model
    answers = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    logits = jax.jit(partial(sequence_logits, config))(params, np.array([(one + [0] * 256)[:256] for one in answers]))
    places = [(n, k) for n, tokens in enumerate(expected) for k in range(len(tokens))]
    batch = make_batch([SamplingRow(PARAMS[n], PARAMS[n].seed or 0) for n, _ in places], config.vocab_size)
    state = make_state([PROMPTS[n] for n, _ in places], config.vocab_size, [expected[n][:k] for n, k in places])
    positions = np.array([len(PROMPTS[n]) + k for n, k in places], np.int32)
    before = np.asarray(logits)[[n for n, _ in places], positions - 1]
    found = jax.jit(sample)(before, positions, batch, state).tokens
    assert found.tolist() == [expected[n][k] for n, k in places]


def open_llm(model, **options) -> LLM:
    return LLM(model, **{**OPTIONS, **options})


def shuffle_pages(llm: LLM, seed: int = 3) -> None:
    random.Random(seed).shuffle(llm.engine.scheduler.pool._free)


def hide_pages(llm: LLM, num_left: int) -> None:
    """Lets the pool have only so many pages: for tests of shortage without programs of another shape."""
    pool = llm.engine.scheduler.pool
    pool.allocate(pool.num_available - num_left)


def generate(llm: LLM, params=PARAMS):
    """The answers to all prompts together, and a check that nothing is left behind."""
    num_hidden = llm.engine.scheduler.pool.num_owned
    outputs = [one.outputs[0] for one in llm.generate(PROMPTS, params)]
    assert llm.engine.scheduler.pool.num_owned == num_hidden
    assert not llm.engine.scheduler.has_work
    return outputs


def with_neighbours(llm: LLM, size: int, params, number: int, numbers: random.Random):
    """One prompt's answer among size - 1 random neighbours, at a random place."""
    prompts = random_prompts(size - 1, 120, seed=numbers.randrange(10**6))
    kinds = [mixed_params(numbers.randrange(1000)) for _ in prompts]
    place = numbers.randrange(size)
    prompts.insert(place, PROMPTS[number])
    kinds.insert(place, params[number])
    return llm.generate(prompts, kinds)[place].outputs[0]


@pytest.mark.all_buckets
def test_alone(model, expected):
    with open_llm(model) as llm:
        found = [llm.generate(p, one)[0].outputs[0].token_ids for p, one in zip(PROMPTS, PARAMS, strict=True)]
    assert found == expected


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("size", quick([2, 8, 32], 8))
def test_among_random_neighbours(model, expected, size):
    numbers = random.Random(size)
    with open_llm(model) as llm:
        for number in range(NUM_PROMPTS):
            assert with_neighbours(llm, size, PARAMS, number, numbers).token_ids == expected[number], number


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("variant", quick(VARIANTS, "one step a dispatch"))
def test_however_it_is_cut_and_stored(model, expected, variant):
    with open_llm(model, **VARIANTS[variant]) as llm:
        shuffle_pages(llm)
        assert [one.token_ids for one in generate(llm)] == expected


@pytest.mark.slow
def test_over_a_contiguous_cache_together(model, expected):
    with LLM(model, cache="contiguous", max_seqs=4, max_model_len=MAX_MODEL_LEN) as llm:
        assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS)] == expected


@pytest.mark.slow
def test_with_a_prefix_hit(model, expected):
    with open_llm(model) as llm:
        for _ in range(2):
            assert [one.token_ids for one in generate(llm)] == expected
        counters = llm.engine.scheduler.counters
        # Each prompt's full pages, but for its last token, were found; unless its own log-probabilities are wanted.
        reusing = [prompt for prompt, one in zip(PROMPTS, PARAMS, strict=True) if one.prompt_logprobs is None]
        assert counters.reused_tokens == sum((len(prompt) - 1) // 16 * 16 for prompt in reusing)
        # So are those of an answer, when the conversation goes on.
        before = counters.reused_tokens
        longer = [*PROMPTS[3], *expected[3]]
        llm.generate(longer, SamplingParams(max_tokens=2, temperature=0))
        assert counters.reused_tokens - before == (len(longer) - 1) // 16 * 16


def test_with_so_few_pages_that_it_is_preempted(model, expected):
    with open_llm(model) as llm:
        hide_pages(llm, 14)
        assert [one.token_ids for one in generate(llm)] == expected
        assert llm.engine.scheduler.counters.num_preemptions > 2


@pytest.mark.slow
def test_after_its_neighbours_were_cancelled(model, expected):
    numbers = random.Random(4)
    with open_llm(model) as llm:
        for number in range(NUM_PROMPTS):
            neighbours = [
                llm.prepare(prompt, SamplingParams(max_tokens=30, seed=1))
                for prompt in random_prompts(7, 100, seed=number)
            ]
            request = llm.prepare(PROMPTS[number], PARAMS[number])
            others = [llm.submit(one)[0] for one in neighbours[:4]]
            answers = llm.submit(request)
            others += [llm.submit(one)[0] for one in neighbours[4:]]
            while not all(answer.is_finished for answer in answers):
                llm.step()
                for answer in answers:
                    llm.advance(answer)
                if others and numbers.random() < 0.5:
                    llm.engine.finish(others.pop(), "abort")
            llm.client.abort(others)
            assert llm.collect(answers).outputs[0].token_ids == expected[number], number
            llm.engine.scheduler.check()
            assert llm.engine.scheduler.pool.num_owned == 0


# Deterministic: every bit of the log-probabilities.

DETERMINISTIC = [replace(one, logprobs=3) for one in PARAMS]


def bits(outputs) -> list:
    return [(one.token_ids, one.logprobs) for one in outputs]


def deterministic(model, **options) -> LLM:
    return open_llm(model, **{"deterministic": True, "prefill_chunk": 64, **options})


@pytest.fixture(scope="module")
def expected_bits(model):
    with deterministic(model) as llm:
        return bits(llm.generate(p, one)[0].outputs[0] for p, one in zip(PROMPTS, DETERMINISTIC, strict=True))


@pytest.mark.slow
@pytest.mark.optimized
def test_deterministic_tokens_are_the_same(expected, expected_bits):
    assert [tokens for tokens, _ in expected_bits] == expected


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.optimized
@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk": 16},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"num_pages_left": 14},
                {},
                {"page_size": 64},
                {"prefill_chunk": 150},
                {"steps_per_dispatch": 1},
            )
        ),
    ],
    ids=str,
)
def test_deterministic_bits_do_not_depend_on_pages_chunks_and_preemption(model, expected_bits, options):
    num_left = options.get("num_pages_left")
    with deterministic(model, **{name: value for name, value in options.items() if name != "num_pages_left"}) as llm:
        shuffle_pages(llm)
        if num_left is not None:
            hide_pages(llm, num_left)
        assert bits(generate(llm, DETERMINISTIC)) == expected_bits
        assert (llm.engine.scheduler.counters.num_preemptions > 2) == (num_left is not None)
        assert bits(generate(llm, DETERMINISTIC)) == expected_bits
        assert llm.engine.scheduler.counters.reused_tokens > 0 or num_left is not None


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("size", quick([2, 8, 32], 8))
def test_deterministic_bits_do_not_depend_on_neighbours(model, expected_bits, size):
    numbers = random.Random(size)
    with deterministic(model) as llm:
        found = [with_neighbours(llm, size, DETERMINISTIC, number, numbers) for number in range(NUM_PROMPTS)]
    assert bits(found) == expected_bits


@pytest.mark.slow
@pytest.mark.all_buckets
@pytest.mark.optimized
def test_the_bits_would_tell_a_difference(model, expected_bits):
    """Without `deterministic` programs of several shapes run: tokens are the same, some bits are not."""
    with open_llm(model) as llm:
        found = bits(generate(llm, DETERMINISTIC))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected_bits]
    assert found != expected_bits
