"""Arrays that requests give by name: the declared shapes, dtypes and defaults, and rows of many requests. NumPy only.

The engine holds one array [S, *shape] for each name, of S slots; a request's arrays become a row of each when it gets a
slot (`engine.programs.paged.write_arrays`). An engine that declares none has none.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.checks import did_you_mean

DTYPES = ("float32", "int32", "uint32", "bool")


@dataclass(frozen=True, eq=False)
class RequestArray:
    """The declaration of an array that each request may give.

    Attributes:
      shape: of one request's array, () for a number. dtype: float32, int32, uint32 or bool.
      default: of requests that give none: a number for all elements, or an array of the shape.

    Raises TypeError or ValueError for a shape, dtype or default that cannot be.
    """

    shape: tuple[int, ...] = ()
    dtype: Any = "float32"
    default: Any = 0

    def __post_init__(self) -> None:
        shape: Any = (self.shape,) if isinstance(self.shape, int) else self.shape
        if not isinstance(shape, (tuple, list)) or not all(type(size) is int and size > 0 for size in shape):
            raise ValueError(f"the shape of an array is positive integers such as (151936,), got {self.shape!r:.60}")
        object.__setattr__(self, "shape", tuple(shape))
        try:
            name = np.dtype(self.dtype).name
        except TypeError:
            name = repr(self.dtype)
        if name not in DTYPES:
            raise ValueError(f"the dtype of an array is one of {', '.join(DTYPES)}, got {name:.60}")
        object.__setattr__(self, "dtype", np.dtype(name))
        default = self._converted(self.default, "the default")
        if default.shape not in ((), self.shape):
            raise ValueError(f"the default has shape {list(default.shape)}, the array has {list(self.shape)}")
        object.__setattr__(self, "default", _frozen(np.broadcast_to(default, self.shape)))

    def checked(self, value: Any, what: str) -> np.ndarray:
        """A request's array, copied unless nobody can change it. Python numbers and lists take the dtype; arrays must
        have it. Raises ValueError, with `what`, for another shape or dtype, and for NaN."""
        array = self._converted(value, what)
        if array.shape != self.shape:
            raise ValueError(f"{what} has shape {list(array.shape)}, and is declared with {list(self.shape)}")
        return _frozen(array)

    def _converted(self, value: Any, what: str) -> np.ndarray:
        dtype: Any = self.dtype
        try:
            array = np.asarray(value)
        except ValueError:
            raise ValueError(f"{what} is no array of numbers: {value!r:.60}") from None
        is_python = not hasattr(value, "dtype") and array.dtype.kind in "biuf"
        can_be = np.can_cast(array.dtype, dtype, "same_kind") or (dtype.kind == "u" and array.dtype.kind == "i")
        if array.dtype != dtype and not (is_python and can_be):
            raise ValueError(f"{what} has dtype {array.dtype}, and is declared with {dtype}")
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise ValueError(f"{what} has NaN at {np.argwhere(np.isnan(array))[0].tolist()}")
        with np.errstate(over="ignore"):
            converted = array.astype(dtype, copy=False)
        is_kept = np.isinf(converted) == np.isinf(array) if dtype.kind == "f" else converted == array
        if not np.all(is_kept):
            raise ValueError(f"{what} has numbers from {array.min()} to {array.max()}, too large for {dtype}")
        return converted


RequestArrays = Mapping[str, RequestArray]


def check_arrays(specs: RequestArrays, given: Mapping[str, Any] | None, of: str) -> dict[str, np.ndarray]:
    """The arrays that a request gives, checked and copied. `of` says who declares arrays, such as "processors".

    Raises ValueError for a name that is not declared, with the nearest one, and as `RequestArray.checked`; TypeError
    for what is no mapping.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f'arrays must be a mapping such as {{"name": array}}, got {type(given).__name__}')
    for name in given:
        if name not in specs:
            known = f": they are {', '.join(specs)}" if specs else ": none is"
            raise ValueError(f"no array {name!r:.60} is declared by {of}{did_you_mean(name, specs, otherwise=known)}")
    return {name: specs[name].checked(value, f"array {name!r}") for name, value in given.items()}


def default_rows(specs: RequestArrays, num_slots: int) -> dict[str, np.ndarray]:
    """The arrays [S, *shape] of slots whose requests give none."""
    return {name: np.repeat(spec.default[None], num_slots, axis=0) for name, spec in specs.items()}


def row_of(specs: RequestArrays, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows [1, *shape] of one request: its checked arrays, and the defaults of the others."""
    return {name: given.get(name, spec.default)[None] for name, spec in specs.items()}


def to_plain(arrays: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Arrays as JSON values, bit for bit."""

    def plain(array: np.ndarray) -> dict[str, Any]:
        content = base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
        return {"dtype": array.dtype.name, "shape": list(array.shape), "base64": content}

    return {name: plain(array) for name, array in arrays.items()}


def from_plain(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The inverse. Raises ValueError, with the name, for what is none."""
    read = {}
    for name, plain in arrays.items():
        try:
            dtype, content = np.dtype(plain["dtype"]), base64.b64decode(plain["base64"], validate=True)
            read[name] = np.frombuffer(content, dtype.newbyteorder("<")).astype(dtype).reshape(plain["shape"])
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"array {name!r:.60} is damaged: {error}") from None
    return read


def shared(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays for many requests, copied once: each request then takes them as they are."""
    return {name: _frozen(np.asarray(value)) if hasattr(value, "dtype") else value for name, value in arrays.items()}


def _frozen(array: np.ndarray) -> np.ndarray:
    if array.base is None and not array.flags.writeable:
        return array
    array = np.array(array)
    array.flags.writeable = False
    return array
