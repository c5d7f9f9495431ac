"""`jaxinfer speculate-report`: a tiny model that drafts for itself."""

import importlib.util
import struct

import pytest

from jaxinfer.extras import install_hint

# Few sizes of a step, so few programs.
SMALL = ("--max-model-len", "64", "--prefill-chunk", "16")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("def read(path):\n\nclass Queue:\n")
    return path


@pytest.mark.slow
@pytest.mark.flaky(reruns=2)  # a few milliseconds on a clock: a hiccup in plain decoding makes a draft look cheap
def test_a_model_that_drafts_for_itself(jaxinfer, json_lines, model, prompts, tmp_path):
    plot = tmp_path / "report.png"
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    more = ["--plot", plot] if has_matplotlib else []
    arguments = [prompts, "-m", model, "-d", model, "--num-draft-tokens", "2", "--max-tokens", "12", *SMALL]
    result = jaxinfer("speculate-report", *arguments, "--repeats", "1", "--json", *more)
    assert (result.exit_code, result.stderr) == (0, "")
    [report] = json_lines(result.stdout)
    [own] = report["drafts"]
    assert [row["num_draft_tokens"] for row in own["lengths"]] == [2]
    for row in own["lengths"]:
        assert row["acceptance_rate"] > 0.8, "all but what comes after the end of an answer"
        assert row["num_different_answers"] == 0
        assert row["cost_ratio"] > 0.2
        assert row["measured_speedup"] > 0
    assert own["best_num_draft_tokens"] in (0, 2)
    assert set(own["speedup_by_load"]) == {"1"}, "there are two prompts"
    if has_matplotlib:
        start = plot.read_bytes()[:24]
        assert start[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", start[16:]) == (1100, 440)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "lengths", "num_answers"), [("ngram", "2", 2), pytest.param("layers:1", "1,2", 4, marks=pytest.mark.slow)]
)
def test_table(jaxinfer, model, prompts, draft, lengths, num_answers):
    few = ["--repeats", "1", "--concurrency", "4"]  # more than there are prompts: left out
    arguments = [prompts, "-m", model, "-d", draft, "--num-draft-tokens", lengths, *few]
    result = jaxinfer("speculate-report", *arguments, "--max-tokens", "12", *SMALL)
    assert (result.exit_code, result.stderr) == (0, "")
    for words in (
        "by position",
        "expected",
        "measured",
        "limited by",
        f"0 of {num_answers}.",  # of two prompts and each length
        "tokens/s",
        "It is limited mostly by",
    ):
        assert words in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-draft-tokens", "2,x"], "'2,x' is not a list of positive numbers"),
        (["--num-draft-tokens", "0"], "'0' is not a list of positive numbers"),
        (["--acceptance", "most"], "--acceptance is exact or maximal, got 'most'"),
        (["--plot", "/nowhere/x.png"], "--plot: no folder /nowhere"),
        (["--plot", "x.gif"], "--plot: x.gif ends in neither .png, .svg nor .pdf"),
    ],
)
def test_wrong_options(jaxinfer, prompts, arguments, message):
    result = jaxinfer("speculate-report", prompts, "-m", "/nowhere/model", "-d", "ngram", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_plot_needs_matplotlib(jaxinfer, prompts, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = jaxinfer("speculate-report", prompts, "-m", "/nowhere", "-d", "ngram", "--plot", "x.png")
    assert result.exit_code == 1
    assert install_hint("plot") in result.stderr
