"""Forms that write each argument between tags, as plain text, whose type the tool's schema tells."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.tool_calls.cursor import Cursor, Reader
from jaxinfer.tool_calls.form import CallSink, ToolForm
from jaxinfer.tool_calls.json_text import json_string, read_json, read_scalar
from jaxinfer.tool_calls.lark import Lark, escape, quote
from jaxinfer.tool_calls.tools import Tool
from jaxinfer.tool_calls.values import (
    MAX_KEY_CHARS,
    check_key,
    json_of_text,
    json_value,
    property_schema,
    resolve,
    types_of,
    write_arguments,
)

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_ANCHORED = re.compile(r"\^?(?P<body>(?:[^^$\\]|\\.)*)\$?")
_DSML_END = "</｜DSML｜parameter>"
_SCALARS = {"string", "integer", "number", "boolean", "null"}


@dataclass(frozen=True)
class QwenCoderForm(ToolForm):
    """`<function=name>`, then `<parameter=key>`, the value and `</parameter>` for each argument, then `</function>`.
    Some models leave out the tags around a call, `begin` and `end`.

    Attributes:
      line_break: before and behind each value.
    """

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    line_break: str = "\n"

    def read(self, cursor: Cursor, calls: CallSink, opening: str) -> Reader[None]:
        if opening == self.begin:
            yield from cursor.spaces()
            if not (yield from cursor.literal("<function=")):
                return
        name = yield from cursor.match(_NAME)
        tool = calls.tools.get(name)
        if tool is None or not (yield from cursor.literal(">")):
            return
        values: list[tuple[str, str]] = []
        while True:
            yield from cursor.spaces()
            tag = yield from cursor.literal("<parameter=", "</function>")
            if tag != "<parameter=":
                break
            key = yield from cursor.until(">", limit=MAX_KEY_CHARS)
            value = None
            if key is not None and (yield from cursor.literal(">")):
                value = yield from _read_value(cursor, tool, key, "</parameter>")
            if key is None or value is None or not (yield from cursor.literal("</parameter>")):
                return
            values.append((key, value.removeprefix(self.line_break).removesuffix(self.line_break)))
        if not tag:
            return
        calls.add(name, arguments_text(tool, values))
        yield from cursor.spaces()
        if (yield from cursor.literal(self.end)):
            cursor.forget_taken()

    def _write_call(self, lark: Lark, index: int, tool: Tool) -> str:
        def write(number: int, key: str, schema: Mapping[str, Any]) -> str:
            check_key(key, tool.name, ">")
            end = f"{self.line_break}</parameter>"
            value = write_value(lark, f"value_{index}_{number}", schema, end, f"{tool.name}.{key}")
            return f"{quote(f'<parameter={key}>{self.line_break}')} {value} {quote(chr(10))}"

        arguments = write_arguments(lark, index, tool, write)
        return (
            f"{quote(f'<function={tool.name}>' + chr(10))} {arguments} {lark.tag('</function>' + chr(10) + self.end)}"
        )


@dataclass(frozen=True)
class GlmForm(ToolForm):
    """`<tool_call>name`, then `<arg_key>key</arg_key>` and `<arg_value>value</arg_value>` for each argument, then
    `</tool_call>`; with a line break behind each in GLM-4.5 and 4.6, without from 4.7 on."""

    line_break: str = "\n"

    def read(self, cursor: Cursor, calls: CallSink, opening: str) -> Reader[None]:
        yield from cursor.spaces()
        name = yield from cursor.match(_NAME)
        tool = calls.tools.get(name)
        if tool is None:
            return
        values: list[tuple[str, str]] = []
        while True:
            yield from cursor.spaces()
            tag = yield from cursor.literal("<arg_key>", "</tool_call>")
            if tag != "<arg_key>":
                break
            key = yield from cursor.until("</arg_key>", limit=MAX_KEY_CHARS)
            if key is None or not (yield from cursor.literal("</arg_key>")):
                return
            yield from cursor.spaces()
            if not (yield from cursor.literal("<arg_value>")):
                return
            value = yield from _read_value(cursor, tool, key.strip(), "</arg_value>")
            if value is None or not (yield from cursor.literal("</arg_value>")):
                return
            values.append((key.strip(), value))
        if tag:
            calls.add(name, arguments_text(tool, values))

    def _write_call(self, lark: Lark, index: int, tool: Tool) -> str:
        is_special = lark.is_special("</arg_value>")

        def write(number: int, key: str, schema: Mapping[str, Any]) -> str:
            check_key(key, tool.name, "</arg_key>")
            head = f"{lark.tag('<arg_key>')} {quote(key)} {lark.tag(f'</arg_key>{self.line_break}<arg_value>')}"
            value = write_value(
                lark, f"value_{index}_{number}", schema, "</arg_value>", f"{tool.name}.{key}", is_special
            )
            close = lark.tag("</arg_value>") if is_special else ""
            return " ".join(filter(None, [head, value, close, lark.tag(self.line_break)]))

        arguments = write_arguments(lark, index, tool, write)
        return f"{lark.tag(tool.name + self.line_break)} {arguments} {lark.tag('</tool_call>')}"


@dataclass(frozen=True)
class DsmlForm(ToolForm):
    """`<｜DSML｜invoke name="name">`, then for each argument `<｜DSML｜parameter name="key" string="true">`, its value
    and a closing tag: a string as it is, with `string="false"` JSON. `first` and `last` stand around the calls."""

    def read(self, cursor: Cursor, calls: CallSink, opening: str) -> Reader[None]:
        while True:
            yield from cursor.spaces()
            if not (yield from cursor.literal('<｜DSML｜invoke name="')):
                break
            name = yield from cursor.match(_NAME)
            tool = calls.tools.get(name)
            arguments = None
            if tool is not None and (yield from cursor.literal('">')):
                arguments = yield from self._read_arguments(cursor, tool)
            if arguments is None:
                return
            calls.add(name, arguments)
        if (yield from cursor.literal(f"</{opening[1:]}")):
            cursor.forget_taken()

    def _read_arguments(self, cursor: Cursor, tool: Tool) -> Reader[str | None]:
        values: dict[str, str] = {}
        while True:
            yield from cursor.spaces()
            tag = yield from cursor.literal('<｜DSML｜parameter name="', "</｜DSML｜invoke>")
            if tag.startswith("</"):
                return "{" + ", ".join(f"{json_string(key)}: {value}" for key, value in values.items()) + "}"
            key = (yield from cursor.until('"', limit=MAX_KEY_CHARS)) if tag else None
            head = (yield from cursor.literal('" string="true">', '" string="false">')) if key is not None else ""
            if key is None or not head:
                return None
            mark = cursor.mark()
            yield from cursor.spaces()
            if "false" in head and (yield from cursor.peek()) in ("{", "[", '"'):
                yield from read_json(cursor) if cursor.text[cursor.at] != '"' else read_scalar(cursor)
            rest = yield from cursor.until(_DSML_END)
            if rest is None or not (yield from cursor.literal(_DSML_END)):
                return None
            text = cursor.since(mark).removesuffix(_DSML_END)
            value = None if "true" in head else json_value(text.strip())
            schema = {"type": "string"} if "true" in head else property_schema(tool, key)
            values[key] = value or json_of_text(text, schema, tool.parameters)

    def _write_call(self, lark: Lark, index: int, tool: Tool) -> str:
        def write(number: int, key: str, schema: Mapping[str, Any]) -> str:
            check_key(key, tool.name, '"')
            types, name = types_of(schema, schema), f"value_{index}_{number}"
            head = f'<｜DSML｜parameter name="{key}" string='
            ways = []
            if types == {"string"} or (not _is_limited(schema) and (not types or "string" in types)):
                text = schema if types == {"string"} else {"type": "string"}
                value = write_value(lark, name, text, _DSML_END, f"{tool.name}.{key}")
                ways.append(f"{quote(head + chr(34) + 'true' + chr(34) + '>')} {value}")
            if types != {"string"}:
                value = lark.json(schema)
                ways.append(f"{quote(head + chr(34) + 'false' + chr(34) + '>')} {value} {quote(_DSML_END)}")
            return f"({' | '.join(ways)}) {quote(chr(10))}"

        arguments = write_arguments(lark, index, tool, write)
        head = quote(f'<｜DSML｜invoke name="{tool.name}">\n')
        return f"{head} {arguments} {quote('</｜DSML｜invoke>')}"


def _read_value(cursor: Cursor, tool: Tool, key: str, end: str) -> Reader[str | None]:
    """Takes a value up to its end, which may also stand in a string of what is JSON by the tool's schema."""
    mark = cursor.mark()
    types = types_of(property_schema(tool, key), tool.parameters)
    if types and "string" not in types:
        yield from cursor.spaces()
        if (yield from cursor.peek()) in ("{", "["):
            yield from read_json(cursor)
    rest = yield from cursor.until(end)
    return None if rest is None else cursor.since(mark)


def arguments_text(tool: Tool, values: Sequence[tuple[str, str]]) -> str:
    """The JSON text of arguments that were written as plain text; of two with one name the later one counts."""
    texts = {key: json_of_text(value, property_schema(tool, key), tool.parameters) for key, value in values}
    return "{" + ", ".join(f"{json_string(key)}: {value}" for key, value in texts.items()) + "}"


def write_value(
    lark: Lark, name: str, schema: Mapping[str, Any], end: str, where: str, is_end_special: bool = False
) -> str:
    """A rule for a value as plain text, and for its end where that is no special token.

    Raises ValueError: the schema cannot be enforced for plain text; `where` names the value.
    """
    root, schema = schema, resolve(schema, schema)
    types = types_of(schema, root)
    close = "" if is_end_special else f" {quote(end)}"
    fixed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if types and "string" not in types:
        # Templates write Python's names, which the parser takes.
        names = ['"True" | "False"'] * ("boolean" in types) + ['"None"'] * ("null" in types)
        written = [lark.json({**root, **schema}), *([] if fixed is not None else names)]
        return lark.rule(name, f"({' | '.join(written)}){close}")
    if fixed is not None:
        if not all(isinstance(value, str) and end not in value for value in fixed):
            raise ValueError(f"{where}: an enum of strings and other values cannot be enforced in this form")
        return lark.rule(name, f"({' | '.join(map(quote, fixed))}){close}")
    if types != {"string"} and (not types <= _SCALARS or _is_limited(schema)):
        raise ValueError(f"{where}: a string or another value with limits cannot be enforced in this form")
    base = [_length_pattern(schema), *([_search_pattern(schema["pattern"], where)] if "pattern" in schema else [])]
    terminal = lark.rule(name.upper(), " & ".join([*base, f"~/(?s:.*){escape(end.strip())}(?s:.*)/"]))
    return terminal if is_end_special else lark.rule(f"{name}[suffix={quote(end)}]", terminal)


def _is_limited(schema: Any) -> bool:
    """True if a schema of several types says more than the types."""
    if isinstance(schema, Mapping):
        return any(
            _is_limited(value)
            for key, value in schema.items()
            if key not in ("type", "title", "description", "default", "examples", "$defs", "definitions")
        )
    return any(map(_is_limited, schema)) if isinstance(schema, list) else True


def _length_pattern(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"/(?s:.{{{low},{high}}})/" if low or high != "" else "/(?s:.*)/"


def _search_pattern(pattern: Any, where: str) -> str:
    """A JSON schema's pattern, which may match anywhere, as one that matches the whole text."""
    match = _ANCHORED.fullmatch(pattern) if isinstance(pattern, str) else None
    if match is None or "|" in pattern or "\n" in pattern:
        raise ValueError(f"{where}: the pattern {pattern!r:.80} cannot be enforced in this form")
    head = "" if pattern.startswith("^") else "(?s:.*)"
    tail = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    body = re.sub(r"(?<!\\)/", r"\\/", match["body"])
    return f"/{head}({body}){tail}/"
