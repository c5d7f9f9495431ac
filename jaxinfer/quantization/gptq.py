"""GPTQ: values chosen one input after another, each error made up for by the inputs that are still free."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.quantization.array import QuantizedArray
from jaxinfer.quantization.grid import IntegerGrid, assemble, find_params, in_groups, to_values

_BLOCK = 128  # inputs whose corrections are applied to the rest at once
_MAX_DAMPING = 10.0
_PRECISION = lax.Precision.HIGHEST


@dataclass(frozen=True)
class GptqOptions:
    """Attributes:
    damping: added to the Hessian's diagonal, in units of its mean; raised tenfold while the Hessian is singular.
    act_order: inputs with the largest activations first.
    static_groups: with act_order, scales are those of the original weight's groups, so that inputs keep their
      order in memory; without, groups are of inputs as they are visited, and the result has a permutation.
    search: scales by search for the least error instead of from the largest weight.
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
    """Quantizes a weight [K, N] so that the error of its outputs is small; also returns the damping that was needed.

    Frantar et al. 2022, algorithm 1. As in its published code, the scales of a group are found from the weights as
    they are when the block of 128 inputs begins, the block's own corrections not yet in them. Inputs the Hessian has
    never seen are rounded, not zeroed.

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
    """The upper Cholesky factor of the inverse of the damped Hessian, with the order of its inputs; NaN if singular."""
    diagonal = jnp.diagonal(hessian)
    mean = jnp.mean(diagonal)
    mean = jnp.where(mean > 0, mean, 1.0)
    diagonal = jnp.where(diagonal == 0, mean, diagonal)
    hessian = jnp.fill_diagonal(hessian, diagonal + damping * mean, inplace=False)
    order = jnp.argsort(-diagonal, stable=True) if act_order else jnp.arange(len(diagonal))
    hessian = hessian[order][:, order]
    # With inputs in reverse, H = L L^T; in their order L is upper triangular, and the factor sought its inverse.
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
    """Values [K, N] in the order of the visit, scales and zeros [G, N]."""
    num_inputs, num_outputs = weight.shape
    group = grid.group(num_inputs)
    if group == num_inputs:  # the only group may be taken for a longer one
        group = -(-group // _BLOCK) * _BLOCK
    block = _block_size(group)
    size = -(-num_inputs // block) * block
    find = partial(find_params, grid=grid, search=options.search)
    finds = not (options.static_groups and options.act_order)
    if not finds:
        scales, zeros = find(in_groups(weight, group))
        groups = order // group
    else:
        num_groups = max(grid.num_groups(num_inputs), -(-size // group))
        scales, zeros = jnp.ones((num_groups, num_outputs)), jnp.zeros((num_groups, num_outputs))
        groups = jnp.arange(num_inputs) // group
    # Inputs up to a whole block are zeros that touch nothing: their factor is that of the unit matrix.
    weight = jnp.zeros((max(size, -(-size // group) * group), num_outputs)).at[:num_inputs].set(weight[order])
    factor = jnp.eye(size).at[:num_inputs, :num_inputs].set(factor)
    groups = jnp.zeros(size, jnp.int32).at[:num_inputs].set(groups).at[num_inputs:].set(groups[-1])

    def visit_block(carry, start):
        weight, scales, zeros = carry
        if finds:
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
    """The scales and zeros with those of the groups that begin in the block at `start`."""

    def renewed(size: int):
        rows = lax.dynamic_slice(weight, (start, 0), (size, weight.shape[1]))
        found = find(rows.reshape(-1, group, weight.shape[1]))
        return tuple(
            lax.dynamic_update_slice(old, new, (start // group, 0))
            for old, new in zip((scales, zeros), found, strict=True)
        )

    if group <= block:
        return renewed(block)
    return lax.cond(start % group == 0, lambda: renewed(group), lambda: (scales, zeros))


def _block_size(group: int) -> int:
    """Inputs of a block, near 128, so that no block begins inside a group it does not hold, nor ends in one."""
    if group <= _BLOCK:
        return _BLOCK // group * group
    return next(size for size in range(_BLOCK, 0, -1) if group % size == 0)
