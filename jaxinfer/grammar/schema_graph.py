"""The schemas within a JSON schema, and which of them apply to the same value or to a part of it."""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import unquote, urldefrag, urljoin

# What a keyword holds: schemas for the same value, or for a part of it (a property, an item).
_SAME_VALUE = {"allOf": list, "anyOf": list, "oneOf": list, "not": None, "if": None, "then": None, "else": None}
_SAME_VALUE |= {"dependentSchemas": dict, "dependencies": dict}
_PART = {"items": None, "additionalItems": None, "prefixItems": list, "contains": None, "unevaluatedItems": None}
_PART |= {"properties": dict, "patternProperties": dict, "additionalProperties": None, "propertyNames": None}
_PART |= {"unevaluatedProperties": None}
_ELSEWHERE = {"$defs": dict, "definitions": dict}
_HOLDS = _SAME_VALUE | _PART | _ELSEWHERE

Key = TypeVar("Key", bound=Hashable)
Link = tuple["Link | None", str | int] | None
"""Place of a value: the link of what holds it, and the name or index there; None for the root."""


def pointer_of(link: Link) -> str:
    """A JSON pointer in a fragment: `#` for the root, `#/properties/a`, ..."""
    parts = []
    while link is not None:
        link, key = link
        parts.append(str(key).replace("~", "~0").replace("/", "~1"))
    return "/".join(["#", *reversed(parts)])


class Graph:
    """Raises ValueError where a `$ref` leads out of the schema, or to nothing.

    The walks keep their own stacks, as a chain of `$ref`s may be longer than Python's.
    """

    def __init__(self, root: Mapping[str, Any]):
        self.root = root
        self._resources: dict[str, Mapping[str, Any]] = {"": root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._bases: dict[int, str] = {}
        self.links: dict[int, Link] = {}
        self.order: list[Any] = []  # schemas that the root reaches, each once
        self.same_value: dict[int, list[tuple[str, Any]]] = {}
        self.parts: dict[int, list[tuple[str, str | int | None, Any]]] = {}
        self._find_resources()
        self._find_schemas()

    def schemas(self) -> Iterator[tuple[Link, dict[str, Any]]]:
        """Every schema that the root reaches, with its place."""
        for node in self.order:
            yield self.links[id(node)], node

    def resolve(self, node: Mapping[str, Any]) -> Any:
        """The value that the `$ref` of a schema names."""
        reference = node["$ref"]
        link = self.links.get(id(node))
        if not isinstance(reference, str):
            raise ValueError(f"{pointer_of(link)}/$ref: must be text, not {reference!r:.40}")
        base = self._bases.get(id(node), "")
        try:
            address, fragment = urldefrag(urljoin(base, reference))
        except ValueError as error:
            raise ValueError(f"{pointer_of(link)}/$ref: {reference!r:.200} is not an address") from error
        resource = self._resources.get(address)
        if resource is None:
            raise ValueError(
                f"{pointer_of(link)}/$ref: {reference!r:.200} is not a place of this schema; nothing is fetched. "
                "Copy what it names to `$defs`"
            )
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            target = self._anchors.get((address, fragment))
        else:
            target = _follow(resource, fragment)
        if target is None:
            raise ValueError(f"{pointer_of(link)}/$ref: {reference!r:.200} names nothing in this schema")
        return target

    def _find_resources(self) -> None:
        """Base addresses (`$id`) and anchors of every schema, reached or not."""
        is_old = "draft-04" in str(self.root.get("$schema"))
        stack: list[tuple[Any, Link, str]] = [(self.root, None, "")]
        while stack:
            node, link, base = stack.pop()
            if not isinstance(node, dict):
                continue
            own = node.get("id" if is_old else "$id")
            if isinstance(own, str):
                try:
                    address, fragment = urldefrag(urljoin(base, own))
                except ValueError as error:
                    raise ValueError(f"{pointer_of(link)}/$id: {own!r:.200} is not an address") from error
                if fragment and not address.removeprefix(base):
                    self._anchors[base, fragment] = node
                elif address:
                    base = address
                    self._resources.setdefault(base, node)
            for anchor in (node.get("$anchor"), node.get("$dynamicAnchor")):
                if isinstance(anchor, str):
                    self._anchors[base, anchor] = node
            self._bases[id(node)], self.links[id(node)] = base, link
            stack += [(child, _extend(link, keyword, key), base) for keyword, key, child in _children(node)]

    def _find_schemas(self) -> None:
        """Collects the schemas that the root reaches through its keywords and its `$ref`s."""
        seen: set[int] = set()
        stack: list[tuple[Any, Link]] = [(self.root, None)]
        while stack:
            node, link = stack.pop()
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            self.links.setdefault(id(node), link)
            link = self.links[id(node)]
            self.order.append(node)
            same: list[tuple[str, Any]] = []
            parts: list[tuple[str, str | int | None, Any]] = []
            if "$ref" in node:
                target = self.resolve(node)
                same.append(("$ref", target))
                stack.append((target, (link, "$ref")))
            for keyword, key, child in _children(node):
                if keyword in _ELSEWHERE:
                    continue
                if keyword in _SAME_VALUE:
                    same.append((keyword, child))
                else:
                    parts.append((keyword, key, child))
                stack.append((child, _extend(link, keyword, key)))
            self.same_value[id(node)], self.parts[id(node)] = same, parts

    def inner(self, node: Mapping[str, Any]) -> list[dict[str, Any]]:
        same = (child for _, child in self.same_value[id(node)])
        parts = (child for _, _, child in self.parts[id(node)])
        return [child for child in (*same, *parts) if isinstance(child, dict)]

    def groups(self) -> Iterator[list[dict[str, Any]]]:
        """Groups of schemas that contain one another, each after those within it."""
        nodes = {id(node): node for node in self.order}  # all reached from the root
        for group in components(id(self.root), lambda key: [id(child) for child in self.inner(nodes[key])]):
            yield [nodes[key] for key in group]

    def values_first(self) -> list[Any]:
        """The schemas, each after those that apply to the same value. Raises ValueError for a circle."""
        done: set[int] = set()
        active: set[int] = set()
        order: list[Any] = []
        for start in self.order:
            stack = [] if id(start) in done else [(start, iter(self.same_value[id(start)]))]
            active.update(id(node) for node, _ in stack)
            while stack:
                node, children = stack[-1]
                child = next((child for _, child in children if isinstance(child, dict)), None)
                if child is None:
                    stack.pop()
                    active.discard(id(node))
                    done.add(id(node))
                    order.append(node)
                elif id(child) in active:
                    raise ValueError(
                        f"{pointer_of(self.links[id(child)])}: a circle of `$ref`s that reaches no property or item"
                    )
                elif id(child) not in done:
                    active.add(id(child))
                    stack.append((child, iter(self.same_value[id(child)])))
        return order


def components(start: Key, inner: Callable[[Key], Iterable[Key]]) -> Iterator[list[Key]]:
    """The strongly connected components that `start` reaches, each after those it leads to (Tarjan's algorithm)."""
    numbers: dict[Key, int] = {}
    lowest: dict[Key, int] = {}
    waiting: list[Key] = []
    is_waiting: set[Key] = set()
    stack: list[tuple[Key, Iterator[Key]]] = []

    def enter(key: Key) -> None:
        numbers[key] = lowest[key] = len(numbers)
        waiting.append(key)
        is_waiting.add(key)
        stack.append((key, iter(inner(key))))

    enter(start)
    while stack:
        key, others = stack[-1]
        for other in others:
            if other not in numbers:
                enter(other)
                break
            if other in is_waiting:
                lowest[key] = min(lowest[key], numbers[other])
        else:
            stack.pop()
            if stack:
                outer = stack[-1][0]
                lowest[outer] = min(lowest[outer], lowest[key])
            if lowest[key] == numbers[key]:
                first = next(index for index in range(len(waiting) - 1, -1, -1) if waiting[index] == key)
                group = waiting[first:]
                del waiting[first:]
                is_waiting.difference_update(group)
                yield group


def _children(node: Mapping[str, Any]) -> Iterator[tuple[str, str | int | None, Any]]:
    """Schemas directly in a schema: the keyword, the name or index under it if it holds several, and the schema."""
    for keyword, held in node.items():
        if keyword not in _HOLDS:
            continue
        if isinstance(held, list):
            yield from ((keyword, index, child) for index, child in enumerate(held))
        elif _HOLDS[keyword] is dict and isinstance(held, dict):
            yield from ((keyword, name, child) for name, child in held.items())
        elif isinstance(held, dict | bool):
            yield keyword, None, held


def _extend(link: Link, keyword: str, key: str | int | None) -> Link:
    return (link, keyword) if key is None else ((link, keyword), key)


def _follow(resource: Any, pointer: str) -> Any | None:
    """The value that a JSON pointer names, None where there is none."""
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(resource, Mapping) and key in resource:
            resource = resource[key]
        elif isinstance(resource, list) and re.fullmatch(r"0|[1-9]\d{0,8}", key) and int(key) < len(resource):
            resource = resource[int(key)]
        else:
            return None
    return resource
