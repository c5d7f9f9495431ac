"""JSON schemas as grammars of llguidance, for those that have no finite-state language."""

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxinfer.grammar.schema_graph import Graph, Link, pointer_of
from jaxinfer.grammar.schema_parts import Parts
from jaxinfer.grammar.schema_strings import FORMAT_LENGTHS, FORMATS

MAX_WHITESPACE = 256
_SPACE = r"(?: |\\[nrt]|\\x(?:20|0[9aAdD]))"
_WHITESPACE_PATTERN = re.compile(rf"(?:\[{_SPACE}+\]|{_SPACE})(?:\?|\{{(\d{{1,3}})(?:,(\d{{1,3}}))?\}})?")


def schema_grammar(schema: Mapping[str, Any], whitespace_pattern: str | None = None) -> str:
    """A grammar for `llguidance.LLMatcher` of the JSON texts that match a schema, objects in the schema's order.

    A keyword that llguidance lacks is an error of the matcher that is made from the grammar, never left out. The masks
    allow every spelling of a text that is forced.

    Args:
      schema: checked by `check_schema`; `{"type": "object"}` is any JSON object.
      whitespace_pattern: None for compact JSON, without whitespace. Otherwise a regular expression for the whitespace
        between tokens: one character or one class of whitespace characters with a bounded count, such as
        `[ \\n]{1,8}`, as a model that may write whitespace without end can do so.

    Raises ValueError for another whitespace_pattern, and for `minProperties` that llguidance counts wrongly;
    ImportError without llguidance.
    """
    from llguidance import LLMatcher

    text = json.dumps(schema_for_llguidance(schema, whitespace_pattern), ensure_ascii=False)
    return LLMatcher.grammar_from_lark(f'%llguidance {{"no_forcing": true}}\nstart: %json {text}')


def schema_for_llguidance(schema: Mapping[str, Any], whitespace_pattern: str | None = None) -> dict[str, Any]:
    """The schema in words and with options of llguidance, for `%json` in a Lark grammar.

    Arguments and errors are those of `schema_grammar`. Options in the schema (`x-guidance`) are replaced.
    """
    if whitespace_pattern is not None:
        match = _WHITESPACE_PATTERN.fullmatch(whitespace_pattern)
        if match is None or any(int(count) > MAX_WHITESPACE for count in match.groups() if count):
            raise ValueError(
                f"whitespace_pattern must be one class of whitespace characters with a count of at most "
                f"{MAX_WHITESPACE}, such as '[ \\n]{{0,8}}', not {whitespace_pattern!r:.200}"
            )
    options = {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": False,
        "whitespace_pattern": whitespace_pattern,
        "coerce_one_of": False,
        "lenient": False,
    }
    return {**_for_llguidance(schema), "x-guidance": options}


def _for_llguidance(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A `oneOf` whose branches exclude one another becomes an `anyOf`, and formats become patterns.

    llguidance refuses a `oneOf` unless it sees itself that the branches exclude one another, and does not look behind
    `$ref`. Its own patterns of formats let 29 February of every year through.
    """
    graph = Graph(schema)
    parts = Parts(graph)
    replacements: dict[int, dict[str, Any]] = {}
    # A `$ref` to a branch must find it under the name it has.
    keeps_one_of = any("/oneOf" in str(node.get("$ref")) for _, node in graph.schemas())
    for link, node in graph.schemas():
        _check_unique_names(link, node)
        replaced: dict[str, Any] = {}
        more: list[Any] = []
        for keyword, held in node.items():
            if keyword == "x-guidance":
                continue
            if keyword == "oneOf" and not keeps_one_of and parts.is_one_of_disjoint(node):
                keyword = "anyOf"
            elif keyword == "format" and held in FORMATS:
                if held in FORMAT_LENGTHS:
                    more.append({"maxLength": FORMAT_LENGTHS[held]})
                keyword, held = "pattern", f"^(?:{FORMATS[held]})$"
            if keyword in replaced:
                more.append({keyword: held})
            else:
                replaced[keyword] = held
        if more:
            replaced["allOf"] = [*replaced.get("allOf", ()), *more]
        replacements[id(node)] = replaced
    return _replace(schema, replacements)


def _replace(value: Any, replacements: Mapping[int, dict[str, Any]]) -> Any:
    if isinstance(value, list):
        return [_replace(child, replacements) for child in value]
    if not isinstance(value, dict):
        return value
    return {key: _replace(child, replacements) for key, child in replacements.get(id(value), value).items()}


def _check_unique_names(link: Link, node: Mapping[str, Any]) -> None:
    """llguidance lets an undeclared name come twice, and counts it twice; one of them is certain to be there."""
    least, required = node.get("minProperties", 0), node.get("required", ())
    num_required = len(set(required)) if isinstance(required, list) else 0
    if least > num_required + 1:
        raise ValueError(
            f"{pointer_of((link, 'minProperties'))}: {least} is more than the {num_required} required properties and "
            "one; further names could repeat. Name more properties in `required`"
        )
