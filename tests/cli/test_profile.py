"""`jaxinfer profile`: from the command line to tables and figures, and what is refused before the model opens."""

import json

import pytest

from jaxinfer.measure.bench import rates
from jaxinfer.measure.profiling.ops import ATTEND, DRAFT, LOGITS, MLP, PROJECTIONS, SAMPLER
from jaxinfer.measure.profiling.phases import PHASES

OPTIONS = ("--max-model-len", 64, "--max-seqs", 2, "--prefill-chunk", 16)
OPTIONS += ("--prompt-tokens", 20, "--batch", 2, "--steps", 3)


@pytest.fixture(autouse=True)
def small_arrays(monkeypatch):
    monkeypatch.setattr(rates, "CPU_BYTES", 2**16)
    monkeypatch.setattr(rates, "CPU_MATMUL", 64)
    monkeypatch.setattr(rates, "MIN_SECONDS", 0.0)


def check(phase):
    assert phase["steps"] >= 3
    assert 0 <= phase["device"]["idle_share"] < 1
    total = sum(phase["by_kind"].values())
    assert sum(phase["by_part"].values()) == pytest.approx(total)
    assert total == pytest.approx(phase["device"]["busy_seconds"])
    assert phase["device"]["unknown_seconds"] < 0.1 * total
    assert {PROJECTIONS, ATTEND, MLP, LOGITS, SAMPLER} <= set(phase["by_part"])
    assert len(phase["layers"]["seconds"]) == 2
    assert phase["roofline"]["bytes"] > 0
    assert phase["roofline"]["percent"] > 0


@pytest.mark.slow
def test_both_phases_are_profiled_and_their_traces_kept(jaxinfer, model, tmp_path):
    file, traces = tmp_path / "profile.json", tmp_path / "traces"
    result = jaxinfer("profile", model, *OPTIONS, "--steps-per-dispatch", "2", "--json", file, "--trace", traces)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert [phase["phase"] for phase in found["phases"]] == list(PHASES)
    prefill, decode = found["phases"]
    check(prefill)
    check(decode)
    assert (prefill["dispatches"], prefill["prompt_tokens"]) == (3, 40)
    assert (decode["dispatches"], decode["steps"], decode["mean_batch"]) == (2, 4, 2.0)
    assert decode["kinds"] == ["decode"]
    assert str(tmp_path) not in file.read_text()
    for name in PHASES:
        assert list((traces / name).rglob("*.xplane.pb"))
        assert f"{name}: " in result.stdout
    assert "xprof" in result.stdout
    assert "operations that run at the same time" in " ".join(result.stdout.split())


@pytest.mark.slow
def test_a_draft_makes_rounds_with_a_part_of_its_own(jaxinfer, model, tmp_path):
    file = tmp_path / "profile.json"
    draft = ("--draft", "layers:1", "--num-draft-tokens", "2", "--phase", "decode")
    result = jaxinfer("profile", model, *OPTIONS, "--steps-per-dispatch", "4", *draft, "--json", file)
    assert result.exit_code == 0, result.output
    (phase,) = json.loads(file.read_text())["phases"]
    check(phase)
    assert phase["kinds"] == ["rounds"]
    assert DRAFT + MLP in phase["by_part"]
    assert "speculative rounds of 2 answers" in result.stdout


REFUSED = {
    ("--phase", "both"): "neither prefill nor decode",
    ("--batch", "3", "--max-seqs", "2"): "more than --max-seqs 2",
    ("--prompt-tokens", "96"): "takes 96 tokens",
    ("--json", "/nowhere/profile.json"): "no folder",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_be_is_refused_first(jaxinfer, model, options):
    result = jaxinfer("profile", model, *options)
    assert result.exit_code == 2
    assert REFUSED[options] in " ".join(result.output.split())
