"""Tells calls of tools from the content of an answer, as its text streams."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from jaxinfer.tool_calls.cursor import Cursor, Reader
from jaxinfer.tool_calls.tools import Tool


@dataclass(frozen=True)
class Content:
    """Text of the answer that is not of a call."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call: the first one of each index has an id and a name and no arguments, later ones pieces of the
    JSON text of the arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class ToolCall:
    """A whole call. `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


class CallReader(Protocol):
    """What the parser uses of a form; `ToolForm` describes it."""

    @property
    def openings(self) -> tuple[str, ...]: ...

    @property
    def line_openings(self) -> str: ...

    def read(self, cursor: Cursor, calls: CallSink, opening: str) -> Reader[None]: ...

    def call_id(self, seed: str, index: int, name: str) -> str: ...

    def accepts_id(self, call_id: str) -> bool: ...


class CallSink:
    """Takes the calls that a form's reader finds."""

    def __init__(self, form: CallReader, tools: Sequence[Tool], seed: str, cursor: Cursor):
        self.tools = {tool.name: tool for tool in tools}
        self.deltas: list[ToolCallDelta] = []
        self._form, self._seed, self._cursor = form, seed, cursor
        self._ids: set[str] = set()

    def add(self, name: str, arguments: str, call_id: str | None = None) -> bool:
        """Adds a complete call, to which all text belongs that the cursor has taken; False where there is no such tool.

        Args:
          call_id: as the model wrote it; None where it writes none.
        """
        if name not in self.tools:
            return False
        index = number = len(self._ids)
        if call_id is not None and not self._form.accepts_id(call_id):
            call_id = None
        while call_id is None or call_id in self._ids:
            call_id = self._form.call_id(self._seed, number, name)
            number += 1
        self._ids.add(call_id)
        self.deltas += [ToolCallDelta(index, call_id, name, ""), ToolCallDelta(index, None, None, arguments)]
        self._cursor.forget_taken()
        return True


class ToolCallParser:
    """Parses one answer.

    A call is returned when it is complete: its arguments are valid JSON, and its tool exists. What begins like a call
    and is none, or does not end, is content. White space next to a call is dropped; no other text is lost or returned
    twice. What `feed` has returned after some text does not depend on where the text was cut, and the time is linear in
    its length.
    """

    def __init__(self, form: CallReader, tools: Sequence[Tool], seed: str = ""):
        self._form = form
        self._cursor = Cursor()
        self._sink = CallSink(form, tools, seed, self._cursor)
        self._reader: Reader[None] | None = None
        line = rf"[ \t]*(?=[{re.escape(form.line_openings)}])" if form.line_openings else "(?!)"
        openings = "|".join(re.escape(one) for one in sorted(form.openings, key=len, reverse=True))
        self._first_characters = {one[0] for one in form.openings}
        self._max_begun = max(map(len, form.openings), default=1) - 1
        self._line_opening = re.compile(line)
        self._opening = re.compile(rf"(?<=\n){line}" + (f"|{openings}" if openings else ""))
        self._is_line_start, self._is_after_call, self._has_content = True, False, False
        self._has_read_call = False  # since the last opening
        # White space at the content's end and behind the calls after it, which is returned when content goes on.
        self._spaces: list[str] = []
        self._spaces_after: list[str] = []
        self._found: list[Content | ToolCallDelta] = []

    def feed(self, text: str, is_end: bool) -> list[Content | ToolCallDelta]:
        """Adds text; returns what is certain."""
        self._cursor.add(text, is_end)
        while self._reader is not None or self._find_opening():
            if not self._read():
                break
        if is_end and not self._is_after_call and (spaces := "".join(self._spaces)):
            self._found.append(Content(spaces))
            self._spaces.clear()
        found, self._found = self._found, []
        return found

    def _find_opening(self) -> bool:
        """Takes content up to the next text that may begin a call; whether there is one."""
        cursor = self._cursor
        found = self._line_opening.match(cursor.text, cursor.at) if self._is_line_start else None
        found = found or self._opening.search(cursor.text, cursor.at)
        if found is None:
            num_held = 0 if cursor.is_end else self._num_begun()
            self._add_content(cursor.take(len(cursor.text) - num_held))
            cursor.forget_taken()
            return False
        self._add_content(cursor.take(found.start()))
        cursor.forget_taken()
        opening = cursor.take(found.end())
        self._has_read_call = False
        self._reader = self._form.read(cursor, self._sink, opening if opening in self._form.openings else "")
        return True

    def _num_begun(self) -> int:
        """Characters at the text's end that may be the beginning of an opening."""
        text = self._cursor.text
        for start in range(max(self._cursor.at, len(text) - self._max_begun), len(text)):
            if text[start] in self._first_characters:
                rest = text[start:]
                if any(one.startswith(rest) for one in self._form.openings):
                    return len(rest)
        return 0

    def _read(self) -> bool:
        """Lets the reader go on; False where it needs more text."""
        assert self._reader is not None
        is_done = next(self._reader, self) is self
        if self._sink.deltas:
            self._found += self._sink.deltas
            self._sink.deltas.clear()
            self._is_line_start = self._is_after_call = self._has_read_call = True
        if is_done:
            self._reader = None
            taken = self._cursor.forget_taken()
            if not taken.strip() and not self._has_read_call:
                # The character at a line's start: the reader would stop there again.
                taken += self._cursor.take(min(self._cursor.at + 1, len(self._cursor.text)))
                self._cursor.forget_taken()
            self._add_content(taken)
        return is_done

    def _add_content(self, text: str) -> None:
        """Returns content, except for white space that a call may follow."""
        self._is_line_start = not text[text.rfind("\n") + 1 :].strip(" \t") and ("\n" in text or self._is_line_start)
        body = text.strip()
        if not body:
            (self._spaces_after if self._is_after_call else self._spaces).append(text)
            return
        begin = text.index(body)
        if self._is_after_call:
            # Content before and behind calls is kept apart by the white space of one side.
            spaces = "".join(self._spaces) or "".join((*self._spaces_after, text[:begin]))
            spaces = spaces if self._has_content else ""
        else:
            spaces = "".join((*self._spaces, text[:begin]))
        self._found.append(Content(spaces + body))
        self._spaces, self._spaces_after = [text[begin + len(body) :]], []
        self._is_after_call, self._has_content = False, True


def parse(form: CallReader, text: str, tools: Sequence[Tool], seed: str = "") -> tuple[str, list[ToolCall]]:
    """Content and calls of a whole answer."""
    return collect(ToolCallParser(form, tools, seed).feed(text, is_end=True))


def collect(found: Iterable[Content | ToolCallDelta]) -> tuple[str, list[ToolCall]]:
    """Content and calls of all that a parser has returned for an answer."""
    content: list[str] = []
    calls: list[ToolCall] = []
    for one in found:
        if isinstance(one, Content):
            content.append(one.text)
        elif one.id is not None and one.name is not None:
            calls.append(ToolCall(one.id, one.name, one.arguments))
        else:
            calls[one.index] = replace(calls[one.index], arguments=calls[one.index].arguments + one.arguments)
    return "".join(content), calls
