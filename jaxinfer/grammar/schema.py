"""JSON schemas that users send: limits, and errors that name the place."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxinfer.grammar.schema_graph import Graph, pointer_of
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
# Without the limits below, of what `$ref` and `allOf` bring together, llguidance ends the process with a full stack, or
# takes minutes.
# Schemas within one another, through `$ref`s: at 2,000, llguidance overflows a stack of 8 MiB. Of 9,509 schemas of
# JSONSchemaBench that it accepts, the deepest has 302 and the second deepest 86.
MAX_NESTED_SCHEMAS = 500
# Ways to choose one branch of every anyOf and oneOf of one place; under allOf they multiply. 2,048 of two properties
# each take llguidance 1.7 s.
MAX_ALTERNATIVES = 1_024
# Patterns and formats for one text: llguidance takes 3 s for 20, and did not finish 24 within 30 s.
MAX_PATTERNS = 8
MAX_MERGED_PLACES = 5_000

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_OBJECTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "enum", "prefixItems")


def check_schema(schema: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """A JSON schema that is safe to compile, as a new mapping with a dict for every object and a list for every array,
    and without formats that are annotations.

    Nothing is ever fetched. A `$ref` may name any place of the schema itself, and may be recursive.

    Raises ValueError: it is not a JSON object, it is larger than a limit of this module, a `$ref` leads elsewhere or
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
    _check_graph(graph)
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
    if not isinstance(kind, str) and not (isinstance(kind, list) and all(isinstance(name, str) for name in kind)):
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


def _check_graph(graph: Graph) -> None:
    """Raises ValueError for a graph of schemas that is over a limit, or whose `$ref`s form a circle without an end."""
    _check_circles(graph)
    _check_depth(graph)
    _check_merged(graph)


def _check_circles(graph: Graph) -> None:
    """Raises ValueError for `$ref`s that lead back to themselves for the same value, or that no value ends."""
    graph.values_first()
    unended = _unended(graph)
    if unended is not None:
        raise ValueError(
            f"{pointer_of(graph.links[id(unended)])}: no finite value matches, as what it requires leads back to "
            "it by `$ref`"
        )


def _unended(graph: Graph) -> Any | None:
    """A schema that no finite value matches because of recursion, if there is one.

    The schemas that have a finite value are a least fixed point: those that need no other first, then those whose
    needs are met. `false` counts as met, as it is not recursion.
    """
    waiting: dict[int, list[Any]] = {}
    ended: set[int] = set()
    work = list(graph.order)
    while work:
        node = work.pop()
        if id(node) in ended:
            continue
        unmet = next((need for need in _needs(graph, node) if not _is_met(need, ended)), None)
        if unmet is None:
            ended.add(id(node))
            work += waiting.pop(id(node), ())
        else:
            for child in unmet:
                waiting.setdefault(id(child), []).append(node)
    return next((node for node in graph.order if id(node) not in ended), None)


def _needs(graph: Graph, node: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Lists of schemas; a finite value of `node` takes a finite value of one of each list."""
    branches: dict[str, list[Any]] = {}
    for keyword, child in graph.same_value[id(node)]:
        if keyword in ("anyOf", "oneOf"):
            branches.setdefault(keyword, []).append(child)
        elif keyword in ("allOf", "$ref"):
            yield [child]
    yield from branches.values()
    if node.get("type") == "object":
        required = node.get("required")
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        yield from (
            [child] for keyword, key, child in graph.parts[id(node)] if keyword == "properties" and key in names
        )
    elif node.get("type") == "array":
        least = node.get("minItems", 0)
        num_prefix = len(node.get("prefixItems", ()))
        for keyword, key, child in graph.parts[id(node)]:
            is_needed_prefix = keyword == "prefixItems" and isinstance(key, int) and key < least
            if is_needed_prefix or (keyword == "items" and key is None and num_prefix < least):
                yield [child]


def _is_met(need: list[Any], ended: set[int]) -> bool:
    return any(not isinstance(child, dict) or id(child) in ended for child in need)


def _check_depth(graph: Graph) -> None:
    """Raises ValueError where more than `MAX_NESTED_SCHEMAS` schemas may be within one another, through `$ref`s too.

    Schemas that contain one another (recursion) count as all within one another.
    """
    depths: dict[int, int] = {}
    for group in graph.groups():
        inner = (depths[id(child)] for node in group for child in graph.inner(node) if id(child) in depths)
        depth = len(group) + max(inner, default=0)
        if depth > MAX_NESTED_SCHEMAS:
            raise ValueError(
                f"{pointer_of(graph.links[id(group[0])])}: {depth} schemas within one another by `$ref`s; at most "
                f"{MAX_NESTED_SCHEMAS} are accepted"
            )
        depths.update((id(node), depth) for node in group)


def _check_merged(graph: Graph) -> None:
    """Raises ValueError where anyOf and oneOf multiply to too many alternatives, or too many patterns come together.

    Schemas under one `allOf` may each have a schema for the same property: these come together too, and so on.
    """
    counts = _counts(graph)
    seen: set[frozenset[int]] = set()
    stack: list[tuple[dict[str, Any], ...]] = [(node,) for node in graph.order]
    while stack:
        schemas = stack.pop()
        key = frozenset(map(id, schemas))
        if key in seen:
            continue
        seen.add(key)
        place = pointer_of(graph.links[id(schemas[0])])
        if len(seen) > len(graph.order) + MAX_MERGED_PLACES:
            raise ValueError(f"{place}: allOf merges more than {MAX_MERGED_PLACES} places of the JSON schema")
        num_alternatives = math.prod(counts[id(schema)][0] for schema in schemas)
        num_patterns = sum(counts[id(schema)][1] for schema in schemas)
        if num_alternatives > MAX_ALTERNATIVES:
            raise ValueError(
                f"{place}: {num_alternatives} alternatives of anyOf and oneOf together; at most {MAX_ALTERNATIVES} are "
                "accepted"
            )
        if num_patterns > MAX_PATTERNS:
            raise ValueError(f"{place}: {num_patterns} patterns for one text; at most {MAX_PATTERNS} are accepted")
        members = _members(graph, schemas)
        if len(members) > 1:
            stack += _merged_parts(members)


def _counts(graph: Graph) -> dict[int, tuple[int, int]]:
    """Alternatives and patterns of each schema for one value."""
    counts: dict[int, tuple[int, int]] = {}
    for node in graph.values_first():
        num_alternatives = 1
        num_patterns = ("pattern" in node) + ("format" in node)
        branches: dict[str, list[tuple[int, int]]] = {}
        for keyword, child in graph.same_value[id(node)]:
            count = counts.get(id(child), (1, 0))
            if keyword in ("anyOf", "oneOf"):
                branches.setdefault(keyword, []).append(count)
            else:
                # No further than the limits, as numbers double with every schema.
                num_alternatives = min(num_alternatives * count[0], 2**62)
                num_patterns = min(num_patterns + count[1], 2**62)
        for held in branches.values():
            num_alternatives *= sum(alternatives for alternatives, _ in held)
            num_patterns += max(patterns for _, patterns in held)
        counts[id(node)] = min(num_alternatives, 2**62), min(num_patterns, 2**62)
    return counts


def _members(graph: Graph, schemas: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The schemas that a value of all of `schemas` matches for certain, each once."""
    members = {id(schema): schema for schema in schemas}
    stack = list(schemas)
    while stack:
        for keyword, child in graph.same_value[id(stack.pop())]:
            if keyword in ("allOf", "$ref") and isinstance(child, dict) and id(child) not in members:
                members[id(child)] = child
                stack.append(child)
    return list(members.values())


def _merged_parts(members: Sequence[Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], ...]]:
    """Schemas that come together for a property or item of a value that matches all members, where they are several."""
    names = {name for member in members for name in member.get("properties", ())}
    of_names = (
        [member.get("properties", {}).get(name, member.get("additionalProperties")) for member in members]
        for name in (*sorted(names), None)
    )
    for held in (*of_names, [member.get("items") for member in members]):
        if len(schemas := tuple(schema for schema in held if isinstance(schema, dict))) > 1:
            yield schemas
