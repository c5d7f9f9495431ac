"""The form of gpt-oss (OpenAI's Harmony): a call is a message whose header names a function as its recipient."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxinfer.tool_calls.cursor import Cursor, Reader
from jaxinfer.tool_calls.form import ToolForm
from jaxinfer.tool_calls.json_forms import arguments_schema
from jaxinfer.tool_calls.json_text import read_end, read_json
from jaxinfer.tool_calls.lark import Lark, quote
from jaxinfer.tool_calls.parser import CallSink
from jaxinfer.tool_calls.tools import Mode, Tool

_MAX_HEADER_CHARS = 400
_RECIPIENT = re.compile(r"(?:^|\s)to=functions\.([A-Za-z0-9_.-]+)(?=\s|<|$)")
_ENDS = ("<|call|>", "<|end|>", "<|return|>")


@dataclass(frozen=True)
class HarmonyForm(ToolForm):
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`. The recipient may also stand
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
        found = (yield from read_json(cursor)) if (yield from cursor.peek()) == "{" else None
        if found is None or not calls.add(recipient[1], found.text):
            return
        if not (yield from read_end(cursor, *_ENDS)) and not (yield from cursor.peek()):
            cursor.forget_taken()

    def grammar(
        self,
        tools: Sequence[Tool],
        mode: Mode,
        is_parallel: bool = True,
        special_tokens: Mapping[str, int] | None = None,
    ) -> str:
        """As `ToolForm.grammar`; reasoning and text before a call are allowed in both modes. An answer has at most one
        call, which ends it: `<|call|>` is an end of sequence for this family."""
        missing = [one for one in self.special_texts if one not in (special_tokens or {})]
        if missing:
            raise ValueError(f"a grammar of this form needs the special token {missing[0]}, which the tokenizer lacks")
        return super().grammar(tools, mode, False, special_tokens)

    def _add_start(self, lark: Lark, mode: Mode, is_parallel: bool) -> None:
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
