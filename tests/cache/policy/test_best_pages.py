"""Which pages a query chooses, against the paper's formulas in NumPy, and what passes of several rows make of them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.cache import init_paged_cache
from jaxinfer.cache.paged import LeafedPages
from jaxinfer.cache.policy import best_pages
from jaxinfer.cache.policy.best_pages import chosen_pages, page_promise, query_parts_of_slots
from jaxinfer.cache.policy.contract import SlotRows, StepRows
from jaxinfer.cache.policy.kinds import parse_policy
from jaxinfer.cache.policy.quest import Quest
from pallas_kernels.paged_attention import api, unpack
from pallas_kernels.paged_attention.layout import dtype_name, from_stored, queries_for
from tests.pallas_kernels.quick import quick
from tests.tiny import TINY

SIZE, NUM_PAGES, COLUMNS, WIDTH = 4, 40, 12, 64
CONFIG = replace(TINY, num_layers=1, head_dim=WIDTH, num_heads=4, num_kv_heads=2)
STORED = {
    "float32": ("float32", "separate"),
    "bfloat16, interleaved": ("bfloat16", "interleaved"),
    "bfloat16, bits": ("bfloat16", "bits"),
    "float16": ("float16", "separate"),
    "fp8": ("float8_e4m3fn", "separate"),
    "int8": ("int8", "separate"),
    "int8, interleaved": ("int8", "interleaved"),
    "int4": ("int4", "separate"),
}
EXACT = ("float32", "bfloat16, interleaved", "bfloat16, bits", "fp8")  # bounds are keys


def best_of(num_pages: int) -> Quest:
    """The best pages of all layers."""
    return Quest(num_pages * SIZE, num_dense_layers=0, page_size=SIZE)


def test_texts_are_read():
    assert parse_policy(" quest(1000)") == Quest(1000)
    assert str(parse_policy("quest(1000)")) == "quest(1000)"
    assert parse_policy("quest(1000)").bound(16, None).num_pages == 63
    for text in ("quest(0)", "quest(4)+window(8)", "quest", "quest(4)+quest(4)"):
        with pytest.raises(ValueError, match=r"quest"):
            parse_policy(text)


def numbers_of(seed: int, num_tokens: int):
    """q [T, Hq, K], k and v [T, Hkv, K]."""
    numbers = np.random.default_rng(seed)
    heads = (CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.num_kv_heads)
    return tuple(jnp.asarray(numbers.standard_normal((num_tokens, one, WIDTH), np.float32)) for one in heads)


def used_cache(stored: str):
    """A cache whose pages belonged to others: bounds wider than any key."""
    dtype, layout = STORED[stored]

    def leaves(layer, pages):
        return best_of(1).page_leaves(CONFIG, layer, pages, dtype, layout)

    cache = init_paged_cache(CONFIG, NUM_PAGES, SIZE, dtype, layout, leaves=leaves)
    (pages,) = cache.layers
    bounds = pages.leaves
    wide = jnp.broadcast_to(jnp.array([-50.0, 50.0])[:, None, None], bounds.shape[1:]).astype(bounds.dtype)
    return replace(cache, layers=(LeafedPages(pages.pages, jnp.zeros_like(bounds) + wide),))


def table_of(seed: int):
    return jnp.asarray(np.random.default_rng(seed).permutation(NUM_PAGES - 1)[:COLUMNS] + 1, jnp.int32)[None]


@partial(jax.jit, static_argnums=(0, 1))
def store(best: Quest, num_rows: int, cache, table, position, q, k, v):
    """A step that stores rows of a prompt: the output and the cache."""
    one, zero = jnp.array([num_rows]), jnp.array([0])
    ragged = (jnp.zeros(num_rows, jnp.int32), zero, one, position + one)
    rows = StepRows(*ragged, is_decoding=jnp.array([False]), prompt_lengths=jnp.array([NUM_PAGES * SIZE]))
    attend = best.attend_step(CONFIG, cache, (table,), rows)
    return attend(0, q, k, v, None), attend.cache


@partial(jax.jit, static_argnums=(0, 1))
def answer(best: Quest, num_rows: int, cache, table, position, q, k, v):
    """A pass over tokens of an answer: the output and the cache."""
    one, zero = jnp.array([num_rows]), jnp.array([0])
    attend = best.attend_slots(CONFIG, cache, (table,), SlotRows(zero, position + zero, one, num_rows))
    return attend(0, q, k, v, None), attend.cache


def prompted(stored: str, seed: int, num_tokens: int, chunk: int):
    """A cache with a prompt, stored in chunks, and its page table: the same however many pages its queries choose."""
    best = best_of(2)
    cache, table = used_cache(stored), table_of(seed)
    rows = numbers_of(seed, num_tokens)
    for start in range(0, num_tokens, chunk):
        part = [x[start : start + chunk] for x in rows]
        _, cache = store(best, part[0].shape[0], cache, table, jnp.int32(start), *part)
    return cache, table


def keys_of(cache) -> np.ndarray:
    """float32 [pages, page, Hkv, K], as stored: those of 4 bits rotated."""
    (layer,) = cache.layers
    logical = unpack(layer.pages, CONFIG.num_kv_heads, WIDTH)
    scales = None if logical.k_scales is None else logical.k_scales.swapaxes(1, 2)
    return np.asarray(from_stored(logical.k, scales), np.float64)


def paper_choice(q: np.ndarray, keys: np.ndarray, table: list[int], position: int, count: int) -> list[int]:
    """The pages that a query [Hq, K] attends to: Algorithm 1 of the paper, page by page and head by head. One choice
    for all heads: by the shares that they would give a page, together."""
    group = q.shape[0] // keys.shape[2]
    before = table[: position // SIZE]
    bounds = np.zeros((q.shape[0], len(before)))
    for head in range(q.shape[0]):
        for number, page in enumerate(before):
            of_head = keys[page, :, head // group]
            least, greatest = of_head.min(axis=0), of_head.max(axis=0)
            bounds[head, number] = sum(max(a * b, a * c) for a, b, c in zip(q[head], least, greatest, strict=True))
    bounds *= WIDTH**-0.5
    weights = np.exp(bounds - bounds.max(axis=1, keepdims=True, initial=-1e9))
    promise = (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
    order = sorted(range(len(before)), key=lambda number: (-promise[number], number))
    return [before[number] for number in sorted(order[:count])] + [table[position // SIZE]]


@pytest.mark.matrix
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("stored", quick(EXACT, "float32", "bfloat16, interleaved"))
def test_the_pages_are_those_of_the_paper(stored, seed):
    cache, table = prompted(stored, seed, 42, chunk=7)
    (layer,) = cache.layers
    for count in (1, 3, 6, 20):
        best = best_of(count)
        for position in (3, 4, 17, 41):
            q = numbers_of(seed + 10 * position, 1)[0]
            parts = query_parts_of_slots(
                best, table, SlotRows(jnp.array([0]), jnp.array([position]), jnp.array([1]), 1)
            )
            promise = page_promise(q, layer.leaves, parts, WIDTH**-0.5, None)
            found, kv_lengths = chosen_pages(parts, promise, jnp.array([position + 1]))
            wanted = paper_choice(np.asarray(q[0], np.float64), keys_of(cache), table[0].tolist(), position, count)
            assert found[0, : len(wanted)].tolist() == wanted, (count, position)
            assert kv_lengths.tolist() == [(len(wanted) - 1) * SIZE + position % SIZE + 1]


def test_equal_pages_are_taken_by_position():
    parts = query_parts_of_slots(best_of(2), table_of(1), SlotRows(jnp.array([0]), jnp.array([22]), jnp.array([1]), 1))
    promise = jnp.where(jnp.arange(COLUMNS) < 5, 0.5, -jnp.inf)[None]
    table, _ = chosen_pages(parts, promise, jnp.array([23]))
    assert table[0].tolist() == [parts.page_table[0, column] for column in (0, 1, 5)]


@pytest.mark.matrix("int8")
@pytest.mark.parametrize("stored", STORED)
def test_bounds_are_bounds(stored):
    """Of each stored key, in every kind of cache; without slack where the bound's dtype has the keys."""
    cache, table = prompted(stored, 4, 45, chunk=5)
    (layer,) = cache.layers
    keys = keys_of(cache)[np.asarray(table[0, :11])]  # the last page is not full
    bounds = np.asarray(layer.leaves, np.float64)[np.asarray(table[0, :11])]
    assert (bounds[:, 0] <= keys.min(axis=1)).all()
    assert (bounds[:, 1] >= keys.max(axis=1)).all()
    slack = np.abs(bounds - np.stack([keys.min(axis=1), keys.max(axis=1)], axis=1)).max()
    assert slack == 0 if stored in EXACT else slack < 2**-7 * np.abs(keys).max()
    q = np.asarray(queries_for(numbers_of(5, 1)[0], dtype_name(STORED[stored][0]))[0], np.float64)
    scores = np.einsum("hk,pshk->psh", q, np.repeat(keys, 2, axis=2)).max(axis=1)
    most = np.maximum(q * np.repeat(bounds[:, 0], 2, axis=1), q * np.repeat(bounds[:, 1], 2, axis=1)).sum(axis=-1)
    assert (scores <= most + 1e-9).all()


def test_products_and_sums_are_the_same_bounds(monkeypatch):
    """The forms for TPUs, in several blocks of pages, and for others."""
    cache, _ = prompted("float32", 6, 46, chunk=46)
    q, tables = numbers_of(7, 5)[0], jnp.concatenate([table_of(seed) for seed in range(5)])
    wanted = best_pages._bounds_of_scores(q, cache.layers[0].leaves, tables)
    monkeypatch.setattr(best_pages, "current_platform", lambda: "tpu")
    for size in (1 << 30, 5 * 1024 * 5, 1):
        monkeypatch.setattr(best_pages, "BLOCK_BYTES", size)
        found = best_pages._bounds_of_scores(q, cache.layers[0].leaves, tables)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def answered(best: Quest, stored: str, together: int, num_tokens: int = 12):
    """The outputs of the tokens of an answer after a prompt of 30, so many in a pass, and the bounds of full pages."""
    cache, table = prompted(stored, 8, 30, chunk=10)
    rows, found = numbers_of(9, num_tokens), []
    for start in range(0, num_tokens, together):
        part = [x[start : start + together] for x in rows]
        out, cache = answer(best, part[0].shape[0], cache, table, jnp.int32(30 + start), *part)
        found.append(out)
    num_full = (30 + num_tokens) // SIZE
    return np.concatenate(found), np.asarray(cache.layers[0].leaves[table[0, :num_full]], np.float32)


@pytest.mark.matrix
@pytest.mark.parametrize("stored", quick(STORED, "float32", "int8, interleaved"))
def test_tokens_of_a_pass_choose_as_if_they_came_one_by_one(stored):
    """As drafts are verified: pages fill within a pass, and later rows choose among them."""
    alone, bounds = answered(best_of(3), stored, 1)
    for together in (3, 12):
        found, other = answered(best_of(3), stored, together)
        np.testing.assert_allclose(found, alone, atol=2e-6)
        np.testing.assert_array_equal(other, bounds)
    assert np.abs(answered(best_of(4), stored, 1)[0] - alone).max() > 1e-2


def test_rejected_drafts_leave_nothing_behind():
    best = best_of(2)
    cache, table = prompted("float32", 8, 30, chunk=30)
    huge = [1000 * x for x in numbers_of(11, 5)]
    _, drafted = answer(best, 5, cache, table, jnp.int32(30), *huge)
    for start in range(30, 44, 2):
        part = numbers_of(start, 2)
        wanted, cache = answer(best, 2, cache, table, jnp.int32(start), *part)
        found, drafted = answer(best, 2, drafted, table, jnp.int32(start), *part)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_bounds_of_former_owners_are_noticed(monkeypatch):
    """The inverse test: were they widened and not computed anew, other pages would be chosen."""
    wanted, _ = answered(best_of(3), "float32", 3)
    compute = best_pages.bounds_of_filled

    def widen(pages, bounds, ids, shape):
        new = compute(pages, bounds, ids, shape)
        return jnp.stack([jnp.minimum(new[:, 0], bounds[:, 0]), jnp.maximum(new[:, 1], bounds[:, 1])], axis=1)

    monkeypatch.setattr(best_pages, "bounds_of_filled", widen)
    jax.clear_caches()
    found, _ = answered(best_of(3), "float32", 3)
    jax.clear_caches()
    assert np.abs(found - wanted).max() > 1e-2


@pytest.mark.slow
def test_a_choice_before_the_append_is_noticed(monkeypatch):
    """The inverse test: rows of a pass would not find the pages that it fills."""
    wanted, _ = answered(best_of(3), "float32", 12)
    compute, before = best_pages.bounds_of_filled, []

    def remember(pages, bounds, ids, shape):
        before.append(bounds)
        return compute(pages, bounds, ids, shape)

    promise = best_pages.page_promise
    monkeypatch.setattr(best_pages, "bounds_of_filled", remember)
    monkeypatch.setattr(best_pages, "page_promise", lambda q, bounds, *rest: promise(q, before[-1], *rest))
    jax.clear_caches()
    found, _ = answered(best_of(3), "float32", 12)
    jax.clear_caches()
    assert np.abs(found - wanted).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("stored", quick(("bfloat16, interleaved", "int8, interleaved"), "int8, interleaved"))
def test_the_kernel_of_tpus_reads_the_chosen_pages(monkeypatch, stored):
    """In its interpreter: a token at a time, and several in a pass, which store what others of it read."""
    wanted = [answered(best_of(3), stored, together, 6)[0] for together in (1, 3)]
    monkeypatch.setattr(api, "current_platform", lambda: "tpu")
    jax.clear_caches()
    parameters = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise")
    with pltpu.force_tpu_interpret_mode(parameters):
        found = [answered(best_of(3), stored, together, 6)[0] for together in (1, 3)]
    jax.clear_caches()
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_other_caches_have_no_bounds():
    assert not isinstance(init_paged_cache(CONFIG, 4, SIZE, "float32").layers[0], LeafedPages)


def test_trees_of_drafts_are_refused():
    zero, one = jnp.array([0]), jnp.array([3])
    rows = SlotRows(zero, zero, one, 3, ancestors=jnp.array([1, 3, 5], jnp.uint32))
    with pytest.raises(NotImplementedError, match="no trees of drafts"):
        best_of(2).attend_slots(CONFIG, used_cache("float32"), (table_of(1),), rows)
