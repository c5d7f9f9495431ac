"""`jaxinfer bench`: from the command line to the file and the tables, and what is refused before the model opens."""

import json

import pytest

from jaxinfer.measure.bench import rates

OPTIONS = ("--max-model-len", "64", "--max-seqs", "2", "--prefill-chunk", "16", "--prompt-tokens", "4:8")
OPTIONS += ("--answer-tokens", "4")


@pytest.fixture(autouse=True)
def small_arrays(monkeypatch):
    monkeypatch.setattr(rates, "CPU_BYTES", 2**16)
    monkeypatch.setattr(rates, "CPU_MATMUL", 64)
    monkeypatch.setattr(rates, "MIN_SECONDS", 0.0)


@pytest.mark.slow
def test_load_is_written_rate_by_rate_and_resumed(jaxinfer, model, tmp_path):
    file = tmp_path / "load.json"
    arguments = ("bench", "load", model, *OPTIONS, "--requests", "3", "--json", file)
    first = jaxinfer(*arguments, "--rate", "50")
    assert first.exit_code == 0, first.output
    assert "0 programs compiled after warm-up" in first.stdout
    assert "measured rates" in first.stdout
    kept = json.loads(file.read_text())["runs"][0]
    second = jaxinfer(*arguments, "--rate", "50,inf", "--resume")
    assert second.exit_code == 0, second.output
    found = json.loads(file.read_text())
    assert [run["rate"] for run in found["runs"]] == [50.0, "inf"]
    assert found["runs"][0] == kept
    assert found["model"] == "tiny"
    assert str(tmp_path.parent) not in file.read_text()
    done = jaxinfer(*arguments, "--rate", "inf", "--resume")
    assert (done.exit_code, "has these rates already" in done.stdout) == (0, True)
    other = jaxinfer(*arguments, "--rate", "9", "--resume", "--seed", "4")
    assert (other.exit_code, "seed=0, not 4" in other.output) == (1, True)
    picture = tmp_path / "load.png"
    drawn = jaxinfer("bench", "plot", file, "--out", picture)
    assert drawn.exit_code == 0, drawn.output
    assert picture.exists()


@pytest.mark.slow
def test_latency_of_random_weights(jaxinfer, model, tmp_path):
    config = tmp_path / "shape"
    config.mkdir()
    from pathlib import Path

    (config / "config.json").write_text((Path(model) / "config.json").read_text())
    file = tmp_path / "latency.json"
    result = jaxinfer(
        "bench", "latency", config, "--random-weights", *OPTIONS, "--batch", "1,2", "--repeats", "1", "--json", file
    )
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert [run["batch"] for run in found["runs"]] == [1, 2]
    assert [run["answer_tokens"] for run in found["runs"]] == [4, 8]
    assert found["options"]["random_weights"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("load", "demo", "--rate", "0"), "--rate: '0'"),
        (("load", "demo", "--resume"), "--resume needs --json"),
        (("load", "demo", "--burstiness", "0"), "burstiness must be positive"),
        (("latency", "demo", "--batch", "a"), "--batch: 'a'"),
        (("latency", "demo", "--prompt-tokens", "9:3"), "--prompt-tokens: '9:3'"),
        (("throughput", "demo", "--goodput", "ttft"), "--goodput: 'ttft'"),
        (("throughput", "demo", "--json", "nowhere/a.json"), "--json: no folder"),
        (("plot", "a.json", "--out", "a.txt"), "--out: a.txt"),
        (("plot", "a.json", "--out", "a.png"), "a.json: No such file"),
    ],
)
def test_what_cannot_be_is_said_before_the_model_opens(jaxinfer, arguments, message, monkeypatch):
    monkeypatch.setattr(
        "jaxinfer.measure.bench.model.opened", lambda *rest, **more: pytest.fail("the model was opened")
    )
    result = jaxinfer("bench", *arguments)
    assert result.exit_code in (1, 2)
    assert message in result.output.replace("\n", " ")


@pytest.mark.parametrize("name", ["latency", "throughput", "load", "plot"])
def test_help_names_all_options(jaxinfer, name):
    result = jaxinfer("bench", name, "--help")
    assert result.exit_code == 0
    assert "…" not in result.stdout
