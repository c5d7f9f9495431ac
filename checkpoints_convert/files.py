"""Files of a checkpoint: their names, strict JSON, checksums, and manifest.json.

manifest.json has the size and SHA-256 of every file of a converted checkpoint (safetensors has no checksum of its own)
and the SHA-256 of every parameter's values. Files of two conversions differ in times and names that Orbax gives them;
parameters do not.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from checkpoints_convert.errors import CheckpointError
from jaxinfer.files import write_text_atomically

MAX_JSON_BYTES = 100_000_000
CONFIG = "config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
NATIVE_CONFIG = "jaxinfer_config.json"
MANIFEST = "manifest.json"
PARAMS = "params"  # the folder of the arrays in the native form

# Files that are copied beside the weights, as patterns of names relative to the directory.
COMPANION_FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.tiktoken",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "LICENSE*",
    "NOTICE*",
)

# Files of repositories older than config.json's quantization_config. They are not copied: a checkpoint that is written
# has a quantization_config of its own.
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")


def parse_json(raw: bytes, where: str | Path, *, unique_keys: bool = False) -> dict[str, Any]:
    """The JSON object in `raw`. Raises CheckpointError for anything else and, with `unique_keys`, for repeated keys."""

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [key for key, _ in pairs]
            repeated = next(key for key in names if names.count(key) > 1)
            raise CheckpointError(where, f"the key {repeated!r} appears twice")
        return found

    try:
        data = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=collect if unique_keys else None)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(where, f"is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(where, f"holds {type(data).__name__}, not a JSON object")
    return data


def read_json(path: Path, *, unique_keys: bool = False) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError naming it when it is missing, too large or not JSON."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(path, f"{size} bytes of JSON, the limit is {MAX_JSON_BYTES}")
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from None
    return parse_json(raw, path, unique_keys=unique_keys)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Replaces the file's content by a JSON object, atomically and durably."""
    write_text_atomically(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def generation_config(directory: str | Path) -> dict[str, Any]:
    """The contents of generation_config.json, or {} without one."""
    path = Path(directory) / "generation_config.json"
    return read_json(path) if path.exists() else {}


def eos_token_ids(directory: str | Path) -> tuple[int, ...]:
    """Ids that end a generation: those of generation_config.json, then those of config.json."""
    return tuple(dict.fromkeys(id for data in _both(directory) for id in _token_ids(data, "eos_token_id", directory)))


def bos_token_id(directory: str | Path) -> int | None:
    """The id a text begins with, or None."""
    found = [id for data in _both(directory) for id in _token_ids(data, "bos_token_id", directory)]
    return found[0] if found else None


def _both(directory: str | Path) -> list[dict[str, Any]]:
    path = Path(directory) / CONFIG
    return [generation_config(directory), read_json(path) if path.exists() else {}]


def _token_ids(data: Mapping[str, Any], name: str, where: str | Path) -> list[int]:
    value = data.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(id, bool) or not isinstance(id, int) or id < 0 for id in values):
        raise CheckpointError(where, f"{name} must be a token id or a list of them, got {value!r}")
    return values


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_below(directory: Path) -> list[str]:
    """All files below a directory, as sorted POSIX paths relative to it."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def companion_files(directory: Path) -> list[str]:
    """The files to copy beside the weights, as sorted POSIX paths relative to `directory`."""
    found = {path for pattern in COMPANION_FILES for path in directory.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(directory).as_posix() for path in found)


def copy_files(source: Path, destination: Path, names: Iterable[str]) -> None:
    """Copies files by their relative paths from one directory to another, without metadata."""
    for name in names:
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, destination / name)


def write_companions(companions: Mapping[str, Path | str], destination: Path) -> list[str]:
    """Copies files and writes texts to relative paths in a directory; returns the sorted names."""
    for name, content in companions.items():
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, target)
        else:
            target.write_text(content, encoding="utf-8")
    return sorted(companions)


_VERSION = 1

# {relative path: {"size": bytes, "sha256": hexadecimal}}
Entries = dict[str, dict[str, Any]]


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
    directory: Path, entries: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, str] | None = None
) -> None:
    """Writes manifest.json. parameters: `array_digest` of each parameter, by name."""
    data = {"format_version": _VERSION, "files": dict(sorted(entries.items()))}
    if parameters is not None:
        data["parameters"] = dict(sorted(parameters.items()))
    write_json(directory / MANIFEST, data)


def read_manifest(directory: Path) -> Entries:
    """The file entries of manifest.json.

    Raises CheckpointError if it is missing, malformed, or names files outside its directory.
    """
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

    Returns a sentence for each file that is missing, has another size or checksum, or is not listed.
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
    """A sentence for each file that is missing or has another size. Reads no contents."""
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
