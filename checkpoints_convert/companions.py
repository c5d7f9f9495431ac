"""What a checkpoint has beside its weights: files to carry along, tokens that begin and end a text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints_convert.errors import CheckpointNotFoundError
from checkpoints_convert.files import companion_files
from checkpoints_convert.gguf.index import GGUFIndex, find_gguf
from checkpoints_convert.gguf.tokenizer import end_token_ids, token_id
from checkpoints_convert.gguf.tokenizer import tokenizer_files as gguf_tokenizer_files
from checkpoints_convert.huggingface import config as huggingface

# By name relative to a checkpoint's directory: the file to copy, or the text to write.
Companions = Mapping[str, Path | str]
_NOT_OF_TOKENIZER = ("config.json", "generation_config.json", "LICENSE", "NOTICE")


def generation_config(path: str | Path) -> dict[str, Any]:
    """The checkpoint's generation_config.json as it is, or {} without one."""
    return {} if find_gguf(Path(path)) else huggingface.generation_config(path)


def eos_token_ids(path: str | Path) -> tuple[int, ...]:
    """Ids that end a generation, by generation_config.json and config.json, or the metadata of a GGUF file."""
    if (file := find_gguf(Path(path))) is None:
        return huggingface.eos_token_ids(path)
    with GGUFIndex(file) as index:
        return end_token_ids(index)


def bos_token_id(path: str | Path) -> int | None:
    """The id a text begins with, or None."""
    if (file := find_gguf(Path(path))) is None:
        return huggingface.bos_token_id(path)
    with GGUFIndex(file) as index:
        return token_id(index, "bos_token_id")


def tokenizer_files(path: str | Path) -> dict[str, str] | None:
    """Contents of the tokenizer's files by name, of a GGUF file that has them in its metadata ({}: it has none); None
    of another checkpoint, where they are files.

    Raises CheckpointError for a tokenizer that cannot be rebuilt exactly, such as an unknown pre-tokenizer.
    """
    if (file := find_gguf(Path(path))) is None:
        return None
    with GGUFIndex(file) as index:
        return gguf_tokenizer_files(index)


def with_tokenizer_of(companions: Companions, directory: str | Path) -> Companions:
    """The companions with the tokenizer files of a directory instead of their own."""
    directory = Path(directory)
    found = {name: directory / name for name in companion_files(directory) if _is_of_tokenizer(name)}
    if "tokenizer.json" not in found:
        raise CheckpointNotFoundError(directory, "holds no tokenizer.json")
    return {**{name: value for name, value in companions.items() if not _is_of_tokenizer(name)}, **found}


def _is_of_tokenizer(name: str) -> bool:
    return not name.startswith(_NOT_OF_TOKENIZER)
