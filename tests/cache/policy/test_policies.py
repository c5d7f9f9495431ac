"""Policies as text, and what tokens attend to under them: tables of pages against a mask over all tokens."""

import random
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.cache import init_paged_cache
from jaxinfer.cache.policy.contract import StepRows
from jaxinfer.cache.policy.kept_pages import attend_to_pieces, kept_view, pieces
from jaxinfer.cache.policy.kinds import parse_policy
from jaxinfer.cache.policy.prompt_budget import PROMPT_METHODS, PromptBudget
from jaxinfer.cache.policy.sinks_window import SinksWindow
from pallas_kernels.paged_attention import api
from tests.engine.dense_policy import is_seen
from tests.tiny import TINY


def kept_pages(num_sinks: int, num_window: int, page_size: int, trained: int | None = None) -> SinksWindow:
    return SinksWindow(num_sinks * page_size, num_window * page_size).bound(page_size, trained)


def step_rows(*arrays) -> StepRows:
    return StepRows(*arrays, is_decoding=jnp.zeros(arrays[1].shape, bool), prompt_lengths=None)


PAGES = [kept_pages(1, 2, 4), kept_pages(2, 1, 8), kept_pages(3, 5, 1), kept_pages(1, 2, 4, trained=20)]
NUM_PAGES = 24


@pytest.mark.parametrize("text", ["sinks(4)+window(1024)", "window(1024)+sinks(4)", " sinks(4) + window(1024)"])
def test_texts_are_read(text):
    assert parse_policy(text) == SinksWindow(sinks=4, window=1024)
    assert str(parse_policy(text)) == "sinks(4)+window(1024)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not understood"),
        ("window(64)", r"lacks sinks\(N\)"),
        ("sinks(4)", r"lacks window\(N\)"),
        ("sinks(4)+window(64)+window(64)", "'window.64.' is not understood"),
        ("sinks(4)+window(-1)", "'window.-1.' is not understood"),
        ("sinks(0)+window(64)", r"sinks\(0\) of a kv_policy must be a positive number"),
        ("snapkv(64)+window(64)", "combines snapkv and window"),
        ("snapkv(32)", "more tokens than the 32 at a prompt's end"),
        ("tova(64)", "'tova.64.' is not understood"),
        ("sinks(4)window(64)", "is not understood"),
    ],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_policy(text)


@pytest.mark.parametrize("method", PROMPT_METHODS)
def test_budgets_of_prompts_are_read(method):
    policy = parse_policy(f"{method}(100)")
    assert policy == PromptBudget(method, 100)
    assert str(policy) == f"{method}(100)"


def test_pages_are_dropped_whole():
    """At least the budget stays, less than a page more; short prompts stay whole."""
    for page_size in (1, 8, 64):
        for num_prompt in range(1, 400, 7):
            budget = PromptBudget("snapkv", 100, page_size=page_size).of_layer(3, 4)
            dropped = budget.num_dropped(num_prompt)
            kept = num_prompt - dropped * page_size
            assert dropped == 0 or -(-kept // page_size) <= budget.most_pages
            assert dropped == 0 or 100 <= kept < 100 + page_size
            assert dropped > 0 or num_prompt < 100 + page_size
    budgets = [PromptBudget("pyramidkv", 1000, page_size=1).of_layer(layer, 32) for layer in range(32)]
    dropped = [budget.num_dropped(100_000) for budget in budgets]
    assert dropped == sorted(dropped)
    assert (100_000 - dropped[0], 100_000 - dropped[-1]) == (1950, 50)
    for num_prompt in range(1, 5000, 13):
        for budget in budgets[::5]:
            dropped = budget.num_dropped(num_prompt)
            assert dropped == 0 or num_prompt - dropped <= budget.most_pages


def test_pages_are_kept_whole():
    for policy, num_sinks, num_window in ((SinksWindow(4, 1024), 1, 64), (SinksWindow(17, 1000), 2, 63)):
        kept = policy.bound(16, None)
        assert (kept.num_sinks, kept.num_window) == (num_sinks, num_window)
        assert kept.num_kept == 16 * (num_sinks + num_window + 1)


def view_of(kept: SinksWindow, positions, lengths):
    """`kept_view` where page n of sequence s is 100 s + n + 1, so that pages tell their positions."""
    cache = init_paged_cache(TINY, 8, kept.page_size, "float32")
    tables = jnp.arange(len(positions))[:, None] * 100 + jnp.arange(NUM_PAGES) + 1
    return kept_view(kept, TINY, cache, (tables,), jnp.array(positions), jnp.array(lengths))


@pytest.mark.matrix
@pytest.mark.parametrize("kept", PAGES[:3], ids=str)
def test_tables_have_what_the_mask_shows(kept):
    size = kept.page_size
    positions = np.arange(NUM_PAGES * size)
    view, seen = view_of(kept, positions, np.ones_like(positions)), is_seen(kept, len(positions))
    for position in positions:
        (table,), length = view.page_tables, int(view.kv_lengths[position])
        keys = [(int(table[position, at // size]) - 100 * position - 1) * size + at % size for at in range(length)]
        assert keys == np.flatnonzero(seen[position]).tolist()
    assert view.page_tables[0].shape[1] == kept.num_columns
    assert not view.moved


def test_sinks_are_moved_beyond_the_trained_length():
    """To pages of their own, by the tokens that were dropped; the window is read where it is."""
    kept, positions = PAGES[3], [2, 15, 16, 23, 24]
    cache = init_paged_cache(TINY, 8, kept.page_size, "float32")
    view = view_of(kept, positions, [1, 1, 1, 1, 0])
    first, others = view.page_tables[0][:, 0], view.page_tables[0][:, 1:]
    num_pages = cache.layers[0].k.shape[0]
    # Positions from 20 on are of a page that ends beyond 20; the last takes no part.
    assert [int(page) - 100 * row - 1 for row, page in enumerate(first)][:3] == [0, 0, 0]
    assert int(first[3]) == num_pages - 5 + 3
    assert int(others[3, 0]) == 300 + 3 + 1
    for moved in view.moved.values():
        assert moved.sources[:, 0].tolist() == [1, 101, 201, 301, 401]
        assert moved.targets[:, 0].tolist() == [num_pages, num_pages, num_pages, num_pages - 2, num_pages]
        angles = np.arccos(np.clip(np.asarray(moved.cos[:, 0]), -1, 1))
        np.testing.assert_allclose(angles[:4], [0, 0, 0, abs((8 + np.pi) % (2 * np.pi) - np.pi)], atol=1e-3)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(4))
def test_pieces_are_every_row_once_within_a_page(seed):
    rng, kept = random.Random(seed), PAGES[seed]
    num_slots, num_tokens = 5, 64
    cache = init_paged_cache(TINY, 8, kept.page_size, "float32")
    tables = (jnp.arange(num_slots)[:, None] * 100 + jnp.arange(4 * NUM_PAGES) + 1,)
    for _ in range(8):
        lengths = [rng.choice([0, 1, 1, rng.randint(2, 13)]) for _ in range(num_slots)]
        begins = [rng.randint(0, NUM_PAGES) for _ in range(num_slots)]
        token_slots, starts, row = np.full(num_tokens, num_slots), np.zeros(num_slots, int), 0
        for slot in rng.sample(range(num_slots), num_slots):
            planned = lengths[slot]
            starts[slot] = row
            token_slots[row : row + planned] = slot
            row += planned
        lengths = [0 if rng.random() < 0.2 else length for length in lengths]  # ended since it was planned
        ends = np.add(begins, lengths)
        arrays = (jnp.array(one, jnp.int32) for one in (token_slots, starts, lengths, ends))
        found = pieces(kept, TINY, cache, tables, step_rows(*arrays))
        rows = []
        for start, length, kv_length in zip(found.starts, found.lengths, found.view.kv_lengths, strict=True):
            if not int(length):
                assert int(kv_length) == 0
                continue
            rows += range(int(start), int(start + length))
            slot = int(token_slots[int(start)])
            position = begins[slot] + int(start) - starts[slot]
            assert position // kept.page_size == (position + int(length) - 1) // kept.page_size
            dropped = max(position // kept.page_size - kept.num_window - kept.num_sinks, 0) * kept.page_size
            assert int(kv_length) == position + int(length) - dropped
        wanted = [starts[slot] + at for slot in range(num_slots) for at in range(lengths[slot])]
        assert sorted(rows) == sorted(wanted)


def test_room_ends_with_the_page():
    assert kept_pages(1, 1, 4).limit_rows(jnp.arange(6), jnp.full(6, 9)).tolist() == [4, 3, 2, 1, 4, 3]
    assert kept_pages(1, 1, 4).limit_rows(jnp.arange(6), jnp.full(6, 2)).tolist() == [2, 2, 2, 1, 2, 2]


def attend_in_pieces(kept: SinksWindow, layout: str):
    """A prompt of 6 pages in one step, in pieces: the output and the cache."""
    num_tokens = 6 * kept.page_size
    config = replace(TINY, num_layers=1)
    cache = init_paged_cache(config, 40, kept.page_size, "float32", layout)
    slots = jnp.where(jnp.arange(num_tokens + 4) < num_tokens, 0, 2)
    one, nothing = jnp.array([num_tokens, 0]), jnp.zeros(2, jnp.int32)
    rows = step_rows(slots, nothing, one, one)
    found = pieces(kept, config, cache, (jnp.arange(2 * 8).reshape(2, 8) + 1,), rows)
    attend = attend_to_pieces(cache, kept, found, rows)
    numbers = np.random.default_rng(1)
    q, k, v = (
        jnp.asarray(numbers.standard_normal((num_tokens + 4, heads, config.head_dim), np.float32))
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    )
    return attend(0, q, k, v, None)[:num_tokens]


@pytest.mark.matrix
@pytest.mark.parametrize("trained", [None, 32])
def test_the_kernel_of_tpus_reads_what_a_step_stores(monkeypatch, trained):
    """In its interpreter, without the check for races: pages are written with the bytes that they have already."""
    kept = kept_pages(1, 1, 8, trained)
    wanted = jax.jit(partial(attend_in_pieces, kept, "separate"))()
    monkeypatch.setattr(api, "current_platform", lambda: "tpu")
    parameters = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise")
    with pltpu.force_tpu_interpret_mode(parameters):
        found = jax.jit(partial(attend_in_pieces, kept, "interleaved"))()
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_policies_are_imported_without_jax():
    """In a process of its own, as a command that only parses its options does."""
    code = "import sys, jaxinfer.cache.policy.kinds; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
