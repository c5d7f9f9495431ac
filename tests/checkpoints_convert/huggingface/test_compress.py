"""Quantized parameters saved as compressed-tensors and opened again."""

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import CheckpointError, LayerKVScales, kv_scales, load, save_huggingface
from jaxinfer.models import ModelConfig, RopeConfig
from jaxinfer.quantization.rtn import quantize
from tests.random_params import random_params

CONFIG = ModelConfig(
    "LlamaForCausalLM", vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, rope=RopeConfig(rotary_dim=16),
)  # fmt: skip


@cache
def plain():
    return random_params(CONFIG)


def params(*rules):
    """Random parameters; each rule is (name ends with, recipe)."""

    def change(path, leaf):
        name = ".".join(key.key for key in path)
        how = next((recipe for end, recipe in rules if name.endswith(end)), None)
        return quantize(leaf, how) if how else leaf

    return jax.tree_util.tree_map_with_path(change, plain())


def assert_reopens(saved, directory, **options):
    save_huggingface(CONFIG, saved, directory, dtype="float32", **options)
    _, found = load(directory)
    assert jax.tree.structure(found) == jax.tree.structure(saved)
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(saved), strict=True):
        assert (leaf.dtype, np.asarray(leaf).tobytes()) == (other.dtype, np.asarray(other).tobytes())
    return json.loads((directory / "config.json").read_text()).get("quantization_config")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("recipe", "form"),
    [
        ("int3-g32-asym", "pack-quantized"),
        ("w8a8", "int-quantized"),
        ("fp8-block", "naive-quantized"),
        ("w8a8-fp8", "float-quantized"),
        ("mxfp4", "mxfp4-pack-quantized"),
        *(
            pytest.param(recipe, form, marks=pytest.mark.slow)
            for recipe, form in (
                ("int2-g32", "pack-quantized"),
                ("int4", "pack-quantized"),
                ("int4-g32", "pack-quantized"),
                ("int4-g32-asym", "pack-quantized"),
                ("int8", "pack-quantized"),
                ("int8-g32", "pack-quantized"),
                ("fp8", "naive-quantized"),
                ("fp8-tensor", "naive-quantized"),
                ("w8a8-fp8-block", "float-quantized"),
            )
        ),
    ],
)
def test_reopened_it_is_the_same(recipe, form, tmp_path):
    config = assert_reopens(params(("proj.weight", recipe)), tmp_path / "saved")
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", form)
    assert config["quantization_status"] == "compressed"
    assert [group["targets"] for group in config["config_groups"].values()] == [["Linear"]]
    assert config["ignore"] == ["lm_head"]


def test_parameters_with_schemes_of_their_own(tmp_path):
    rules = [("0.mlp.down_proj.weight", None), ("down_proj.weight", "int8-g32"), ("v_proj.weight", "w8a8")]
    config = assert_reopens(params(*rules, ("proj.weight", "int4-g32")), tmp_path / "saved", max_shard_bytes=30_000)
    assert config["format"] == "mixed-precision"
    assert sorted(len(group["targets"]) for group in config["config_groups"].values()) == [1, 2, 10]
    assert config["ignore"] == ["model.layers.0.mlp.down_proj", "lm_head"]
    index = json.loads((tmp_path / "saved/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2


def test_embedding_and_head(tmp_path):
    saved = params(("lm_head", "int8"), ("proj.weight", "int8"))
    table = quantize(saved["embed"].T, "int8")
    scheme = type(table.scheme)("int", 8, (1, 64))
    saved["embed"] = type(table)(table.values.T, table.scales.T, scheme=scheme)
    config = assert_reopens(saved, tmp_path / "saved")
    targets = [group["targets"] for group in config["config_groups"].values()]
    assert "model.embed_tokens" in targets[0]
    assert config["ignore"] == []


def test_nothing_quantized_says_nothing(tmp_path):
    assert assert_reopens(params(), tmp_path / "saved") is None


def test_scales_of_the_cache(tmp_path):
    scales = (LayerKVScales((0.5,), (0.25,)), LayerKVScales((1.5,), (2.0,)))
    config = assert_reopens(params(("proj.weight", "int8")), tmp_path / "saved", kv_scales=scales)
    assert config["kv_cache_scheme"]["strategy"] == "tensor"
    assert kv_scales(tmp_path / "saved") == scales
    with pytest.raises(ValueError, match="1 layers of kv_scales for a model of 2"):
        save_huggingface(CONFIG, params(), tmp_path / "other", kv_scales=scales[:1])


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("nf4", "values of a codebook, but for MXFP4's"),
        pytest.param("nf4-dq", "values of a codebook, but for MXFP4's", marks=pytest.mark.slow),
        pytest.param("fp4", "values of a codebook", marks=pytest.mark.slow),
    ],
)
def test_what_compressed_tensors_cannot_say_is_refused_and_nothing_is_written(recipe, message, tmp_path):
    with pytest.raises(CheckpointError, match=rf"parameter 'layers\.\d\..*': {message}.*the native form can"):
        save_huggingface(CONFIG, params(("proj.weight", recipe)), tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_scales_that_are_not_finite_are_refused(tmp_path):
    saved = params(("proj.weight", "int8"))
    leaf = saved["layers"]["1"]["mlp"]["up_proj"]["weight"]
    bad = type(leaf)(leaf.values, leaf.scales.at[0, 3].set(jnp.nan), scheme=leaf.scheme)
    saved["layers"]["1"]["mlp"]["up_proj"]["weight"] = bad
    with pytest.raises(CheckpointError, match=r"'layers\.1\.mlp\.up_proj\.weight': 1 of 96 scales are not finite"):
        save_huggingface(CONFIG, saved, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_groups_with_inputs_left_over_are_refused(tmp_path):
    saved = params(("down_proj.weight", "int4-g64"))
    with pytest.raises(CheckpointError, match="groups of 64 inputs with 32 left over"):
        save_huggingface(CONFIG, saved, tmp_path / "saved")
