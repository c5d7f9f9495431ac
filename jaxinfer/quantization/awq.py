"""AWQ: scales up inputs with large activations before rounding, and clips weights where that reduces the error."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.quantization.grid import IntegerGrid, find_params, in_groups, to_values

_NUM_RATIOS = 20
_CLIP_STEPS, _CLIP_GRID = 10, 20  # down to 0.55 of the largest weight
_PRECISION = lax.Precision.HIGHEST


def relative_sizes(weights: Sequence[jax.Array], group_size: int | None) -> jax.Array:
    """Mean over outputs of |w| relative to the largest of its group, float32 [K], of weights [K, N] side by side."""
    sizes = jnp.abs(jnp.concatenate(weights, axis=1).astype(jnp.float32))
    groups = in_groups(sizes, min(group_size or len(sizes), len(sizes)))
    relative = groups / (groups.max(axis=1, keepdims=True) + 1e-6)
    return relative.reshape(-1, sizes.shape[1])[: len(sizes)].mean(axis=1)


def candidate_scales(mean_absolute: jax.Array, relative: jax.Array | None = None) -> list[jax.Array]:
    """The scales [K] to try for an input: the identity, then one for each ratio r of 0, 0.05 .. 0.95.

    Lin et al. 2023, section 3.2: s = mean|x|^r; given `relative`, as AutoAWQ does, divided by relative^(1-r) ("duo
    scaling"). The geometric middle of the largest and the smallest is 1.

    Args:
      mean_absolute: mean of |x| over tokens, [K]. relative: result of `relative_sizes`.
    """
    scales = [jnp.ones(len(mean_absolute))]
    for ratio in (step / _NUM_RATIOS for step in range(_NUM_RATIOS)):
        scale = mean_absolute**ratio
        if relative is not None:
            scale = scale / (relative ** (1 - ratio) + 1e-4)
        scale = jnp.maximum(scale, 1e-4)
        scale = scale / jnp.sqrt(scale.max() * scale.min())
        scales.append(jnp.where(jnp.isfinite(scale), scale, 1.0))
    return scales


def best_scale(candidates: Sequence[jax.Array], losses: Sequence[Sequence[float]]) -> jax.Array:
    """The candidate with the smallest sum of losses relative to the first candidate's, among those for which no loss is
    larger than the first's. The first is the identity, so no layer gets worse."""
    first = losses[0]
    best, least = candidates[0], float(len(first))
    for scale, scale_losses in zip(candidates[1:], losses[1:], strict=True):
        ratios = [(loss + 1e-30) / (reference + 1e-30) for loss, reference in zip(scale_losses, first, strict=True)]
        if max(ratios) <= 1 and sum(ratios) < least:
            best, least = scale, sum(ratios)
    return best


@jax.jit
def squared_outputs(weight: jax.Array, hessian: jax.Array) -> jax.Array:
    """The sum of squares of the outputs of a weight [K, N], for the tokens in `hessian`, the sum of x x^T."""
    return jnp.sum(weight * jnp.matmul(hessian, weight, precision=_PRECISION))


@jax.jit
def output_error(weight: jax.Array, approximation: jax.Array, hessian: jax.Array) -> jax.Array:
    """Relative squared error of the outputs, for the tokens in `hessian`, the sum of x x^T."""
    return squared_outputs(approximation - weight, hessian) / jnp.maximum(squared_outputs(weight, hessian), 1e-30)


@partial(jax.jit, static_argnames="grid")
def scaled_error(weight: jax.Array, scale: jax.Array, hessian: jax.Array, grid: IntegerGrid) -> jax.Array:
    """Squared error of the outputs of a weight [K, N] that is multiplied by scale [K], rounded to the grid and divided
    by the scale; `hessian` as in `output_error`."""
    groups = in_groups(weight * scale[:, None], grid.group(len(weight)))
    rounded = _rounded(groups, grid).reshape(-1, weight.shape[1])[: len(weight)]
    return squared_outputs(rounded / scale[:, None] - weight, hessian)


@partial(jax.jit, static_argnames="grid")
def clip(weight: jax.Array, hessian: jax.Array, grid: IntegerGrid) -> jax.Array:
    """The weight [K, N] with each group of each output clipped where its contribution to the output has the least
    error.

    Tries ten limits, from the largest weight of the group down to 0.55 of it (llm-awq, auto_clip.py). The error is
    exact: it follows from the group's block of the Hessian.
    """
    size = grid.group(len(weight))
    groups = in_groups(weight, size)
    count = len(groups)
    padded = jnp.pad(hessian, ((0, count * size - len(weight)),) * 2).reshape(count, size, count, size)
    blocks = padded[jnp.arange(count), :, jnp.arange(count)]
    largest = jnp.abs(groups).max(axis=1, keepdims=True)

    def try_step(step, best):
        least, limits = best
        limit = largest * (1 - step / _CLIP_GRID)
        difference = _rounded(jnp.clip(groups, -limit, limit), grid) - groups
        share = jnp.matmul(blocks, difference, precision=_PRECISION)
        error = jnp.sum(difference * share, axis=1, keepdims=True)
        is_better = error < least
        return jnp.where(is_better, error, least), jnp.where(is_better, limit, limits)

    worst = jnp.full(largest.shape, jnp.inf)
    _, limits = lax.fori_loop(0, _CLIP_STEPS, try_step, (worst, largest))
    return jnp.clip(groups, -limits, limits).reshape(-1, weight.shape[1])[: len(weight)]


def _rounded(groups: jax.Array, grid: IntegerGrid) -> jax.Array:
    """Groups of weights [G, g, N] rounded to the grid."""
    scales, zeros = (params[:, None] for params in find_params(groups, grid))
    return (to_values(groups, scales, zeros, grid) - zeros) * scales
