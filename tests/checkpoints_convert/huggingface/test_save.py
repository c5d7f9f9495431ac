import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from checkpoints_convert import CheckpointError, load, save_huggingface
from jaxinfer.models import ModelConfig, RopeConfig, abstract_params

CONFIG = ModelConfig("LlamaForCausalLM", 40, 16, 24, 2, 2, 1, 8, RopeConfig(rotary_dim=8), max_position_embeddings=64)


@pytest.fixture(scope="module")
def params():
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(random.standard_normal(leaf.shape), jnp.float32), abstract_params(CONFIG)
    )


def test_files_hold_the_transposed_weights_under_their_names(tmp_path, params):
    save_huggingface(CONFIG, params, tmp_path / "out", dtype="float32", extra_config={"eos_token_id": 3})
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert len(stored) == 2 * 9 + 3
    down = params["layers"]["1"]["mlp"]["down_proj"]["weight"]
    assert down.shape == (24, 16)
    assert np.array_equal(stored["model.layers.1.mlp.down_proj.weight"], down.T)
    assert np.array_equal(stored["model.embed_tokens.weight"], params["embed"])
    assert np.array_equal(stored["lm_head.weight"], params["lm_head"].T)
    data = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (data["eos_token_id"], data["bos_token_id"], data["torch_dtype"]) == (3, None, "float32")


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "auto"])
def test_weights_are_stored_in_the_dtype_asked_for(dtype, tmp_path, params):
    save_huggingface(CONFIG, params, tmp_path / "out", dtype=dtype)
    config, loaded = load(tmp_path / "out")
    wanted = jnp.dtype("float32" if dtype == "auto" else dtype)
    assert config == replace(CONFIG, dtype=str(wanted))
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.array_equal(a.astype(wanted), b), params, loaded))


def test_default_is_bfloat16(tmp_path, params):
    save_huggingface(CONFIG, params, tmp_path / "out")
    stored = np.fromfile(tmp_path / "out" / "model.safetensors", np.uint8)
    header = json.loads(bytes(stored[8 : 8 + int.from_bytes(bytes(stored[:8]), "little")]))
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"BF16"}


def test_large_models_are_split_into_shards(tmp_path, params):
    save_huggingface(CONFIG, params, tmp_path / "out", dtype="float32", max_shard_bytes=4000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    _, loaded = load(tmp_path / "out")
    assert jax.tree.all(jax.tree.map(jnp.array_equal, params, loaded))


def test_extra_files_are_copied(tmp_path, params):
    (tmp_path / "tokenizer.json").write_text("{}")
    save_huggingface(CONFIG, params, tmp_path / "out", extra_files=[tmp_path / "tokenizer.json"])
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_existing_checkpoint_is_kept_unless_asked(tmp_path, params):
    save_huggingface(CONFIG, params, tmp_path / "out", extra_config={"note": "first"})
    with pytest.raises(CheckpointError, match="out: exists: choose another destination"):
        save_huggingface(CONFIG, params, tmp_path / "out")
    assert "first" in (tmp_path / "out" / "config.json").read_text()
    save_huggingface(CONFIG, params, tmp_path / "out", overwrite=True)
    assert "first" not in (tmp_path / "out" / "config.json").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failure_leaves_the_old_checkpoint_and_nothing_else(tmp_path, params):
    save_huggingface(CONFIG, params, tmp_path / "out", extra_config={"note": "first"})
    broken = {**params, "embed": params["embed"].at[3, 4].set(jnp.nan)}
    with pytest.raises(CheckpointError, match="tensor 'embed': 1 of 640 values are NaN or infinite"):
        save_huggingface(CONFIG, broken, tmp_path / "out", overwrite=True)
    assert "first" in (tmp_path / "out" / "config.json").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_value_too_large_for_the_dtype_is_refused(tmp_path, params):
    large = {**params, "embed": params["embed"].at[0, 0].set(1e6)}
    with pytest.raises(CheckpointError, match="tensor 'embed': 1 of 640 values are NaN or infinite"):
        save_huggingface(CONFIG, large, tmp_path / "out", dtype="float16")


def test_parameters_that_do_not_fit_are_all_named(tmp_path, params):
    wrong = {**params, "embed": params["embed"].T, "extra": params["embed"]}
    del wrong["lm_head"]
    with pytest.raises(CheckpointError) as caught:
        save_huggingface(CONFIG, wrong, tmp_path / "out")
    assert caught.value.problems == (
        "parameter 'lm_head' is missing",
        "parameter 'extra' is not of this model",
        "parameter 'embed' is ArrayImpl of shape (16, 40), not an array (40, 16)",
    )
    assert not list(tmp_path.iterdir())


def test_too_little_room_is_noticed_before_writing(tmp_path, params, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1000))
    with pytest.raises(CheckpointError, match=r"needs .* \(\d+ bytes\), .* has .* \(1000 bytes\) free"):
        save_huggingface(CONFIG, params, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_dtype_of_mixed_parameters_must_be_chosen(tmp_path, params):
    mixed = {**params, "embed": params["embed"].astype("bfloat16")}
    with pytest.raises(CheckpointError, match="the parameters mix bfloat16 and float32: choose one"):
        save_huggingface(CONFIG, mixed, tmp_path / "out", dtype="auto")


def test_numpy_parameters_are_taken_too(tmp_path, params):
    as_numpy = jax.tree.map(lambda leaf: np.asarray(leaf).astype(ml_dtypes.bfloat16), params)
    save_huggingface(CONFIG, as_numpy, tmp_path / "out", dtype="auto")
    assert load(tmp_path / "out")[0].dtype == "bfloat16"
