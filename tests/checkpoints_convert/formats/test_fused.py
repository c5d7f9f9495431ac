"""Quantized modules that hold several parameters: a tiny Phi-3 in every format, and its way back."""

import jax
import numpy as np
import pytest

from checkpoints_convert import CheckpointError, convert, load
from jaxinfer.quantization import QuantizedArray, check
from jaxinfer.quantization.tree import is_quantized
from tests.checkpoints_convert.formats import tiny

FUSED = {
    "self_attn.qkv_proj": ("attention", ("q_proj", "k_proj", "v_proj")),
    "mlp.gate_up_proj": ("mlp", ("gate_proj", "up_proj")),
}
WIDTHS = {
    "q_proj": tiny.HEADS * tiny.HEAD_DIM,
    "k_proj": tiny.KV_HEADS * tiny.HEAD_DIM,
    "v_proj": tiny.KV_HEADS * tiny.HEAD_DIM,
    "gate_proj": tiny.F,
    "up_proj": tiny.F,
}


@pytest.fixture(params=tiny.SOME_FORMATS)
def name(request):
    return request.param


def checkpoint(name, tmp_path):
    """A Phi-3, and the float32 weights [N, K] of its fused modules."""
    form = tiny.FORMATS[name]
    made = tiny.tiny(name)
    tensors = {key: value for key, value in made.tensors.items() if not any(part in key for part in WIDTHS)}
    weights, random = {}, np.random.default_rng(1)
    for layer in range(tiny.LAYERS):
        for module, (_, parts) in FUSED.items():
            path = f"model.layers.{layer}.{module}"
            shape = (sum(WIDTHS[part] for part in parts), tiny.D)
            encoded, weights[path] = form.encode((random.standard_normal(shape) * 0.1).astype(np.float32))
            tensors |= {f"{path}.{suffix}": array for suffix, array in encoded.items()}
    config = {**made.config, "architectures": ["Phi3ForCausalLM"]}
    del config["head_dim"]
    return tiny.Tiny(config, tensors, {}).write(tmp_path / "source"), weights


def parts_of(params, weights):
    """(leaf, its rows of the module's weight) for every parameter of a fused module."""
    for path, weight in weights.items():
        layer = params["layers"][path.split(".")[2]]
        room, names = FUSED[path.split(".", 3)[3]]
        start = 0
        for part in names:
            yield layer[room][part]["weight"], weight[start : start + WIDTHS[part]]
            start += WIDTHS[part]


def assert_parts(params, weights):
    for leaf, rows in parts_of(params, weights):
        array = leaf.dequantize() if is_quantized(leaf) else leaf
        np.testing.assert_array_equal(np.asarray(array).T, rows)


@pytest.mark.matrix
def test_each_parameter_is_its_part_bit_for_bit(name, tmp_path):
    source, weights = checkpoint(name, tmp_path)
    _, params = load(source)
    assert_parts(params, weights)
    found = [leaf for leaf, _ in parts_of(params, weights)]
    assert all(isinstance(leaf, QuantizedArray) for leaf in found)
    for leaf in found:
        check(jax.tree.map(np.asarray, leaf), name)


@pytest.mark.matrix
def test_saved_as_compressed_tensors_it_is_one_module_again(name, tmp_path):
    source, weights = checkpoint(name, tmp_path)
    if name in ("nf4", "nf4-nested", "fp4", "nvfp4", "modelopt-nvfp4"):
        with pytest.raises(CheckpointError, match="compressed-tensors cannot express it"):
            convert(source, tmp_path / "saved", to="huggingface", progress=None)
        return
    convert(source, tmp_path / "saved", to="huggingface", progress=None)
    assert_parts(load(tmp_path / "saved")[1], weights)


def test_a_problem_of_a_fused_module_is_said_once(tmp_path):
    source, _ = checkpoint("gptq-v1", tmp_path)
    from safetensors.numpy import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.self_attn.qkv_proj.qzeros"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(source)
    assert str(caught.value).count("'model.layers.1.self_attn.qkv_proj.qzeros'") == 1
    assert len(caught.value.problems) == 1
