"""The grid of a group-wise integer scheme: scales and zeros of a weight, and its values on them."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer.quantization.array import QuantizedArray, Scheme

_SEARCH_STEPS = 80  # of 1 % each, down to a fifth of the range
_SEARCH_NORM = 2.4


@dataclass(frozen=True)
class IntegerGrid:
    """How a weight [K, N] becomes integers.

    Attributes:
      bits: 2 to 8. group_size: inputs that share a scale; None for all of an output's.
      symmetric: the range is centred on 0; otherwise it is what the group holds, 0 included.
      scale_dtype: scales are rounded to it before values are chosen, so that what is stored is what was optimised.
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
        """Inputs of a group of a weight with that many inputs."""
        return min(self.group_size or num_inputs, num_inputs)

    def num_groups(self, num_inputs: int) -> int:
        return math.ceil(num_inputs / self.group(num_inputs))

    def scheme(self, num_inputs: int, activations=None) -> Scheme:
        """The scheme of a weight with that many inputs."""
        return Scheme("int", self.bits, (self.group(num_inputs), 1), activations)


def in_groups(weight: jax.Array, size: int) -> jax.Array:
    """[K, N] as [ceil(K / size), size, N]; the last group is filled up with zeros."""
    missing = -len(weight) % size
    return jnp.pad(weight, ((0, missing), (0, 0))).reshape(-1, size, weight.shape[1])


def find_params(
    groups: jax.Array, grid: IntegerGrid, *, search: bool = False, importance: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """float32 scales and zeros [G, N] of float32 groups [G, g, N].

    Symmetric: scale = 2 absmax / (2^bits - 1), zero 0, the rule of Frantar et al. 2022 (GPTQ, quant.py) and of
    compressed-tensors; asymmetric: scale = (max - min) / (2^bits - 1), the zero is where min falls. With `search`,
    the range is shrunk in 80 steps to where the sum of |error|^2.4 is least (same file), each input counted by its
    `importance` [G, g].
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
        errors = jnp.abs((to_values(groups, scales, zeros, grid) - zeros) * scales - groups) ** _SEARCH_NORM
        return jnp.sum(errors if importance is None else errors * importance[..., None], axis=1)

    def try_step(step, best):
        scales, zeros = at(1 - step / 100)
        found = loss(scales, zeros)
        is_better = found < best[0]
        return tuple(
            jnp.where(is_better, new, old) for new, old in zip((found, scales, zeros), best, strict=True)
        )  # fmt: skip

    scales, zeros = at(1.0)
    if not search:
        return scales, zeros
    return jax.lax.fori_loop(1, _SEARCH_STEPS, try_step, (loss(scales, zeros), scales, zeros))[1:]


def to_values(weight: jax.Array, scales: jax.Array, zeros: jax.Array, grid: IntegerGrid) -> jax.Array:
    """Integers, as float32, of weights with their scales and zeros, all of one shape."""
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
    """The leaf of values [K, N], scales and zeros [G, N], all float32."""
    return QuantizedArray(
        values=values.astype(jnp.int4 if grid.bits <= 4 else jnp.int8),
        scales=scales.astype(grid.scale_dtype),
        zeros=None if grid.symmetric else zeros.astype(jnp.int8),
        permutation=permutation,
        scheme=grid.scheme(len(values), activations),
    )
