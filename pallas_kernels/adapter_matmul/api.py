"""Entry points of products with low-rank adapters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Implementations, KernelChoice
from pallas_kernels.platform import current_platform

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

AnyArray: TypeAlias = jax.Array | jax.ShapeDtypeStruct
IMPLEMENTATIONS = ("xla", "numba_cpu")
_BY_PLATFORM = {"tpu": ("xla",), "gpu": ("xla",), "cpu": ("numba_cpu", "xla")}
_MODULES = Implementations("pallas_kernels.adapter_matmul", IMPLEMENTATIONS, _BY_PLATFORM)


@dataclass(frozen=True)
class AdapterSpec:
    """Static facts of one call.

    rows, inputs: x is [rows, inputs].
    outputs: of each weight.
    slots, rank: the stacks are [slots, rank, inputs] and [slots, rank, outputs].
    dtypes: of x, and of all products and stacks, each name once.
    """

    rows: int
    inputs: int
    outputs: tuple[int, ...]
    slots: int
    rank: int
    dtypes: tuple[str, tuple[str, ...]]


def add_adapters(
    x: Float[Array, "*rows K"],
    products: Sequence[Float[Array, "*rows _"]],
    stacks: Sequence[tuple[Float[Array, "S R K"], Float[Array, "S R _"]]],
    ids: Int32[Array, "*rows"],
    ranks: Int32[Array, " S"],
    *,
    implementation: str | None = None,
) -> list[Array]:
    """products[t] + x[t] @ A[ids[t] - 1].T @ B[ids[t] - 1] for each of several weights of the same inputs.

    Sums are float32 and rounded once, to the product's dtype; a row without an adapter has the bits of its product.
    A row's result does not depend, to the bit, on the other rows and on what other slots hold; with "numba_cpu" neither
    on how many rows and slots there are and on which slot its adapter is in.

    Args:
      products: x [..., K] @ weight [K, N] of each weight, in float32 or a 16-bit float.
      stacks: A [S, R, K] and B [S, R, N] of each weight for the adapters in S slots, the scale included in B, and zeros
        from an adapter's rank on. Numbers must be finite: where S * R is small, "xla" multiplies those of all slots
        that rows use by zeros, and on a GPU those of all slots.
      ids: 0 for a row without an adapter, else 1 + its slot.
      ranks: of the adapter in each slot, at most R. What is beyond is not read, or not much of it.
      implementation: "xla" or "numba_cpu" (float32 on a CPU; needs Numba); None selects by platform and dtypes.

    Raises:
      ValueError: shapes that do not fit together, an unknown implementation.
      NotImplementedError: the named implementation cannot run the call; the message has the reason.
    """
    spec = make_spec(x, products, stacks)
    if ids.shape != x.shape[:-1] or ranks.shape != (spec.slots,):
        raise ValueError(f"ids {ids.shape} and ranks {ranks.shape} of x {x.shape} and {spec.slots} slots")
    name = _MODULES.take(spec, current_platform(), implementation)
    if 0 in (spec.rows, spec.inputs, spec.slots, spec.rank) or not products:
        return list(products)
    rows = [product.reshape(spec.rows, -1) for product in products]
    sums = _MODULES[name].add(x.reshape(spec.rows, -1), rows, stacks, ids.reshape(-1), ranks, spec)
    return [rows.reshape(product.shape) for rows, product in zip(sums, products, strict=True)]


def make_spec(x: AnyArray, products: Sequence[AnyArray], stacks: Sequence[tuple[AnyArray, AnyArray]]) -> AdapterSpec:
    """Raises ValueError for shapes that do not fit together."""
    slots, rank = stacks[0][0].shape[:2] if stacks else (0, 0)
    inputs, outputs = x.shape[-1], tuple(product.shape[-1] for product in products)
    if len(products) != len(stacks):
        raise ValueError(f"{len(products)} products and {len(stacks)} pairs of stacks")
    for product, pair in zip(products, stacks, strict=True):
        expected = (slots, rank, inputs), (slots, rank, product.shape[-1])
        if product.shape[:-1] != x.shape[:-1] or tuple(stack.shape for stack in pair) != expected:
            shapes = [array.shape for array in (x, product, *pair)]
            raise ValueError("x {}, a product {}, A {} and B {} do not fit together".format(*shapes))
    others = {jnp.dtype(array.dtype).name for array in (*products, *(stack for pair in stacks for stack in pair))}
    dtypes = jnp.dtype(x.dtype).name, tuple(sorted(others))
    return AdapterSpec(math.prod(x.shape[:-1]), inputs, outputs, slots, rank, dtypes)


def choose(spec: AdapterSpec, implementation: str | None = None, *, platform: str | None = None) -> KernelChoice:
    """The implementation that `add_adapters` selects, and the reasons against the others."""
    return _MODULES.choose(spec, platform or current_platform(), implementation)
