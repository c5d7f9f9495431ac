"""Reads Python's keyword arguments and literals out of a text that arrives in pieces, as JSON."""

import ast
import re

from jaxinfer.tool_calls.cursor import CLOSING, Cursor, Reader, finish
from jaxinfer.tool_calls.json_text import MAX_DEPTH, is_json_number, json_string

_NAME = re.compile(r"\w*")
_NUMBER_CHARS = re.compile(r"[-+0-9._eE]*")
_DIGIT_GAP = re.compile(r"(?<=[0-9])_(?=[0-9])")
_BARE_POINT = re.compile(r"(?<=[0-9])\.(?![0-9])")
_IN_STRING = {quote: re.compile(rf"[^{quote}\\\n]*") for quote in "\"'"}
_ESCAPED = set("\\'\"abfnrtvx0123NuU\n")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


def read_arguments(cursor: Cursor) -> Reader[str | None]:
    """Takes keyword arguments in brackets, `(a=1, b="c")`; returns their JSON text. Any name is a keyword here, also
    those that Python keeps for itself. None at the first character that does not fit; operators and calls do not."""
    names: set[str] = set()

    def read_argument() -> Reader[str | None]:
        name = yield from cursor.match(_NAME)
        yield from cursor.spaces()
        is_new = name.isidentifier() and name not in names
        names.add(name)
        value = (yield from _read_value(cursor, 0)) if is_new and (yield from cursor.literal("=")) else None
        return None if value is None else f"{json_string(name)}: {value}"

    read = (yield from cursor.items("(", read_argument)) if (yield from cursor.literal("(")) else None
    return None if read is None else f"{{{', '.join(read[0])}}}"


def json_of_literal(code: str) -> str | None:
    """The JSON text of a list, a tuple or a dict; None where the code is none."""
    cursor = Cursor()
    cursor.add(code, is_end=True)
    value = finish(_read_value(cursor, 0))
    return value if cursor.at == len(code) else None


def _read_value(cursor: Cursor, depth: int) -> Reader[str | None]:
    """Takes a literal of Python, or one of JSON's constants; returns its JSON text. `depth`: brackets around it."""
    yield from cursor.spaces()
    char = yield from cursor.peek()
    if char and char in _IN_STRING:
        return (yield from _read_text(cursor))
    if char in CLOSING:
        return (yield from _read_bracket(cursor, depth + 1)) if depth < MAX_DEPTH else None
    if char and char in "-0123456789":
        text = _DIGIT_GAP.sub("", (yield from cursor.match(_NUMBER_CHARS)))
        text = _BARE_POINT.sub(".0", text)
        return text if is_json_number(text) else None
    return _CONSTANTS.get((yield from cursor.match(_NAME)))


def _read_bracket(cursor: Cursor, depth: int) -> Reader[str | None]:
    opening = cursor.take(cursor.at + 1)

    def read_item() -> Reader[str | None]:
        if opening != "{":
            return (yield from _read_value(cursor, depth))
        key = yield from _read_text(cursor)
        yield from cursor.spaces()
        value = (yield from _read_value(cursor, depth)) if key and (yield from cursor.literal(":")) else None
        return None if value is None else f"{key}: {value}"

    read = yield from cursor.items(opening, read_item)
    if read is None:
        return None
    items, has_comma = read
    if opening == "(" and len(items) == 1 and not has_comma:
        return items[0]
    return f"{{{', '.join(items)}}}" if opening == "{" else f"[{', '.join(items)}]"


def _read_text(cursor: Cursor) -> Reader[str | None]:
    """Takes strings that stand next to each other; returns the JSON text of all; None where there is none."""
    parts: list[str] = []
    while (quote := (yield from cursor.peek())) and quote in _IN_STRING:
        code = yield from _read_string(cursor, quote)
        try:
            parts.append(ast.literal_eval(code or ""))
        except (ValueError, SyntaxError):  # such as an escape of a character that is none
            return None
        yield from cursor.spaces()
    return json_string("".join(parts)) if parts else None


def _read_string(cursor: Cursor, quote: str) -> Reader[str | None]:
    """Takes a string, whose code Python can read."""
    parts = [cursor.take(cursor.at + 1)]
    while True:
        parts.append((yield from cursor.match(_IN_STRING[quote])))
        char = yield from cursor.peek()
        if char == "\\":
            while len(cursor.text) - cursor.at < 2 and not cursor.is_end:
                yield
            escape = cursor.take(cursor.at + 2)
            # JSON's escape of a slash, which Python takes as two characters; it warns of the others and does so too.
            parts.append("/" if escape == "\\/" else escape if escape[1:] in _ESCAPED else f"\\{escape}")
            continue
        if not char:
            return None
        # Models write line breaks in strings as they are, which Python does not take.
        parts.append("\\n" if char == "\n" else char)
        cursor.take(cursor.at + 1)
        if char == quote:
            return "".join(parts)
