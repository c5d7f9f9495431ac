"""Compaction of one layer's pages: what stays is chosen from keys as they are stored, in every layout and dtype."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import init_paged_cache
from jaxinfer.cache.paged import visible_tables
from jaxinfer.cache.policy.compaction import (
    PromptPages,
    chosen_positions,
    compacted,
    compacted_by_moments,
)
from jaxinfer.cache.policy.prompt_queries import LayerQueries
from jaxinfer.cache.policy.scores import (
    QueryMoments,
    expected_attention_scores,
    kept_positions,
    keydiff_scores,
    snapkv_scores,
)
from jaxinfer.models import RopeConfig
from jaxinfer.models.rope import rotation as rope_rotation
from pallas_kernels.paged_attention import empty_pages, rotation, unpack
from pallas_kernels.paged_attention.layout import PageShape, append, from_stored
from tests.pallas_kernels.quick import quick
from tests.tiny import TINY

PAGE, HEADS, WIDTH, WINDOW = 8, 2, 64, 4
LENGTH, KEPT = 61, 29  # tokens of the prompt, and those that stay
TABLE = [5, 9, 2, 14, 7, 11, 3, 12, 1]  # the last has nothing of the prompt
TARGETS = [4, 8, 6, 10]
CASES = [
    *((dtype, "separate") for dtype in ("float32", "int8", "int4", "int8_int4")),
    *((dtype, "bits") for dtype in ("bfloat16", "float8_e4m3fn")),
    *((dtype, "interleaved") for dtype in ("float32", "bfloat16", "int8", "int4")),
]


def stored_prompt_pages(dtype: str, layout: str):
    """Pages with a prompt and, where nothing may be read, numbers that are none."""
    shape = PageShape(16, PAGE, HEADS, WIDTH, dtype)
    count = len(TABLE) * PAGE
    k, v, q = (
        jax.random.normal(jax.random.key(seed), (rows, heads, WIDTH))
        for seed, rows, heads in ((1, count, HEADS), (2, count, HEADS), (3, WINDOW, 2 * HEADS))
    )
    k = jnp.where(jnp.arange(count)[:, None, None] < LENGTH, k, jnp.nan)
    page, slot = jnp.array(TABLE)[jnp.arange(count) // PAGE], jnp.arange(count) % PAGE
    slots = page.astype(jnp.int32), slot.astype(jnp.int32)
    return shape, jax.jit(append)(empty_pages(shape, layout), k, v, *slots), q


@partial(jax.jit, static_argnums=1)
def stored_numbers(pages, shape: PageShape):
    """Keys and values [pages, page, Hkv, K] as they are read."""
    found = unpack(pages, HEADS, WIDTH)
    numbers = []
    for values, scales, dtype in (
        (found.k, found.k_scales, shape.key_dtype),
        (found.v, found.v_scales, shape.value_dtype),
    ):
        read = from_stored(values, None if scales is None else scales.swapaxes(1, 2))
        numbers.append(rotation.rotate_back(read) if dtype == "int4" else read)
    return numbers


@pytest.mark.matrix("snapkv-int4-separate")
@pytest.mark.parametrize(("dtype", "layout"), CASES)
@pytest.mark.parametrize("method", ["snapkv", "keydiff"])
def test_what_stays_is_chosen_from_stored_keys(method, dtype, layout):
    shape, pages, q = stored_prompt_pages(dtype, layout)
    prompt = PromptPages(jnp.array(TABLE), jnp.int32(LENGTH), jnp.int32(4), jnp.array(TARGETS))
    found = jax.jit(compacted, static_argnums=(0, 4))(method, pages, prompt, q, (HEADS, WIDTH), {})
    before, after = (jax.device_get(stored_numbers(one, shape)) for one in (pages, found))
    keys = jnp.asarray(before[0][TABLE].reshape(-1, HEADS, WIDTH)[:LENGTH])
    if method == "keydiff":
        wanted = kept_positions(keydiff_scores(keys), KEPT)
    else:
        best = kept_positions(snapkv_scores(q, keys), KEPT - WINDOW)
        wanted = jnp.concatenate([best, jnp.tile(jnp.arange(LENGTH - WINDOW, LENGTH), (HEADS, 1))], axis=1)
    assert (wanted[0] != wanted[1]).any()
    for old, new in zip(before, after, strict=True):
        old, new = (one[ids].reshape(-1, HEADS, WIDTH) for one, ids in ((old, TABLE), (new, TARGETS)))
        for head in range(HEADS):
            np.testing.assert_array_equal(new[:KEPT, head], old[np.asarray(wanted[head]), head])
    np.testing.assert_array_equal(after[0][TABLE], before[0][TABLE])  # the prompt stays where it is


@pytest.mark.parametrize(("dtype", "layout"), quick(CASES, ("int4", "interleaved")))
def test_what_stays_is_what_later_queries_are_expected_to_read(dtype, layout):
    """The moments are those of tokens before, and of the last ones, whose queries are given."""
    shape, pages, q = stored_prompt_pages(dtype, layout)
    rope, positions = RopeConfig(rotary_dim=WIDTH), jnp.arange(LENGTH - WINDOW, LENGTH)
    before = QueryMoments.none(2 * HEADS, WIDTH).add(jax.random.normal(jax.random.key(5), (50, 2 * HEADS, WIDTH)) + 1)
    future = rope_rotation(rope, LENGTH + jnp.arange(16))
    queries = LayerQueries(before, rope_rotation(rope, positions), future, jnp.ones(WINDOW, bool))
    prompt = PromptPages(jnp.array(TABLE), jnp.int32(LENGTH), jnp.int32(4), jnp.array(TARGETS))
    compact = jax.jit(compacted_by_moments, static_argnums=3)
    found = jax.device_get(stored_numbers(compact(pages, prompt, q, (HEADS, WIDTH), None, queries, 0.2), shape))
    stored = jax.device_get(stored_numbers(pages, shape))
    keys, values = (one[TABLE].reshape(-1, HEADS, WIDTH)[:LENGTH] for one in stored)
    scores = expected_attention_scores(queries.add(q), jnp.asarray(keys), jnp.asarray(values), future, scale=0.2)
    wanted = np.asarray(kept_positions(scores, KEPT))
    assert (wanted[:, :4] == np.arange(4)).all()
    assert (wanted[0] != wanted[1]).any()
    for old, new in zip((keys, values), found, strict=True):
        new = new[TARGETS].reshape(-1, HEADS, WIDTH)
        for head in range(HEADS):
            np.testing.assert_array_equal(new[:KEPT, head], old[wanted[head], head])


def test_a_prompt_of_any_length_keeps_what_it_should():
    """One program: counts are numbers of the prompt."""
    k, q = jax.random.normal(jax.random.key(1), (72, 2, 8)), jax.random.normal(jax.random.key(2), (4, 4, 8))
    choose = jax.jit(chosen_positions, static_argnums=(0, 5))
    for length, kept in ((72, 32), (72, 25), (40, 24), (33, 32)):
        found = np.asarray(choose("snapkv", q, k.at[length:].set(jnp.nan), length, kept, 32, {}))[:, :kept]
        best = kept_positions(snapkv_scores(q, k[:length]), kept - 4)
        assert (found[:, : kept - 4] == best).all()
        assert (found[:, kept - 4 :] == np.arange(length - 4, length)).all()
        assert (np.diff(found) > 0).all()


def test_lengths_and_tables_are_without_what_was_lost():
    cache = init_paged_cache(TINY, 8, PAGE, "float32")
    tables = (jnp.zeros((3, 5), jnp.int32), jnp.ones((3, 5), jnp.int32), jnp.array([[2, 1], [0, 0], [3, 3]]))
    found, lengths = visible_tables(cache, tables, jnp.array([40, 9, 30]), jnp.array([1, 5, 0]))
    assert [int(table[0, 0]) for table in found] == [0, 1]
    assert [one.tolist() for one in lengths] == [[24, 9, 0], [32, 9, 0]]
