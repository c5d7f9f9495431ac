"""What the models ask of a leaf: products, rows of an embedding, the embedding transposed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quantization import QuantizedArray, Scheme, check, quantize
from jaxinfer.quantization.matmul import matmul, rows, transposed

X = jax.random.normal(jax.random.key(0), (2, 5, 128))
W = jax.random.normal(jax.random.key(1), (128, 24)) * 0.02


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["int8", "int4-g32-asym", "nf4-dq", "fp8-block"])
def test_a_product_is_that_with_the_dequantized_weight(name):
    w = quantize(W, name)
    np.testing.assert_allclose(matmul(X, w), X @ w.dequantize(), atol=2e-6)
    np.testing.assert_allclose(matmul(X[0, 0], w), X[0, 0] @ w.dequantize(), atol=2e-6)
    assert matmul(X.astype(jnp.bfloat16), w).dtype == jnp.bfloat16
    assert matmul(X.astype(jnp.bfloat16), w, jnp.float32).dtype == jnp.float32


def test_permuted_inputs():
    """GPTQ's act-order: row i of the values belongs to input permutation[i]."""
    order = jax.random.permutation(jax.random.key(2), 128)
    w = replace(quantize(W[order], "int4-g32"), permutation=order.astype(jnp.int32))
    np.testing.assert_allclose(matmul(X, w), X @ w.dequantize(), atol=2e-6)
    assert float(jnp.abs(w.dequantize() - W).max()) < 0.01


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["int8", "int4-g32-asym", "nf4-dq", "w8a8"])
def test_experts(name):
    w = quantize(jnp.stack([W, 2 * W, -W]), name)
    x = jnp.stack([X[0]] * 3)
    each = [quantize(one, name) for one in (W, 2 * W, -W)]
    for expert, found in enumerate(matmul(x, w)):
        np.testing.assert_allclose(found, matmul(X[0], each[expert]), atol=2e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["int8", "int4-g32-asym", "fp8", "mxfp4"])
def test_an_embedding(name):
    table = transposed(quantize(W, name))
    assert (table.shape, table.scheme.block[0]) == ((24, 128), 1)
    tokens = jnp.array([[3, 0, 23], [7, 7, 1]])
    np.testing.assert_array_equal(rows(table, tokens), table.dequantize()[tokens])
    assert rows(table, tokens, jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_allclose(matmul(X, transposed(table)), X @ table.dequantize().T, atol=2e-6)


def affine(weight, bits=4, group=32):
    """Codes with minima, of round-to-nearest's integers with zeros."""
    found = quantize(weight, "int4-g32-asym" if bits == 4 else "int8-g32-asym")
    scales = found.scales.astype(jnp.float32)
    minima = (-8.0 - found.zeros) * scales if bits == 4 else (-128.0 - found.zeros) * scales
    values = found.values if bits == 4 else ((found.values.astype(jnp.int32) + 128) // 8).astype(jnp.int8)
    scales = scales if bits == 4 else scales * 8
    return QuantizedArray(values, scales, scheme=Scheme("affine", bits, (group, 1)), minima=minima)


@pytest.mark.parametrize("bits", [4, 5])
def test_minima(bits):
    w = affine(W, bits)
    check(w, "w")
    assert float(jnp.abs(w.dequantize() - W).max()) < 0.05
    np.testing.assert_allclose(matmul(X, w), X @ w.dequantize(), atol=2e-6)
    table = transposed(w)
    np.testing.assert_array_equal(rows(table, jnp.array([3, 0, 23])), w.dequantize().T[jnp.array([3, 0, 23])])
    experts = jax.tree.map(lambda a, b: jnp.stack([a, b]), affine(W, bits), affine(-W, bits))
    found = matmul(jnp.stack([X[0], X[0]]), experts)
    np.testing.assert_allclose(found[1], matmul(X[0], affine(-W, bits)), atol=2e-6)
    with pytest.raises(ValueError, match="minima belong to the kind 'affine'"):
        check(replace(w, minima=None), "w")
    with pytest.raises(ValueError, match="1 of 96 minima are not finite"):
        check(replace(w, minima=w.minima.at[0, 0].set(jnp.nan)), "w")


def test_what_cannot_be_an_embedding():
    with pytest.raises(ValueError, match=r"a scale per row, blocks \(1, D\), not \(128, 1\)"):
        rows(quantize(W, "int8"), jnp.zeros(2, jnp.int32))


def permuted() -> QuantizedArray:
    return replace(quantize(W, "int4-g32"), permutation=jnp.arange(128, dtype=jnp.int32))


@pytest.mark.parametrize(
    "make",
    [lambda: quantize(jnp.stack([W, -W]), "int8"), lambda: quantize(W, "nf4-dq"), permuted],
    ids=["stack", "nested scales", "permuted inputs"],
)
def test_what_cannot_be_transposed(make):
    weight, message = make(), "a stack, or a weight with permuted inputs or nested scales cannot be transposed"
    with pytest.raises(ValueError, match=message):
        transposed(weight)
    with pytest.raises(ValueError, match=message):
        matmul(X[..., :24], weight, is_transposed=True)


def test_a_nan_stays_in_its_row():
    """A broken row is reported alone, so nothing of it may reach its neighbours."""
    x = X[0].at[2, 5].set(jnp.nan)
    for name in ("int8", "int4-g32-asym", "w8a8", "w8a8-fp8-block"):
        is_nan = np.isnan(matmul(x, quantize(W, name)))
        assert is_nan[2].all()
        assert not np.delete(is_nan, 2, axis=0).any()
