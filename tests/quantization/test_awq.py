"""AWQ's scales and limits against formulas written out in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.quantization import quantize
from jaxinfer.quantization.awq import best_scale, candidate_scales, clip, output_error, relative_sizes, scaled_error
from jaxinfer.quantization.grid import IntegerGrid
from jaxinfer.quantization.rtn import Recipe


@pytest.fixture
def problem():
    """x [T, K] with a few inputs that are large, and a weight [K, N] with a few that are."""
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 96)) * np.where(np.arange(96) % 17 == 3, 20.0, 1.0)
    weight = random.standard_t(4, size=(96, 40))
    return x.astype(np.float32), weight.astype(np.float32)


@pytest.mark.parametrize("duo_scaling", [True, False])
def test_candidates_are_the_published_formula(problem, duo_scaling):
    x, weight = problem
    mean = np.abs(x).mean(0)
    groups = np.abs(weight).reshape(3, 32, 40)
    relative = (groups / (groups.max(1, keepdims=True) + 1e-6)).reshape(96, 40).mean(1)
    np.testing.assert_allclose(relative_sizes([weight[:, :10], weight[:, 10:]], 32), relative, rtol=1e-5)
    first, *found = candidate_scales(jnp.asarray(mean), jnp.asarray(relative) if duo_scaling else None)
    np.testing.assert_array_equal(first, np.ones(96))
    assert len(found) == 20
    for step, scale in enumerate(found):
        ratio = step / 20
        expected = mean**ratio / ((relative ** (1 - ratio) + 1e-4) if duo_scaling else 1)
        expected = np.maximum(expected, 1e-4)
        np.testing.assert_allclose(scale, expected / np.sqrt(expected.max() * expected.min()), rtol=1e-4)


def test_dead_inputs_and_last_groups_give_finite_scales(problem):
    x, weight = problem
    for size in (None, 64, 500):
        relative = relative_sizes([jnp.asarray(weight)], size)
        for scale in candidate_scales(jnp.asarray(np.abs(x * 0).mean(0)), relative):
            assert np.isfinite(scale).all()
            assert (np.asarray(scale) > 0).all()


def test_the_search_makes_no_layer_worse():
    candidates = [jnp.array([float(i)]) for i in range(4)]
    assert best_scale(candidates, [[2.0, 2.0], [2.1, 0.1], [1.8, 1.9], [1.7, 1.8]])[0] == 3
    assert best_scale(candidates, [[1.0, 1.0], [0.0, 1.1], [1.1, 0.0], [1.0, 1.0]])[0] == 0
    assert best_scale(candidates, [[0.0]] * 4)[0] == 0  # nothing to gain


def test_errors_are_those_of_the_outputs(problem):
    x, weight = problem
    hessian, grid = x.T @ x, IntegerGrid(4, 32)
    scale = np.linspace(0.5, 2, 96, dtype=np.float32)
    rounded = np.asarray(quantize(jnp.asarray(weight * scale[:, None]), Recipe("int", 4, (32, 1))).dequantize())
    outputs, exact = x @ (rounded / scale[:, None]), x @ weight
    squares = np.square(outputs - exact, dtype=np.float64).sum()
    assert float(scaled_error(weight, scale, hessian, grid)) == pytest.approx(squares, rel=1e-3)
    found = output_error(weight, rounded / scale[:, None], hessian)
    assert float(found) == pytest.approx(squares / np.square(exact, dtype=np.float64).sum(), rel=1e-3)


def test_scaling_up_what_is_large_pays(problem):
    x, weight = problem
    hessian, grid = jnp.asarray(x.T @ x), IntegerGrid(3, 32)

    def losses(scale):
        return [float(scaled_error(weight, scale, hessian, grid))]

    relative = relative_sizes([jnp.asarray(weight)], 32)
    candidates = candidate_scales(jnp.asarray(np.abs(x).mean(0)), relative)
    best = best_scale(candidates, [losses(scale) for scale in candidates])
    assert losses(best)[0] < 0.7 * losses(jnp.ones(96))[0]


@pytest.mark.matrix
@pytest.mark.parametrize("symmetric", [True, False])
def test_limits_are_the_best_of_those_tried(problem, symmetric):
    x, weight = problem
    grid = IntegerGrid(3, 32, symmetric)
    found = np.asarray(clip(jnp.asarray(weight), jnp.asarray(x.T @ x), grid))
    for group, column in [(0, 0), (1, 7), (2, 39)]:
        rows = slice(32 * group, 32 * group + 32)
        own = weight[rows, column : column + 1]
        errors = []
        for step in range(10):
            limit = np.abs(own).max() * (1 - step / 20)
            clipped = jnp.asarray(np.clip(own, -limit, limit))
            rounded = quantize(clipped, Recipe("int", 3, (32, 1), symmetric)).dequantize()
            errors.append(np.square(x[:, rows] @ (np.asarray(rounded) - own)).sum())
        limit = np.abs(own).max() * (1 - int(np.argmin(errors)) / 20)
        np.testing.assert_allclose(found[rows, column : column + 1], np.clip(own, -limit, limit), rtol=1e-6)


def test_a_last_group_is_clipped_too(problem):
    x, weight = problem
    found = clip(jnp.asarray(weight), jnp.asarray(x.T @ x), IntegerGrid(3, 64))
    assert found.shape == weight.shape
    assert (np.abs(np.asarray(found)) <= np.abs(weight) + 1e-6).all()
