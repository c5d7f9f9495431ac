"""Products with plain weights: XLA's and those for CPUs against float64, bits, and derivatives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense_matmul import bfloat16_cpu, choose, dense_matmul
from pallas_kernels.dense_matmul.api import make_spec
from tests.pallas_kernels.quick import quick

pytest.importorskip("numba", reason="kernels for CPUs need Numba")

K, N = 320, 96
BOTH = pytest.mark.parametrize("is_transposed", [False, True])


def random(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@partial(jax.jit, static_argnames=("is_transposed", "implementation"))
def product(x, weight, *, is_transposed: bool = False, implementation: str = "numba_cpu"):
    return dense_matmul(x, weight, is_transposed=is_transposed, implementation=implementation)


@BOTH
@pytest.mark.parametrize("implementation", ["numba_cpu", "xla"])
@pytest.mark.parametrize("rows", quick([1, 3, 8, 29, 100], 3, 100))
def test_products_equal_float64(rows, implementation, is_transposed):
    """Of a number of outputs that is no multiple of anything."""
    outputs = 51
    x, weight = random(1, rows, K), random(2, K, outputs)
    found = product(
        x, weight.T if is_transposed else weight, is_transposed=is_transposed, implementation=implementation
    )
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())


@BOTH
def test_a_row_does_not_depend_on_the_others(is_transposed):
    """To the bit: a row of 7, 37 and 100, which are computed in other ways, and by itself."""
    x, weight = random(3, 100, K), random(4, 109, K) if is_transposed else random(4, K, 109)
    multiply = partial(product, is_transposed=is_transposed)
    together = multiply(x, weight)
    for rows in (7, 37):
        np.testing.assert_array_equal(multiply(x[:rows], weight), together[:rows])
    for row in (0, 8, 99):
        np.testing.assert_array_equal(multiply(x[row : row + 1], weight)[0], together[row])


def test_leading_axes():
    x, weight = random(5, 2, 3, K), random(6, K, N)
    np.testing.assert_array_equal(product(x, weight), product(x.reshape(6, K), weight).reshape(2, 3, N))


@BOTH
def test_derivatives_are_those_of_xla(is_transposed):
    x, weight = random(7, 5, K) * 0.05, random(8, N, K) if is_transposed else random(8, K, N)

    def loss(x, weight, implementation):
        return jnp.sum(jnp.sin(product(x, weight, is_transposed=is_transposed, implementation=implementation)))

    found, expected = (jax.grad(loss, (0, 1))(x, weight, name) for name in ("numba_cpu", "xla"))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_a_batch_of_inputs_is_mapped():
    x, weight = random(9, 2, 3, K), random(10, K, N)
    np.testing.assert_array_equal(jax.vmap(product, (0, None))(x, weight), product(x, weight))


def test_float32_is_chosen():
    def reason(x_dtype, *weight: int, **options) -> str | None:
        x = jax.ShapeDtypeStruct((1, weight[-2]), x_dtype)
        spec = make_spec(x, jax.ShapeDtypeStruct(weight, x_dtype), **options)
        return choose(spec, platform="cpu").reasons.get("numba_cpu")

    assert reason(jnp.float32, K, N) is None
    assert reason(jnp.bfloat16, K, N) == "it multiplies float32, not bfloat16"
    assert reason(jnp.float32, 3, K, N) == "a weight has two axes, not 3"
    assert reason(jnp.float32, 50, N) is None
    with pytest.raises(NotImplementedError, match="float32, not bfloat16"):
        product(random(1, 2, K).astype(jnp.bfloat16), random(2, K, N).astype(jnp.bfloat16))


@BOTH
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", quick([2, 3, 6, 64], 3, 64))
def test_bfloat16_products_are_summed_in_float32(rows, out_dtype, is_transposed):
    x, weight = random(11, rows, K).astype(jnp.bfloat16), random(12, K, N).astype(jnp.bfloat16)
    given = weight.T if is_transposed else weight
    result = dense_matmul(x, given, is_transposed=is_transposed, out_dtype=out_dtype, implementation="bfloat16_cpu")
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    assert result.dtype == out_dtype
    atol = 1e-6 if out_dtype == "float32" else 2**-8
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, atol=atol * np.abs(expected).max())


@BOTH
@pytest.mark.parametrize("rows", quick([2, 3, 6, 64], 3, 64))
def test_bfloat16_derivatives_are_those_of_float32(rows, is_transposed):
    """To 1 % of the largest: what is multiplied is rounded to 8 bits, sums are not. Leading axes as well."""
    x, weight = random(13, 2, rows, K), random(14, N, K) if is_transposed else random(14, K, N)

    def loss(x, weight, dtype, implementation):
        out = dense_matmul(
            x.astype(dtype), weight.astype(dtype), is_transposed=is_transposed, implementation=implementation
        )
        return jnp.sum(jnp.sin(0.1 * out.astype(jnp.float32)))

    both = (jnp.bfloat16, "bfloat16_cpu"), (jnp.float32, "xla")
    results, expected = (jax.grad(loss, (0, 1))(x, weight, *how) for how in both)
    for one, other in zip(results, expected, strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, other, atol=0.01 * np.abs(other).max())


def test_bfloat16_is_chosen():
    def chosen(rows: int, dtype, *weight: int, platform: str = "cpu") -> tuple[str, str | None]:
        spec = make_spec(jax.ShapeDtypeStruct((rows, weight[-2]), dtype), jax.ShapeDtypeStruct(weight, dtype))
        choice = choose(spec, platform=platform)
        return choice.implementation, choice.reasons.get("bfloat16_cpu")

    assert chosen(2, jnp.bfloat16, K, N)[0] == "bfloat16_cpu"
    assert chosen(1, jnp.bfloat16, K, N) == ("xla", "a row alone is no work for matrix units")
    assert chosen(2, jnp.float32, K, N)[0] == "numba_cpu"
    assert chosen(2, jnp.float16, K, N) == ("xla", "it multiplies bfloat16, not float16")
    assert chosen(2, jnp.bfloat16, 3, K, N) == ("xla", "a weight has two axes, not 3")
    assert chosen(2, jnp.bfloat16, K, N, platform="gpu")[0] == "xla"
    spec = make_spec(jax.ShapeDtypeStruct((2, K), jnp.bfloat16), jax.ShapeDtypeStruct((K, N), jnp.bfloat16))
    assert bfloat16_cpu.unsupported(spec, "tpu") == "it is for CPUs, not for tpu"
