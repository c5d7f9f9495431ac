"""`jaxinfer advise`: measured on a tiny model, stopped and resumed; planned from a config.json; what is refused."""

import json
import shlex

import pytest
import typer.main

from jaxinfer.cli.main import app
from jaxinfer.measure.advise import measure
from tests.cli.conftest import CONFIG

OPTIONS = ("--max-model-len", 64, "--prefill-chunk", 30, "--prompt-tokens", "6:10", "--answer-tokens", 4)
OPTIONS += ("--repeats", 2, "--sizes", "1,2", "--requests", 3)


def parses(line: str) -> bool:
    """Whether the command line takes a recommended command, without running it."""
    program, name, *arguments = shlex.split(line)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    command.make_context(name, arguments)
    return program == "jaxinfer"


def recommended(text: str) -> str:
    return next(line.strip() for line in text.splitlines() if line.startswith(("  jaxinfer batch", "  jaxinfer gen")))


@pytest.mark.slow
def test_measured_written_and_resumed(jaxinfer, model, tmp_path, monkeypatch):
    text = tmp_path / "texts.txt"
    text.write_text("def read(path):\n    return open(path).read()\n" * 20)
    file = tmp_path / "advice.json"
    # Float weights, and their 8 and 4 bits as float copies, run the same programs on a CPU.
    arguments = ("advise", model, *OPTIONS, "--texts", text, "--json", file, "--goal", "users")
    arguments += ("--max-seqs", 2, "--kv-dtype", "auto")
    lab_call, seen = measure.TrialRunner.__call__, []

    def stops(lab, arguments, *more):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(arguments)
        return lab_call(lab, arguments, *more)

    with monkeypatch.context() as patched:
        patched.setattr(measure.TrialRunner, "__call__", stops)
        stopped = jaxinfer(*arguments)
    assert stopped.exit_code == 130, stopped.output
    assert "Recommended" in stopped.stdout  # of what was measured until then
    assert "The baseline was measured only once" in stopped.stdout
    kept = json.loads(file.read_text())
    assert (len(kept["base"]), len(kept["alone"])) == (1, 1)

    result = jaxinfer(*arguments, "--resume")
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert found["base"][0] == kept["base"][0]
    assert found["alone"][0] == kept["alone"][0]
    by_name = {row["name"]: row for row in found["alone"]}
    quantized = {"--quantize int8", "--quantize int4-g128"}
    assert quantized == {name for name in by_name if "--mesh" not in name}  # meshes where there are several devices
    assert all(row["reason"] is None for row in by_name.values()), by_name
    assert 0 < by_name["--quantize int8"]["kl"] < by_name["--quantize int4-g128"]["kl"]
    assert by_name["--quantize int8"]["notes"] == [], "multiplied as stored, by Numba's kernel"
    assert len(found["base"]) == 2
    assert [(len(row["rate"]), len(row["one"])) for row in found["base"]] == [(2, 2), (1, 1)]  # the second once
    assert str(tmp_path.parent) not in file.read_text()
    assert parses(recommended(result.stdout))
    for word in ("baseline again", "KL and prompts: your --texts", "LLM("):
        assert word in result.stdout

    other = jaxinfer(*arguments, "--resume", "--seed", 4)
    assert (other.exit_code, "seed=0, not 4" in other.output) == (1, True)


@pytest.mark.slow
def test_an_option_that_is_given_is_kept(jaxinfer, model, tmp_path):
    file = tmp_path / "advice.json"
    given = ("--quantize", "int8", "--kv-dtype", "auto", "--max-seqs", 2, "--minutes", 0)
    result = jaxinfer("advise", model, *OPTIONS, *given, "--goal", "quality", "--json", file)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert [row["reason"] for row in found["alone"]] == ["not tried: time limit reached"] * len(found["alone"])
    assert {"weights", "batch sizes"} <= set(found["not_tried"])
    assert "text sampled from the model" in result.stdout
    assert "--quantize int8" in recommended(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["cost", "latency", "users", "quality"])
def test_planned_from_a_config_json(jaxinfer, config_alone, goal, tmp_path):
    file = tmp_path / "plan.json"
    result = jaxinfer("advise", config_alone, "--on", "v5e:2x2", "--goal", goal, "--json", file)
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(file.read_text())
    by_name = {row["name"]: row for row in found["alone"]}
    int8 = by_name["--quantize int8"]
    assert int8["weight_bytes"] < 0.8 * found["base"][0]["weight_bytes"]
    assert int8["tpot"][0] < found["base"][0]["tpot"][0]
    assert int8["kl"] is None
    assert "no KL is measured" in result.stdout
    assert parses(recommended(result.stdout))
    assert parses(result.stdout.splitlines()[-1].partition(": ")[2])  # jaxinfer plan
    if goal in ("cost", "latency"):
        assert "acceptance cannot be planned" in by_name["--draft ngram"]["reason"]


def test_planned_with_an_acceptance(jaxinfer, config_alone, tmp_path):
    file = tmp_path / "plan.json"
    options = ("--on", "v5e:1x1", "--goal", "latency", "--json", file, "--draft", "layers:1")
    assert jaxinfer("advise", config_alone, *options, "--acceptance", 0.9).exit_code == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["alone"]}
    [ngram] = [row for name, row in rows.items() if "ngram" in name]
    base = json.loads(file.read_text())["base"][0]
    assert ngram["tpot"][0] < base["tpot"][0]
    assert ngram["arguments"]["num_draft_tokens"] in (2, 4, 8)


@pytest.mark.slow
def test_what_does_not_fit_is_recommended_smaller(jaxinfer, config_alone, tmp_path):
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 24, "num_attention_heads": 64}
    large |= {"num_key_value_heads": 8, "head_dim": 128}
    (config_alone / "config.json").write_text(json.dumps({**CONFIG, **large}))
    result = jaxinfer("advise", config_alone, "--on", "v6e:1x1")
    assert result.exit_code == 0, result.stderr
    assert "does not fit" in result.stdout
    assert "--quantize int8" in recommended(result.stdout)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--goal", "speed"), 2, "--goal: 'speed' is none of cost"),
        (("--resume",), 2, "--resume needs --json"),
        (("--json", "nowhere/a.json"), 2, "--json: no folder"),
        (("--goodput", "ttft:5"), 2, "--goodput is for --goal users"),
        (("--goal", "users", "--goodput", "ttft"), 1, "--goodput: 'ttft'"),
        (("--acceptance", "0.5"), 2, "--acceptance: it is measured"),
        (("--on", "v5e:1x1", "--max-kl", "0.1"), 2, "--max-kl: nothing runs with --on"),
        (("--on", "v5e:1x1", "--seed", "3"), 2, "--seed: nothing runs with --on"),
        (("--on", "v5e:1x1", "--repeats", "9"), 2, "--repeats: nothing runs with --on"),
        (("--on", "v5e:1x1", "--no-prefix-cache"), 2, "--prefix-cache: nothing runs with --on"),
        (("--on", "v5e:1x1", "--max-model-len", "64"), 2, "--max-model-len: nothing runs with --on"),
        (("--on", "v5e:1x1", "--memory", "3"), 2, "--memory: nothing runs with --on"),
        (("--on", "v9"), 1, "no chip is called 'v9'"),
        (("--memory", "0"), 2, "--memory must be positive"),
        (("--sizes", "1,x"), 2, "--sizes: '1,x'"),
        (("--prompt-tokens", "9:3"), 1, "--prompt-tokens: '9:3'"),
        (("--texts", "nowhere.txt"), 2, "there is no such file"),
    ],
)
def test_what_cannot_be_is_said_before_the_model_opens(jaxinfer, options, code, message, monkeypatch):
    monkeypatch.setattr(
        "jaxinfer.measure.advise.measure.load_model", lambda *rest, **more: pytest.fail("it was loaded")
    )
    result = jaxinfer("advise", "demo", *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr.replace("\n", " ")
