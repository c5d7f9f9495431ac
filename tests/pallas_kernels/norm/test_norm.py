"""Norms against float64, with the addition before them: XLA's, and the GPU kernel in the interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ahead_of_time
from pallas_kernels.norm import choose, norm, pallas_gpu
from pallas_kernels.norm.api import make_spec
from tests.pallas_kernels.gpu_interpreter import interpreted_gpu
from tests.pallas_kernels.norm.exact import exact_norm, stored_sum
from tests.pallas_kernels.quick import quick
from tests.pallas_kernels.relative_norm import assert_near

KINDS = ("rms", "rms_float32", "rms_zero_centred", "layer")
EPS = 1e-5


def expected(x, term, weight, bias, kind):
    """The sum as stored, and its norm in float64."""
    total = stored_sum(x, term)
    return total, exact_norm(total, weight, bias, make_spec(x, weight, bias, term, kind=kind, eps=EPS))


def operands(width, dtype, rows=(2,)):
    rng = np.random.default_rng(0)
    x, term = (jnp.asarray(rng.standard_normal((*rows, width)), dtype) for _ in range(2))
    weight, bias = (jnp.asarray(rng.uniform(0.5, 1.5, width), dtype) for _ in range(2))
    return x, term, weight, bias


CASES = [
    (kind, dtype, width, has_term, has_bias)
    for kind in KINDS
    for dtype in ("bfloat16", "float32")
    for width in (640, 1024)
    for has_term, has_bias in ((True, False), (False, kind == "layer"))
    if has_term or width >= 1024  # XLA fuses norms of heads
]


def run(implementation, x, weight, bias, term, kind):
    if implementation == "xla":
        return norm(x, weight, bias, term, kind=kind, eps=EPS, implementation="xla")
    spec = make_spec(x, weight, bias, term, kind=kind, eps=EPS)
    with interpreted_gpu():
        assert choose(spec, platform="gpu").implementation == "pallas_gpu"
        return pallas_gpu.norm(x, weight, bias, term, spec)


@pytest.mark.matrix("rms-bfloat16-640-True-False-xla", "rms-bfloat16-640-True-False-pallas_gpu")
@pytest.mark.parametrize("implementation", ["xla", "pallas_gpu"])
@pytest.mark.parametrize(
    ("kind", "dtype", "width", "has_term", "has_bias"),
    quick(CASES, ("rms", "bfloat16", 640, True, False), ("layer", "float32", 1024, False, True)),
)
def test_against_float64(implementation, kind, dtype, width, has_term, has_bias):
    x, term, weight, bias = operands(width, dtype)
    term, bias = term if has_term else None, bias if has_bias else None
    total, found = run(implementation, x, weight, bias, term, kind)
    wanted_total, wanted = expected(x, term, weight, bias, kind)
    np.testing.assert_array_equal(np.asarray(total, np.float32), np.asarray(wanted_total, np.float32))
    assert_near(found, wanted, dtype)


@pytest.mark.parametrize("implementation", ["xla", "pallas_gpu"])
def test_rows_of_any_axes_and_no_weight(implementation):
    x, term, _, _ = operands(1024, "float32", rows=(2, 1, 3))
    total, found = run(implementation, x, None, None, term, "rms")
    wanted_total, wanted = expected(x, term, None, None, "rms")
    np.testing.assert_array_equal(total, wanted_total)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "pallas_gpu"])
def test_zeros_are_no_numbers_less(implementation):
    x = jnp.zeros((1, 1024), jnp.bfloat16)
    _, result = run(implementation, x, None, None, x, "rms")
    np.testing.assert_array_equal(np.asarray(result, np.float32), 0)


@pytest.mark.parametrize(
    ("width", "has_term", "axes", "reason"),
    [
        (576, True, 1, "multiples of 128 up to 8192, not 576"),
        (16384, True, 1, "not 16384"),
        (128, False, 1, "norms of heads"),
        (1024, True, 2, "one weight for all rows"),
    ],
)
def test_what_the_kernel_does_not_take(width, has_term, axes, reason):
    x = jnp.zeros((2, width))
    spec = make_spec(x, jnp.zeros((1,) * (axes - 1) + (width,)), term=x if has_term else None, kind="rms", eps=EPS)
    chosen = choose(spec, platform="gpu")
    assert chosen.implementation == "xla"
    assert reason in chosen.reasons["pallas_gpu"]


def test_one_launch_on_a_gpu():
    if (reason := ahead_of_time.missing_compiler("h100")) is not None:
        pytest.skip(reason)
    x, term, weight, _ = operands(4096, "bfloat16", rows=(1,))

    def added(x, weight, term):
        return norm(x, weight, None, term, kind="rms", eps=EPS)

    text = ahead_of_time.compile_for("h100", added, x, weight, term).program.as_text()
    assert text.count("custom-call(") == 1
    assert "fusion(" not in text
