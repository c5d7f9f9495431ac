"""One decoder layer by each method: what is folded changes nothing, and what is rounded is what was asked for."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer.calibration import CalibrationOptions, Keep
from jaxinfer.calibration.capture import LayerProgram
from jaxinfer.calibration.driver import quantize_layer
from jaxinfer.calibration.inputs import FloatModel
from jaxinfer.calibration.layer_state import CalibratedLayer, dequantized, find, linear_names
from jaxinfer.calibration.scaling import folds
from jaxinfer.models import abstract_params
from jaxinfer.quantization import QuantizedArray, check
from jaxinfer.quantization.gptq import GptqOptions
from tests.random_params import random_params

OPTIONS = CalibrationOptions("rtn", 4, group_size=16, dtype="float32")


@pytest.fixture
def layer(config, params, tokens):
    """A program, its parameters, and hidden states before it."""
    return LayerProgram.of(config, 0), params["layers"]["0"], [np.asarray(params["embed"])[tokens]]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("method", "symmetric"),
    [
        ("rtn", True),
        ("rtn", False),
        ("gptq", True),
        ("gptq", False),
        ("awq", True),
        ("awq", False),
        ("smoothquant", True),
    ],
)
def test_every_linear_layer_gets_the_scheme(layer, method, symmetric):
    program, params, chunks = layer
    bits = 8 if method == "smoothquant" else 4
    size = "auto" if bits == 8 else 16
    options = replace(OPTIONS, method=method, bits=bits, symmetric=symmetric, group_size=size)
    found, errors, *_ = quantize_layer(program, 0, params, chunks, options)
    assert set(errors) == set(linear_names(program))
    for name in linear_names(program):
        weight = find(found, name)["weight"]
        check(weight, name)
        inputs = weight.shape[0]
        assert weight.scheme.block == ((inputs if bits == 8 else 16), 1)
        assert weight.scheme.bits == bits
        assert weight.scheme.activations == ("int8" if method == "smoothquant" else None)
        assert (weight.zeros is None) == symmetric
    assert isinstance(find(params, name)["weight"], jax.Array)  # what was given is as it was
    if method != "smoothquant":
        assert all(error.error <= error.rounded * 1.0001 for error in errors.values())


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("method", ["awq", "smoothquant"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_folding_changes_nothing_but_the_rounding(layer, method, dtype, monkeypatch):
    """With weights that are not rounded, the layer computes what it did, biases and grouped queries included."""
    import jaxinfer.calibration.scaling as module

    monkeypatch.setattr(module, "quantize", lambda weight, recipe, scale_dtype: weight)
    monkeypatch.setattr(module, "clip", lambda weight, hessian, grid: weight)
    monkeypatch.setattr(
        CalibratedLayer, "set", lambda work, name, weight, *rest: find(work.result, name).update(weight=weight)
    )
    program, params, chunks = layer
    change = {"bits": 8, "group_size": "auto"} if method == "smoothquant" else {"bits": 3}
    options = replace(OPTIONS, method=method, dtype=dtype, **change)
    work = CalibratedLayer(program, 0, params, chunks, options)
    {"awq": module.awq, "smoothquant": module.smoothquant}[method](work)
    moved = np.asarray(work.result["attention_norm"]["weight"]) / np.asarray(params["attention_norm"]["weight"])
    assert moved.max() / moved.min() > 1.1  # something was folded
    before, after = (program.forward(each, chunks[0]) for each in (params, work.result))
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4 * float(np.abs(before).max()))


@pytest.mark.slow
def test_biases_of_folded_layers_are_rounded_to_what_is_stored(layer):
    program, params, chunks = layer
    found, *_ = quantize_layer(program, 0, params, chunks, replace(OPTIONS, method="awq", bits=3, dtype="bfloat16"))
    for leaf in jax.tree.leaves(found, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray)):
        if not isinstance(leaf, QuantizedArray):
            np.testing.assert_array_equal(leaf, leaf.astype("bfloat16").astype("float32"))
        else:
            assert leaf.scales.dtype == "bfloat16"


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_what_is_kept_has_its_bits(layer, method):
    program, params, chunks = layer
    keep = (Keep("layers.0.mlp", 8), Keep("*.down_proj"), Keep("layers.0.attention.v_proj"))
    found, errors, *_ = quantize_layer(program, 0, params, chunks, replace(OPTIONS, method=method, keep=keep))
    assert isinstance(found["attention"]["v_proj"]["weight"], jax.Array)
    assert isinstance(found["mlp"]["down_proj"]["weight"], jax.Array)
    assert found["mlp"]["up_proj"]["weight"].scheme.bits == 8
    assert found["attention"]["q_proj"]["weight"].scheme.bits == 4
    assert {name for name, error in errors.items() if error.bits == 8} == {"mlp.gate_proj", "mlp.up_proj"}
    if method != "awq":
        np.testing.assert_array_equal(found["mlp"]["down_proj"]["weight"], params["mlp"]["down_proj"]["weight"])
    # Where a kept layer's input was scaled, its weight was too.
    x = chunks[0]
    all_kept, *_ = quantize_layer(program, 0, params, chunks, replace(OPTIONS, method=method, keep=(Keep("*"),)))
    np.testing.assert_allclose(program.forward(all_kept, x), program.forward(params, x), rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_gptq_sees_what_the_quantized_layers_before_make(layer):
    """With `o_proj` alone quantized its inputs are exact; after coarse q, k and v they are not."""
    program, params, chunks = layer
    options = replace(OPTIONS, method="gptq", bits=4)
    alone, *_ = quantize_layer(program, 0, params, chunks, replace(options, keep=(Keep("*"), Keep("*.o_proj", 4))))
    coarse = (Keep("*.q_proj", 2), Keep("*.k_proj", 2), Keep("*.v_proj", 2))
    after, *_ = quantize_layer(program, 0, params, chunks, replace(options, keep=coarse))
    first, second = (each["attention"]["o_proj"]["weight"].values for each in (alone, after))
    assert (np.asarray(first) != np.asarray(second)).any()


@pytest.mark.slow
def test_a_permuted_result_runs(layer):
    program, params, chunks = layer
    options = replace(OPTIONS, method="gptq", gptq=GptqOptions(static_groups=False))
    found, errors, *_ = quantize_layer(program, 0, params, chunks, options)
    assert found["mlp"]["down_proj"]["weight"].permutation is not None
    assert all(error.error < error.rounded for error in errors.values())
    leaves, floats = (program.forward(each, chunks[0]) for each in (found, dequantized(found)))
    np.testing.assert_allclose(leaves, floats, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "none"}, "method='none' is none of rtn"),
        ({"bits": 9}, "bits must be 2 to 8, got 9"),
        ({"group_size": 0}, "group_size must be positive or None, got 0"),
        ({"method": "smoothquant"}, "smoothquant makes symmetric weights of 8 bits"),
        ({"alpha": 2.0}, "alpha must be 0 to 1, got 2.0"),
    ],
)
def test_options_that_make_no_sense(change, words):
    with pytest.raises(ValueError, match=words):
        replace(OPTIONS, **change)


def test_keep_is_read_from_text():
    assert Keep.parse("layers.0.*=8") == Keep("layers.0.*", 8)
    assert Keep.parse("*.down_proj") == Keep("*.down_proj", 16)
    for text in ("", "=8", "x=many", "x="):
        with pytest.raises(ValueError, match="is not PATTERN or PATTERN=BITS"):
            Keep.parse(text)
    with pytest.raises(ValueError, match="bits must be 2 to 8, or 16, got 12"):
        Keep.parse("x=12")
    options = replace(OPTIONS, keep=(Keep("layers.1"), Keep("layers.1.mlp.*", 8)))
    assert [
        options.bits_of(f"layers.{name}") for name in ("1.attention.q_proj", "1.mlp.up_proj", "10.mlp.up_proj")
    ] == [
        16,
        8,
        4,
    ]
    with pytest.raises(ValueError, match=r"no linear layer is called 'layers.1'; the first is 'layers.0.a'"):
        options.check_keep(["layers.0.a"])


FAMILIES = {
    "gemma": {"norm": "rms_zero_centred", "block": "sandwich_norm", "qkv_bias": False, "embedding_multiplier": 5.6},
    "neox": {"norm": "layer", "norm_bias": True, "block": "parallel_two_norms", "is_mlp_gated": False},
    "cohere": {"norm": "layer", "block": "parallel_one_norm", "residual_multiplier": 0.5},
    "olmo": {"norm": "rms_float32", "block": "post_norm", "qk_norm": True, "qk_norm_span": "all_heads"},
    "olmoe": {"qk_norm": True, "qk_norm_span": "all_heads", "qkv_clip": 0.4},
    "apertus": {"qk_norm": True, "is_mlp_gated": False, "activation": "xielu"},
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAMILIES)
def test_folding_changes_nothing_in_other_blocks_and_norms(name, config, tokens, monkeypatch):
    """As above, for folds derived from other configurations."""
    import jaxinfer.calibration.scaling as module

    monkeypatch.setattr(module, "quantize", lambda weight, recipe, scale_dtype: weight)
    monkeypatch.setattr(
        CalibratedLayer, "set", lambda work, name, weight, *rest: find(work.result, name).update(weight=weight)
    )
    other = replace(config, **FAMILIES[name])
    random = np.random.default_rng(4)
    params = jax.tree.map(lambda leaf: np.float32(random.normal(0.2, 0.3, leaf.shape)), abstract_params(other))
    program, layer = LayerProgram.of(other, 0), params["layers"]["0"]
    chunks = [*FloatModel.of(other, params).embedded(tokens)]
    options = replace(OPTIONS, method="smoothquant", bits=8, group_size="auto")
    work = CalibratedLayer(program, 0, layer, chunks, options)
    module.smoothquant(work)
    for fold in folds(other):
        if fold.norm is not None:
            assert not np.allclose(work.result[fold.norm]["weight"], layer[fold.norm]["weight"])
    before, after = (program.forward(each, chunks[0]) for each in (layer, work.result))
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4 * float(np.abs(before).max()))


@pytest.mark.slow
def test_layers_that_no_fold_has_are_quantized_too(config, tokens):
    other = replace(config, block="post_norm", is_mlp_gated=False)
    params = random_params(other)
    program, chunks = LayerProgram.of(other, 0), [*FloatModel.of(other, params).embedded(tokens)]
    errors = quantize_layer(program, 0, params["layers"]["0"], chunks, replace(OPTIONS, method="awq")).errors
    assert set(errors) == set(linear_names(program))
