"""Processors: which functions are refused, where they stand in the chain, and rows that do not see each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.request_arrays import RequestArray, default_rows
from jaxinfer.sampling import (
    BoundProcessors,
    Processor,
    ProcessorRows,
    SamplingParams,
    SamplingRow,
    advance,
    as_processors,
    make_batch,
    make_state,
    rewind,
    sample,
    transform,
    with_sequences,
)

S, V, L = 4, 40, 32
PROMPTS = [[1, 2, 2], [5], [7, 8, 9, 10], [0]]
OUTPUTS = [[3, 3], [], [39], [4, 5, 6]]


def repetition(logits, history, penalty):
    """The engine's own repetition_penalty."""
    rows = jnp.arange(logits.shape[0])[:, None]
    is_seen = jnp.zeros(logits.shape, bool).at[rows, history.tokens].set(True, mode="drop")
    factor = jnp.where(is_seen, penalty[:, None], 1)
    return jnp.where(logits > 0, logits / factor, logits * factor)


def min_p(logits, history, p):
    """The engine's own min_p."""
    del history
    return jnp.where(logits >= logits.max(axis=-1, keepdims=True) + jnp.log(p)[:, None], logits, -jnp.inf)


def unchanged(logits, history):
    return logits


REPETITION = Processor(repetition, {"penalty": RequestArray(default=1.0)})
MIN_P = Processor(min_p, {"p": RequestArray()})


def bound(*processors) -> BoundProcessors:
    return BoundProcessors(as_processors(processors), V, L)


def with_processors(processors: BoundProcessors, rows, **arrays):
    """The batch and the state of rows, with arrays in place of the defaults."""
    given = {**default_rows(processors.arrays, S), **arrays}
    batch = dataclasses.replace(make_batch(rows, V), processors=ProcessorRows(processors, given))  # pyright: ignore
    sequences = [[*prompt, *output] for prompt, output in zip(PROMPTS, OUTPUTS, strict=True)]
    state = with_sequences(make_state(PROMPTS, V, OUTPUTS), sequences, list(map(len, PROMPTS)), L)
    return batch, state


def random_logits(seed=0):
    return np.random.default_rng(seed).normal(0, 3, (S, V)).astype(np.float32)


counter = [0]
kept = []


def changes_with_each_trace(logits, history):
    counter[0] += 1
    return logits + counter[0]


def keeps_a_tracer(logits, history):
    kept.append(logits * 2)
    return logits


def calls_python(logits, history):
    return jax.pure_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct(logits.shape, logits.dtype), logits)


def calls_python_in_a_loop(logits, history):
    return jax.lax.fori_loop(0, 2, lambda _, x: calls_python(x, history), logits)


def prints(logits, history):
    jax.debug.print("{}", logits[0, 0])
    return logits


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (lambda logits, history: logits[:, 1:], r"must return float32\[rows, 40\], and returns float32\[1, 39\]"),
        (lambda logits, history: logits.astype(jnp.bfloat16), r"returns bfloat16\[1, 40\]"),
        (lambda logits, history: (logits, logits), "got tuple"),
        (lambda logits, history: None, "got NoneType"),
        (lambda logits, history: logits if logits[0, 0] > 0 else -logits, "use jnp.where"),
        (lambda logits, history: logits + np.asarray(logits), "use jax.numpy"),
        (lambda logits, history: logits + history.missing, "AttributeError"),
        (lambda logits: logits, "TypeError"),
        (calls_python, "calls Python"),
        (calls_python_in_a_loop, "calls Python"),
        (prints, "side effects"),
        (keeps_a_tracer, "keeps a traced value"),
        (changes_with_each_trace, "another function when it is traced again"),
    ],
)
def test_functions_that_cannot_be_compiled_once_are_refused(fn, told):
    with pytest.raises(ValueError, match=f"processor 'mine'.*{told}"):
        bound(Processor(fn, name="mine"))


def test_declarations_that_cannot_be_are_refused():
    for wrong, error, told in (
        (lambda: Processor("x"), TypeError, "is a function"),  # pyright: ignore[reportArgumentType]
        (lambda: Processor(min_p, {"p": 1.0}), TypeError, "RequestArray"),  # pyright: ignore[reportArgumentType]
        (lambda: Processor(min_p, {"logits": RequestArray()}), ValueError, "cannot be the name"),
        (lambda: as_processors(min_p), TypeError, "a list of functions"),
        (lambda: as_processors([min_p, min_p]), ValueError, "two processors are named 'min_p'"),
        (lambda: as_processors([MIN_P, Processor(repetition, {"p": RequestArray()})]), ValueError, "both declare"),
    ):
        with pytest.raises(error, match=told):
            wrong()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
def test_own_penalty_and_min_p_are_the_parameters_bit_for_bit(temperature):
    """Oracle: the engine's own."""
    own = {"temperature": temperature, "seed": 1}
    rows = [SamplingRow(SamplingParams(repetition_penalty=1.3 + i, min_p=0.1 * i, **own)) for i in range(S)]
    plain, state = make_batch(rows, V), make_state(PROMPTS, V, OUTPUTS)
    expected = jax.jit(transform)(random_logits(), plain, state)
    arrays = {"penalty": plain.repetition_penalty, "p": plain.min_p}  # which is off in greedy rows
    batch, state = with_processors(bound(REPETITION, MIN_P), [SamplingRow(SamplingParams(**own))] * S, **arrays)
    found = jax.jit(transform)(random_logits(), batch, state)
    np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(found, random_logits())


def test_rows_are_processed_alone_and_forbidden_tokens_stay_forbidden():
    def mixes(logits, history):
        return jnp.where(logits == -jnp.inf, 50.0, logits) - logits.max(axis=0, keepdims=True)

    rows = [SamplingRow(SamplingParams(temperature=0, allowed_token_ids=[3, 4 + i]), 0) for i in range(S)]
    logits = random_logits()
    run = jax.jit(transform)
    together = np.asarray(run(logits, *with_processors(processors := bound(mixes), rows)))
    logits[1:] += 7
    others = run(logits, *with_processors(processors, rows))
    np.testing.assert_array_equal(together[0], others[0])
    for i in range(S):
        assert np.flatnonzero(together[i] > -np.inf).tolist() == [3, 4 + i]
        assert np.all(together[i][[3, 4 + i]] == 0)  # less itself: the only row that it sees


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_k": 3, "top_p": 0.9, "min_p": 0.1}]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_with_nan_is_reported_alone(params, bad):
    spoil = Processor(lambda logits, history, by: logits.at[:, 5].add(by), {"by": RequestArray()}, name="spoil")
    rows = [SamplingRow(SamplingParams(**params), 3)] * S
    positions = np.array([len(p) + len(o) for p, o in zip(PROMPTS, OUTPUTS, strict=True)], np.int32)
    run, logits, processors = jax.jit(sample), random_logits(), bound(spoil)
    good = run(logits, positions, *with_processors(processors, rows))
    found = run(logits, positions, *with_processors(processors, rows, by=np.array([0, bad, 0, 0], np.float32)))
    assert good.ok.tolist() == [True] * S
    assert found.ok.tolist() == [True, False, True, True]
    assert [found.tokens[i] for i in (0, 2, 3)] == [good.tokens[i] for i in (0, 2, 3)]


def test_tokens_so_far_follow_advances_and_rewinds():
    _, state = with_processors(bound(unchanged), [None] * S)
    earlier = state = jax.device_put(state)
    drafts = np.array([[11, 12], [13, V], [V, V], [14, 15]], np.int32)
    for column in drafts.T:
        state = advance(state, column, column < V)
    so_far = state.tokens_so_far()
    for row, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        tokens = [*prompt, *output, *drafts[row][drafts[row] < V].tolist()]
        assert so_far.tokens[row].tolist() == tokens + [V] * (L - len(tokens))
        assert (so_far.num_prompt[row], so_far.num_output[row]) == (len(prompt), len(tokens) - len(prompt))
    back = rewind(state, earlier, drafts, np.array([1, 0, 0, 2], np.int32)).tokens_so_far()
    for row, num_kept in enumerate([1, 0, 0, 2]):
        tokens = [*PROMPTS[row], *OUTPUTS[row], *drafts[row][:num_kept].tolist()]
        assert back.tokens[row].tolist() == tokens + [V] * (L - len(tokens))


def test_a_fingerprint_is_of_operations_constants_and_defaults():
    def scaled(by, default=0.0):
        table = jnp.arange(V, dtype=jnp.float32) * by
        return Processor(
            lambda logits, history, x: logits * x[:, None] + table, {"x": RequestArray(default=default)}, "f"
        )

    def of(processor):
        return bound(processor).fingerprints["f"]

    assert of(scaled(2)) == of(scaled(2))
    assert len({of(scaled(2)), of(scaled(3)), of(scaled(2, 1.0))}) == 3
    tables = [np.arange(V, dtype=np.float32) * by for by in (1, 2)]  # constants of a function within
    assert of(Processor(jax.jit(lambda logits, history: logits + tables[0]), name="f")) != of(
        Processor(jax.jit(lambda logits, history: logits + tables[1]), name="f")
    )
    fixed = [1.0]
    processors = bound(Processor(lambda logits, history: logits + fixed[0], name="f"))
    before = processors.fingerprints
    fixed[0] = 2.0  # what was traced stays
    batch, state = with_processors(processors, [SamplingRow(SamplingParams(temperature=0), 0)] * S)
    np.testing.assert_array_equal(jax.jit(transform)(random_logits(), batch, state), random_logits() + 1)
    assert processors.fingerprints == before
