"""Sums of what queries attend to, and what is evicted by them, on one layer against NumPy."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cache import init_paged_cache
from jaxinfer.cache.paged import LeafedPages
from jaxinfer.cache.policy.contract import SlotRows, StepRows
from jaxinfer.cache.policy.h2o import H2O
from jaxinfer.cache.policy.heavy_hitters import evict
from jaxinfer.cache.policy.kinds import parse_policy
from pallas_kernels.paged_attention import unpack
from tests.engine.dense_heavy import softmax
from tests.tiny import TINY

CONFIG = replace(TINY, num_layers=1)
HEAVY = H2O(20, page_size=8)  # 3 pages, of which the last 10 tokens always stay
LENGTH = 45
TABLES = (jnp.array([[9, 4, 12, 7, 3, 2], [1, 8, 6, 5, 11, 10]], jnp.int32),)


def empty(dtype: str = "float32", layout: str = "separate"):
    def leaves(layer, pages):
        return HEAVY.page_leaves(CONFIG, layer, pages, dtype, layout)

    return init_paged_cache(CONFIG, 14, HEAVY.page_size, dtype, layout, leaves=leaves)


def tensors():
    """q, k, v of a text."""
    numbers = np.random.default_rng(2)
    heads = (CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.num_kv_heads)
    return [numbers.standard_normal((LENGTH, count, CONFIG.head_dim), np.float32) * 2 for count in heads]


@partial(jax.jit, static_argnums=(4, 5))
def _step(cache, arrays, token_slots, counts, is_uniform, options):
    starts, lengths, ends, is_decoding, prompts = counts
    rows = StepRows(token_slots, starts, lengths, ends, is_decoding, prompts, is_uniform)
    attend = HEAVY.attend_step(CONFIG, cache, TABLES, rows)
    out = attend(0, *arrays, None, **dict(options))
    return attend.cache, out


def step(cache, parts, prompts=(LENGTH, LENGTH), *, decodes=(False, False), is_uniform=False, options=()):
    """One pass over rows `parts` [start, end) of the text, by slot; 48 rows in all."""
    at = [np.arange(*part) for part in parts]
    rows = np.concatenate([*at, np.zeros(48, int)])[:48]
    slots = np.concatenate([*(np.full(len(one), slot) for slot, one in enumerate(at)), np.full(48, 2)])[:48]
    lengths = [len(one) for one in at]
    counts = [[0, lengths[0]], lengths, [end for _, end in parts], decodes, prompts]
    arrays = [jnp.asarray(x[rows]) for x in tensors()]
    found, _ = _step(cache, arrays, jnp.array(slots), tuple(map(jnp.array, counts)), is_uniform, options)
    return found


def sums_of(cache, slot: int) -> np.ndarray:
    """float32 [Hkv, tokens] in the order of the slot's pages."""
    pages = np.asarray(cache.layers[0].leaves)[np.asarray(TABLES[0][slot])]
    return pages.swapaxes(0, 1).reshape(pages.shape[1], -1)


def expected_sums(keys: np.ndarray, count: int, soft_cap: float | None = None, sinks=None) -> np.ndarray:
    q, _, _ = (x[:count].astype(np.float64) for x in tensors())
    group, found = q.shape[1] // keys.shape[1], np.zeros((keys.shape[1], count))
    for head in range(q.shape[1]):
        scores = q[:, head] @ keys[:count, head // group].T * CONFIG.head_dim**-0.5
        scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
        scores = np.where(np.tri(count) > 0, scores, -np.inf)
        if sinks is not None:
            scores = np.concatenate([scores, np.full((count, 1), sinks[head])], axis=1)
        found[head // group] += softmax(scores)[:, :count].sum(axis=0) / group
    return found


def stored_keys(cache, slot: int) -> np.ndarray:
    pages = unpack(cache.layers[0].pages, CONFIG.num_kv_heads, CONFIG.head_dim).k
    return np.asarray(pages, np.float64)[np.asarray(TABLES[0][slot])].reshape(-1, *pages.shape[2:])


CUTS = ([0, 45], [0, 5, 16, 17, 40, 45], [0, 8, 16, 24, 32, 40, 45], [0, 1, 2, 3, 44, 45])


@pytest.mark.matrix
@pytest.mark.parametrize("is_uniform", [False, True])
def test_sums_keep_every_bit_however_a_prompt_is_cut(is_uniform):
    found = []
    for cuts in CUTS:
        cache = empty()
        for start, end in pairwise(cuts):
            # The prompt goes on after it, so that nothing is dropped; another one may be beside it.
            other = (0, 3) if start == 0 else (0, 0)
            cache = step(cache, [other, (start, end)], (100, 100), is_uniform=is_uniform)
        found.append(sums_of(cache, 1)[:, :LENGTH])
        np.testing.assert_allclose(sums_of(cache, 0)[:, :3], expected_sums(stored_keys(cache, 0), 3), atol=1e-5)
    np.testing.assert_allclose(found[0], expected_sums(stored_keys(cache, 1), LENGTH), atol=1e-5)
    assert all((one == found[0]).all() for one in found)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("dtype", "layout"), [("bfloat16", "bits"), ("float32", "interleaved"), ("bfloat16", "interleaved")]
)
def test_sums_are_of_the_stored_keys_in_every_layout(dtype, layout):
    cache = step(empty(dtype, layout), [(0, 0), (0, LENGTH)], (100, 100))
    np.testing.assert_allclose(sums_of(cache, 1)[:, :LENGTH], expected_sums(stored_keys(cache, 1), LENGTH), atol=1e-4)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["int8", "int4", "int8_int4", "float8_e4m3fn"])
def test_sums_of_rounded_keys_are_near(dtype):
    layout = "bits" if dtype.startswith("float8") else "separate"
    cache = step(empty(dtype, layout), [(0, 0), (0, LENGTH)], (100, 100))
    wanted = expected_sums(tensors()[1].astype(np.float64), LENGTH)
    error = np.abs(sums_of(cache, 1)[:, :LENGTH] - wanted).mean() / wanted.mean()
    assert error < {"int4": 0.3, "float8_e4m3fn": 0.15}.get(dtype, 0.05)


def test_sums_with_a_soft_cap():
    cache = step(empty(), [(0, 0), (0, LENGTH)], (100, 100), options=(("soft_cap", 3.0),))
    wanted = expected_sums(stored_keys(cache, 1), LENGTH, soft_cap=3.0)
    np.testing.assert_allclose(sums_of(cache, 1)[:, :LENGTH], wanted, atol=1e-5)
    assert np.abs(wanted - expected_sums(stored_keys(cache, 1), LENGTH)).max() > 0.1


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["decode", "step", "uniform step", "replay"])
def test_an_answer_adds_to_what_its_prompt_has(kind):
    """Token by token after a prompt of 20, of which nothing is dropped: in decode steps, beside others in a step, in a
    step of one arithmetic, and computed again in pieces of a page. With sinks, shares add up to less."""
    sinks = jnp.linspace(-1.0, 2.0, CONFIG.num_heads)
    for options in ({}, {"sinks": sinks}):
        cache = run_answer(kind, options)
        wanted = expected_sums(stored_keys(cache, 1), 31, sinks=options.get("sinks"))
        np.testing.assert_allclose(sums_of(cache, 1)[:, :31], wanted, atol=1e-5)


def run_answer(kind: str, options):
    """A prompt of 20 tokens with an answer of 11."""
    cache = _pass(empty(), 0, options, 20)
    if kind == "replay":
        for start, end in pairwise([20, 22, 24, 31]):
            cache = _pass(cache, start, options, end - start)
        return cache
    for position in range(20, 31):
        if kind == "decode":
            cache = _decode(cache, position, options)
        else:
            cache = _pass(cache, position, options, 1, decodes=True, is_uniform=kind == "uniform step")
    return cache


def _rows(start, length: int):
    return [jax.lax.dynamic_slice_in_dim(jnp.asarray(x), start, length) for x in tensors()]


@partial(jax.jit, static_argnums=3, static_argnames=("decodes", "is_uniform"))
def _pass(cache, start, options, length, *, decodes=False, is_uniform=False):
    """A step of `length` rows of slot 1, from `start`."""
    counts = [jnp.array(one) for one in ([0, 0], [0, length], [0, start + length])]
    more = jnp.array([False, decodes]), jnp.array([20, 0 if decodes else 20])
    rows = StepRows(jnp.full(length, 1), *counts, *more, is_uniform)
    attend = HEAVY.attend_step(CONFIG, cache, TABLES, rows)
    attend(0, *_rows(start, length), None, **options)
    return attend.cache


@jax.jit
def _decode(cache, position, options):
    rows = SlotRows(jnp.arange(2), jnp.array([0, position]), jnp.array([0, 1]), 1)
    attend = HEAVY.attend_slots(CONFIG, cache, TABLES, rows)
    attend(0, *(jnp.tile(x, (2, 1, 1)) for x in _rows(position, 1)), None, **options)
    return attend.cache


def filled(dtype: str, layout: str, sums: np.ndarray):
    """A cache of the text in slot 1, with these sums [Hkv, 48]."""
    cache = step(empty(dtype, layout), [(0, 0), (0, LENGTH)], (100, 100))
    pages = jnp.asarray(sums.reshape(sums.shape[0], -1, 8).swapaxes(0, 1))
    (layer,) = cache.layers
    return replace(cache, layers=(LeafedPages(layer.pages, layer.leaves.at[TABLES[0][1]].set(pages)),))


@pytest.mark.matrix
@pytest.mark.parametrize("is_prompt", [False, True])
@pytest.mark.parametrize(
    ("dtype", "layout"), [("float32", "separate"), ("int8", "separate"), ("bfloat16", "interleaved")]
)
def test_the_last_tokens_stay_and_those_with_the_highest_sums(dtype, layout, is_prompt):
    """Bit for bit, with their sums, in order; of equal sums, the first; nothing else is touched."""
    sums = np.random.default_rng(4).integers(0, 6, (CONFIG.num_kv_heads, 48)).astype(np.float32)
    cache = filled(dtype, layout, sums)
    counts = jnp.array([40, LENGTH]), jnp.array([40, 29])
    found = evict(HEAVY, (CONFIG.head_dim,), cache, TABLES[0], *counts, is_prompt=is_prompt)
    before, after = (unpack(one.layers[0].pages, CONFIG.num_kv_heads, CONFIG.head_dim) for one in (cache, found))
    pages, new = np.asarray(TABLES[0][1]), sums_of(found, 1)
    for head in range(CONFIG.num_kv_heads):
        older = sums[head, :35] / (LENGTH - np.arange(35) if is_prompt else 1)
        kept = [*sorted(np.argsort(-older, kind="stable")[:19]), *range(35, 45)]
        assert new[head, :29].tolist() == sums[head, kept].tolist()
        for old_array, new_array in zip(before[:2], after[:2], strict=True):
            old_rows, new_rows = (np.asarray(x)[pages][:, :, head].reshape(48, -1) for x in (old_array, new_array))
            np.testing.assert_array_equal(new_rows[:29], old_rows[kept])
        if before.k_scales is not None:
            old_rows, new_rows = (np.asarray(x.v_scales)[pages][:, head].reshape(-1) for x in (before, after))
            np.testing.assert_array_equal(new_rows[:29], old_rows[kept])
    others = [page for page in range(14) if page not in pages[:4]]
    for old_leaf, new_leaf in zip(jax.tree.leaves(cache), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(np.asarray(new_leaf)[others], np.asarray(old_leaf)[others])


def test_what_is_dropped_depends_on_the_position_alone():
    heavy = H2O(40, page_size=16)
    assert (heavy.num_pages, heavy.num_recent, heavy.num_columns, heavy.num_tokens) == (3, 20, 4, 64)
    for count in range(1, 400):
        kept = count - heavy.num_dropped(count)
        assert kept % 16 == count % 16  # tokens keep their place in a page
        assert min(count, 48) <= kept < 64
    assert heavy.num_held(300, 299) == 299
    assert heavy.num_held(300, 301) == 64
    assert heavy.most_held(300, 1000) == 300
    assert heavy.most_held(10, 1000) == 64
    assert heavy.most_held(10, 12) == 12


def test_texts_are_read():
    assert parse_policy(" h2o( 1024)") == H2O(1024)
    assert str(H2O(1024)) == "h2o(1024)"
    with pytest.raises(ValueError, match=r"h2o\(1\) of a kv_policy must be at least 2 tokens"):
        parse_policy("h2o(1)")
    with pytest.raises(ValueError, match="combines"):
        parse_policy("h2o(64)+window(64)")


def test_drafts_are_refused():
    rows = SlotRows(jnp.array([0, 3]), jnp.array([0, 20]), jnp.array([0, 3]), 3)
    with pytest.raises(NotImplementedError, match="count no drafts"):
        HEAVY.attend_slots(CONFIG, empty(), TABLES, rows)
