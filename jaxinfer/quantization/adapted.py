"""Weights with low-rank adapters, of which each row of x has one or none.

An adapter's changes are in a slot of arrays that have an axis of slots, S. Zeros change nothing. Rows have the number
of their adapter: 0 for none, else that of its slot + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.quantization.array import Scheme
from jaxinfer.quantization.matmul import KINDS, WeightKind, matmul
from pallas_kernels.adapter_matmul import add_adapters

_EXACT = lax.Precision.HIGHEST


class AdapterStack(NamedTuple):
    """The adapters of a weight [K, N].

    Attributes:
      a: [S, R, K]. b: [S, R, N], the scale in it. What is beyond an adapter's rank is 0. Of a stack of experts
        [S, E, R, K] and [S, E, R, N]; of a matrix for each head, which share A, b is [S, H, R, N].
      columns: float32 [S, N], factors of the outputs (DoRA) less 1; None where no adapter has any. Of a stack of
        experts [S, E, N], of a matrix for each head [S, H, N].
      offset: float32 [S, N], added to the outputs; None likewise, and of experts and heads.
    """

    a: Any
    b: Any
    columns: Any = None
    offset: Any = None


@dataclass(frozen=True)
class Adapted:
    """The common part of leaves of weights with adapters.

    Attributes:
      base: the weight, of any kind. stack: its adapters.
      ranks: int32 [S], the largest rank that the adapter in each slot has, in this weight or in another one.
      ids: int32 [T], the adapter of each row of x, or [], that of all rows; None for 0.
    """

    base: Any
    stack: Any
    ranks: Any
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

    def ids_of(self, shape: tuple[int, ...]) -> jax.Array:
        """The adapters of rows of that shape."""
        ids = jnp.asarray(self.ids)
        return jnp.broadcast_to(ids if ids.ndim == 0 else ids.reshape(shape), shape)


register = partial(jax.tree_util.register_dataclass, data_fields=["base", "stack", "ranks", "ids"], meta_fields=[])


@register
@dataclass(frozen=True)
class AdaptedWeight(Adapted):
    """A weight [K, N] with an `AdapterStack`. A pytree.

    A row's product with adapter i > 0, in slot i - 1, is (x W + x A_i^T B_i) * (1 + columns_i) + offset_i (Hu et al.
    2021, arXiv 2106.09685; Liu et al. 2024, arXiv 2402.09353); with adapter 0 it has the bits of x W.
    """


@register
@dataclass(frozen=True)
class AdaptedHeads(Adapted):
    """A matrix [H, K, N] for each head, with an `AdapterStack`. A pytree."""

    def scaled(self, x: jax.Array) -> jax.Array:
        """x [..., H, N] by the factors of the rows' adapters, which go before a product with transposed matrices."""
        if self.ids is None or self.stack.columns is None:
            return x
        return _by_columns(x, self.stack.columns, self.ids_of(x.shape[:-2]), 2)

    def add(self, product: jax.Array, x: jax.Array, *, is_transposed: bool) -> jax.Array:
        """The product [..., H, N] of x [..., H, K] with the matrices, or [..., H, K] of x [..., H, N] where they are
        transposed and x is `scaled`, with those of the rows' adapters."""
        if self.ids is None:
            return product
        ids = self.ids_of(x.shape[:-2])
        a, b = (array.astype(jnp.float32) for array in (self.stack.a, self.stack.b))
        first, second = (
            ("...hn,shrn->...hsr", "...hsr,srk->...hk")
            if is_transposed
            else (
                "...hk,srk->...hsr",
                "...hsr,shrn->...hn",
            )
        )
        one, other = (b, a) if is_transposed else (a, b)
        inner = jnp.einsum(first, x.astype(jnp.float32), one, precision=_EXACT)
        is_own = jnp.arange(a.shape[0]) == ids[..., None] - 1
        inner = jnp.where(is_own[..., None, :, None], inner, 0)
        changed = product.astype(jnp.float32) + jnp.einsum(second, inner, other, precision=_EXACT)
        changed = jnp.where((ids > 0)[..., None, None], changed.astype(product.dtype), product)
        columns = None if is_transposed else self.stack.columns
        return changed if columns is None else _by_columns(changed, columns, ids, 2)


@register
@dataclass(frozen=True)
class AdaptedExperts(Adapted):
    """A stack of experts [E, K, N] with an `AdapterStack`. A pytree."""

    def add(self, product: jax.Array, x: jax.Array, ids: jax.Array, expert: jax.Array) -> jax.Array:
        """The products [M, N] of rows x [M, K] with their experts' weights, with those of their adapters.

        ids: int32 [M] the adapter of each row. expert: int32 [M] or [], E for none.
        """
        a, b = self.stack.a, self.stack.b
        slots, count = a.shape[:2]
        # To the kernel an expert of an adapter is an adapter.
        own = jnp.where((ids > 0) & (expert < count), (ids - 1) * count + expert + 1, 0)
        pair = a.reshape(slots * count, *a.shape[2:]), b.reshape(slots * count, *b.shape[2:])
        (changed,) = add_adapters(x, [product], [pair], own, jnp.repeat(self.ranks, count))
        columns = self.stack.columns
        return changed if columns is None else _by_columns(changed, columns.reshape(slots * count, -1), own, 1)


def is_adapted(leaf: Any) -> bool:
    return isinstance(leaf, Adapted)


def base_of(weight: Any) -> Any:
    """The weight without its adapters."""
    return weight.base if is_adapted(weight) else weight


def without_adapters(params: Any) -> Any:
    """The parameters with each weight as it is without its adapters."""
    return jax.tree.map(base_of, params, is_leaf=is_adapted)


def with_adapters(x: jax.Array, products: Sequence[jax.Array], weights: Sequence[Any]) -> list[jax.Array]:
    """The products [..., N] of x [..., K] with some weights, from those with `base_of` each."""
    results = list(products)
    own = [number for number, weight in enumerate(weights) if isinstance(weight, AdaptedWeight)]
    own = [number for number in own if weights[number].ids is not None]
    if not own:
        return results
    first = weights[own[0]]
    ids, stacks = first.ids_of(x.shape[:-1]), [weights[number].stack for number in own]
    pairs = [(stack.a, stack.b) for stack in stacks]
    added = add_adapters(x, [results[number] for number in own], pairs, ids, first.ranks)
    for number, stack, product in zip(own, stacks, added, strict=True):
        results[number] = _finished(product, stack, ids)
    return results


def _finished(product: jax.Array, stack: AdapterStack, ids: jax.Array) -> jax.Array:
    """A product [..., N] with the factors and the offsets of its rows' adapters."""
    if stack.columns is None and stack.offset is None:
        return product
    slots, changed = jnp.maximum(ids - 1, 0), product.astype(jnp.float32)
    if stack.columns is not None:
        changed = changed + changed * stack.columns[slots]
    if stack.offset is not None:
        changed = changed + stack.offset[slots]
    return jnp.where((ids > 0)[..., None], changed.astype(product.dtype), product)


def _by_columns(product: jax.Array, columns: jax.Array, ids: jax.Array, num_axes: int) -> jax.Array:
    """A product, whose last `num_axes` axes are those of factors less 1, by the factors of its rows' adapters."""
    changed = product.astype(jnp.float32)
    changed = changed + changed * columns[jnp.maximum(ids - 1, 0)]
    is_own = (ids > 0).reshape(*ids.shape, *(1,) * num_axes)
    return jnp.where(is_own, changed.astype(product.dtype), product)


def _matmul(x: jax.Array, weight: AdaptedWeight, out_dtype, *, is_transposed: bool = False) -> jax.Array:
    if is_transposed:
        raise ValueError(f"a weight {list(weight.shape)} with adapters is not multiplied transposed")
    return with_adapters(x, [matmul(x, weight.base, out_dtype)], [weight])[0]


def _not_alone(*_: Any, **__: Any) -> Any:
    raise ValueError("the weights of heads and experts are multiplied by their layers")


def kind(product: Any, **more: Any) -> WeightKind:
    """The kind of leaves of a type derived from `Adapted`."""
    return WeightKind(
        product,
        for_rows=lambda weight, adapters: replace(weight, ids=adapters),
        num_adapters=lambda weight: weight.ranks.shape[0] + 1,
        takes_stacks=True,
        **more,
    )


KINDS |= {AdaptedWeight: kind(_matmul), AdaptedHeads: kind(_not_alone), AdaptedExperts: kind(_not_alone)}
