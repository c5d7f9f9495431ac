"""Linear recurrences: blocks equal single tokens, and nothing but a sequence's own tokens reaches its state."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrence import (
    BLOCK_TOKENS,
    RaggedBatch,
    RecurrentTokens,
    commit_recurrence,
    linear_recurrence,
    recurrence_of_sequences,
)
from pallas_kernels.recurrence.blocks import invert_unit_lower
from pallas_kernels.recurrence.reference import recurrence
from tests.pallas_kernels.quick import quick
from tests.pallas_kernels.recurrence.calls import batch_of, per_head

HEADS, KEY_HEADS, KEY, VALUE = 4, 2, 8, 6
STATE = (KEY_HEADS, KEY, HEADS // KEY_HEADS * VALUE)
KINDS = ("gated_delta", "ssd")


def tokens_of(seed: int, count: int, kind: str) -> RecurrentTokens:
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(count, KEY_HEADS, KEY)) for _ in range(2))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    v, g = rng.normal(size=(count, HEADS, VALUE)), -rng.exponential(0.3, size=(count, HEADS))
    beta = 1 / (1 + np.exp(-rng.normal(size=(count, HEADS)))) if kind == "gated_delta" else None
    return RecurrentTokens(*(None if x is None else jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta)))


def some(tokens: RecurrentTokens, part: slice) -> RecurrentTokens:
    return jax.tree.map(lambda x: x[part], tokens)


def joined(*parts: RecurrentTokens) -> RecurrentTokens:
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)


def garbage(num_slots: int) -> jax.Array:
    return jnp.full((num_slots, *STATE), jnp.nan)


@partial(jax.jit, static_argnames=("short_tokens", "defers", "is_uniform", "max_query_length", "implementation"))
def run(tokens, state, batch, **options):
    return linear_recurrence(tokens, state, batch, **options)


def in_chunks(tokens: RecurrentTokens, sizes: list[int], **options) -> tuple[np.ndarray, np.ndarray]:
    state, outputs, start = garbage(1), [], 0
    for size in sizes:
        part = some(tokens, slice(start, start + size))
        out, state = run(part, state, batch_of((start, size)), **options)
        outputs.append(out)
        start += size
    return np.concatenate(outputs), per_head(state[0], HEADS)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 64, 150])
def test_blocks_equal_single_tokens(kind, count):
    tokens = tokens_of(count, count, kind)
    out, state = in_chunks(tokens, [count])
    expected = recurrence(*tokens)
    for found, wanted in zip((out, state), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    full = recurrence_of_sequences(jax.tree.map(lambda x: x[None], tokens))[0]
    np.testing.assert_allclose(full, expected[0], atol=1e-5 * np.abs(expected[0]).max())


@pytest.mark.parametrize("kind", KINDS)
def test_strong_decays_and_equal_keys_stay_exact(kind):
    """Products of decays underflow, and powers of the system's matrix would overflow."""
    tokens = tokens_of(0, 128, kind)
    tokens = tokens._replace(k=jnp.broadcast_to(tokens.k[:1], tokens.k.shape), g=tokens.g.at[40:44].set(-60.0))
    tokens = tokens._replace(g=tokens.g.at[64:].set(0.0), beta=None if tokens.beta is None else tokens.beta * 0 + 1)
    for found, wanted in zip(in_chunks(tokens, [128]), recurrence(*tokens), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("g", [-100.0, -1e5, -np.inf])
def test_a_token_that_forgets_all_leaves_the_digits_of_the_others(kind, g):
    tokens = tokens_of(3, 64, kind)
    tokens = tokens._replace(g=tokens.g.at[3].set(g))
    for found, wanted in zip(in_chunks(tokens, [64]), recurrence(*tokens), strict=True):
        np.testing.assert_allclose(found, wanted, atol=3e-6 * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("short_tokens", quick([1, 4], 4))
def test_cuts_at_block_borders_change_no_bit(kind, short_tokens):
    tokens = tokens_of(1, 193, kind)
    out, state = in_chunks(tokens, [193], short_tokens=short_tokens)
    for sizes in ([64, 129], [128, 65], [64, 64, 64, 1]):
        other = in_chunks(tokens, sizes, short_tokens=short_tokens)
        np.testing.assert_array_equal(out, other[0])
        np.testing.assert_array_equal(state, other[1])
    anywhere = in_chunks(tokens, [5, 70, 1, 50, 2, 65], short_tokens=short_tokens)
    np.testing.assert_allclose(out, anywhere[0], atol=1e-5 * np.abs(out).max())
    np.testing.assert_allclose(state, anywhere[1], atol=1e-5 * np.abs(state).max())


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_uniform_steps_may_be_cut_anywhere(kind):
    tokens = tokens_of(2, 90, kind)
    out, state = in_chunks(tokens, [90], is_uniform=True)
    for sizes in ([1] * 90, [63, 2, 25]):
        other = in_chunks(tokens, sizes, is_uniform=True)
        np.testing.assert_array_equal(out, other[0])
        np.testing.assert_array_equal(state, other[1])
    np.testing.assert_allclose(out, recurrence(*tokens)[0], atol=1e-5 * np.abs(out).max())


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_uniform", [False, True])
def test_neighbours_and_slots_change_no_bit(kind, is_uniform):
    """A prompt, a chunk of another, a decode step, an idle slot, in two orders and with other tokens beside them."""
    rows = [(0, 70), (64, 80), (13, 1), (7, 0)]
    own = [tokens_of(10 + i, count, kind) for i, (_, count) in enumerate(rows)]
    states = jnp.asarray(np.random.default_rng(3).normal(size=(4, *STATE)), jnp.float32)
    out, state = run(joined(*own), states, batch_of(*rows), is_uniform=is_uniform)
    parts = np.split(np.asarray(out), np.cumsum([count for _, count in rows])[:-1])
    np.testing.assert_array_equal(state[3], states[3])
    order = [2, 3, 1, 0]
    again, moved = run(
        joined(*(own[i] for i in order)), states[np.array(order)], batch_of(*(rows[i] for i in order)),
        is_uniform=is_uniform,
    )  # fmt: skip
    np.testing.assert_array_equal(again, np.concatenate([parts[i] for i in order]))
    np.testing.assert_array_equal(moved, np.asarray(state)[order])
    others = [own[0], *(tokens_of(20 + i, count, kind) for i, (_, count) in enumerate(rows[1:]))]
    beside, kept = run(joined(*others), states * 3, batch_of(*rows), is_uniform=is_uniform)
    np.testing.assert_array_equal(beside[:70], parts[0])
    np.testing.assert_array_equal(kept[0], state[0])


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_uniform", [False, True])
def test_rejected_rows_leave_no_trace(kind, is_uniform):
    """The states are, to the bit, those of the accepted rows with others or none after them; and, where every pass has
    one shape, those of a pass over these alone."""
    options = {"short_tokens": 5, "is_uniform": is_uniform}
    rows = [(62, 5), (0, 5), (0, 100), (9, 3), (4, 0)]
    own = [tokens_of(30 + i, count, kind) for i, (_, count) in enumerate(rows)]
    states, batch = jnp.ones((5, *STATE)), batch_of(*rows)
    out, pending = run(joined(*own), states, batch, defers=True, **options)
    direct, _ = run(joined(*own), states, batch, **options)
    np.testing.assert_array_equal(out, direct)
    np.testing.assert_array_equal(pending[jnp.array([0, 1, 3, 4])], states[:4])
    accepted = [3, 1, 77, 0, 0]
    found = commit_recurrence(pending, joined(*own), batch, jnp.array(accepted, jnp.int32), **options)
    np.testing.assert_array_equal(found[2], pending[2])
    np.testing.assert_array_equal(found[3], states[3])
    np.testing.assert_array_equal(found[4], states[4])
    bad = [
        jax.tree.map(lambda x, kept=kept: x.at[kept:].set(jnp.nan), x) for x, kept in zip(own, accepted, strict=True)
    ]
    cut = batch._replace(query_lengths=jnp.where(batch.query_lengths <= 5, jnp.array(accepted), batch.query_lengths))
    for tokens, lengths in ((joined(*bad[:2], *own[2:]), batch), (joined(*own), cut)):
        again = commit_recurrence(pending, tokens, lengths, jnp.array(accepted, jnp.int32), **options)
        np.testing.assert_array_equal(again, found)
    for slot in (0, 1):
        kept, (start, _) = accepted[slot], rows[slot]
        if is_uniform:
            alone = run(some(own[slot], slice(0, kept)), states[:1], batch_of((start, kept)), **options)[1]
            np.testing.assert_array_equal(found[slot], alone[0])
        wanted = recurrence(*some(own[slot], slice(0, kept)), state=per_head(states[0], HEADS) if start else None)[1]
        np.testing.assert_allclose(per_head(found[slot], HEADS), wanted, atol=1e-5)


def test_states_are_updated_in_place():
    """The compiled program aliases the donated states and copies none of their size."""
    num_slots = 64
    state = jax.ShapeDtypeStruct((num_slots, *STATE), jnp.float32)
    shape = f"f32[{num_slots},{','.join(map(str, STATE))}]"
    for count, longest in ((num_slots, 1), (256, 256)):
        tokens = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tokens_of(0, count, "gated_delta"))
        vector = jax.ShapeDtypeStruct((num_slots,), jnp.int32)
        program = jax.jit(partial(linear_recurrence, max_query_length=longest), donate_argnums=1)
        compiled = program.lower(tokens, state, RaggedBatch(vector, vector, vector)).compile()
        text = compiled.as_text()
        assert "input_output_alias" in text
        assert not [line for line in text.splitlines() if f"= {shape}" in line and " copy(" in line]


def test_prompts_are_matrix_products():
    """Of 2,048 tokens of one of Qwen3.6's layers: at least 60 % of the arithmetic is in matrix products."""
    count = 2048
    shapes = [(count, 16, 128), (count, 16, 128), (count, 32, 128), (count, 32), (count, 32)]
    tokens = RecurrentTokens(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    vector = jax.ShapeDtypeStruct((1,), jnp.int32)
    state = jax.ShapeDtypeStruct((1, 16, 128, 256), jnp.float32)
    traced = jax.make_jaxpr(partial(linear_recurrence, max_query_length=count))(
        tokens, state, RaggedBatch(vector, vector, vector)
    )
    products, others = flops_of(traced.jaxpr, trips=count // BLOCK_TOKENS)
    assert products >= 0.6 * (products + others)
    assert products > 2 * count * 32 * 128 * 128 * 2  # what the states alone take


def flops_of(jaxpr, trips: int) -> tuple[int, int]:
    """Of a program whose loops run `trips` times: operations in matrix products, and one for each number that anything
    else computes (what moves numbers not counted)."""
    moves = {"broadcast_in_dim", "reshape", "transpose", "slice", "squeeze", "concatenate", "pad", "gather", "scatter"}
    moves |= {"dynamic_slice", "dynamic_update_slice", "convert_element_type", "copy", "iota", "select_n", "split"}
    products = others = 0
    for equation in jaxpr.eqns:
        inner = [value for value in equation.params.values() if hasattr(value, "jaxpr") or hasattr(value, "eqns")]
        size = sum(math.prod(out.aval.shape) for out in equation.outvars)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            products += 2 * size * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
        elif inner:
            times = {"while": trips, "scan": equation.params.get("length", 1)}.get(equation.primitive.name, 1)
            for value in inner:
                own = flops_of(getattr(value, "jaxpr", value), trips)
                products, others = products + times * own[0], others + times * own[1]
        elif equation.primitive.name not in moves:
            others += max(size, sum(math.prod(value.aval.shape) for value in equation.invars))
    return products, others


@pytest.mark.slow
def test_gradients_of_full_sequences_are_finite():
    tokens = jax.tree.map(lambda x: x[None], tokens_of(4, 70, "gated_delta"))
    gradients = jax.grad(lambda tokens: jnp.sum(recurrence_of_sequences(tokens) ** 2))(tokens)
    assert all(bool(jnp.isfinite(x).all()) for x in gradients)


@pytest.mark.matrix
@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_inverse_of_a_unit_lower_triangle(size):
    matrix = np.random.default_rng(size).normal(size=(3, size, size)).astype(np.float32) * 0.3
    found = invert_unit_lower(jnp.asarray(matrix))
    exact = np.linalg.inv(np.eye(size) + np.tril(matrix, -1).astype(np.float64))
    np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": jnp.zeros((3, HEADS, VALUE + 1))}, "do not fit"),
        ({"k": jnp.zeros((3, KEY_HEADS, KEY + 1))}, "do not fit"),
        ({"beta": jnp.zeros((3, 1))}, "shape of g"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, message):
    tokens = tokens_of(0, 3, "gated_delta")._replace(**change)
    with pytest.raises(ValueError, match=message):
        linear_recurrence(tokens, jnp.zeros((1, *STATE)), batch_of((0, 3)))
    good = tokens_of(0, 3, "ssd")
    with pytest.raises(ValueError, match="short_tokens is 1 to 64; got 0"):
        linear_recurrence(good, jnp.zeros((1, *STATE)), batch_of((0, 3)), short_tokens=0)


WIDE_SHAPES = {"shared keys": (8, 128, 16, 128), "one group": (1, 128, 6, 64), "long keys": (2, 256, 2, 128)}


@pytest.mark.usefixtures("tpu_interpreter")
@pytest.mark.matrix("one group-3-gated_delta")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("short_tokens", quick([1, 3], 3))
@pytest.mark.parametrize("shape", quick(WIDE_SHAPES, "one group"))
def test_the_tpu_kernel_equals_xla(kind, short_tokens, shape):
    """A new sequence whose slot holds garbage, one that goes on, an idle one, and one with fewer tokens."""
    num_key_heads, key_size, num_heads, value_size = WIDE_SHAPES[shape]
    rng, count = np.random.default_rng(0), 4 * short_tokens
    lengths = [short_tokens, short_tokens, 0, 1]
    rates = rng.uniform(size=(count, num_heads)) if kind == "gated_delta" else None
    arrays = (
        rng.normal(size=(count, num_key_heads, key_size)) / 11,
        rng.normal(size=(count, num_key_heads, key_size)) / 11,
        rng.normal(size=(count, num_heads, value_size)),
        -rng.exponential(0.3, size=(count, num_heads)),
        rates,
    )
    tokens = RecurrentTokens(*(None if x is None else jnp.asarray(x, jnp.float32) for x in arrays))
    batch = batch_of(*zip([0, 9, 5, 70], lengths, strict=True))
    state = rng.normal(size=(4, num_key_heads, key_size, num_heads // num_key_heads * value_size))
    state = jnp.asarray(state, jnp.float32).at[0].set(jnp.nan)
    options = {"short_tokens": short_tokens, "max_query_length": short_tokens}
    found, after = run(tokens, state, batch, implementation="pallas_tpu", **options)
    expected, wanted = run(tokens, state, batch, implementation="xla", **options)
    rows = sum(lengths)
    np.testing.assert_allclose(found[:rows], expected[:rows], atol=1e-5)
    np.testing.assert_allclose(after, wanted, atol=1e-5)
    np.testing.assert_array_equal(after[2], state[2])
    deferred, kept = run(tokens, state, batch, implementation="pallas_tpu", defers=True, **options)
    np.testing.assert_array_equal(deferred, found)
    np.testing.assert_array_equal(kept, state)
    all_rows = {"num_committed": batch.query_lengths, "short_tokens": short_tokens, "implementation": "pallas_tpu"}
    np.testing.assert_array_equal(commit_recurrence(state, tokens, batch, **all_rows), after)
