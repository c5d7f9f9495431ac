"""Serialization of messages between hosts: JSON, with raw bytes for arrays. No pickle."""

import dataclasses
import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

MIN_DEFLATED = 2**14  # bytes of an array to compress: rows over a vocabulary are mostly zeros
_TAG = "$"


class WireError(ValueError):
    """An invalid message, or a value of an unsupported type."""


class Codec:
    """Encodes None, booleans, numbers, strings, bytes, lists, tuples, dicts, NumPy arrays and scalars, and instances of
    the dataclasses given to the constructor.

    A message is the length of the header (8 bytes, little-endian), the header as JSON, and the bytes of the arrays;
    arrays of at least `MIN_DEFLATED` bytes are compressed.
    """

    def __init__(self, classes: Sequence[type] = ()):
        self._classes = {cls.__name__: cls for cls in classes}

    def encode(self, value: Any) -> bytes:
        """Raises WireError for a value of an unsupported type."""
        parts: list[bytes] = []
        header = json.dumps(self._packed(value, parts), separators=(",", ":")).encode()
        return b"".join([len(header).to_bytes(8, "little"), header, *parts])

    def decode(self, message: bytes) -> Any:
        """Inverse of `encode`. Raises WireError for an invalid message."""
        try:
            end = 8 + int.from_bytes(message[:8], "little")
            return self._unpacked(json.loads(message[8:end]), memoryview(message)[end:])
        except (KeyError, TypeError, IndexError, zlib.error, ValueError) as error:
            raise WireError(f"not a message of this codec: {error}") from error

    def _packed(self, value: Any, parts: list[bytes]) -> Any:
        if value is None or (isinstance(value, (bool, int, float, str)) and type(value).__module__ == "builtins"):
            return value
        if isinstance(value, bytes):
            return {_TAG: "bytes", "hex": value.hex()}
        if isinstance(value, list):
            return [self._packed(item, parts) for item in value]
        if isinstance(value, tuple):
            return {_TAG: "tuple", "items": [self._packed(item, parts) for item in value]}
        if isinstance(value, dict):
            return {_TAG: "dict", "items": [[self._packed(item, parts) for item in pair] for pair in value.items()]}
        if isinstance(value, (np.ndarray, np.generic)):
            return self._packed_array(np.asarray(value), isinstance(value, np.generic), parts)
        name = type(value).__name__
        if self._classes.get(name) is not type(value) or not dataclasses.is_dataclass(value):
            raise WireError(f"a {name} cannot be sent")
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {
            _TAG: "class",
            "name": name,
            "fields": {name: self._packed(getattr(value, name), parts) for name in fields},
        }

    def _packed_array(self, array: np.ndarray, is_scalar: bool, parts: list[bytes]) -> dict[str, Any]:
        if array.dtype.hasobject:
            raise WireError(f"an array of {array.dtype} cannot be sent")
        data = np.ascontiguousarray(array).tobytes()
        is_deflated = len(data) >= MIN_DEFLATED
        data = zlib.compress(data, 1) if is_deflated else data
        start = sum(map(len, parts))
        parts.append(data)
        shape = list(array.shape)
        return {
            _TAG: "array", "dtype": array.dtype.name, "shape": shape, "at": [start, start + len(data)],
            "deflated": is_deflated, "scalar": is_scalar,
        }  # fmt: skip

    def _unpacked(self, value: Any, data: memoryview) -> Any:
        if isinstance(value, list):
            return [self._unpacked(item, data) for item in value]
        if not isinstance(value, dict):
            return value
        kind = value[_TAG]
        if kind == "bytes":
            return bytes.fromhex(value["hex"])
        if kind == "tuple":
            return tuple(self._unpacked(item, data) for item in value["items"])
        if kind == "dict":
            return {self._unpacked(key, data): self._unpacked(item, data) for key, item in value["items"]}
        if kind == "class":
            fields = {name: self._unpacked(item, data) for name, item in value["fields"].items()}
            return self._classes[value["name"]](**fields)
        if kind != "array":
            raise WireError(f"unknown kind {kind!r}")
        start, end = value["at"]
        raw = zlib.decompress(data[start:end]) if value["deflated"] else bytes(data[start:end])
        array = np.frombuffer(raw, _dtype(value["dtype"])).reshape(value["shape"])
        return array[()] if value["scalar"] else array


def _dtype(name: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # bfloat16 and the like

        return np.dtype(getattr(ml_dtypes, name))
