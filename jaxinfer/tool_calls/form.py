"""The forms in which models write calls: what they have in common, and the parser of streamed answers."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxinfer.tool_calls.cursor import Cursor, Reader
from jaxinfer.tool_calls.lark import Lark, quote
from jaxinfer.tool_calls.tools import Mode, Tool

_ALPHANUMERIC = string.ascii_letters + string.digits


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


@dataclass(frozen=True)
class ToolForm:
    """How a family of models writes calls.

    Attributes:
      name: vLLM's name of its parser, where it has one. models: for help texts.
      openings: texts that may begin a call. line_openings: characters that may do so at the start of a line.
      special_texts: tags that are special tokens in the published tokenizers, and so have to be kept in the text.
      template_texts: a chat template that contains all of them writes calls in this form; by default the first opening.
      is_before_reasoning: calls are read from the whole text of the answer, and what is left is split into reasoning
        and content; with other forms the content alone may have calls.
      first, last: texts around all calls of an answer, in a grammar. between: text between two calls.
      is_first_repeated: `first` stands before every call. optional_end: a special token that may end the calls.
    """

    name: str
    models: str
    openings: tuple[str, ...] = ()
    line_openings: str = ""
    special_texts: tuple[str, ...] = ()
    template_texts: tuple[str, ...] = ()
    is_before_reasoning: bool = False
    first: str = ""
    last: str = ""
    between: str = ""
    is_first_repeated: bool = False
    optional_end: str = ""

    def parser(self, tools: Sequence[Tool], seed: str = "") -> ToolCallParser:
        """A parser of one answer. `seed`: what the ids of its calls are computed from."""
        return ToolCallParser(self, tools, seed)

    def parse(self, text: str, tools: Sequence[Tool], seed: str = "") -> tuple[str, list[ToolCall]]:
        """Content and calls of a whole answer."""
        return collect(self.parser(tools, seed).feed(text, is_end=True))

    def read(self, cursor: Cursor, calls: CallSink, opening: str) -> Reader[None]:
        """Reads calls from the place behind `opening`, which is "" for a line's start, and returns at the first
        character that is not of a call. What it has taken after the last complete call becomes content."""
        raise NotImplementedError

    def call_id(self, seed: str, index: int, name: str) -> str:
        """The id of an answer's call, the same for the same arguments."""
        return "call_" + digest_text(seed, index, 24)

    def accepts_id(self, call_id: str) -> bool:
        """True if an id that the model wrote is one that its template takes."""
        return False

    def grammar(
        self,
        tools: Sequence[Tool],
        mode: Mode,
        is_parallel: bool = True,
        special_tokens: Mapping[str, int] | None = None,
    ) -> str:
        """A grammar for llguidance, in its variant of Lark, of answers whose calls match their tools' schemas.

        Args:
          mode: "required" for calls alone, "auto" for text, which calls may follow.
          special_tokens: the tokenizer's special tokens; other tags of the form are text.

        Raises ValueError: a strict tool has a schema that the form's grammar cannot express, with its place. (Of a tool
        that is not strict such arguments are free.)
        """
        if not tools:
            raise ValueError("a grammar of calls needs at least one tool")
        if mode == "none":
            raise ValueError("mode 'none' needs no grammar: an answer without calls is free")
        form, lark = self._for_tokens(special_tokens or {}), Lark(special_tokens or {})
        form._add_start(lark, mode, is_parallel)
        for index, tool in enumerate(tools):
            lark.rule(f"call_{index}", form._write_call(lark, index, tool))
        lark.rule("call", " | ".join(f"call_{index}" for index in range(len(tools))))
        return lark.text()

    def _for_tokens(self, special_tokens: Mapping[str, int]) -> ToolForm:
        """The form whose grammar a tokenizer with these special tokens has. Raises ValueError where one is missing."""
        return self

    def _write_call(self, lark: Lark, index: int, tool: Tool) -> str:
        """The right side of a rule for a call of a tool."""
        raise NotImplementedError

    def _write_id(self) -> str:
        """The right side of a rule for an id that the model writes; "" for none."""
        return ""

    def _add_start(self, lark: Lark, mode: Mode, is_parallel: bool) -> None:
        first, last = lark.tag(self.first), lark.tag(self.last)
        again = [lark.tag(self.between), first if self.is_first_repeated else "", "call"]
        repeated = f"({' '.join(filter(None, again))})*" if is_parallel else ""
        lark.rule("calls", " ".join(filter(None, ["call", repeated, last])))
        forbidden = list(self.openings)
        opening = next((text for text in self.openings if self.first.startswith(text)), None)
        if opening is None:
            # Calls begin at the answer's start by their first character; special tokens may stand around them.
            tags = [
                f"{lark.tag(tag)}?" if lark.is_special(tag) else "" for tag in (*self.openings[:1], self.optional_end)
            ]
            calls = f"{tags[0]} {first} calls {tags[1]}".strip()
            text = lark.free_text("TEXT", forbidden, self.line_openings) + " | " if mode == "auto" else ""
            lark.rule("start", text + calls)
        elif mode == "required":
            # Templates write a line break behind the reasoning, or before the first call.
            space = r"/\n{1,2}/? " if self.between == "\n" else ""
            lark.rule("start", f"{space}{first} calls")
        elif lark.is_special(opening):
            text = lark.free_text("TEXT", forbidden, self.line_openings)
            lark.rule("start", f"{text} ({first} calls)?")
        else:
            text = lark.free_text("TEXT", forbidden, self.line_openings)
            lead = lark.rule(f"lead[suffix={quote(opening)}]", lark.free_text("LEAD", forbidden, self.line_openings))
            lark.rule("start", f"{text} | {lead} {lark.tag(self.first[len(opening) :])} calls")


class CallSink:
    """Takes the calls that a form's reader finds."""

    def __init__(self, form: ToolForm, tools: Sequence[Tool], seed: str, cursor: Cursor):
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

    def __init__(self, form: ToolForm, tools: Sequence[Tool], seed: str = ""):
        self._form = form
        self._cursor = Cursor()
        self._sink = CallSink(form, tools, seed, self._cursor)
        self._reader: Reader[None] | None = None
        line = rf"[ \t]*(?=[{re.escape(form.line_openings)}])" if form.line_openings else "(?!)"
        openings = "|".join(re.escape(text) for text in sorted(form.openings, key=len, reverse=True))
        self._first_characters = {text[0] for text in form.openings}
        self._max_begun = max(map(len, form.openings), default=1) - 1
        self._line_opening = re.compile(line)
        self._opening = re.compile(rf"(?<=\n){line}" + (f"|{openings}" if openings else ""))
        self._is_line_start, self._is_after_call, self._has_content = True, False, False
        self._has_read_call = False  # since the last opening
        # White space at the content's end and behind the calls after it, which is returned when content goes on.
        self._spaces: list[str] = []
        self._spaces_after: list[str] = []
        self._parts: list[Content | ToolCallDelta] = []

    def feed(self, text: str, is_end: bool) -> list[Content | ToolCallDelta]:
        """Adds text; returns what is certain."""
        self._cursor.add(text, is_end)
        while self._reader is not None or self._find_opening():
            if not self._read():
                break
        if is_end and not self._is_after_call and (spaces := "".join(self._spaces)):
            self._parts.append(Content(spaces))
            self._spaces.clear()
        parts, self._parts = self._parts, []
        return parts

    def _find_opening(self) -> bool:
        """Takes content up to the next text that may begin a call; whether there is one."""
        cursor = self._cursor
        match = self._line_opening.match(cursor.text, cursor.at) if self._is_line_start else None
        match = match or self._opening.search(cursor.text, cursor.at)
        if match is None:
            num_held = 0 if cursor.is_end else self._num_begun()
            self._add_content(cursor.take(len(cursor.text) - num_held))
            cursor.forget_taken()
            return False
        self._add_content(cursor.take(match.start()))
        cursor.forget_taken()
        opening = cursor.take(match.end())
        self._has_read_call = False
        self._reader = self._form.read(cursor, self._sink, opening if opening in self._form.openings else "")
        return True

    def _num_begun(self) -> int:
        """Characters at the text's end that may be the beginning of an opening."""
        text = self._cursor.text
        for start in range(max(self._cursor.at, len(text) - self._max_begun), len(text)):
            if text[start] in self._first_characters:
                rest = text[start:]
                if any(opening.startswith(rest) for opening in self._form.openings):
                    return len(rest)
        return 0

    def _read(self) -> bool:
        """Lets the reader go on; False where it needs more text."""
        assert self._reader is not None
        is_done = next(self._reader, self) is self
        if self._sink.deltas:
            self._parts += self._sink.deltas
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
        self._parts.append(Content(spaces + body))
        self._spaces, self._spaces_after = [text[begin + len(body) :]], []
        self._is_after_call, self._has_content = False, True


def collect(parts: Iterable[Content | ToolCallDelta]) -> tuple[str, list[ToolCall]]:
    """Content and calls of all that a parser has returned for an answer."""
    content: list[str] = []
    calls: list[ToolCall] = []
    for part in parts:
        if isinstance(part, Content):
            content.append(part.text)
        elif part.id is not None and part.name is not None:
            calls.append(ToolCall(part.id, part.name, part.arguments))
        else:
            calls[part.index] = replace(calls[part.index], arguments=calls[part.index].arguments + part.arguments)
    return "".join(content), calls


def digest_text(seed: str, index: int, num_chars: int) -> str:
    """Letters and digits that are computed from a seed and an index."""
    number = int.from_bytes(hashlib.blake2b(f"{index}:{seed}".encode(), digest_size=32).digest(), "big")
    chars = []
    for _ in range(num_chars):
        number, rest = divmod(number, len(_ALPHANUMERIC))
        chars.append(_ALPHANUMERIC[rest])
    return "".join(chars)
