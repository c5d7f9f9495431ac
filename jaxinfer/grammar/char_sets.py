"""Sets of characters, as sorted, disjoint ranges of code points without surrogates; the classes of patterns."""

import unicodedata
from bisect import bisect_right
from collections.abc import Iterable
from functools import cache, lru_cache

Ranges = tuple[tuple[int, int], ...]

ALL: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    """All that is in one of them. The ranges given may overlap, in any order; surrogates are taken out."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(pair for ranges in sets for pair in ranges):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    if any(start <= 0xDFFF and end >= 0xD800 for start, end in merged):
        return intersection(tuple(merged), ALL)
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """All characters that are not in it."""
    gaps, start = [], 0
    for first, last in (*ranges, (0x110000, 0x110000)):
        if first > start:
            gaps.append((start, first - 1))
        start = last + 1
    return intersection(tuple(gaps), ALL)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """All characters that are in both."""
    common, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start <= end:
            common.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def difference(one: Ranges, other: Ranges) -> Ranges:
    """All characters that are in the first set and not in the second."""
    return intersection(one, complement(other))


def of_texts(characters: Iterable[str]) -> Ranges:
    """The set of these characters."""
    return union((ord(char), ord(char)) for char in characters)


# Unicode's White_Space, of which `str.isspace` has four more.
SPACES: Ranges = union(
    [(9, 13), (0x2000, 0x200A), (0x2028, 0x2029)],
    of_texts("\x20\x85\xa0\u1680\u202f\u205f\u3000"),
)

ASCII_CLASSES: dict[str, Ranges] = {
    "alnum": ((48, 57), (65, 90), (97, 122)),
    "alpha": ((65, 90), (97, 122)),
    "ascii": ((0, 127),),
    "blank": ((9, 9), (32, 32)),
    "cntrl": ((0, 31), (127, 127)),
    "digit": ((48, 57),),
    "graph": ((33, 126),),
    "lower": ((97, 122),),
    "print": ((32, 126),),
    "punct": ((33, 47), (58, 64), (91, 96), (123, 126)),
    "space": ((9, 13), (32, 32)),
    "upper": ((65, 90),),
    "word": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "xdigit": ((48, 57), (65, 70), (97, 102)),
}


@cache
def category(prefix: str) -> Ranges | None:
    """The characters of a general category, `Lu`, or of all of `L`, in Python's version of Unicode, or None."""
    sets = [ranges for name, ranges in _categories().items() if name.startswith(prefix)]
    return union(*sets) if sets else None


@cache
def word_characters() -> Ranges:
    """`\\w`: letters, marks, decimal digits, connectors, and what Unicode calls alphabetic or a joiner besides."""
    named = [category(name) or () for name in ("L", "M", "Nd", "Nl", "Pc")]
    enclosed = ((0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189))
    return union(*named, enclosed, ((0x200C, 0x200D),))


@cache
def _categories() -> dict[str, Ranges]:
    """The assigned categories. Planes 4 to 13 have no character."""
    categories: dict[str, list[tuple[int, int]]] = {}
    for low, high in ((0, 0x40000), (0xE0000, 0x110000)):
        start, current = low, unicodedata.category(chr(low))
        for code in range(low + 1, high + 1):
            name = unicodedata.category(chr(code)) if code < high else ""
            if name != current:
                categories.setdefault(current, []).append((start, code - 1))
                start, current = code, name
    del categories["Cs"]
    categories["Cn"].append((0x40000, 0xDFFFF))
    return {name: union(ranges) for name, ranges in categories.items()}


@lru_cache(maxsize=64)
def ignoring_case(ranges: Ranges) -> Ranges:
    """With all characters that differ from one of them only in case (Unicode's simple case folding)."""
    orbits = _orbits()
    if sum(end - start + 1 for start, end in ranges) < 256:
        codes = [code for start, end in ranges for code in range(start, end + 1)]
    else:
        codes = [code for code in orbits if contains(ranges, code)]
    return union(ranges, ((other, other) for code in codes for other in orbits.get(code, ())))


def contains(ranges: Ranges, code: int) -> bool:
    index = bisect_right(ranges, (code, 0x110000)) - 1
    return index >= 0 and code <= ranges[index][1]


@cache
def _orbits() -> dict[int, tuple[int, ...]]:
    """Characters that fold to the same one as others, each with all of them."""
    folded: dict[str, list[int]] = {}
    letters = [(start, end) for start, end in category("L") or () if start < 0x20000]  # ideographs come behind
    for start, end in (*letters, *(category("M") or ()), *(category("Nl") or ()), *(category("So") or ())):
        for code in range(start, end + 1):
            folded.setdefault(_fold(chr(code)), []).append(code)
    return {code: tuple(codes) for codes in folded.values() if len(codes) > 1 for code in codes}


def _fold(char: str) -> str:
    """Python folds some characters to several; such a one folds to its lower case, if that is one character."""
    for text in (char.casefold(), char.lower()):
        if len(text) == 1:
            return _SINGLE.get(text, text)
    return _SINGLE.get(char, char)


# Characters that fold to the same several ones, and to one another in Unicode 15.1.
_SINGLE = {"\u1fd3": "\u0390", "\u1fe3": "\u03b0", "\ufb05": "\ufb06"}
