"""`jaxinfer quantize`: a checkpoint that loads and computes what was calibrated, and nothing half-written."""

import json
from pathlib import Path

import numpy as np
import pytest

import checkpoints_convert
from jaxinfer import LLM, SamplingParams
from jaxinfer.quantization import QuantizedArray
from jaxinfer.quantization.tree import weights

TEXT = ["--samples", 16, "--length", 16]
SMALL = [*TEXT, "--group-size", 16]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A folder with a little text."""
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    for number in range(3):
        words = random.choice(["the ", "of ", "model ", "weight ", "\n", "token ", "in "], 60)
        (folder / f"{number}.txt").write_text("".join(words))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["gptq", *(pytest.param(name, marks=pytest.mark.slow) for name in ("awq", "smoothquant"))]
)
def test_a_checkpoint_is_written_and_opens(jaxinfer, json_lines, model, text, tmp_path, method):
    out = tmp_path / "out"
    small = TEXT if method == "smoothquant" else SMALL
    result = jaxinfer("quantize", model, out, "--method", method, "--calibration", text, *small, "--json")
    assert result.exit_code == 0, result.stderr
    [report] = json_lines(result.stdout)
    bits = 8 if method == "smoothquant" else 4
    assert (report["method"], report["bits"], report["num_quantized"]) == (method, bits, 14)
    assert report["max_logit_difference"] < 1e-3
    assert report["schemes"] == {
        "int8, a scale per output, activations int8" if bits == 8 else "int4, 16 inputs a scale": 14
    }
    assert 0 < report["quality"]["kl"] < 1
    assert report["quality"]["num_tokens"] == 32
    assert [len(layer["linears"]) for layer in report["layers"]] == [7, 7]
    data = json.loads((out / "config.json").read_text())["quantization_config"]
    assert data["format"] == ("int-quantized" if method == "smoothquant" else "pack-quantized")
    _, params = checkpoints_convert.load(out)
    assert sum(isinstance(leaf, QuantizedArray) for leaf in weights(params)) == 14
    assert not out.with_name("out.quantizing").exists()
    with LLM(out) as quantized, LLM(model) as original:
        assert quantized.eos_token_ids == original.eos_token_ids
        assert quantized.tokenizer.encode("text") == original.tokenizer.encode("text")
        assert quantized.tokenizer.chat_template == original.tokenizer.chat_template
        [answer] = quantized.generate("the model", SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(answer.outputs[0].token_ids) == 4


@pytest.mark.slow
def test_rounding_needs_no_text(jaxinfer, model, tmp_path):
    out = tmp_path / "out"
    result = jaxinfer(
        "quantize",
        model,
        out,
        "--method",
        "rtn",
        "--bits",
        8,
        "--keep",
        "*.down_proj",
        "--keep",
        "layers.1.mlp.up_proj=4",
    )
    assert result.exit_code == 0, result.stderr
    assert "weights       rtn: 11 int8, a scale per output; 1 int4, a scale per output" in result.stdout
    assert "held out" not in result.stdout
    assert "logits differ by at most" in result.stdout
    _, params = checkpoints_convert.load(out)
    assert not isinstance(params["layers"]["0"]["mlp"]["down_proj"]["weight"], QuantizedArray)
    assert params["layers"]["1"]["mlp"]["up_proj"]["weight"].scheme.bits == 4
    assert params["layers"]["0"]["mlp"]["up_proj"]["weight"].scheme.bits == 8

    again = jaxinfer("quantize", model, out, "--method", "rtn")
    assert (again.exit_code, again.stdout) == (1, "")
    assert "exists" in again.stderr
    assert jaxinfer("quantize", model, out, "--method", "rtn", "--overwrite").exit_code == 0


@pytest.mark.slow
def test_bits_are_chosen_within_a_budget(jaxinfer, json_lines, model, text, tmp_path):
    arguments = ["quantize", model, tmp_path / "out", "--calibration", text, *SMALL, "--bits", 3, "--json"]
    [plain] = json_lines(jaxinfer(*arguments).stdout)
    budget = plain["quality"]["kl"] / 2
    result = jaxinfer(*arguments, "--overwrite", "--method", "auto", "--max-kl", budget)
    assert result.exit_code == 0, result.stderr
    [report] = json_lines(result.stdout)
    assert report["quality"]["kl"] <= budget
    assert report["auto"]["kls"][-1] == report["quality"]["kl"]
    assert set(report["auto"]["bits"]) == {f"layers.{i}.{part}" for i in range(2) for part in ("attention", "mlp")}
    assert sum(report["auto"]["counts"].values()) == 4
    checkpoints_convert.load(tmp_path / "out")


@pytest.mark.slow
def test_an_interrupted_run_goes_on(jaxinfer, json_lines, model, text, tmp_path, monkeypatch):
    from jaxinfer.calibration import driver

    arguments = ["quantize", model, tmp_path / "out", "--calibration", text, *SMALL, "--json"]
    original = driver.quantize_layer

    def interrupt(program, number, *rest):
        if number == 1:
            raise KeyboardInterrupt
        return original(program, number, *rest)

    monkeypatch.setattr(driver, "quantize_layer", interrupt)
    result = jaxinfer(*arguments)
    assert (result.exit_code, result.stdout) == (130, "")
    assert "the same command continues" in result.stderr
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    [report] = json_lines(jaxinfer(*arguments).stdout)
    assert report["num_resumed"] == 1


@pytest.mark.slow
def test_what_is_not_the_same_is_not_published(jaxinfer, model, text, tmp_path, monkeypatch):
    from checkpoints_convert.huggingface import save
    from jaxinfer.calibration import verify

    def refused(*words):
        for word in ("is not the model that was calibrated", "nothing was written to", *words):
            assert word in result.stderr
        assert result.exit_code == 1
        assert not (tmp_path / "out").exists()

    with monkeypatch.context() as planted:  # weights are right, and W8A8 is written as weights alone
        groups = save.quantization_config

        def forget(*arguments, **more):
            config = groups(*arguments, **more)
            config["config_groups"]["group_0"]["input_activations"] = None
            return config

        planted.setattr(save, "quantization_config", forget)
        options = ["--method", "smoothquant", "--calibration", text, *TEXT]
        result = jaxinfer("quantize", model, tmp_path / "out", *options)
    refused(
        "layers.0.attention.q_proj.weight: int8, a scale per output instead of int8, a scale per output, activations"
    )
    with monkeypatch.context() as planted:
        logits = verify.logits
        planted.setattr(verify, "logits", lambda *arguments: logits(*arguments) * np.nan)
        result = jaxinfer("quantize", model, tmp_path / "out", "--method", "rtn")
    refused("logits differ by up to inf")


@pytest.mark.slow
def test_permuted_inputs_are_warned_of(jaxinfer, model, text, tmp_path):
    out = tmp_path / "out"
    arguments = ["--calibration", text, *SMALL, "--no-static-groups"]
    result = jaxinfer("quantize", model, out, *arguments)
    assert result.exit_code == 0, result.stderr
    assert '14 weights have permuted inputs (weight_g_idx, actorder "group")' in result.stderr
    assert "compressed-tensors 0.20 does not" in result.stderr
    group = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert group["weights"]["actorder"] == "group"
    assert jaxinfer("quantize", model, tmp_path / "one", *arguments[:-3], "--no-static-groups").stderr == ""


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (["--calibration", "missing"], 2, "--calibration missing: there is no such file or folder"),
        (["--method", "gptq"], 2, "--method gptq needs --calibration PATH"),
        (["--method", "auto", "--calibration", "TEXT"], 2, "--max-kl X is needed by --method auto, and by no other"),
        (["--method", "rtn", "--max-kl", 0.1], 2, "--max-kl X is needed by --method auto, and by no other"),
        (["--method", "auto", "--calibration", "TEXT", "--max-kl", -1], 2, "--max-kl must be positive, got -1.0"),
        (["--method", "smoothquant", "--bits", 4, "--calibration", "TEXT"], 2, "smoothquant makes weights of 8 bits"),
        (["--method", "rtn", "--keep", "x=99"], 2, "--keep: keep 'x': bits must be 2 to 8, or 16, got 99"),
        (["--method", "rtn", "--keep", "layers.9"], 1, "no linear layer is called 'layers.9'"),
        (["--method", "rtn", "--alpha", 0.5], 2, "--alpha is of --method smoothquant, not of rtn"),
        (["--method", "rtn", "--no-static-groups"], 2, "--static-groups is of --method gptq and auto, not of rtn"),
        (["--method", "gptq", "--calibration", "TEXT", "--no-clip"], 2, "--clip is of --method awq, not of gptq"),
        (["--method", "rtn", "--samples", 5], 2, "--samples is of --calibration, which is not given"),
        (["--method", "smoothquant", "--calibration", "TEXT", "--asymmetric"], 1, "makes symmetric weights"),
        (["--method", "rtn", "--bits", 9], 2, "less than or equal to 8"),
        (["--method", "rtn", "--group-size", 0], 2, "--group-size is a number of inputs, or -1 for all"),
        (
            ["--method", "rtn", "--group-size", 24],
            2,
            "--group-size 24: the 32 inputs of layers.0.attention.q_proj leave a remainder of 8, which "
            "compressed-tensors cannot store; --group-size 32 fits every layer, or keep the layer unquantized "
            "with --keep",
        ),
        (
            ["--method", "gptq", "--calibration", "TEXT", "--keep", "*.attention", "--group-size", 48],
            2,
            "--group-size 48: layers.0.mlp.gate_proj has 32 inputs",
        ),
        (["--method", "auto", "--max-kl", 1, "--calibration", "TEXT", "--group-size", 1000], 2, "has 32 inputs; -1 "),
        (["--calibration", "TEXT", "--length", 9000], 2, "are fewer than two pieces of 9000"),
    ],
)
def test_wrong_use_is_told(jaxinfer, model, text, tmp_path, change, code, words):
    change = [text if part == "TEXT" else part for part in change]
    result = jaxinfer("quantize", model, tmp_path / "out", *change)
    assert (result.exit_code, result.stdout) == (code, "")
    assert words in result.stderr
    assert list(tmp_path.iterdir()) == []
