"""What only a process of its own shows: signals, broken pipes, tracebacks."""

import signal

import pytest


@pytest.fixture
def slow_model(tmp_path, model) -> str:
    """The same weights with room for an answer that takes minutes."""
    import json
    import shutil

    path = tmp_path / "long"
    shutil.copytree(model, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100_000}))
    return str(path)


ENDLESS = ["--max-model-len", "100000", "--max-tokens", "none", "--ignore-eos", "--max-seqs", "1"]


@pytest.mark.slow
def test_ctrl_c_is_130_with_a_short_message(jaxinfer_process, slow_model):
    with jaxinfer_process("generate", "hi", "-m", slow_model, "--no-progress", *ENDLESS) as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert error == "interrupted\n"


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(jaxinfer_process, slow_model):
    with jaxinfer_process("generate", "hi", "-m", slow_model, *ENDLESS) as process:
        process.stdout.read(1)
        process.stdout.close()
        error = process.stderr.read()
        assert process.wait(timeout=60) == 141
    assert error == ""


@pytest.mark.slow
def test_traceback_on_demand_and_an_encoding_that_cannot_say_it(jaxinfer_process, tmp_path):
    with jaxinfer_process("generate", "hi", "-m", tmp_path / "ü", env={"PYTHONIOENCODING": "ascii"}) as process:
        output, error = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "")
    assert error.startswith("error: ")
    assert "\\xfc: no such" in error
    assert error.count("\n") == 1
    with jaxinfer_process("generate", "hi", "-m", tmp_path / "x", env={"JAXINFER_TRACEBACK": "1"}) as process:
        output, error = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "")
    assert error.startswith("Traceback (most recent call last)")
