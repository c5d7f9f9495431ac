"""What people read: the table's figures, what helped and what did not, and commands that can be typed."""

import pytest

from jaxinfer.measure.advise.goals import Goal, TrialResult
from jaxinfer.measure.advise.report import advice, earlier_findings, new_result, pooled, sections, table, with_findings
from jaxinfer.measure.advise.search import Findings
from jaxinfer.measure.bench.results import ResultError, write_result


def row(rate, kl=0.0, **arguments):
    return TrialResult(
        arguments,
        ttft=(0.02,) * 2,
        tpot=(0.004,) * 2,
        one=(0.3,) * 2,
        rate=(rate,) * 2,
        weight_bytes=2**30,
        token_bytes=64.0,
        kl=kl,
    )


@pytest.fixture
def found():
    return Findings(
        base=[row(100.0), row(104.0)],
        alone=[
            row(150.0, 0.001, quantize="int8"),
            row(90.0, 0.2, quantize="int4-g128"),
            row(200.0, max_seqs=32),
            row(101.0, draft="it's"),
            TrialResult({"kv_dtype": "int8"}, "failed: no room"),
        ],
        together=[row(260.0, 0.001, quantize="int8", max_seqs=32)],
    )


def test_the_table_has_a_row_for_each_trial_and_each_baseline(found):
    columns, cells = table(Goal("cost"), found)
    assert columns[-2:] == ["KL", "vs base"]
    assert [line[0] for line in cells] == [
        "baseline",
        "--quantize int8",
        "--quantize int4-g128",
        "--max-seqs 32",
        "--draft 'it'\"'\"'s'",
        "--kv-dtype int8",
        "--quantize int8 --max-seqs 32",
        "baseline again",
    ]
    by_name = {line[0]: line for line in cells}
    assert by_name["baseline"][1:] == ["20", "4", "100", "1.00 GiB", "64", "", "0.98x"]
    assert by_name["--max-seqs 32"][-2:] == ["exact", "1.96x"]
    assert by_name["--quantize int8"][-2:] == ["0.001", "1.47x"]
    assert by_name["--kv-dtype int8"][1:] == [""] * 7
    assert by_name["baseline again"][-1] == "1.02x"


def test_what_helped_and_what_did_not(found):
    goal = Goal("cost")
    its = advice(goal, found, "my model", {"dtype": "bfloat16", "deterministic": True})
    text = "\n".join(sections(goal, found, its, {"weights": "you gave them"}, price_per_hour=3.6))
    helped, rest = text.split("Did not help")
    others, rest = rest.split("Unknown")
    unknown, last = rest.split("Recommended: ")
    assert "--max-seqs 32: tokens/s 1.96x" in helped
    assert "--quantize int4-g128: KL 0.2 nats per token is above --max-kl 0.05 (tokens/s 0.88x)" in others
    assert "no difference (0.99x, noise 4%)" in others
    assert "--kv-dtype int8: failed: no room" in unknown
    assert "weights: not tried: you gave them" in unknown
    assert last.startswith("--quantize int8 --max-seqs 32\n  2.55x the baseline's tokens/s\n")
    assert "cost per million output tokens 3.85" in last
    assert "the best batch size is the largest that was tried" in last
    assert its.command == (
        "jaxinfer batch requests.jsonl answers.jsonl --model 'my model' --dtype bfloat16 --deterministic "
        "--quantize int8 --max-seqs 32"
    )
    assert its.python == "LLM('my model', dtype='bfloat16', deterministic=True, quantize='int8', max_seqs=32)"


def test_the_baseline_is_that_of_all_its_measurements(found):
    assert pooled(found.base).rate == (100.0, 100.0, 104.0, 104.0)
    only = Findings(found.base[:1], [], [])
    goal = Goal("latency")
    its = advice(goal, only, "demo", {})
    assert its.command == 'jaxinfer generate "..." --model demo'
    assert "The baseline was measured only once" in "\n".join(sections(goal, only, its, {}))


def test_nothing_within_the_limits(found):
    goal = Goal("cost", memory=1)
    for one in found.base + found.alone[:4]:
        object.__setattr__(one, "needed_bytes", 5)
    found.together.clear()
    its = advice(goal, found, "demo", {})
    assert its.to_dict() is None
    assert "no trial is within the limits" in "\n".join(sections(goal, found, its, {}))


def test_results_are_read_as_they_were_written_without_a_drafts_path(found, tmp_path):
    file = tmp_path / "advice.json"
    draft = str(tmp_path / "small")
    found.alone[3] = row(101.0, draft=draft)
    result = new_result("demo", {"seed": 0}, {"device": "cpu"})
    write_result(file, with_findings(result, found))
    assert str(tmp_path) not in file.read_text()
    again = earlier_findings(file, result, [draft])
    assert again is not None
    assert (again.base, again.alone, again.together) == (found.base, found.alone, found.together)
    assert earlier_findings(tmp_path / "none.json", result) is None
    with pytest.raises(ResultError, match="seed=0, not 1"):
        earlier_findings(file, new_result("demo", {"seed": 1}, {"device": "cpu"}))
    file.write_text("{}")
    with pytest.raises(ResultError, match="not a result"):
        earlier_findings(file, result)
