"""Forms that write a call as code: Python's syntax, and Gemma's own."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.tool_calls.cursor import CLOSING, Cursor, Reader
from jaxinfer.tool_calls.form import CallSink, ToolForm
from jaxinfer.tool_calls.json_forms import LLAMA_OBJECTS
from jaxinfer.tool_calls.json_text import MAX_DEPTH, json_string, read_scalar
from jaxinfer.tool_calls.lark import Lark, quote
from jaxinfer.tool_calls.python_text import read_arguments
from jaxinfer.tool_calls.tagged_forms import write_value
from jaxinfer.tool_calls.tools import Tool
from jaxinfer.tool_calls.values import MAX_KEY_CHARS, check_key, resolve, types_of, write_arguments

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_BESIDE_KEYS = (":", "{", "}", "[", "]", ",")
_TYPES = frozenset(("string", "number", "boolean", "null", "array", "object"))
_MAX_LEVELS = 8
_STRING_LIMITS = ("minLength", "maxLength", "pattern")
_NUMBER_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ANNOTATIONS = ("title", "description", "default", "examples", "format", "$defs", "definitions")
# What the grammar of Gemma's form keeps of a schema, and what says nothing about values.
_KNOWN = frozenset(
    (
        *("type", "enum", "const", "anyOf", "oneOf", *_STRING_LIMITS, *_NUMBER_LIMITS, *_ANNOTATIONS),
        *("properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
    )
)


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
                arguments = (yield from read_arguments(cursor)) if name in calls.tools else None
                if arguments is None or not calls.add(name, arguments):
                    return
                yield from cursor.spaces()
                if not is_list or not (yield from cursor.literal(",")):
                    break
            if is_list and (yield from cursor.literal("]")):
                cursor.forget_taken()
        yield from cursor.spaces()
        if self.closing and (opening or self.optional_end) and (yield from cursor.literal(self.closing)):
            cursor.forget_taken()

    def _write_call(self, lark: Lark, index: int, tool: Tool) -> str:
        def write(number: int, key: str, schema: Mapping[str, Any]) -> str:
            if not key.isidentifier():
                raise ValueError(f"the parameters of tool {tool.name!r}: {key!r:.80} is no name of a Python argument")
            is_boolean = types_of(schema, schema) == {"boolean"} and schema.keys().isdisjoint(("enum", "const"))
            value = '("True" | "False")' if is_boolean else lark.json(schema)
            return f"{quote(key + '=')} {value}"

        arguments = write_arguments(lark, index, tool, write, ", ")
        return f'{quote(tool.name + "(")} {arguments} ")"'


@dataclass(frozen=True)
class GemmaForm(ToolForm):
    """`call:name{key:value,...}` between tags. Strings stand as they are between two `string_mark`s; keys have no
    quotes.

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

    def _read_value(self, cursor: Cursor, depth: int = 0) -> Reader[str | None]:
        """Takes a value that stands in `depth` brackets; returns its JSON text."""
        yield from cursor.spaces()
        opening = yield from cursor.peek()
        if opening not in ("{", "["):
            return (yield from self._read_scalar(cursor))
        if depth >= MAX_DEPTH:
            return None
        cursor.take(cursor.at + 1)

        def read_item() -> Reader[str | None]:
            key = (yield from self._read_key(cursor)) if opening == "{" else ""
            value = None if key is None else (yield from self._read_value(cursor, depth + 1))
            return None if value is None else f"{key}{value}"

        read = yield from cursor.items(opening, read_item)
        if read is None or read[1]:  # a comma behind the last item
            return None
        return f"{opening}{', '.join(read[0])}{CLOSING[opening]}"

    def _read_key(self, cursor: Cursor) -> Reader[str | None]:
        yield from cursor.spaces()
        if (yield from cursor.literal(self.string_mark)):
            key = yield from cursor.until(self.string_mark, limit=MAX_KEY_CHARS)
            if key is None or not (yield from cursor.literal(self.string_mark)):
                return None
        else:
            key = yield from cursor.until(*_BESIDE_KEYS, limit=MAX_KEY_CHARS)
        if not key or not (yield from cursor.literal(":")):
            return None
        return f"{json_string(key.strip())}: "

    def _read_scalar(self, cursor: Cursor) -> Reader[str | None]:
        if (yield from cursor.literal(self.string_mark)):
            text = yield from cursor.until(self.string_mark)
            if text is None or not (yield from cursor.literal(self.string_mark)):
                return None
            return json_string(text)
        if (yield from cursor.literal("None")):  # as the template writes null
            return "null"
        return (yield from read_scalar(cursor))

    def _write_call(self, lark: Lark, index: int, tool: Tool) -> str:
        def write(number: int, key: str, schema: Mapping[str, Any]) -> str:
            check_key(key, tool.name, self.string_mark, *_BESIDE_KEYS)
            value = self._write_value(lark, f"value_{index}_{number}", schema, schema, f"{tool.name}.{key}", 0)
            return f"{quote(key + ':')} {value}"

        # The template writes the arguments in alphabetical order.
        keys = sorted(tool.parameters.get("properties") or {}, key=str.lower)
        ordered = {key: tool.parameters["properties"][key] for key in keys}
        tool = replace(tool, parameters={**tool.parameters, "properties": ordered})
        arguments = write_arguments(lark, index, tool, write, ",")
        return f"{quote(f'call:{tool.name}' + '{')} {arguments} {lark.tag('}' + self.closing)}"

    def _write_value(self, lark: Lark, name: str, schema: Any, root: Mapping[str, Any], where: str, depth: int) -> str:
        """A rule for a value that matches a schema of types, enums, properties and items."""
        if not isinstance(schema, Mapping):
            raise ValueError(f"{where} must be an object")
        schema = resolve(schema, root)
        unknown = next((key for key in schema if key not in _KNOWN), None)
        if unknown is not None or depth > _MAX_LEVELS:
            what = f"more than {_MAX_LEVELS} levels" if unknown is None else repr(unknown)
            raise ValueError(f"{where}: {what} cannot be enforced in this form")
        fixed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if fixed is not None:
            if not all(value is None or isinstance(value, (str, int, float)) for value in fixed):
                raise ValueError(f"{where}: an enum of objects or arrays cannot be enforced in this form")
            return lark.rule(name, " | ".join(self._fixed(lark, value) for value in fixed))
        branches = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(branches, list):
            self._check_branches(schema, root, where)
            parts = [
                self._write_value(lark, f"{name}_{number}", branch, root, f"{where}.anyOf[{number}]", depth + 1)
                for number, branch in enumerate(branches)
            ]
            return lark.rule(name, " | ".join(parts))
        types = types_of(schema, root) or _TYPES
        written = [self._write_type(lark, f"{name}_{kind}", kind, schema, root, where, depth) for kind in sorted(types)]
        return lark.rule(name, " | ".join(written))

    def _check_branches(self, schema: Mapping[str, Any], root: Mapping[str, Any], where: str) -> None:
        """Refuses alternatives of which a value may match several or has to match more than one of them."""
        limits = [key for key in schema if key not in ("anyOf", "oneOf", *_ANNOTATIONS)]
        types = [types_of(branch, root) for branch in schema.get("oneOf", []) if isinstance(branch, Mapping)]
        if limits or ("oneOf" in schema and len(frozenset().union(*types)) < sum(len(kinds) or 1 for kinds in types)):
            raise ValueError(f"{where}: these alternatives cannot be enforced in this form")

    def _write_type(
        self,
        lark: Lark,
        name: str,
        kind: str,
        schema: Mapping[str, Any],
        root: Mapping[str, Any],
        where: str,
        depth: int,
    ) -> str:
        if kind == "string":
            text = {key: schema[key] for key in _STRING_LIMITS if key in schema}
            return self._write_string(lark, name, {"type": "string", **text}, where) if text else self._any_string(lark)
        if kind == "array":
            items, low, high = schema.get("items"), schema.get("minItems", 0), schema.get("maxItems")
            if items is None:
                self._any_object(lark)
                item = "any_value"
            else:
                item = self._write_value(lark, f"{name}_item", items, root, f"{where}[]", depth + 1)
            if high == 0:
                return lark.rule(name, '"[]"')
            most = "" if high is None else high - 1
            more = "" if most == 0 else f'("," {item}){{{max(low - 1, 0)},{most}}}'
            return lark.rule(name, f'"[" ({item} {more}){"" if low else "?"} "]"')
        if kind == "object":
            properties, required = schema.get("properties") or {}, schema.get("required") or []
            if not isinstance(properties, Mapping) or not set(required) <= set(properties):
                raise ValueError(f"{where}: 'properties' must have all that are required")
            if not properties and schema.get("additionalProperties") is not False:
                return self._any_object(lark)
            parts = []
            ordered = sorted(properties.items(), key=lambda item: item[0].lower())
            for number, (key, held) in enumerate(ordered):
                check_key(key, where, self.string_mark, *_BESIDE_KEYS)
                value = self._write_value(lark, f"{name}_{number}", held, root, f"{where}.{key:.80}", depth + 1)
                parts.append((f"{quote(key + ':')} {value}", key in required))
            return lark.rule(name, f'"{{" {lark.sequence(f"{name}_members", parts, ",")} "}}"')
        if kind == "null":
            return lark.rule(name, '"null" | "None"')
        limits = {key: schema[key] for key in _NUMBER_LIMITS if key in schema}
        return lark.rule(name, lark.json({"type": kind, **limits}))

    def _write_string(self, lark: Lark, name: str, schema: Mapping[str, Any], where: str) -> str:
        mark, is_special = lark.tag(self.string_mark), lark.is_special(self.string_mark)
        body = write_value(lark, f"{name}_body", schema, self.string_mark, where, is_special)
        return lark.rule(name, f"{mark} {body} {mark if is_special else ''}")

    def _any_string(self, lark: Lark) -> str:
        return self._write_string(lark, "any_string", {"type": "string"}, "")

    def _any_value(self, lark: Lark) -> str:
        scalars = lark.rule("scalar", lark.json({"type": ["number", "boolean", "null"]}))
        array = lark.rule("any_array", '"[" (any_value ("," any_value)*)? "]"')
        return lark.rule("any_value", f"{self._any_string(lark)} | {scalars} | {array} | any_object")

    def _any_object(self, lark: Lark) -> str:
        member = lark.rule("any_member", "/[A-Za-z0-9_]{1,64}:/ any_value")
        lark.rule("any_object", f'"{{" ({member} ("," {member})*)? "}}"')
        self._any_value(lark)
        return "any_object"

    def _fixed(self, lark: Lark, value: Any) -> str:
        if not isinstance(value, str):
            return quote(json.dumps(value))
        if self.string_mark in value:
            raise ValueError(f"a value of an enum has the text {self.string_mark}, which ends a string in this form")
        return " ".join(filter(None, [lark.tag(self.string_mark), value and quote(value), lark.tag(self.string_mark)]))
