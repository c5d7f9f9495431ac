"""manifest.json: size and SHA-256 of every file of a converted checkpoint. Safetensors has no checksum of its own.

Beside the files it has the SHA-256 of every parameter's values. Files of one conversion differ from those of another in
times and names, which Orbax gives them; parameters do not.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import MANIFEST, files_below, read_json, sha256, write_json

_VERSION = 1

# {relative path: {"size": bytes, "sha256": hexadecimal}}
Entries = dict[str, dict[str, Any]]


def measure(directory: Path, names: Iterable[str]) -> Entries:
    """Reads files and gives their manifest entries."""
    names = list(names)
    with ThreadPoolExecutor(4) as executor:
        digests = executor.map(sha256, (directory / name for name in names))
        return {
            name: {"size": (directory / name).stat().st_size, "sha256": digest}
            for name, digest in zip(names, digests, strict=True)
        }


def array_digest(parts: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of a parameter: of the dtypes, shapes and bytes of the arrays that it is made of, by name."""
    found = hashlib.sha256()
    for name, array in sorted(parts.items()):
        found.update(f"{name} {array.dtype} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def write_manifest(
    directory: Path, entries: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, str] | None = None
) -> None:
    """`parameters`: the `array_digest` of each, by name."""
    data = {"format_version": _VERSION, "files": dict(sorted(entries.items()))}
    if parameters is not None:
        data["parameters"] = dict(sorted(parameters.items()))
    write_json(directory / MANIFEST, data)


def read_manifest(directory: Path) -> Entries:
    """Raises CheckpointError for a manifest that is missing, malformed, or names files outside its directory."""
    path = directory / MANIFEST
    data = read_json(path, unique_keys=True)
    if data.get("format_version") != _VERSION:
        raise CheckpointError(path, f"format_version {data.get('format_version')!r}, this version reads {_VERSION}")
    entries = data.get("files")
    if not isinstance(entries, dict):
        raise CheckpointError(path, "has no table of files")
    problems = [f"{name!r}: {why}" for name, entry in entries.items() if (why := _entry_problem(name, entry))]
    if problems:
        raise CheckpointError(path, *problems)
    return entries


def verify_manifest(path: str | Path) -> list[str]:
    """Compares every file of a converted checkpoint with its manifest, reading all bytes.

    Returns one sentence per file that is missing, has another size or other bytes, or is not listed; [] if all fit.
    Raises CheckpointError when there is no usable manifest.
    """
    directory = Path(path)
    entries = read_manifest(directory)
    problems = size_problems(directory, entries)
    damaged = {problem.split(":")[0] for problem in problems}
    found = measure(directory, [name for name in entries if name not in damaged])
    for name, entry in found.items():
        if entry["sha256"] != entries[name]["sha256"]:
            problems.append(
                f"{name}: its {entry['size']} bytes have SHA-256 {entry['sha256']},"
                f" the manifest says {entries[name]['sha256']}"
            )
    extra = [name for name in files_below(directory) if name not in entries and name != MANIFEST]
    return problems + [f"{name}: not in the manifest" for name in extra]


def size_problems(directory: Path, entries: Entries) -> list[str]:
    """Files that are missing or have another size: the check that reads no bytes."""
    problems = []
    for name, entry in entries.items():
        path = directory / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif (size := path.stat().st_size) != entry["size"]:
            problems.append(f"{name}: {size} bytes, the manifest says {entry['size']}")
    return problems


def _entry_problem(name: str, entry: Any) -> str | None:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        return "a path that leads out of the checkpoint"
    if not isinstance(entry, dict) or not isinstance(entry.get("size"), int):
        return "has no size"
    if not isinstance(entry.get("sha256"), str) or not re.fullmatch(r"[0-9a-f]{64}", entry["sha256"]):
        return "has no SHA-256"
    return None
