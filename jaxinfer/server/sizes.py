"""Limits on what a body holds, beside its bytes.

The time to read a body, and its memory, follow the number of its JSON values: 30 MB of text are read in 50 ms, 30 MB of
empty lists in seconds, during which no other client is answered.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from jaxinfer.openai.bodies import CompletionRequest
from jaxinfer.server.api_error import APIError, refused

MAX_FIELD = 1 << 16  # characters and values of a field beside the prompt
_SPARE_VALUES = 1 << 16
_VALUES_PER_TOKEN = 4  # commas and brackets of a text count too, and one token may hold several
_LARGE_BYTES, _LARGE_VALUES = 1 << 18, 1 << 12
_CONTENT = frozenset(
    ("messages", "prompt", "input", "tools", "system", "instructions", "tokens", "allowed_token_ids")
)  # that have limits of their own

Result = TypeVar("Result")

# One thread: Python code of several would only take turns, and the event loop would wait for all of them.
_WORKER = ThreadPoolExecutor(1, "jaxinfer large bodies")


def max_values(kind: type[msgspec.Struct], max_model_len: int, max_n: int) -> int:
    """How many values a body may have: enough for every prompt that fits the model."""
    per_token = max(max_n, _VALUES_PER_TOKEN) if kind is CompletionRequest else _VALUES_PER_TOKEN
    return _SPARE_VALUES + per_token * max_model_len


def count_values(part: bytes) -> int:
    """At least the number of values in a part of a body: all but the first follow a comma or a bracket."""
    return part.count(b",") + part.count(b"[") + part.count(b"{")


def is_large(num_bytes: int, num_values: int) -> bool:
    """True if reading a body takes so long that it is not done in the event loop."""
    return num_bytes > _LARGE_BYTES or num_values > _LARGE_VALUES


async def off_loop(work: Callable[[], Result]) -> Result:
    """Runs the work for a large body in the thread for them."""
    return await asyncio.get_running_loop().run_in_executor(_WORKER, work)


def weight(value: Any, enough: float = float("inf")) -> int:
    """Characters of all strings and names and the number of all values, without recursion: bodies may be nested deeply.
    Stops counting at `enough`."""
    total, left = 0, [value]
    while left and total <= enough:
        item = left.pop()
        total += len(item) if isinstance(item, str) else 1
        if isinstance(item, (Mapping, list, tuple)):
            if total + len(item) > enough:
                return total + len(item)
            left += item
            if isinstance(item, Mapping):
                left += item.values()
    return total


def check_fields(body: msgspec.Struct) -> None:
    """Raises APIError for a large field beside the prompt: a request that waits would hold its memory."""
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, (str, Mapping, list)) and name not in _CONTENT and weight(value, MAX_FIELD) > MAX_FIELD:
            raise refused(name, f"{name} has more than {MAX_FIELD:,} characters and values")


def check_length(num_items: int, what: str, max_model_len: int) -> None:
    """Raises APIError for more messages, or token ids, than the model takes tokens."""
    if num_items > max_model_len:
        message = f"{num_items:,} {what} are more than max_model_len={max_model_len} tokens"
        raise APIError(400, message, code="context_length_exceeded")
