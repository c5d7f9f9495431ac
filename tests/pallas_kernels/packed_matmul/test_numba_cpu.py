"""Products with packed weights, against float64 over the dequantized weight, and their bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.packed_matmul import PackedArrays, packed_matmul
from tests.pallas_kernels.packed_matmul.weights import INTEGERS, NAMES, K, N, make
from tests.pallas_kernels.quick import quick

pytest.importorskip("numba", reason="kernels for CPUs need Numba")


@partial(jax.jit, static_argnums=0)
def product(form, arrays: PackedArrays, x: jax.Array) -> jax.Array:
    return packed_matmul(x, [(form, arrays)])[0]


def rows_of(count: int, inputs: int = K, seed: int = 3) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (count, inputs))


def rounded(x: np.ndarray) -> np.ndarray:
    """Rows rounded to 8 bits in groups of 32 inputs, as ggml rounds them, float64."""
    padded = np.pad(np.asarray(x, np.float32), ((0, 0), (0, -x.shape[1] % 32)))
    groups = padded.reshape(len(x), -1, 32)
    factor = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    inverse = np.float32(1) / np.where(factor > 0, factor, np.float32(1))
    return (np.rint(groups * inverse) * factor.astype(np.float64)).reshape(len(x), -1)[:, : x.shape[1]]


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_products_equal_float64(name):
    form, arrays, weight = make(name)
    for count in (1, 3, 7, 75):
        x = rows_of(count)
        expected = np.asarray(x, np.float64) @ weight
        np.testing.assert_allclose(product(form, arrays, x), expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", INTEGERS)
def test_products_of_rounded_rows_equal_float64(name):
    form, arrays, weight = make(name, activations="int8")
    assert form.activations == "int8"
    for count in (1, 7, 75):
        x = rows_of(count)
        expected = rounded(np.asarray(x)) @ weight
        np.testing.assert_allclose(product(form, arrays, x), expected, atol=2e-6 * np.abs(expected).max())


BITS = [(name, activations) for name in NAMES for activations in (None, "int8") if not activations or name in INTEGERS]
QUICK_BITS = (("q4_1", None), ("q4_1", "int8"), ("int8-g32", None), ("int8-g32", "int8"), ("bfloat16", None))


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "activations"), quick(BITS, *QUICK_BITS))
def test_a_row_has_the_same_bits_from_1_to_2048_rows(name, activations):
    """With few or alone it is multiplied while codes are read, with more in tiles, and with many in parts of rows."""
    form, arrays, _ = make(name, activations=activations)
    x = rows_of(2048)
    together = np.asarray(product(form, arrays, x))
    for row in (0, 1, 95, 96, 1030, 2047):
        np.testing.assert_array_equal(product(form, arrays, x[row : row + 1])[0], together[row])
    for count in (2, 3, 5, 8, 15, 47, 48, 200):
        np.testing.assert_array_equal(product(form, arrays, x[:count]), together[:count])


@pytest.mark.slow
def test_an_output_does_not_depend_on_the_others():
    """To the bit: nor, therefore, on the thread that computes it."""
    form, arrays, _ = make("q4_1", 512, 640)
    part = PackedArrays(*(array[3:4] if array.ndim > 1 else array for array in arrays))
    own = make("q4_1", 512, 64)[0]
    for count in (1, 3, 60):
        x = rows_of(count, 512)
        np.testing.assert_array_equal(product(form, arrays, x)[:, 192:256], product(own, part, x))


@pytest.mark.slow
def test_weights_of_several_kinds_in_one_call():
    weights = [make(name, K, size) for name, size in (("q4_1", 100), ("q6_k", 64), ("bfloat16", 30), ("int4", 200))]
    call = jax.jit(lambda x, arrays: packed_matmul(x, list(zip([form for form, *_ in weights], arrays, strict=True))))
    for count in (1, 5, 64):
        x = rows_of(count)
        found = call(x, [arrays for _, arrays, _ in weights])
        for one, (form, arrays, _) in zip(found, weights, strict=True):
            np.testing.assert_array_equal(one, product(form, arrays, x))


@pytest.mark.parametrize(("name", "activations"), [("q4_k", None), ("int8-g32", "int8"), ("float32", None)])
def test_rows_sorted_by_expert(name, activations):
    """To the bit what each expert's weight gives; experts without rows, and rows without an expert."""
    counts = (3, 0, 1, 60, 2)
    weights = [make(name, K, 64, activations=activations) for _ in counts]
    arrays = [
        PackedArrays(*(array + index if array.dtype != jnp.uint16 else array for array in own))
        for index, (_, own, _) in enumerate(weights)
    ]
    form = weights[0][0]
    stack = PackedArrays(*(jnp.stack(one) if one[0].ndim > 1 else one[0] for one in zip(*arrays, strict=True)))
    x = rows_of(sum(counts) + 4)
    call = jax.jit(lambda x, stack, counts: packed_matmul(x, [(form, stack)], counts)[0])
    found, row = call(x, stack, jnp.array(counts, jnp.int32)), 0
    for own, count in zip(arrays, counts, strict=True):
        if count:
            np.testing.assert_array_equal(found[row : row + count], product(form, own, x[row : row + count]))
        row += count


@pytest.mark.parametrize("activations", [None, "int8"])
def test_not_numbers_are_seen(activations):
    form, arrays, _ = make("q4_1", activations=activations)
    for count in (2, 60):
        for bad in (jnp.nan, jnp.inf):
            found = np.asarray(product(form, arrays, rows_of(count).at[1, 5].set(bad)))
            assert np.isfinite(np.delete(found, 1, 0)).all()
            assert not np.isfinite(found[1]).any()


def test_zeros_are_rounded_to_zeros():
    form, arrays, _ = make("int8-g32", activations="int8")
    np.testing.assert_array_equal(product(form, arrays, jnp.zeros((2, K))), np.zeros((2, N)))


def test_arrays_divided_over_devices_are_left_to_xla():
    form, arrays, _ = make("q4_1")
    mesh = jax.sharding.AbstractMesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(partial(packed_matmul, weights=[(form, arrays)])).trace(rows_of(1)).jaxpr
    assert "ffi_call" not in str(text)
