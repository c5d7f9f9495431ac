"""Rows in one array of integers: every bit comes back."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling.packed import pack, unpack

ROWS = {
    "floats": jnp.array([[-0.0, jnp.inf], [jnp.nan, 1e-45], [3.5, -jnp.inf]], jnp.float32),
    "integers": jnp.array([-1, 2**31 - 1, -(2**31)], jnp.int32),
    "flags": jnp.array([True, False, True]),
}


def test_every_bit_comes_back():
    packed = pack(ROWS)
    assert (packed.shape, packed.dtype) == ((3, 4), jnp.int32)
    found = unpack(packed, jax.eval_shape(lambda: ROWS))
    for name, rows in ROWS.items():
        assert found[name].dtype == rows.dtype
        np.testing.assert_array_equal(np.asarray(found[name]).view(np.uint8), np.asarray(rows).view(np.uint8))


def test_of_several_steps():
    found = unpack(jnp.stack([pack(ROWS), pack(ROWS)]), ROWS)
    assert jax.tree.map(jnp.shape, found) == {"floats": (2, 3, 2), "integers": (2, 3), "flags": (2, 3)}
    np.testing.assert_array_equal(found["integers"][1], ROWS["integers"])
