"""`jaxinfer convert` and `jaxinfer verify`."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="module")
def converted(tmp_path_factory, model) -> Path:
    import checkpoints_convert

    path = tmp_path_factory.mktemp("converted") / "native"
    checkpoints_convert.convert(model, path, progress=None)
    return path


@pytest.fixture(scope="module")
def other_model(tmp_path_factory, model) -> Path:
    """The same checkpoint with one matrix of the second layer changed."""
    from safetensors.numpy import load_file, save_file

    path = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(model, path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.slow
def test_convert_and_verify(jaxinfer, model, tmp_path):
    path = tmp_path / "native"
    result = jaxinfer("convert", model, path, "--verify")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "LlamaForCausalLM, 2 layers" in result.stdout
    result = jaxinfer("verify", path, "--against", model)
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.search(r"files +\d+ match their checksums\n", result.stdout)
    assert "max |dlogit|     0\n" in result.stdout
    assert result.stdout.endswith("result           passed\n")
    again = jaxinfer("convert", model, path)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "exists" in again.stderr
    assert jaxinfer("convert", model, path, "--overwrite").exit_code == 0


def test_convert_reports_json(jaxinfer, json_lines, model, tmp_path):
    path = tmp_path / "half"
    result = jaxinfer("convert", model, path, "--dtype", "bfloat16", "--to", "huggingface", "--json")
    [data] = json_lines(result.stdout)
    assert data["destination"] == str(path)
    assert data["config"]["dtype"] == "bfloat16"
    assert "problems" not in data  # nothing was verified
    assert 0 < max(data["cast_errors"].values()) < 0.01
    assert json.loads((path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    text = jaxinfer("convert", model, tmp_path / "second", "--dtype", "bfloat16").stdout
    assert "largest relative error" in text


def test_convert_verifies_what_it_wrote(jaxinfer, json_lines, model, tmp_path, monkeypatch):
    from checkpoints_convert import TensorDifference

    differences = [TensorDifference("embed", 3, 64, 0.5)]
    monkeypatch.setattr("checkpoints_convert.compare_tensors", lambda *_, **__: differences)
    result = jaxinfer("convert", model, tmp_path / "native", "--verify", "--json")
    assert (result.exit_code, result.stderr) == (1, "error: embed: 3 of 64 values differ\n")
    assert json_lines(result.stdout)[0]["problems"] == ["embed: 3 of 64 values differ"]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, model) -> Path:
    """An adapter of the tiny model, which calls its base `tiny`."""
    from checkpoints_convert import open_checkpoint
    from checkpoints_convert.adapters import Adapter, LowRank, save_adapter

    with open_checkpoint(model) as checkpoint:
        config = checkpoint.config
    random, width = np.random.default_rng(0), config.num_heads * config.head_dim
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((config.hidden_size, 4), (4, width)))
    pairs = {f"layers.{layer}.attention.q_proj": LowRank(a, b, 2.0) for layer in range(config.num_layers)}
    return save_adapter(Adapter(pairs, base_model="owner/tiny"), tmp_path_factory.mktemp("lora") / "lora", config)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["native", "huggingface"])
def test_convert_merges_an_adapter(jaxinfer, json_lines, model, adapter, to, tmp_path):
    from jaxinfer import LLM, SamplingParams

    path = tmp_path / "merged"
    result = jaxinfer("convert", model, path, "--merge-lora", adapter, "--to", to, "--verify")
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.search(r"merged +\S+/lora, which changes 2 parameters\n", result.stdout)
    answers = [
        LLM(name).generate(["What is it?"], SamplingParams(max_tokens=6, temperature=0))[0].outputs[0].token_ids
        for name in (model, path)
    ]
    assert answers[0] != answers[1]
    [data] = json_lines(
        jaxinfer("convert", model, path, "--merge-lora", adapter, "--overwrite", "--json", "--verify").stdout
    )
    assert (data["adapter"], data["num_changed"], data["num_dequantized"]) == (str(adapter), 2, 0)
    assert data["problems"] == []


def test_convert_refuses_another_base(jaxinfer, other_model, adapter, tmp_path):
    result = jaxinfer("convert", other_model, tmp_path / "out", "--merge-lora", adapter)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is 'owner/tiny', the base model is" in result.stderr
    assert "--base-model owner/tiny" in result.stderr
    assert not list(tmp_path.iterdir())
    named = ("--merge-lora", adapter, "--base-model", "owner/tiny")
    assert jaxinfer("convert", other_model, tmp_path / "out", *named).exit_code == 0


def test_convert_verifies_the_merged_values(jaxinfer, model, adapter, tmp_path, monkeypatch):
    """They are compared with those of the adapter, not with the base's."""
    from checkpoints_convert.adapters.merge import Merge

    sums = iter(range(10**6))
    monkeypatch.setattr(Merge, "read", lambda self, path: self._base(path) + np.float32(next(sums)))
    result = jaxinfer("convert", model, tmp_path / "merged", "--merge-lora", adapter, "--verify")
    assert result.exit_code == 1
    assert "error: embed: " in result.stderr


def test_verify_compares_what_is_computed(jaxinfer, json_lines, converted, model, other_model):
    result = jaxinfer("verify", converted, "--against", other_model, "--json")
    assert result.exit_code == 1
    [data] = json_lines(result.stdout)
    assert not data["holds"]
    assert data["problems"] == []
    assert data["comparison"]["first_diverging"].startswith("layers.1")
    assert data["comparison"]["layer_differences"]["layers.0.residual"] == 0
    assert data["comparison"]["max_logit_difference"] > 0
    within = jaxinfer("verify", other_model, "--against", model, "--tolerance", "1e9")
    assert within.exit_code == 0
    assert re.search(r"files +none checked\nwithout checksum +\d+: config.json", within.stdout)


def test_verify_names_what_differs_for_people(jaxinfer, converted, other_model, monkeypatch):
    from checkpoints_convert import VerifyReport

    report = VerifyReport(320, 0.5, 0.01, 0.9, {"embed": 0.0, "layers.1.residual": 0.25}, "layers.1.residual")
    monkeypatch.setattr("checkpoints_convert.verify_against", lambda *_, **__: report)
    result = jaxinfer("verify", converted, "--against", other_model)
    assert result.exit_code == 1
    for words in ("max |dlogit|     0.5", "first diverging  layers.1.residual", "by               0.25", "90.00 %"):
        assert words in result.stdout
    assert result.stdout.endswith("failed\n")


def test_verify_finds_a_changed_byte(jaxinfer, json_lines, converted, tmp_path, model):
    path = tmp_path / "damaged"
    shutil.copytree(converted, path)
    config = path / "generation_config.json"
    config.write_bytes(config.read_bytes().replace(b"8", b"9"))
    result = jaxinfer("verify", path)
    assert result.exit_code == 1
    assert "generation_config.json: " in result.stdout
    assert "1 problem\n" in result.stdout
    [data] = json_lines(jaxinfer("verify", path, "--against", model, "--json").stdout)
    assert len(data["problems"]) == 1
    assert data["comparison"] is None


def test_errors(jaxinfer, model, tmp_path):
    result = jaxinfer("verify", model)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no checksum of its files is known" in result.stderr
    result = jaxinfer("convert", tmp_path / "none", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (1, "")
    assert jaxinfer("convert", model, tmp_path / "out", "--to", "onnx").exit_code == 2
    assert jaxinfer("verify", model, "--tolerance", "-1").exit_code == 2


def test_an_interrupted_conversion_says_how_to_go_on(jaxinfer, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("checkpoints_convert.convert", interrupt)
    result = jaxinfer("convert", "demo", "b")
    assert result.exit_code == 130
    assert "continues after the last complete layer" in result.stderr
    result = jaxinfer("convert", "demo", "b", "--to", "huggingface")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


DAMAGED = (
    ("generate", "hi", "-m", "damaged"),
    ("score", "--prompt", "a", "--continuation", "b", "-m", "damaged"),
    ("batch", "in.jsonl", "out.jsonl", "-m", "damaged"),
    ("chat", "damaged"),
)


@pytest.fixture
def damaged(converted, tmp_path, monkeypatch) -> Path:
    """A converted checkpoint in the working directory, one bit of whose largest file is flipped."""
    monkeypatch.chdir(tmp_path)
    path = shutil.copytree(converted, tmp_path / "damaged")
    file = max((file for file in path.rglob("d/*") if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    return file


@pytest.mark.parametrize("command", DAMAGED, ids=lambda command: command[0])
def test_damage_is_one_sentence(jaxinfer, damaged, command):
    result = jaxinfer(*command, input="hi\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: damaged: ")
    assert damaged.name in result.stderr
    assert result.stderr.count("\n") == 1
    assert not Path("out.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", DAMAGED, ids=lambda command: command[0])
def test_damage_leaves_no_traceback_when_the_process_ends(jaxinfer_process, damaged, command):
    with jaxinfer_process(*command) as process:
        output, error = process.communicate(timeout=120)
    assert (process.returncode, output) == (1, "")
    assert error.startswith("error: damaged: ")
    assert error.count("\n") == 1
