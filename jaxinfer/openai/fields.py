"""From JSON data to a typed body: every field is known, has its type, and is supported or changes nothing."""

import re
import reprlib
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct

from jaxinfer.checks import did_you_mean, unknown_names, without_unknown
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

    Raises RequestError: with the place of a field that is not known, has another type, or is not supported.
    """
    ignored = check_names(given, names_of(kind), "", ignore_unknown=ignore_unknown)
    if ignored:
        given = without_unknown(given, names_of(kind))
    try:
        body = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise type_error(error) from None
    _check_support(given, kind)
    return body, ignored


def check_names(
    value: Any,
    names: Names,
    place: str,
    *,
    ignore_unknown: bool = False,
    error: Callable[[str, Collection[str]], RequestError] | None = None,
) -> list[str]:
    """Names in JSON data that are not known there, to be ignored; raises RequestError for the first unless they are."""
    ignored = []
    for where, name, known in unknown_names(value, names, place):
        field = f"{where}.{name}".removeprefix(".")
        if not ignore_unknown:
            raise (error or unknown_field)(field, known)
        ignored.append(_INDEX.sub("[]", field))
    return ignored


def type_error(error: msgspec.ValidationError) -> RequestError:
    """The error of a value of a wrong type."""
    match = _AT.search(str(error))
    place = match[1] or None if match else None
    return RequestError(f"{place or 'the body'}: {_AT.sub('', str(error))}", place)


def unknown_field(place: str, known: Collection[str]) -> RequestError:
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
    return value in UNSET or any(
        value == kept and isinstance(value, bool) == isinstance(kept, bool) for kept in neutral
    )


def _check_support(given: Mapping[str, Any], kind: type[Struct], place: str = "") -> None:
    if issubclass(kind, Body):
        for name, neutral in kind.NEUTRAL.items():
            check_neutral(place + name, given.get(name), neutral, kind.WHY.get(name, ""))
    for name, inner in _structs_of(kind).items():
        if isinstance(below := given.get(name), Mapping):
            _check_support(below, inner, f"{place}{name}.")


@cache
def names_of(kind: type[Struct]) -> Names:
    """The names that a body may have, at every depth that it describes."""
    names: Names = {struct_field.encode_name: None for struct_field in msgspec.structs.fields(kind)}
    names |= {name: names_of(inner) for name, inner in _structs_of(kind).items()}
    return names | dict.fromkeys(kind.NEUTRAL) | kind.NESTED if issubclass(kind, Body) else names


@cache
def _structs_of(kind: type[Struct]) -> dict[str, type[Struct]]:
    """The fields whose values are objects of a type."""
    types = {field.encode_name: typing.get_args(field.type) for field in msgspec.structs.fields(kind)}
    structs = ((name, t) for name, args in types.items() for t in args if isinstance(t, type) and issubclass(t, Struct))
    return dict(structs)


def check_message_names(messages: Any, tokenizer: "Tokenizer | None", *, ignore_unknown: bool = False) -> list[str]:
    """As `check_names`, for names in messages that neither a chat template nor jaxinfer reads."""
    templates = () if tokenizer is None else tuple(tokenizer.chat_templates.values())
    return check_names(messages, _message_names(templates), "messages", ignore_unknown=ignore_unknown, error=_unread)


def _unread(place: str, known: Collection[str]) -> RequestError:
    unknown = unknown_field(place, MESSAGE_NAMES if "role" in known else known)
    return RequestError(f"{unknown} (nothing reads it: to drop it, leave it out of the messages)", unknown.parameter)


@lru_cache(8)
def _message_names(templates: tuple[str, ...]) -> Names:
    return {**dict.fromkeys(_WORD.findall("\n".join(templates))), **MESSAGE_NAMES}
