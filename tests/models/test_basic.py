"""The norms against their formulas in float64, and where each of them rounds."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.models.basic import Norm

X = np.random.default_rng(0).normal(0.5, 2, (3, 4, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(1, 0.5, 8).astype(np.float32)
B = np.random.default_rng(2).normal(0, 0.5, 8).astype(np.float32)


def norm(kind, *, bias=None, weight=W, dtype="float32"):
    made = Norm(weight.shape, ("hidden",) * weight.ndim, kind, eps=1e-3, bias=bias is not None, dtype=dtype)
    made.weight.set_value(jnp.asarray(weight, dtype))
    if bias is not None:
        made.bias.set_value(jnp.asarray(bias, dtype))
    return made


def rms(x):
    return x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-3)


@pytest.mark.parametrize(
    ("kind", "bias", "expected"),
    [
        ("rms", None, lambda x: rms(x) * W),
        ("rms_float32", None, lambda x: rms(x) * W),
        ("rms_zero_centred", None, lambda x: rms(x) * (1 + W)),
        ("layer", None, lambda x: rms(x - x.mean(-1, keepdims=True)) * W),
        ("layer", B, lambda x: rms(x - x.mean(-1, keepdims=True)) * W + B),
    ],
)
def test_formulas(kind, bias, expected):
    found = norm(kind, bias=bias)(jnp.asarray(X))
    np.testing.assert_allclose(found, expected(X.astype(np.float64)), rtol=2e-6, atol=2e-6)


def test_llama_rounds_before_the_weight_and_the_others_after():
    x, weight = (array.astype(ml_dtypes.bfloat16) for array in (X, W))
    normed = rms(x.astype(np.float64)).astype(np.float32)
    before = (normed.astype(ml_dtypes.bfloat16) * weight).astype(np.float32)
    after = (normed * weight.astype(np.float32)).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (before != after).any()
    for kind, expected in (("rms", before), ("rms_float32", after)):
        found = norm(kind, weight=weight, dtype="bfloat16")(jnp.asarray(x))
        np.testing.assert_array_equal(np.asarray(found, np.float32), expected)


def test_a_weight_for_each_head():
    weight = np.random.default_rng(3).normal(1, 0.5, (4, 8)).astype(np.float32)
    found = norm("layer", weight=weight)(jnp.asarray(X))
    for head in range(4):
        alone = norm("layer", weight=weight[head])(jnp.asarray(X[:, head]))
        np.testing.assert_allclose(found[:, head], alone, rtol=1e-6)
