"""A run of `jaxinfer quantize` that was killed goes on or begins anew; what it holds does not grow with the layers."""

import gc
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from safetensors.numpy import load_file, save_file

import checkpoints_convert
from checkpoints_convert.huggingface import save
from jaxinfer.calibration import driver
from jaxinfer.calibration.capture import LayerProgram
from jaxinfer.calibration.journal import CalibrationJournal
from jaxinfer.models import ModelConfig, RopeConfig, init_params

SMALL = ["--samples", 8, "--length", 16, "--group-size", 16]
# Nothing of the process runs after the first layer is in the journal.
KILLED = """
import os, signal
from jaxinfer.calibration.journal import CalibrationJournal
write = CalibrationJournal.write
def write_and_die(*arguments):
    write(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
CalibrationJournal.write = write_and_die
from jaxinfer.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"the weights of token {number} are small; " for number in range(60)))
    return path


@pytest.fixture(scope="module")
def killed(model, text, tmp_path_factory) -> Path:
    """What a process left that was killed when its first layer was finished."""
    folder = tmp_path_factory.mktemp("killed")
    arguments = ["quantize", model, folder / "out", "--calibration", text, *SMALL]
    process = subprocess.run(
        [sys.executable, "-c", KILLED, *map(str, arguments)],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert [path.name for path in folder.iterdir()] == ["out.quantizing"]
    work = folder / "out.quantizing"
    assert sorted(path.name for path in (work / "layers").iterdir()) == ["calibration.json", "layers.0.npz"]
    return work


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.slow
def test_the_same_command_goes_on_to_the_same_bytes(jaxinfer, json_lines, model, text, killed, tmp_path):
    arguments = ["--calibration", text, *SMALL, "--json"]
    [whole] = json_lines(jaxinfer("quantize", model, tmp_path / "whole", *arguments).stdout)
    shutil.copytree(killed, tmp_path / "out.quantizing")
    # A kill while it wrote, too.
    (tmp_path / "out.quantizing" / "checkpoint").mkdir()
    (tmp_path / "out.quantizing" / "checkpoint" / "model-00001-of-00002.safetensors").write_bytes(b"cut off")
    (tmp_path / "out.quantizing" / "layers" / "layers.1.tmp").write_bytes(b"cut off")
    [report] = json_lines(jaxinfer("quantize", model, tmp_path / "out", *arguments).stdout)
    assert (whole["num_resumed"], report["num_resumed"]) == (0, 1)
    assert report["layers"] == whole["layers"]
    assert report["quality"] == whole["quality"]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("what", ["source", "text", "method", "bits", "auto"])
def test_anything_else_begins_anew(jaxinfer, json_lines, model, text, killed, tmp_path, what):
    shutil.copytree(killed, tmp_path / "out.quantizing")
    change = {"method": ["--method", "awq"], "bits": ["--bits", 3], "auto": ["--method", "auto", "--max-kl", 10]}
    if what == "source":
        model = shutil.copytree(model, tmp_path / "source")
        tensors = load_file(model / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    if what == "text":
        text = tmp_path / "other.txt"
        text.write_text("".join(f"other weights of token {number}; " for number in range(90)))
    arguments = ["quantize", model, tmp_path / "out", "--calibration", text, *SMALL, *change.get(what, []), "--json"]
    result = jaxinfer(*arguments)
    assert result.exit_code == 0, result.stderr
    assert json_lines(result.stdout)[0]["num_resumed"] == 0


@pytest.mark.slow
def test_another_method_begins_anew_after_an_interrupted_auto(jaxinfer, json_lines, model, text, tmp_path, monkeypatch):
    original = driver.quantize_layer

    def interrupt(program, number, *rest):
        if number == 1:
            raise KeyboardInterrupt
        return original(program, number, *rest)

    arguments = ["quantize", model, tmp_path / "out", "--calibration", text, *SMALL, "--json"]
    auto = ["--method", "auto", "--max-kl", 10]
    with monkeypatch.context() as interrupted:
        interrupted.setattr(driver, "quantize_layer", interrupt)
        assert jaxinfer(*arguments, *auto).exit_code == 130
        again = jaxinfer(*arguments, *auto)
        assert again.exit_code == 130
    result = jaxinfer(*arguments, "--method", "gptq")
    assert result.exit_code == 0, result.stderr
    assert json_lines(result.stdout)[0]["num_resumed"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def num_bytes_alive() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def most_bytes(jaxinfer, folder: Path, num_layers: int, monkeypatch) -> int:
    """The most bytes of arrays alive at once, while a model of that many layers is quantized, written and compared."""
    config = ModelConfig(
        "LlamaForCausalLM", vocab_size=64, hidden_size=64, intermediate_size=128, num_layers=num_layers, num_heads=4,
        num_kv_heads=2, head_dim=16, rope=RopeConfig(rotary_dim=16),
    )  # fmt: skip
    source, most = folder / f"source-{num_layers}", 0
    checkpoints_convert.save_huggingface(config, init_params(config, jax.random.key(0)), source, "float32")
    before = num_bytes_alive()

    def watch(owner, name):
        original = getattr(owner, name)

        def watched(*arguments, **more):
            nonlocal most
            result = original(*arguments, **more)
            most = max(most, num_bytes_alive() - before)
            return result

        watching.setattr(owner, name, watched)

    with monkeypatch.context() as watching:
        for owner, name in (
            (CalibrationJournal, "write"),
            (CalibrationJournal, "read"),
            (LayerProgram, "forward"),
            (save, "save_file"),
        ):
            watch(owner, name)
        gc.freeze()  # collections then skip what other tests left
        try:
            result = jaxinfer("quantize", source, folder / f"out-{num_layers}", "--method", "rtn", "--group-size", 32)
        finally:
            gc.unfreeze()
    assert result.exit_code == 0, result.stderr
    return most


@pytest.mark.slow
def test_memory_does_not_grow_with_the_layers(jaxinfer, tmp_path, monkeypatch):
    few, many = (most_bytes(jaxinfer, tmp_path, num_layers, monkeypatch) for num_layers in (2, 4))
    norms = 2 * 64 * 4  # of a layer, which the shard under way holds
    assert 0 < many <= few + 2 * norms
