"""API keys: read from a file, compared in constant time."""

import base64
import binascii
import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

_LOG = logging.getLogger("jaxinfer.server")
_MIN_CHARS = 8
_COMMENT = re.compile(r"(^|\s)#.*")
OF_BROWSERS = (b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode")
"""Headers of requests that web pages send."""
ADMIN_KEY = "JAXINFER_ADMIN_KEY"
"""The environment variable that may hold one admin key."""


class Keys:
    """API keys with their names. Only their digests are kept."""

    def __init__(self, keys: dict[str, str]):
        self._digests = [(hashlib.sha256(key.encode()).digest(), name) for key, name in keys.items()]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for _, name in self._digests)

    @classmethod
    def read(cls, path: Path, kind: str = "key") -> "Keys":
        """Reads a file with a key in each line, and a name after a space if it should have one; by default it is
        `kind` and a number. # begins a comment, at the beginning of a line or after a space.

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
            if not _can_be_key(key):
                raise ValueError(f"{path}, line {number}: a key has at least {_MIN_CHARS} printable ASCII characters")
            if key in keys:
                raise ValueError(f"{path}, line {number}: this key was given before")
            keys[key] = rest[0] if rest else f"{kind}-{len(keys) + 1}"
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

    def check_apart(self, others: "Keys") -> None:
        """Raises ValueError where another set has one of these keys, or the name of one."""
        names = {name for digest, name in self._digests if digest in {other for other, _ in others._digests}}
        if names:
            raise ValueError(f"the admin key {', '.join(sorted(names))} is an API key too: each must be another one")
        if names := self.names & others.names:
            raise ValueError(f"an admin key and an API key are both named {', '.join(sorted(names))}")


def read_admin_keys(path: Path | None, variables: Mapping[str, str]) -> Keys:
    """Admin keys of a file, or the one of the environment. Raises as `Keys.read`, and ValueError without any."""
    if path is not None:
        return Keys.read(path, "admin")
    if not (key := variables.get(ADMIN_KEY, "")):
        told = "routes of administrators need an admin key: give admin_keys (--admin-keys FILE)"
        raise ValueError(f"{told}, or set {ADMIN_KEY}")
    if not _can_be_key(key) or " " in key:
        raise ValueError(f"{ADMIN_KEY}: a key has at least {_MIN_CHARS} printable ASCII characters without spaces")
    return Keys({key: "admin-1"})


def _can_be_key(text: str) -> bool:
    return len(text) >= _MIN_CHARS and text.isascii() and text.isprintable()


def key_in(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """The key that a request's headers give: Authorization: Bearer KEY, or x-api-key: KEY; without them the password of
    Authorization: Basic, which clients send whose server's URL is http://USER:KEY@HOST. Not that of a browser, which
    would add it to what pages of other sites send."""
    password = None
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
        if name == b"authorization" and value[:6].lower() == b"basic ":
            password = _password(value[6:].strip())
    return None if any(name in OF_BROWSERS for name, _ in headers) else password


def _password(encoded: bytes) -> bytes:
    """b"" where there is none."""
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
