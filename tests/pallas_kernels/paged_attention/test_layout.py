"""Page layouts: conversions that lose nothing, what is stored, and clear errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram
from pallas_kernels.paged_attention import (
    InterleavedPages,
    PageShape,
    SeparatePages,
    empty_pages,
    move_tokens,
    pack,
    unpack,
)
from pallas_kernels.paged_attention.layout import (
    DTYPES,
    append,
    from_stored,
    gather,
    key_dtype,
    page_shape,
    to_stored,
    value_dtype,
)
from tests.pallas_kernels.quick import quick


def random_pages(shape: PageShape, seed: int = 0) -> SeparatePages:
    rng = np.random.default_rng(seed)
    size = (2, shape.num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
    dtypes = key_dtype(shape.dtype), value_dtype(shape.dtype)
    vectors = rng.standard_normal(size, np.float32)
    stored = [to_stored(jnp.asarray(x, jnp.float32), one) for x, one in zip(vectors, dtypes, strict=True)]
    values = [values for values, _ in stored]
    return (
        SeparatePages(*values, *(s.swapaxes(1, 2) for _, s in stored)) if shape.has_scales else SeparatePages(*values)
    )


def assert_equal(found, wanted):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32)), found, wanted
    )


@settings(deadline=None, max_examples=3)
@given(
    heads=st.integers(1, 9),
    head_dim=st.sampled_from([8, 64, 80, 96, 128, 256]),
    page_size=st.sampled_from([16, 32, 128]),
    dtype=st.sampled_from(DTYPES),
)
def test_unpack_undoes_pack(heads, head_dim, page_size, dtype):
    shape = PageShape(3, page_size, heads, head_dim, dtype)
    logical = random_pages(shape)
    if dtype == "int8_int4":
        assert page_shape(logical, heads, head_dim) == shape
        assert_equal(unpack(logical, heads, head_dim), logical)
        with pytest.raises(ValueError, match=f"layout='interleaved' has no form of {dtype}"):
            shape.abstract("interleaved")
        return
    packed = pack(logical, "interleaved")
    assert page_shape(packed, heads, head_dim) == shape
    assert_equal(unpack(packed, heads, head_dim), logical)
    ids = jnp.array([[2, 0]])
    taken = jax.tree.map(lambda a: a[ids], logical)
    assert_equal(gather(packed, ids, shape), taken)
    if shape.is_narrow_float:
        bits = pack(logical, "bits")
        assert page_shape(bits, heads, head_dim) == shape
        assert {leaf.dtype.kind for leaf in jax.tree.leaves(bits)} == {"u"}
        assert_equal(unpack(bits, heads, head_dim), logical)
        assert_equal(gather(bits, ids, shape), taken)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    quick([(dtype, size) for dtype in DTYPES for size in (64, 128)], ("int8", 64)),
)
def test_append_is_the_same_in_all_layouts_and_drops_padding(dtype, head_dim):
    shape = PageShape(4, 16, 3, head_dim, dtype)
    logical = random_pages(shape)
    k, v = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 3, head_dim), np.float32))
    page, slot = jnp.array([2, 4, 0]), jnp.array([5, 0, 15])
    written = append(logical, k, v, page, slot)
    others = () if dtype == "int8_int4" else ("interleaved", "bits") if shape.is_narrow_float else ("interleaved",)
    for layout in others:
        for by_rows in (False, True):
            found = append(pack(logical, layout), k, v, page, slot, by_rows=by_rows)
            assert_equal(unpack(found, 3, head_dim), written)
    rounded = from_stored(*to_stored(k, key_dtype(dtype)))
    scales = None if written.k_scales is None else written.k_scales[2, :, 5]
    np.testing.assert_array_equal(from_stored(written.k[2, 5], scales), rounded[0])
    untouched = np.ones((4, 16), bool)
    untouched[[2, 0], [5, 15]] = False
    assert_equal(written.k[untouched], logical.k[untouched])
    assert_equal(written.v[untouched], logical.v[untouched])


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", quick(["bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"], "float8_e4m3fn", "int8"))
def test_rounding_of_stored_values(dtype):
    """Errors within half a step of the format; nothing finite becomes NaN; a NaN is not lost."""
    x = jnp.asarray(np.random.default_rng(2).standard_normal((50, 64), np.float32) * 3)
    back = from_stored(*to_stored(x, dtype))
    step = {"bfloat16": 2**-8, "float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}
    bound = jnp.abs(x).max(-1, keepdims=True) / 254 if dtype == "int8" else jnp.abs(x) * step[dtype] + 2**-9
    assert (jnp.abs(back - x) <= bound * 1.0001).all()
    assert jnp.isfinite(from_stored(*to_stored(jnp.full((1, 8), 1e30), dtype))).all()
    assert jnp.isnan(from_stored(*to_stored(x.at[3, 5].set(jnp.nan), dtype))[3, 5])
    assert (from_stored(*to_stored(jnp.zeros((2, 8)), dtype)) == 0).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_has_no_quiet_infinity(dtype):
    """The largest finite number is stored where a number is too large, not where there is none."""
    back = from_stored(*to_stored(jnp.array([[jnp.inf, -jnp.inf, jnp.nan, 1e30, -1e30, 1.0]]), dtype))[0]
    assert jnp.isnan(back[:3]).all()
    largest = float(jnp.finfo(dtype).max)
    np.testing.assert_array_equal(back[3:], [largest, -largest, 1.0])


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_int8_has_no_quiet_infinity(value):
    x = jnp.ones((2, 8)).at[0, 3].set(value)
    back = from_stored(*to_stored(x, "int8"))
    assert jnp.isnan(back[0]).all()
    np.testing.assert_allclose(back[1], 1.0, rtol=1e-6)


def test_errors_name_the_shapes():
    with pytest.raises(ValueError, match="int3"):
        PageShape(4, 16, 2, 64, "int3")
    with pytest.raises(ValueError, match=r"'int4': head_dim is 81; two numbers share a byte"):
        PageShape(4, 16, 2, 81, "int4")
    with pytest.raises(ValueError, match=r"head_dim is 136 = 17 x 8; .* an odd number up to 15 times a power of two"):
        PageShape(4, 16, 2, 136, "int8_int4")
    with pytest.raises(ValueError, match="'int4' stores values apart from keys: no latent attention"):
        PageShape(4, 16, 2, 64, "int4", has_values=False)
    with pytest.raises(ValueError, match="page_size is 0"):
        PageShape(4, 0, 2, 64, "int8")
    with pytest.raises(ValueError, match=r"pages for 3 heads of 64"):
        page_shape(empty_pages(PageShape(4, 16, 2, 64, "float32"), "separate"), 3, 64)
    with pytest.raises(ValueError, match="layout='bits' is for floats of 8 or 16 bits, not int8"):
        empty_pages(PageShape(4, 16, 2, 64, "int8"), "bits")
    with pytest.raises(ValueError, match="sideways"):
        empty_pages(PageShape(4, 16, 2, 64, "float32"), "sideways")


def test_a_token_is_whole_words():
    """The rows of a token fill 32-bit words, and head_dim 64 wastes no lane."""
    for dtype in set(DTYPES) - {"int8_int4"}:
        for heads in (1, 3, 8):
            pages = PageShape(2, 16, heads, 64, dtype).abstract("interleaved")
            assert isinstance(pages, InterleavedPages)
            assert pages.kv.shape[3] * pages.kv.dtype.itemsize == 4
            assert pages.kv.shape[4] == 128
    assert PageShape(2, 16, 8, 64, "bfloat16").abstract("interleaved").kv.size == 2 * 16 * 8 * 128


# Moving tokens

TABLE = np.array([[3, 1, 5], [7, 2, 0], [4, 6, 8]], np.int32)
NUM_PAGES = 9
jitted_move = jax.jit(move_tokens, donate_argnums=0)


def moved(logical: SeparatePages, sources, destinations) -> SeparatePages:
    """By the definition, a token at a time, in float32 (which holds every stored value)."""
    before = SeparatePages(*(None if a is None else np.asarray(a, np.float32) for a in logical))
    after = SeparatePages(*(None if a is None else a.copy() for a in before))
    page_size = before.k.shape[1]
    length = TABLE.shape[1] * page_size
    for sequence, (row, to_row) in enumerate(zip(sources, destinations, strict=True)):
        for source, destination in zip(row, to_row, strict=True):
            if 0 <= source < length and 0 <= destination < length:
                page, slot = TABLE[sequence, source // page_size], source % page_size
                to_page, to_slot = TABLE[sequence, destination // page_size], destination % page_size
                for old, new in zip(before, after, strict=True):
                    if old is not None and old.ndim == 4:
                        new[to_page, to_slot] = old[page, slot]
                    elif old is not None:
                        new[to_page, :, to_slot] = old[page, :, slot]
    return after


MOVED = [
    (dtype, heads, head_dim, page_size)
    for dtype in ("float32", "bfloat16", "int8", "float8_e4m3fn")
    for heads, head_dim in ((3, 128), (2, 16))
    for page_size in (4, 16)
]


@pytest.mark.matrix
@pytest.mark.parametrize(("dtype", "heads", "head_dim", "page_size"), quick(MOVED, ("int8", 3, 128, 4)))
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_moved_tokens_are_those_of_the_definition(dtype, heads, head_dim, page_size, data):
    logical = random_pages(PageShape(NUM_PAGES, page_size, heads, head_dim, dtype))
    length = TABLE.shape[1] * page_size
    # Any position, also one that is another entry's destination, and some outside of the table.
    outside = st.sampled_from([-1, -(2**31), length, length + 5, 2**31 - 1])
    anywhere = st.integers(0, length - 1) | outside
    sources = np.array([data.draw(st.lists(anywhere, min_size=5, max_size=5)) for _ in TABLE], np.int32)
    one_each = st.lists(st.integers(0, length - 1), min_size=5, max_size=5, unique=True)
    destinations = np.array([data.draw(one_each) for _ in TABLE], np.int32)
    is_dropped = np.array(data.draw(st.lists(st.booleans(), min_size=15, max_size=15))).reshape(3, 5)
    destinations = np.where(is_dropped, data.draw(outside), destinations).astype(np.int32)
    wanted = moved(logical, sources, destinations)
    for layout in ("separate", "interleaved", *(("bits",) if dtype == "float8_e4m3fn" else ())):
        pages = jax.tree.map(jnp.copy, pack(logical, layout))
        assert_equal(unpack(jitted_move(pages, TABLE, sources, destinations), heads, head_dim), wanted)


def test_an_accepted_path_is_made_compact():
    """Nodes 2, 4, 5 of a tree whose root is at position 6: node 4 goes where node 2 was, which went elsewhere."""
    logical = random_pages(PageShape(NUM_PAGES, 4, 1, 8, "float32"))
    sources, destinations = np.array([[6, 8, 10, 11]] * 3, np.int32), np.array([[6, 7, 8, 9]] * 3, np.int32)
    destinations[1:] = 12
    found = jitted_move(jax.tree.map(jnp.copy, logical), TABLE, sources, destinations)
    for wanted, position in ((8, 7), (10, 8), (11, 9)):
        np.testing.assert_array_equal(
            found.k[TABLE[0, position // 4], position % 4], logical.k[TABLE[0, wanted // 4], wanted % 4]
        )
    is_same = (np.asarray(found.k) == np.asarray(logical.k)).all((2, 3))
    assert sorted(zip(*np.nonzero(~is_same), strict=True)) == [(1, 3), (5, 0), (5, 1)]


def test_the_table_of_dropped_entries_may_hold_anything():
    logical = random_pages(PageShape(NUM_PAGES, 4, 1, 8, "int8"))
    wild = np.array([[-1, 2**31 - 1, NUM_PAGES]], np.int32)
    positions = np.array([[0, 5, 11, -4]], np.int32)
    assert_equal(jitted_move(jax.tree.map(jnp.copy, logical), wild, positions, positions), logical)


@pytest.mark.parametrize(
    ("table", "sources", "destinations", "message"),
    [
        ((3, 3), (3, 2), (3, 4), r"destinations is int32 \(3, 4\), sources \(3, 2\)"),
        ((3, 3), (2, 2), (2, 2), r"int32 \[3, N\]; sources is int32 \(2, 2\)"),
        ((3,), (3, 2), (3, 2), r"page_table is int32 \[S, P\]; got int32 \(3,\)"),
    ],
)
def test_positions_that_do_not_fit_raise(table, sources, destinations, message):
    pages = empty_pages(PageShape(NUM_PAGES, 4, 1, 8, "float32"), "separate")
    with pytest.raises(ValueError, match=message):
        move_tokens(pages, *(jnp.zeros(shape, jnp.int32) for shape in (table, sources, destinations)))
    with pytest.raises(ValueError, match="float32"):
        move_tokens(pages, jnp.zeros((3, 3), jnp.int32), jnp.zeros((3, 2)), jnp.zeros((3, 2)))


LOOPS = [
    (chip, dtype)
    for chip in ("v5e", "v6e", "tpu7x", "h100")
    for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int8")
]


@pytest.mark.matrix
@pytest.mark.parametrize(("chip", "dtype"), quick(LOOPS, ("v6e", "bfloat16"), ("h100", "int8")))
def test_tokens_are_moved_in_place_within_a_loop(chip, dtype):
    """Two layers of Llama-3-8B's cache: no temporary beyond the tokens, and no more moves than they."""
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    is_tpu = chip != "h100"
    pages = [PageShape(4097, 64, 8, 128, dtype).abstract("interleaved" if is_tpu else "separate")] * 2
    num_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pages))

    def loop(layers, table, sources, destinations, num_steps):
        def body(i, layers):
            return [move_tokens(pages, table, sources + i, destinations) for pages in layers]

        return jax.lax.fori_loop(0, num_steps, body, layers)

    table, positions = jax.ShapeDtypeStruct((16, 32), jnp.int32), jax.ShapeDtypeStruct((16, 5), jnp.int32)
    num_steps = jax.ShapeDtypeStruct((), jnp.int32)
    found = ahead_of_time.compile_for(chip, loop, pages, table, positions, positions, num_steps, donate_argnums=(0,))
    tokens = num_bytes * 80 // (4097 * 64)
    assert found.aliased_bytes >= num_bytes
    assert found.temporary_bytes < 8 * tokens
    if is_tpu:
        assert sum(move.num_bytes for move in HloProgram(found.program.as_text()).moves()) < 8 * tokens
