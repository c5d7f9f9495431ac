"""Calls of adapters with random arrays, and what they give in float64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.adapter_matmul import add_adapters


@dataclass(frozen=True)
class AdapterCall:
    """The arguments of one call."""

    x: Any
    products: list[Any]
    stacks: list[tuple[Any, Any]]
    ids: np.ndarray
    ranks: np.ndarray

    def results(self, implementation: str, dtype: Any = None) -> list[np.ndarray]:
        """Floating-point numbers are given in `dtype`, those of the products as they are without one."""
        x, products, stacks = jax.tree.map(jnp.asarray, (self.x, self.products, self.stacks))
        if dtype is not None:
            x, products, stacks = jax.tree.map(lambda array: array.astype(dtype), (x, products, stacks))
        found = _add(x, products, stacks, jnp.asarray(self.ids), jnp.asarray(self.ranks), implementation=implementation)
        assert [(a.shape, a.dtype) for a in found] == [(a.shape, a.dtype) for a in products]
        return [np.asarray(array) for array in found]

    def expected(self) -> list[np.ndarray]:
        """The results in float64."""
        results = []
        for product, (a, b) in zip(self.products, self.stacks, strict=True):
            total = np.array(product, np.float64)
            for place, own in np.ndenumerate(self.ids):
                if own:
                    rank = self.ranks[own - 1]
                    hidden = np.asarray(self.x[place], np.float64) @ np.asarray(a[own - 1, :rank], np.float64).T
                    total[place] += hidden @ np.asarray(b[own - 1, :rank], np.float64)
            results.append(total)
        return results

    def rows(self, which: Any) -> "AdapterCall":
        """The call of some rows."""
        products = [product[which] for product in self.products]
        return replace(self, x=self.x[which], products=products, ids=self.ids[which])

    def with_slots(self, slots: Sequence[int], num_slots: int) -> "AdapterCall":
        """This call with the adapters in other slots of `num_slots`, and other adapters in the rest."""
        ranks = np.full(num_slots, self.stacks[0][0].shape[1], np.int32)
        ranks[list(slots)] = self.ranks
        stacks = []
        for pair in self.stacks:
            moved = [normal(len(slots), num_slots, *stack.shape[1:]) for stack in pair]
            for to, stack in zip(moved, pair, strict=True):
                to[list(slots)] = stack
            stacks.append(tuple(moved))
        return replace(
            self, stacks=stacks, ids=np.array([0, *(slot + 1 for slot in slots)], np.int32)[self.ids], ranks=ranks
        )


_add = partial(jax.jit, static_argnames="implementation")(add_adapters)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def make(ids: Any, inputs: int, outputs: Sequence[int], ranks: Sequence[int], most: int) -> AdapterCall:
    """A call for rows with these adapters; `ranks` of the adapters, `most` of the stacks."""
    ids = np.asarray(ids, np.int32)
    stacks = []
    for index, count in enumerate(outputs):
        a, b = normal(1 + index, len(ranks), most, inputs), normal(9 + index, len(ranks), most, count)
        for slot, rank in enumerate(ranks):
            a[slot, rank:], b[slot, rank:] = 0, 0
        stacks.append((a, b))
    products = [normal(20 + index, *ids.shape, count) for index, count in enumerate(outputs)]
    return AdapterCall(normal(0, *ids.shape, inputs), products, stacks, ids, np.array(ranks, np.int32))
