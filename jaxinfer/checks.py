"""Parts that checks of options and of files share: the nearest known name, whole numbers, bytes with a unit."""

import difflib
import importlib.util
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from jaxinfer.extras import install_hint

NO_TOKEN = (None, -1)  # what files have for the id of a token that a model does not have


def nearest(name: Any, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name most like `name`, or None if none has a similarity of at least `cutoff` (difflib's, 0 to 1)."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: Any, known: Iterable[str], *, cutoff: float = 0.6, otherwise: str = "") -> str:
    """The clause ": did you mean 'x'?" with the nearest known name, or `otherwise` if none is near."""
    near = nearest(name, known, cutoff=cutoff)
    return f": did you mean {near!r}?" if near else otherwise


TYPES = "*types"
"""In names of JSON data, the types of an object of which the names are checked; others are refused by their type."""


def unknown_names(value: Any, names: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str, Collection[str]]]:
    """Each name in JSON data that `names` lacks: its object's place, itself, and the names there are.

    `names` are those of an object, or of each object of a list, with those below them, or None where anything may be.
    A name whose value is null counts as not given.
    """
    if isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            if isinstance(entry, Mapping):
                yield from unknown_names(entry, names, f"{place}[{index}]")
    elif isinstance(value, Mapping) and _is_checked(value, names):
        for name, item in value.items():
            if item is None:
                continue
            if name not in names:
                yield place, str(name), [known for known in names if known != TYPES]
            elif names[name] is not None:
                yield from unknown_names(item, names[name], f"{place}.{name}")


def without_unknown(value: Any, names: Mapping[str, Any]) -> Any:
    """JSON data without what `unknown_names` finds."""
    if isinstance(value, (list, tuple)):
        return [without_unknown(item, names) if isinstance(item, Mapping) else item for item in value]
    if not isinstance(value, Mapping) or not _is_checked(value, names):
        return value
    return {
        name: item if names[name] is None else without_unknown(item, names[name])
        for name, item in value.items()
        if name in names
    }


def _is_checked(value: Mapping[str, Any], names: Mapping[str, Any]) -> bool:
    return TYPES not in names or value.get("type") in (None, *names[TYPES])


def whole_numbers(value: Any) -> Any:
    """A JSON value with an integer for each whole number that its writer spelled as a float, such as 32.0."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, Mapping):
        return {key: whole_numbers(item) for key, item in value.items()}
    return [whole_numbers(item) for item in value] if isinstance(value, list) else value


def need_plotting(what: str) -> None:
    """Raises ImportError, with the extra to install, where matplotlib is missing. `what` needs it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"{what} needs matplotlib: {install_hint('plot')}")


def format_bytes(num_bytes: float) -> str:
    """A number of bytes with its unit, such as "1.50 GiB" or "640.0 MiB"."""
    for unit, size, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if abs(num_bytes) >= size / 10:
            return f"{num_bytes / size:,.{digits}f} {unit}"
    return f"{num_bytes:,.0f} bytes"
