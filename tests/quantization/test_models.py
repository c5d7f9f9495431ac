"""Models with quantized weights: everything that takes parameters takes them, or says why not."""

import operator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams, parallel
from jaxinfer.cache import attend_without_cache
from jaxinfer.models import (
    ModelConfig,
    RopeConfig,
    abstract_params,
    bind,
    bind_layer,
    compute_dtype,
    parameter_shardings,
)
from jaxinfer.quantization import QuantizedArray, Recipe, quantize_params
from jaxinfer.quantization.on_device import float32_copies, unpack_params
from jaxinfer.quantization.tree import describe, is_packed, is_quantized, num_bytes, num_parameters, weights
from jaxinfer.training.distill import pruned_draft
from jaxinfer.training.loop import TrainOptions, train
from tests.random_params import random_params

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope=RopeConfig(rotary_dim=16),
    max_position_embeddings=128,
)
PROMPTS = [[5, 3, 9, 11], list(range(40)), [95]]
SAMPLING = SamplingParams(max_tokens=12, seed=1, logprobs=0)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, random_params(CONFIG))


@jax.jit
def dequantized(params):
    return jax.tree.map(lambda leaf: leaf.dequantize() if is_quantized(leaf) else leaf, params, is_leaf=is_quantized)


def answers(params, config=CONFIG, **options):
    with LLM((config, params), max_seqs=2, max_model_len=64, deterministic=True, **options) as llm:
        outputs = llm.generate(PROMPTS, SAMPLING, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs], str(llm.explain())


def hidden_states(params, config=CONFIG):
    tokens = jnp.asarray(PROMPTS[1])[None]
    return bind(config, params)(tokens, jnp.arange(40)[None], attend_without_cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    ["int4-g32-asym", *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in ("int8", "nf4-dq"))],
)
def test_a_model_computes_what_the_dequantized_one_does(params, recipe):
    quantized = quantize_params(params, recipe)
    np.testing.assert_allclose(
        jax.jit(hidden_states)(quantized), jax.jit(hidden_states)(dequantized(quantized)), atol=1e-3
    )


@pytest.mark.slow
def test_answers_are_those_of_the_dequantized_model(params, monkeypatch):
    monkeypatch.setattr("jaxinfer.quantization.on_device.float32_copies.__defaults__", (0,))
    monkeypatch.setattr("pallas_kernels.cpu_calls.unsupported", lambda platform: "left out in this test")
    quantized = quantize_params(params, "int4-g32-asym")
    found, explanation = answers(quantized)
    assert found == answers(dequantized(quantized))[0]
    assert "0 of 21 weights, 0.0 MiB of at most 0 MiB" in explanation
    assert "by int4, 32 inputs a scale, with zeros: xla, weights to float32, then product" in explanation


def test_integers_run_as_they_are_stored(params):
    pytest.importorskip("numba", reason="kernels for CPUs need Numba")
    quantized = quantize_params(params, "int8")
    with LLM((CONFIG, quantized), max_seqs=1, max_model_len=32) as llm:
        explanation = str(llm.explain())
        assert sum(leaf.dtype == jnp.int8 for leaf in llm.engine.runner.weights.value) == 21
        assert all(map(operator.is_, jax.tree.leaves(llm.params), jax.tree.leaves(quantized)))
        assert sum(map(is_packed, weights(llm.engine.spec.params))) == 22  # the head too
    assert "float32 copies" not in explanation
    assert "by int8, a scale per output: numba_cpu, float32 activations; by float32: numba_cpu" in explanation


def test_copies_on_a_cpu(params, monkeypatch):
    """Of what no kernel multiplies as it is stored; without Numba, of integers too."""
    monkeypatch.setattr("pallas_kernels.cpu_calls.unsupported", lambda platform: "left out in this test")
    quantized = quantize_params(params, "int8")
    with LLM((CONFIG, quantized), max_seqs=1, max_model_len=32) as llm:
        explanation = str(llm.explain())
        weights = llm.engine.runner.weights.value
        assert all(map(operator.is_, jax.tree.leaves(llm.params), jax.tree.leaves(quantized)))
    assert {leaf.dtype.name for leaf in weights} == {"float32"}
    assert "21 of 23 matrices in int8, a scale per output" in explanation
    assert "21 of 21 weights" in explanation
    one = 4 * 64 * 64
    copied, report = float32_copies(quantized, 2 * one)
    assert (report.num_copied, report.num_copyable, report.num_bytes <= 2 * one) == (3, 21, True)  # k, o, v
    assert sum(not is_quantized(leaf) for leaf in jax.tree.leaves(copied["layers"], is_leaf=is_quantized)) == 3 + 6
    # What multiplies quantized activations, or a model in bfloat16, has no copies.
    assert float32_copies(quantize_params(params, "w8a8"))[1].num_copyable == 0
    short = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert float32_copies(quantize_params(short, "int8"))[1].num_copyable == 0


@pytest.mark.slow
def test_rounded_while_it_is_loaded(params):
    """`quantize=` of a live model is `quantize_params`; of a checkpoint the same, tensor by tensor."""
    with LLM("demo", max_seqs=1, max_model_len=64) as plain, LLM("demo", quantize="int8", max_seqs=1) as llm:
        weight = unpack_params(llm.params)["layers"]["0"]["mlp"]["up_proj"]["weight"]
        expected = quantize_params(plain.params, "int8")["layers"]["0"]["mlp"]["up_proj"]["weight"]
        assert isinstance(weight, QuantizedArray)
        np.testing.assert_array_equal(weight.values, expected.values)
        assert llm.fingerprint() != plain.fingerprint()
    with LLM((CONFIG, params), quantize="int4-g32", max_seqs=1) as llm:
        assert describe(llm.params) == "21 of 23 matrices in int4, 32 inputs a scale"
    with pytest.raises(ValueError, match="quantize='int5' is no format that weights are rounded to"):
        LLM("demo", quantize="int5")
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.k_proj\.weight is quantized already"):
        LLM((CONFIG, quantize_params(params, "int8")), quantize="int8")


@pytest.mark.slow
def test_drafts_and_tied_embeddings(params):
    """A draft changes no answer of a quantized model, be it its own first layers or a model quantized otherwise."""
    tied = replace(CONFIG, tie_word_embeddings=True)
    params = {name: leaf for name, leaf in params.items() if name != "lm_head"}
    quantized = quantize_params(params, "int8", also=["embed"])
    plain, _ = answers(quantized, tied)
    assert plain == answers(dequantized(quantized), tied)[0]
    for draft in ("layers:1", (tied, quantize_params(params, "int4-g32"))):
        assert answers(quantized, tied, draft=draft, num_draft_tokens=2)[0] == plain


def test_bound_without_an_engine(params):
    quantized = quantize_params(params, "int8", also=["lm_head"])
    decoder = bind(CONFIG, quantized)
    assert is_quantized(bind_layer(CONFIG, 0, quantized["layers"]["0"]).mlp.up_proj.weight.get_value())
    hidden = jax.random.normal(jax.random.key(0), (3, 64))
    expected = hidden @ quantized["lm_head"].dequantize()
    np.testing.assert_allclose(decoder.logits(hidden), expected, atol=1e-5)
    assert compute_dtype(quantized) == jnp.float32


def test_counting(params):
    quantized = quantize_params(params, "int4-g32")
    assert num_parameters(quantized) == num_parameters(params)
    assert describe(params) == ""
    assert describe(quantized) == "21 of 23 matrices in int4, 32 inputs a scale"
    abstract = jax.eval_shape(lambda params: quantize_params(params, "int4-g32"), abstract_params(CONFIG))
    layers = num_bytes(abstract["layers"])
    assert layers == sum(
        leaf.num_bytes if is_quantized(leaf) else leaf.nbytes
        for leaf in jax.tree.leaves(quantized["layers"], is_leaf=is_quantized)
    )
    assert num_bytes(quantized["layers"]) > layers  # here each 4-bit value has a byte


@pytest.mark.slow
def test_shardings(params):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), (parallel.MODEL,))
    blocks = Recipe("fp8", 8, (48, 48))  # of which no part holds whole ones, as of 576 rows in blocks of 128
    for recipe in ("int4-g32-asym", "nf4-dq", blocks, "act-order"):
        quantized = quantize_params(params, "int4-g32" if recipe == "act-order" else recipe)
        if recipe == "act-order":
            mlp = quantized["layers"]["0"]["mlp"]
            for linear in mlp.values():
                order = jax.random.permutation(jax.random.key(1), linear["weight"].shape[0])
                linear["weight"] = replace(linear["weight"], permutation=order)
        shardings = parameter_shardings(mesh, CONFIG, quantized)
        placed = jax.device_put(quantized, shardings)
        down, up = (placed["layers"]["0"]["mlp"][name]["weight"] for name in ("down_proj", "up_proj"))
        assert down.values.sharding.shard_shape(down.shape) == (64, 64)
        assert up.values.sharding.shard_shape(up.shape) == (64, 64)
        if recipe == "int4-g32-asym":  # parts of both hold whole groups
            assert down.scales.sharding.shard_shape(down.scales.shape) == (2, 64)
            assert up.zeros.sharding.shard_shape(up.zeros.shape) == (2, 64)
        hidden = jax.random.normal(jax.random.key(0), (3, 64))

        def layer(params, hidden):
            return bind_layer(CONFIG, 0, params["layers"]["0"]).mlp(hidden)

        np.testing.assert_allclose(jax.jit(layer)(placed, hidden), jax.jit(layer)(quantized, hidden), atol=1e-4)


def test_what_needs_floating_point_parameters_says_so(params, tmp_path):
    quantized = quantize_params(params, "int8")
    options = TrainOptions(num_steps=1)
    with pytest.raises(ValueError, match=r"training needs floating-point parameters, but layers\.0\..* is quantized"):
        train(quantized, lambda params, batch: (0.0, {}), lambda step: {}, options, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match=r"a draft cut from its target needs floating-point parameters"):
        pruned_draft(CONFIG, quantized, [0])


def test_live_models_are_checked(params):
    quantized = quantize_params(params, "int8")
    up = quantized["layers"]["2"]["mlp"]["up_proj"]
    broken = replace(up["weight"], scales=up["weight"].scales.at[0, 3].set(jnp.nan))
    layers = quantized["layers"]
    mlp = {**layers["2"]["mlp"], "up_proj": {"weight": broken}}
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.up_proj\.weight.*1 of 128 scales are not finite"):
        LLM((CONFIG, {**quantized, "layers": {**layers, "2": {**layers["2"], "mlp": mlp}}}))
