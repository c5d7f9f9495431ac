"""API keys: read from a file, compared in constant time."""

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

_MIN_CHARS = 8


class Keys:
    """API keys with their names. Only their digests are kept."""

    def __init__(self, keys: dict[str, str]):
        self._digests = [(hashlib.sha256(key.encode()).digest(), name) for key, name in keys.items()]

    @classmethod
    def read(cls, path: Path) -> "Keys":
        """Reads a file with a key in each line, and a name after a space if it should have one; # begins a comment.

        Raises ValueError, with the line, for a key that is short or given twice; OSError for an unreadable file.
        """
        keys: dict[str, str] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            key, _, name = line.partition("#")[0].strip().partition(" ")
            if not key:
                continue
            if len(key) < _MIN_CHARS or not key.isascii():
                raise ValueError(f"{path}, line {number}: a key has at least {_MIN_CHARS} ASCII characters")
            if key in keys:
                raise ValueError(f"{path}, line {number}: this key was given before")
            keys[key] = name.strip() or f"key-{len(keys) + 1}"
        if not keys:
            raise ValueError(f"{path} has no keys")
        return cls(keys)

    def name_of(self, key: bytes) -> str | None:
        """The name of a key; None for an unknown one. Takes as long for any."""
        given, found = hashlib.sha256(key).digest(), None
        for digest, name in self._digests:
            if hmac.compare_digest(given, digest):
                found = name
        return found


def key_in(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """The key that a request's headers give: Authorization: Bearer KEY, or x-api-key: KEY."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return None
