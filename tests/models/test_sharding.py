"""Models made to fit a mesh answer as before: the logits of resized parameters are those of the model's own."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from jaxinfer import parallel
from jaxinfer.models import (
    MeshFit,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    abstract_params,
    bind,
    fit_to_mesh,
    init_params,
    parameter_shardings,
)
from jaxinfer.models.sharding import PAD
from jaxinfer.quantization import quantize_params
from jaxinfer.quantization.tree import is_quantized

LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=72,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeConfig(rotary_dim=8),
    qkv_bias=True,
    mlp_bias=True,
)
ODD = replace(LLAMA, num_heads=9, num_kv_heads=3, intermediate_size=70, tie_word_embeddings=True, has_sinks=True)
LATENT = replace(
    LLAMA,
    architecture="DeepseekV3ForCausalLM",
    num_heads=6,
    num_kv_heads=1,
    head_dim=24,
    qkv_bias=False,
    mlp_bias=False,
    attention_scale=20**-0.5,
    moe=MoEConfig(8, 2, 24, (0,), shared_size=26),
    mla=MLAConfig(latent_size=16, rope_size=8, nope_size=12, value_size=10),
)
MODELS = {
    "fewer key-value heads": (LLAMA, (4, 8)),
    "one key-value head": (replace(LLAMA, num_kv_heads=1), (2, 8)),
    "odd heads, tied": (ODD, (2, 4, 8)),
    "groups that do not divide": (replace(LLAMA, num_heads=14, qk_norm=True, qk_norm_span="each_head"), (4,)),
    "norms over all heads": (replace(LLAMA, qk_norm=True, qk_norm_span="all_heads", norm="rms_float32"), (4,)),
    "no gate, biased head": (replace(LLAMA, is_mlp_gated=False, activation="gelu", lm_head_bias=True), (5,)),
    "latent attention": (LATENT, (4,)),
    "norms after rotation, xIELU": (
        replace(LLAMA, qk_norm=True, is_qk_norm_after_rotation=True, is_mlp_gated=False, activation="xielu"),
        (4, 5),
    ),
    "inputs scaled by the router": (
        replace(
            LLAMA,
            mlp_bias=False,
            qkv_clip=0.5,
            moe=MoEConfig(8, 2, 24, (0,), "sigmoid_of_chosen", scales_input=True, shared_size=26),
        ),
        (4,),
    ),
}
CASES = [(name, parts) for name, (_, sizes) in MODELS.items() for parts in sizes]


def mesh(parts: int, axis: str = parallel.MODEL) -> AbstractMesh:
    return AbstractMesh((parts,), (axis,))


def random_params(config: ModelConfig):
    random = np.random.default_rng(0)

    def fill(leaf):
        return jnp.asarray(random.standard_normal(leaf.shape, np.float32) * (0.2 if leaf.ndim > 1 else 1.0))

    return jax.tree.map(fill, abstract_params(config))


def resized(fit: MeshFit, params):
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: fit.resized(tuple(key.key for key in path), leaf), params, is_leaf=is_quantized
    )


@partial(jax.jit, static_argnums=0)
def logits(config: ModelConfig, params):
    from jaxinfer.cache import attend_as_stored

    tokens = jnp.arange(12)[None] * 7 % config.vocab_size
    decoder = bind(config, params)
    return decoder.logits(decoder(tokens, jnp.arange(12)[None], attend_as_stored("float32", None)))


@pytest.mark.parametrize(
    ("name", "parts"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_logits_stay(name, parts):
    config = MODELS[name][0]
    params = random_params(config)
    fit = fit_to_mesh(mesh(parts), config)
    found = resized(fit, params)
    np.testing.assert_allclose(logits(fit.config, found), logits(config, params), rtol=0, atol=2e-5)
    assert fit.changes
    # Every array falls into equal parts, by heads as the kernels take them.
    assert fit.config.num_heads % parts == 0
    assert config.mla is not None or fit.config.num_kv_heads % parts == 0
    shardings = parameter_shardings(mesh(parts), fit.config)
    jax.tree.map(lambda leaf, sharding: sharding.shard_shape(leaf.shape), found, shardings)


ODD_SIZES = {"intermediate_size": 90, "vocab_size": 101}
# Scales of outputs, of groups and of blocks, zeros and codebooks; all of them in even and odd sizes with --slow.
QUICK_RESIZED = [("int8", ODD_SIZES), ("int4-g32-asym", {}), ("nf4", ODD_SIZES), ("fp8-block", {})]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        pytest.param(*case, id=f"{'odd' if case[1] else 'even'}-{case[0]}", marks=marks)
        for case in itertools.product(
            ("int8", "w8a8", "int4-g32", "int4-g32-asym", "nf4", "fp8-block"), ({}, ODD_SIZES)
        )
        for marks in [() if case in QUICK_RESIZED else pytest.mark.slow]
    ],
)
def test_quantized_weights_stay_exactly(recipe, changes):
    config = replace(LLAMA, mlp_bias=False, **changes)
    params = quantize_params(random_params(config), recipe)
    fit = fit_to_mesh(mesh(4), config)
    found = resized(fit, params)
    layer, before = found["layers"]["0"], params["layers"]["0"]
    keys = before["attention"]["k_proj"]["weight"].dequantize()
    repeated = jnp.repeat(keys.reshape(32, 2, 8), 2, axis=1).reshape(32, -1)
    np.testing.assert_array_equal(layer["attention"]["k_proj"]["weight"].dequantize(), repeated)
    down = layer["mlp"]["down_proj"]["weight"].dequantize()
    np.testing.assert_array_equal(down[: config.intermediate_size], before["mlp"]["down_proj"]["weight"].dequantize())
    up = layer["mlp"]["up_proj"]["weight"].dequantize()
    assert not up[:, config.intermediate_size :].any()
    np.testing.assert_allclose(logits(fit.config, found), logits(config, params), rtol=0, atol=2e-5)


def test_quantized_inputs_between_which_heads_would_come_are_refused_by_name():
    config = replace(LLAMA, num_heads=14)
    fit = fit_to_mesh(mesh(4), config)
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.o_proj\.weight: .*num_heads=14"):
        resized(fit, quantize_params(random_params(config), "int8"))


def test_what_divides_stays_as_it_is():
    fit = fit_to_mesh(mesh(2), replace(LLAMA, vocab_size=96))
    assert (fit.config, fit.changes) == (fit.original, {})
    params = random_params(fit.config)
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, resized(fit, params), params))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "parts", "wanted"),
    [(32, 8, 16, (32, 16)), (8, 1, 8, (8, 8)), (9, 3, 2, (12, 4)), (14, 2, 4, (16, 4)), (14, 2, 8, (16, 8))],
)
def test_numbers_of_heads(heads, kv_heads, parts, wanted):
    config = replace(LLAMA, num_heads=heads, num_kv_heads=kv_heads)
    fit = fit_to_mesh(mesh(parts), config)
    assert (fit.config.num_heads, fit.config.num_kv_heads) == wanted
    # Every query head is there once, beside its own keys.
    places = fit.heads or tuple(range(heads))
    assert sorted(head for head in places if head != PAD) == list(range(heads))
    group = fit.config.num_heads // fit.config.num_kv_heads
    for place, head in enumerate(places):
        if head != PAD:
            assert fit.kv_heads[place // group] == head // (heads // kv_heads)


def test_what_cannot_fit_says_so():
    with pytest.raises(ValueError, match="num_experts=8 cannot be cut into 3 equal parts"):
        fit_to_mesh(mesh(3, parallel.EXPERT), LATENT)
    config = replace(ODD, qk_norm=True, qk_norm_span="all_heads")
    with pytest.raises(ValueError, match=r"num_heads=9 and num_kv_heads=3.*norms over all heads"):
        fit_to_mesh(mesh(2), config)


def test_layers_of_other_sizes_must_divide():
    config = replace(LLAMA, num_global_kv_heads=1, sliding_windows=(None,))
    assert fit_to_mesh(mesh(1), config).config == config
    with pytest.raises(ValueError, match=r"num_global_kv_heads=1 cannot be cut into 2 equal parts.* not padded"):
        fit_to_mesh(mesh(2), config)
    with pytest.raises(ValueError, match="intermediate_size=72 cannot be cut into 16 equal parts"):
        fit_to_mesh(mesh(16), replace(LLAMA, num_heads=16, num_kv_heads=16, has_double_mlp=True, kv_sources=(0,)))


def test_scales_of_a_cache_follow_the_heads():
    scales = np.array([[0.5, 2.0, 3.0]], np.float32)
    assert fit_to_mesh(mesh(2), ODD).kv_scales(scales).tolist() == [[0.5, 2.0, 3.0, 1.0]]
    assert fit_to_mesh(mesh(4), LLAMA).kv_scales(scales[:, :2]).tolist() == [[0.5, 0.5, 2.0, 2.0]]


@pytest.mark.slow
def test_parameters_lie_on_the_mesh_by_the_rules():
    devices = Mesh(np.array(jax.devices()[:2]), (parallel.MODEL,))
    config = replace(LLAMA, num_kv_heads=1)
    params = init_params(config, jax.random.key(0))
    placed = fit_to_mesh(devices, config).place(params)
    layer = placed["layers"]["0"]
    assert layer["attention"]["k_proj"]["weight"].addressable_shards[0].data.shape == (32, 8)
    assert layer["mlp"]["up_proj"]["weight"].addressable_shards[0].data.shape == (32, 36)
    assert placed["embed"].shape == (98, 32)
