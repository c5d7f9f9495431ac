"""JSON strings as regular languages: lengths, patterns, formats, and names other than some."""

import json
import re
from collections.abc import Iterable

from jaxinfer.grammar import char_sets
from jaxinfer.grammar.char_sets import Ranges
from jaxinfer.grammar.nodes import (
    Alternation,
    Chars,
    Concatenation,
    Node,
    Repeat,
    Text,
    alternate,
    chars,
    concat,
    repeat,
)
from jaxinfer.grammar.pattern import parse_pattern

_QUOTE = Text('"')
_HEX = Chars(((0x30, 0x39), (0x41, 0x46), (0x61, 0x66)))
# Characters that a JSON string holds as themselves: all but controls, the quote and the backslash, without surrogates.
_PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))
_SHORT_ESCAPES = {0x22: '\\"', 0x5C: "\\\\", 0x08: "\\b", 0x09: "\\t", 0x0A: "\\n", 0x0C: "\\f", 0x0D: "\\r"}


def _one_of(characters: str) -> Chars:
    return Chars(tuple((ord(character), ord(character)) for character in sorted(characters)))


def _hex(*digits: Node) -> Node:
    return Concatenation((Text("\\u"), *digits))


# One character in every spelling. A surrogate pair is one character; a lone surrogate is none.
ANY_CHARACTER = Alternation(
    (
        Chars(_PLAIN),
        Concatenation((Text("\\"), _one_of('"\\/bfnrt'))),
        _hex(Chars(((0x30, 0x39), (0x41, 0x43), (0x45, 0x46), (0x61, 0x63), (0x65, 0x66))), _HEX, _HEX, _HEX),
        _hex(_one_of("dD"), Chars(((0x30, 0x37),)), _HEX, _HEX),
        Concatenation(
            (
                *(Text("\\u"), _one_of("dD"), _one_of("89aAbB"), _HEX, _HEX),
                *(Text("\\u"), _one_of("dD"), _one_of("cdefCDEF"), _HEX, _HEX),
            )
        ),
    )
)
_DATE = (
    # the month's days, then 29 February of leap years; there is no year 0
    r"(?:(?:\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
    r"|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    r"(?:(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
    r"|23:59:60(?:\.\d+)?(?:[Zz]|[+-]00:00))"
)
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HEXTET = "[0-9A-Fa-f]{1,4}"
_LAST_HEXTETS = rf"(?:{_HEXTET}:{_HEXTET}|{_OCTET}(?:\.{_OCTET}){{3}})"
_IPV6 = "|".join(
    [
        f"(?:{_HEXTET}:){{6}}{_LAST_HEXTETS}",
        *(f"(?:(?:{_HEXTET}:){{0,{4 - n}}}{_HEXTET})?::(?:{_HEXTET}:){{{n}}}{_LAST_HEXTETS}" for n in range(5)),
        f"::(?:{_HEXTET}:){{5}}{_LAST_HEXTETS}",
        f"(?:(?:{_HEXTET}:){{0,5}}{_HEXTET})?::{_HEXTET}",
        f"(?:(?:{_HEXTET}:){{0,6}}{_HEXTET})?::",
    ]
)
# Without hyphens as third and fourth character: those of internationalized names need a dictionary.
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9]|[A-Za-z0-9-](?:{0}(?:[A-Za-z0-9-]{{0,59}}{0})?|-{0}(?:[A-Za-z0-9-]{{0,58}}{0})?))?"
_NAME = _NAME.format("[A-Za-z0-9]")
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_PERCENT = "%[0-9A-Fa-f]{2}"
_BEYOND_ASCII = (
    "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
    + "".join(f"{chr(plane << 16)}-{chr((plane << 16) + 0xFFFD)}" for plane in range(1, 14))
    + "\U000e1000-\U000efffd"
)  # ucschar of RFC 3987


def _reference(beyond: str, *, is_relative: bool) -> str:
    """A URI of RFC 3986, whose names may have the characters `beyond`, too, or such a URI or a relative reference."""
    own = rf"A-Za-z0-9._~!$&'()*+,;={beyond}\-"
    of_path, of_query = rf"(?:[{own}:@]|{_PERCENT})", rf"(?:[{own}:@/?]|{_PERCENT})*"
    authority = rf"(?:(?:[{own}:]|{_PERCENT})*@)?(?:\[(?:{_IPV6})\]|(?:[{own}]|{_PERCENT})*)(?::\d*)?"
    ends = rf"(?:\?{of_query})?(?:#{of_query})?"
    rooted = rf"//{authority}(?:/{of_path}*)*|/(?:{of_path}+(?:/{of_path}*)*)?"
    absolute = rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{rooted}|{of_path}+(?:/{of_path}*)*)?{ends}"
    if not is_relative:
        return absolute
    return rf"{absolute}|(?:{rooted}|(?:[{own}@]|{_PERCENT})+(?:/{of_path}*)*)?{ends}"


_TEMPLATE_NAME = rf"(?:[A-Za-z0-9_]|{_PERCENT})(?:\.?(?:[A-Za-z0-9_]|{_PERCENT}))*(?::[1-9]\d{{0,3}}|\*)?"
_TEMPLATE_TEXT = rf"[!#$&()*+,./0-9:;=?@A-Z\[\]_a-z~{_BEYOND_ASCII}-]|{_PERCENT}"
# Letters of names beyond ASCII that IDNA 2008 allows in any place, of scripts written from left to right.
_WIDE_ATOM = rf"[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~{_BEYOND_ASCII}-]+"
_WIDE_LABEL = (
    "[a-z0-9\u00df-\u00f6\u00f8-\u00ff\u03b1-\u03c9\u0430-\u044f\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]"
    "{1,12}"
)
_WIDE_NAME = rf"(?:(?:{_NAME}|{_WIDE_LABEL})\.){{0,2}}(?:{_NAME}|{_WIDE_LABEL})"  # short enough as ASCII, too


def _regular_expression(depth: int) -> str:
    """Regular expressions of ECMA-262, with groups in groups down to a depth, and without looks ahead or behind."""
    escaped = r"\\[dDwWsSfnrtv.*+?^$()\[\]{}|\\/]"
    # Named one by one: to llguidance a backslash is in `[^\\]`.
    plain = " !\"#%&',0-9:;<=>@A-Z_`a-z~\u00a1-\ud7ff\ue000-\U0010ffff"
    of_class = rf"(?:[{plain}$*+?.(){{}}|/]|{escaped}|a-z|A-Z|0-9)"
    atoms = [rf"[{plain}.\-]", escaped, rf"\[\^?{of_class}+\]"]
    if depth:
        atoms.append(rf"\((?:\?:)?(?:{_regular_expression(depth - 1)})\)")
    term = rf"(?:(?:{'|'.join(atoms)})(?:(?:[*+?]|\{{[1-9]\d?,?\}})\??)?|[$^]|\\[bB])"
    return rf"{term}*(?:\|{term}*)*"


# RFC 3339, RFC 4122, RFC 2673, RFC 4291, RFC 1123; RFC 5321 and RFC 6531 without quoted names, addresses in brackets;
# RFC 6901; RFC 3986 and RFC 3987; RFC 6570; RFC 5890.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})*",
    "ipv6": _IPV6,
    "hostname": rf"{_NAME}(?:\.{_NAME})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
    "uri-reference": _reference("", is_relative=True),
    "iri": _reference(_BEYOND_ASCII, is_relative=False),
    "iri-reference": _reference(_BEYOND_ASCII, is_relative=True),
    "uri-template": rf"(?:{_TEMPLATE_TEXT}|\{{[+#./;?&]?{_TEMPLATE_NAME}(?:,{_TEMPLATE_NAME})*\}})*",
    "idn-hostname": _WIDE_NAME,
    "idn-email": rf"{_WIDE_ATOM}(?:\.{_WIDE_ATOM})*@{_WIDE_NAME}",
    "regex": _regular_expression(2),
}
OTHER_FORMATS = ("duration", "uri")
"""Formats that llguidance has, with `FORMATS` all of JSON Schema 2020-12. Any other is an annotation: it says nothing
about texts."""
FORMAT_LENGTHS = {"hostname": 253}


def text_of(value: object) -> Text:
    """A JSON value in compact JSON, as `json.dumps` spells it."""
    return Text(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def free_string(least: int, most: int | None) -> Node | None:
    """Strings of so many characters, each in any spelling."""
    if most is not None and least > most:
        return None
    return concat([_QUOTE, repeat(ANY_CHARACTER, least, most), _QUOTE])


def pattern_string(pattern: str, *, is_search: bool, least: int, most: int | None) -> Node | None:
    """Strings that match a pattern, their characters spelled as `json.dumps` does.

    Raises ValueError if the pattern is not supported, or if it allows other lengths and cannot be cut to these.
    """
    tree = parse_pattern(ecma_pattern(pattern), is_search=is_search)
    if isinstance(tree, Repeat) and isinstance(tree.node, Chars):  # `^[a-z]*$` and such can be cut to any length
        most = tree.most if most is None else most if tree.most is None else min(most, tree.most)
        least = max(least, tree.least)
        if most is not None and least > most:
            return None
        return concat([_QUOTE, repeat(_spelled(tree.node), least, most), _QUOTE])
    shortest, longest = _lengths(tree)
    if shortest < least or (most is not None and (longest is None or longest > most)):
        raise ValueError("a pattern with other lengths than minLength and maxLength allow")
    return concat([_QUOTE, _spelled(tree), _QUOTE])


def names_other_than(names: Iterable[str]) -> Node | None:
    """Strings that are none of some, spelled as `json.dumps` does.

    Such a string leaves the tree of the names at one place: there it ends, or goes on with another character.
    """
    followers: dict[str, set[str]] = {"": set()}
    complete = set(names)
    for name in sorted(complete):
        for index, character in enumerate(name):
            followers.setdefault(name[:index], set()).add(character)
        followers.setdefault(name, set())
    rest = repeat(_spelled(Chars(char_sets.ALL)), 0, None)
    options: list[Node | None] = []
    for prefix, taken in followers.items():
        start = Text(json.dumps(prefix, ensure_ascii=False)[:-1])
        if prefix not in complete:
            options.append(concat([start, _QUOTE]))
        others = char_sets.complement(char_sets.of_texts(taken))
        options.append(concat([start, _spelled(Chars(others)), rest, _QUOTE]))
    return alternate(options)


def _spelled(node: Node) -> Node | None:
    """Texts as they are spelled within a JSON string. Recursive, as deep as a pattern nests."""
    if isinstance(node, Text):
        return Text(json.dumps(node.text, ensure_ascii=False)[1:-1])
    if isinstance(node, Chars):
        return _spelled_characters(node.ranges)
    if isinstance(node, Concatenation):
        return concat([_spelled(part) for part in node.parts])
    if isinstance(node, Alternation):
        return alternate([_spelled(option) for option in node.options])
    return repeat(_spelled(node.node), node.least, node.most)


def _spelled_characters(ranges: Ranges) -> Node | None:
    escaped = [point for first, last in char_sets.difference(ranges, _PLAIN) for point in range(first, last + 1)]
    escapes = [Text(_SHORT_ESCAPES.get(point, f"\\u{point:04x}")) for point in escaped]
    return alternate([chars(char_sets.intersection(ranges, _PLAIN)), *escapes])


def _lengths(node: Node) -> tuple[int, int | None]:
    """The fewest and the most characters of a text of a language; None where there is no limit."""
    if isinstance(node, Text):
        return len(node.text), len(node.text)
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Repeat):
        least, most = _lengths(node.node)
        return least * node.least, None if most is None or node.most is None else most * node.most
    inner = [_lengths(child) for child in (node.parts if isinstance(node, Concatenation) else node.options)]
    merge, longest = (sum, sum) if isinstance(node, Concatenation) else (min, max)
    mosts = [most for _, most in inner if most is not None]
    return merge(least for least, _ in inner), longest(mosts) if len(mosts) == len(inner) else None


_ECMA = {
    "d": "0-9",
    "w": "A-Za-z0-9_",
    "s": r"\t\n\x0B\x0C\r \xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF",
}
_ESCAPES = re.compile(r"\\(?:[dDwWsS]|[tnrfv]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[^A-Za-z0-9])", re.DOTALL)
_GROUPS = re.compile(r"\(\?(?!:|<[A-Za-z_])")


def ecma_pattern(pattern: str) -> str:
    """A pattern of JSON Schema (ECMA-262) in the syntax of Rust's regular expressions, with the same meaning.

    Raises ValueError for what has no counterpart there.
    """
    if match := _GROUPS.search(re.sub(r"\\.", "__", pattern, flags=re.DOTALL)):
        raise ValueError(f"`(?` at character {match.start()} of the pattern is not supported")
    pieces: list[str] = []
    is_class, index = False, 0
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            match = _ESCAPES.match(pattern, index)
            if match is None:
                raise ValueError(f"{pattern[index : index + 2]!r} at character {index} of the pattern is not supported")
            pieces.append(_ecma_escape(match[0], is_class))
            index = match.end()
            continue
        if not is_class and character == "[":
            is_class = True
            if pattern[index + 1 : index + 2] == "^":
                character, index = "[^", index + 1
            if pattern[index + 1 : index + 2] == "]":
                raise ValueError(f"the empty class at character {index} of the pattern is not supported")
        elif is_class and character == "]":
            is_class = False
        elif is_class and character in "[&~^":  # set operations of Rust's classes
            character = "\\" + character
        elif not is_class and character == ".":
            character = r"[^\n\r\u2028\u2029]"
        pieces.append(character)
        index += 1
    return "".join(pieces)


def _ecma_escape(escape: str, is_class: bool) -> str:
    kind = escape[1]
    if kind in "dws":
        return _ECMA[kind] if is_class else f"[{_ECMA[kind]}]"
    if kind in "DWS":
        if is_class:
            raise ValueError(f"{escape} within a class is not supported")
        return f"[^{_ECMA[kind.lower()]}]"
    if kind in "xu":
        return f"\\x{{{escape[2:]}}}"
    if kind.isascii() and not kind.isspace():
        return escape
    return kind
