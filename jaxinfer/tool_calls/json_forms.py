"""Forms that write the arguments of a call as a JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.tool_calls.cursor import Cursor, Reader, finish
from jaxinfer.tool_calls.form import ToolForm, digest_text
from jaxinfer.tool_calls.json_text import JsonText, escape_surrogates, read_end, read_json
from jaxinfer.tool_calls.lark import Lark, quote
from jaxinfer.tool_calls.parser import CallSink
from jaxinfer.tool_calls.tools import Tool

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_CALL_KEYS = frozenset(("name", "arguments", "parameters", "id", "type"))
_NINE = re.compile(r"[A-Za-z0-9]{9}")
_NUMBER = re.compile(r"[0-9]*")


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object even where it does not say so."""
    return {**tool.parameters, "type": "object"}


@dataclass(frozen=True)
class JsonForm(ToolForm):
    """A call is an object with the name and the arguments: alone, or in a list, or several after one another.

    Attributes:
      arguments_key: the member with the arguments, as the model is told. closing: behind each object, or the list.
      separators: characters that stand between two objects.
    """

    arguments_key: str = "arguments"
    closing: str = ""
    separators: str = ""

    def read(self, cursor: Cursor, calls: CallSink, opening: str) -> Reader[None]:
        yield from cursor.spaces()
        is_list = bool((yield from cursor.literal("[")))
        separators = ",;" if is_list else self.separators
        # An answer in JSON is not to wait for its end: without a tag, the first other key tells that it is no call.
        keys = None if opening else _CALL_KEYS
        while True:
            yield from cursor.spaces()
            found = (yield from read_json(cursor, keys)) if (yield from cursor.peek()) == "{" else None
            if found is None or not _add_object(calls, found):
                return
            yield from cursor.spaces()
            if is_list and (yield from cursor.literal("]")):
                cursor.forget_taken()
                break
            if not separators or not (yield from cursor.literal(*separators)):
                break
        if self.closing:
            yield from read_end(cursor, self.closing.strip())

    def _write_call(self, lark: Lark, index: int, tool: Tool) -> str:
        head = lark.tag(f'{{"name": {json.dumps(tool.name)}, "{self.arguments_key}": ')
        tail = f"{self._write_id()} {lark.tag('}' + ('' if self.last else self.closing))}"
        return f"{head} {lark.json(arguments_schema(tool))} {tail}"

    def _write_id(self) -> str:
        return ""


def _add_object(calls: CallSink, found: JsonText) -> bool:
    """Adds the call that an object describes, if it does."""
    name, given = found.members.get("name"), found.members.get("arguments", found.members.get("parameters"))
    if name is None or not name.startswith('"') or given is None:
        return False
    if given.startswith('"'):  # some models write the object's text as a string
        given = json.loads(given)
        inner = Cursor()
        inner.add(given, is_end=True)
        text = finish(read_json(inner))
        if text is None or not text.is_object or inner.text[inner.at :].strip():
            return False
        given = escape_surrogates(text.text)
    if not given.startswith("{"):
        return False
    return calls.add(json.loads(name), given, found.members.get("id", "").strip('"'))


@dataclass(frozen=True)
class NamedForm(ToolForm):
    """A call has its name as text and the arguments as an object, between tags.

    Attributes:
      begin, end: tags around a call. prefix: before the name. middle: between name and arguments. tail: behind them.
    """

    begin: str = ""
    prefix: str = ""
    middle: str = ""
    tail: str = ""
    end: str = ""

    def read(self, cursor: Cursor, calls: CallSink, opening: str) -> Reader[None]:
        has_begun = opening == self.begin
        while True:
            if not has_begun:
                yield from cursor.spaces()
                if not (yield from cursor.literal(self.begin)):
                    break
            if not (yield from self._read_call(cursor, calls)):
                return
            has_begun = False
            for text in (self.tail.strip(), self.end):
                if text:
                    yield from read_end(cursor, text)
        if self.last and (yield from cursor.literal(self.last)):
            cursor.forget_taken()

    def _read_call(self, cursor: Cursor, calls: CallSink) -> Reader[bool]:
        yield from cursor.spaces()
        if self.prefix and not (yield from cursor.literal(self.prefix)):
            return False
        name = yield from cursor.match(_NAME)
        call_id = yield from self._read_id(cursor, name)
        for text in self.middle.split():
            yield from cursor.spaces()
            if not (yield from cursor.literal(text)):
                return False
        yield from cursor.spaces()
        found = (yield from read_json(cursor)) if (yield from cursor.peek()) == "{" else None
        return found is not None and calls.add(name, found.text, call_id)

    def _read_id(self, cursor: Cursor, name: str) -> Reader[str | None]:
        return None
        yield

    def _write_call(self, lark: Lark, index: int, tool: Tool) -> str:
        head = lark.tag(self.begin + self.prefix + tool.name)
        parts = [head, self._write_id(), lark.tag(self.middle), lark.json(arguments_schema(tool))]
        return " ".join(filter(None, [*parts, lark.tag(self.tail + self.end)]))

    def _write_id(self) -> str:
        return ""


@dataclass(frozen=True)
class KimiForm(NamedForm):
    """The name is a part of an id, `functions.name:number`, which the model writes itself: it counts all calls of the
    conversation."""

    def call_id(self, seed: str, index: int, name: str) -> str:
        return f"{self.prefix}{name}:{index}"

    def accepts_id(self, call_id: str) -> bool:
        return True

    def _read_id(self, cursor: Cursor, name: str) -> Reader[str | None]:
        if not (yield from cursor.literal(":")):
            return None
        number = yield from cursor.match(_NUMBER)
        return f"{self.prefix}{name}:{number}" if 0 < len(number) <= 9 else None

    def _write_id(self) -> str:
        return '":" /[0-9]{1,4}/'


@dataclass(frozen=True)
class MistralForm(ToolForm):
    """`[TOOL_CALLS]` before a list of objects (to 2025), or before each call: `name[ARGS]{...}`, with `[CALL_ID]` and
    an id behind the name in some versions. Ids have nine letters and digits."""

    def call_id(self, seed: str, index: int, name: str) -> str:
        return digest_text(seed, index, 9)

    def accepts_id(self, call_id: str) -> bool:
        return _NINE.fullmatch(call_id) is not None

    def read(self, cursor: Cursor, calls: CallSink, opening: str) -> Reader[None]:
        yield from cursor.spaces()
        if (yield from cursor.peek()) in ("[", "{"):
            yield from _MISTRAL_LIST.read(cursor, calls, opening)
            return
        name = yield from cursor.match(_NAME)
        call_id = None
        if name in calls.tools and (yield from cursor.literal("[CALL_ID]")):
            call_id = yield from cursor.match(_NAME)
        yield from cursor.literal("[ARGS]")
        yield from cursor.spaces()
        found = (yield from read_json(cursor)) if (yield from cursor.peek()) == "{" else None
        if found is not None:
            calls.add(name, found.text, call_id)

    def grammar(
        self,
        tools: Any,
        mode: Any,
        is_parallel: bool = True,
        special_tokens: Mapping[str, int] | None = None,
    ) -> str:
        if "[ARGS]" in (special_tokens or {}):
            return super().grammar(tools, mode, is_parallel, special_tokens)
        return _MISTRAL_LIST.grammar(tools, mode, is_parallel, special_tokens)

    def _write_call(self, lark: Lark, index: int, tool: Tool) -> str:
        call_id = f"({lark.tag('[CALL_ID]')} /[A-Za-z0-9]{{9}}/)?" if lark.is_special("[CALL_ID]") else ""
        parts = [quote(tool.name), call_id, lark.tag("[ARGS]"), lark.json(arguments_schema(tool))]
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class _MistralListForm(JsonForm):
    """A list whose objects may have an id."""

    def _write_id(self) -> str:
        head = quote(', "id": "')
        return f"({head} /[A-Za-z0-9]{{9}}/ {quote(chr(34))})?"


_MISTRAL_LIST = _MistralListForm(
    "mistral", "", openings=("[TOOL_CALLS]",), first="[TOOL_CALLS][", last="]", between=", "
)
LLAMA_OBJECTS = JsonForm("llama3_json", "", arguments_key="parameters", separators=";,")
