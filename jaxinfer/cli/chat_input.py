"""Reading messages at a terminal: several lines, a history that is kept, a text to edit."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
HISTORY = "JAXINFER_CHAT_HISTORY"  # a file; empty keeps no history


def read_message(read: Callable[[str], str]) -> str:
    """A message of one line or several, from what reads a line after a prompt.

    A line that begins with three quotation marks begins a text that ends with three; a line that ends in a backslash
    goes on in the next one.
    """
    line = read(PROMPT)
    if not line.lstrip().startswith(QUOTES):
        while line.endswith("\\"):
            line = line[:-1] + "\n" + read(MORE)
        return line
    text = line.lstrip().removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES):
        text += "\n" + read(MORE)
    return text.rstrip().removesuffix(QUOTES).strip("\n")


class Terminal:
    """Lines typed at a terminal, with editing keys and a history. What is pasted is one text, whatever lines it has."""

    def __init__(self, **streams: Any):
        from prompt_toolkit import PromptSession

        self._session: PromptSession[str] = PromptSession(history=_history(), **streams)

    def read(self, prompt: str, text: str = "") -> str:
        """A line, or what was pasted; `text` is there to edit. Raises EOFError, KeyboardInterrupt."""
        return self._session.prompt(prompt, default=text)

    def message(self) -> str:
        """A message, as `read_message` reads it."""
        return read_message(self.read)


def history_file() -> Path | None:
    """The file of the history; None for none."""
    if (given := os.environ.get(HISTORY)) is not None:
        return Path(given).expanduser() if given else None
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "jaxinfer" / "chat_history"


def _history() -> Any:
    """The history in its file, which only its owner may read; in memory where no such file can be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = history_file()
    with contextlib.suppress(OSError, RuntimeError):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
            return FileHistory(path)
    return InMemoryHistory()
