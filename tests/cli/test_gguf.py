"""A GGUF file where a model is named: every command answers as from the folder that the file was made from."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfer import LLM, SamplingParams
from jaxinfer.progress import Stage
from tests.checkpoints_convert.gguf.gguf_models import metadata_of, tensors_of
from tests.checkpoints_convert.gguf.gguf_writer import Blocks, q8_0, write

GREEDY = ("--temperature", "0", "--max-tokens", "6")


@pytest.fixture(scope="module")
def parts(model):
    """Metadata and tensors of the folder's model and tokenizer."""
    folder = Path(model)
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    named = {"bos_token_id": config.get("bos_token_id") or 256, "eos_token_id": 256}
    metadata = {
        **metadata_of({**config, **named}),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3 if token.startswith("<|") else 1 for token in tokens], np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": json.loads((folder / "tokenizer_config.json").read_text())["chat_template"],
    }
    return metadata, tensors_of(config, load_file(folder / "model.safetensors"))


@pytest.fixture(scope="module")
def gguf(parts, tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf", *parts)


@pytest.fixture(scope="module")
def q8(parts, tmp_path_factory):
    """With all matrices in Q8_0."""
    metadata, tensors = parts
    rounded = {name: q8_0(array) if array.ndim == 2 else array for name, array in tensors.items()}
    return write(tmp_path_factory.mktemp("gguf") / "model-q8_0.gguf", metadata, rounded)


def test_generate(jaxinfer, model, gguf):
    found = jaxinfer("generate", "def f", "-m", gguf, *GREEDY)
    assert (found.exit_code, found.stderr) == (0, "")
    assert found.stdout == jaxinfer("generate", "def f", "-m", model, *GREEDY).stdout


@pytest.mark.slow
def test_chat_score_and_batch(jaxinfer, json_lines, model, gguf, tmp_path):
    found, wanted = (jaxinfer("chat", "-m", name, *GREEDY, "--json", input="hello\n").stdout for name in (gguf, model))
    assert [line.get("text") for line in json_lines(found)] == [line.get("text") for line in json_lines(wanted)]
    options = ["--prompt", "def ", "--continuation", "f", "--json"]
    found, wanted = (json_lines(jaxinfer("score", "-m", name, *options).stdout)[0] for name in (gguf, model))
    assert {**found, "timings": 0} == {**wanted, "timings": 0}
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "def f"}\n{"prompt": "import "}\n')
    texts = []
    for number, name in enumerate((gguf, model)):
        out = tmp_path / f"{number}.jsonl"
        result = jaxinfer("batch", rows, out, "-m", name, *GREEDY)
        assert result.exit_code == 0, result.stderr
        texts.append([json.loads(line)["outputs"] if "outputs" in line else json.loads(line) for line in out.open()])
    assert len(texts[0]) == 2
    assert [_text(row) for row in texts[0]] == [_text(row) for row in texts[1]]


def _text(row) -> str:
    while not isinstance(row, str):
        row = row[0] if isinstance(row, list) else row.get("text", row.get("outputs"))
    return row


@pytest.mark.slow
def test_convert_and_verify(jaxinfer, q8, tmp_path):
    made = jaxinfer("convert", q8, tmp_path / "native")
    assert made.exit_code == 0, made.stderr
    checked = jaxinfer("verify", tmp_path / "native", "--against", q8)
    assert checked.exit_code == 0, checked.stdout + checked.stderr
    answer = jaxinfer("generate", "def f", "-m", tmp_path / "native", *GREEDY).stdout
    assert answer == jaxinfer("generate", "def f", "-m", q8, *GREEDY).stdout


@pytest.mark.slow
def test_requantize(jaxinfer, json_lines, parts, tmp_path):
    metadata, tensors = parts
    q8_again = {name: q8_0(array) if array.ndim == 2 else array for name, array in tensors.items()}
    down = tensors["blk.0.ffn_down.weight"]
    scaled = np.zeros((*down.shape[:-1], down.shape[-1] // 32, 20), np.uint8)
    scaled[..., :2] = np.array([0.01], "<f2").view(np.uint8)
    q4_1 = Blocks("Q4_1", scaled.reshape(down.shape[0], -1))
    path = write(tmp_path / "model.gguf", metadata, {**q8_again, "blk.0.ffn_down.weight": q4_1})
    [report] = json_lines(jaxinfer("convert", path, tmp_path / "a", "--requantize", "int4-g32", "--json").stdout)
    assert list(report["requantize_errors"]) == ["layers.0.mlp.down_proj.weight"]
    told = jaxinfer("convert", path, tmp_path / "b", "--requantize", "int4-g32").stdout
    assert "rounded     1 weights rounded to int4-g32: relative error" in told
    refused = jaxinfer("generate", "x", "-m", path, "--requantize", "int99")
    assert refused.exit_code == 1
    assert "requantize='int99' is not 'dense' or one of" in refused.stderr
    assert jaxinfer("generate", "x", "-m", path, "--requantize", "dense", *GREEDY).exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "plan"])
def test_rounding_what_is_quantized_names_the_option_that_allows_it(jaxinfer, q8, command):
    arguments = {"run": (q8, "def f", *GREEDY), "plan": (q8, "--on", "v5e", "--no-compile")}[command]
    refused = jaxinfer(command, *arguments, "--quantize", "int4")
    assert refused.exit_code == 1
    assert "others are quantized already" in refused.stderr
    assert "--requantize dense" in refused.stderr
    done = jaxinfer(command, *arguments, "--quantize", "int4", "--requantize", "dense")
    assert done.exit_code == 0, done.stderr


def test_rounding_what_is_quantized_is_refused_before_weights_are_read(q8, monkeypatch):
    monkeypatch.setattr("checkpoints_convert.gguf.checkpoint.GGUFCheckpoint.read_param", None)
    with pytest.raises(ValueError, match="requantize='dense'"):
        LLM(q8, quantize="int4")


def test_an_unknown_pre_tokenizer_and_its_override(jaxinfer, model, parts, tmp_path):
    metadata, tensors = parts
    path = write(tmp_path / "model.gguf", {**metadata, "tokenizer.ggml.pre": "unheard-of"}, tensors)
    refused = jaxinfer("generate", "def f", "-m", path, *GREEDY)
    assert refused.exit_code == 1
    assert "tokenizer.ggml.pre is 'unheard-of'" in refused.stderr
    assert "--tokenizer" in refused.stderr
    answer = jaxinfer("generate", "def f", "-m", path, "--tokenizer", model, *GREEDY)
    assert answer.stdout == jaxinfer("generate", "def f", "-m", model, *GREEDY).stdout
    assert jaxinfer("convert", path, tmp_path / "a").exit_code == 1
    assert jaxinfer("convert", path, tmp_path / "b", "--tokenizer", model).exit_code == 0
    assert (tmp_path / "b" / "tokenizer.json").read_bytes() == (Path(model) / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_a_quantized_file_is_dequantized_to_be_quantized(jaxinfer, q8, tmp_path):
    done = jaxinfer("quantize", q8, tmp_path / "out", "--method", "rtn", "--group-size", "32")
    assert done.exit_code == 0, done.stderr
    assert "weights are quantized already, and are dequantized to be rounded again" in done.stderr
    with LLM(tmp_path / "out", max_model_len=96) as found:
        assert "int4, 32 inputs a scale" in str(found.explain())


@pytest.mark.slow
def test_long_commands_show_the_time_left(jaxinfer, q8, tmp_path, monkeypatch):
    lines: dict[str, str] = {}

    def leave(stage, *exception, leave=Stage.__exit__):
        lines[stage.description] = stage.line()
        leave(stage, *exception)

    monkeypatch.setattr(Stage, "__exit__", leave)
    assert jaxinfer("convert", q8, tmp_path / "hf", "--to", "huggingface").exit_code == 0
    assert jaxinfer("quantize", q8, tmp_path / "q", "--method", "rtn", "--group-size", "32").exit_code == 0
    for long in ("converting", "quantizing", "writing", "loading the checkpoint and comparing"):
        assert lines[long].endswith(" left") or " left, " in lines[long], lines[long]
    assert " left" not in lines["preparing"]


@pytest.mark.slow
def test_the_library(gguf, q8, llm):
    wanted = llm.generate("def f", SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids
    with LLM(gguf, max_model_len=96) as found:
        assert found.generate("def f", SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids == wanted
        assert found.eos_token_ids == (256,)
    with LLM(str(q8), max_model_len=96) as found:
        assert "int8, 32 inputs a scale" in str(found.explain())
        assert len(found.generate("def f", SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids) > 0
    with pytest.raises(ValueError, match="requantize='dense' is for GGUF files"):
        LLM("demo", requantize="dense")
