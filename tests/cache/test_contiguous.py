"""The contiguous cache: what is written, what is read, and what never is."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import CachedAttention, attend_without_cache, init_cache
from jaxinfer.models import ModelConfig, RopeConfig, bind, init_params
from pallas_kernels import flash_attention

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeConfig(rotary_dim=8),
    sliding_windows=(5, None),
)
PARAMS = jax.tree.map(lambda x: 10 * x if x.ndim == 2 else x, init_params(CONFIG, jax.random.key(0)))
ROWS, LENGTH = 3, 20
TOKENS = np.random.default_rng(0).integers(0, 40, (ROWS, LENGTH)).astype(np.int32)


@partial(jax.jit, static_argnums=3)
def operands(rows, starts, key, num_tokens):
    """q, k, v of `num_tokens` tokens for each row; values that depend on row and position alone."""
    positions = starts[:, None] + jnp.arange(num_tokens)

    def one(row, position):
        return jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, row), position), (8, 8))

    drawn = jax.vmap(jax.vmap(one, (None, 0)))(rows, positions)
    return drawn[:, :, :4], drawn[:, :, 4:6], drawn[:, :, 6:]


@partial(jax.jit, static_argnums=3)
def append(cache, rows, starts_and_lengths, num_tokens):
    """The first layer's append and attend; returns the cache and the attention output."""
    starts, lengths = starts_and_lengths
    attend = CachedAttention(cache, rows, starts, lengths, num_tokens)
    out = attend(0, *operands(rows, starts, jax.random.key(1), num_tokens), None)
    return attend.cache, out


def filled(value=jnp.nan):
    return jax.tree.map(lambda x: jnp.full_like(x, value), init_cache(CONFIG, ROWS, LENGTH, jnp.float32))


def ints(*values):
    return jnp.array(values, jnp.int32)


@jax.jit
def full_hidden(params, tokens):
    decoder = bind(CONFIG, params)
    return decoder(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), attend_without_cache)


@partial(jax.jit, donate_argnums=1)
def step(params, cache, tokens, rows, starts, lengths):
    num_tokens = tokens.shape[1]
    attend = CachedAttention(cache, rows, starts, lengths, num_tokens)
    hidden = bind(CONFIG, params)(tokens, starts[:, None] + jnp.arange(num_tokens), attend)
    return attend.cache, hidden


def test_an_empty_cache():
    cache = init_cache(CONFIG, ROWS, LENGTH, jnp.bfloat16)
    assert (cache.num_rows, cache.max_length) == (ROWS, LENGTH)
    assert len(cache.keys) == len(cache.values) == CONFIG.num_layers
    leaves = jax.tree.leaves(cache)
    # On a CPU, as bits.
    assert {(leaf.shape, leaf.dtype) for leaf in leaves} == {((ROWS, LENGTH, 2, 8), jnp.dtype(jnp.uint16))}
    assert cache.dtype == "bfloat16"
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves), "two leaves share memory"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [(13, 7), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ((4, 4, 4, 4, 4), (1,) * 20, (20,)))]
)
def test_incremental_equals_full(sizes):
    expected = full_hidden(PARAMS, TOKENS)
    cache, parts, start = filled(), [], 0
    for size in sizes:
        cache, hidden = step(
            PARAMS,
            cache,
            TOKENS[:, start : start + size],
            jnp.arange(ROWS),
            jnp.full(ROWS, start),
            jnp.full(ROWS, size),
        )
        parts.append(hidden)
        start += size
    np.testing.assert_allclose(jnp.concatenate(parts, 1), expected, rtol=0, atol=1e-4)


def test_ragged_rows_equal_full():
    # Each row advances by its own number of tokens, some by none; a chunk holds 6.
    expected = full_hidden(PARAMS, TOKENS)
    cache, starts = filled(), np.zeros(ROWS, np.int32)
    found = np.full(expected.shape, np.nan, np.float32)
    for lengths in ([6, 1, 0], [0, 5, 3], [6, 6, 6], [2, 0, 6], [6, 6, 5], [0, 2, 0]):
        lengths = np.array(lengths, np.int32)
        tokens = np.zeros((ROWS, 6), np.int32)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            tokens[row, :length] = TOKENS[row, start : start + length]
        cache, hidden = step(PARAMS, cache, tokens, jnp.arange(ROWS), jnp.asarray(starts), lengths)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            found[row, start : start + length] = hidden[row, :length]
        starts = starts + lengths
    assert starts.tolist() == [LENGTH] * ROWS
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_rows_are_taken_in_any_order():
    expected = full_hidden(PARAMS, TOKENS)
    cache = filled()
    for rows, start, size in (([2, 0], 0, 10), ([1], 0, 10), ([0], 10, 10), ([2, 1], 10, 10)):
        tokens = TOKENS[rows, start : start + size]
        many = len(rows)
        cache, hidden = step(PARAMS, cache, tokens, ints(*rows), jnp.full(many, start), jnp.full(many, size))
        wanted = expected[np.array(rows), start : start + size]
        np.testing.assert_allclose(hidden, wanted, rtol=0, atol=1e-4)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("rows", "starts", "lengths", "num_tokens"),
    [
        ((0, 1, 2), (3, 0, 7), (4, 0, 2), 4),  # padding in two rows, one of them nothing but padding
        pytest.param((0, 1, 2), (0, 0, 0), (0, 0, 0), 5, marks=pytest.mark.slow),  # all rows idle
        pytest.param((1,), (18,), (2,), 6, marks=pytest.mark.slow),  # real tokens up to the end, padding beyond it
        pytest.param((2, 0), (16, 19), (4, 1), 4, marks=pytest.mark.slow),  # both rows fill their last slot
        ((0, 1, 2), (20, 20, 5), (0, 0, 1), 1),  # rows that are full and idle
    ],
)
def test_only_the_real_tokens_are_written(rows, starts, lengths, num_tokens):
    # Every bit of the cache is compared with what a loop over real tokens writes.
    before = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), filled())
    after, _ = append(before, ints(*rows), (ints(*starts), ints(*lengths)), num_tokens)
    _, k, v = operands(ints(*rows), ints(*starts), jax.random.key(1), num_tokens)
    for found, old, new in ((after.keys[0], before.keys[0], k), (after.values[0], before.values[0], v)):
        expected = np.array(old)
        for i, (row, start, length) in enumerate(zip(rows, starts, lengths, strict=True)):
            expected[row, start : start + length] = new[i, :length]
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(after.keys[1], before.keys[1])
    np.testing.assert_array_equal(after.values[1], before.values[1])


def test_the_bitwise_check_catches_a_pad_index_of_minus_one():
    cache = filled(0.0)
    slots = jnp.where(jnp.arange(4) < 2, jnp.arange(4), -1)
    wrong = cache.keys[0].at[0, slots].set(1.0, mode="drop")
    assert np.any(np.asarray(wrong)[0, -1] == 1.0), "index -1 writes the last slot"


def test_rows_do_not_read_each_other():
    rows, place = jnp.arange(ROWS), (ints(4, 9, 0), ints(3, 3, 2))
    clean, poisoned = filled(0.5), filled(0.5)
    poisoned = jax.tree.map(lambda x: x.at[1].set(jnp.nan), poisoned)
    _, expected = append(clean, rows, place, 3)
    after, out = append(poisoned, rows, place, 3)
    np.testing.assert_array_equal(out[0], expected[0])
    np.testing.assert_array_equal(out[2, :2], expected[2, :2])
    assert np.isnan(out[1]).all()
    for leaf in jax.tree.leaves(after):
        assert not np.isnan(leaf[0]).any()
        assert not np.isnan(leaf[2]).any()


@pytest.mark.parametrize("num_rows", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_what_an_earlier_request_left_is_never_read(num_rows):
    # Slots at and beyond a row's length hold NaN, as an earlier request that overflowed would leave them.
    rows, place = jnp.arange(num_rows), (ints(4, 9, 0)[:num_rows], ints(3, 1, 2)[:num_rows])
    starts = ints(4, 9, 0)
    is_stale = (jnp.arange(LENGTH) >= starts[:, None])[:, :, None, None]
    stale, zeros = (jax.tree.map(lambda x, y=y: jnp.where(is_stale, y, x), filled(0.5)) for y in (jnp.nan, 0.0))
    _, out = append(stale, rows, place, 3)
    _, expected = append(zeros, rows, place, 3)
    for row in range(num_rows):
        length = int(place[1][row])
        assert np.isfinite(out[row, :length]).all()
        np.testing.assert_array_equal(out[row, :length], expected[row, :length])


@pytest.mark.slow
def test_a_nan_in_one_request_stays_in_it():
    cache = filled(0.0)
    params = {**PARAMS, "embed": PARAMS["embed"].at[7].set(jnp.nan)}
    tokens = np.where(TOKENS == 7, 6, TOKENS)
    expected = full_hidden(PARAMS, tokens)
    tokens[1, 4] = 7
    rows, starts, lengths = jnp.arange(ROWS), jnp.zeros(ROWS, jnp.int32), jnp.full(ROWS, 13)
    cache, first = step(params, cache, tokens[:, :13], rows, starts, lengths)
    cache, second = step(params, cache, tokens[:, 13:], rows, starts + 13, lengths - 6)
    hidden = jnp.concatenate([first, second], 1)
    for row in (0, 2):
        np.testing.assert_allclose(hidden[row], expected[row], rtol=0, atol=1e-4)
    assert np.isnan(hidden[1, 4:]).all()
    # The slot's next request starts at 0 again and sees none of it.
    cache, third = step(params, cache, TOKENS[:1, :13] % 7, ints(1), ints(0), ints(13))
    np.testing.assert_allclose(third[0], full_hidden(PARAMS, TOKENS[:1] % 7)[0, :13], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_attention_over_the_cache_is_attention_over_its_tokens():
    rows, place = jnp.arange(ROWS), (jnp.zeros(ROWS, jnp.int32), ints(9, 4, 1))
    _, out = append(filled(), rows, place, 9)
    q, k, v = operands(rows, place[0], jax.random.key(1), 9)
    for row, length in enumerate(place[1].tolist()):
        one = [x[row : row + 1, :length] for x in (q, k, v)]
        expected = flash_attention(*one, implementation="reference")[0]
        np.testing.assert_allclose(out[row, :length], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [(1,), pytest.param((0, 1, 2), marks=pytest.mark.slow)])
def test_a_donated_cache_is_updated_in_place(rows):
    cache = init_cache(CONFIG, ROWS, LENGTH, jnp.float32)
    arguments = (TOKENS[: len(rows), :4], ints(*rows), ints(*[0] * len(rows)), ints(*[4] * len(rows)))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    compiled = step.lower(PARAMS, cache, *arguments).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == num_bytes
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    after, _ = step(PARAMS, cache, *arguments)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == addresses


def test_the_cache_is_a_pytree_of_its_layers():
    cache = init_cache(CONFIG, ROWS, LENGTH, jnp.float32)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(cache)]
    assert paths == [".keys[0]", ".keys[1]", ".values[0]", ".values[1]"]
