"""The rules of sharding: every parameter has one, and what cannot be cut says so."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jaxinfer import parallel
from jaxinfer.cache import abstract_paged_cache
from jaxinfer.models import ModelConfig, RopeConfig, abstract_params, parameter_shardings

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    rope=RopeConfig(rotary_dim=8),
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=True,
)


def mesh(size: int, axis: str = parallel.MODEL) -> AbstractMesh:
    return AbstractMesh((size,), (axis,))


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_a_sharding_that_fits_it(tied):
    config = replace(CONFIG, tie_word_embeddings=tied)
    params = abstract_params(config)
    shardings = parameter_shardings(mesh(4), config)
    assert jax.tree.structure(params) == jax.tree.structure(shardings)
    locals_ = jax.tree.map(lambda leaf, sharding: sharding.shard_shape(leaf.shape), params, shardings)
    assert locals_["embed"] == (24, 32)
    layer = locals_["layers"]["0"]
    assert layer["attention"]["q_proj"] == {"weight": (32, 16), "bias": (16,)}
    assert layer["attention"]["k_proj"] == {"weight": (32, 8), "bias": (8,)}
    assert layer["attention"]["o_proj"] == {"weight": (16, 32), "bias": (32,)}
    assert layer["attention"]["q_norm"] == {"weight": (8,)}
    assert layer["mlp"]["down_proj"] == {"weight": (16, 32), "bias": (32,)}
    assert ("lm_head" in locals_) is not tied


def test_a_mesh_without_the_axis_cuts_nothing():
    shardings = parameter_shardings(mesh(3, "data"), CONFIG)
    assert all(not any(sharding.spec) for sharding in jax.tree.leaves(shardings))


@pytest.mark.parametrize(("size", "message"), [(3, "num_heads=8.* 3 equal parts"), (8, "num_kv_heads=4.* 8 equal")])
def test_what_cannot_be_cut_says_so(size, message):
    with pytest.raises(ValueError, match=message):
        parameter_shardings(mesh(size), replace(CONFIG, vocab_size=24 * size))
    with pytest.raises(ValueError, match=message):
        abstract_paged_cache(replace(CONFIG, vocab_size=24 * size), 3, 4, jnp.float32, "separate", mesh(size))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("layout", ["separate", "interleaved"])
def test_each_device_holds_the_pages_of_its_own_heads(layout, dtype):
    cut = abstract_paged_cache(CONFIG, 3, 4, dtype, layout, mesh(2)).layers[0]
    of_half = abstract_paged_cache(replace(CONFIG, num_heads=4, num_kv_heads=2), 3, 4, dtype, layout).layers[0]
    held = jax.tree.map(lambda leaf: leaf.sharding.shard_shape(leaf.shape), cut)
    assert held == jax.tree.map(lambda leaf: leaf.shape, of_half)
    for whole, half in zip(jax.tree.leaves(cut), jax.tree.leaves(of_half), strict=True):
        cut_axes = [axis for axis in range(half.ndim) if whole.shape[axis] != half.shape[axis]]
        assert cut_axes == ([2] if half.ndim > 3 else [1])  # heads: of keys and values, and of scales
    assert parallel.local_shapes(mesh(2), cut, parallel.page_specs(mesh(2), cut)) == of_half


def test_specs_follow_the_names():
    assert parallel.spec(mesh(2), ("hidden", "ffn")) == PartitionSpec(None, parallel.MODEL)
    assert parallel.spec(mesh(2), (None, "vocab")) == PartitionSpec(None, parallel.MODEL)
    with pytest.raises(KeyError, match="depth"):
        parallel.spec(mesh(2), ("depth",))
