"""Reads brackets with Python literals out of a text that arrives in pieces, and writes them as JSON."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from jaxinfer.tool_calls.cursor import Cursor, Reader, finish
from jaxinfer.tool_calls.json_text import MAX_DEPTH

_CODE = re.compile(r"""[^()\[\]{}"'#]*""")
_VALUE = r"(?:[A-Za-z_]\w*+\s*+=\s*+)?(?:[A-Za-z_]\w*+|-?[0-9][0-9_.]*+(?:[eE][-+]?[0-9]++)?)?"
_ITEMS = re.compile(rf"\s*+{_VALUE}\s*+(?:[,:]\s*+{_VALUE}\s*+)*+")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_IN_STRING = {quote: re.compile(rf"[^{quote}\\\n]*") for quote in "\"'"}
_ESCAPED = set("\\'\"abfnrtvx0123NuU\n")
_JSON_NAMES = {"true": True, "false": False, "null": None}


def read_brackets(cursor: Cursor) -> Reader[str | None]:
    """Takes a bracket, literals and names with commas, colons and `=` between them, and the bracket that closes it.

    Operators, calls and subscripts end it with None: long chains of them would overflow the stack of Python's parser.
    """
    parts: list[str] = []
    stack: list[str] = []
    last = ","  # the last character that is no white space
    while True:
        char = yield from cursor.peek()
        if char and char in "\"'":
            text = (yield from _read_python_string(cursor, char)) if last in "([{,:=\"'" else None
            if text is None:
                return None
            parts.append(text)
        elif char in _CLOSING:
            if len(stack) >= MAX_DEPTH or last not in "([{,:=":
                return None
            stack.append(_CLOSING[char])
            parts.append(cursor.take(cursor.at + 1))
        elif not char or char != stack.pop():
            return None
        else:
            parts.append(cursor.take(cursor.at + 1))
            if not stack:
                return "".join(parts)
        last = parts[-1][-1]
        code = yield from cursor.match(_CODE)
        if _ITEMS.fullmatch(code) is None:
            return None
        parts.append(code)
        last = code.strip()[-1:] or last


def _read_python_string(cursor: Cursor, quote: str) -> Reader[str | None]:
    parts = [cursor.take(cursor.at + 1)]
    while True:
        parts.append((yield from cursor.match(_IN_STRING[quote])))
        char = yield from cursor.peek()
        if char == "\\":
            while len(cursor.text) - cursor.at < 2 and not cursor.is_end:
                yield
            escape = cursor.take(cursor.at + 2)
            # Python warns of the others, which it takes as two characters.
            parts.append(escape if escape[1:] in _ESCAPED else f"\\{escape}")
            continue
        if not char:
            return None
        # Models write line breaks in strings as they are, which Python does not take.
        parts.append("\\n" if char == "\n" else char)
        cursor.take(cursor.at + 1)
        if char == quote:
            return "".join(parts)


def arguments_of(code: str) -> str | None:
    """The JSON text of keyword arguments in brackets; None where they are not literals."""
    try:
        call = ast.parse(f"f{code}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
            return None
        arguments = {str(one.arg): _literal(one.value) for one in call.keywords}
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def json_of_literal(code: str) -> str | None:
    """The JSON text of a list, a tuple or a dict; None where the code is none."""
    arguments = arguments_of(f"(x={code})") if finish(_read_whole(code)) else None
    return arguments and arguments.removeprefix('{"x": ').removesuffix("}")


def _read_whole(code: str) -> Reader[bool]:
    cursor = Cursor()
    cursor.add(code, is_end=True)
    return (yield from read_brackets(cursor)) is not None and cursor.at == len(code)


def _literal(node: ast.AST) -> Any:
    """The value of a literal. Its depth is that of the brackets."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            found = [_literal(key) if key is not None else None for key in keys]
            if not all(isinstance(key, str) for key in found):
                raise ValueError("a key is no string")
            return dict(zip(found, map(_literal, values), strict=True))
        case _:
            raise ValueError("not a literal")
