"""The paged cache: its first layers, and moving tokens in all layers, on one device and on a mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxinfer import parallel
from jaxinfer.cache import PagedCache, init_paged_cache, init_state_cache, move_tokens
from jaxinfer.models import ModelConfig, RopeConfig
from tests.engine.test_states import MODELS

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    rope=RopeConfig(rotary_dim=8),
)
NUM_PAGES, PAGE = 7, 4
TABLE = np.array([[5, 2, 6], [1, 3, 0]], np.int32)
SOURCES = np.array([[2, 6, 7, 0], [5, 4, 1, 3]], np.int32)
DESTINATIONS = np.array([[3, 4, 11, 12], [4, 5, 1, 12]], np.int32)
move = jax.jit(move_tokens, static_argnames="mesh", donate_argnums=0)


def filled(dtype, layout, mesh=None) -> PagedCache:
    """A cache in which every number says where it is, as far as the dtype can."""
    rng = np.random.default_rng(0)

    def random(leaf):
        return jax.device_put(jnp.asarray(rng.integers(-9, 9, leaf.shape), leaf.dtype), leaf.sharding)

    return jax.tree.map(random, init_paged_cache(CONFIG, NUM_PAGES, PAGE, dtype, layout, mesh))


def tokens(leaf) -> np.ndarray:
    """[sequences, positions, ...] of a layer's array."""
    array = np.asarray(leaf, np.float32)
    array = array.swapaxes(1, 2)[:, :PAGE] if array.ndim == 3 else array
    return array[TABLE].reshape(len(TABLE), TABLE.shape[1] * PAGE, *array.shape[2:])


def check(before: PagedCache, after: PagedCache):
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        wanted = tokens(old)
        for sequence, (source, destination) in enumerate(zip(SOURCES, DESTINATIONS, strict=True)):
            is_real = destination < TABLE.shape[1] * PAGE
            wanted[sequence, destination[is_real]] = tokens(old)[sequence, source[is_real]]
        np.testing.assert_array_equal(tokens(new), wanted)
        # Page 4 is nobody's.
        np.testing.assert_array_equal(np.asarray(new[4], np.float32), np.asarray(old[4], np.float32))


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["separate", "interleaved"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_tokens_move_in_every_layer(dtype, layout):
    before = filled(dtype, layout)
    after = move(jax.tree.map(jnp.copy, before), TABLE, SOURCES, DESTINATIONS)
    assert before.page_size == PAGE
    check(before, after)
    stale = jax.tree.map(lambda layer, old: layer.at[TABLE[0, 0], 0].set(old[TABLE[0, 1], 0]), after, before)
    with pytest.raises(AssertionError):
        check(before, stale)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["separate", "interleaved"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_each_device_moves_what_it_holds(dtype, layout):
    mesh = Mesh(np.array(jax.devices()[:2]), (parallel.MODEL,))
    before = filled(dtype, layout, mesh)
    copied = jax.tree.map(jnp.copy, before)
    compiled = move.lower(copied, TABLE, SOURCES, DESTINATIONS, mesh=mesh).compile()
    after = compiled(copied, TABLE, SOURCES, DESTINATIONS)
    check(before, after)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, old.ndim)
    assert not any(word in compiled.as_text() for word in ("all-gather", "all-reduce", "all-to-all", "permute("))


def test_the_cache_is_updated_in_place():
    cache = filled("bfloat16", "interleaved")
    memory = move.lower(cache, TABLE, SOURCES, DESTINATIONS).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


def test_replaced_first_layers_leave_the_others_where_they_are():
    cache = filled("float32", "separate")
    part = PagedCache(tuple(jax.tree.map(lambda leaf: leaf + 1, pages) for pages in cache.first(2).layers))
    replaced = cache.with_first(part)
    wanted = PagedCache((*part.layers, cache.layers[2]))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a is b, replaced, wanted)))


def test_replaced_first_layers_leave_the_states_where_they_are():
    """What early layers draft reaches no state of the model: theirs are not a part of what is replaced."""
    states = init_state_cache(MODELS["delta"], 2, jnp.float32)
    cache = replace(filled("float32", "separate"), states=states)
    part = jax.tree.map(lambda leaf: leaf + 1, cache.first(2))
    assert len(part.states.layers) == 2
    replaced = cache.with_first(part)
    assert replaced.layers == (*part.layers, cache.layers[2])
    assert replaced.states is states
