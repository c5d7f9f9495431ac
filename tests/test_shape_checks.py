"""The checker of shape annotations: what it accepts, and that a wrong annotation of the product would be noticed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import copy_pages, flash_attention
from tests.shape_checks import check_shapes

if TYPE_CHECKING:
    from elsewhere import Known  # type: ignore[import-not-found]
    from jaxtyping import Array, Float, Int32


def product(
    x: Float[Array, "T D"], w: Float[Array, "D F"] | Known, ids: Int32[Array, " T"] | None = None
) -> Float[Array, "T F"] | tuple[Float[Array, "T F"], Int32[Array, " T"]]:
    return (x @ w, ids) if ids is not None else x @ w


def transposed(x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    return x.T


def test_right_shapes_pass_and_wrong_ones_are_named():
    x, w, ids = jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.arange(2)
    checked = check_shapes(product)
    assert checked(x, w).shape == (2, 4)
    assert checked(x, w, ids)[0].shape == jax.jit(checked)(x, w=w, ids=ids)[0].shape == (2, 4)
    for wrong in (jnp.arange(3), jnp.ones(2)):
        with pytest.raises(TypeError, match=r"product: ids is not Int32.*x float32 \(2, 3\)"):
            checked(x, w, wrong)
    with pytest.raises(TypeError, match="transposed: return"):
        check_shapes(transposed)(x)
    assert check_shapes(test_the_product_is_checked_and_its_own_errors_come_first).__name__.startswith("test")


def test_the_product_is_checked_and_its_own_errors_come_first():
    assert copy_pages.__wrapped__  # type: ignore[attr-defined]
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(TypeError, match=r"copy_pages: count is not Int32"):
        copy_pages(jnp.ones((4, 1)), jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.int32), jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="batch and head_dim must agree"):
        flash_attention(q, q[..., :4], q[..., :4])
