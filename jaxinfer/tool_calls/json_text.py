"""Reads a JSON value out of a text that arrives in pieces."""

import json
import re
from dataclasses import dataclass

from jaxinfer.tool_calls.cursor import Cursor, Reader

MAX_DEPTH = 100
"""Objects and arrays within one another."""
_MAX_NUMBER_CHARS = 400

_WHITE_SPACE = re.compile(r"[ \t\r\n]*")
_SURPLUS = re.compile(r"[}\s]*")
_PLAIN = re.compile(r'[^"\\]*')
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_NUMBER_CHARS = re.compile(r"[-+0-9.eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True)
class JsonText:
    """A JSON value as it stands in the text; of an object also the texts of its members.

    Control characters in strings, which models write unescaped, are escaped.
    """

    text: str
    members: dict[str, str]


def read_json(cursor: Cursor, keys: frozenset[str] | None = None) -> Reader[JsonText | None]:
    """Takes a JSON object or array; None at the first character that does not fit, or after a member of the outermost
    object whose key is not one of `keys`."""
    parts: list[str] = []
    members: dict[str, str] = {}
    key, start = "", 0  # of the outermost object's member, and its first part
    stack: list[str] = []
    state = "value"
    while True:
        parts.append((yield from cursor.match(_WHITE_SPACE)))
        char = yield from cursor.peek()
        if state in ("first", "next") and stack and char == {"{": "}", "[": "]"}[stack[-1]]:
            if state == "next" and stack == ["{"]:
                members[key] = "".join(parts[start:]).strip()
            stack.pop()
            parts.append(cursor.take(cursor.at + 1))
        elif state == "next":
            if char != ",":
                return None
            if stack == ["{"]:
                members[key] = "".join(parts[start:]).strip()
            parts.append(cursor.take(cursor.at + 1))
            state = "key" if stack[-1] == "{" else "value"
            continue
        elif state == "key" or (state == "first" and stack[-1] == "{"):
            text = (yield from _read_string(cursor)) if char == '"' else None
            if text is None or not (yield from _read_colon(cursor)):
                return None
            parts += [text, ":"]
            if len(stack) == 1:
                key, start = json.loads(text), len(parts)
                if keys is not None and key not in keys:
                    return None
            state = "value"
            continue
        elif char in ("{", "["):
            if len(stack) >= MAX_DEPTH:
                return None
            stack.append(char)
            parts.append(cursor.take(cursor.at + 1))
            state = "first"
            continue
        else:
            text = (yield from read_scalar(cursor)) if stack else None
            if text is None:
                return None
            parts.append(text)
        if not stack:
            return JsonText("".join(parts).strip(), members)
        state = "next"


def read_end(cursor: Cursor, *ends: str) -> Reader[bool]:
    """Takes and forgets one of the texts that end a call, with white space and closing brackets too many before it;
    False where none follows."""
    yield from cursor.match(_SURPLUS)
    has_end = bool((yield from cursor.literal(*ends)))
    if has_end:
        cursor.forget_taken()
    return has_end


def read_scalar(cursor: Cursor) -> Reader[str | None]:
    """Takes a JSON string, number, true, false or null; None where none follows."""
    char = yield from cursor.peek()
    if char == '"':
        return (yield from _read_string(cursor))
    if char and char in "tfn":
        return (yield from cursor.literal("true", "false", "null")) or None
    text = yield from cursor.match(_NUMBER_CHARS)
    return text if is_json_number(text) else None


def is_json_number(text: str) -> bool:
    return len(text) <= _MAX_NUMBER_CHARS and _NUMBER.fullmatch(text) is not None


def _read_colon(cursor: Cursor) -> Reader[bool]:
    yield from cursor.match(_WHITE_SPACE)
    return bool((yield from cursor.literal(":")))


def _read_string(cursor: Cursor) -> Reader[str | None]:
    parts = [cursor.take(cursor.at + 1)]
    while True:
        plain = yield from cursor.match(_PLAIN)
        parts.append(_CONTROL.sub(_escaped, plain))
        char = yield from cursor.peek()
        if char == '"':
            parts.append(cursor.take(cursor.at + 1))
            return "".join(parts)
        escape = yield from cursor.literal(*(f"\\{letter}" for letter in '"\\/bfnrtu'))
        if not escape:
            return None
        parts.append(escape)
        if escape == "\\u":
            while len(cursor.text) - cursor.at < 4 and not cursor.is_end:
                yield
            if _HEX.match(cursor.text, cursor.at) is None:
                return None
            parts.append(cursor.take(cursor.at + 4))


def json_string(text: str) -> str:
    """A text as a JSON string, in which halves of a character beyond U+FFFF, as escapes give them, are joined."""
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return escape_surrogates(json.dumps(text, ensure_ascii=False))


def escape_surrogates(text: str) -> str:
    """JSON text in which a half without its other half, which no encoding has, is an escape."""
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]
