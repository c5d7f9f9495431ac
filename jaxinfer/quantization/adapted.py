"""A weight with low-rank adapters, of which each row of x has one or none."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.quantization.array import Scheme
from jaxinfer.quantization.matmul import KINDS, WeightKind, matmul
from pallas_kernels.adapter_matmul import add_adapters


class AdapterStack(NamedTuple):
    """The adapters of one weight [K, N], each in a slot of its own; those of no slot change nothing.

    Attributes:
      a: [S, R, K]. b: [S, R, N], the scale in it. What is beyond an adapter's rank is 0.
      ranks: int32 [S], the largest rank that the adapter in each slot has, in this weight or in another one.
      columns: float32 [S, N], factors of the outputs (DoRA); None where no adapter has any.
      offset: float32 [S, N], added to the outputs; None likewise.
    """

    a: Any
    b: Any
    ranks: Any
    columns: Any = None
    offset: Any = None

    @property
    def num_slots(self) -> int:
        return self.a.shape[0]

    @property
    def max_rank(self) -> int:
        return self.a.shape[1]


@partial(jax.tree_util.register_dataclass, data_fields=["base", "stack", "ids"], meta_fields=[])
@dataclass(frozen=True)
class AdaptedWeight:
    """A weight [K, N] of any kind, and its adapters. A pytree.

    A row's product with adapter i > 0, in slot i - 1, is (x W + x A_i^T B_i) * columns_i + offset_i (Hu et al. 2021,
    arXiv 2106.09685; Liu et al. 2024, arXiv 2402.09353); with adapter 0 it has the bits of x W.

    Attributes:
      ids: int32 [T], the adapter of each row of x, or [], that of all rows; None for 0.
    """

    base: Any
    stack: AdapterStack
    ids: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def ndim(self) -> int:
        return self.base.ndim

    @property
    def scheme(self) -> Scheme | None:
        return getattr(self.base, "scheme", None)


def base_of(weight: Any) -> Any:
    """The weight without its adapters."""
    return weight.base if isinstance(weight, AdaptedWeight) else weight


def with_adapters(x: jax.Array, products: Sequence[jax.Array], weights: Sequence[Any]) -> list[jax.Array]:
    """The products [..., N] of x [..., K] with some weights, from those with `base_of` each."""
    results = list(products)
    own = [number for number, weight in enumerate(weights) if isinstance(weight, AdaptedWeight)]
    own = [number for number in own if weights[number].ids is not None]
    if not own:
        return results
    ids = weights[own[0]].ids
    ids = jnp.broadcast_to(ids if ids.ndim == 0 else ids.reshape(x.shape[:-1]), x.shape[:-1])
    stacks = [weights[number].stack for number in own]
    added = add_adapters(
        x,
        [results[number] for number in own],
        [(stack.a, stack.b) for stack in stacks],
        ids,
        stacks[0].ranks,
    )
    for number, stack, product in zip(own, stacks, added, strict=True):
        results[number] = _finished(product, stack, ids)
    return results


def _finished(product: jax.Array, stack: AdapterStack, ids: jax.Array) -> jax.Array:
    """A product [..., N] with the factors and the offsets of its rows' adapters."""
    if stack.columns is None and stack.offset is None:
        return product
    slots, changed = jnp.maximum(ids - 1, 0), product.astype(jnp.float32)
    if stack.columns is not None:
        changed = changed * stack.columns[slots]
    if stack.offset is not None:
        changed = changed + stack.offset[slots]
    return jnp.where((ids > 0)[..., None], changed.astype(product.dtype), product)


def _matmul(x: jax.Array, weight: AdaptedWeight, out_dtype, *, is_transposed: bool) -> jax.Array:
    if is_transposed:
        raise ValueError(f"a weight {list(weight.shape)} with adapters is not multiplied transposed")
    return with_adapters(x, [matmul(x, weight.base, out_dtype)], [weight])[0]


def _for_rows(weight: AdaptedWeight, adapters: jax.Array) -> AdaptedWeight:
    return replace(weight, ids=adapters)


KINDS[AdaptedWeight] = WeightKind(
    _matmul, for_rows=_for_rows, num_adapters=lambda weight: weight.stack.num_slots + 1, takes_stacks=True
)
