"""The JSON of a benchmark: one schema for all commands, read again to draw or to go on."""

import json
import os
from pathlib import Path
from typing import Any

SCHEMA, VERSION = "jaxinfer.bench", 1
COMMANDS = ("latency", "throughput", "load")


class ResultError(ValueError):
    """A file is no result of this program, or not of the same benchmark."""


def new(
    command: str,
    model: str,
    options: dict[str, Any],
    *,
    machine: dict[str, Any],
    start: dict[str, Any] | None = None,
    roofline: dict[str, Any] | None = None,
    runs: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """A result; `runs` has one for each batch size, or request rate."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "command": command,
        "model": model,
        "options": options,
        "machine": machine,
        "start": start,
        "roofline": roofline,
        "runs": runs or [],
    }


def read(file: Path) -> dict[str, Any]:
    """Raises ResultError, with the file's name, for what is no result of this version; FileNotFoundError."""
    found = read_schema(file, SCHEMA, VERSION)
    if found.get("command") not in COMMANDS or not isinstance(found.get("runs"), list):
        raise ResultError(f"{file.name} is not complete: its command is {found.get('command')!r}")
    return found


def read_schema(file: Path, schema: str, version: int) -> dict[str, Any]:
    """The object of a JSON file that says it is of this schema ("jaxinfer.COMMAND") and version.

    Raises ResultError where it does not; FileNotFoundError.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ResultError(f"{file.name}: no JSON: {error}") from None
    if not isinstance(found, dict) or found.get("schema") != schema:
        raise ResultError(f"{file.name} is no result of `{schema.replace('.', ' ')}`")
    if found.get("version") != version:
        raise ResultError(f"{file.name} has version {found.get('version')!r} of the format, this program {version}")
    return found


def write(file: Path, result: dict[str, Any]) -> None:
    """All or nothing: a kill leaves the earlier file."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, file)


def finished(file: Path, result: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs that an earlier `result` of the same benchmark has in `file`; none where there is no file.

    Raises ResultError, with what differs, where it is of another benchmark or machine.
    """
    if not file.exists():
        return []
    earlier = read(file)
    check_same(file, earlier, result, ("command", "model"))
    return earlier["runs"]


def check_same(file: Path, earlier: dict[str, Any], result: dict[str, Any], parts: tuple[str, ...]) -> None:
    """Raises ResultError, with what differs, unless both are of the same `parts`, options and machine."""
    for part in parts:
        if earlier[part] != result[part]:
            raise ResultError(f"--resume: {file.name} is of {part} {earlier[part]!r}, not {result[part]!r}")
    for part in ("options", "machine"):
        for name in sorted({*earlier[part], *result[part]}):
            one, other = earlier[part].get(name), result[part].get(name)
            if one != other:
                raise ResultError(f"--resume: {file.name} was made with {name}={one!r}, not {other!r}")
