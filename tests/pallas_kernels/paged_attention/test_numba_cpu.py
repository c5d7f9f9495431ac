"""The kernel for CPUs: the suite, bits that depend on nothing but a query's own keys, what it reads, and its choice."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu_calls
from pallas_kernels.paged_attention import choose, layout, numba_cpu, paged_attention
from tests.pallas_kernels.paged_attention.shapes import FOUR_BITS, SMALL, PagedShape
from tests.pallas_kernels.quick import quick

pytest.importorskip("numba", reason="kernels for CPUs need Numba")

NARROW = [name for name in SMALL if SMALL[name].cache_dtype not in ("float32", "int8")]
# Rows that are no whole vectors, and pages that are no whole blocks of 16.
ODD = {
    "page_4": PagedShape(((1, 33), (5, 21), (20, 20)), page_size=4),
    "page_8_window": PagedShape(((1, 100), (3, 77)), page_size=8, window=21),
    "page_24": PagedShape(((1, 70), (30, 60)), page_size=24, cache_dtype="int8"),
    "head_dim_8": PagedShape(((1, 33), (20, 20)), head_dim=8, heads=(4, 2)),
    "head_dim_20_bf16": PagedShape(((1, 33), (20, 20)), head_dim=20, cache_dtype="bfloat16", dtype="bfloat16"),
    "head_dim_20_page_4_int8": PagedShape(((1, 33), (20, 20)), head_dim=20, cache_dtype="int8", page_size=4),
    "float16": PagedShape(((1, 33), (20, 20)), cache_dtype="float16", dtype="float16"),
    "groups_70": PagedShape(((1, 33), (3, 20)), heads=(70, 1), sinks=True),
    "groups_5": PagedShape(((1, 33), (40, 70)), heads=(10, 2)),
    "blocks_of_keys": PagedShape(((1, 63), (1, 64), (1, 65), (1, 200), (17, 130)), window=70, soft_cap=3.0),
}


@pytest.fixture
def traced_anew():
    """Programs are traced again after a function is exchanged, and once more when it is back."""
    numba_cpu._attention.clear_cache()
    yield numba_cpu._attention.clear_cache
    numba_cpu._attention.clear_cache()


QUICK = ("decode_around_a_page", "decode_soft_cap_sinks", "decode_int8", "verify_tree_window", "decode_window", "mixed")


@pytest.mark.matrix("decode_around_a_page", "decode_window")
@pytest.mark.parametrize("name", quick(SMALL, *QUICK))
def test_suite(name, check):
    check(SMALL[name], "numba_cpu", "separate")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", quick(FOUR_BITS, "decode_int4_head_dim_96", "verify_tree_int8_int4"))
def test_suite_of_four_bits(name, check):
    check(FOUR_BITS[name], "numba_cpu", "separate")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", quick(NARROW, "decode_e4m3", "decode_e5m2"))
def test_suite_of_bits(name, check):
    check(SMALL[name], "numba_cpu", "bits")


@pytest.mark.matrix("blocks_of_keys")
@pytest.mark.parametrize("name", quick(ODD, "head_dim_20_page_4_int8", "groups_70", "blocks_of_keys"))
def test_odd_sizes(name, check):
    check(ODD[name], "numba_cpu", "separate")


def compiled(shape: PagedShape, **options):
    """The output of the kernel, compiled for the shape."""
    options = shape.options | options
    return jax.jit(lambda arrays: paged_attention(**arrays, **options, implementation="numba_cpu")[0])


@pytest.mark.parametrize("name", quick(["decode_window", "verify_tree", "mixed", "prefill_int8"], "mixed"))
def test_bits_do_not_depend_on_neighbours(name, check_alone):
    check_alone(SMALL[name], compiled(SMALL[name]))


@pytest.mark.parametrize("name", quick(["decode_64_sequences", "decode_one_sequence", "mixed_tree"], "mixed_tree"))
def test_bits_do_not_depend_on_the_number_of_parts(name, monkeypatch):
    shape, found = SMALL[name], []
    for num_parts in (1, 2, 5, cpu_calls.MAX_PARTS):
        monkeypatch.setattr(cpu_calls, "MAX_PARTS", num_parts)
        call, arguments = compiled(shape), shape.arguments("separate")
        assert call.lower(arguments).as_text().count("stablehlo.custom_call @jaxinfer_paged_attention") == 1
        found.append(np.asarray(call(arguments)))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


PROMPTS = {
    "plain": PagedShape(((150, 150),)),
    "window": PagedShape(((150, 150),), window=37),
    "soft_cap_sinks": PagedShape(((150, 150),), soft_cap=2.0, sinks=True),
}


@pytest.mark.parametrize("name", quick(PROMPTS, "window"))
def test_bits_do_not_depend_on_the_chunks_of_a_prompt(name):
    """150 tokens at once; in chunks of 100, 1, 16 and 33 in the same program; and in programs of each chunk's size."""
    shape = PROMPTS[name]
    arguments = shape.arguments("separate", is_shuffled=False)
    whole = np.asarray(compiled(shape)(arguments))
    for has_own_program in (False, True):
        pages, done, parts = arguments["pages"], 0, []
        for chunk in (100, 1, 16, 33):
            count = chunk if has_own_program else 150
            rows = {name: jnp.roll(arguments[name], -done, axis=0)[:count] for name in ("q", "k_new", "v_new")}
            lengths = {"query_lengths": jnp.array([chunk]), "kv_lengths": jnp.array([done + chunk])}
            given = shape.options | {"implementation": "numba_cpu"}
            call = jax.jit(lambda arrays, given=given: paged_attention(**arrays, **given))
            out, pages = call(arguments | rows | lengths | {"pages": pages})
            parts.append(out[:chunk])
            done += chunk
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_bits_do_not_depend_on_the_rows_of_a_unit(monkeypatch):
    shape, found = PagedShape(((1, 90), (5, 70), (40, 130)), heads=(6, 2)), []
    for rows in (4, 24, 64):
        monkeypatch.setattr(numba_cpu, "MAX_ROWS", rows)
        numba_cpu._attention.clear_cache()
        found.append(np.asarray(compiled(shape)(shape.arguments("separate"))))
    numba_cpu._attention.clear_cache()
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_a_nan_stays_in_its_sequence():
    shape = SMALL["mixed"]
    arguments, call = shape.arguments("separate"), compiled(shape)
    clean = np.asarray(call(arguments))
    start, length = int(arguments["query_starts"][4]), shape.lengths[4][0]
    rows = np.arange(shape.num_tokens)
    inside = (rows >= start) & (rows < start + length)
    for name in ("k_new", "v_new"):
        broken = np.asarray(call(arguments | {name: arguments[name].at[start].set(jnp.nan)}))
        assert np.isnan(broken[inside]).all()
        np.testing.assert_array_equal(broken[~inside], clean[~inside])


@pytest.mark.parametrize(
    "cache_dtype", quick(["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4"], "float8_e4m3fn")
)
def test_a_stored_nan_is_seen(cache_dtype):
    """By the sequence that has the key or value, and by no other."""
    shape = PagedShape(((1, 40), (1, 23)), cache_dtype=cache_dtype)
    arguments, call = shape.arguments("separate"), compiled(shape)
    page, pages = int(arguments["page_table"][0, 1]), arguments["pages"]
    for name in ("k", "v"):
        array = getattr(pages, name if pages.k_scales is None else f"{name}_scales")
        at = (page, 3) if pages.k_scales is None else (page, slice(None), 3)
        broken = pages._replace(**{name if pages.k_scales is None else f"{name}_scales": array.at[at].set(jnp.nan)})
        out = np.asarray(call(arguments | {"pages": broken}))
        assert np.isnan(out[0]).all()
        assert np.isfinite(out[1]).all()


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("dtype", quick(["float32", "int8", "bfloat16"], "int8"))
def test_values_that_are_the_first_part_of_keys(dtype):
    """Latent attention, with more query heads than a unit has rows."""
    numbers = np.random.default_rng(0)
    pages = layout.empty_pages(layout.PageShape(9, 16, 1, 40, dtype, has_values=False), "separate")
    lengths = {"query_lengths": jnp.array([50, 5], jnp.int32), "kv_lengths": jnp.array([50, 5], jnp.int32)}
    table = jnp.array([[3, 1, 7, 2], [5, -1, 10**6, -7]], jnp.int32)
    q, k = (jnp.asarray(numbers.standard_normal((55, heads, 40)), jnp.float32) for heads in (80, 1))
    out, expected = (
        paged_attention(q, k, k[..., :32], pages, table, **lengths, implementation=name)[0]
        for name in ("numba_cpu", "reference")
    )
    np.testing.assert_allclose(out, expected, atol=5e-6)


@pytest.mark.parametrize("dtype", quick(["float32", "int8", "bfloat16", "float8_e4m3fn"], "bfloat16"))
def test_compiled_in_place(dtype):
    """The cache is updated in place, and temporaries do not grow with it."""
    lengths = ((1, 4096),) * 64
    shape = PagedShape(lengths, page_size=64, heads=(32, 8), head_dim=128, cache_dtype=dtype, max_query_length=1)
    arguments = shape.abstract("separate" if dtype in ("float32", "int8") else "bits")
    pages = arguments.pop("pages")
    num_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pages))

    def call(pages, arrays):
        return paged_attention(pages=pages, **arrays, **shape.options, implementation="numba_cpu")

    memory = jax.jit(call, donate_argnums=0).lower(pages, arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes
    assert memory.temp_size_in_bytes <= num_bytes / 16


def test_choice(monkeypatch):
    spec = SMALL["decode_bf16"].spec("bits")
    choice = choose(spec, platform="cpu")
    assert choice.implementation == "numba_cpu"
    assert choice.reasons["xla"] == "numba_cpu is preferred on a cpu"
    assert choose(spec, platform="gpu").reasons["numba_cpu"] == "it needs a CPU, and this is a gpu"
    others = {
        "interleaved": SMALL["decode_bf16"].spec("interleaved"),
        "divided": replace(spec, num_parts=2),
        "head_dim=80": replace(SMALL["decode_head_dim_80"], cache_dtype="int4").spec("separate"),
        "no tokens": replace(spec, num_tokens=0),
    }
    for word, other in others.items():
        choice = choose(other, platform="cpu")
        assert choice.implementation == "xla"
        assert word in choice.reasons["numba_cpu"]
    mesh = jax.sharding.AbstractMesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert choose(spec, platform="cpu").implementation == "xla"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose(spec, platform="cpu").reasons["numba_cpu"] == "it needs Numba, which is not installed"
