"""Reading prompts from arguments, a file or standard input."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer.cli.command import UsageError

STDIN = "-"


@dataclass(frozen=True)
class PromptLine:
    """A prompt with the sampling parameters of its line; `where` is its place, for error messages."""

    prompt: str | list[int]
    where: str
    sampling: dict[str, Any] = field(default_factory=dict)


def read_prompts(arguments: Sequence[str], file: Path | None) -> list[PromptLine]:
    """Prompts from the arguments, where `-` is standard input as one prompt, or from a file.

    With neither, standard input is one prompt unless it is a terminal. Raises UsageError if there is no prompt.
    """
    if arguments and file is not None:
        raise UsageError("prompts come from the command line or from --file, not from both")
    if file is not None:
        lines = [
            _parse(data, f"{file} line {number}", ("prompt",)) if is_json else PromptLine(data, f"{file} line {number}")
            for number, data, is_json in _lines(file)
        ]
        if not lines:
            raise UsageError(f"{file} has no prompts: every line is blank")
        return lines
    if not arguments and sys.stdin.isatty():
        raise UsageError('no prompt: give one, such as "def read_lines(path):", or --file, or pipe one in')
    if list(arguments).count(STDIN) > 1:
        raise UsageError(f"{STDIN} is standard input, which can be read once only")
    if not arguments:
        text = _stdin()
        if not text:
            raise UsageError("no prompt: standard input is empty")
        return [PromptLine(text, "standard input")]
    return [PromptLine(_stdin() if text == STDIN else text, f"prompt {i}") for i, text in enumerate(arguments)]


def read_chats(files: Sequence[Path]) -> list[list[dict[str, Any]]]:
    """Conversations of files, one a line: a text that a user says, or in JSON lines an object with "prompt", such a
    text, or "messages". Raises UsageError, with the line, for what is none."""
    chats = []
    for file in files:
        for number, text, is_json in _lines(file):
            where = f"{file} line {number}"
            record = _object(text, where, ()) if is_json else {"prompt": text}
            said, messages = record.get("prompt"), record.get("messages")
            if isinstance(said, str):
                messages = [{"role": "user", "content": said}]
            if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
                raise UsageError(f'{where} has no "prompt", a text, and no list of "messages"')
            chats.append(messages)
    if not chats:
        raise UsageError(f"{', '.join(map(str, files))}: no prompt in it")
    return chats


def read_records(
    file: Path, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a JSON lines file with their places; each has the `required` keys, and no others but `optional`
    ones."""
    records = []
    for number, text, _ in _lines(file):
        where = f"{file} line {number}"
        record = _object(text, where, required)
        unknown = sorted(set(record) - {*required, *optional})
        if unknown:
            raise UsageError(f"{where}: unknown key {unknown[0]!r}; the keys are {', '.join((*required, *optional))}")
        records.append((where, record))
    if not records:
        raise UsageError(f"{file} is empty")
    return records


def _parse(text: str, where: str, required: tuple[str, ...]) -> PromptLine:
    record = _object(text, where, required)
    prompt = record.pop("prompt")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not (isinstance(prompt, str) or is_ids):
        raise UsageError(f"{where}: prompt must be a text or a list of token ids, got {prompt!r:.60}")
    return PromptLine(prompt, where, record)


def _object(text: str, where: str, required: tuple[str, ...]) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict):
        keys = f" with {', '.join(required)}" if required else ""
        raise UsageError(f"{where} must be a JSON object{keys}, got {type(record).__name__}")
    for key in required:
        if key not in record:
            raise UsageError(f"{where} has no {key!r}")
    return record


def _lines(file: Path) -> Iterator[tuple[int, str, bool]]:
    """Line numbers, from 1, with their text and whether the file is JSON lines, without blank lines."""
    try:
        text = _stdin() if str(file) == STDIN else file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}") from None
    is_json = file.suffix in (".jsonl", ".ndjson", ".json")
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if line.strip():
            yield number, line, is_json


def _stdin() -> str:
    """Standard input without its last newline."""
    return sys.stdin.read().removesuffix("\n").removesuffix("\r")
