"""Files of a checkpoint: their names, strict JSON, and copies."""

import contextlib
import gc
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from checkpoints_convert.errors import CheckpointError
from jaxinfer.checks import NO_TOKEN, whole_numbers
from jaxinfer.files import naming, open_regular, write_text_atomically

MAX_JSON_BYTES = 100_000_000
CONFIG = "config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"
NATIVE_CONFIG = "jaxinfer_config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MANIFEST = "manifest.json"
PARAMS = "params"  # the folder of the arrays in the native form

# Files that are copied beside the weights, as patterns of names relative to the directory.
TOKENIZER_FILES = (
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
)
COMPANION_FILES = (
    CONFIG,
    GENERATION_CONFIG,
    *TOKENIZER_FILES,
    # Of sentence-transformers: how the model embeds texts.
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]_*/config.json",
    "[0-9]_Dense/model.safetensors",
    "LICENSE*",
    "NOTICE*",
)

# Files of repositories older than config.json's quantization_config. They are not copied: a checkpoint that is written
# has a quantization_config of its own.
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Stops Python's garbage collector for a while: reading 100,000 tensors' entries takes twice as long with it, since
    it looks at all of them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@collector_paused()
def parse_json(raw: bytes, where: str | Path, *, unique_keys: bool = False) -> dict[str, Any]:
    """The JSON object in `raw`. Raises CheckpointError for anything else and, with `unique_keys`, for repeated keys."""

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        collected = dict(pairs)
        if len(collected) != len(pairs):
            repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(where, f"the key {repeated!r} appears twice")
        return collected

    try:
        data = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=collect if unique_keys else None)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(where, f"is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(where, f"holds {type(data).__name__}, not a JSON object")
    return data


def read_json(path: Path, *, unique_keys: bool = False, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError naming it when it is missing, too large or not JSON."""
    try:
        with open_regular(path) as file:
            raw = file.read(max_bytes + 1)
            if len(raw) > max_bytes:
                size = path.stat().st_size
                raise CheckpointError(path, f"{size} bytes of JSON, the limit is {max_bytes}")
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from None
    return parse_json(raw, path, unique_keys=unique_keys)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Replaces the file's content by a JSON object, atomically and durably."""
    write_text_atomically(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def generation_config(directory: str | Path) -> dict[str, Any]:
    """The contents of generation_config.json, or {} without one."""
    path = Path(directory) / GENERATION_CONFIG
    return read_json(path) if path.exists() else {}


def eos_token_ids(directory: str | Path, vocab_size: int | None = None) -> tuple[int, ...]:
    """Ids that end a generation: those of generation_config.json, then those of config.json.

    Raises CheckpointError for what is no token id, or not one below `vocab_size`.
    """
    return tuple(dict.fromkeys(_token_ids(directory, "eos_token_id", vocab_size)))


def bos_token_id(directory: str | Path, vocab_size: int | None = None) -> int | None:
    """The id a text begins with, or None. Raises as `eos_token_ids`."""
    return next(iter(_token_ids(directory, "bos_token_id", vocab_size)), None)


def _token_ids(directory: str | Path, field: str, vocab_size: int | None) -> list[int]:
    ids = []
    for name in (GENERATION_CONFIG, CONFIG):
        path = Path(directory) / name
        value = whole_numbers(special_token(read_json(path), field)) if path.exists() else None
        values = [id for id in (value if isinstance(value, list) else [value]) if id not in NO_TOKEN]
        for id in values:
            if isinstance(id, bool) or not isinstance(id, int) or id < 0:
                raise CheckpointError(path, f"{field} must be a token id or a list of them, got {value!r}")
            if vocab_size is not None and id >= vocab_size:
                raise CheckpointError(path, f"{field} {id} is not below the vocab_size of {vocab_size}")
        ids += values
    return ids


def special_token(data: Mapping[str, Any], field: str) -> Any:
    """A field such as `eos_token_id` of config.json, or else of its `text_config`, where models of text and images may
    have it (Transformers' `GenerationConfig.from_model_config`); None where neither has it."""
    part = data.get("text_config")
    value = data.get(field)
    return part.get(field) if value is None and isinstance(part, Mapping) else value


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_below(directory: Path) -> list[str]:
    """All files below a directory, as sorted POSIX paths relative to it."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def companion_files(directory: Path) -> list[str]:
    """The files to copy beside the weights, as sorted POSIX paths relative to `directory`."""
    files = {path for pattern in COMPANION_FILES for path in directory.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(directory).as_posix() for path in files)


def is_of_tokenizer(name: str) -> bool:
    """True for the relative path of a tokenizer's file, or of a chat template."""
    return any(fnmatchcase(name, pattern) for pattern in TOKENIZER_FILES)


def tokenizer_files_of(directory: Path) -> dict[str, Path]:
    """The files of a directory's tokenizer and its chat templates, by their paths relative to it."""
    return {name: directory / name for name in companion_files(directory) if is_of_tokenizer(name)}


def write_companions(companions: Mapping[str, Path | str], destination: Path) -> list[str]:
    """Copies files and writes texts to relative paths in a directory; returns the sorted names."""
    for name, content in companions.items():
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, target)
        else:
            with naming(target):
                target.write_text(content, encoding="utf-8")
    return sorted(companions)
