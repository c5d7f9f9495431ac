"""What the files of sentence-transformers say, and what is refused of them, with file and field."""

import json

import numpy as np
import pytest

from checkpoints_convert import convert
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import companion_files
from checkpoints_convert.huggingface.config import is_headless, model_config
from jaxinfer.embedding_files import EmbeddingConfig, read_embedding_config
from tests.oracle.embedding_cases import CASES, QUERY, write


def test_every_kind_is_read(tmp_path):
    found = {name: read_embedding_config(write(tmp_path / name, case)) for name, case in CASES.items()}
    assert found.pop("qwen3_reranker") is None
    assert [one.pooling for one in found.values()] == ["last"] * 3 + ["mean"] * 2 + ["cls", "last"]
    assert found["qwen3_last"].prompt("query") == QUERY
    assert found["qwen3_last"].prompt(None) == found["llama_mean"].prompt("document") == ""
    assert found["llama_mean_of_text"].prompt(None) == QUERY
    assert not found["llama_mean_of_text"].includes_prompt
    assert not found["llama_mean"].normalizes
    assert found["qwen2_short"].max_length == 24
    (dense,) = found["qwen2_cls"].dense
    assert np.allclose(dense(np.zeros((1, 32), np.float32)), np.tanh(dense.bias))
    copied = companion_files(tmp_path / "qwen2_cls")
    assert {"modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"} <= {*copied}


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "pooling max is not supported, one of lasttoken, mean, cls"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, "pooling cls and mean is not supported"),
        ("1_Pooling/config.json", {"include_prompt": "no"}, "include_prompt must be bool, got 'no'"),
        (
            "2_Dense/config.json",
            {"activation_function": "torch.nn.GELU"},
            "activation_function 'GELU' is not supported",
        ),
        ("2_Dense/config.json", {"out_features": 5}, r"linear.weight of shape \(5, 32\) is needed"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "default_prompt_name 'x' is none of"),
        ("config_sentence_transformers.json", {"prompts": {"x": 3}}, "prompts.x must be str, got 3"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length must be positive, got 0"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, file, changes, message):
    folder = write(tmp_path, CASES["qwen2_cls"])
    data = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**data, **changes}))
    with pytest.raises(ValueError, match=message) as error:
        read_embedding_config(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([{"type": "sentence_transformers.models.Transformer", "path": ""}], "it has no module Pooling"),
        ([{"type": "a.WordEmbeddings", "path": ""}], "module 0 is 'WordEmbeddings', which is not supported"),
        ([{"type": "a.Pooling", "path": "../x"}], "path '../x' is not the name of a folder"),
        ({}, "a list is needed"),
    ],
)
def test_modules_that_are_not_supported_are_refused(tmp_path, modules, message):
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=message):
        read_embedding_config(tmp_path)


def test_models_without_a_head_are_not_written(tmp_path):
    """What is written could not be told to have none."""
    source = write(tmp_path / "source", CASES["mistral_last"])
    with pytest.raises(CheckpointError, match="its model has no head"):
        convert(source, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_attention_in_both_directions_is_refused(tmp_path):
    data = json.loads((write(tmp_path, CASES["mistral_last"]) / "config.json").read_text())
    assert is_headless(data)
    assert model_config(data).tie_word_embeddings
    with pytest.raises(CheckpointError, match="is_causal is false, which is not supported: tokens would attend to"):
        model_config({**data, "is_causal": False})
    with pytest.raises(CheckpointError, match="use_bidirectional_attention is true, which is not supported"):
        model_config({**data, "use_bidirectional_attention": True})
    with pytest.raises(CheckpointError, match="'NVEmbedModel' is not supported"):
        model_config({**data, "architectures": ["NVEmbedModel"]})


def test_prompts_by_other_names_of_documents():
    assert EmbeddingConfig(prompts={"passage": "passage: "}).prompt("document") == "passage: "
    with pytest.raises(ValueError, match=r"prompt_name='qurey'.*query.* is none of the model's prompts: 'query'"):
        EmbeddingConfig(prompts={"query": "q"}).prompt("qurey")
