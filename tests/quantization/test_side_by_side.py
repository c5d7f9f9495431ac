"""Weights of one input in one array: the same products, the same tree for people, on one device and on a mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jaxinfer import loading, parallel
from jaxinfer.engine.abstract_work import placed_params
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.weights import ModelWeights
from jaxinfer.models import abstract_params, init_params
from jaxinfer.quantization import quantize, quantize_params
from jaxinfer.quantization.matmul import matmul
from jaxinfer.quantization.on_device import unpack_params
from jaxinfer.quantization.side_by_side import (
    InFirst,
    SideBySide,
    _by_shard,
    join,
    products,
    separate,
    weight_at,
)
from jaxinfer.quantization.tree import describe, num_bytes, num_parameters
from tests.engine.sequences import make_sequence
from tests.tiny import OPTIONS, TINY

SIZES = {"q_proj": 128, "k_proj": 64, "v_proj": 64}


def attention(recipe: str | None, sizes=SIZES):
    keys = jax.random.split(jax.random.key(0), len(sizes))
    weights = {name: jax.random.normal(key, (256, size)) for key, (name, size) in zip(keys, sizes.items(), strict=True)}
    weights = weights if recipe is None else {name: quantize(weight, recipe) for name, weight in weights.items()}
    return {name: {"weight": weight} for name, weight in weights.items()}


def same(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    return True


@pytest.mark.parametrize("recipe", [None, "int8", "int4-g64", "int4-g64-asym", "fp8"])
def test_products_and_parts_are_those_of_each_weight(recipe):
    apart = attention(recipe)
    joined = join(apart)
    first, *others = (joined[name]["weight"] for name in SIZES)
    assert isinstance(first, SideBySide)
    assert all(isinstance(other, InFirst) for other in others)
    assert [weight.shape for weight in (first, *others)] == [(256, size) for size in SIZES.values()]
    assert same(separate(joined), apart)
    x = jax.random.normal(jax.random.key(1), (3, 256))
    for found, name in zip(products(x, [first, *others]), SIZES, strict=True):
        np.testing.assert_allclose(found, matmul(x, apart[name]["weight"]), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "tree",
    [
        attention("nf4"),  # a codebook is of a whole weight
        {**attention(None), "k_proj": attention("int8")["k_proj"], "v_proj": attention("int4-g64")["v_proj"]},
        {**attention(None), "k_proj": {"weight": jnp.zeros((256, 64), jnp.bfloat16)}},
        {"q_proj": attention(None)["q_proj"]},
    ],
)
def test_weights_that_differ_stay_apart(tree):
    assert same(join(tree), tree)


def test_only_what_is_read_together_is_joined():
    """Stacks of experts have the names of an MLP's weights; a layer without values of its own has two weights."""
    experts = {name: {"weight": jnp.zeros((4, 8, 8))} for name in ("gate_proj", "up_proj")}
    assert same(join(experts), experts)
    found = join(attention(None, {"q_proj": 64, "k_proj": 32}))
    assert found["q_proj"]["weight"].sizes == (64, 32)


@pytest.mark.parametrize("recipe", [None, "int4-g64"])
def test_shards_hold_their_parts_of_every_weight(recipe):
    arrays = [attention(recipe)[name]["weight"] for name in SIZES]
    whole = jax.tree.map(lambda *parts: _by_shard(2, parts), *arrays)
    first = SideBySide(whole, tuple(SIZES.values()), num_shards=2)
    for number, weight in enumerate(arrays):
        assert same(first.part(number), weight)
    half = jax.tree.map(lambda array: array[:, : array.shape[1] // 2], whole)
    own = jax.tree.map(lambda *parts: jnp.concatenate([part[:, : part.shape[1] // 2] for part in parts], 1), *arrays)
    assert same(half, own)
    x = jax.random.normal(jax.random.key(1), (3, 256))
    for found, weight in zip(first.split(matmul(x, whole)), arrays, strict=True):
        np.testing.assert_allclose(found, matmul(x, weight), rtol=1e-5, atol=1e-4)


def test_shapes_of_a_mesh_say_how_many_shards():
    mesh = AbstractMesh((4,), (parallel.MODEL,))
    config = replace(TINY, num_kv_heads=4, vocab_size=96)
    params = placed_params(config, abstract_params(config), mesh, "gpu")
    attended = params["layers"]["0"]["attention"]
    first = attended["q_proj"]["weight"]
    assert (first.num_shards, first.whole.shape) == (4, (32, 96))
    assert first.whole.sharding.spec == PartitionSpec(None, parallel.MODEL)
    assert num_bytes(params) == num_bytes(placed_params(config, abstract_params(config), mesh))
    assert same_shapes(separate(params), placed_params(config, abstract_params(config), mesh))


def same_shapes(tree, other):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), other
    )


@pytest.fixture(scope="module")
def params():
    params = init_params(TINY, jax.random.key(0))
    return jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("recipe", [None, "int8"])
def test_a_model_answers_alike(params, recipe):
    params = params if recipe is None else quantize_params(params, recipe)
    joined = join(params)
    assert num_bytes(joined) == num_bytes(params)
    assert num_parameters(joined) == num_parameters(params)
    assert describe(joined) == describe(params)
    assert same(unpack_params(joined), params)
    answers = []
    for tree in (params, joined):
        engine = Engine(TINY, tree, EngineOptions(**OPTIONS))
        engine.add(sequence := make_sequence([1, 2, 3], max_tokens=12))
        while engine.has_work:
            engine.step()
        answers.append(list(sequence.tokens))
        engine.close()
    assert answers[0] == answers[1]


def test_a_gpu_s_weights_lie_side_by_side_and_are_freed_and_replaced(params, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    mine = jax.tree.map(jnp.copy, params)
    weights = ModelWeights(loading._laid_out(mine, None, donate=True))
    attended = mine["layers"]["0"]["attention"]
    assert attended["q_proj"]["weight"].is_deleted()
    assert not attended["o_proj"]["weight"].is_deleted()
    assert isinstance(weights.params["layers"]["0"]["mlp"]["gate_proj"]["weight"], SideBySide)
    paths = [[key.key for key in path] for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    assert all(np.array_equal(weight_at(weights.params, path), weight_at(params, path)) for path in paths)
    other = jax.tree.map(lambda leaf: leaf + 1, params)
    weights.replace(other)
    assert same(separate(weights.params), other)
    other["layers"]["1"]["attention"]["v_proj"]["weight"] = jnp.zeros((32, 17))
    with pytest.raises(ValueError, match=r"cannot be replaced: layers\.1\.attention\.v_proj\.weight"):
        weights.replace(other)


def test_a_weight_that_lies_beside_others_is_not_multiplied_alone():
    joined = join(attention(None))
    for name in SIZES:
        with pytest.raises(ValueError, match="lies beside others"):
            matmul(jnp.zeros((1, 256)), joined[name]["weight"])
