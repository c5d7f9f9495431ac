"""Statistics of what linear layers read; of an expert, over the tokens that are sent to it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.models.experts import tile_rows
from jaxinfer.models.moe import SparseMoE
from jaxinfer.quantization.matmul import matmul


class InputStatistics(NamedTuple):
    """Sums over the tokens that a linear layer saw; float32. Of a stack of experts all have a leading axis [E].

    Attributes:
      hessian: [K, K], the sum of x x^T. absolute: [K], the sum of |x|. largest: [K], the largest |x|.
      num_tokens: how many.
    """

    hessian: jax.Array
    absolute: jax.Array
    largest: jax.Array
    num_tokens: jax.Array

    def __add__(self, other: "InputStatistics") -> "InputStatistics":  # type: ignore[override]
        return InputStatistics(
            self.hessian + other.hessian,
            self.absolute + other.absolute,
            jnp.maximum(self.largest, other.largest),
            self.num_tokens + other.num_tokens,
        )

    @property
    def mean_absolute(self) -> jax.Array:
        return self.absolute / self.num_tokens


def experts_at_once(name: str, width: int, memory: int) -> int:
    """How many Hessians [width, width] of experts `memory` bytes hold. Raises ValueError where it is none."""
    size = 4 * width * width
    if size > memory:
        raise ValueError(
            f"{name}: the float32 Hessian of one expert's {width} inputs takes {size:,} bytes, and expert_memory is "
            f"{memory:,}"
        )
    return memory // size


def nothing_seen(count: int, width: int) -> InputStatistics:
    """Of `count` experts before the first token."""
    zeros = jnp.zeros((count, width), jnp.float32)
    return InputStatistics(jnp.zeros((count, width, width), jnp.float32), zeros, jnp.array(zeros), jnp.zeros(count))


def sum_over_experts(
    mlp: SparseMoE, rows: jax.Array, chosen: jax.Array, first: jax.Array, total: InputStatistics, *, is_inner: bool
) -> InputStatistics:
    """`total`, of some experts from `first` on, with these tokens.

    Tokens are sorted by expert and taken a block of one expert at a time, as where experts run, so that the work grows
    with the experts of a token and not with those of the layer. A block's size is independent of how many experts
    `total` is of, and so are the sums.

    Args:
      rows: [T, D], what the router reads. chosen: int32 [T, C], the experts of each.
      is_inner: of what down_proj reads instead, the activation of the expert's gate and up.
    """
    count, experts = total.num_tokens.shape[0], mlp.experts()
    local = (chosen - first).reshape(-1)
    local = jnp.where((local >= 0) & (local < count), local, count)
    counts = jnp.zeros(count, jnp.int32).at[local].add(1, mode="drop")
    starts = jnp.cumsum(counts) - counts
    size = tile_rows(chosen.size, experts.gate.shape[0])
    tokens = jnp.pad(jnp.argsort(local, stable=True) // chosen.shape[1], (0, size))
    ends = jnp.cumsum(-(-counts // size))

    def inner(block: jax.Array, expert: jax.Array) -> jax.Array:
        def project(stack, bias):
            found = matmul(block, lax.dynamic_index_in_dim(stack, expert, keepdims=False))
            return found if bias is None else found + bias[expert]

        return mlp.activation(project(experts.gate, experts.gate_bias), project(experts.up, experts.up_bias))

    def one(index: jax.Array, total: InputStatistics) -> InputStatistics:
        expert = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        row = (index - jnp.where(expert == 0, 0, ends[expert - 1])) * size
        block = rows[lax.dynamic_slice_in_dim(tokens, starts[expert] + row, size)]
        if is_inner:
            block = inner(block, first + expert)
        block = jnp.where((row + jnp.arange(size) < counts[expert])[:, None], block, 0)
        sizes = jnp.abs(block)
        return InputStatistics(
            total.hessian.at[expert].add(jnp.matmul(block.T, block, precision=lax.Precision.HIGHEST)),
            total.absolute.at[expert].add(sizes.sum(0)),
            total.largest.at[expert].max(sizes.max(0)),
            total.num_tokens,
        )

    found = lax.fori_loop(0, ends[-1], one, total)
    return found._replace(num_tokens=total.num_tokens + counts)
