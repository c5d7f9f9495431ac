"""Products that Numba compiled, against float64 over the dequantized weight, and their bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quantization import QuantizedArray, Scheme, quantize
from jaxinfer.quantization.matmul import matmul, transposed
from pallas_kernels.quantized_matmul import choose, form, make_spec, quantized_matmul
from tests.pallas_kernels.quick import quick

pytest.importorskip("numba", reason="kernels for CPUs need Numba")

K, N = 320, 96
FORMATS = ["int8", "int8-g32-asym", "int4", "int4-asym", "int4-g32", "int4-g32-asym"]


def weight(name: str, inputs: int = K, outputs: int = N) -> QuantizedArray:
    if name.startswith("affine"):
        return affine(int(name[-1]), inputs, outputs)
    return quantize(jax.random.normal(jax.random.key(1), (inputs, outputs)) * 0.02, name)


def affine(bits: int, inputs: int, outputs: int) -> QuantizedArray:
    codes, scales, minima = jax.random.split(jax.random.key(bits), 3)
    values = jax.random.randint(codes, (inputs, outputs), 0, 2**bits)
    return QuantizedArray(
        (values - 8).astype(jnp.int4) if bits == 4 else values.astype(jnp.int8),
        jax.random.uniform(scales, (inputs // 32, outputs)) * 0.01,
        scheme=Scheme("affine", bits, (32, 1)),
        minima=-jax.random.uniform(minima, (inputs // 32, outputs)) * 0.1,
    )


@partial(jax.jit, static_argnames="implementation")
def product(x, w: QuantizedArray, implementation: str = "numba_cpu"):
    arrays = w.values, w.scales, w.zeros, w.codebook, w.minima
    return quantized_matmul(x, *arrays, block=w.scheme.block, out_dtype=jnp.float32, implementation=implementation)


@pytest.mark.matrix("int4-g32")
@pytest.mark.parametrize("name", [*FORMATS, "affine4", "affine5"])
def test_products_equal_float64(name):
    w = weight(name)
    for rows in (1, 5, 75):
        x = jax.random.normal(jax.random.key(rows), (rows, K))
        expected = np.asarray(x, np.float64) @ np.asarray(w.dequantize(), np.float64)
        np.testing.assert_allclose(product(x, w), expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("rows", "outputs"), quick([(1, 32), (128, 4096), (11, 1024), (3, 65_536)], (11, 1024)))
def test_panels_and_parts(rows, outputs):
    """Of one panel of outputs, and of several panels in several calls."""
    w = weight("int8", 64, outputs)
    x = jax.random.normal(jax.random.key(2), (rows, 64))
    np.testing.assert_allclose(product(x, w), x @ w.dequantize(), atol=3e-6)


@pytest.mark.parametrize("name", ["int8", "int8-g32-asym", "int4-g32"])
def test_a_row_does_not_depend_on_the_others(name):
    """To the bit: a row of 7 and of 93, which are computed in another way, and by itself."""
    w = weight(name)
    x = jax.random.normal(jax.random.key(3), (93, K))
    together = product(x, w)
    np.testing.assert_array_equal(product(x[:7], w), together[:7])
    for row in (0, 8, 17, 92):
        np.testing.assert_array_equal(product(x[row : row + 1], w)[0], together[row])


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["int8", "int4-g32-asym"])
def test_an_output_does_not_depend_on_the_others(name):
    """To the bit: nor, therefore, on the thread that computes it."""
    w = weight(name, 1024, 256)
    for rows in (3, 25):
        x = jax.random.normal(jax.random.key(4), (rows, 1024))
        part = jax.tree.map(lambda array: array[:, 96:160], w)
        np.testing.assert_array_equal(product(x, w)[:, 96:160], product(x, part))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_tied_embedding_is_read_as_it_is_stored(name):
    """`is_transposed`: logits of an embedding [V, D], 50 outputs that are no whole block."""
    table = transposed(quantize(jax.random.normal(jax.random.key(5), (K, 50)), name))
    x = jax.random.normal(jax.random.key(6), (3, K))
    found = jax.jit(lambda x, table: matmul(x, table, jnp.float32, is_transposed=True))
    np.testing.assert_allclose(found(x, table), x @ table.dequantize().T, atol=3e-5)
    text = found.lower(x, table).as_text()
    assert "@jaxinfer_matmul_transposed_" in text
    assert "stablehlo.transpose" not in text


@pytest.mark.parametrize("name", ["int8-g32-asym", "int4"])
def test_outputs_that_are_no_whole_block(name):
    """Also those are the same to the bit as in a block."""
    w = weight(name, K, 128)
    part = jax.tree.map(lambda array: array[:, 32:114], w)
    for rows in (2, 80):
        x = jax.random.normal(jax.random.key(6), (rows, K))
        np.testing.assert_array_equal(product(x, part), product(x, w)[:, 32:114])


def test_not_numbers_are_seen():
    w = weight("int8")
    x = jnp.ones((2, K)).at[1, 5].set(jnp.nan)
    found = product(x, w)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()


def test_integers_are_chosen():
    def spec(rows: int, name: str, **options):
        w = jax.eval_shape(lambda: weight(name))
        x = jax.ShapeDtypeStruct((rows, K), jnp.float32)
        return make_spec(x, w.values, w.zeros, w.codebook, block=w.scheme.block, activations=None, **options)

    assert choose(spec(1, "int8"), platform="cpu").implementation == "numba_cpu"
    assert "converted in registers" in form(spec(1, "int4-g32"), "cpu")
    assert choose(spec(1, "int8"), platform="tpu").reasons["numba_cpu"] == "it needs a CPU, and this is a tpu"
    assert choose(spec(0, "int8"), platform="cpu").implementation == "xla"
    assert choose(spec(1, "nf4"), platform="cpu").reasons["numba_cpu"] == "it reads int8 and int4, not codebooks"


def test_weights_divided_over_devices_are_left_to_xla():
    w = jax.eval_shape(lambda: weight("int8"))
    x = jax.ShapeDtypeStruct((1, K), jnp.float32)
    spec = make_spec(x, w.values, None, None, block=w.scheme.block, activations=None)
    mesh = jax.sharding.AbstractMesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert choose(spec, platform="cpu").implementation == "xla"
