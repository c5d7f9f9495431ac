"""The XLA implementation: the suite, its independence of neighbours, what it reads, and its compiled program."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ahead_of_time, tuning
from pallas_kernels.paged_attention import layout, paged_attention, xla
from tests.pallas_kernels.paged_attention.shapes import FOUR_BITS, SMALL, PagedShape
from tests.pallas_kernels.quick import quick

# Every dtype, row format and program in the interleaved layout too; the rest of xla does not see the layout.
INTERLEAVED = [
    name for name in SMALL if any(part in name for part in ("8", "e4m3", "e5m2", "bf16", "int8", "odd", "mixed"))
]


SUITE = quick(
    SMALL,
    *("decode_around_a_page", "decode_soft_cap_sinks", "decode_int8", "verify_tree_window", "mixed"),
)


@pytest.mark.matrix("mixed")
@pytest.mark.parametrize("name", SUITE)
def test_suite(name, check):
    check(SMALL[name], "xla", "separate")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", quick(FOUR_BITS, "decode_int4_head_dim_96", "verify_tree_int8_int4"))
def test_suite_of_four_bits(name, check):
    check(FOUR_BITS[name], "xla", "separate")


@pytest.mark.slow
@pytest.mark.parametrize("name", quick([n for n in FOUR_BITS if "int8_int4" not in n], "decode_int4_head_dim_96"))
def test_suite_of_four_bits_interleaved(name, check):
    check(FOUR_BITS[name], "xla", "interleaved")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", quick(INTERLEAVED, "verify_int8"))
def test_suite_interleaved(name, check):
    check(SMALL[name], "xla", "interleaved")


@pytest.mark.parametrize(
    "name", quick([name for name in SMALL if SMALL[name].cache_dtype not in ("float32", "int8")], "decode_e4m3")
)
def test_suite_of_bits(name, check):
    check(SMALL[name], "xla", "bits")


@pytest.fixture
def traced_anew():
    """Programs are traced again after a function is exchanged, and once more when it is back."""
    xla._attention.clear_cache()
    yield xla._attention.clear_cache
    xla._attention.clear_cache()


def test_the_suite_finds_a_wrong_key(check, monkeypatch, traced_anew):
    """Inverse: a window one key too wide, and a token appended one slot too late, are both noticed."""
    right = xla.visible_keys
    monkeypatch.setattr(xla, "visible_keys", lambda o, s, *a: right(o, replace(s, window=s.window + 1), *a))
    with pytest.raises(AssertionError):
        check(SMALL["decode_window"], "xla", "separate")
    monkeypatch.undo()
    traced_anew()
    append = layout.append
    monkeypatch.setattr(layout, "append", lambda pages, k, v, page, slot: append(pages, k, v, page, slot + 1))
    with pytest.raises(AssertionError):
        check(SMALL["decode_around_a_page"], "xla", "separate")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", quick(["decode_window", "verify_tree", "mixed", "prefill_int8"], "mixed"))
@pytest.mark.optimized
def test_bits_do_not_depend_on_neighbours(name, check_alone):
    shape = SMALL[name]
    call = jax.jit(lambda arrays: paged_attention(**arrays, **shape.options, implementation="xla")[0])
    check_alone(shape, call)


@pytest.mark.slow
@pytest.mark.optimized
def test_bits_do_not_depend_on_the_chunks_of_a_prompt():
    """300 tokens in one chunk, or in chunks of 100, 17 and 183, in one program of fixed shape."""
    shape = PagedShape(((300, 300),), max_query_length=300, heads=(4, 2))
    arguments = shape.arguments("separate", is_shuffled=False)

    @jax.jit
    def call(arrays, pages):
        return paged_attention(**arrays | {"pages": pages}, **shape.options, implementation="xla")

    whole, _ = call(arguments, arguments["pages"])
    pages, done, parts = arguments["pages"], 0, []
    for chunk in (100, 17, 183):
        rows = {name: jnp.roll(arguments[name], -done, axis=0) for name in ("q", "k_new", "v_new")}
        lengths = {"query_lengths": jnp.array([chunk], jnp.int32), "kv_lengths": jnp.array([done + chunk], jnp.int32)}
        out, pages = call(arguments | rows | lengths, pages)
        parts.append(out[:chunk])
        done += chunk
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.slow
@pytest.mark.optimized
def test_a_nan_stays_in_its_sequence():
    shape = SMALL["mixed"]
    arguments = shape.arguments("separate")
    call = jax.jit(lambda arrays: paged_attention(**arrays, **shape.options, implementation="xla")[0])
    clean = np.asarray(call(arguments))
    start, length = int(arguments["query_starts"][4]), shape.lengths[4][0]
    broken = np.asarray(call(arguments | {"k_new": arguments["k_new"].at[start].set(jnp.nan)}))
    rows = np.arange(shape.num_tokens)
    inside = (rows >= start) & (rows < start + length)
    assert np.isnan(broken[inside]).all()
    np.testing.assert_array_equal(broken[~inside], clean[~inside])


def test_empty_slots_run_no_tile(monkeypatch, traced_anew):
    """A step of nothing but empty slots computes nothing, and one sequence among 64 slots one tile."""
    counted = []

    def count(*args):
        jax.debug.callback(lambda: counted.append(1))
        return original(*args)

    original = xla._tile
    monkeypatch.setattr(xla, "_tile", count)
    call = jax.jit(lambda arrays: paged_attention(**arrays, max_query_length=1, implementation="xla")[0])
    for live in (0, 1, 9):
        shape = PagedShape(((1, 16),) * live + ((0, 7),) * (64 - live), max_query_length=1, num_padding=64 - live)
        call(shape.arguments("separate")).block_until_ready()
        jax.effects_barrier()
        assert len(counted) == -(-live // xla.SIZES.tile)
        counted.clear()


@pytest.mark.parametrize("keys", quick([16, 32, 512], 16))
def test_block_sizes_change_no_answer(check, keys):
    with tuning.force(xla.SHORT_NAME, keys=keys, tile=2):
        check(SMALL["decode_around_a_page"], "xla", "separate")


ON_A_CPU = [(None, dtype) for dtype in ("float32", "int8", "bfloat16", "float8_e4m3fn", "float8_e5m2")]


ON_CHIPS = itertools.product(("v6e", "h100"), ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("chip", "dtype"),
    quick([*ON_A_CPU, *ON_CHIPS], (None, "bfloat16"), ("h100", "int8")),
)
@pytest.mark.optimized
def test_compiled_in_place(chip, dtype):
    """The cache of a Llama-3-8B layer is updated in place, and temporaries do not grow with it."""
    keys = 4096
    shape = PagedShape(
        ((1, keys),) * 64,
        page_size=64,
        heads=(32, 8),
        head_dim=128,
        dtype="bfloat16",
        cache_dtype=dtype,
        max_query_length=1,
    )
    arguments = shape.abstract("bits" if chip is None and dtype not in ("float32", "int8") else "separate")
    pages = arguments.pop("pages")
    num_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pages))

    def call(pages, arrays):
        return paged_attention(pages=pages, **arrays, **shape.options, implementation="xla")

    if chip is None:
        memory = jax.jit(call, donate_argnums=0).lower(pages, arguments).compile().memory_analysis()
        aliased, temporary = memory.alias_size_in_bytes, memory.temp_size_in_bytes
    else:
        if (reason := ahead_of_time.missing_compiler(chip)) is not None:
            pytest.skip(reason)
        compiled = ahead_of_time.compile_for(chip, call, pages, arguments, donate_argnums=(0,))
        aliased, temporary = compiled.aliased_bytes, compiled.temporary_bytes
    assert aliased >= num_bytes
    assert temporary <= num_bytes / 16
