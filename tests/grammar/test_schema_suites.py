"""Suites of other projects; their folders are named by environment variables."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="needs jaxinfer[structured]")

from tests.grammar import schema_suites

RANKS = ("wrong", "narrower", "refused", "pass")


def folder(variable: str) -> Path:
    if variable not in os.environ:
        pytest.skip(f"{variable} names no folder; tests/grammar/schema_suites.py says what belongs there")
    return Path(os.environ[variable])


@pytest.mark.slow
def test_verdicts_on_the_json_schema_test_suite_do_not_get_worse():
    found = schema_suites.suite_verdicts(folder("JSON_SCHEMA_TEST_SUITE"))
    kept = dict(schema_suites.each_test(json.loads(schema_suites.VERDICTS.read_text(encoding="utf-8"))))
    worse = [
        (place, kept[place], verdict)
        for place, verdict in schema_suites.each_test(found)
        if place in kept and RANKS.index(verdict) < RANKS.index(kept[place])
    ]
    assert worse == []


def test_nothing_that_does_not_match_is_known_to_be_let_through():
    kept = dict(schema_suites.each_test(json.loads(schema_suites.VERDICTS.read_text(encoding="utf-8"))))
    assert set(kept.values()) <= {"pass", "narrower", "refused"}
    assert sum(verdict == "pass" for verdict in kept.values()) > 1_100


@pytest.mark.slow
def test_300_schemas_of_maskbench_are_served_rightly():
    report = schema_suites.maskbench_report(folder("MASKBENCH"), 300, seed=20)
    print(report)
    assert report["wrong"] == []
    assert report["accepted"] >= report["accepted by llguidance alone"]
    assert report["valid accepted"] > 250
    assert report["invalid refused"] > 450
