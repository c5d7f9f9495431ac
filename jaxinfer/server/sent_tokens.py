"""Tokens that a front hands over: those of a begun stream, behind the body of its request."""

import array
import re

from jaxinfer.server.api_error import refused

SENT_TOKENS = "x-jaxinfer-sent-tokens"
"""A header: how many token ids of each choice, as 12,5, stand behind the body, each with 4 bytes, the lowest first."""
TELL_TOKENS = "x-jaxinfer-tell-tokens"
"""A header: comments in the stream shall tell the token ids of its choices."""


def split_sent_tokens(data: bytes, counts: str) -> tuple[bytes, list[tuple[int, ...]]]:
    """A body without the token ids behind it, and these. Raises APIError 400."""
    if re.fullmatch(r"\d{1,9}(,\d{1,9}){0,4095}", counts) is None:
        raise refused(SENT_TOKENS, f"{counts!r:.80} are no numbers of tokens such as 12,5")
    numbers = [int(number) for number in counts.split(",")]
    size = 4 * sum(numbers)
    if size > len(data):
        raise refused(SENT_TOKENS, f"{sum(numbers):,} tokens need {size:,} bytes, and the body has {len(data):,}")
    ids, start, sent = array.array("i", data[len(data) - size :]), 0, []
    for number in numbers:
        sent.append(tuple(ids[start : start + number]))
        start += number
    return data[: len(data) - size], sent
