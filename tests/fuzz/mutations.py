"""Damage to files: bytes, JSON, templates. Each function gives the same for the same NumPy generator."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

Random = np.random.Generator
Mutation = tuple[str, bytes]  # what was done, and the new bytes

INTEGERS = (0, 1, 2, 7, 8, 127, 128, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1,
            2**63, 2**64 - 1)  # fmt: skip
_DEEP = "\u0001deep\u0001"  # stands for a value that is too deep for json.dumps
_HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 16, 255, 65536, 2**31, 2**53, 2**63, -(2**63), 10**30, 10**400, 0.0, -0.0),
    *(0.5, 1e-30, 1e-320, 1e30, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "0", "1", "float32", "bfloat16", "int4", "null", " ", "a" * 1000, "é" * 300, "\u0000", "\u202e", "\ud800"),
    *("../../etc/passwd", "/etc/passwd", "🎉" * 50, "{{ 7 * 7 }}", "%s%n", "x" * 1_000_000),
    *([], {}, [[]], [None], {"": None}, [0] * 1000, [1, 2, 3], {"type": "default"}, [[[[1]]]], ["a", 1], _DEEP),
)


def mutate_bytes(raw: bytes, random: Random) -> Mutation:
    """One to three of: flipped bits, cuts, copies, moves, foreign bytes."""
    names = []
    for _ in range(int(random.choice((1, 1, 1, 2, 3)))):
        one = _BYTES[random.integers(len(_BYTES))]
        names.append(one.__name__.removeprefix("_").replace("_", " "))
        raw = one(raw, random)
    return ", ".join(names), raw


def mutate_json(raw: bytes, random: Random) -> Mutation:
    """Another value, a missing, renamed or repeated key, in one to three places of a JSON document; or bytes."""
    if random.random() < 0.25:
        return mutate_bytes(raw, random)
    value = json.loads(raw)
    names = []
    for _ in range(int(random.choice((1, 1, 1, 2, 3)))):
        name, value = _changed(value, random)
        names.append(name)
    return ", ".join(names), _dumped(value, random)


def mutate_template(raw: bytes, random: Random) -> Mutation:
    """Pieces of Jinja put in, taken out, moved; or bytes."""
    if random.random() < 0.25:
        return mutate_bytes(raw, random)
    text, names = raw.decode(errors="replace"), []
    for _ in range(int(random.choice((1, 1, 2, 3)))):
        start, end = sorted(int(random.integers(len(text) + 1)) for _ in range(2))
        piece = _TEMPLATE[random.integers(len(_TEMPLATE))]
        kind = int(random.integers(4))
        if kind == 0:
            text = text[:start] + piece + text[start:]
        elif kind == 1:
            text = text[:start] + piece + text[min(start + 20, end) :]
        elif kind == 2:
            text = text[:start] + text[end:]
        else:
            text = text[:end] + text[start:]
        names.append(f"{('put in', 'replaced by', 'cut', 'repeated')[kind]} {piece[:30]!r}")
    return ", ".join(names), text.encode("utf-8", "surrogatepass")


def change_value(value: Any, random: Random) -> tuple[str, Any]:
    """Another value in place of one in a Python structure of lists and dicts."""
    name, changed = _changed(value, random)
    return name, _without_marks(changed)


# Bytes.


def _span(raw: bytes, random: Random, most: int = 4096) -> tuple[int, int]:
    start = int(random.integers(len(raw) + 1))
    return start, min(len(raw), start + 1 + int(random.integers(min(most, len(raw) + 1))))


def _flip_bits(raw: bytes, random: Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(int(random.choice((1, 1, 1, 2, 8)))):
        if changed:
            place = int(random.integers(len(changed)))
            changed[place] ^= 1 << int(random.integers(8))
    return bytes(changed)


def _flip_bits_near_the_start(raw: bytes, random: Random) -> bytes:
    return _flip_bits(raw[:256], random) + raw[256:]


def _truncate(raw: bytes, random: Random) -> bytes:
    return raw[: int(random.integers(len(raw) + 1))]


def _truncate_by_little(raw: bytes, random: Random) -> bytes:
    return raw[: max(len(raw) - 1 - int(random.integers(64)), 0)]


def _repeat_a_span(raw: bytes, random: Random) -> bytes:
    start, end = _span(raw, random)
    return raw[:end] + raw[start:end] * int(random.choice((1, 1, 2, 50))) + raw[end:]


def _cut_a_span(raw: bytes, random: Random) -> bytes:
    start, end = _span(raw, random)
    return raw[:start] + raw[end:]


def _move_a_span(raw: bytes, random: Random) -> bytes:
    start, end = _span(raw, random)
    rest = raw[:start] + raw[end:]
    place = int(random.integers(len(rest) + 1))
    return rest[:place] + raw[start:end] + rest[place:]


def _copy_over(raw: bytes, random: Random) -> bytes:
    start, end = _span(raw, random)
    place = int(random.integers(len(raw) + 1))
    return (raw[:place] + raw[start:end] + raw[place + end - start :])[: len(raw)]


def _put_an_integer(raw: bytes, random: Random) -> bytes:
    width = int(random.choice((1, 2, 4, 8)))
    number = INTEGERS[random.integers(len(INTEGERS))] & (256**width - 1)
    place = int(random.integers(len(raw) + 1))
    return raw[:place] + number.to_bytes(width, "little") + raw[place + width :]


def _put_random_bytes(raw: bytes, random: Random) -> bytes:
    start, end = _span(raw, random, 64)
    return raw[:start] + random.bytes(end - start) + raw[end:]


def _put_zeros(raw: bytes, random: Random) -> bytes:
    start, end = _span(raw, random)
    return raw[:start] + bytes(end - start) + raw[end:]


def _append(raw: bytes, random: Random) -> bytes:
    return raw + (random.bytes(1 + int(random.integers(64))) if random.random() < 0.5 else raw[-64:] + b"\n{}")


def _put_before(raw: bytes, random: Random) -> bytes:
    return (b"\xef\xbb\xbf", b"\xff\xfe", b" ", b"\n", b"\0", b"[", b"{")[random.integers(7)] + raw


def _encode_otherwise(raw: bytes, random: Random) -> bytes:
    return raw.decode("latin-1").encode(("utf-16", "utf-8", "utf-32")[random.integers(3)])


def _only_random_bytes(raw: bytes, random: Random) -> bytes:
    return random.bytes(int(random.integers(300)))


_BYTES: tuple[Callable[[bytes, Random], bytes], ...] = (
    *(_flip_bits, _flip_bits, _flip_bits, _flip_bits_near_the_start, _flip_bits_near_the_start, _truncate),
    *(_truncate_by_little, _repeat_a_span, _cut_a_span, _move_a_span, _copy_over, _put_an_integer, _put_an_integer),
    *(_put_random_bytes, _put_zeros, _append, _put_before, _encode_otherwise, _only_random_bytes),
)


# JSON.


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else list(enumerate(value))
        for key, item in list(items)[:400]:
            found += _places(item, (*path, key))
    return found


def _changed(value: Any, random: Random) -> tuple[str, Any]:
    places = _places(value)
    # Large tables, such as a vocabulary, do not take all of it.
    shallow = [place for place in places if len(place) <= 2]
    chosen = shallow if random.random() < 0.5 else places
    place = chosen[random.integers(len(chosen))]
    where = "".join(f"[{key!r:.40}]" for key in place)
    value = _copied(value)
    if not place:
        return "the whole replaced", _HOSTILE[random.integers(len(_HOSTILE))]
    *parents, key = place
    node = value
    for parent in parents:
        node = node[parent]
    kind = int(random.integers(10))
    if kind == 0:
        del node[key]
        return f"{where} removed", value
    if kind == 1 and isinstance(node, dict):
        others = ("", "\u0000", key + " ", key.upper(), key[:-1], "\u0435" + key, "a" * 100_000)
        node[others[random.integers(len(others))]] = node.pop(key)
        return f"{where} renamed", value
    if kind == 2:
        other = places[random.integers(len(places))]
        node[key] = _copied(_at(value, other))
        return f"{where} = the value at {other!r:.60}", value
    if kind == 3 and isinstance(node, list):
        node += [_copied(node[key])] * int(random.choice((1, 2, 1000)))
        return f"{where} repeated", value
    if kind == 4 and isinstance(node[key], (int, float)) and not isinstance(node[key], bool):
        factor = (-1, 2, 0.5, 1000, 2**31, 1e-9)[random.integers(6)]
        node[key] = type(node[key])(node[key] * factor) if abs(node[key]) < 1e100 else 1
        return f"{where} times {factor}", value
    if kind == 5 and isinstance(node[key], (int, float)) and abs(node[key]) < 1e100:
        node[key] = (str, float, lambda one: [one])[random.integers(3)](node[key])
        return f"{where} of another type", value
    node[key] = _copied(_HOSTILE[random.integers(len(_HOSTILE))])
    return f"{where} = {node[key]!r:.40}", value


def _at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        if not (isinstance(value, list) and isinstance(key, int) and key < len(value)) and not (
            isinstance(value, dict) and key in value
        ):
            return None
        value = value[key]
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _dumped(value: Any, random: Random) -> bytes:
    text = json.dumps(value, ensure_ascii=bool(random.integers(2)))
    depth = int(random.choice((100, 1000, 100_000)))
    opening, closing = (("[", "]"), ('{"a":', "}"))[random.integers(2)]
    text = text.replace(json.dumps(_DEEP), opening * depth + "1" + closing * depth)
    return text.encode("utf-8", "surrogatepass")


def _without_marks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_marks(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_marks(item) for item in value]
    return [[1]] if value == _DEEP else value


# Pieces of Jinja that a hostile template is made of, and those that a careless one has.
_TEMPLATE = (
    *("{%", "%}", "{{", "}}", "{#", "#}", "{% for x in messages %}", "{% endfor %}", "{% if messages %}"),
    *("{% endif %}", "{{ messages }}", "{{ messages[0] }}", "{{ undefined_name }}", "{{ undefined_name.x.y }}"),
    *("{{ 1 / 0 }}", "{{ 'a' * 10**9 }}", "{% for i in range(10**9) %}x{% endfor %}",),
    *("{{ range(10**12) | list | length }}",),
    *("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}", "{{ 10**10**8 }}"),
    *("{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}", "{% include 'x' %}", "{% import 'os' as os %}"),
    *("{{ raise_exception('no') }}", "{{ messages | tojson(indent=10**6) }}", "{{ '%1000000000d' % 1 }}", "{% raw %}"),
    *("{{ 'x' | center(10**9) }}", "{% set x = x ~ x %}", "{% set ns = namespace(a=1) %}{% set ns.b = 2 %}", "|", "\n"),
    *("{{ messages | map(attribute='x') | list }}", "{% generation %}", "{% break %}", "{{ strftime_now('%Y') }}", "'"),
    *("{{ messages[0].content.split('').x }}", "{{ namespace }}", "{{ loop.index }}", "{% call x() %}", '"', "\ud800"),
    *("(" * 300, "[" * 3000, "{{ " + "not " * 3000 + "1 }}", "{% if 1 %}" * 200, "<|im_end|>", "{{ messages|sum }}"),
)  # fmt: skip
