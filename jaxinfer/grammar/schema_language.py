"""JSON schemas as regular languages, where they are: closed objects, no recursion.

The texts are compact JSON: separators "," and ":", no other whitespace, properties in the order of the schema. Free
strings and unbounded numbers may be spelled in every way that JSON has. Names, `enum`, `const` and strings with a
pattern or format are spelled as `json.dumps(value, ensure_ascii=False)` does; integers and bounded numbers as
`schema_numbers` says. So every value that matches the schema has a text, and every text is a value that matches.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.grammar import schema_numbers, schema_strings
from jaxinfer.grammar.nodes import EMPTY, Alternation, Node, Repeat, Text, alternate, children, concat, repeat
from jaxinfer.grammar.schema_graph import Graph
from jaxinfer.grammar.schema_parts import NotServedError, Parts, Plain, type_of

MAX_LANGUAGE_SIZE = 100_000  # leaves of the tree, with its repetitions written out
MAX_NESTING = 32  # values within one another; each takes some levels of Python's stack

_COMMA = Text(",")


def language_of(schema: Mapping[str, Any]) -> Node | None:
    """The language of the compact JSON texts that match a schema.

    Args:
      schema: checked by `check_schema`.

    Returns None where the language is not regular, too large, or needs what is not served here: objects or values of
    any kind, recursion, `not`, `if`, `patternProperties`, `uniqueItems`, `multipleOf`, an unknown format, a `oneOf`
    whose branches are not told apart by type, range, or a required property.

    Raises ValueError if nothing matches the schema.
    """
    try:
        language = _Builder(schema).value([schema], 0)
    except NotServedError:
        return None
    if language is None:
        raise ValueError("#: no value matches the JSON schema")
    return language if _size(language) <= MAX_LANGUAGE_SIZE else None


@dataclass(frozen=True)
class _Member:
    """A property, or all further ones: `"name":value`."""

    pair: Node
    is_required: bool = False
    is_repeated: bool = False


class _Builder:
    def __init__(self, schema: Mapping[str, Any]):
        self._parts = Parts(Graph(schema))
        self._nodes: dict[tuple[int, ...], Node | None] = {}
        self._active: set[tuple[int, ...]] = set()

    def value(self, schemas: Sequence[Any], depth: int) -> Node | None:
        """Texts of the values that match all schemas; None where there is none."""
        key = tuple(map(id, schemas))
        if key in self._active or depth > MAX_NESTING:
            raise NotServedError("recursion")
        if key not in self._nodes:
            self._active.add(key)
            merged = schemas[0] if len(schemas) == 1 else {"allOf": list(schemas)}
            options: list[Node | None] = []
            for plain in self._parts.alternatives(merged):
                options += self._texts(plain, depth)
            self._nodes[key] = alternate(options)
            self._active.discard(key)
        return self._nodes[key]

    def _texts(self, plain: Plain, depth: int) -> Iterator[Node | None]:
        if plain.values is not None:
            fitting = [value for value in plain.values if _fits(value, plain)]
            # 1.0 is the integer 1 too
            fitting += [int(value) for value in fitting if isinstance(value, float) and value == int(value)]
            yield alternate([schema_strings.text_of(value) for value in fitting])
            return
        if plain.unsupported & plain.types:
            raise NotServedError("an unsupported keyword")
        for kind in sorted(plain.types):
            if kind == "null":
                yield Text("null")
            elif kind == "boolean":
                yield Alternation((Text("true"), Text("false")))
            elif kind == "string":
                yield _string(plain)
            elif kind == "array":
                yield self._array(plain, depth)
            elif kind == "object":
                yield self._object(plain, depth)
            elif kind == "number" or "number" not in plain.types:
                yield _number(plain, kind)

    def _array(self, plain: Plain, depth: int) -> Node | None:
        least, most = plain.items_count
        prefix = [self._part(schemas, depth) for schemas in plain.prefix[:most]]
        item = self._part(plain.items, depth) if most is None or most > len(prefix) else None
        if None in prefix:  # the array ends before an item that nothing matches
            most, item = prefix.index(None), None
        elif item is None:
            most = len(prefix) if most is None else min(most, len(prefix))
        if most is not None and least > most:
            return None
        # From the end: what follows the first `index` items.
        num_more = None if most is None else max(0, most - len(prefix))
        if not prefix:
            if num_more == 0:
                return Text("[]")
            items = concat([item, repeat(concat([_COMMA, item]), max(0, least - 1), num_more and num_more - 1)])
            return concat([Text("["), items if least else repeat(items, 0, 1), Text("]")])
        rest = repeat(concat([_COMMA, item]), max(0, least - len(prefix)), num_more)
        for index in range(min(len(prefix), len(prefix) if most is None else most) - 1, -1, -1):
            rest = concat([_COMMA if index else EMPTY, prefix[index], rest])
            rest = rest if index < least else repeat(rest, 0, 1)
        return concat([Text("["), rest, Text("]")])

    def _part(self, schemas: Sequence[Any], depth: int) -> Node | None:
        return self.value(schemas or [True], depth + 1)

    def _object(self, plain: Plain, depth: int) -> Node | None:
        names = dict.fromkeys((*plain.properties, *plain.required))
        is_open = False not in plain.additional
        further = self._part(plain.additional, depth) if is_open else None
        members: list[_Member] = []
        for name in names:
            is_required = name in plain.required
            value = self._part(plain.properties[name], depth) if name in plain.properties else further
            if value is not None:
                pair = concat([schema_strings.text_of(name), Text(":"), value])
                assert pair is not None
                members.append(_Member(pair, is_required))
            elif is_required:
                return None
        if further is not None:
            name = schema_strings.names_other_than(names) if names else schema_strings.free_string(0, None)
            pair = concat([name, Text(":"), further])
            if pair is not None:
                members.append(_Member(pair, is_repeated=True))
        least, most = plain.properties_count
        num_required = len(plain.required)
        if (most is not None and most < num_required) or (further is None and least > len(members)):
            return None
        if most is not None and (further is not None or most < len(members)):
            raise NotServedError("maxProperties")
        if least > max(1, num_required):  # further names may repeat, and are then counted once
            raise NotServedError("minProperties")
        return concat([Text("{"), _members(members, least > 0), Text("}")])


def _members(members: list[_Member], is_nonempty: bool) -> Node | None:
    """Any of the optional members and all required ones, in order, with commas between them."""
    first = next((index for index, member in enumerate(members) if member.is_required), None)
    if first is None:
        some = _some(members)
        return some if is_nonempty else alternate([EMPTY, some])
    before = [repeat(concat([member.pair, _COMMA]), 0, 1) for member in members[:first]]
    return concat([*before, members[first].pair, *_after(members[first + 1 :])])


def _after(members: list[_Member]) -> Iterator[Node | None]:
    for member in members:
        pair = concat([_COMMA, member.pair])
        yield pair if member.is_required else repeat(pair, 0, None if member.is_repeated else 1)


def _some(members: list[_Member]) -> Node | None:
    """At least one of optional members. In halves: the tree has n log n pairs, not n squared."""
    if not members:
        return None
    if len(members) == 1:
        (member,) = members
        return concat([member.pair, *_after(members)]) if member.is_repeated else member.pair
    half = len(members) // 2
    return alternate([concat([_some(members[:half]), *_after(members[half:])]), _some(members[half:])])


def _string(plain: Plain) -> Node | None:
    least, most = plain.length
    if not plain.patterns and not plain.formats:
        return schema_strings.free_string(least, most)
    if len(plain.patterns) + len(plain.formats) > 1:
        raise NotServedError("several patterns")
    try:
        if plain.patterns:
            return schema_strings.pattern_string(*plain.patterns, is_search=True, least=least, most=most)
        (name,) = plain.formats
        if name not in schema_strings.FORMATS:
            raise NotServedError("an unknown format")
        if name in schema_strings.FORMAT_LENGTHS:
            longest = schema_strings.FORMAT_LENGTHS[name]
            most = longest if most is None else min(most, longest)
        return schema_strings.pattern_string(schema_strings.FORMATS[name], is_search=False, least=least, most=most)
    except ValueError as error:
        raise NotServedError(str(error)) from error


def _number(plain: Plain, kind: str) -> Node | None:
    try:
        low = schema_numbers.bound_of(plain.minimum, plain.exclusive_minimum, is_upper=False)
        high = schema_numbers.bound_of(plain.maximum, plain.exclusive_maximum, is_upper=True)
    except ValueError as error:
        raise NotServedError(str(error)) from error
    return (schema_numbers.integer if kind == "integer" else schema_numbers.decimal)(low, high)


def _fits(value: Any, plain: Plain) -> bool:
    """True if a value of an `enum` matches the other keywords."""
    kind = type_of(value)
    if kind not in plain.types:
        return False
    if kind in plain.unsupported:
        raise NotServedError("an unsupported keyword")
    if kind in ("integer", "number"):
        return (
            (plain.minimum is None or value >= plain.minimum)
            and (plain.maximum is None or value <= plain.maximum)
            and (plain.exclusive_minimum is None or value > plain.exclusive_minimum)
            and (plain.exclusive_maximum is None or value < plain.exclusive_maximum)
        )
    if kind == "string":
        if plain.patterns or plain.formats:
            raise NotServedError("a pattern beside an enum")
        return plain.length[0] <= len(value) and (plain.length[1] is None or len(value) <= plain.length[1])
    if kind in ("array", "object") and _limits_containers(plain):
        raise NotServedError("keywords for arrays or objects beside an enum")
    return True


def _limits_containers(plain: Plain) -> bool:
    """True if there are keywords for arrays or objects."""
    default = Plain()
    names = ("properties", "additional", "required", "properties_count", "prefix", "items", "items_count")
    return any(getattr(plain, name) != getattr(default, name) for name in names)


def _size(node: Node) -> int:
    """Leaves of a tree with its repetitions written out. Shared nodes are measured once, without recursion."""
    sizes: dict[int, int] = {}
    stack = [node]
    while stack:
        top = stack[-1]
        inner = children(top)
        missing = [child for child in inner if id(child) not in sizes]
        if missing:
            stack += missing
            continue
        stack.pop()
        size = sum(sizes[id(child)] for child in inner)
        if isinstance(top, Repeat):
            size *= max(top.least, 1 if top.most is None else top.most, 1)
        sizes[id(top)] = size if inner else max(1, len(top.text) if isinstance(top, Text) else 1)
    return sizes[id(node)]
