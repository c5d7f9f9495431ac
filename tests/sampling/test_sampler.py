"""The sampler: its distribution, its independence of everything but the row, and what it flags.

The statistical tests use fixed seeds, so they give the same result in each run. Their threshold, chi-square at one in
a million, is the chance that a correct sampler would have been given seeds that fail.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import gammaincc

from jaxinfer.sampling import sampler as sampler_module
from jaxinfer.sampling.batch import SamplingRow, make_batch, tokenize_bad_words
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.sampler import choose, is_stop, processed_logprobs, sample
from jaxinfer.sampling.state import advance, make_state
from jaxinfer.sampling.transforms import transform

FALSE_ALARM = 1e-6

jitted = jax.jit(sample)
processed = jax.jit(processed_logprobs)
stops = jax.jit(is_stop)
step_state = jax.jit(advance)


def row(seed=0, eos_token_ids=(), bad_words=(), **params):
    return SamplingRow(SamplingParams(**params), seed, eos_token_ids, bad_words)


def run(logits, rows, position=5, prompt=(0,), output=()):
    """Samples in a batch of 8, the last slots empty, so that few programs are compiled."""
    num_rows, vocab_size = np.shape(logits)
    empty = 8 - num_rows
    state = make_state([prompt] * num_rows + [None] * empty, vocab_size, [output] * num_rows + [()] * empty)
    padded = np.concatenate([logits, np.zeros((empty, vocab_size))]).astype(np.float32)
    result = jitted(padded, np.full(8, position, np.int32), make_batch([*rows, *[None] * empty], vocab_size), state)
    return jax.tree.map(lambda x: np.asarray(x)[:num_rows], result)


# The distribution

PROBABILITIES = np.array([0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05, 0.03, 0.015, 0.005])
NUM_ROWS, NUM_CALLS = 256, 40


def draws(rows, logits, positions_of_call):
    """The tokens of 256 rows at 40 positions each, 10,240 draws."""
    logits = np.broadcast_to(np.float32(logits), (NUM_ROWS, len(logits)))
    batch, state = jax.device_put((make_batch(rows, logits.shape[1]), make_state([[0]] * NUM_ROWS, logits.shape[1])))
    return np.stack([jitted(logits, positions_of_call(i), batch, state).tokens for i in range(NUM_CALLS)])


def chi_square_p(tokens, expected):
    """The chance of counts at least this far from `expected`; 0 where a token came that cannot."""
    counts = np.bincount(np.ravel(tokens), minlength=len(expected))
    if counts[expected == 0].any():
        return 0.0
    counts, expected = counts[expected > 0], expected[expected > 0] * np.size(tokens)
    assert expected.min() >= 5  # where the chi-square approximation holds
    if len(counts) == 1:
        return 1.0
    return float(gammaincc((len(counts) - 1) / 2, np.sum((counts - expected) ** 2 / expected) / 2))


def normalized(weights):
    return weights / weights.sum()


def head(n, of=PROBABILITIES):
    return normalized(np.where(np.arange(len(of)) < n, of, 0))


EXPECTED = {
    "plain": ({}, PROBABILITIES),
    "temperature 2": ({"temperature": 2.0}, normalized(PROBABILITIES**0.5)),
    "temperature 1/2": ({"temperature": 0.5, "top_k": 7}, head(7, PROBABILITIES**2)),
    "top-k": ({"top_k": 3}, head(3)),
    "top-p": ({"top_p": 0.6}, head(3)),
    "top-p after temperature": ({"top_p": 0.6, "temperature": 2.0}, head(5, PROBABILITIES**0.5)),
    "min-p": ({"min_p": 0.3}, head(4)),
    "min-p, then top-k, then top-p": ({"min_p": 0.3, "top_k": 3, "top_p": 0.7}, head(2)),
    "bias": ({"logit_bias": {0: np.log(0.5)}}, normalized(PROBABILITIES * ([0.5] + [1] * 9))),
    "allowed ids": ({"allowed_token_ids": [1, 4, 6]}, normalized(PROBABILITIES * np.isin(np.arange(10), [1, 4, 6]))),
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", EXPECTED)
def test_tokens_follow_the_distribution(case):
    """Half of the draws over positions and half over seeds: both address the noise."""
    params, expected = EXPECTED[case]
    logits = np.log(PROBABILITIES) + 3
    over_both = draws(
        [row(seed=1000 + i, **params) for i in range(NUM_ROWS)], logits, lambda i: jnp.full(NUM_ROWS, i, jnp.int32)
    )
    assert chi_square_p(over_both, expected) > FALSE_ALARM
    over_positions = draws(
        [row(seed=7, **params)] * NUM_ROWS, logits, lambda i: i * NUM_ROWS + jnp.arange(NUM_ROWS, dtype=jnp.int32)
    )
    assert chi_square_p(over_positions, expected) > FALSE_ALARM


def test_the_chi_square_test_can_fail():
    """The inverse test: 10,240 draws of the plain distribution are told from one that is off by a twentieth of the
    first token's mass, and from one whose last token never comes."""
    tokens = draws(
        [row(seed=1000 + i) for i in range(NUM_ROWS)], np.log(PROBABILITIES), lambda i: jnp.full(NUM_ROWS, i, jnp.int32)
    )
    shifted = PROBABILITIES + 0.05 * np.array([-1, 1] + [0] * 8)
    assert chi_square_p(tokens, PROBABILITIES) > FALSE_ALARM
    assert chi_square_p(tokens, shifted) < FALSE_ALARM
    assert chi_square_p(tokens, head(9)) < FALSE_ALARM


def test_successive_tokens_are_independent():
    """Pairs of tokens at positions p and p+1 of one seed follow the product distribution."""
    probabilities = np.array([0.5, 0.3, 0.2])
    logits = [*np.log(probabilities), *[-np.inf] * 7]
    tokens = draws([row(seed=i) for i in range(NUM_ROWS)], logits, lambda i: jnp.full(NUM_ROWS, i, jnp.int32))
    pairs = tokens[0::2] * 3 + tokens[1::2]
    assert chi_square_p(pairs, np.outer(probabilities, probabilities).ravel()) > FALSE_ALARM


def test_processed_logprobs_are_those_of_the_draws():
    params = {"temperature": 2.0, "top_k": 6, "logit_bias": {2: 1.0}}
    logits = np.float32(np.log(PROBABILITIES))
    logprobs = processed(logits[None], make_batch([row(**params)], 10), make_state([[0]], 10))
    weights = PROBABILITIES * np.where(np.arange(10) == 2, np.e, 1)
    expected = normalized(np.where(np.arange(10) < 6, weights, 0) ** 0.5)
    np.testing.assert_allclose(np.exp(np.asarray(logprobs)[0]), expected, rtol=1e-5)


# Greedy and sampled rows

MIXED = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"temperature": 1.5, "top_k": 20, "logprobs": 3},
    {},
    {"temperature": 0, "logit_bias": {8: 4.0}, "logprobs": 0},
    {"temperature": 0.7, "min_p": 0.05, "frequency_penalty": 0.5},
    {"temperature": 1.1, "presence_penalty": -0.5, "min_tokens": 2, "stop_token_ids": [9]},
]


def mixed(num_tokens=257, num_steps=4):
    """Logits of 4 steps for 8 requests that differ in everything: arrays [step, row, V]."""
    logits = np.random.default_rng(3).normal(0, 3, (num_steps, len(MIXED), num_tokens)).astype(np.float32)
    return logits, [row(seed=11 * i, bad_words=((5,), (6, 7)), **params) for i, params in enumerate(MIXED)]


def generate(logits, rows, start=3):
    """Tokens [step, row] of a batch that decodes with its state, each row from a prompt of `start` tokens."""
    num_rows, vocab_size = logits.shape[1:]
    batch, state = make_batch(rows, vocab_size), make_state([list(range(start))] * num_rows, vocab_size)
    outputs = []
    for i, step in enumerate(logits):
        output = jitted(step, np.full(num_rows, start + i, np.int32), batch, state)
        state = step_state(state, output.tokens, output.ok)
        outputs.append(jax.tree.map(np.asarray, output))
    return outputs


@pytest.mark.slow
def test_rows_decode_the_same_alone_and_anywhere_in_any_batch():
    """Tokens, logprobs and ranks, bit for bit, over several steps with a history."""
    logits, rows = mixed()
    together = generate(logits, rows)
    order = np.random.default_rng(0).permutation(len(rows))
    moved = generate(logits[:, order], [rows[i] for i in order])
    for i in range(len(rows)):
        alone = generate(logits[:, i : i + 1], rows[i : i + 1])
        for one, here, there in zip(alone, together, moved, strict=True):
            assert one.tokens[0] == here.tokens[i] == there.tokens[order.tolist().index(i)]
            if rows[i].params.logprobs is not None:
                for name in ("logprob", "rank", "top_ids", "top_logprobs"):
                    assert np.array_equal(getattr(one, name)[0], getattr(here, name)[i])


def test_row_independence_can_fail(monkeypatch):
    """The inverse test: noise that depends on the place in the batch is noticed when the rows change places."""
    right = sampler_module.gumbel_noise

    def by_place(seed, position, vocab_size, *, stream):
        return right(seed, position + jnp.arange(seed.shape[0]), vocab_size)

    monkeypatch.setattr(sampler_module, "gumbel_noise", by_place)
    program = jax.jit(lambda *arguments: choose(*arguments))
    logits, positions = np.zeros((8, 10), np.float32), np.full(8, 5, np.int32)
    rows = [row(seed=i) for i in range(8)]
    tokens = program(logits, positions, make_batch(rows, 10))
    moved = program(logits, positions, make_batch(rows[::-1], 10))
    assert tokens.tolist() != moved.tolist()[::-1]


def test_greedy_rows_take_the_first_largest_logit_whatever_their_neighbours():
    logits = np.zeros((3, 10), np.float32)
    logits[:, [4, 7]] = 2
    assert run(logits, [row(temperature=0), row(temperature=0, seed=9), None]).tokens.tolist() == [4, 4, 4]
    assert run(logits, [row(temperature=0), row(temperature=1), row(temperature=0)]).tokens[[0, 2]].tolist() == [4, 4]


def test_an_answer_is_continued_the_same_from_any_point():
    """Prompt and begun answer, resumed with the same seed, give the rest of the answer."""
    rng = np.random.default_rng(0)
    table = rng.normal(0, 2, (10, 10))  # logits of the next token, by the last one
    params = row(seed=5, temperature=0.9, top_p=0.95, frequency_penalty=0.4)

    def decode(prompt, output, num_tokens):
        for _ in range(num_tokens):
            tokens = [*prompt, *output]
            out = run(table[tokens[-1]][None], [params], len(tokens), prompt, output)
            output = [*output, int(out.tokens[0])]
        return output

    answer = decode([1, 2], [], 8)
    assert decode([1, 2], answer[:3], 5) == answer
    plain = dataclasses.replace(params, params=dataclasses.replace(params.params, frequency_penalty=0.0))
    params = plain  # a penalty tells prompt from answer; without one, the boundary does not matter
    answer = decode([1, 2], [], 8)
    assert [1, 2, *answer] == [1, 2, *answer[:3], *decode([1, 2, *answer[:3]], [], 5)]


def test_choose_on_transformed_logits_is_what_sample_does():
    """What speculation calls, position by position."""
    logits, rows = mixed()
    batch, state = make_batch(rows, 257), make_state([[0, 1, 2]] * len(rows), 257)
    positions = np.full(len(rows), 3, np.int32)
    transformed = jax.jit(transform)(logits[0], batch, state)
    tokens = jax.jit(choose)(transformed, positions, batch)
    assert np.array_equal(tokens, jitted(logits[0], positions, batch, state).tokens)


# Every field of SamplingParams has an effect

BASE = {"temperature": 0.8, "seed": 1, "max_tokens": 64}
EFFECTS = {
    "temperature": 0.3,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.4,
    "seed": 2,
    "stop_token_ids": [4],
    "ignore_eos": True,
    "min_tokens": 20,
    "logprobs": 5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.5,
    "logit_bias": {3: 2.0},
    "allowed_token_ids": [2, 3, 4],
    "bad_words": ["abc"],
}
APPLIED_ELSEWHERE = {
    "n": 2,  # the engine makes n rows, with seeds from sample_seed
    "stop": ["x"],  # the detokenizer looks for strings
    "max_tokens": 17,  # the scheduler counts
    "prompt_logprobs": 3,  # the prefill program calls token_logprobs
    "skip_special_tokens": False,  # the detokenizer
    "include_stop_str_in_output": True,  # the detokenizer
    "structured": {"regex": "a"},  # the engine writes the row's state and mask (tests/engine/test_structured.py)
}


def observe(params):
    """All that the sampler does for a request: transformed logits, tokens at 8 positions, logprobs, stops."""
    words = tokenize_bad_words(params.bad_words, lambda text: [ord(c) - ord("a") for c in text.strip()])
    request = SamplingRow(params, eos_token_ids=(6,), bad_words=words)
    logits = np.tile(np.float32(np.log(PROBABILITIES)), (8, 1))
    batch, state = make_batch([request] * 8, 10), make_state([[1, 2]] * 8, 10, [[0, 0, 1]] * 8)
    output = jitted(logits, np.arange(8, dtype=np.int32), batch, state)
    ends = [stops(np.full(8, token, np.int32), batch) for token in range(10)]
    return [np.asarray(x) for x in jax.tree.leaves((processed(logits, batch, state), output, ends))]


def test_every_field_is_applied_here_or_named_as_applied_elsewhere():
    """A new field fails this test until it is in one of the tables, and has an effect if it is in the first."""
    fields = {f.name for f in dataclasses.fields(SamplingParams)}
    assert fields == EFFECTS.keys() | APPLIED_ELSEWHERE.keys()
    assert not EFFECTS.keys() & APPLIED_ELSEWHERE.keys()


@pytest.mark.parametrize("name", EFFECTS | APPLIED_ELSEWHERE)
def test_a_field_has_an_effect_exactly_where_it_is_applied(name):
    before = observe(SamplingParams(**BASE))
    after = observe(SamplingParams(**{**BASE, name: (EFFECTS | APPLIED_ELSEWHERE)[name]}))
    is_same = all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert is_same == (name in APPLIED_ELSEWHERE)


# What is flagged


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 100, 256])
def test_a_broken_row_is_flagged_and_its_neighbours_are_the_same_bit_for_bit(poison, place):
    logits, rows = mixed()
    sound = run(logits[0], rows)
    assert sound.ok.all()
    broken = logits[0].copy()
    broken[3, place] = poison
    got = run(broken, rows)
    assert got.ok.tolist() == [True, True, True, False, True, True, True, True]
    assert got.tokens[3] == 0
    others = [0, 1, 2, 4, 5, 6, 7]
    for a, b in zip(jax.tree.leaves(sound), jax.tree.leaves(got), strict=True):
        assert np.array_equal(a[others], b[others])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.nan])
@pytest.mark.parametrize("place", [0, 100, 256])
def test_a_broken_row_among_greedy_ones_is_flagged(poison, place):
    """Without a transform of any row, only the maximum of raw logits is looked at."""
    logits = np.random.default_rng(place).normal(size=(4, 257)).astype(np.float32)
    logits[2, place] = poison
    got = run(logits, [row(temperature=0)] * 4)
    assert got.ok.tolist() == [True, True, False, True]
    assert got.tokens.tolist() == [int(logits[0].argmax()), int(logits[1].argmax()), 0, int(logits[3].argmax())]


def test_a_row_of_nothing_but_nan_or_minus_infinity_is_flagged():
    logits = np.zeros((4, 10), np.float32)
    logits[0], logits[1], logits[2, :9] = np.nan, -np.inf, -np.inf
    for params in ({"temperature": 0}, {"temperature": 0.5, "top_p": 0.5, "top_k": 2, "min_p": 0.1}):
        got = run(logits, [row(**params)] * 4)
        assert got.ok.tolist() == [False, False, True, True]
        assert got.tokens[:3].tolist() == [0, 0, 9]


def test_a_row_that_may_choose_nothing_is_flagged():
    """The model forbids all that the request allows: a mask in the logits, such as a grammar's."""
    logits = np.zeros((2, 10), np.float32)
    logits[:, :5] = -np.inf
    assert run(logits, [row(allowed_token_ids=[1, 2]), row(allowed_token_ids=[1, 7])]).ok.tolist() == [False, True]


def test_flagged_rows_do_not_enter_the_history():
    logits = np.zeros((2, 10), np.float32)
    logits[0, 3] = np.nan
    output = run(logits, [row(), row()])
    state = advance(make_state([[0], [0]], 10), output.tokens, output.ok)
    assert state.num_output.tolist() == [0, 1]
    assert state.output_counts.sum(axis=1).tolist() == [0, 1]


# Logprobs


def test_logprobs_are_of_the_raw_logits():
    logits = np.float32(np.log(PROBABILITIES))[None].repeat(2, axis=0)
    params = {"temperature": 0, "logit_bias": {4: 50.0}, "logprobs": 2}
    got = run(logits, [row(**params), row(temperature=0)])
    assert got.tokens.tolist() == [4, 0]
    np.testing.assert_allclose(np.exp(got.logprob), [0.08, 0.3], rtol=1e-5)
    assert got.rank.tolist() == [5, 1]
    assert got.top_ids[0].tolist() == [*range(10), *[10] * 10]
    np.testing.assert_allclose(np.exp(got.top_logprobs[0, :10]), PROBABILITIES, rtol=1e-5)


def test_logprobs_nobody_asked_for_are_marked_as_not_computed():
    got = run(np.zeros((2, 10)), [row(), None])
    assert got.rank.tolist() == [0, 0]
    assert np.all(got.top_ids == 10)


# How it runs


def test_nothing_retraces_and_nothing_moves_to_the_host_when_values_change():
    logits, rows = mixed()
    n = len(rows)
    advance_in_place = jax.jit(advance, donate_argnums=0)
    state = jax.device_put(make_state([[0]] * n, 257))
    batches = [jax.device_put(make_batch(r, 257)) for r in (rows, [None] * n, [rows[1]] * n, rows[::-1])]
    steps, positions = (
        jax.device_put(list(logits)),
        jax.device_put(list(np.arange(4 * n, dtype=np.int32).reshape(4, n))),
    )
    state = advance_in_place(state, jitted(steps[0], positions[0], batches[1], state).tokens, jnp.ones(n, bool))
    stops(jnp.zeros(n, jnp.int32), batches[0])
    with jax.no_tracing(), jax.transfer_guard("disallow"):
        for step, position, batch in zip(steps, positions, batches, strict=True):
            output = jitted(step, position, batch, state)
            stops(output.tokens, batch)
            state = advance_in_place(state, output.tokens, output.ok)
        jax.block_until_ready(state)


def test_stop_ids_end_an_answer_and_padding_does_not():
    batch = make_batch(
        [row(stop_token_ids=[3], eos_token_ids=(7,)), row(eos_token_ids=(7,), ignore_eos=True), None], 10
    )
    ends = lambda *tokens: stops(np.array(tokens, np.int32), batch).tolist()  # noqa: E731
    assert ends(3, 3, 3) == [True, False, False]
    assert ends(7, 7, 7) == [True, False, False]
    assert ends(0, 0, 0) == [False, False, False]


def test_greedy_batches_never_compute_noise(monkeypatch):
    """The noise is behind a branch: a batch of greedy rows does not run it. Counted by a callback planted in it."""
    calls = []
    right = sampler_module.gumbel_noise

    def counted(*arguments, **options):
        jax.debug.callback(lambda: calls.append(1))
        return right(*arguments, **options)

    monkeypatch.setattr(sampler_module, "gumbel_noise", counted)
    program = jax.jit(lambda *arguments: choose(*arguments))
    for params, expected in (({"temperature": 0}, 0), ({}, 1)):
        arguments = np.zeros((2, 10), np.float32), np.zeros(2, np.int32), make_batch([row(**params), None], 10)
        jax.block_until_ready(program(*arguments))
        jax.effects_barrier()
        assert len(calls) == expected


def test_rows_that_are_not_used_choose_no_branch(monkeypatch):
    """A finished row with a temperature leaves greedy ones in the branch that only looks for the largest logit."""
    calls = []
    right = sampler_module.transform

    def counted(*arguments):
        jax.debug.callback(lambda: calls.append(1))
        return right(*arguments)

    monkeypatch.setattr(sampler_module, "transform", counted)
    program = jax.jit(lambda is_used, *arguments: sample(*arguments, is_used=is_used))
    logits = np.float32([np.arange(10), np.arange(10)])
    batch, state = make_batch([row(temperature=0, logprobs=2), row(temperature=0.7)], 10), make_state([[0], [0]], 10)
    for used, expected in (([True, False], 0), ([True, True], 1)):
        result = program(np.array(used), logits, np.zeros(2, np.int32), batch, state)
        jax.effects_barrier()
        assert len(calls) == expected
        assert (result.tokens[0], result.top_ids[0, 0], result.rank[0]) == (9, 9, 1)
