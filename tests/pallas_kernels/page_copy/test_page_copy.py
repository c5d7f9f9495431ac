"""Page copies against NumPy, in every implementation, and what the TPU compiler makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ahead_of_time
from pallas_kernels.page_copy import copy_pages
from pallas_kernels.paged_attention import PageShape, empty_pages
from tests.pallas_kernels.quick import quick

NUM_PAGES = 12


def cache():
    rng = np.random.default_rng(0)
    return {
        "k": rng.standard_normal((NUM_PAGES, 8, 2, 128), np.float32),
        "v": rng.integers(-128, 128, (NUM_PAGES, 32, 1, 4, 128)).astype(np.int8),
    }


def expected(arrays, source, destination):
    arrays = {name: array.copy() for name, array in arrays.items()}
    for a, b in zip(source, destination, strict=True):
        if b != NUM_PAGES:
            for array in arrays.values():
                array[b] = array[a]
    return arrays


def check(implementation):
    source, destination = [3, 3, 7, 0, 11], [1, 2, 8, NUM_PAGES, 5]
    garbage = [-1, 10**6]

    def run(pages, source, destination, count):
        return copy_pages(pages, source, destination, count, implementation=implementation)

    run = jax.jit(run, donate_argnums=0)
    for count in (5, 2, 0):
        found = run(
            jax.tree.map(jnp.asarray, cache()),
            jnp.array(source[:count] + garbage + [0] * (5 - count), jnp.int32),
            jnp.array(destination[:count] + garbage + [4] * (5 - count), jnp.int32),
            jnp.int32(count),
        )
        jax.tree.map(np.testing.assert_array_equal, found, expected(cache(), source[:count], destination[:count]))


def test_xla():
    check("xla")


def test_pallas_tpu(tpu_interpreter):
    check("pallas_tpu")


def test_without_count():
    ids = jnp.array([2, 4], jnp.int32), jnp.array([3, 5], jnp.int32)
    found = copy_pages(jax.tree.map(jnp.asarray, cache()), *ids)
    jax.tree.map(np.testing.assert_array_equal, found, expected(cache(), [2, 4], [3, 5]))


def test_bad_input():
    ids = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"share their first axis.*\(3,\).*\(4,\)"):
        copy_pages((jnp.zeros(3), jnp.zeros(4)), ids, ids)
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        copy_pages(jnp.zeros((4, 1)), ids, jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="float32"):
        copy_pages(jnp.zeros((4, 1)), ids, jnp.zeros(2))
    with pytest.raises(ValueError, match="nonsense"):
        copy_pages(jnp.zeros((4, 1)), ids, ids, implementation="nonsense")
    with pytest.raises(NotImplementedError, match="needs a TPU"):
        copy_pages(jnp.zeros((4, 1)), ids, ids, implementation="pallas_tpu")


CASES = [(chip, dtype) for chip in ("v5e", "v6e", "tpu7x", "h100") for dtype in ("bfloat16", "float8_e4m3fn", "int8")]


@pytest.mark.matrix
@pytest.mark.parametrize(("chip", "dtype"), quick(CASES, ("v6e", "int8"), ("h100", "int8")))
def test_compiled_in_place(chip, dtype):
    """Four layers of Llama-3-8B's cache: nothing but the copied pages moves, and on a TPU there is no temporary."""
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    is_tpu = chip != "h100"
    shape = PageShape(1024, 64, 8, 128, dtype)
    pages = [jax.eval_shape(lambda: empty_pages(shape, "interleaved" if is_tpu else "separate"))] * 4
    num_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pages))
    ids = jax.ShapeDtypeStruct((16,), jnp.int32)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = ahead_of_time.compile_for(chip, copy_pages, pages, ids, ids, count, donate_argnums=(0,))
    assert compiled.aliased_bytes >= num_bytes
    # The TPU kernel needs little more than the sorted ids; the copied pages are 16 of 1024.
    copied_bytes = num_bytes * 16 // 1024
    assert compiled.temporary_bytes <= (copied_bytes / 16 if is_tpu else 2 * copied_bytes)
