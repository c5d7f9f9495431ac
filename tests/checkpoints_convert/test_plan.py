import gc
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints_convert import CheckpointError, load, plan
from checkpoints_convert.huggingface.config import model_config

# config.json, names, shapes and dtypes of public checkpoints, transcribed; the parameter counts are the published ones.
HEADERS = sorted((Path(__file__).parent / "headers").glob("*.json"))


def read_headers(path):
    data = json.loads(path.read_text())
    layers = range(data["config"]["num_hidden_layers"])
    headers = {
        name.format(layer=layer): (dtype, tuple(shape))
        for name, (dtype, shape) in data["tensors"].items()
        for layer in (layers if "{layer}" in name else [""])
    }
    return data, headers


def _num_layers(path):
    return json.loads(path.read_text())["config"]["num_hidden_layers"]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=pytest.mark.slow if _num_layers(path) > 24 else ()) for path in HEADERS],
)
def test_public_checkpoints_are_planned_completely(path):
    data, headers = read_headers(path)
    config, tensors = plan(data["config"], headers)
    assert sum(math.prod(tensor.shape) for tensor in tensors) == data["num_parameters"]
    assert len({tensor.target for tensor in tensors}) == len({tensor.sources for tensor in tensors}) == len(tensors)
    assert config.dtype == data["config"]["torch_dtype"]
    unused = set(headers) - {name for tensor in tensors for name in tensor.sources}
    assert all("inv_freq" in name or (name == "lm_head.weight" and config.tie_word_embeddings) for name in unused)


def test_public_configurations_are_understood():
    found = {path.stem: model_config(read_headers(path)[0]["config"]) for path in HEADERS}
    assert {name: config.rope.kind for name, config in found.items() if config.rope.kind != "default"} == {
        "llama-3.1-8b": "llama3",
        "llama-3.2-1b": "llama3",
    }
    assert found["llama-3.2-1b"].rope.factor == 32.0
    assert found["mistral-7b-v0.1"].sliding_windows == (4096,) * 32
    assert [name for name, config in found.items() if config.sliding_windows] == ["mistral-7b-v0.1"]
    assert [name for name, config in found.items() if config.qkv_bias] == ["qwen2.5-0.5b"]
    assert [name for name, config in found.items() if config.qk_norm] == ["qwen3-0.6b"]
    assert found["qwen3-0.6b"].head_dim == 128
    assert found["tinyllama-1.1b"].num_kv_heads == 4


def test_matrices_are_transposed_and_vectors_are_not(checkpoint):
    source = checkpoint()
    _, tensors = plan(source.config, source.headers)
    by_name = {tensor.sources[0]: tensor for tensor in tensors}
    up = by_name["model.layers.1.mlp.up_proj.weight"]
    assert (up.placement.stored, up.shape, up.placement.transpose) == ((48, 32), (32, 48), True)
    assert up.target == ("layers", "1", "mlp", "up_proj", "weight")
    assert not by_name["model.embed_tokens.weight"].placement.transpose
    assert not by_name["model.norm.weight"].placement.transpose


def test_names_of_the_bare_model(checkpoint):
    source = checkpoint()
    bare = {name.removeprefix("model."): header for name, header in source.headers.items()}
    wanted = [
        replace(tensor, sources=(tensor.sources[0].removeprefix("model."),))
        for tensor in plan(source.config, source.headers)[1]
    ]
    assert plan(source.config, bare)[1] == wanted


def problems(source, headers, **changes):
    with pytest.raises(CheckpointError) as caught:
        plan({**source.config, **changes}, headers, where="repo")
    assert str(caught.value).startswith("repo: ")
    return caught.value.problems


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_each_missing_tensor_is_named(architecture, checkpoint):
    source = checkpoint(architecture)
    for name in source.headers:
        headers = {key: value for key, value in source.headers.items() if key != name}
        (problem,) = problems(source, headers)
        assert problem.startswith(f"tensor {name!r} [")
        assert " is missing" in problem


def test_missing_head_is_explained(checkpoint):
    source = checkpoint()
    headers = {name: header for name, header in source.headers.items() if name != "lm_head.weight"}
    (problem,) = problems(source, headers)
    assert problem.endswith(
        "tie_word_embeddings is false or absent in config.json; set it to true if the model ties them"
    )


@pytest.mark.parametrize(
    "name",
    ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "mtp.layers.0.x", "score.weight"],
)
def test_each_extra_tensor_is_named(name, checkpoint):
    source = checkpoint()
    assert problems(source, {**source.headers, name: ("F32", (4,))}) == (f"tensor {name!r} [4] is not of this model",)


def test_head_beside_tied_embeddings_and_stored_buffers_are_not_used(checkpoint):
    source = checkpoint(tied=True)
    extra = {
        "lm_head.weight": ("F32", (80, 32)),
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (4,)),
        "model.layers.1.self_attn.rotary_emb.inv_freq": ("F32", (4,)),
    }
    assert plan(source.config, source.headers | extra) == plan(source.config, source.headers)


def test_wrong_shapes_are_given_with_the_right_ones(checkpoint):
    source = checkpoint()
    headers = {**source.headers, "model.norm.weight": ("F32", (33,)), "lm_head.weight": ("F32", (32, 80))}
    assert problems(source, headers) == (
        "tensor 'model.norm.weight' has shape [33], config.json makes it [32]",
        "tensor 'lm_head.weight' has shape [32, 80], config.json makes it [80, 32]",
    )


def test_vocabulary_of_another_size_is_a_shape_problem(checkpoint):
    source = checkpoint(tied=True)
    assert problems(source, source.headers, vocab_size=81) == (
        "tensor 'model.embed_tokens.weight' has shape [80, 32], config.json makes it [81, 32]",
    )


def test_misspelt_names_are_paired(checkpoint):
    source = checkpoint()
    headers = dict(source.headers)
    headers["model.layers.0.self_attn.qproj.weight"] = headers.pop("model.layers.0.self_attn.q_proj.weight")
    assert problems(source, headers) == (
        "tensor 'model.layers.0.self_attn.q_proj.weight' [32, 32] is missing;"
        " the checkpoint has 'model.layers.0.self_attn.qproj.weight'",
        "tensor 'model.layers.0.self_attn.qproj.weight' [32, 32] is not of this model;"
        " the model needs 'model.layers.0.self_attn.q_proj.weight'",
    )


def test_everything_wrong_is_listed_and_a_long_list_is_cut(checkpoint):
    source = checkpoint()
    with pytest.raises(CheckpointError, match=r"21 problems(.|\n)*and 1 more") as caught:
        plan(source.config, {})
    assert len(caught.value.problems) == 21


@pytest.mark.parametrize("dtype", ["I8", "U8", "F8_E4M3", "I64", "BOOL"])
def test_packed_weights_without_a_quantization_config_are_refused(dtype, checkpoint):
    source = checkpoint()
    (problem,) = problems(source, {**source.headers, "model.norm.weight": (dtype, (32,))})
    assert problem.startswith(f"tensor 'model.norm.weight' is stored as {dtype}, weights without")


@pytest.mark.parametrize(
    ("stored", "declared", "asked", "chosen"),
    [
        (["F32"], "bfloat16", "auto", "float32"),
        (["BF16"], None, "auto", "bfloat16"),
        (["BF16"], None, "float32", "float32"),
        (["F32", "BF16"], "bfloat16", "auto", "bfloat16"),
        (["F32", "BF16"], "float32", "auto", "float32"),
        (["F32", "BF16"], None, "float16", "float16"),
        (["F64"], None, "float32", "float32"),
    ],
)
def test_dtype_is_the_stored_one_unless_tensors_differ(stored, declared, asked, chosen, checkpoint):
    source = checkpoint(torch_dtype=declared)
    headers = {name: (stored[i % len(stored)], shape) for i, (name, (_, shape)) in enumerate(source.headers.items())}
    config, tensors = plan(source.config, headers, dtype=asked)
    assert {config.dtype, *(tensor.dtype for tensor in tensors)} == {chosen}


@pytest.mark.parametrize(
    ("stored", "declared"), [(["F32", "BF16"], None), (["F32", "BF16"], "float16"), (["F64"], "float64")]
)
def test_dtype_that_is_not_evident_must_be_chosen(stored, declared, checkpoint):
    source = checkpoint(torch_dtype=declared)
    headers = {name: (stored[i % len(stored)], shape) for i, (name, (_, shape)) in enumerate(source.headers.items())}
    with pytest.raises(CheckpointError, match=r"stored as float.* \(\d+ tensors\).*choose one of float32, bfloat16"):
        plan(source.config, headers)


def test_unknown_dtype_is_refused(checkpoint):
    source = checkpoint()
    with pytest.raises(ValueError, match="dtype='int4' is not 'auto', 'float32'"):
        plan(source.config, source.headers, dtype="int4")


@pytest.mark.matrix
@pytest.mark.parametrize("num_layers", [100, 2**31 - 1])
def test_layers_that_only_config_json_has_are_refused_before_they_are_computed_with(checkpoint, num_layers):
    source = checkpoint()
    source.config["num_hidden_layers"] = num_layers
    gc.collect()  # that of other tests does not count
    start = time.thread_time()
    with pytest.raises(CheckpointError, match=rf"num_hidden_layers is {num_layers}, the \d+ tensors name 2 layers"):
        load(source.write())
    assert time.thread_time() - start < 1
