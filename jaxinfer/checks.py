"""Checks of options, and the parts that their messages share: the nearest known name, bytes with a unit."""

import difflib
from collections.abc import Iterable
from typing import Any


def check_positive_integers(options: Any, *names: str, optional: Iterable[str] = ()) -> None:
    """Raises ValueError, with name and value, for an attribute of `options` that is no integer of at least 1.

    Args:
      optional: further attributes, which may be None.
    """
    optional = tuple(optional)
    for name in (*names, *optional):
        value = getattr(options, name)
        if value is None and name in optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def nearest(name: Any, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name most like `name`, or None if none has a similarity of at least `cutoff` (difflib's, 0 to 1)."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: Any, known: Iterable[str], *, cutoff: float = 0.6, otherwise: str = "") -> str:
    """The clause ": did you mean 'x'?" with the nearest known name, or `otherwise` if none is near."""
    near = nearest(name, known, cutoff=cutoff)
    return f": did you mean {near!r}?" if near else otherwise


def format_bytes(num_bytes: float) -> str:
    """A number of bytes with its unit, such as "1.50 GiB" or "640.0 MiB"."""
    for unit, size, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if abs(num_bytes) >= size / 10:
            return f"{num_bytes / size:,.{digits}f} {unit}"
    return f"{num_bytes:,.0f} bytes"
