"""The norms against their formulas in float64, and where each of them rounds."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.models.basic import XIELU, Norm

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


def test_a_norm_without_weight():
    made = Norm((8,), ("head_dim",), "rms", eps=1e-3, bias=False, dtype="float32", has_weight=False)
    np.testing.assert_allclose(made(jnp.asarray(X)), rms(X.astype(np.float64)), rtol=2e-6, atol=2e-6)


def test_xielu_is_that_of_the_paper():
    """Section 3: a square above 0, an exponential below, both with the slope beta at 0."""
    act = XIELU("float32")
    act.alpha_p.set_value(jnp.array([0.3]))
    act.alpha_n.set_value(jnp.array([-0.7]))
    x = np.array([-30.0, -2.0, -1e-3, 0.0, 1e-3, 0.5, 20.0])
    positive, negative = np.log1p(np.exp(0.3)), 0.5 + np.log1p(np.exp(-0.7))
    expected = np.where(x > 0, positive * x * x + 0.5 * x, negative * (np.expm1(x) - x) + 0.5 * x)
    np.testing.assert_allclose(act(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=3e-6)


def test_xielu_starts_with_slopes_of_eight_tenths():
    act = XIELU("float32")
    np.testing.assert_allclose(act(jnp.array([2.0])), [0.8 * 4 + 0.5 * 2], rtol=1e-6)
    np.testing.assert_allclose(act(jnp.array([-2.0])), [0.8 * (np.expm1(-2) + 2) - 0.5 * 2], rtol=1e-5)
