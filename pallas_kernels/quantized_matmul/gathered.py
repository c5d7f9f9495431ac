"""Products of a few rows with their own experts of a stack, in one fusion of XLA:GPU that reads the chosen ones only.

XLA:GPU fuses the gather of experts and their dequantization into sums over contiguous inputs, one for each row of a
block, so that no weight is written in any form. In a loop over experts it writes each expert's slice before the product
and, of groups, the whole stack in another layout before the loop (5 times the bytes of the chosen experts for int4 in
groups of 128). The stack's arrays have to lie output by output, as `jaxinfer.quantization.on_device` puts them; others
are copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.quantized_matmul.dequantize import dequantize, look_up, spread
from pallas_kernels.quantized_matmul.xla import quantize_tokens

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int8, Int32, Num

GATHERED_ROWS = 8  # of a block: XLA:GPU fuses as many sums, beyond which it reads the weights again
_ROW_MAJOR = Layout(major_to_minor=(0, 1, 2))


def gathered_matmul(
    x: Float[Array, "B R K"],
    expert: Int32[Array, " B"],
    values: Num[Array, "E K N"],
    scales: Float[Array, "B _ _"] | None = None,
    zeros: Int8[Array, "E _ _"] | None = None,
    codebook: Float32[Array, " 16"] | None = None,
    minima: Float[Array, "E _ _"] | None = None,
    *,
    block: tuple[int, int],
    activations: str | None = None,
) -> Float32[Array, "B R N"]:
    """x[b] @ weight[expert[b]] for blocks of rows; `values` and what follows are of all experts, as in `dequantize`,
    but `scales` are those of the chosen ones, transposed (`take_experts`); None for a stack that is not quantized."""
    token_scales = None
    if activations is not None:
        x, token_scales = quantize_tokens(x, activations)
    dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    across = (block[1], block[0])
    chosen = take_experts(values, expert)
    of_groups = None if scales is None else scales.astype(jnp.float32)
    if of_groups is None:
        weight, after = chosen.astype(jnp.float32), None
    elif codebook is not None:  # a gather of codebook entries is fused, selections are not
        weight, after = look_up(chosen, codebook, "cpu") * spread(of_groups, across, chosen.shape), None
    elif token_scales is not None and block[0] >= x.shape[-1]:
        weight, after = chosen.astype(dtype), spread(of_groups, across, (*chosen.shape[:2], 1))[..., 0]
    else:
        numbers = (None if each is None else take_experts(each, expert) for each in (zeros, minima))
        of_zeros, of_minima = numbers
        weight, after = dequantize(chosen, of_groups, of_zeros, None, of_minima, block=across), None
        dtype = jnp.float32
    rows = [jnp.sum(weight * x[:, row, None, :].astype(dtype), axis=-1) for row in range(x.shape[1])]
    # Otherwise XLA may compute the last sum where the rows are put together, and reads the weights once more for it.
    products = jnp.stack(lax.optimization_barrier(rows), axis=1).astype(jnp.float32)
    products = products if after is None else products * after[:, None]
    return products if token_scales is None else products * token_scales


def take_experts(array: Num[Array, "E K N"], expert: Int32[Array, " B"]) -> Num[Array, "B N K"]:
    """[B, N, K] of [E, K, N]: the chosen experts' arrays, transposed as they lie."""
    return _by_output(array).at[expert].get(mode="promise_in_bounds")


def take_expert(array: Num[Array, "E K N"], expert: Int32[Array, ""]) -> Num[Array, "K N"]:
    """An expert's array, of which a compiler copies no more than this one to another layout."""
    return lax.dynamic_index_in_dim(_by_output(array), expert, keepdims=False).T


def _by_output(array: jax.Array) -> jax.Array:
    return with_layout_constraint(jnp.swapaxes(array, -1, -2), _ROW_MAJOR)
