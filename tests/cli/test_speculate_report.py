"""`jaxinfer speculate-report`: its arithmetic on made-up runs, and a tiny model that drafts for itself."""

import importlib.util
import struct

import pytest

from jaxinfer.cli.speculate_report import Run, compare, conclusion
from jaxinfer.extras import install_hint
from jaxinfer.speculative.statistics import SpeculationStats, mean_tokens

# Few sizes of a step, so few programs.
SMALL = ("--max-model-len", "64", "--prefill-chunk", "16")
PLAIN = Run(0, 0.010, 0.1, [[1, 2, 3]], num_tokens=1000)


def run(k: int, rate: float, round_seconds: float, host_share: float = 0.1, answers=None, num_rounds: int = 10_000):
    """Rounds of which each drafted token is accepted at this rate, given those before."""
    rounds, left = {}, num_rounds
    for accepted in range(k):
        rounds[k, accepted] = round(num_rounds * rate**accepted * (1 - rate))
        left -= rounds[k, accepted]
    rounds[k, k] = left
    stats = SpeculationStats.of_rounds(rounds, num_plain_tokens=1)
    seconds = round_seconds / stats.mean_accepted_length
    return Run(k, seconds, host_share, answers or [[1, 2, 3]], stats.num_tokens, stats)


def test_a_round_is_taken_apart():
    row = compare(run(4, 0.8, round_seconds=0.022), PLAIN, cost_ratio=0.2)
    assert row.stats.conditional_rate == pytest.approx(0.8, abs=1e-3)
    assert row.verify_ratio == pytest.approx(2.2 - 4 * 0.2, abs=1e-3)
    assert row.expected == pytest.approx(mean_tokens(0.8, 4) / 1.8, rel=1e-3)
    assert row.measured == pytest.approx(mean_tokens(0.8, 4) / 2.2, rel=1e-3)
    assert row.if_perfect["acceptance"] == pytest.approx(5 / 2.2, rel=1e-3)
    assert row.if_perfect["draft cost"] == pytest.approx(mean_tokens(0.8, 4) / 1.4, rel=1e-3)
    assert row.if_perfect["verify cost"] == pytest.approx(mean_tokens(0.8, 4) / 1.8, rel=1e-3)
    assert row.num_different == 0


def test_tokens_without_rounds_take_a_plain_step():
    stats = SpeculationStats.of_rounds({(1, 1): 100})
    found = Run(1, (100 * 0.015 + 50 * 0.010) / 250, 0.0, [[1]], num_tokens=250, stats=stats)
    assert compare(found, PLAIN, 0.5).verify_ratio == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("k", "rate", "round_seconds", "cost", "host", "limit", "words"),
    [
        (4, 0.3, 0.012, 0.02, 0.0, "acceptance", "30% of the draft tokens"),
        (4, 0.95, 0.030, 0.45, 0.0, "draft cost", "0.45 of a plain step"),
        (4, 0.95, 0.030, 0.05, 0.0, "verify cost", "2.80 plain steps"),
        (4, 0.95, 0.015, 0.05, 0.8, "host", "80% of the time"),
    ],
)
def test_what_limits_it(k, rate, round_seconds, cost, host, limit, words):
    row = compare(run(k, rate, round_seconds, host), PLAIN, cost)
    assert row.limit == limit
    assert words in conclusion([row])


def test_the_fastest_length_is_recommended_or_none():
    rows = [compare(run(k, 0.8, 0.01 * (1 + 0.2 * k)), PLAIN, 0.1) for k in (1, 2, 4, 8)]
    assert conclusion(rows).startswith("Use num_draft_tokens=4: 1.87x plain decoding.")
    rows = [compare(run(k, 0.1, 0.01 * (1 + 0.5 * k)), PLAIN, 0.4) for k in (1, 2)]
    assert conclusion(rows).startswith("Decode without this draft: 1 draft tokens are best, with 0.73x")


def test_other_answers_are_counted():
    assert compare(run(2, 0.5, 0.01, answers=[[1, 2, 4]]), PLAIN, 0.1).num_different == 1


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
    assert [row["num_draft_tokens"] for row in report["lengths"]] == [2]
    for row in report["lengths"]:
        assert row["acceptance_rate"] > 0.8, "all but what comes after the end of an answer"
        assert row["num_different_answers"] == 0
        assert row["cost_ratio"] > 0.2
        assert row["measured_speedup"] > 0
    assert report["best_num_draft_tokens"] in (0, 2)
    if has_matplotlib:
        start = plot.read_bytes()[:24]
        assert start[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", start[16:]) == (1100, 440)


@pytest.mark.parametrize(
    ("draft", "lengths", "num_answers"), [("ngram", "2", 2), pytest.param("layers:1", "1,2", 4, marks=pytest.mark.slow)]
)
def test_table(jaxinfer, model, prompts, draft, lengths, num_answers):
    arguments = [prompts, "-m", model, "-d", draft, "--num-draft-tokens", lengths, "--repeats", "1"]
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
