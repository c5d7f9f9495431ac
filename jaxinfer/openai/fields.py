"""From JSON data to a typed body: every field is known, has its type, and is supported or changes nothing."""

import re
import reprlib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct

from jaxinfer.checks import did_you_mean, first_unknown, without_unknown
from jaxinfer.openai.bodies import Body, Names
from jaxinfer.openai.errors import RequestError
from jaxinfer.text.messages import MESSAGE_NAMES

if TYPE_CHECKING:
    from jaxinfer.text import Tokenizer

UNSET: tuple[Any, ...] = (None, "", [], {})
"""Values that clients send for a field of text, or of a list, that they leave empty."""

_INDEX = re.compile(r"\[\d+\]")
_MAX_LISTED = 30  # names in an error
_MAX_PLACE = 200  # characters of a field's place in an error
_WORD = re.compile(r"[A-Za-z_]\w*")
_AT = re.compile(r" - at `\$\.?(.*)`$")
_Kind = TypeVar("_Kind", bound=Struct)


def read_body(given: Mapping[str, Any], kind: type[_Kind], *, ignore_unknown: bool = False) -> tuple[_Kind, list[str]]:
    """A body, and with `ignore_unknown` the names of its fields that are not known.

    Raises:
      RequestError: with the place of a field that is not known, has another type, or is not supported.
    """
    unknown = [] if ignore_unknown else None
    for place, name, known in _unknown(given, kind):
        if unknown is None:
            raise unknown_field(f"{place}.{name}".removeprefix("."), known)
        unknown.append(_INDEX.sub("[]", f"{place}.{name}".removeprefix(".")))
    if unknown:
        given = without_unknown(given, names_of(kind))
    try:
        body = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise type_error(error) from None
    if isinstance(body, Body):
        for name, neutral in body.NEUTRAL.items():
            check_neutral(name, getattr(body, name), neutral, body.WHY.get(name, ""))
    return body, unknown or []


def check_names(value: Any, names: Names, place: str) -> None:
    """Raises RequestError for a name in JSON data that is not known there."""
    if (found := first_unknown(value, names, place)) is not None:
        raise unknown_field(f"{found[0]}.{found[1]}", found[2])


def type_error(error: msgspec.ValidationError) -> RequestError:
    """The error of a value of a wrong type."""
    found = _AT.search(str(error))
    place = found[1] or None if found else None
    return RequestError(f"{place or 'the body'}: {_AT.sub('', str(error))}", place)


def unknown_field(place: str, known: Iterable[str]) -> RequestError:
    """The error of a name that is not known at its place, with the nearest of those that are."""
    names, place = sorted(known), place if len(place) <= _MAX_PLACE else f"{place[:_MAX_PLACE]}..."
    listed = f"; the fields are {', '.join(names)}" if len(names) <= _MAX_LISTED else ""
    near = did_you_mean(place.rpartition(".")[2], names, cutoff=0.5, otherwise=listed)
    return RequestError(f"unknown field {place!r}{near}", place)


def check_neutral(place: str, value: Any, neutral: Sequence[Any], why: str = "") -> None:
    """Raises RequestError for a field that is not supported, unless its value changes nothing."""
    if not is_neutral(value, neutral):
        use = f", or send {neutral[0]!r}" if neutral else ""
        raise RequestError(f"{place}={reprlib.repr(value)} is not supported{why}: leave it out{use}", place)


def is_neutral(value: Any, neutral: Sequence[Any]) -> bool:
    """Tells whether a value of a field that is not supported changes nothing. JSON's false is not 0."""
    return value in UNSET or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _unknown(given: Mapping[str, Any], kind: type[Struct]) -> Iterator[tuple[str, str, Any]]:
    """Places, names, and the names that are known there: of each field the first."""
    names = names_of(kind)
    for name, value in given.items():
        if value is None:
            continue
        if name not in names:
            yield "", name, names
        elif (below := names[name]) is not None and (found := first_unknown(value, below, name)) is not None:
            yield found


@cache
def names_of(kind: type[Struct]) -> Names:
    """The names that a body may have, at every depth that it describes."""
    nested = getattr(kind, "NESTED", {})
    names: dict[str, Names | None] = {}
    for one in msgspec.structs.fields(kind):
        inner = [t for t in typing.get_args(one.type) if isinstance(t, type) and issubclass(t, Struct)]
        names[one.encode_name] = nested.get(one.encode_name) or (names_of(inner[0]) if inner else None)
    return names


def check_message_names(messages: Any, tokenizer: "Tokenizer | None") -> None:
    """Raises RequestError for a name in messages that neither a chat template nor anybody else reads."""
    templates = () if tokenizer is None else tuple(tokenizer.chat_templates.values())
    if (found := first_unknown(messages, _message_names(templates), "messages")) is not None:
        place, name, known = found
        raise unknown_field(f"{place}.{name}", MESSAGE_NAMES if "role" in known else known)


@lru_cache(8)
def _message_names(templates: tuple[str, ...]) -> Names:
    return {**dict.fromkeys(_WORD.findall("\n".join(templates))), **MESSAGE_NAMES}
