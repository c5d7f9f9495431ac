"""Forms that write the arguments of a call as a JSON object."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.tool_calls.cursor import Cursor, Reader, finish
from jaxinfer.tool_calls.form import CallSink, ToolForm, digest_text
from jaxinfer.tool_calls.json_text import JsonText, escape_surrogates, read_end, read_json
from jaxinfer.tool_calls.lark import Lark, quote
from jaxinfer.tool_calls.tools import Mode, Tool

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_CALL_KEYS = frozenset(("name", "arguments", "parameters", "id", "type"))
_NINE = re.compile(r"[A-Za-z0-9]{9}")
_NUMBER = re.compile(r"[0-9]*")
_MAX_HEADER_CHARS = 400
_RECIPIENT = re.compile(r"(?:^|\s)to=functions\.([A-Za-z0-9_.-]+)(?=\s|<|$)")
_ENDS = ("<|call|>", "<|end|>", "<|return|>")


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
            value = (yield from read_json(cursor, keys)) if (yield from cursor.peek()) == "{" else None
            if value is None or not _add_object(calls, value):
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


def _add_object(calls: CallSink, value: JsonText) -> bool:
    """Adds the call that an object describes, if it does."""
    name, given = value.members.get("name"), value.members.get("arguments", value.members.get("parameters"))
    if name is None or not name.startswith('"') or given is None:
        return False
    if given.startswith('"'):  # some models write the object's text as a string
        given = json.loads(given)
        inner = Cursor()
        inner.add(given, is_end=True)
        text = finish(read_json(inner))
        if text is None or not text.text.startswith("{") or inner.text[inner.at :].strip():
            return False
        given = escape_surrogates(text.text)
    if not given.startswith("{"):
        return False
    return calls.add(json.loads(name), given, value.members.get("id", "").strip('"'))


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
        arguments = (yield from read_json(cursor)) if (yield from cursor.peek()) == "{" else None
        return arguments is not None and calls.add(name, arguments.text, call_id)

    def _read_id(self, cursor: Cursor, name: str) -> Reader[str | None]:
        return None
        yield

    def _write_call(self, lark: Lark, index: int, tool: Tool) -> str:
        head = lark.tag(self.begin + self.prefix + tool.name)
        parts = [head, self._write_id(), lark.tag(self.middle), lark.json(arguments_schema(tool))]
        return " ".join(filter(None, [*parts, lark.tag(self.tail + self.end)]))


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
        arguments = (yield from read_json(cursor)) if (yield from cursor.peek()) == "{" else None
        if arguments is not None:
            calls.add(name, arguments.text, call_id)

    def _for_tokens(self, special_tokens: Mapping[str, int]) -> ToolForm:
        return self if "[ARGS]" in special_tokens else _MISTRAL_LIST

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


@dataclass(frozen=True)
class HarmonyForm(ToolForm):
    """OpenAI's Harmony: a call is a message whose header names a function as its recipient,
    `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`. The recipient may also stand
    before the channel. The prompt ends with `<|start|>assistant`, so an answer may begin with ` to=`."""

    def read(self, cursor: Cursor, calls: CallSink, opening: str) -> Reader[None]:
        if not opening and not (yield from cursor.literal("to=functions.")):
            return
        header = yield from cursor.until("<|message|>", *_ENDS, limit=_MAX_HEADER_CHARS)
        if header is None or not (yield from cursor.literal("<|message|>")):
            return
        recipient = _RECIPIENT.search(("" if opening else "to=functions.") + header)
        if recipient is None:
            return
        yield from cursor.spaces()
        tool = calls.tools.get(recipient[1])
        has_end = bool((yield from cursor.literal(*_ENDS)))
        # The token that ends an answer is not in its text, which may also have been cut here.
        if tool and (has_end or (not (yield from cursor.peek()) and not tool.parameters.get("required"))):
            calls.add(tool.name, "{}")  # no arguments at all
            return
        arguments = (yield from read_json(cursor)) if (yield from cursor.peek()) == "{" else None
        if arguments is None or not calls.add(recipient[1], arguments.text):
            return
        if not (yield from read_end(cursor, *_ENDS)) and not (yield from cursor.peek()):
            cursor.forget_taken()

    def _for_tokens(self, special_tokens: Mapping[str, int]) -> ToolForm:
        missing = [text for text in self.special_texts if text not in special_tokens]
        if missing:
            raise ValueError(f"a grammar of this form needs the special token {missing[0]}, which the tokenizer lacks")
        return self

    def _add_start(self, lark: Lark, mode: Mode, is_parallel: bool) -> None:
        """Allows reasoning and text before a call in both modes. An answer has at most one call, which ends it:
        `<|call|>` is an end of sequence for this family."""
        body = lark.free_text("BODY", [*self.openings, "<|message|>"])  # nor may ordinary tokens spell a call
        channel = lark.tag("<|channel|>")
        next_message = f"{lark.tag('<|end|>')} {lark.tag('<|start|>assistant')}"
        lark.rule("before", f'{channel} ("analysis" | "commentary") {lark.tag("<|message|>")} {body} {next_message}')
        lark.rule("final", f"{channel} {lark.tag('final<|message|>')} {body}")
        lark.rule("start", "before* call" if mode == "required" else "before* (call | final)")

    def _write_call(self, lark: Lark, index: int, tool: Tool) -> str:
        channel, kind = lark.tag("<|channel|>"), f'(" " {lark.tag("<|constrain|>")}? "json")?'
        late = f"{channel} {quote(f'commentary to=functions.{tool.name}')}"
        early = f"{quote(f' to=functions.{tool.name}')} {channel} {quote('commentary')}"
        return f"({late} | {early}) {kind} {lark.tag('<|message|>')} {lark.json(arguments_schema(tool))}"
