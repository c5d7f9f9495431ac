"""Typed reading of a JSON object: every problem is noted, so that a user sees all of them at once."""

import math
from collections.abc import Mapping
from typing import Any

REQUIRED: Any = object()


class Fields:
    """Reads fields of `data`; `prefix` is put before their names in messages, `problems` collects what is wrong.

    `names` has those that are called otherwise in `data`, None for one that does not exist there.

    A field that is absent or null has its default. After a problem the reading goes on with a harmless value.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        problems: list[str],
        prefix: str = "",
        names: Mapping[str, str | None] | None = None,
    ):
        self.data, self.problems, self._prefix = data, problems, prefix
        self._names = names or {}

    def has(self, name: str) -> bool:
        """Whether a field is given, and not null."""
        own = self._names.get(name, name)
        return own is not None and self.data.get(own) is not None

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            self.problem(name, f"must be a string, got {value!r}")
            return default
        return value

    def integer(self, name: str, default: Any = REQUIRED, *, least: int = 1) -> Any:
        """An int of at least `least`."""
        value = self._get(name, default)
        if value is default or (isinstance(value, int) and not isinstance(value, bool) and value >= least):
            return least if value is REQUIRED else value
        self.problem(name, f"must be an integer of at least {least}, got {value!r}")
        return least

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        """A positive finite float."""
        value = self._get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is default or (is_number and math.isfinite(value) and value > 0):
            return 1.0 if value is REQUIRED else (float(value) if is_number else value)
        self.problem(name, f"must be a positive number, got {value!r}")
        return 1.0

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            self.problem(name, f"must be true or false, got {value!r}")
            return default
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers."""
        value = self._get(name, REQUIRED)
        if value is REQUIRED:
            return (1.0,) * length
        is_list = isinstance(value, list) and all(
            isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) and x > 0 for x in value
        )
        if not is_list or len(value) != length:
            got = f"{len(value)} of them" if is_list else repr(value)
            self.problem(name, f"must be a list of {length} positive numbers, got {got}")
            return (1.0,) * length
        return tuple(float(x) for x in value)

    def problem(self, name: str, text: str) -> None:
        self.problems.append(f"{self._prefix}{self._names.get(name, name)} {text}")

    def _get(self, name: str, default: Any) -> Any:
        own = self._names.get(name, name)
        value = None if own is None else self.data.get(own)
        if value is None:
            if default is REQUIRED:
                self.problem(name, "is null" if own in self.data else "is missing")
            return default
        return value
