"""The JSON of an advice: everything that was measured, written after every trial, read again to go on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxinfer.measure.advise.search import Findings
from jaxinfer.measure.advise.trials import TrialResult
from jaxinfer.measure.bench.model import public_name
from jaxinfer.measure.bench.results import ResultError, check_same, read_schema

SCHEMA, VERSION = "jaxinfer.advise", 1


def new(model: str, options: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """A result without rows."""
    return {"schema": SCHEMA, "version": VERSION, "model": model, "options": options, "machine": machine}


def with_findings(result: dict[str, Any], found: Findings) -> dict[str, Any]:
    """The result with all rows; of a draft's path its last part."""
    parts = {name: [public(row).to_dict() for row in rows] for name, rows in vars(found).items()}
    return {**result, **parts}


def public(row: TrialResult) -> TrialResult:
    """The row without a path."""
    return _with_draft(row, public_name)


def _with_draft(row: TrialResult, rename: Callable[[str], str]) -> TrialResult:
    draft = row.arguments.get("draft")
    return row if draft is None else replace(row, arguments={**row.arguments, "draft": rename(draft)})


def earlier(file: Path, result: dict[str, Any], drafts: Sequence[str] = ()) -> Findings | None:
    """What an earlier run of the same question has found, with these drafts' names as they are given; None where there
    is no file.

    Raises ResultError, with what differs, for a file of another question or machine.
    """
    if not file.exists():
        return None
    found = read_schema(file, SCHEMA, VERSION)
    check_same(file, found, result, ("model",))
    try:
        parts = [[TrialResult.from_dict(row) for row in found[name]] for name in ("base", "alone", "together")]
    except (KeyError, TypeError) as error:
        raise ResultError(f"{file.name} is not complete: {error}") from None
    named = {public_name(draft): draft for draft in drafts}
    return Findings(*([_with_draft(row, lambda name: named.get(name, name)) for row in rows] for rows in parts))
