"""What the forms in which models write calls have in common."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxinfer.tool_calls.cursor import Cursor, Reader
from jaxinfer.tool_calls.lark import Lark, quote
from jaxinfer.tool_calls.parser import CallSink, ToolCall, ToolCallParser, parse
from jaxinfer.tool_calls.tools import Mode, Tool

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolForm:
    """How a family of models writes calls.

    Attributes:
      name: vLLM's name of its parser, where it has one. models: for help texts.
      openings: texts that may begin a call. line_openings: characters that may do so at the start of a line.
      special_texts: tags that are special tokens in the published tokenizers, and so have to be kept in the text.
      template_texts: a chat template that contains all of them writes calls in this form.
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
        return parse(self, text, tools, seed)

    def read(self, cursor: Cursor, calls: CallSink, opening: str) -> Reader[None]:
        """Reads calls from the place behind `opening`, which is "" for a line's start, and returns at the first
        character that is not of a call. What it has taken after the last complete call becomes content."""
        raise NotImplementedError

    def call_id(self, seed: str, index: int, name: str) -> str:
        """The id of an answer's call, the same for the same arguments."""
        return "call_" + digest_text(seed, index, 24)

    def accepts_id(self, call_id: str) -> bool:
        """Whether an id that the model wrote is one that its template takes."""
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

        Raises:
          ValueError: a strict tool has a schema that the form's grammar cannot express, with its place. (Of a tool
            that is not strict such arguments are free.)
        """
        if not tools:
            raise ValueError("a grammar of calls needs at least one tool")
        if mode == "none":
            raise ValueError("mode 'none' needs no grammar: an answer without calls is free")
        lark = Lark(special_tokens or {})
        self._add_start(lark, mode, is_parallel)
        for index, tool in enumerate(tools):
            lark.rule(f"call_{index}", self._write_call(lark, index, tool))
        lark.rule("call", " | ".join(f"call_{index}" for index in range(len(tools))))
        return lark.text()

    def _write_call(self, lark: Lark, index: int, tool: Tool) -> str:
        """The right side of a rule for a call of a tool."""
        raise NotImplementedError

    def _add_start(self, lark: Lark, mode: Mode, is_parallel: bool) -> None:
        first, last = lark.tag(self.first), lark.tag(self.last)
        again = [lark.tag(self.between), first if self.is_first_repeated else "", "call"]
        repeated = f"({' '.join(filter(None, again))})*" if is_parallel else ""
        lark.rule("calls", " ".join(filter(None, ["call", repeated, last])))
        forbidden = list(self.openings)
        opening = next((one for one in self.openings if self.first.startswith(one)), None)
        if opening is None:
            # Calls begin at the answer's start by their first character; special tokens may stand around them.
            tags = [
                f"{lark.tag(one)}?" if lark.is_special(one) else "" for one in (*self.openings[:1], self.optional_end)
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


def digest_text(seed: str, index: int, num_chars: int) -> str:
    """Letters and digits that are computed from a seed and an index."""
    number = int.from_bytes(hashlib.blake2b(f"{index}:{seed}".encode(), digest_size=32).digest(), "big")
    chars = []
    for _ in range(num_chars):
        number, rest = divmod(number, len(_ALPHANUMERIC))
        chars.append(_ALPHANUMERIC[rest])
    return "".join(chars)
