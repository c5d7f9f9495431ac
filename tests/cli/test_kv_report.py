"""`jaxinfer kv-report`: a tiny checkpoint's caches as a table, as JSON and as files; wrong options."""

import importlib.util
import json

import pytest

from tests.cli.conftest import write_checkpoint


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("".join(f"value_{number} = {number * number % 89}\n" for number in range(40)))
    return path


def small(*more):
    return [
        "--num-texts",
        "1",
        "--text-tokens",
        "40",
        "--answers",
        "1",
        "--answer-tokens",
        "4",
        "--needles",
        "0",
        *more,
    ]


@pytest.mark.slow
def test_table(jaxinfer, model, text):
    given = ["--kv-dtypes", "auto", "--policies", "sinks(4)+window(16)"]
    result = jaxinfer("kv-report", model, "--texts", text, *given, *small())
    assert (result.exit_code, result.stderr) == (0, "")
    _, titles, full, kept, *_ = result.stdout.splitlines()
    assert "KL nats" in titles
    assert full.split()[:3] == ["float32", "all", "0"]
    assert kept.split()[:2] == ["float32", "sinks(4)+window(16)"]
    assert "answers: greedy ones of 4 tokens" in result.stdout


@pytest.mark.slow
def test_a_refused_combination_is_listed_and_the_others_go_on(jaxinfer, text, tmp_path):
    window = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}
    model = write_checkpoint(tmp_path / "windows", **window)
    given = ["--kv-dtypes", "auto,int8", "--policies", "sinks(4)+window(16),all"]
    result = jaxinfer("kv-report", model, "--texts", text, *given, *small("--answers", "0"))
    assert (result.exit_code, result.stderr) == (0, "")
    _, _, full, eight, *rest = result.stdout.splitlines()
    assert (full.split()[0], eight.split()[0]) == ("float32", "int8")
    refused = rest[rest.index("Refused") + 1 :]
    assert [line.split()[:2] for line in refused] == [[name, "sinks(4)+window(16):"] for name in ("float32", "int8")]
    assert all("have a window already, of 32 tokens" in line for line in refused)


@pytest.mark.slow
def test_json_and_files(jaxinfer, json_lines, model, text, tmp_path):
    out = tmp_path / "report"
    more = ["--out", out] if importlib.util.find_spec("matplotlib") is not None else []
    given = ["--kv-dtypes", "int8", "--policies", "all", "--json", "-"]
    result = jaxinfer("kv-report", model, "--texts", text, *given, *small(), *more)
    assert (result.exit_code, result.stderr) == (0, "")
    [report] = json_lines(result.stdout)
    assert report["schema"] == "jaxinfer.kv_report"
    assert (report["num_texts"], report["text_tokens"], report["num_predicted_tokens"]) == (1, 40, 39)
    full, small_one = report["rows"]
    assert (full["kv_dtype"], full["kl"], small_one["kv_dtype"]) == ("float32", 0.0, "int8")
    assert small_one["kl"] > 0
    assert small_one["token_bytes"] < full["token_bytes"]
    if more:
        assert json.loads((out / "kv_report.json").read_text()) == report
        assert (out / "kv_report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-dtypes", "int8,int3"], "--kv-dtypes='int3' is not one of auto, float32"),
        (["--policies", "tova(4)"], "--policies: kv_policy='tova(4)'"),
        ([], "--texts FILE is missing"),
        (["--texts", "/nowhere/a.txt"], "--texts /nowhere/a.txt: there is no such file or folder"),
    ],
)
def test_wrong_options(jaxinfer, arguments, message):
    result = jaxinfer("kv-report", "/nowhere/model", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
