"""States of recurrent layers: their bytes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.cache import abstract_paged_cache, abstract_state_cache, attend_ragged, deferred_bytes
from jaxinfer.models import abstract_params, bind
from jaxinfer.quantization import quantize_params
from tests.engine.test_state_drafts import ALL


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", [None, "int8", "nf4-dq"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ALL)
def test_deferred_bytes_are_those_of_the_arrays(kind, dtype, recipe):
    """Of a pass over three rows of each of two sequences."""
    config = ALL[kind]
    params = abstract_params(config, dtype)
    if recipe is not None:
        params = jax.eval_shape(lambda params: quantize_params(params, recipe), params)
    cache = abstract_paged_cache(config, 4, 8, dtype, "separate")
    cache = replace(cache, states=abstract_state_cache(config, 2, dtype))

    def deferred(params, cache, tokens, table):
        starts, lengths = jnp.array([0, 3]), jnp.array([3, 3])
        attend = attend_ragged(cache, (table,), starts, lengths, lengths, max_query_length=3, max_deferred=3)
        bind(config, params)(tokens, jnp.arange(6) % 3, attend)
        return [(layer.conv_inputs, layer.tokens) for layer in attend.states.layers if layer is not None]

    arguments = jax.ShapeDtypeStruct((6,), jnp.int32), jax.ShapeDtypeStruct((2, 1), jnp.int32)
    arrays = jax.tree.leaves(jax.eval_shape(deferred, params, cache, *arguments))
    assert {len(leaf) for leaf in arrays} == {6}
    assert 6 * deferred_bytes(config, params) == sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)


def test_models_without_states_defer_nothing():
    config = replace(ALL["delta"], layer_kinds=(), delta=None)
    assert deferred_bytes(config, abstract_params(config)) == 0
