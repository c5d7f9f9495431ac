"""JSON numbers within bounds as regular languages.

Without bounds a number is any JSON number. With bounds it is written without an exponent. Integers are always written
as digits, without fraction and exponent, and zero is never written as -0.
"""

import math
from dataclasses import dataclass
from decimal import Decimal

from jaxinfer.grammar.nodes import (
    EMPTY,
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

MAX_BOUND_DIGITS = 40
Number = int | float

_DIGIT = Chars(((0x30, 0x39),))
_NONZERO = Chars(((0x31, 0x39),))
_DIGITS = Repeat(_DIGIT, 1, None)
_POSITIVE = Concatenation((_NONZERO, Repeat(_DIGIT, 0, None)))
INTEGER = Alternation((Text("0"), Concatenation((Repeat(Text("-"), 0, 1), _POSITIVE))))
_SIGN, _E = Chars(((0x2B, 0x2B), (0x2D, 0x2D))), Chars(((0x45, 0x45), (0x65, 0x65)))
NUMBER = Concatenation(
    (
        Repeat(Text("-"), 0, 1),
        Alternation((Text("0"), _POSITIVE)),
        Repeat(Concatenation((Text("."), _DIGITS)), 0, 1),
        Repeat(Concatenation((_E, Repeat(_SIGN, 0, 1), _DIGITS)), 0, 1),
    )
)


@dataclass(frozen=True)
class Bound:
    """A limit of a number: `value` itself is outside where it `is_exclusive`."""

    value: Decimal
    is_exclusive: bool


def bound_of(inclusive: Number | None, exclusive: Number | None, *, is_upper: bool) -> Bound | None:
    """The tighter one of `minimum` and `exclusiveMinimum`, or of `maximum` and `exclusiveMaximum`.

    Raises ValueError for a bound of more than `MAX_BOUND_DIGITS` digits.
    """
    bounds = [
        Bound(Decimal(repr(value)), is_exclusive)
        for value, is_exclusive in ((inclusive, False), (exclusive, True))
        if value is not None
    ]
    for bound in bounds:
        _, digits, exponent = bound.value.as_tuple()
        if len(digits) + abs(int(exponent)) > MAX_BOUND_DIGITS:
            raise ValueError(f"a bound of more than {MAX_BOUND_DIGITS} digits")
    sign = 1 if is_upper else -1
    return min(bounds, key=lambda bound: (sign * bound.value, not bound.is_exclusive), default=None)


def integer(low: Bound | None, high: Bound | None) -> Node | None:
    """Integers within bounds."""
    if low is None and high is None:
        return INTEGER
    least = None if low is None else math.floor(low.value) + 1 if low.is_exclusive else math.ceil(low.value)
    most = None if high is None else math.ceil(high.value) - 1 if high.is_exclusive else math.floor(high.value)
    negative = None
    if least is None or least < 0:
        negative = _magnitudes(1 if most is None or most >= 0 else -most, None if least is None else -least)
    positive = None
    if most is None or most >= 0:
        positive = _magnitudes(0 if least is None or least <= 0 else least, most)
    return alternate([concat([Text("-"), negative]), positive])


def decimal(low: Bound | None, high: Bound | None) -> Node | None:
    """Numbers within bounds, without an exponent."""
    if low is None and high is None:
        return NUMBER
    zero = Decimal(0)
    negative = None
    if low is None or low.value < 0:
        nearest = Bound(zero, True) if high is None or high.value >= 0 else Bound(-high.value, high.is_exclusive)
        negative = _decimals(nearest, None if low is None else Bound(-low.value, low.is_exclusive))
    positive = None
    if high is None or high.value >= 0:
        positive = _decimals(Bound(zero, False) if low is None or low.value < 0 else low, high)
    return alternate([concat([Text("-"), negative]), positive])


def _magnitudes(least: int, most: int | None) -> Node | None:
    """Integers of at least 0, without a sign."""
    if most is not None and least > most:
        return None
    low = str(least)
    if most is None:
        longer = concat([_NONZERO, repeat(_DIGIT, len(low), None)])
        return alternate([_of_one_length(low, "9" * len(low)), longer])
    high = str(most)
    if len(low) == len(high):
        return _of_one_length(low, high)
    between = None
    if len(high) - len(low) > 1:
        between = concat([_NONZERO, repeat(_DIGIT, len(low), len(high) - 2)])
    return alternate([_of_one_length(low, "9" * len(low)), between, _of_one_length("1" + "0" * (len(high) - 1), high)])


def _of_one_length(low: str, high: str) -> Node | None:
    """Texts of digits from `low` to `high`, all of one length."""
    common = next((index for index in range(len(low)) if low[index] != high[index]), len(low))
    if common == len(low):
        return Text(low)
    start, rest = low[:common], len(low) - common - 1
    options: list[Node | None] = [_then(start, _between(int(low[common]) + 1, int(high[common]) - 1), rest)]
    for index in range(common + 1, len(low)):
        options.append(_then(low[:index], _between(int(low[index]) + 1, 9), len(low) - index - 1))
        options.append(_then(high[:index], _between(0, int(high[index]) - 1), len(low) - index - 1))
    return alternate([*options, Text(low), Text(high)])


def _then(start: str, digit: Node | None, num_more: int) -> Node | None:
    return concat([Text(start), digit, repeat(_DIGIT, num_more, num_more)])


def _between(first: int, last: int) -> Node | None:
    return chars(((0x30 + first, 0x30 + last),)) if first <= last else None


def _decimals(low: Bound, high: Bound | None) -> Node | None:
    """Decimals of at least 0, without a sign."""
    whole_low, digits_low = _split(low.value)
    fraction = repeat(concat([Text("."), _DIGITS]), 0, 1)
    if high is None:
        more = concat([_magnitudes(whole_low + 1, None), fraction])
        return alternate([_with_tail(whole_low, _tail_from(digits_low, low.is_exclusive)), more])
    whole_high, digits_high = _split(high.value)
    if whole_low > whole_high:
        return None
    if whole_low == whole_high:
        return _with_tail(whole_low, _tail_between(digits_low, low.is_exclusive, digits_high, high.is_exclusive))
    return alternate(
        [
            _with_tail(whole_low, _tail_from(digits_low, low.is_exclusive)),
            concat([_magnitudes(whole_low + 1, whole_high - 1), fraction]),
            _with_tail(whole_high, _tail_to(digits_high, high.is_exclusive)),
        ]
    )


def _split(value: Decimal) -> tuple[int, str]:
    """The whole part, and the digits after the point without zeros at the end."""
    whole, _, digits = f"{value:f}".partition(".")
    return int(whole), digits.rstrip("0")


# A tail is what follows the point, as far as digits before it have not settled the comparison: whether it may be empty,
# and the tails that are not.
Tail = tuple[bool, "Node | None"]


def _with_tail(whole: int, tail: Tail) -> Node | None:
    may_be_empty, node = tail
    return alternate([Text(str(whole)) if may_be_empty else None, concat([Text(f"{whole}."), node])])


def _tail_from(digits: str, is_exclusive: bool) -> Tail:
    """Tails of at least `digits`, which do not end with 0."""
    above = [
        concat([Text(digits[:index]), _between(int(digit) + 1, 9), repeat(_DIGIT, 0, None)])
        for index, digit in enumerate(digits)
    ]
    if is_exclusive:
        last = concat([Text(digits), repeat(Text("0"), 0, None), _NONZERO, repeat(_DIGIT, 0, None)])
    else:
        last = concat([Text(digits), repeat(_DIGIT, 0 if digits else 1, None)])
    return not digits and not is_exclusive, alternate([*above, last])


def _tail_to(digits: str, is_exclusive: bool) -> Tail:
    """Tails of at most `digits`, which do not end with 0."""
    below: list[Node | None] = []
    for index, digit in enumerate(digits):
        below.append(concat([Text(digits[:index]), _between(0, int(digit) - 1), repeat(_DIGIT, 0, None)]))
        below.append(Text(digits[:index]) if index else None)
    last = None if is_exclusive else concat([Text(digits), repeat(Text("0"), 0 if digits else 1, None)])
    return bool(digits) or not is_exclusive, alternate([*below, last])


def _tail_between(low: str, is_low_exclusive: bool, high: str, is_high_exclusive: bool) -> Tail:
    """Tails from `low` to `high`, which do not end with 0."""
    length = max(len(low), len(high))
    padded_low, padded_high = low.ljust(length, "0"), high.ljust(length, "0")
    if padded_low >= padded_high:
        if padded_low > padded_high or is_low_exclusive or is_high_exclusive:
            return False, None
        return not low, concat([Text(low), repeat(Text("0"), 0 if low else 1, None)])
    common = next(index for index in range(length) if padded_low[index] != padded_high[index])
    start, first, last = padded_low[:common], padded_low[common], padded_high[common]
    options = [concat([Text(start), _between(int(first) + 1, int(last) - 1), repeat(_DIGIT, 0, None)])]
    for digit, (may_end, node) in (
        (first, _tail_from(low[common + 1 :], is_low_exclusive)),
        (last, _tail_to(high[common + 1 :], is_high_exclusive)),
    ):
        options.append(concat([Text(start + digit), alternate([EMPTY if may_end else None, node])]))
    # A text that ends within the common digits is followed by zeros in value: it can only be the lower bound.
    ends = [index for index in range(len(low), common + 1) if not is_low_exclusive]
    options += [Text(low.ljust(index, "0")) for index in ends if index]
    return 0 in ends, alternate(options)
