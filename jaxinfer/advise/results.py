"""The JSON of an advice: everything that was measured, written after every trial, read again to go on."""

import json
from pathlib import Path
from typing import Any

from jaxinfer.advise.search import Findings
from jaxinfer.advise.trials import Row
from jaxinfer.bench.results import ResultError, check_same

SCHEMA, VERSION = "jaxinfer.advise", 1


def new(model: str, options: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """A result without rows."""
    return {"schema": SCHEMA, "version": VERSION, "model": model, "options": options, "machine": machine}


def with_findings(result: dict[str, Any], found: Findings) -> dict[str, Any]:
    """The result with all rows."""
    parts = {name: [row.to_dict() for row in rows] for name, rows in vars(found).items()}
    return {**result, **parts}


def earlier(file: Path, result: dict[str, Any]) -> Findings | None:
    """What an earlier run of the same question has found; None where there is no file.

    Raises ResultError, with what differs, for a file of another question or machine.
    """
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ResultError(f"{file.name}: no JSON: {error}") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ResultError(f"{file.name} is no result of `jaxinfer advise`")
    if found.get("version") != VERSION:
        raise ResultError(f"{file.name} has version {found.get('version')!r} of the format, this program {VERSION}")
    check_same(file, found, result, ("model",))
    try:
        return Findings(*([Row.from_dict(row) for row in found[name]] for name in ("base", "alone", "together")))
    except (KeyError, TypeError) as error:
        raise ResultError(f"{file.name} is not complete: {error}") from None
