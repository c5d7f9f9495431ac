"""API keys: read from a file, compared in constant time."""

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Sequence
from pathlib import Path

_LOG = logging.getLogger("jaxinfer.server")
_MIN_CHARS = 8
_COMMENT = re.compile(r"(^|\s)#.*")


class Keys:
    """API keys with their names. Only their digests are kept."""

    def __init__(self, keys: dict[str, str]):
        self._digests = [(hashlib.sha256(key.encode()).digest(), name) for key, name in keys.items()]

    @classmethod
    def read(cls, path: Path) -> "Keys":
        """Reads a file with a key in each line, and a name after a space if it should have one. # begins a comment, at
        the beginning of a line or after a space.

        Raises ValueError, with the line, for a key that is short or given twice; OSError for an unreadable file. Warns
        where other users of the machine may read it.
        """
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")  # some editors begin a file with a mark
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}") from None
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            _LOG.warning("%s can be read by other users: chmod 600 %s", path, path)
        keys: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            key, *rest = _COMMENT.sub("", line).strip().split(None, 1) or [""]
            if not key:
                continue
            if len(key) < _MIN_CHARS or not (key.isascii() and key.isprintable()):
                raise ValueError(f"{path}, line {number}: a key has at least {_MIN_CHARS} printable ASCII characters")
            if key in keys:
                raise ValueError(f"{path}, line {number}: this key was given before")
            keys[key] = rest[0] if rest else f"key-{len(keys) + 1}"
        if not keys:
            raise ValueError(f"{path} has no keys")
        return cls(keys)

    def name_of(self, key: bytes) -> str | None:
        """The name of a key; None for an unknown one. Takes as long for any."""
        given, known = hashlib.sha256(key).digest(), None
        for digest, name in self._digests:
            if hmac.compare_digest(given, digest):
                known = name
        return known


def key_in(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """The key that a request's headers give: Authorization: Bearer KEY, or x-api-key: KEY."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return None
