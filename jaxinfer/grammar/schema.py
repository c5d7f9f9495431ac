"""JSON schemas that users send: limits, and errors that name the place."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxinfer.grammar.schema_graph import Graph, pointer_of
from jaxinfer.grammar.schema_limits import check_graph
from jaxinfer.grammar.schema_strings import FORMATS, OTHER_FORMATS

# The largest of 11,305 schemas of JSONSchemaBench that llguidance accepts has 938,058 bytes, 26 levels, 28,520 values,
# an enum of 5,383, objects of 587 properties and a pattern of 5,153 characters.
MAX_SCHEMA_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_VALUES = 50_000
MAX_ENUM_VALUES = 10_000
MAX_PROPERTIES = 1_000  # llguidance's time is quadratic: 0.1 s for 1,000 optional ones, 2.3 s for 4,000
MAX_PATTERN_LENGTH = 8_192
MAX_PATTERNS_LENGTH = 65_536  # of all patterns together: 1.5 s per million characters
MAX_COUNT = 2**31 - 1
MAX_NUMBER_DIGITS = 400  # a float's largest value has 309

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_OBJECTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "enum", "prefixItems")


def check_schema(schema: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """A JSON schema that is safe to compile, as a new mapping with a dict for every object and a list for every array,
    and without formats that are annotations.

    Nothing is ever fetched. A `$ref` may name any place of the schema itself, and may be recursive.

    Raises:
      ValueError: it is not a JSON object, it is larger than a limit of this module, a `$ref` leads elsewhere or
        nowhere, or its `$ref`s form a circle that no value ends. Names the place as a JSON pointer, and the number.
    """
    if not isinstance(schema, str):
        _check_values(schema)  # before it is written as text: that would recurse
        schema = json.dumps(schema, ensure_ascii=False)
    num_bytes = len(schema.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_SCHEMA_BYTES:
        raise ValueError(f"the JSON schema has {num_bytes} bytes; at most {MAX_SCHEMA_BYTES} are accepted")
    try:
        # Always parsed anew, so that no object is in two places.
        checked = json.loads(schema, parse_constant=_refuse_constant, parse_int=_parse_int)
    except RecursionError as error:
        raise ValueError(f"the JSON schema is nested deeper than {MAX_DEPTH} levels") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(checked, dict):
        raise ValueError(f"the JSON schema must be an object, not {type(checked).__name__}")
    _check_values(checked)
    graph = Graph(checked)
    patterns_length = 0
    for link, node in graph.schemas():
        _check_keywords(link, node)
        if node.get("format") not in (*FORMATS, *OTHER_FORMATS):
            node.pop("format", None)  # an annotation
        node |= {key: int(node[key]) for key in _COUNTS if key in node}  # 2.0 is 2, which llguidance refuses
        patterns_length += sum(len(pattern) for pattern in _patterns(node))
    if patterns_length > MAX_PATTERNS_LENGTH:
        raise ValueError(
            f"the patterns of the JSON schema have {patterns_length} characters; at most {MAX_PATTERNS_LENGTH} are "
            "accepted"
        )
    check_graph(graph)
    return checked


def _check_values(root: Any) -> None:
    """Depth, number and types of the values of a JSON document. Raises ValueError."""
    stack: list[tuple[Any, Any, int]] = [(root, None, 1)]
    num_values = 0
    while stack:
        value, link, depth = stack.pop()
        num_values += 1
        if num_values > MAX_VALUES:
            raise ValueError(f"{pointer_of(link)}: the JSON schema has more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise ValueError(f"{pointer_of(link)}: the JSON schema is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, Mapping):
            for key, child in value.items():
                if not isinstance(key, str):
                    raise ValueError(f"{pointer_of(link)}: {key!r} is not a name; names must be text")
                stack.append((child, (link, key), depth + 1))
        elif isinstance(value, list | tuple):
            if len(value) > MAX_VALUES:
                raise ValueError(f"{pointer_of(link)}: {len(value)} values; at most {MAX_VALUES} are accepted")
            stack += [(child, (link, index), depth + 1) for index, child in enumerate(value)]
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise ValueError(f"{pointer_of(link)}: {value!r} is not a finite number")
        elif isinstance(value, int):
            if value.bit_length() > 4 * MAX_NUMBER_DIGITS:
                raise ValueError(f"{pointer_of(link)}: a number of more than {MAX_NUMBER_DIGITS} digits")
        elif isinstance(value, str):
            if not value.isascii() and re.search("[\ud800-\udfff]", value):
                raise ValueError(f"{pointer_of(link)}: the text has a lone surrogate, which no answer can hold")
        elif value is not None:
            raise ValueError(f"{pointer_of(link)}: {type(value).__name__} is no JSON value")


def _check_keywords(link: Any, node: Mapping[str, Any]) -> None:
    """Types and limits of the keywords of one schema. Raises ValueError."""

    def refuse(key: str, reason: str) -> None:
        raise ValueError(f"{pointer_of((link, key))}: {reason}")

    for key in _COUNTS:
        count = node.get(key, 0)
        if isinstance(count, bool) or not isinstance(count, int | float) or count != int(count) or count < 0:
            refuse(key, f"{count!r} is not a count")
        if count > MAX_COUNT:
            refuse(key, f"{count} is more than {MAX_COUNT}")
    for key in ("pattern", "format"):
        if not isinstance(node.get(key, ""), str):
            refuse(key, f"must be text, not {node[key]!r:.40}")
    required = node.get("required", [])
    if isinstance(required, list) and not all(isinstance(name, str) for name in required):
        refuse("required", "must be a list of names")
    kind = node.get("type", "null")
    if not isinstance(kind, str) and not (isinstance(kind, list) and all(isinstance(one, str) for one in kind)):
        refuse("type", f"must be a type or a list of types, not {kind!r:.40}")
    for key in _OBJECTS:
        if not isinstance(node.get(key, {}), Mapping):
            refuse(key, f"must be an object, not {node[key]!r:.40}")
    for key in _LISTS:
        if not isinstance(node.get(key, []), list):
            refuse(key, f"must be a list, not {node[key]!r:.40}")
    if len(node.get("enum", ())) > MAX_ENUM_VALUES:
        refuse("enum", f"{len(node['enum'])} values; at most {MAX_ENUM_VALUES} are accepted")
    num_properties = len(node.get("properties", ())) + len(node.get("patternProperties", ()))
    if num_properties > MAX_PROPERTIES:
        refuse("properties", f"{num_properties} properties; at most {MAX_PROPERTIES} are accepted")
    for pattern in _patterns(node):
        if len(pattern) > MAX_PATTERN_LENGTH:
            key = "pattern" if pattern is node.get("pattern") else "patternProperties"
            refuse(key, f"a pattern of {len(pattern)} characters; at most {MAX_PATTERN_LENGTH} are accepted")


def _patterns(node: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(pattern := node.get("pattern"), str):
        yield pattern
    yield from node.get("patternProperties", ())


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the JSON schema has {name}, which is no JSON number")


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_NUMBER_DIGITS:
        raise ValueError(
            f"the JSON schema has a number of {len(digits)} digits; at most {MAX_NUMBER_DIGITS} are accepted"
        )
    return int(digits)
