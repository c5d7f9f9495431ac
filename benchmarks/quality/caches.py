"""The cost of smaller caches and of rounded activations, by `jaxinfer.measure.kv_report`, as `jaxinfer kv-report`."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from jaxinfer.loading import load_model
from jaxinfer.measure.kv_report.measure import CacheReporter, ReportSettings
from jaxinfer.measure.kv_report.report import DEFAULT_KV_DTYPES, CacheChoice

TEXT_TOKENS = 512
BUDGETS = (64, 128, 256)
POLICIES = ("snapkv", "pyramidkv", "keydiff", "expected_attention", "h2o", "quest")
SETTINGS = ReportSettings(DEFAULT_KV_DTYPES, ["all"], text_tokens=TEXT_TOKENS, num_needles=0)


def measure_kv_dtypes(path: str, documents: Sequence[str], report: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each type of the cache, then one for activations of 8 bits with the full cache."""
    with closing(CacheReporter(load_model(path), documents, SETTINGS)) as reporter:
        rows = [row.to_dict() for row in reporter.rows(report)]
        full, reporter.model = reporter.model, load_model(path, activations="int8")
        try:
            # By its name, the full cache is compared with the one that "auto" chose.
            row = reporter(CacheChoice(reporter.computed), lambda what: report(f"activations int8: {what}"))
        finally:
            full.weights.release()
    return [*rows, {**row.to_dict(), "activations": "int8"}]


def measure_policies(path: str, documents: Sequence[str], report: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each policy and budget, of texts whose first half is the prompt; lines to copy at three depths."""
    budgets = [f"sinks(4)+window({budget})" for budget in BUDGETS]
    budgets += [f"{policy}({budget})" for policy in POLICIES for budget in BUDGETS]
    settings = replace(SETTINGS, kv_dtypes=["auto"], policies=["all", *budgets], num_answers=4, num_needles=4)
    with closing(CacheReporter(load_model(path), documents, settings)) as reporter:
        return [row.to_dict() for row in reporter.rows(report)]
