"""manifest.json of a converted checkpoint: checksums of its files and of the values of its arrays.

It has the size and SHA-256 of every file, and of the values of every parameter the SHA-256 and, for each chunk of each
array, the xxh3. Files of two conversions differ in times and names that Orbax gives them; parameters do not. Its own
SHA-256 is over the other fields, as `_digest` writes them.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
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
    files: by relative path. arrays: `ArrayChecksums.to_json` by the array's name.
    """

    files: Entries
    arrays: dict[str, Any]


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
    digest = hashlib.sha256()
    for name, array in sorted(parts.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def write_manifest(
    directory: Path,
    files: Mapping[str, Mapping[str, Any]],
    parameters: Mapping[str, str],
    arrays: Mapping[str, Any],
) -> None:
    """Writes manifest.json.

    Args:
      parameters: `array_digest` of each parameter, by name. files, arrays: as of `Manifest`.
    """
    tables = {"files": files, "parameters": parameters, "arrays": arrays}
    data = {"format_version": _VERSION, **{name: dict(sorted(table.items())) for name, table in tables.items()}}
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
    files, arrays = data.get("files"), data.get("arrays")
    if not isinstance(files, dict):
        raise CheckpointError(path, "has no table of files")
    problems = [f"{name!r}: {why}" for name, entry in files.items() if (why := _entry_problem(name, entry))]
    if problems or not isinstance(arrays, dict):
        raise CheckpointError(path, *(problems or ["has no table of arrays"]))
    return Manifest(files, arrays)


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
    wanted = {directory / name: entry["sha256"] for name, entry in entries.items() if name not in damaged}
    return problems + check_digests(wanted, partial(_digest_problem, directory))


def check_digests(wanted: Mapping[Path, str], check: Callable[[Path, str], str | None]) -> list[str]:
    """The sentences that `check` returns for files and their digests; several files are read at once."""
    problems = []
    sizes = [file.stat().st_size for file in wanted]
    with ThreadPoolExecutor(4) as executor, Stage("checking files", sum(sizes), "B") as stage:
        for size, problem in zip(sizes, executor.map(check, wanted, wanted.values()), strict=True):
            stage.update(size)
            problems += [problem] if problem else []
    return problems


def _digest_problem(directory: Path, path: Path, wanted: str) -> str | None:
    name = path.relative_to(directory).as_posix()
    try:
        digest = sha256(path)
    except OSError as error:
        return f"{name}: cannot be read: {error.strerror or error}"
    if digest == wanted:
        return None
    return f"{name}: its {path.stat().st_size} bytes have SHA-256 {digest}, the manifest says {wanted}"


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
