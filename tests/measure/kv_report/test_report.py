"""Reports of caches: what is compared, and what the tables and the JSON say."""

import pytest

from jaxinfer.measure.kv_report.report import (
    ALL,
    FULL,
    TITLES,
    CacheChoice,
    CacheFigures,
    NeedleCell,
    choices,
    default_policies,
    needle_lines,
    needle_table,
    read_policies,
    refusals,
    table,
)

POLICY = "sinks(4)+window(32)"


def cell(gain: float, full_gain: float, num_correct: int = 0, depth: float = 0.5) -> NeedleCell:
    return NeedleCell(64, depth, 2, num_correct, gain, full_gain)


def figures(choice: CacheChoice, *needle: NeedleCell, **more) -> CacheFigures:
    values = {
        "kl": 0.5,
        "perplexity": 3.0,
        "top1_agreement": 0.9,
        "num_equal": 1,
        "num_answers": 2,
        "token_bytes": 64.0,
    }
    values |= {"sequence_bytes": 4096, "seconds_per_token": 0.002, **more}
    return CacheFigures(choice, "float32" if choice.kv_dtype == "auto" else choice.kv_dtype, needle=needle, **values)


def test_the_full_cache_is_first_and_nothing_is_measured_twice():
    found = choices(["float32", "int8", "auto"], [ALL, POLICY, ALL], computed="float32")
    assert found == [FULL, CacheChoice("auto", POLICY), CacheChoice("int8"), CacheChoice("int8", POLICY)]
    assert found[1].arguments == {"kv_dtype": "auto", "kv_policy": POLICY}
    assert FULL.arguments == {"kv_dtype": "auto", "kv_policy": None}


def test_policies_are_half_and_a_quarter_of_a_text_or_given():
    assert default_policies(512) == [ALL, "sinks(4)+window(256)", "sinks(4)+window(128)"]
    assert default_policies(2) == [ALL, "sinks(4)+window(1)"]
    assert read_policies(f"window(32) + sinks(4), all,{POLICY}") == [POLICY, ALL]
    with pytest.raises(ValueError, match="'snapkv' is not understood"):
        read_policies("all,snapkv")
    with pytest.raises(ValueError, match="names no policy"):
        read_policies(" , ")
    assert read_policies("h2o(64),all,quest(64)") == ["h2o(64)", ALL, "quest(64)"]


def test_a_table_has_what_was_measured_and_the_reasons_of_the_rest():
    rows = [figures(FULL, kl=0.0), figures(CacheChoice("int8", POLICY))]
    rows.append(CacheFigures(CacheChoice("int4"), "int4", reason="head_dim=7 cannot be rotated"))
    full, small = table(rows)
    assert len(full) == len(TITLES)
    assert full[:3] == ["float32", ALL, "0"]
    assert small == ["int8", POLICY, "5.00e-01", "3", "90.00%", "1 of 2", "64", "4", "2"]
    assert refusals(rows) == ["int4: head_dim=7 cannot be rotated"]


def test_a_cache_bears_the_needle_where_the_line_helps_as_with_the_full_one():
    full = figures(FULL, cell(1.0, 1.0, 2, 0.0), cell(0.5, 0.5, 1, 0.5), cell(0.05, 0.05, 0, 1.0))
    kept = figures(CacheChoice("int8"), cell(0.9, 1.0), cell(0.3, 0.5), cell(-0.1, 0.05))
    lost = figures(CacheChoice("auto", POLICY), cell(1.0, 1.0), cell(0.2, 0.5), cell(0.1, 0.05))
    assert [row.bears_needle for row in (full, kept, lost)] == [True, True, False]
    titles, cells = needle_table([full, kept, lost])
    assert titles[2:] == ["64 at 0%", "64 at 50%", "64 at 100%", "borne"]
    assert cells[0][2:] == ["100% +1.00", "50% +0.50", "0% +0.05", "2 of 2"]
    assert cells[2][-1] == "1 of 2"
    first, *rest = needle_lines([full, kept, lost])
    assert first.startswith("The full cache copies 3 of 6 lines; the line helps at 2 of 3 places.")
    assert rest == ["Bear it: int8.", f"Do not bear it: float32 {POLICY}."]


def test_a_model_that_does_not_bear_the_needle_is_named():
    full = figures(FULL, cell(0.01, 0.01))
    assert full.bears_needle is None
    [line] = needle_lines([full, figures(CacheChoice("int8"), cell(0.3, 0.01))])
    assert "the model does not bear the task" in line
    assert needle_lines([figures(FULL)]) == []
    assert needle_table([figures(FULL)]) == ([], [])


def test_json_has_policy_and_needle():
    found = figures(CacheChoice("int8", POLICY), cell(0.9, 1.0, 1)).to_dict()
    assert (found["kv_dtype"], found["kv_policy"], found["bears_needle"]) == ("int8", POLICY, True)
    assert found["needle"][0]["share"] == 0.5
    assert "choice" not in found
