"""Limits of JSON schemas that take a look at what `$ref` and `allOf` bring together.

llguidance ends the process with a full stack, or takes minutes, without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxinfer.grammar.schema_graph import Graph, pointer_of

# Schemas within one another, through `$ref`s: at 2,000, llguidance overflows a stack of 8 MiB. Of 9,509 schemas of
# JSONSchemaBench that it accepts, the deepest has 302 and the second deepest 86.
MAX_NESTED_SCHEMAS = 500
# Ways to choose one branch of every anyOf and oneOf of one place; under allOf they multiply. 2,048 of two properties
# each take llguidance 1.7 s.
MAX_ALTERNATIVES = 1_024
# Patterns and formats for one text: llguidance takes 3 s for 20, and did not finish 24 within 30 s.
MAX_PATTERNS = 8
MAX_MERGED_PLACES = 5_000


def check_graph(graph: Graph) -> None:
    """Raises ValueError for a graph of schemas that is over a limit, or whose `$ref`s form a circle without an end."""
    check_circles(graph)
    check_depth(graph, MAX_NESTED_SCHEMAS)
    check_merged(graph)


def check_circles(graph: Graph) -> None:
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


def check_depth(graph: Graph, most: int) -> None:
    """Raises ValueError where more than `most` schemas may be within one another, through `$ref`s too.

    Schemas that contain one another (recursion) count as all within one another.
    """
    depths: dict[int, int] = {}
    for group in graph.groups():
        inner = (depths[id(child)] for node in group for child in graph.inner(node) if id(child) in depths)
        depth = len(group) + max(inner, default=0)
        if depth > most:
            raise ValueError(
                f"{pointer_of(graph.links[id(group[0])])}: {depth} schemas within one another by `$ref`s; at most "
                f"{most} are accepted"
            )
        depths.update((id(node), depth) for node in group)


def check_merged(graph: Graph) -> None:
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
    found = {id(schema): schema for schema in schemas}
    stack = list(schemas)
    while stack:
        for keyword, child in graph.same_value[id(stack.pop())]:
            if keyword in ("allOf", "$ref") and isinstance(child, dict) and id(child) not in found:
                found[id(child)] = child
                stack.append(child)
    return list(found.values())


def _merged_parts(members: Sequence[Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], ...]]:
    """Schemas that come together for a property or item of a value that matches all members, where they are several."""
    names = {name for member in members for name in member.get("properties", ())}
    for name in (*sorted(names), None):
        held = (member.get("properties", {}).get(name, member.get("additionalProperties")) for member in members)
        if len(schemas := tuple(schema for schema in held if isinstance(schema, dict))) > 1:
            yield schemas
    for keyword in ("items",):
        held = (member.get(keyword) for member in members)
        if len(schemas := tuple(schema for schema in held if isinstance(schema, dict))) > 1:
            yield schemas
