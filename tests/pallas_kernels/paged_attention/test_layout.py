"""Page layouts: conversions that lose nothing, what is stored, and clear errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import InterleavedPages, PageShape, SeparatePages, empty_pages, pack, unpack
from pallas_kernels.paged_attention.layout import DTYPES, append, from_stored, gather, page_shape, to_stored


def random_pages(shape: PageShape, seed: int = 0) -> SeparatePages:
    rng = np.random.default_rng(seed)
    size = (2, shape.num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
    stored = [to_stored(jnp.asarray(x, jnp.float32), shape.dtype) for x in rng.standard_normal(size, np.float32)]
    values = [values for values, _ in stored]
    return (
        SeparatePages(*values, *(s.swapaxes(1, 2) for _, s in stored)) if shape.has_scales else SeparatePages(*values)
    )


def assert_equal(found, wanted):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32)), found, wanted
    )


@settings(deadline=None, max_examples=8)
@given(
    heads=st.integers(1, 9),
    head_dim=st.sampled_from([8, 64, 80, 96, 128, 256]),
    page_size=st.sampled_from([16, 32, 128]),
    dtype=st.sampled_from(DTYPES),
)
def test_unpack_undoes_pack(heads, head_dim, page_size, dtype):
    shape = PageShape(3, page_size, heads, head_dim, dtype)
    logical = random_pages(shape)
    packed = pack(logical, "interleaved")
    assert page_shape(packed, heads, head_dim) == shape
    assert_equal(unpack(packed, heads, head_dim), logical)
    ids = jnp.array([[2, 0]])
    assert_equal(gather(packed, ids, shape), jax.tree.map(lambda a: a[ids], logical))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_append_is_the_same_in_both_layouts_and_drops_padding(dtype, head_dim):
    shape = PageShape(4, 16, 3, head_dim, dtype)
    logical = random_pages(shape)
    k, v = jnp.asarray(np.random.default_rng(1).standard_normal((2, 3, 3, head_dim), np.float32))
    page, slot = jnp.array([2, 4, 0]), jnp.array([5, 0, 15])
    written = append(logical, k, v, page, slot)
    assert_equal(unpack(append(pack(logical, "interleaved"), k, v, page, slot), 3, head_dim), written)
    rounded = from_stored(*to_stored(k, dtype))
    scales = None if written.k_scales is None else written.k_scales[2, :, 5]
    np.testing.assert_array_equal(from_stored(written.k[2, 5], scales), rounded[0])
    untouched = np.ones((4, 16), bool)
    untouched[[2, 0], [5, 15]] = False
    assert_equal(written.k[untouched], logical.k[untouched])
    assert_equal(written.v[untouched], logical.v[untouched])


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"])
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


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_int8_has_no_quiet_infinity(value):
    x = jnp.ones((2, 8)).at[0, 3].set(value)
    back = from_stored(*to_stored(x, "int8"))
    assert jnp.isnan(back[0]).all()
    np.testing.assert_allclose(back[1], 1.0, rtol=1e-6)


def test_errors_name_the_shapes():
    with pytest.raises(ValueError, match="int4"):
        PageShape(4, 16, 2, 64, "int4")
    with pytest.raises(ValueError, match="page_size is 0"):
        PageShape(4, 0, 2, 64, "int8")
    with pytest.raises(ValueError, match=r"pages for 3 heads of 64"):
        page_shape(empty_pages(PageShape(4, 16, 2, 64, "float32"), "separate"), 3, 64)
    with pytest.raises(ValueError, match="sideways"):
        empty_pages(PageShape(4, 16, 2, 64, "float32"), "sideways")


def test_a_token_is_whole_words():
    """The rows of a token fill 32-bit words, and head_dim 64 wastes no lane."""
    for dtype in DTYPES:
        for heads in (1, 3, 8):
            pages = PageShape(2, 16, heads, 64, dtype).abstract("interleaved")
            assert isinstance(pages, InterleavedPages)
            assert pages.kv.shape[3] * pages.kv.dtype.itemsize == 4
            assert pages.kv.shape[4] == 128
    assert PageShape(2, 16, 8, 64, "bfloat16").abstract("interleaved").kv.size == 2 * 16 * 8 * 128
