"""manifest.json of a converted checkpoint: checksums of its files and of the values of its arrays.

It has the size and SHA-256 of every file, and of the values of every parameter the SHA-256 and, for each chunk of each
array, the xxh3. Files of two conversions differ in times and names that Orbax gives them; parameters do not. Its own
SHA-256 is over the other fields, as `_digest` writes them.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import MANIFEST, PARAMS, files_below, read_json, sha256, write_json
from jaxinfer.progress import Stage

_VERSION = 1
_OWN_DIGEST = "sha256"

# {relative path: {"size": bytes, "sha256": hexadecimal}}
Entries = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Manifest:
    """Attributes:
    files: by relative path. arrays: `ArrayChecksums.to_json` by the array's name; None if written without.
    """

    files: Entries
    arrays: dict[str, Any] | None


def measure(directory: Path, names: Iterable[str]) -> Entries:
    """The manifest entries of files, which are read."""
    names = list(names)
    with ThreadPoolExecutor(4) as executor:
        digests = executor.map(sha256, (directory / name for name in names))
        return {
            name: {"size": (directory / name).stat().st_size, "sha256": digest}
            for name, digest in zip(names, digests, strict=True)
        }


def array_digest(parts: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over the names, dtypes, shapes and bytes of the arrays of a parameter."""
    found = hashlib.sha256()
    for name, array in sorted(parts.items()):
        found.update(f"{name} {array.dtype} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def write_manifest(
    directory: Path,
    entries: Mapping[str, Mapping[str, Any]],
    parameters: Mapping[str, str] | None = None,
    arrays: Mapping[str, Any] | None = None,
) -> None:
    """Writes manifest.json.

    Args:
      parameters: `array_digest` of each parameter, by name. arrays: as of `Manifest`.
    """
    data: dict[str, Any] = {"format_version": _VERSION, "files": dict(sorted(entries.items()))}
    for name, table in {"parameters": parameters, "arrays": arrays}.items():
        if table is not None:
            data[name] = dict(sorted(table.items()))
    write_json(directory / MANIFEST, {**data, _OWN_DIGEST: _digest(data)})


def read_manifest(directory: Path) -> Manifest:
    """Reads manifest.json.

    Raises CheckpointError if it is missing, malformed, damaged, or names files outside its directory.
    """
    path = directory / MANIFEST
    data = read_json(path, unique_keys=True)
    if data.get("format_version") != _VERSION:
        raise CheckpointError(path, f"format_version {data.get('format_version')!r}, this version reads {_VERSION}")
    own = data.pop(_OWN_DIGEST, None)
    if own is not None and own != _digest(data):
        raise CheckpointError(path, "is damaged: its contents do not have the SHA-256 that it says")
    entries, arrays = data.get("files"), data.get("arrays")
    if not isinstance(entries, dict):
        raise CheckpointError(path, "has no table of files")
    if arrays is not None and not isinstance(arrays, dict):
        raise CheckpointError(path, "has no table of arrays")
    problems = [f"{name!r}: {why}" for name, entry in entries.items() if (why := _entry_problem(name, entry))]
    if problems:
        raise CheckpointError(path, *problems)
    return Manifest(entries, arrays)


def verify_manifest(path: str | Path) -> list[str]:
    """Compares every file of a converted checkpoint with its manifest, reading all bytes.

    Returns a sentence for each file that is missing, has another size or checksum, or is not listed.
    Raises CheckpointError when there is no usable manifest.
    """
    directory = Path(path)
    entries = read_manifest(directory).files
    extra = [name for name in files_below(directory) if name not in entries and name != MANIFEST]
    return file_problems(directory, entries) + [f"{name}: not in the manifest" for name in extra]


def file_problems(directory: Path, entries: Entries) -> list[str]:
    """A sentence for each file that is missing, or has another size or checksum. Reads all bytes."""
    problems = size_problems(directory, entries)
    damaged = {problem.split(":")[0] for problem in problems}
    names = [name for name in entries if name not in damaged]
    total = sum(entries[name]["size"] for name in names)
    with ThreadPoolExecutor(4) as executor, Stage("checking files", total, "B") as stage:
        found = executor.map(lambda name: _digest_problem(directory / name, entries[name]["sha256"]), names)
        for name, why in zip(names, found, strict=True):
            stage.update(entries[name]["size"])
            problems += [f"{name}: {why}"] if why else []
    return problems


def _digest_problem(path: Path, wanted: str) -> str | None:
    try:
        found = sha256(path)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if found == wanted:
        return None
    return f"its {path.stat().st_size} bytes have SHA-256 {found}, the manifest says {wanted}"


def size_problems(directory: Path, entries: Entries) -> list[str]:
    """A sentence for each file that is missing or has another size. Reads no contents."""
    problems = []
    for name, entry in entries.items():
        path = directory / name
        if not path.is_file():
            problems.append(f"{name}: {'not a regular file' if path.exists() else 'missing'}")
        elif (size := path.stat().st_size) != entry["size"]:
            problems.append(f"{name}: {size} bytes, the manifest says {entry['size']}")
    return problems


def describing(entries: Entries) -> Entries:
    """The entries of the files outside of the folder of the arrays: configuration and tokenizer, a few MB."""
    return {name: entry for name, entry in entries.items() if not name.startswith(f"{PARAMS}/")}


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _entry_problem(name: str, entry: Any) -> str | None:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        return "a path that leads out of the checkpoint"
    if not isinstance(entry, dict) or not isinstance(entry.get("size"), int):
        return "has no size"
    if not isinstance(entry.get("sha256"), str) or not re.fullmatch(r"[0-9a-f]{64}", entry["sha256"]):
        return "has no SHA-256"
    return None
