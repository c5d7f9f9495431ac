"""An adapter's folder as it is read: which modules are targets, and in which order and shape arrays are."""

import json
import math
import os
import shutil
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert.adapters import Adapter, read_adapter
from checkpoints_convert.adapters.config import read_config
from tests.checkpoints_convert.adapters.published import PeftFolder, base_config, base_files, linears, plain

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def read(folder: PeftFolder, tmp_path, name: str = "llama") -> Adapter:
    return read_adapter(folder.write(tmp_path / "adapter"), base_config(name))


def test_a_pair_is_transposed_and_has_our_name(tmp_path):
    _, folder = plain("llama", "q_proj")
    adapter = read(folder, tmp_path)
    assert sorted(adapter.low_rank) == ["layers.0.attention.q_proj", "layers.1.attention.q_proj"]
    pair = adapter.low_rank["layers.1.attention.q_proj"]
    own = "model.layers.1.self_attn.q_proj"
    np.testing.assert_array_equal(pair.a, folder.tensors[f"{own}.lora_A.weight"].T)
    np.testing.assert_array_equal(pair.b, folder.tensors[f"{own}.lora_B.weight"].T)
    assert (pair.scale, pair.rank, adapter.max_rank, pair.magnitude, pair.bias) == (2.0, 4, 4, None, None)
    assert (adapter.invocation_tokens, adapter.base_model, adapter.vocab_size) == ((), None, None)


def test_a_target_that_has_two_names_is_one(tmp_path):
    _, folder = plain(
        "llama", "q_proj", target_modules=["q_proj", "self_attn.q_proj", "model.layers.0.self_attn.q_proj"]
    )
    assert len(read(folder, tmp_path).low_rank) == 2


def test_weights_in_one_stored_tensor_share_a(tmp_path):
    _, folder = plain("phi3", "qkv_proj")
    adapter = read(folder, tmp_path, "phi3")
    parts = [adapter.low_rank[f"layers.0.attention.{name}"] for name in ("q_proj", "k_proj", "v_proj")]
    assert parts[0].a is parts[1].a is parts[2].a
    stored = folder.tensors["model.layers.0.self_attn.qkv_proj.lora_B.weight"].T
    np.testing.assert_array_equal(np.concatenate([pair.b for pair in parts], axis=1), stored)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_arrays_keep_their_dtype(dtype, tmp_path):
    _, folder = plain("llama", "q_proj")
    wanted = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    folder.tensors = {name: x.astype(wanted) for name, x in folder.tensors.items()}
    pair = read(folder, tmp_path).low_rank["layers.0.attention.q_proj"]
    assert pair.a.dtype == (np.float32 if dtype == "float64" else wanted)
    stored = folder.tensors["model.layers.0.self_attn.q_proj.lora_A.weight"]
    np.testing.assert_array_equal(pair.a, stored.T.astype(pair.a.dtype))


def targets(config: dict, tmp_path, name: str = "llama") -> set[str]:
    """The Linears of a base that are targets, by a config alone."""
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", **config}))
    settings = read_config(path)
    names = linears(base_files(name), *LINEARS, "lm_head")
    return {name for name in names if settings.is_target(name, is_table=name == "lm_head")}


def all_of(*ends: str, layers=(0, 1)) -> set[str]:
    folders = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
    return {f"model.layers.{layer}.{folders.get(end, 'mlp')}.{end}" for layer in layers for end in ends}


LAYER_1 = {"target_modules": ["q_proj"], "layers_to_transform": [1]}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"target_modules": ["q_proj", "self_attn.v_proj"]}, all_of("q_proj", "v_proj")),
        ({"target_modules": ["model.layers.1.mlp.up_proj"]}, all_of("up_proj", layers=[1])),
        ({"target_modules": ["proj"]}, set()),
        ({"target_modules": r".*\.(q|v)_proj"}, all_of("q_proj", "v_proj")),
        ({"target_modules": r".*layers\.0\..*_proj"}, all_of(*LINEARS, layers=[0])),
        ({"target_modules": "q_proj"}, set()),  # a pattern, of the whole name
        ({"target_modules": "all-linear"}, all_of(*LINEARS)),
        ({"target_modules": "All-Linear"}, all_of(*LINEARS)),
        ({"target_modules": ["q_proj", "lm_head"]}, all_of("q_proj") | {"lm_head"}),
        ({"target_modules": "all-linear", "exclude_modules": ["self_attn.q_proj", "o_proj"]},
         all_of("k_proj", "v_proj", *LINEARS[4:])),
        ({"target_modules": "all-linear", "exclude_modules": r".*\.layers\.0\..*"}, all_of(*LINEARS, layers=[1])),
        (LAYER_1, all_of("q_proj", layers=[1])),
        ({"target_modules": ["q_proj"], "layers_to_transform": 0}, all_of("q_proj", layers=[0])),
        ({"target_modules": ["q_proj"], "layers_to_transform": []}, all_of("q_proj")),
        (LAYER_1 | {"layers_pattern": "layers"}, all_of("q_proj", layers=[1])),
        (LAYER_1 | {"layers_pattern": ["blocks"]}, set()),
        (LAYER_1 | {"layers_pattern": ["h", "layers"]}, all_of("q_proj", layers=[1])),
        # A whole name is a target whatever layers are.
        (LAYER_1 | {"target_modules": ["model.layers.0.self_attn.q_proj"]}, all_of("q_proj", layers=[0])),
        ({"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["mlp"]}, all_of("q_proj")),
        ({"target_modules": [], "target_parameters": ["x.weight"]}, set()),
    ],
)  # fmt: skip
def test_targets_are_those_of_peft(config, wanted, tmp_path):
    assert targets(config, tmp_path) == wanted


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, (8, 1.0)),
        ({"r": 4, "lora_alpha": 6}, (4, 1.5)),
        ({"r": 4, "lora_alpha": 6, "use_rslora": True}, (4, 3.0)),
        ({"r": 4, "lora_alpha": 6, "rank_pattern": {"q_proj": 3}}, (3, 2.0)),
        ({"r": 4, "lora_alpha": 6, "rank_pattern": {"proj": 3, "k_proj": 5}}, (4, 1.5)),
        ({"r": 4, "lora_alpha": 6, "rank_pattern": {r".*\.self_attn\..*": 3, "q_proj": 5}}, (3, 2.0)),
        ({"r": 4, "alpha_pattern": {"layers.0.self_attn.q_proj": 10, "q_proj": 1}}, (4, 2.5)),
        ({"r": 4, "alpha_pattern": {"layers.1.self_attn.q_proj": 10}}, (4, 2.0)),
        ({"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"q_proj": 7}, "use_rslora": True}, (5, 7 / math.sqrt(5))),
    ],
)
def test_rank_and_scale(config, wanted, tmp_path):
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"], **config}))
    assert read_config(path).rank_and_scale("model.layers.0.self_attn.q_proj") == wanted


def test_fields_of_training_are_no_matter(tmp_path):
    """As PEFT 0.21 writes all its fields."""
    _, folder = plain("llama", "q_proj")
    folder.config |= {
        "alora_invocation_tokens": [3, 1], "arrow_config": None, "auto_mapping": {"base_model_class": "X"},
        "base_model_name_or_path": "someone/Model-1B", "bias": "none", "corda_config": None,
        "ensure_weight_tying": False, "eva_config": {"rho": 2.0}, "exclude_modules": None,
        "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": "eva", "kasa_config": None, "layer_replication": None, "layers_pattern": None,
        "layers_to_transform": None, "loftq_config": {}, "lora_bias": False, "lora_dropout": 0.05,
        "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
        "peft_version": "0.21.2", "qalora_group_size": 16,
        "revision": "main", "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None,
        "use_qalora": False, "velora_config": None, "added_next_year": False, "also": [], "and": "",
    }  # fmt: skip
    adapter = read(folder, tmp_path)
    assert adapter.invocation_tokens == (3, 1)
    assert adapter.base_model == "someone/Model-1B"


@pytest.mark.parametrize("ends", [("q_proj", "gate_proj", "up_proj", "down_proj"), "all-linear"], ids=["list", "all"])
def test_experts_that_have_no_tensors_anywhere_were_no_targets(ends, tmp_path):
    """They are no Linears in Transformers 5, whose adapters name them and have none."""
    files = base_files("qwen3_moe")
    own = linears(files, *(LINEARS if ends == "all-linear" else ends))
    folder = PeftFolder({"target_modules": ends if ends == "all-linear" else list(ends)})
    for module in own:
        outputs, inputs = files.tensors[f"{module}.weight"].shape
        folder.add(module, inputs, outputs)
    adapter = read(folder, tmp_path, "qwen3_moe")
    assert adapter.low_rank
    assert not any("experts" in name or "router" in name for name in adapter.low_rank)


# The fingerprint.


def everything() -> PeftFolder:
    """An adapter with a part of every kind, of a base with biases."""
    files, folder = plain("qwen2", "q_proj", lora_bias=True, bias="lora_only", modules_to_save=["lm_head"],
                          trainable_token_indices=[4, 9], alora_invocation_tokens=[3, 5],
                          base_model_name_or_path="a/Base")  # fmt: skip
    random = np.random.default_rng(1)
    for module in linears(files, "q_proj"):
        size = files.tensors[f"{module}.bias"].shape
        for name in ("lora_B.bias", "base_layer.bias"):
            folder.tensors[f"{module}.{name}"] = random.standard_normal(size).astype(np.float32)
    shape = files.tensors["lm_head.weight"].shape
    folder.tensors["lm_head.weight"] = random.standard_normal(shape).astype(np.float32)
    rows = random.standard_normal((2, shape[1])).astype(np.float32)
    folder.tensors["model.embed_tokens.token_adapter.trainable_tokens_delta"] = rows
    return folder


def test_the_fingerprint_is_of_the_content_alone(tmp_path):
    """Not of the folder, of the order of tensors and fields, of names, of the prefix, or of the base's name."""
    folder = everything()
    first = read(folder, tmp_path, "qwen2").fingerprint
    assert len(first) == 64
    other = replace(folder, tensors=dict(reversed(folder.tensors.items())), metadata={"format": "pt", "x": "y"})
    other.config = {**dict(reversed(folder.config.items())), "base_model_name_or_path": "other", "lora_dropout": 0.1}
    written = other.write(tmp_path / "elsewhere")
    assert read_adapter(written, base_config("qwen2")).fingerprint == first
    os.utime(written / "adapter_model.safetensors", (1, 1))
    moved = shutil.move(written, tmp_path / "third")
    assert read_adapter(moved, base_config("qwen2")).fingerprint == first


def test_the_fingerprint_changes_with_every_tensor(tmp_path):
    folder, fingerprints = everything(), set()
    for changed in (None, *folder.tensors):
        own = {name: array.copy() for name, array in folder.tensors.items()}
        if changed is not None:
            values = own[changed].reshape(-1)
            values[-1] = np.nextafter(values[-1], np.float32(9))
        fingerprints.add(read(replace(folder, tensors=own), tmp_path, "qwen2").fingerprint)
    assert len(fingerprints) == len(folder.tensors) + 1


@pytest.mark.parametrize(
    "change",
    [
        {"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"layers.0.self_attn.q_proj": 1}},
        {"alora_invocation_tokens": [5, 3]}, {"alora_invocation_tokens": None}, {"trainable_token_indices": [9, 4]},
    ],
)  # fmt: skip
def test_the_fingerprint_changes_with_every_setting_that_matters(change, tmp_path):
    folder = everything()
    first = read(folder, tmp_path, "qwen2").fingerprint
    folder.config |= change
    assert read(folder, tmp_path, "qwen2").fingerprint != first
