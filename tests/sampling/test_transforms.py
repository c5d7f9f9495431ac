"""The chain of transforms against a slow, obvious one; rows that do not see each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.sampling.batch import SamplingRow, make_batch
from jaxinfer.sampling.params import SamplingParams, SamplingParamsError
from jaxinfer.sampling.state import make_state
from jaxinfer.sampling.transforms import transform

S, V = 4, 40
chain = jax.jit(transform)


def row(seed=0, eos_token_ids=(), bad_words=(), **params):
    return SamplingRow(SamplingParams(**params), seed, eos_token_ids, bad_words)


def run(logits, rows, prompts=None, outputs=None):
    logits = np.asarray(logits, np.float32)
    vocab_size = logits.shape[1]
    prompts = [[]] * len(rows) if prompts is None else prompts
    return np.asarray(chain(logits, make_batch(rows, vocab_size), make_state(prompts, vocab_size, outputs)))


def run_one(logits, row):
    """One row among empty ones, in the program of the other tests; the tokens past the given ones are masked."""
    padded = np.full((S, V), -np.inf, np.float32)
    padded[0, : len(logits)] = logits
    return run(padded, [row, None, None, None])[0, : len(logits)]


def slow_transform(logits, row, prompt, output):
    """One row in float64, in the order of vLLM V1, token by token. Returns the logits and the distance of its
    closest decision (a threshold) from going the other way, relative to a mass or a logit."""
    x = [float(v) for v in logits]
    params, margin = row.params, np.inf
    if params.allowed_token_ids is not None:
        x = [v if i in params.allowed_token_ids else -np.inf for i, v in enumerate(x)]
    for word in row.bad_words:
        start = len(output) - (len(word) - 1)
        if start >= 0 and list(output[start:]) == list(word[:-1]):
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        for i in (*params.stop_token_ids, *row.eos_token_ids):
            x[i] = -np.inf
    for i, bias in (params.logit_bias or {}).items():
        x[i] += float(np.float32(bias))
    repetition, frequency, presence = (
        float(np.float32(p)) for p in (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    )
    for i in {*prompt, *output}:
        x[i] = x[i] / repetition if x[i] > 0 else x[i] * repetition
    for i in set(output):
        x[i] -= frequency * list(output).count(i)
        x[i] -= presence
    if params.is_greedy:
        return np.array(x), margin

    temperature = float(np.float32(params.temperature))
    x = [v / temperature for v in x]
    if params.min_p > 0:
        least = max(x) + np.log(float(np.float32(params.min_p)))
        margin = min(margin, *(abs(v - least) for v in x))
        x = [v if v >= least else -np.inf for v in x]
    if 0 < params.top_k < len(x):
        least = sorted(x, reverse=True)[params.top_k - 1]
        # Different logits may become equal in float32.
        margin = min(margin, *(abs(v - least) for v in x if v != least and v > -np.inf), np.inf)
        x = [v if v >= least else -np.inf for v in x]
    if params.top_p < 1:
        weights = np.exp(np.array(x) - max(x))
        top_p = float(np.float32(params.top_p))
        above = [weights[np.array(x) > v].sum() / weights.sum() for v in x]
        margin = min(margin, *(abs(a - top_p) for a in above))
        ordered = sorted({v for v in x if v > -np.inf})
        margin = min([margin, *np.diff(ordered)])
        x = [v if a < top_p else -np.inf for v, a in zip(x, above, strict=True)]
    return np.array(x), margin


def centred(x):
    """Logits up to their constant, which temperature moves."""
    return x - np.max(x)


tokens = st.integers(0, V - 1)
few_tokens = st.lists(tokens, max_size=6)
percent = st.integers(1, 100).map(lambda i: i / 100)


@st.composite
def requests(draw):
    output = draw(few_tokens)
    # Words that the answer has begun, and words that it has not.
    words = draw(st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=3))
    for length in draw(st.lists(st.integers(0, len(output)), max_size=2)):
        words.append([*output[len(output) - length :], draw(tokens)])
    allowed = draw(st.none() | st.lists(tokens, min_size=20, max_size=30))
    params = {
        "temperature": draw(st.sampled_from([0.0, 0.01, 0.7, 1.0, 1.0, 3.0, 100.0])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.9999, 0.01]) | percent),
        "top_k": draw(st.sampled_from([0, 0, 1, 2, 7, 39, 40, 41])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 1.0]) | percent),
        "presence_penalty": draw(st.sampled_from([0.0, 0.5, -2.0])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.25, -1.0])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3, 0.5])),
        "min_tokens": draw(st.integers(0, 8)),
        "stop_token_ids": draw(st.lists(tokens, max_size=2)),
        "logit_bias": draw(
            st.none() | st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=3)
        ),
        "allowed_token_ids": allowed,
        "ignore_eos": draw(st.booleans()),
    }
    kind = draw(st.sampled_from([*params, "all", "none"]))
    if kind not in ("all", "none"):
        params = {"temperature": 0.9, kind: params[kind]} if kind != "temperature" else {kind: params[kind]}
    elif kind == "none":
        params, words = {}, []
    eos = draw(st.lists(tokens, max_size=2))
    return row(eos_token_ids=tuple(eos), bad_words=tuple(map(tuple, words)), **params), draw(few_tokens), output


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(requests(), min_size=S, max_size=S))
def test_the_chain_agrees_with_the_slow_one(seed, batch):
    """Any four requests in one batch. Rows where a float32 rounding could decide otherwise are compared loosely."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (S, V)).astype(np.float32)
    logits[rng.random((S, V)) < 0.05] = -np.inf
    rows, prompts, outputs = zip(*batch, strict=True)
    try:
        got = run(logits, rows, prompts, outputs)
    except SamplingParamsError:  # of a row that leaves no token: what raises is tested in test_batch.py
        return
    for i in range(S):
        expected, margin = slow_transform(logits[i], rows[i], prompts[i], outputs[i])
        if not np.any(expected > -np.inf):
            assert np.all(got[i] == -np.inf)
        elif margin > 1e-5:
            assert np.array_equal(got[i] > -np.inf, expected > -np.inf)
            np.testing.assert_allclose(centred(got[i]), centred(expected), rtol=2e-6, atol=2e-5)


EVERYTHING = [
    {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.001, "repetition_penalty": 1.2},
    {"temperature": 0, "frequency_penalty": 0.3, "presence_penalty": 0.1, "logit_bias": {3: 1.5}},
    {"temperature": 1.3, "top_p": 0.5, "min_tokens": 9, "stop_token_ids": [2, 5]},
    {},
    {"temperature": 0},
    {"temperature": 0.9, "top_k": 200, "allowed_token_ids": range(0, 257, 2)},
    {"temperature": 2.5, "top_p": 0.999, "repetition_penalty": 0.9},
]


ROWS = [*(row(bad_words=((1,), (4, 6)), **params) for params in EVERYTHING), row(), row(temperature=0), None]
NEUTRAL = slice(len(EVERYTHING), None)


def many_rows():
    """Logits and histories for ROWS. 257 tokens, so that rows start at any place of a vector register."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (len(ROWS), 257)).astype(np.float32)
    logits[NEUTRAL, :3] = [-np.inf, -0.0, 0.0]
    prompts = [rng.integers(0, 257, 5).tolist() for _ in ROWS]
    outputs = [rng.integers(0, 257, i).tolist() for i in range(len(ROWS))]
    return logits, prompts, outputs


@pytest.mark.slow
def test_a_row_is_the_same_bit_for_bit_alone_and_anywhere_in_any_batch():
    logits, prompts, outputs = many_rows()
    together = run(logits, ROWS, prompts, outputs)
    n = len(ROWS)
    for order in (list(range(n))[::-1], np.random.default_rng(1).permutation(n).tolist()):
        rows, moved_prompts, moved_outputs = ([items[i] for i in order] for items in (ROWS, prompts, outputs))
        assert np.array_equal(run(logits[order], rows, moved_prompts, moved_outputs), together[order])
    for i in range(n):
        part = slice(i, i + 1)
        assert np.array_equal(run(logits[part], ROWS[part], prompts[part], outputs[part])[0], together[i])


def test_neutral_parameters_are_an_exact_no_op_beside_rows_that_use_everything():
    logits, prompts, outputs = many_rows()
    got = run(logits, ROWS, prompts, outputs)
    assert got[NEUTRAL].tobytes() == logits[NEUTRAL].tobytes()
    assert all(not np.array_equal(got[i], logits[i]) for i in (0, 1, 2, 5, 6))


def test_low_temperature_resolves_neighbouring_logits():
    """At temperature 1e-5 two logits one float apart at 20 are 0.19 apart, not rounded to multiples of 0.25."""
    low, high = np.float32(20), np.nextafter(np.float32(20), np.float32(21))
    got = run_one([low, high, 0, 0], row(temperature=1e-5))
    assert np.isclose(got[1] - got[0], (float(high) - float(low)) / 1e-5, rtol=1e-4)
    assert np.all(np.isfinite(got))


def test_extreme_logits_and_temperatures_stay_ordered_and_without_nan():
    for params in ({"temperature": 1e-5}, {"temperature": 100, "top_p": 0.5, "min_p": 1}):
        got = run_one([1e38, -1e38, 0.0, -np.inf], row(**params))
        assert not np.any(np.isnan(got))
        assert got[0] == 0
        assert np.all(got[1:] < -1e30)


@pytest.mark.parametrize("temperature", [1.0, 0.9])
def test_min_p_is_relative_to_the_most_probable_token(temperature):
    """At a temperature of 1, too, at which the logits keep their constant."""
    logits = np.float32(temperature) * (np.log([0.4, 0.3, 0.1, 0.02, 0.004]).astype(np.float32) + np.float32(7))
    got = run_one(logits, row(temperature=temperature, min_p=0.1))
    assert (got > -np.inf).tolist() == [True, True, True, False, False]


def test_bad_words_are_looked_for_in_the_answer_only():
    words = ((7, 8, 9), (1, 2), (5,))
    logits = np.zeros((4, V), np.float32)
    prompts, outputs = [[7, 8], [], [1], []], [[], [7, 8], [], [3, 7, 8]]
    got = run(logits, [row(bad_words=words)] * 4, prompts, outputs)
    assert [np.flatnonzero(r == -np.inf).tolist() for r in got] == [[5], [5, 9], [5], [5, 9]]


def test_the_longest_bad_word_needs_all_its_beginning():
    word = tuple(range(16))
    outputs = [list(range(15)), [99 % V, *range(1, 15)], list(range(1, 15)), [20, *range(15)]]
    got = run(np.zeros((4, V)), [row(bad_words=(word,))] * 4, [[]] * 4, outputs)
    assert [bool(r[15] == -np.inf) for r in got] == [True, False, False, True]


def test_min_tokens_ends_on_time():
    state = [[1] * n for n in (0, 2, 3, 4)]
    got = run(
        np.zeros((4, V)), [row(min_tokens=3, max_tokens=8, stop_token_ids=[4], eos_token_ids=(6,))] * 4, [[]] * 4, state
    )
    assert [np.flatnonzero(r == -np.inf).tolist() for r in got] == [[4, 6], [4, 6], [], []]


def test_nothing_retraces_when_values_change():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (S, V)).astype(np.float32)
    run(logits, [None] * S, [[0]] * S, [[]] * S)
    with jax.no_tracing():
        for params in EVERYTHING[:5]:
            run(logits, [row(bad_words=((1,), (4, 6)), **params), None, row(), None], [[0]] * S, [[]] * S)


@pytest.mark.parametrize(("shape", "dtype"), [((1, V), "float32"), ((S, V + 1), "float32"), ((S, V), "bfloat16")])
def test_other_shapes_and_dtypes_are_refused(shape, dtype):
    """A batch of one row must not spread over many, nor bfloat16 logits decide a threshold."""
    with pytest.raises(ValueError, match=rf"logits must be float32\[4, 40\], got {dtype}\[{shape[0]}, {shape[1]}\]"):
        jax.eval_shape(transform, jnp.zeros(shape, dtype), make_batch([None] * S, V), make_state([None] * S, V))


def test_strict_promotion_and_ranks():
    """The code says every conversion: nothing depends on the user's promotion settings."""
    rows = [row(bad_words=((1,), (4, 6)), **params) for params in EVERYTHING[:3]]
    arguments = (jnp.zeros((3, 257), jnp.float32), make_batch(rows, 257), make_state([[0]] * 3, 257))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.eval_shape(lambda *a: transform(*a), *arguments)


def test_the_oracle_can_fail():
    """The inverse test: an order of steps other than vLLM's is noticed."""
    logits = np.linspace(0, 3, V, dtype=np.float32)
    got = run_one(logits, row(temperature=2.0, top_p=0.6))
    right, _ = slow_transform(logits, row(temperature=2.0, top_p=0.6), [], [])
    top_p_before_temperature, _ = slow_transform(logits, row(temperature=1.0, top_p=0.6), [], [])
    assert np.array_equal(got > -np.inf, right > -np.inf)
    assert not np.array_equal(got > -np.inf, top_p_before_temperature > -np.inf)
