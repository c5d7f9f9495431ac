"""Checkpoints of all dense families, with the names, shapes and configurations that Transformers gives them.

Those are read off the golden files of tests/oracle; the weights here are numbers that tell every value from every
other, so that a wrong index shows.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import checkpoints_convert
from checkpoints_convert import CheckpointError
from checkpoints_convert.huggingface.config import huggingface_config, model_config
from checkpoints_convert.huggingface.families import FAMILIES
from tests.checkpoints_convert.family_files import GOLDEN, Files, flat, read

# One of each way in which a tensor is not a parameter: fused, by key head, by key head of fewer, Conv1D, one per head.
FUSED = ("phi3", "glm4", "gpt_neox", "falcon", "gpt2", "stablelm_parallel")

# Transformers has their experts in one tensor in memory, and one by one in files.
FUSED_EXPERTS = (
    *("mixtral", "qwen2_moe", "qwen3_moe"),
    *("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v3_halves"),
    *("glm4_moe", "glm4_moe_groups", "glm4_moe_lite", "minimax_m2", "olmoe"),
    *("deepseek_v32", "glm_moe_dsa"),
    *("phimoe", "phimoe_longrope", "ernie4_5_moe", "hunyuan_moe"),
    *("qwen3_next", "qwen3_5_moe", "granite_hybrid", "lfm2_moe"),
    *("nemotron_h", "nemotron_h_moe"),  # other names in memory
)


def load(directory: Path):
    config, params = checkpoints_convert.load(directory, dtype="auto")
    return config, flat(params)


def assert_same(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def _is_only_rotated_otherwise(name: str) -> bool:
    """True if another case has the same tensors."""
    return name in ("mistral_full", "qwen2_window") or (name.startswith("llama_") and name != "llama_bias")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.slow if _is_only_rotated_otherwise(path.stem) else ())
        for path in GOLDEN
    ],
)
def test_every_stored_value_becomes_one_parameter_and_comes_back(path, tmp_path):
    files = read(path.stem)
    config, params = load(files.write(tmp_path / "source"))
    values = np.concatenate([array.reshape(-1) for array in params.values()])
    stored = np.concatenate([tensor.reshape(-1) for tensor in files.tensors.values()])
    np.testing.assert_array_equal(np.sort(values), stored)
    checkpoints_convert.convert(tmp_path / "source", tmp_path / "saved", to="huggingface", progress=None)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    if "gpt_neox" in path.stem:  # Transformers renames the head on loading and saving
        saved["lm_head.weight"] = saved.pop("embed_out.weight")
    again, same = load(tmp_path / "saved")
    if path.stem not in FUSED_EXPERTS:
        assert_same(saved, files.tensors)
    assert_same(same, params)
    assert again == config


@pytest.mark.matrix
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_configurations_are_written_as_they_were_read(path):
    config = model_config(read(path.stem).config)
    assert model_config(json.loads(json.dumps(huggingface_config(config)))) == config


def test_all_families_are_here():
    found = {read(path.stem).config["architectures"][0] for path in GOLDEN}
    assert found == set(FAMILIES)


@pytest.mark.matrix
@pytest.mark.parametrize("name", FUSED)
def test_order_of_shards_and_of_tensors_does_not_matter(name, tmp_path):
    files = read(name)
    wanted = load(files.write(tmp_path / "one"))[1]
    names = list(files.tensors)
    random.Random(0).shuffle(names)
    shards = [names[i::4] for i in (2, 0, 3, 1)]
    assert_same(load(files.write(tmp_path / "four", shards))[1], wanted)


def prefix_of(files: Files) -> str:
    return FAMILIES[files.config["architectures"][0]].prefix


@pytest.mark.matrix
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("form", ["bare", "wrapped", "old wrapper", "new wrapper"])
def test_other_prefixes(name, form, tmp_path):
    files = read(name)
    wanted = load(files.write(tmp_path / "usual"))[1]
    prefix = prefix_of(files)

    def rename(tensor: str) -> str:
        if form == "bare":
            return tensor.removeprefix(prefix)
        if form == "new wrapper":
            return tensor.replace(prefix, "model.language_model.", 1) if tensor.startswith(prefix) else tensor
        return {"wrapped": "base_model.model.", "old wrapper": "language_model."}[form] + tensor

    assert_same(load(files.renamed(rename).write(tmp_path / "renamed"))[1], wanted)


def problems(files: Files, directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(files.write(directory))
    return str(caught.value)


@pytest.mark.matrix
@pytest.mark.parametrize("name", FUSED)
def test_a_prefix_nobody_uses_is_refused_by_name(name, tmp_path):
    files = read(name)
    prefix = prefix_of(files)
    wrong = files.renamed(lambda tensor: tensor.replace(prefix, "modle.", 1))
    message = problems(wrong, tmp_path)
    first = next(tensor for tensor in files.tensors if tensor.startswith(prefix))
    assert f"tensor {first!r}" in message
    assert "is missing" in message


@pytest.mark.matrix
@pytest.mark.parametrize("name", FUSED)
def test_each_missing_tensor_is_named(name, tmp_path):
    files = read(name)
    for number, tensor in enumerate(files.tensors):
        rest = {key: value for key, value in files.tensors.items() if key != tensor}
        message = problems(replace(files, tensors=rest), tmp_path / str(number))
        # Without the head under its new name the old one is missed.
        shown = "embed_out.weight" if name == "gpt_neox" and tensor == "lm_head.weight" else tensor
        assert f"tensor {shown!r}" in message, tensor
        assert "is missing" in message


@pytest.mark.parametrize("name", FUSED)
def test_an_extra_tensor_and_parts_beside_the_whole_are_named(name, tmp_path):
    files = read(name)
    fused = next(tensor for tensor in files.tensors if "qkv" in tensor or "query_key" in tensor or "attn" in tensor)
    part = f"{fused.rpartition('.')[0].rpartition('.')[0]}.extra_proj.weight"
    more = {**files.tensors, part: np.zeros((64, 64), np.float32)}
    assert f"tensor {part!r} [64, 64] is not of this model" in problems(replace(files, tensors=more), tmp_path)


def test_a_parameter_stored_under_both_names_is_refused(tmp_path):
    files = read("gpt_neox", "untied")
    both = {**files.tensors, "embed_out.weight": files.tensors["lm_head.weight"]}
    message = problems(replace(files, tensors=both), tmp_path)
    assert "tensor 'lm_head.weight' [256, 64] is not of this model" in message


@pytest.mark.parametrize(
    ("name", "tensor", "wanted"),
    [
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", "[128, 64]"),
        ("glm4", "model.layers.1.mlp.gate_up_proj.weight", "[192, 64]"),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight", "[192, 64]"),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", "[64, 192]"),
        ("stablelm_parallel", "model.layers.0.self_attn.q_layernorm.norms.2.weight", "[16]"),
    ],
)
def test_a_wrong_shape_is_given_with_the_right_one_once(name, tensor, wanted, tmp_path):
    files = read(name)
    files.tensors[tensor] = np.zeros((7, *files.tensors[tensor].shape[1:]), np.float32)
    message = problems(files, tmp_path)
    assert message.count(f"tensor {tensor!r} has shape") == 1
    assert f"config.json makes it {wanted}" in message


@pytest.mark.parametrize("name", FUSED)
def test_a_dtype_that_is_no_weight_is_refused_once(name, tmp_path):
    files = read(name)
    tensor = next(one for one in files.tensors if files.tensors[one].ndim == 2 and ".0." in one)
    files.tensors[tensor] = files.tensors[tensor].astype(np.int8)
    assert problems(files, tmp_path).count(f"tensor {tensor!r} is stored as I8") == 1


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "head", "embedding"),
    [
        ("gpt2", "lm_head.weight", "transformer.wte.weight"),
        ("falcon", "lm_head.weight", "transformer.word_embeddings.weight"),
        ("gemma2", "lm_head.weight", "model.embed_tokens.weight"),
        ("gpt_neox", "embed_out.weight", "gpt_neox.embed_in.weight"),
    ],
)
@pytest.mark.parametrize("is_copy", [True, False])
def test_a_tied_head_that_is_stored_too(name, head, embedding, is_copy, tmp_path):
    files = read(name, "tied")
    wanted = load(files.write(tmp_path / "once"))[1]
    files.tensors[head] = files.tensors[embedding] + (0 if is_copy else 1)
    config, found = load(files.write(tmp_path / "twice"))
    assert config.tie_word_embeddings == is_copy
    assert_same(found, wanted if is_copy else {**wanted, "lm_head": files.tensors[head].T})


def test_the_text_part_of_a_model_of_text_and_images(tmp_path):
    text = read("gemma3", "tied")
    wanted = load(text.write(tmp_path / "text"))
    part = {key: value for key, value in text.config.items() if key not in ("architectures", "tie_word_embeddings")}
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": part,
        "vision_config": {"model_type": "siglip_vision_model"},
        "tie_word_embeddings": True,
    }
    for form, (prefix, images) in {
        "old": ("language_model.model.", "vision_tower.layer.weight"),
        "new": ("model.language_model.", "model.vision_tower.layer.weight"),
    }.items():
        files = Files(whole, {tensor.replace("model.", prefix, 1): value for tensor, value in text.tensors.items()})
        files.tensors[images] = np.zeros(3, np.float32)
        config, params = load(files.write(tmp_path / form))
        assert config == wanted[0]
        assert_same(params, wanted[1])
    # Of a text model such a tensor is none.
    text.tensors["vision_tower.layer.weight"] = np.zeros(3, np.float32)
    assert "'vision_tower.layer.weight' [3] is not of this model" in problems(text, tmp_path / "extra")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "architecture", "changes", "image"),
    [
        ("deepseek_v3", "KimiK25ForConditionalGeneration", {"model_type": "kimi_k2"}, "mm_projector.proj.0.weight"),
        ("llama4", "Llama4ForConditionalGeneration", {}, "vision_model.layernorm_pre.weight"),
        ("mistral4", "Mistral3ForConditionalGeneration", {}, "multi_modal_projector.norm.weight"),
    ],
)
def test_the_text_part_of_newer_models_of_text_and_images(name, architecture, changes, image, tmp_path):
    text = read(name, "untied")
    wanted = load(text.write(tmp_path / "text"))
    part = {key: value for key, value in text.config.items() if key != "architectures"} | changes
    tensors = {f"language_model.{tensor}": value for tensor, value in text.tensors.items()}
    tensors[image] = np.zeros(3, np.float32)
    files = Files({"architectures": [architecture], "text_config": part}, tensors)
    config, params = load(files.write(tmp_path / "whole"))
    assert config == wanted[0]
    assert_same(params, wanted[1])


def test_kimi_k2_is_known_by_its_type():
    config = read("deepseek_v3").config | {"model_type": "kimi_k2"}
    assert model_config(config) == model_config({**config, "architectures": None})


def test_experts_of_llama_4_one_by_one(tmp_path):
    files = read("llama4")
    config, wanted = load(files.write(tmp_path / "fused"))
    tensors = {}
    for name, array in files.tensors.items():
        prefix, is_expert, kind = name.partition(".experts.")
        if not is_expert:
            tensors[name] = array
            continue
        names = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
        for number, expert in enumerate(array):
            for part, half in zip(names, np.split(expert, len(names), axis=-1), strict=True):
                tensors[f"{prefix}.experts.{number}.{part}.weight"] = np.ascontiguousarray(half.T)
    assert len(tensors) > len(files.tensors)
    found_config, found = load(Files(files.config, tensors).write(tmp_path / "each"))
    assert found_config == config
    assert_same(found, wanted)
