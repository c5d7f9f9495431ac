"""Forms that write a call as code: Python's syntax, and Gemma's own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.tool_calls.cursor import Cursor, Reader
from jaxinfer.tool_calls.form import ToolForm
from jaxinfer.tool_calls.json_forms import LLAMA_OBJECTS
from jaxinfer.tool_calls.json_text import MAX_DEPTH, read_scalar
from jaxinfer.tool_calls.lark import Lark, quote
from jaxinfer.tool_calls.parser import CallSink
from jaxinfer.tool_calls.python_text import arguments_of, read_brackets
from jaxinfer.tool_calls.tools import Tool
from jaxinfer.tool_calls.values import properties_for_grammar, resolve, types_of

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class PythonicForm(ToolForm):
    """A list of calls as Python writes them, `[name(key="value"), ...]`. Values are literals of Python or JSON.

    Attributes:
      closing: behind the list.
    """

    closing: str = ""

    def read(self, cursor: Cursor, calls: CallSink, opening: str) -> Reader[None]:
        yield from cursor.spaces()
        if opening and (yield from cursor.peek()) == "{":  # Llama 4's template itself writes objects
            yield from LLAMA_OBJECTS.read(cursor, calls, opening)
        else:
            is_list = bool((yield from cursor.literal("[")))
            if not is_list and not opening:
                return
            while True:
                yield from cursor.spaces()
                name = yield from cursor.match(_NAME)
                if name not in calls.tools or (yield from cursor.peek()) != "(":
                    return
                code = yield from read_brackets(cursor)
                arguments = None if code is None else arguments_of(code)
                if arguments is None or not calls.add(name, arguments):
                    return
                yield from cursor.spaces()
                if not is_list or not (yield from cursor.literal(",")):
                    break
            if is_list and (yield from cursor.literal("]")):
                cursor.forget_taken()
        yield from cursor.spaces()
        if self.closing and opening and (yield from cursor.literal(self.closing)):
            cursor.forget_taken()

    def _write_call(self, lark: Lark, index: int, tool: Tool) -> str:
        items = []
        for key, schema, is_required in properties_for_grammar(tool):
            if _IDENTIFIER.fullmatch(key) is None:
                raise ValueError(f"the parameters of tool {tool.name!r}: {key!r:.80} is no name of a Python argument")
            items.append((f"{quote(key + '=')} {lark.json(schema)}", is_required))
        arguments = lark.sequence(f"arguments_{index}", items, ", ")
        return f'{quote(tool.name + "(")} {arguments} ")"'


@dataclass(frozen=True)
class GemmaForm(ToolForm):
    """`call:name{key:value,...}` between tags. Strings stand between two `string_mark`s, as they are; keys have no quotes.

    Attributes:
      closing: behind a call.
    """

    string_mark: str = ""
    closing: str = ""

    def read(self, cursor: Cursor, calls: CallSink, opening: str) -> Reader[None]:
        yield from cursor.spaces()
        if not (yield from cursor.literal("call:")):
            return
        name = yield from cursor.match(_NAME)
        if name not in calls.tools or (yield from cursor.peek()) != "{":
            return
        text = yield from self._read_value(cursor)
        if text is None or not calls.add(name, text):
            return
        yield from cursor.spaces()
        if (yield from cursor.literal(self.closing)):
            cursor.forget_taken()

    def _read_value(self, cursor: Cursor) -> Reader[str | None]:
        """Takes a value; returns its JSON text."""
        parts: list[str] = []
        stack: list[str] = []
        is_first = True
        while True:
            yield from cursor.spaces()
            char = yield from cursor.peek()
            if stack and char == stack[-1]:
                parts.append(cursor.take(cursor.at + 1))
                stack.pop()
            else:
                if stack and not is_first:
                    if not (yield from cursor.literal(",")):
                        return None
                    parts.append(", ")
                if stack and stack[-1] == "}":
                    key = yield from self._read_key(cursor)
                    if key is None:
                        return None
                    parts.append(key)
                yield from cursor.spaces()
                char = yield from cursor.peek()
                if char in ("{", "["):
                    if len(stack) >= MAX_DEPTH:
                        return None
                    stack.append(_CLOSING[char])
                    parts.append(cursor.take(cursor.at + 1))
                    is_first = True
                    continue
                text = yield from self._read_scalar(cursor)
                if text is None:
                    return None
                parts.append(text)
            is_first = False
            if not stack:
                return "".join(parts)

    def _read_key(self, cursor: Cursor) -> Reader[str | None]:
        yield from cursor.spaces()
        if (yield from cursor.literal(self.string_mark)):
            key = yield from cursor.until(self.string_mark, limit=1_000)
            if key is None or not (yield from cursor.literal(self.string_mark)):
                return None
        else:
            key = yield from cursor.until(":", "{", "}", "[", "]", ",", limit=1_000)
        if not key or not (yield from cursor.literal(":")):
            return None
        return f"{json.dumps(key.strip(), ensure_ascii=False)}: "

    def _read_scalar(self, cursor: Cursor) -> Reader[str | None]:
        if (yield from cursor.literal(self.string_mark)):
            text = yield from cursor.until(self.string_mark)
            if text is None or not (yield from cursor.literal(self.string_mark)):
                return None
            return json.dumps(text, ensure_ascii=False)
        if (yield from cursor.literal("None")):  # as the template writes null
            return "null"
        return (yield from read_scalar(cursor))

    def _write_call(self, lark: Lark, index: int, tool: Tool) -> str:
        items = []
        for number, (key, schema, is_required) in enumerate(properties_for_grammar(tool)):
            value = self._write_value(lark, f"value_{index}_{number}", schema, schema, f"{tool.name}.{key}", 0)
            items.append((f"{quote(key + ':')} {value}", is_required))
        arguments = lark.sequence(f"arguments_{index}", items, ",")
        return f"{quote(f'call:{tool.name}' + '{')} {arguments} {lark.tag('}' + self.closing)}"

    def _write_value(
        self, lark: Lark, name: str, schema: Mapping[str, Any], root: Mapping[str, Any], where: str, depth: int
    ) -> str:
        """A rule for a value that matches a schema of types, enums, properties and items."""
        schema = resolve(schema, root)
        known = {"type", "enum", "const", "title", "description", "default", "examples", "$defs", "definitions"}
        known |= {"properties", "required", "additionalProperties", "items"}
        types = types_of(schema, root)
        unknown = [key for key in schema if key not in known]
        fixed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if depth > 8 or unknown or (fixed is None and len(types) != 1):
            what = f"{unknown[0]!r}" if unknown else "more than 8 levels, or not exactly one type,"
            raise ValueError(f"{where}: {what} cannot be enforced in this form")
        if fixed is not None:
            if not all(one is None or isinstance(one, (str, int, float)) for one in fixed):
                raise ValueError(f"{where}: an enum of objects or arrays cannot be enforced in this form")
            return lark.rule(name, " | ".join(self._fixed(lark, one) for one in fixed))
        kind = next(iter(types))
        if kind == "string":
            mark = lark.tag(self.string_mark)
            if lark.is_special(self.string_mark):
                return lark.rule(name, f"{mark} {lark.free_text('STRING', [self.string_mark])} {mark}")
            body = lark.free_text("STRING", [self.string_mark])
            return lark.rule(name, f"{mark} {lark.rule(f'string_body[suffix={mark}]', body)}")
        if kind == "array":
            items = schema.get("items")
            if not isinstance(items, Mapping):
                raise ValueError(f"{where}: an array without 'items' cannot be enforced in this form")
            item = self._write_value(lark, f"{name}_i", items, root, f"{where}[]", depth + 1)
            return lark.rule(name, f'"[" ({item} ("," {item})*)? "]"')
        if kind == "object":
            properties = schema.get("properties") or {}
            required = schema.get("required") or []
            if not isinstance(properties, Mapping) or not set(required) <= set(properties):
                raise ValueError(f"{where}: an object needs 'properties' with all that are required")
            parts = []
            for number, (key, one) in enumerate(properties.items()):
                value = self._write_value(lark, f"{name}_{number}", one, root, f"{where}.{key}", depth + 1)
                parts.append((f"{quote(key + ':')} {value}", key in required))
            inner = lark.sequence(f"{name}_o", parts, ",")
            return lark.rule(name, f'"{{" {inner} "}}"')
        return lark.rule(name, lark.json({"type": kind}))

    def _fixed(self, lark: Lark, value: Any) -> str:
        mark = self.string_mark
        return lark.tag(f"{mark}{value}{mark}" if isinstance(value, str) else json.dumps(value))
