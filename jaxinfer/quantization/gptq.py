"""GPTQ: rounds one input after another; the remaining inputs compensate for each rounding error."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.quantization.array import QuantizedArray
from jaxinfer.quantization.grid import IntegerGrid, assemble, find_params, in_groups, to_values

_BLOCK = 128  # inputs per block; later inputs are corrected once per block
_MAX_DAMPING = 10.0
_PRECISION = lax.Precision.HIGHEST


@dataclass(frozen=True)
class GptqOptions:
    """Options of `gptq`.

    Attributes:
      damping: added to the Hessian's diagonal, in units of its mean; multiplied by ten while the Hessian is singular.
      act_order: visit inputs with the largest activations first.
      static_groups: with act_order, groups are of inputs in memory order, with the scales of the original weight.
        Otherwise groups are of inputs in the order of visits, and the result has a permutation.
      search: search for the scales with the least error, instead of deriving them from the largest weight.
    """

    damping: float = 0.01
    act_order: bool = True
    static_groups: bool = True
    search: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.damping <= _MAX_DAMPING:
            raise ValueError(f"damping must be above 0 and at most {_MAX_DAMPING:g}, got {self.damping}")


def gptq(
    weight: jax.Array, hessian: jax.Array, grid: IntegerGrid, options: GptqOptions = GptqOptions()
) -> tuple[QuantizedArray, float]:
    """Quantizes a weight [K, N] with a small error of its outputs; also returns the damping used.

    Frantar et al. 2022, algorithm 1. As in its published code, the scales of a group come from the weights at the start
    of the block of 128 inputs, before the block's own corrections. Inputs with a Hessian of zero are rounded, not
    zeroed.

    Args:
      hessian: float32 [K, K], proportional to the sum of x x^T over the inputs x.

    Raises:
      ValueError: shapes that do not fit; a Hessian that is not finite, or not positive with the highest damping.
    """
    num_inputs = len(weight)
    if hessian.shape != (num_inputs, num_inputs):
        raise ValueError(f"a weight {weight.shape} needs a Hessian {(num_inputs, num_inputs)}, got {hessian.shape}")
    weight, hessian = weight.astype(jnp.float32), hessian.astype(jnp.float32)
    if not bool(jnp.isfinite(hessian).all()):
        raise ValueError("the Hessian is not finite: an activation overflowed or is NaN")
    damping = options.damping
    while True:
        factor, order = _inverse_factor(hessian, damping, options.act_order)
        if bool(jnp.isfinite(factor).all()):
            break
        if damping >= _MAX_DAMPING:
            raise ValueError(f"the Hessian is not positive definite, not even with damping {damping:g}")
        damping = min(10 * damping, _MAX_DAMPING)
    values, scales, zeros = _quantize(weight, factor, order, grid, options)
    permutation = None
    if options.act_order:
        if options.static_groups or grid.num_groups(num_inputs) == 1:
            values = values[jnp.argsort(order)]
        else:
            permutation = order.astype(jnp.int32)
    return assemble(values, scales, zeros, grid, permutation=permutation), damping


@partial(jax.jit, static_argnames="act_order")
def _inverse_factor(hessian: jax.Array, damping: jax.Array, act_order: bool) -> tuple[jax.Array, jax.Array]:
    """The upper Cholesky factor of the inverse of the damped Hessian, NaN if singular, and the order of its inputs."""
    diagonal = jnp.diagonal(hessian)
    mean = jnp.mean(diagonal)
    mean = jnp.where(mean > 0, mean, 1.0)
    diagonal = jnp.where(diagonal == 0, mean, diagonal)
    hessian = jnp.fill_diagonal(hessian, diagonal + damping * mean, inplace=False)
    order = jnp.argsort(-diagonal, stable=True) if act_order else jnp.arange(len(diagonal))
    hessian = hessian[order][:, order]
    # With inputs reversed, H = L L^T. In original order L is upper triangular, and its inverse is the factor.
    reverse = jnp.linalg.cholesky(hessian[::-1, ::-1])
    inverse = lax.linalg.triangular_solve(reverse, jnp.eye(len(diagonal)), left_side=True, lower=True)
    return inverse[::-1, ::-1], order


@partial(jax.jit, static_argnames=("grid", "options"))
def _quantize(
    weight: jax.Array,
    factor: jax.Array,
    order: jax.Array,
    grid: IntegerGrid,
    options: GptqOptions,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Values [K, N] in the order of visits, scales and zeros [G, N]."""
    num_inputs, num_outputs = weight.shape
    group = grid.group(num_inputs)
    if group == num_inputs:  # a single group may be extended
        group = -(-group // _BLOCK) * _BLOCK
    block = _block_size(group)
    size = -(-num_inputs // block) * block
    find = partial(find_params, grid=grid, search=options.search)
    has_dynamic_groups = not (options.static_groups and options.act_order)
    if not has_dynamic_groups:
        scales, zeros = find(in_groups(weight, group))
        groups = order // group
    else:
        num_groups = max(grid.num_groups(num_inputs), -(-size // group))
        scales, zeros = jnp.ones((num_groups, num_outputs)), jnp.zeros((num_groups, num_outputs))
        groups = jnp.arange(num_inputs) // group
    # Padding up to a full block is zeros with the factor of the unit matrix, and has no effect.
    weight = jnp.zeros((max(size, -(-size // group) * group), num_outputs)).at[:num_inputs].set(weight[order])
    factor = jnp.eye(size).at[:num_inputs, :num_inputs].set(factor)
    groups = jnp.zeros(size, jnp.int32).at[:num_inputs].set(groups).at[num_inputs:].set(groups[-1])

    def visit_block(carry, start):
        weight, scales, zeros = carry
        if has_dynamic_groups:
            scales, zeros = _params_from(weight, scales, zeros, start, group, block, find)
        rows = lax.dynamic_slice(weight, (start, 0), (block, num_outputs))
        right = lax.dynamic_slice(factor, (start, 0), (block, size))
        inner = lax.dynamic_slice(right, (0, start), (block, block))
        own = lax.dynamic_slice(groups, (start,), (block,))
        row_scales, row_zeros = scales[own], zeros[own]

        def visit(i, carry):
            rows, values, errors = carry
            chosen = to_values(rows[i], row_scales[i], row_zeros[i], grid)
            error = (rows[i] - (chosen - row_zeros[i]) * row_scales[i]) / inner[i, i]
            rows = rows - inner[i][:, None] * error
            return rows, values.at[i].set(chosen), errors.at[i].set(error)

        nothing = jnp.zeros((block, num_outputs))
        _, values, errors = lax.fori_loop(0, block, visit, (rows, nothing, nothing))
        later = jnp.where(jnp.arange(size) >= start + block, right, 0.0)
        weight = weight.at[:size].add(-jnp.matmul(later.T, errors, precision=_PRECISION))
        return (weight, scales, zeros), values

    (_, scales, zeros), values = lax.scan(visit_block, (weight, scales, zeros), jnp.arange(0, size, block))
    num_groups = grid.num_groups(num_inputs)
    return values.reshape(size, num_outputs)[:num_inputs], scales[:num_groups], zeros[:num_groups]


def _params_from(weight, scales, zeros, start, group: int, block: int, find):
    """The scales and zeros, updated for the groups that begin in the block at `start`."""

    def update(size: int):
        rows = lax.dynamic_slice(weight, (start, 0), (size, weight.shape[1]))
        parameters = find(rows.reshape(-1, group, weight.shape[1]))
        return tuple(
            lax.dynamic_update_slice(old, new, (start // group, 0))
            for old, new in zip((scales, zeros), parameters, strict=True)
        )

    if group <= block:
        return update(block)
    return lax.cond(start % group == 0, lambda: update(group), lambda: (scales, zeros))


def _block_size(group: int) -> int:
    """Inputs per block, near 128: groups consist of complete blocks, or blocks of complete groups."""
    if group <= _BLOCK:
        return _BLOCK // group * group
    return next(size for size in range(_BLOCK, 0, -1) if group % size == 0)
