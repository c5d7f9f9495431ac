"""Group-wise integer grids: scales and zeros of a weight, and rounding to the grid."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer.quantization.array import QuantizedArray, Scheme

_SEARCH_STEPS = 80  # of 1 % each, down to a fifth of the range
_SEARCH_NORM = 2.4


@dataclass(frozen=True)
class IntegerGrid:
    """Integer quantization of a weight [K, N].

    Attributes:
      bits: 2 to 8. group_size: inputs that share a scale; None for all inputs of an output.
      symmetric: the range is centred on 0; otherwise it is the range of the group, including 0.
      scale_dtype: dtype of the stored scales, to which they are rounded before values are computed.
    """

    bits: int
    group_size: int | None = 128
    symmetric: bool = True
    scale_dtype: str = "float32"

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits must be 2 to 8, got {self.bits}")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size must be positive or None, got {self.group_size}")

    @property
    def lowest(self) -> int:
        return -(2 ** (self.bits - 1))

    @property
    def highest(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def group(self, num_inputs: int) -> int:
        """Inputs per group of a weight with `num_inputs` inputs."""
        return min(self.group_size or num_inputs, num_inputs)

    def num_groups(self, num_inputs: int) -> int:
        return math.ceil(num_inputs / self.group(num_inputs))

    def scheme(self, num_inputs: int, activations=None) -> Scheme:
        """The scheme of a weight with `num_inputs` inputs."""
        return Scheme("int", self.bits, (self.group(num_inputs), 1), activations)


def in_groups(weight: jax.Array, size: int) -> jax.Array:
    """[K, N] as [ceil(K / size), size, N]; the last group is padded with zeros."""
    missing = -len(weight) % size
    return jnp.pad(weight, ((0, missing), (0, 0))).reshape(-1, size, weight.shape[1])


def find_params(
    groups: jax.Array, grid: IntegerGrid, *, search: bool = False, importance: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """float32 scales and zeros [G, N] of float32 groups [G, g, N].

    Symmetric: scale = 2 absmax / (2^bits - 1), zero 0, as Frantar et al. 2022 (GPTQ, quant.py) and compressed-tensors.
    Asymmetric: scale = (max - min) / (2^bits - 1), and the zero maps min to the lowest value. `search` shrinks the
    range in 80 steps to the least sum of |error|^2.4 (same file). With `importance` [G, g], which is at least 0, it
    searches for the least sum of importance * error^2.
    """
    lowest = jnp.minimum(groups.min(axis=1), 0)
    highest = jnp.maximum(groups.max(axis=1), 0)
    if grid.symmetric:
        highest = jnp.maximum(highest, -lowest)
        lowest = -highest

    def at(shrink):
        scales = (highest - lowest) * shrink / (2**grid.bits - 1)
        scales = jnp.where(scales > 0, scales, 1.0).astype(grid.scale_dtype).astype(jnp.float32)
        scales = jnp.where(scales > 0, scales, jnp.finfo(grid.scale_dtype).tiny.astype(jnp.float32))
        if grid.symmetric:
            return scales, jnp.zeros_like(scales)
        zeros = jnp.round(grid.lowest - lowest * shrink / scales)
        return scales, jnp.clip(zeros, grid.lowest, grid.highest)

    def loss(scales, zeros):
        scales, zeros = scales[:, None], zeros[:, None]
        errors = jnp.abs((to_values(groups, scales, zeros, grid) - zeros) * scales - groups)
        weighted = errors**_SEARCH_NORM if importance is None else importance[..., None] * errors**2
        return jnp.sum(weighted, axis=1)

    def try_step(step, best):
        scales, zeros = at(1 - step / 100)
        error = loss(scales, zeros)
        is_better = error < best[0]
        return tuple(
            jnp.where(is_better, new, old) for new, old in zip((error, scales, zeros), best, strict=True)
        )  # fmt: skip

    scales, zeros = at(1.0)
    if not search and importance is None:
        return scales, zeros
    return jax.lax.fori_loop(1, _SEARCH_STEPS, try_step, (loss(scales, zeros), scales, zeros))[1:]


def to_values(weight: jax.Array, scales: jax.Array, zeros: jax.Array, grid: IntegerGrid) -> jax.Array:
    """Integers, as float32, of weights with their scales and zeros, all of the same shape."""
    return jnp.clip(jnp.round(weight / scales) + zeros, grid.lowest, grid.highest)


def assemble(
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array,
    grid: IntegerGrid,
    *,
    permutation: jax.Array | None = None,
    activations=None,
) -> QuantizedArray:
    """A `QuantizedArray` of values [K, N], scales and zeros [G, N], all float32."""
    return QuantizedArray(
        values=values.astype(jnp.int4 if grid.bits <= 4 else jnp.int8),
        scales=scales.astype(grid.scale_dtype),
        zeros=None if grid.symmetric else zeros.astype(jnp.int8),
        permutation=permutation,
        scheme=grid.scheme(len(values), activations),
    )
