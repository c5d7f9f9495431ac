"""AWQ: inputs that carry large activations are scaled up before rounding, and weights are clipped to what pays."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.quantization.grid import IntegerGrid, find_params, in_groups, to_values

NUM_RATIOS = 20
_CLIP_STEPS, _CLIP_GRID = 10, 20  # down to 0.55 of the largest weight
_PRECISION = lax.Precision.HIGHEST


def candidate_scales(
    mean_absolute: jax.Array, weights: Sequence[jax.Array], group_size: int | None, *, duo_scaling: bool = True
) -> list[jax.Array]:
    """The scales [K] to try for an input that the weights [K, N] share: the identity, then one for each ratio.

    Lin et al. 2023, section 3.2: s = mean|x|^r; with `duo_scaling`, as AutoAWQ does, divided by mean|w|^(1-r), where
    |w| counts relative to the largest of its group. The geometric middle of each is 1.

    Args:
      mean_absolute: mean of |x| over tokens, [K].
    """
    sizes = jnp.concatenate(weights, axis=1).astype(jnp.float32)
    groups = jnp.abs(in_groups(sizes, min(group_size or len(sizes), len(sizes))))
    relative = groups / (groups.max(axis=1, keepdims=True) + 1e-6)
    relative = relative.reshape(-1, sizes.shape[1])[: len(sizes)].mean(axis=1)
    found = [jnp.ones(len(sizes))]
    for ratio in (i / NUM_RATIOS for i in range(NUM_RATIOS)):
        scale = mean_absolute**ratio
        if duo_scaling:
            scale = scale / (relative ** (1 - ratio) + 1e-4)
        scale = jnp.maximum(scale, 1e-4)
        scale = scale / jnp.sqrt(scale.max() * scale.min())
        found.append(jnp.where(jnp.isfinite(scale), scale, 1.0))
    return found


def search_scale(candidates: Sequence[jax.Array], loss: Callable[[jax.Array], float]) -> tuple[jax.Array, float]:
    """The candidate with the least loss, and that loss; the first of equals."""
    losses = [loss(scale) for scale in candidates]
    best = min(range(len(candidates)), key=losses.__getitem__)
    return candidates[best], losses[best]


@partial(jax.jit, static_argnames="grid")
def scaled_and_rounded(weight: jax.Array, scale: jax.Array, grid: IntegerGrid) -> jax.Array:
    """What a weight [K, N] becomes, in float32: multiplied by scale [K], rounded to the grid, divided again."""
    return round_to_grid(weight * scale[:, None], grid) / scale[:, None]


def round_to_grid(weight: jax.Array, grid: IntegerGrid) -> jax.Array:
    """The nearest weight [K, N] on its grid, float32."""
    groups = in_groups(weight, grid.group(len(weight)))
    scales, zeros = (found[:, None] for found in find_params(groups, grid))
    rounded = (to_values(groups, scales, zeros, grid) - zeros) * scales
    return rounded.reshape(-1, weight.shape[1])[: len(weight)]


@partial(jax.jit, static_argnames="grid")
def output_error(weight: jax.Array, approximation: jax.Array, hessian: jax.Array) -> jax.Array:
    """The sum of squared errors of the outputs, over the tokens in `hessian`, the sum of x x^T."""
    difference = approximation - weight
    return jnp.sum(difference * jnp.matmul(hessian, difference, precision=_PRECISION))


@partial(jax.jit, static_argnames="grid")
def clip(weight: jax.Array, hessian: jax.Array, grid: IntegerGrid) -> jax.Array:
    """The weight [K, N] with each group of each output cut off where its own share of the output errs least.

    Ten limits are tried, from the largest weight of the group down to 0.55 of it (llm-awq, auto_clip.py). The error
    of a group's share is exact: it follows from the group's block of the Hessian.
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
        clipped = jnp.clip(groups, -limit, limit)
        scales, zeros = (found[:, None] for found in find_params(clipped, grid))
        difference = (to_values(clipped, scales, zeros, grid) - zeros) * scales - groups
        share = jnp.matmul(blocks, difference, precision=_PRECISION)
        error = jnp.sum(difference * share, axis=1, keepdims=True)
        is_better = error < least
        return jnp.where(is_better, error, least), jnp.where(is_better, limit, limits)

    worst = jnp.full(largest.shape, jnp.inf)
    _, limits = lax.fori_loop(0, _CLIP_STEPS, try_step, (worst, largest))
    return jnp.clip(groups, -limits, limits).reshape(-1, weight.shape[1])[: len(weight)]
