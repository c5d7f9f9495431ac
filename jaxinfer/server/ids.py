"""Ids of requests and of answers."""

import re
import secrets
import time
from collections.abc import Iterable

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's `x-request-id`, if it is short and of safe characters; else a new one."""
    given = next((value for name, value in headers if name == b"x-request-id"), b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else f"req-{new_answer_id()}"


def new_answer_id() -> str:
    """24 hexadecimal digits: the time in seconds, and a random number."""
    return f"{int(time.time()) & 0xFFFFFFFF:08x}{secrets.token_hex(8)}"
