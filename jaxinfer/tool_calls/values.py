"""Values of arguments that are written as plain text: which type they have, by the tool's schema."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.tool_calls.cursor import Cursor, finish
from jaxinfer.tool_calls.json_text import json_string, read_json, read_scalar
from jaxinfer.tool_calls.lark import GrammarSizeError, Lark
from jaxinfer.tool_calls.python_text import json_of_literal
from jaxinfer.tool_calls.tools import Tool

_MAX_REFERENCES = 16
MAX_KEY_CHARS = 1_000
_WHOLE_NUMBER = re.compile(r"-?[0-9]+(\.0+)?")
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}

# What is said of all arguments together cannot be kept by a grammar that has a rule for each of them.
_WHOLE_OBJECT = (
    *("allOf", "anyOf", "oneOf", "not", "if", "minProperties", "dependentRequired", "dependentSchemas", "$ref"),
)
_DEFINITIONS = ("$defs", "definitions")


def property_schema(tool: Tool, name: str) -> Mapping[str, Any]:
    """The schema of an argument; {} where the tool has none."""
    properties = tool.parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return resolve(schema, tool.parameters) if isinstance(schema, Mapping) else {}


def resolve(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follows `$ref` within the schema; {} where it leads nowhere."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        target: Any = root
        for key in reference.split("/")[1:] if reference.startswith("#/") else ("",):
            target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            return {}
        schema = target
    return {}


def types_of(schema: Mapping[str, Any], root: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that a schema allows; empty where it does not say. Each of its parts is looked at once."""
    types: set[str] = set()
    seen: set[int] = set()
    left = [schema]
    while left:
        part = resolve(left.pop(), root)
        if id(part) in seen:
            continue
        seen.add(id(part))
        given = part.get("type")
        given = [given] if isinstance(given, str) else given
        values = part.get("enum", [part["const"]] if "const" in part else None)
        branches = next((part[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(part.get(key), list)), None)
        if isinstance(given, list):
            types.update(kind for kind in given if isinstance(kind, str))
        elif isinstance(values, list):
            types.update(_type_of(json.dumps(value)) for value in values)
        elif branches:
            left += [branch if isinstance(branch, Mapping) else {} for branch in branches]
        else:
            return frozenset()
    return frozenset(types)


def json_of_text(text: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """The JSON text of a value that was written as plain text.

    What the schema says is a string stays as it is. Other values are JSON already, or the names of Python's constants;
    lists and dicts may be Python's. What is neither becomes a string.
    """
    types, fixed = types_of(schema, root), schema.get("enum", [schema.get("const")])
    if types != {"string"} and not (isinstance(fixed, list) and text in fixed):
        value = text.strip()
        value = _PYTHON_NAMES.get(value, value) if types & {"boolean", "null"} else value
        json_text = json_value(value)
        if json_text is None and value[:1] in ("{", "[") and types & {"object", "array"}:
            json_text = json_of_literal(value)
        if json_text is not None:
            kind = _type_of(json_text)
            kinds = {kind, "number"} if kind == "integer" else {kind}
            if kinds & types or (not types and kind != "string"):
                return json_text
    return json_string(text)


def json_value(text: str) -> str | None:
    """A text that is one JSON value and nothing else, as JSON text. Python's own parser would recurse as deep as the
    text says."""
    cursor = Cursor()
    cursor.add(text, is_end=True)
    if text[:1] not in ("{", "["):
        scalar = finish(read_scalar(cursor))
        return scalar if cursor.at == len(text) else None
    value = finish(read_json(cursor))
    return value.text if value is not None and cursor.at == len(text) else None


def _type_of(value: str) -> str:
    """The type of a JSON text."""
    if value[:1] in '{["tfn':
        return {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}[value[:1]]
    return "integer" if _WHOLE_NUMBER.fullmatch(value) else "number"


def write_arguments(
    lark: Lark, index: int, tool: Tool, write: Callable[[int, str, Mapping[str, Any]], str], separator: str = ""
) -> str:
    """Rules for the arguments of a tool, the call of which has this index, in forms that write each by itself; returns
    the first rule.

    Args:
      write: takes an argument's number, name and schema. Where it raises ValueError and the tool is not strict, it is
        called again with a schema that allows all values.

    Raises ValueError: the tool is strict, and its schema says what cannot be enforced for each argument by itself.
    """
    where = f"the parameters of tool {tool.name!r}"
    properties = tool.parameters.get("properties") or {}
    required = tool.parameters.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise ValueError(f"{where}: 'properties' must be an object and 'required' a list")
    if tool.is_strict:
        keyword = next((key for key in _WHOLE_OBJECT if key in tool.parameters), None)
        if keyword is not None:
            raise ValueError(f"{where}: {keyword!r} cannot be enforced in this form")
        missing = [name for name in required if name not in properties]
        if missing:
            raise ValueError(f"{where}: the required {missing[0]!r:.80} is not among the properties")
    definitions = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
    written = []
    for number, (name, schema) in enumerate(properties.items()):
        try:
            schema = {} if schema is True else schema
            if not isinstance(schema, Mapping):
                raise ValueError(f"{where}: properties.{name:.80} must be an object")
            _check_references(schema, f"{where}: properties.{name:.80}")
            text = write(number, name, {**schema, **definitions})
        except GrammarSizeError:
            raise
        except ValueError:
            if tool.is_strict:
                raise
            text = write(number, name, {})
        written.append((text, name in required))
    return lark.sequence(f"arguments_{index}", written, separator)


def check_key(key: str, where: str, *forbidden: str) -> None:
    """Refuses a name that a form's reader would not find as it is: it has one of the `forbidden` texts, which stand
    around names in this form, or white space at an end."""
    if not key or key != key.strip() or len(key) > MAX_KEY_CHARS or any(mark in key for mark in forbidden):
        raise ValueError(f"{where}: the name {key!r:.80} cannot be written in this form")


def _check_references(value: Any, path: str) -> None:
    """Refuses references that a property's schema alone cannot follow. Schemas have a bounded depth (`check_tools`)."""
    if isinstance(value, Mapping):
        reference = value.get("$ref")
        if isinstance(reference, str) and not reference.startswith(tuple(f"#/{key}/" for key in _DEFINITIONS)):
            raise ValueError(f"{path}: $ref {reference!r:.80} does not lead to '$defs' or 'definitions'")
        for item in value.values():
            _check_references(item, path)
    elif isinstance(value, list):
        for item in value:
            _check_references(item, path)
