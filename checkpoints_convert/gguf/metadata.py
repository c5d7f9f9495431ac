"""Typed reading of a GGUF file's metadata: every problem is noted, so that a user sees all of them at once."""

import math
from typing import Any

import numpy as np

from checkpoints_convert.gguf.index import GGUFIndex

REQUIRED: Any = object()
_MAX_LISTED = 2**16  # entries of an array with a value per layer


class Metadata:
    """Reads keys below `prefix`; what is wrong is appended to `problems`, and reading goes on with a harmless value.

    `seen` has the names that were asked for, which are read wherever they are there. `widest` is the largest dimension
    of any tensor: a count or width above it is a mistake that is refused before anything of that size is computed with.
    """

    def __init__(self, index: GGUFIndex, prefix: str, problems: list[str]):
        self.index, self.prefix, self.problems = index, prefix, problems
        self.seen: set[str] = set()
        self.widest = max((max(entry.shape) for entry in index.tensors.values()), default=0)

    def has(self, name: str) -> bool:
        return self._key(name) in self.index.keys

    def is_zero(self, name: str) -> bool:
        """Whether the key is there and 0, which in many of them turns something off."""
        value = self.index.scalar(self._key(name))
        if value != 0 or isinstance(value, bool):
            return False
        self.seen.add(name)
        return True

    def expect(self, name: str, *known: bool | int | float) -> None:
        """A key that must be one of these where it is there, since the model computes nothing else."""
        self.seen.add(name)
        value = self.index.scalar(self._key(name))
        if self.has(name) and not any(value is not None and math.isclose(value, one, rel_tol=1e-5) for one in known):
            wanted = " or ".join(f"{one:.6g}" if type(one) is float else str(one) for one in known)
            self.problem(name, f"is {self.index.describe(self._key(name))}, only {wanted} is read")

    def integer(self, name: str, default: Any = REQUIRED, *, is_width: bool = True) -> Any:
        """A positive int; of an array with a value per layer, the one all of them have."""
        value = self._scalar(name, default)
        if value is default or value is REQUIRED:
            return 1 if value is REQUIRED else default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return self._wrong(name, f"must be a positive integer, it is {self.index.describe(self._key(name))}", 1)
        if is_width and value > self.widest:
            return self._wrong(name, f"is {value}, but no tensor has a dimension above {self.widest}", 1)
        return value

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        """A positive finite number."""
        value = self._scalar(name, default)
        if value is default or value is REQUIRED:
            return 1.0 if value is REQUIRED else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            return self._wrong(name, f"must be a positive number, it is {self.index.describe(self._key(name))}", 1.0)
        single = np.float32(value)
        # Most are stored in single precision: the shortest decimal is what they were before.
        return float(str(single)) if float(single) == value else float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._scalar(name, default)
        if isinstance(value, bool):
            return value
        return self._wrong(name, f"must be true or false, it is {self.index.describe(self._key(name))}", default)

    def text(self, name: str, default: str) -> str:
        self.seen.add(name)
        key = self._key(name)
        if key not in self.index.keys:
            return default
        value = self.index.text(key)
        return value if value is not None else self._wrong(name, "must be a string", default)

    def flags(self, name: str, length: int) -> list[bool] | None:
        """An array of booleans, one per layer; None where the key is missing."""
        self.seen.add(name)
        key = self._key(name)
        if key not in self.index.keys:
            return None
        found = self.index.numbers(key)
        if found is None or len(found) != length or not set(found.tolist()) <= {0, 1}:
            return self._wrong(name, f"must be {length} booleans, it is {self.index.describe(key)}", None)
        return [bool(flag) for flag in found]

    def problem(self, name: str, text: str) -> None:
        self.problems.append(f"{self._key(name)} {text}")

    def _scalar(self, name: str, default: Any) -> Any:
        self.seen.add(name)
        key = self._key(name)
        if key not in self.index.keys:
            if default is REQUIRED:
                self.problem(name, "is missing")
            return default
        count = self.index.count(key)
        if count is None:
            return self.index.scalar(key)
        values = self.index.numbers(key) if 0 < count <= _MAX_LISTED else None
        distinct = set() if values is None else set(values.tolist())
        if len(distinct) != 1:
            differing = "" if not distinct else f", with values from {min(distinct)} to {max(distinct)}"
            found = f"{self.index.describe(key)}{differing}"
            self.problem(name, f"is {found}: layers that differ in it are not supported")
            return default if default is not REQUIRED else REQUIRED
        return distinct.pop()

    def _wrong(self, name: str, text: str, harmless: Any) -> Any:
        self.problem(name, text)
        return harmless

    def _key(self, name: str) -> str:
        return f"{self.prefix}{name}"
