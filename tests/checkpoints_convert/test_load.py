import json
import logging
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh

from checkpoints_convert import CheckpointError, CheckpointNotFoundError, load
from checkpoints_convert.huggingface import checkpoint as checkpoint_module
from checkpoints_convert.huggingface.checkpoint import HuggingFaceCheckpoint
from jaxinfer.loading import load_model


def flat(params):
    return {".".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_parameters_are_the_stored_tensors(architecture, num_shards, checkpoint):
    source = checkpoint(architecture)
    config, params = load(source.write(num_shards))
    found = flat(params)
    assert (config.architecture, config.dtype, len(found)) == (architecture, "float32", len(source.tensors))
    layer = "model.layers.1.self_attn"
    assert np.array_equal(found["embed"], source.tensors["model.embed_tokens.weight"])
    assert np.array_equal(found["lm_head"], source.tensors["lm_head.weight"].T)
    assert np.array_equal(found["final_norm.weight"], source.tensors["model.norm.weight"])
    assert np.array_equal(found["layers.1.attention.k_proj.weight"], source.tensors[f"{layer}.k_proj.weight"].T)
    if architecture == "Qwen2ForCausalLM":
        assert np.array_equal(found["layers.1.attention.v_proj.bias"], source.tensors[f"{layer}.v_proj.bias"])
    if architecture == "Qwen3ForCausalLM":
        assert np.array_equal(found["layers.1.attention.q_norm.weight"], source.tensors[f"{layer}.q_norm.weight"])


@pytest.mark.matrix
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16", "float16"])
def test_dtype(stored, asked, checkpoint):
    source = checkpoint(dtype=stored)
    config, params = load(source.write(), dtype=asked)
    wanted = stored if asked == "auto" else asked
    assert config.dtype == wanted
    cast = source.tensors["model.embed_tokens.weight"].astype(jnp.dtype(wanted))
    assert (params["embed"].dtype, np.asarray(params["embed"]).tobytes()) == (jnp.dtype(wanted), cast.tobytes())


def test_mixed_dtypes_become_the_declared_one(checkpoint):
    source = checkpoint(torch_dtype="bfloat16")
    for name in source.tensors:
        if "norm" not in name:
            source.tensors[name] = source.tensors[name].astype(ml_dtypes.bfloat16)
    config, params = load(source.write())
    assert {config.dtype, *(str(leaf.dtype) for leaf in jax.tree.leaves(params))} == {"bfloat16"}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(value, checkpoint):
    source = checkpoint()
    source.tensors["model.layers.1.mlp.up_proj.weight"][3, 4:6] = value
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors: tensor 'model\.layers\.1\.mlp\.up_proj\.weight': 2 of 1536 values are NaN",
    ):
        load(source.write())


def test_values_too_large_for_the_dtype_are_refused(checkpoint):
    source = checkpoint()
    source.tensors["model.norm.weight"][5] = 1e6
    directory = source.write()
    assert load(directory, dtype="bfloat16")[1]["final_norm"]["weight"][5] == jnp.bfloat16(1e6)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight': 1 of 32 values are too large for float16"):
        load(directory, dtype="float16")


def test_tied_copy_of_the_embedding_is_ignored(checkpoint):
    source = checkpoint(tied=True)
    source.tensors["lm_head.weight"] = source.tensors["model.embed_tokens.weight"].copy()
    config, params = load(source.write())
    assert config.tie_word_embeddings
    assert "lm_head" not in params


def test_tied_head_with_values_of_its_own_is_used(checkpoint, caplog):
    source = checkpoint(tied=True)
    head = source.tensors["lm_head.weight"] = source.tensors["model.embed_tokens.weight"] * 2
    with caplog.at_level(logging.WARNING):
        config, params = load(source.write())
    assert not config.tie_word_embeddings
    assert np.array_equal(params["lm_head"], head.T)
    assert "lm_head.weight differs from the embedding" in caplog.text


def test_mesh_replicates(checkpoint):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    _, params = load(checkpoint().write(), mesh=mesh)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params))
    assert all(leaf.sharding.device_set == set(jax.devices()) for leaf in jax.tree.leaves(params))


def test_progress_ends_at_the_total(checkpoint):
    seen = []
    _, params = load(checkpoint().write(), progress=lambda name, done, total: seen.append((name, done, total)))
    assert [name for name, *_ in seen][:1] == ["embed"]
    assert {total for *_, total in seen} == {sum(leaf.nbytes for leaf in jax.tree.leaves(params))}
    assert seen[-1][1] == seen[-1][2]
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds neither config.json nor jaxinfer_config.json"),
        ({"config.json": "{"}, r"config\.json: is not JSON"),
        ({"config.json": '{"architectures": ["GPT9"]}', "model.safetensors": ""}, "too short"),
        ({"config.json": "{}", "pytorch_model.bin": "x"}, "pickled checkpoints can run code"),
    ],
)
def test_directories_that_are_no_checkpoint(files, message, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_missing_directory_is_also_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such directory"):
        load(tmp_path / "none")
    with pytest.raises(CheckpointNotFoundError, match="no such directory"):
        load(f"{tmp_path}/none")


def test_file_instead_of_its_directory_is_explained(checkpoint):
    directory = checkpoint().write()
    with pytest.raises(CheckpointError, match="is a file: pass the directory it lies in"):
        load(directory / "model.safetensors")


def test_options_that_do_not_apply_are_refused(checkpoint):
    directory = checkpoint().write()
    with pytest.raises(ValueError, match=r"no checksum is known of model\.safetensors"):
        load(directory, verify=True)
    with pytest.raises(ValueError, match="revision='main' is for hub ids"):
        load(directory, revision="main")
    with pytest.raises(ValueError, match="dtype='fp8' is not"):
        load(directory, dtype="fp8")


def test_every_flipped_header_bit_is_noticed(checkpoint):
    directory = checkpoint().write()
    path = directory / "model.safetensors"
    good = path.read_bytes()
    end = 8 + int.from_bytes(good[:8], "little")
    start = good.index(b"}", 8) + 1  # after the metadata, which is free text
    random = np.random.default_rng(0)
    for _ in range(150):
        bad = bytearray(good)
        bad[random.integers(start, end)] ^= 1 << random.integers(8)
        if bytes(bad[:end]).rstrip() == good[:end].rstrip():
            continue
        path.write_bytes(bad)
        with pytest.raises(CheckpointError):
            HuggingFaceCheckpoint(directory)


def test_every_truncation_is_noticed(checkpoint):
    directory = checkpoint().write()
    path = directory / "model.safetensors"
    good = path.read_bytes()
    for length in [*range(20), *np.random.default_rng(0).integers(20, len(good) - 1, 40), len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            HuggingFaceCheckpoint(directory)


def test_config_that_does_not_fit_the_tensors_fails_before_reading(checkpoint):
    source = checkpoint()
    directory = source.write()
    (directory / "config.json").write_text(json.dumps({**source.config, "num_hidden_layers": 3}))
    with pytest.raises(
        CheckpointError, match=r"9 problems(.|\n)*model\.layers\.2\.mlp\.down_proj\.weight' \[32, 48\] is missing"
    ):
        load(directory)


def test_a_model_is_planned_once(checkpoint, monkeypatch):
    """Parameters, scales of the cache, tokenizer and end tokens come from one open checkpoint."""
    plan = Mock(side_effect=checkpoint_module.plan)
    monkeypatch.setattr(checkpoint_module, "plan", plan)
    directory = checkpoint().write()
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    loaded = load_model(directory)
    assert (plan.call_count, loaded.eos_token_ids) == (1, (2, 7))


def test_a_generation_config_closes_no_model(checkpoint):
    directory = checkpoint().write()
    config = {"temperature": 0.000001, "max_new_tokens": 32768.0, "eos_token_id": [7.0, 2], "top_p": -1}
    (directory / "generation_config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=r"generation_config.json asks for top_p=-1, which is not applied"):
        loaded = load_model(directory)
    assert (loaded.default_params.temperature, loaded.default_params.max_tokens) == (0, 32768)
    assert loaded.eos_token_ids == (2, 7)
    shorter, length = loaded.for_length(16)
    assert (shorter.default_params.max_tokens, length) == (None, 16)
