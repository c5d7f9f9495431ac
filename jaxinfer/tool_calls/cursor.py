"""Reads an answer's text while it arrives.

Readers are generators that yield where they need more text, so that they are written as for a whole text and give the
same result however the text was cut. Each character is looked at a bounded number of times: what was read is never
read again, and the text that waits to be read stays short.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
Reader = Generator[None, None, Result]
"""Yields where it needs more text; returns its result."""

_SPACES = re.compile(r"\s*")
CLOSING = {"(": ")", "[": "]", "{": "}"}


class Cursor:
    """The text that has arrived and a place in it.

    Attributes:
      text, at: the text that is kept, and the index of the next character. is_end: no text follows.
    """

    def __init__(self) -> None:
        self.text, self.at, self.is_end = "", 0, False
        self._taken: list[str] = []

    def add(self, text: str, is_end: bool) -> None:
        """Appends text to what has arrived."""
        self.text, self.at = self.text[self.at :] + text, 0
        self.is_end = is_end

    def take(self, end: int) -> str:
        """Moves to the index `end` of the text; returns what was passed."""
        passed = self.text[self.at : end]
        self.at = end
        self._taken.append(passed)
        return passed

    def forget_taken(self) -> str:
        """All text taken since the last time, which is then forgotten."""
        taken = "".join(self._taken)
        self._taken.clear()
        return taken

    def mark(self) -> int:
        """A place to which `since` refers, until the taken text is forgotten."""
        return len(self._taken)

    def since(self, mark: int) -> str:
        """The text taken since a place."""
        return "".join(self._taken[mark:])

    def peek(self) -> Reader[str]:
        """The next character, not taken; "" at the end."""
        while self.at >= len(self.text):
            if self.is_end:
                return ""
            yield
        return self.text[self.at]

    def match(self, pattern: re.Pattern[str]) -> Reader[str]:
        """Takes the longest run that `pattern` matches: one repeated class of characters, such as `[a-z]*`, so that it
        may be cut anywhere."""
        parts = []
        while True:
            match = pattern.match(self.text, self.at)
            parts.append(self.take(match.end() if match else self.at))
            if self.at < len(self.text) or self.is_end:
                return "".join(parts)
            yield

    def spaces(self) -> Reader[str]:
        """Takes white space."""
        return (yield from self.match(_SPACES))

    def literal(self, *texts: str) -> Reader[str]:
        """Takes the first of `texts` that stands next; "" if none does. No text may be a prefix of a later one."""
        while True:
            for text in texts:
                if self.text.startswith(text, self.at):
                    return self.take(self.at + len(text))
            left = len(self.text) - self.at
            rest = self.text[self.at :] if left <= max(map(len, texts)) else None
            if self.is_end or rest is None or not any(text.startswith(rest) for text in texts):
                return ""
            yield

    def items(self, opening: str, read_item: Callable[[], Reader[str | None]]) -> Reader[tuple[list[str], bool] | None]:
        """Takes items with commas between them and the bracket that closes `opening`; returns the texts of the items,
        and whether a comma follows the last one. None at the first character that does not fit."""
        items: list[str] = []
        has_comma = True
        while True:
            yield from self.spaces()
            if (yield from self.literal(CLOSING[opening])):
                return items, has_comma and bool(items)
            item = (yield from read_item()) if has_comma else None
            if item is None:
                return None
            items.append(item)
            yield from self.spaces()
            has_comma = bool((yield from self.literal(",")))

    def until(self, *ends: str, limit: int | None = None) -> Reader[str | None]:
        """Takes what stands before the nearest of the texts `ends`; None where the answer ends before, or after more
        than `limit` characters."""
        parts: list[str] = []
        num_chars = 0
        while True:
            rest = max(map(len, ends)) - 1
            # Only `limit` characters are searched: many readers may start in one text, and their time together would be
            # quadratic.
            search_end = len(self.text) if limit is None else self.at + limit - num_chars + rest + 1
            places = [index for end in ends if (index := self.text.find(end, self.at, search_end)) >= 0]
            stop = min(places) if places else max(self.at, len(self.text) - rest)
            if limit is not None and num_chars + stop - self.at > limit:
                return None
            num_chars += stop - self.at
            parts.append(self.take(stop))
            if places:
                return "".join(parts)
            if self.is_end:
                self.take(len(self.text))
                return None
            yield


def finish(reader: Reader[Result]) -> Result:
    """The result of a reader whose whole text has arrived."""
    try:
        next(reader)
    except StopIteration as stop:
        return stop.value
    raise ValueError("the reader asks for more text although all of it has arrived")
