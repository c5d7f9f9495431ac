"""Names of a checkpoint's files, strict JSON, checksums and copies."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from checkpoints_convert.errors import CheckpointError
from jaxinfer.files import write_text_atomically

MAX_JSON_BYTES = 100_000_000
CONFIG = "config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
NATIVE_CONFIG = "jaxinfer_config.json"
MANIFEST = "manifest.json"
PARAMS = "params"  # the folder of the arrays in the native form

# What a checkpoint carries beside its weights, as patterns of file names relative to its directory.
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

# Where repositories older than config.json's quantization_config keep it. Not carried along: what is written says
# itself how it is quantized.
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")


def parse_json(raw: bytes, where: str | Path, *, unique_keys: bool = False) -> dict[str, Any]:
    """The JSON object in `raw`. Raises CheckpointError for anything else, and for a repeated key if asked."""

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


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_below(directory: Path) -> list[str]:
    """Every file of a tree, as sorted POSIX paths relative to it."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def companion_files(directory: Path) -> list[str]:
    """The files to carry along with the weights, as POSIX paths relative to `directory`."""
    found = {path for pattern in COMPANION_FILES for path in directory.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(directory).as_posix() for path in found)


def copy_files(source: Path, destination: Path, names: Iterable[str]) -> None:
    """Copies relative paths from one directory to another, contents only."""
    for name in names:
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, destination / name)


def write_companions(companions: Mapping[str, Path | str], destination: Path) -> list[str]:
    """Copies files and writes texts to relative paths in a directory; their names, sorted."""
    for name, content in companions.items():
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, target)
        else:
            target.write_text(content, encoding="utf-8")
    return sorted(companions)
