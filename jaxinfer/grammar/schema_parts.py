"""JSON schemas as alternatives of plain keywords: `$ref` followed, `allOf` merged, `anyOf` and `oneOf` multiplied."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.grammar.schema_graph import Graph

MAX_ALTERNATIVES = 256
MAX_STEPS = 10_000
MAX_DEPTH = 40  # schemas within one another for one value; each takes up to nine levels of Python's stack
TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))

_ANNOTATIONS = {"$schema", "$id", "id", "$comment", "$defs", "definitions", "$anchor", "$vocabulary", "title"}
_ANNOTATIONS |= {"description", "default", "deprecated", "readOnly", "writeOnly", "examples", "contentEncoding"}
_ANNOTATIONS |= {"contentMediaType", "contentSchema", "x-guidance", "discriminator", "nullable"}
# Keywords that exclude values of a type in ways that are not served here: only such a type is not.
_UNSUPPORTED = {
    **dict.fromkeys(("not", "if", "$dynamicRef", "$recursiveRef", "$dynamicAnchor"), TYPES),
    **dict.fromkeys(("patternProperties", "propertyNames", "unevaluatedProperties"), frozenset(("object",))),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), frozenset(("object",))),
    **dict.fromkeys(("contains", "unevaluatedItems", "additionalItems"), frozenset(("array",))),
}
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")  # there, `$ref` makes its neighbours void


class NotServedError(Exception):
    """A schema that has no finite-state language, or none that is built here."""


@dataclass(frozen=True)
class Plain:
    """A schema without applicators for the same value. A schema for a part is a list, of which all must match.

    Attributes:
      types: allowed ones; `number` comes with `integer`. values: `enum` and `const`, None without them.
      unsupported: types of which this schema excludes values that no other attribute names.
    """

    types: frozenset[str] = TYPES
    values: tuple[Any, ...] | None = None
    unsupported: frozenset[str] = frozenset()
    properties: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    additional: tuple[Any, ...] = ()
    required: tuple[str, ...] = ()
    properties_count: tuple[int, int | None] = (0, None)
    prefix: tuple[tuple[Any, ...], ...] = ()
    items: tuple[Any, ...] = ()
    items_count: tuple[int, int | None] = (0, None)
    length: tuple[int, int | None] = (0, None)
    patterns: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: float | None = None
    exclusive_maximum: float | None = None


class Parts:
    """Raises NotServedError for what it does not serve."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.num_steps = 0
        self._depth = 0
        self._properties: dict[tuple[int, ...], list[Plain]] = {}  # by the schemas of a property
        self._is_old = any(draft in str(graph.root.get("$schema")) for draft in _OLD_DRAFTS)

    def alternatives(self, schema: Any) -> list[Plain]:
        """Plain schemas; a value matches the schema if it matches one or more. [] where nothing matches."""
        self.num_steps += 1
        if self.num_steps > MAX_STEPS or self._depth > MAX_DEPTH:
            raise NotServedError("too many steps, or too deep")
        self._depth += 1
        try:
            return self._alternatives(schema)
        finally:
            self._depth -= 1

    def _alternatives(self, schema: Any) -> list[Plain]:
        if isinstance(schema, bool):
            return [Plain()] if schema else []
        if not isinstance(schema, dict):
            raise NotServedError("not a schema")
        if "$ref" in schema and self._is_old and schema.keys() - _ANNOTATIONS != {"$ref"}:
            raise NotServedError("keywords beside `$ref`, in a draft that ignores them")
        alternatives = [Plain()]
        has_own = False
        for keyword, held in schema.items():
            if keyword in ("$ref", "allOf"):
                for child in [self.graph.resolve(schema)] if keyword == "$ref" else held:
                    alternatives = _multiply(alternatives, self.alternatives(child))
            elif keyword == "anyOf":
                alternatives = _multiply(alternatives, [plain for child in held for plain in self.alternatives(child)])
            elif not has_own and keyword not in _ANNOTATIONS and keyword != "oneOf":
                has_own = True  # the order of properties is that of the keywords
                alternatives = _multiply(alternatives, [own]) if (own := _own(schema)) is not None else []
        if "oneOf" in schema:
            branches = [_multiply(alternatives, self.alternatives(child)) for child in schema["oneOf"]]
            if sum(map(len, branches)) > MAX_ALTERNATIVES:
                raise NotServedError("too many alternatives")
            for index, branch in enumerate(branches):
                for other in branches[:index]:
                    if not all(self._are_disjoint(first, two) for first in branch for two in other):
                        raise NotServedError("oneOf of branches that may match the same value")
            alternatives = [plain for branch in branches for plain in branch]
        return alternatives

    def is_one_of_disjoint(self, schema: Mapping[str, Any]) -> bool:
        """No value matches two branches of the `oneOf` of a schema, for certain."""
        try:
            self.alternatives(schema)
        except NotServedError:
            return False
        return True

    def _are_disjoint(self, one: Plain, two: Plain, depth: int = 0) -> bool:
        """No value matches both, for certain."""
        if one.values is not None and two.values is not None:
            return not {identity(value) for value in one.values} & {identity(value) for value in two.values}
        return all(self._are_disjoint_in(kind, one, two, depth) for kind in _types(one) & _types(two))

    def _are_disjoint_in(self, kind: str, one: Plain, two: Plain, depth: int) -> bool:
        if kind == "string":
            return _are_apart(one.length, two.length)
        if kind == "array":
            return _are_apart(one.items_count, two.items_count)
        if kind in ("integer", "number"):
            first, second = (
                (
                    _tighter(plain.minimum, plain.exclusive_minimum, max),
                    _tighter(plain.maximum, plain.exclusive_maximum, min),
                )
                for plain in (one, two)
            )
            return _are_apart(first, second)
        if kind != "object" or depth > 1:
            return False
        for name in dict.fromkeys((*one.required, *two.required)):
            first, second = (self._property(plain, name) for plain in (one, two))
            if (name in one.required and not second) or (name in two.required and not first):
                return True
            is_told_apart = name in one.required and name in two.required
            if is_told_apart and all(self._are_disjoint(a, b, depth + 1) for a in first for b in second):
                return True
        return False

    def _property(self, plain: Plain, name: str) -> list[Plain]:
        """Alternatives of the value of a property; [] where it may not be there."""
        schemas = plain.properties.get(name, plain.additional)
        key = tuple(map(id, schemas))
        if key not in self._properties:
            alternatives = [Plain()]
            for schema in schemas:
                alternatives = _multiply(alternatives, self.alternatives(schema))
            self._properties[key] = alternatives
        return self._properties[key]


def identity(value: Any) -> Any:
    """A key that is equal for equal JSON values: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return "object", frozenset((key, identity(child)) for key, child in value.items())
    if isinstance(value, list):
        return "array", tuple(identity(child) for child in value)
    return isinstance(value, bool), value


def type_of(value: Any) -> str:
    """The JSON type of a value; a number without a fraction is an integer."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _types(plain: Plain) -> frozenset[str]:
    return plain.types if plain.values is None else plain.types & {type_of(value) for value in plain.values}


def _tighter(inclusive: float | None, exclusive: float | None, pick: Any) -> float | None:
    bounds = [bound for bound in (inclusive, exclusive) if bound is not None]
    return pick(bounds) if bounds else None


def _are_apart(one: tuple[float | None, float | None], two: tuple[float | None, float | None]) -> bool:
    """Two ranges without a common number."""
    (low, high), (other_low, other_high) = one, two
    return (high is not None and other_low is not None and high < other_low) or (
        other_high is not None and low is not None and other_high < low
    )


def _own(schema: Mapping[str, Any]) -> Plain | None:
    """The plain keywords of a schema; None where nothing matches them."""
    types = schema.get("type", list(TYPES))
    types = {types} if isinstance(types, str) else set(types)
    if not types <= TYPES:
        raise NotServedError("an unknown type")
    if "number" in types:
        types.add("integer")
    values = None
    if "enum" in schema:
        values = schema["enum"]
    if "const" in schema:
        is_in = values is None or identity(schema["const"]) in map(identity, values)
        values = [schema["const"]] if is_in else []
    unsupported: set[str] = set()
    for keyword in schema.keys() & _UNSUPPORTED.keys():
        unsupported |= _UNSUPPORTED[keyword]
    if isinstance(schema.get("items"), list):
        unsupported.add("array")
    if schema.get("uniqueItems") and schema.get("maxItems", 2) > 1:
        unsupported.add("array")
    if schema.get("multipleOf", 1) != 1:
        unsupported |= {"integer", "number"}
    elif "multipleOf" in schema:
        types.discard("number")
    bounds = [schema.get(key) for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")]
    if any(bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float)) for bound in bounds):
        raise NotServedError("a bound that is no number")
    required = schema.get("required", [])
    if not isinstance(required, list):
        raise NotServedError("`required` is no list")

    def count(of: str) -> tuple[int, int | None]:
        most = schema.get(f"max{of}")
        return int(schema.get(f"min{of}", 0)), None if most is None else int(most)

    return Plain(
        types=frozenset(types),
        values=None if values is None else tuple(values),
        unsupported=frozenset(unsupported),
        properties={name: (held,) for name, held in schema.get("properties", {}).items()},
        additional=(schema["additionalProperties"],) if "additionalProperties" in schema else (),
        required=tuple(dict.fromkeys(required)),
        properties_count=count("Properties"),
        prefix=tuple((held,) for held in schema.get("prefixItems", ())),
        items=(schema["items"],) if isinstance(schema.get("items"), dict | bool) else (),
        items_count=count("Items"),
        length=count("Length"),
        patterns=frozenset((schema["pattern"],) if "pattern" in schema else ()),
        formats=frozenset((schema["format"],) if "format" in schema else ()),
        minimum=bounds[0],
        maximum=bounds[1],
        exclusive_minimum=bounds[2],
        exclusive_maximum=bounds[3],
    )


def _multiply(ones: list[Plain], twos: list[Plain]) -> list[Plain]:
    """Plain schemas for what matches one of both lists."""
    if len(ones) * len(twos) > MAX_ALTERNATIVES:
        raise NotServedError("too many alternatives")
    return [merged for first in ones for second in twos if (merged := _merge(first, second)) is not None]


def _merge(one: Plain, two: Plain) -> Plain | None:
    """A schema for all that matches both; None where the types or values say that nothing does."""
    if two == _NO_LIMIT:
        return one
    if one == _NO_LIMIT:
        return two
    types = one.types & two.types
    values = one.values if two.values is None else two.values
    if one.values is not None and two.values is not None:
        allowed = set(map(identity, two.values))
        values = tuple(value for value in one.values if identity(value) in allowed)
    if not types or values == ():
        return None
    names = dict.fromkeys((*one.properties, *two.properties))
    num_prefix = max(len(one.prefix), len(two.prefix))
    return Plain(
        types=types,
        values=values,
        unsupported=one.unsupported | two.unsupported,
        properties={
            name: one.properties.get(name, one.additional) + two.properties.get(name, two.additional) for name in names
        },
        additional=one.additional + two.additional,
        required=tuple(dict.fromkeys((*one.required, *two.required))),
        properties_count=_merge_counts(one.properties_count, two.properties_count),
        prefix=tuple(_item(one, index) + _item(two, index) for index in range(num_prefix)),
        items=one.items + two.items,
        items_count=_merge_counts(one.items_count, two.items_count),
        length=_merge_counts(one.length, two.length),
        patterns=one.patterns | two.patterns,
        formats=one.formats | two.formats,
        minimum=_tighter(one.minimum, two.minimum, max),
        maximum=_tighter(one.maximum, two.maximum, min),
        exclusive_minimum=_tighter(one.exclusive_minimum, two.exclusive_minimum, max),
        exclusive_maximum=_tighter(one.exclusive_maximum, two.exclusive_maximum, min),
    )


_NO_LIMIT = Plain()


def _item(plain: Plain, index: int) -> tuple[Any, ...]:
    return plain.prefix[index] if index < len(plain.prefix) else plain.items


def _merge_counts(one: tuple[int, int | None], two: tuple[int, int | None]) -> tuple[int, int | None]:
    mosts = [most for _, most in (one, two) if most is not None]
    return max(one[0], two[0]), min(mosts, default=None)
