"""Compaction of a sequence's pages, in every layout, against NumPy on stored bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import empty_pages, unpack
from pallas_kernels.paged_attention.compaction import compact
from pallas_kernels.paged_attention.layout import PageShape, append
from tests.pallas_kernels.quick import quick

TABLE, TARGETS = [7, 2, 5, 9, 4], [3, 8, 1]
CASES = [
    *((dtype, "separate") for dtype in ("float32", "bfloat16", "int8", "int4", "int8_int4")),
    *((dtype, "bits") for dtype in ("bfloat16", "float8_e4m3fn")),
    *((dtype, "interleaved") for dtype in ("float32", "bfloat16", "float8_e5m2", "int8", "int4")),
]


def filled(shape: PageShape, layout: str):
    """Pages in which every token was appended."""
    count = shape.num_pages * shape.page_size
    k, v = (
        jax.random.normal(jax.random.key(seed), (count, shape.num_kv_heads, shape.head_dim), jnp.float32)
        for seed in (1, 2)
    )
    page, slot = jnp.divmod(jnp.arange(count), shape.page_size)
    return append(empty_pages(shape, layout), k, v, page.astype(jnp.int32), slot.astype(jnp.int32))


def bits(pages, shape: PageShape):
    """Logical arrays as unsigned integers."""
    found = unpack(pages, shape.num_kv_heads, shape.head_dim)
    return [None if a is None else np.asarray(a).view(f"u{a.dtype.itemsize}") for a in found]


@pytest.mark.matrix
@pytest.mark.parametrize(("dtype", "layout"), CASES)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), quick([(2, 64), (3, 128)], (3, 128)))
def test_bits_are_gathered_by_head(dtype, layout, num_kv_heads, head_dim):
    shape = PageShape(10, 4, num_kv_heads, head_dim, dtype)
    pages, numbers = filled(shape, layout), np.random.default_rng(num_kv_heads)
    positions = np.stack([np.sort(numbers.permutation(20)[:11]) for _ in range(num_kv_heads)]).astype(np.int32)
    count = 10  # the last is padding
    before = bits(pages, shape)
    found = jax.jit(compact, static_argnums=1)(
        pages, shape, jnp.array(TABLE), jnp.array(positions), jnp.int32(count), jnp.array(TARGETS)
    )
    for old, new in zip(before, bits(found, shape), strict=True):
        if old is None:
            assert new is None
            continue
        wanted, is_scales = old.copy(), old.ndim == 3
        for head in range(num_kv_heads):
            for number in range(count):
                source, target = TABLE[positions[head, number] // 4], TARGETS[number // 4]
                at, to = positions[head, number] % 4, number % 4
                if is_scales:
                    wanted[target, head, to] = old[source, head, at]
                else:
                    wanted[target, to, head] = old[source, at, head]
        np.testing.assert_array_equal(new, wanted)
        assert (new != old).any()
    # Padding of a layout stays zero, and nothing else is touched.
    others = [page for page in range(10) if page not in TARGETS]
    for old, new in zip(jax.tree.leaves(pages), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(np.asarray(new)[others], np.asarray(old)[others])


def test_targets_beyond_the_last_page_are_dropped():
    shape = PageShape(10, 4, 2, 8, "float32")
    pages = filled(shape, "separate")
    positions = jnp.tile(jnp.arange(12, dtype=jnp.int32), (2, 1))
    found = compact(pages, shape, jnp.array(TABLE), positions, jnp.int32(12), jnp.array([3, 10, 1]))
    np.testing.assert_array_equal(found.k[8], pages.k[8])
    np.testing.assert_array_equal(found.k[3], pages.k[7])
    np.testing.assert_array_equal(found.k[1], pages.k[5])
