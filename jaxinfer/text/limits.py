"""Limits of one chat-template rendering: CPU time, and the size of every value.

Operations that make a large value out of small ones (`*`, `**`, `%`, `replace`, padding, ...) are checked
*before* they run: one C call such as `"a" * 10**9` cannot be interrupted. The clock is the CPU time of the
rendering thread, so a busy neighbour cannot make a request fail.
"""

import contextlib
import gc
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

MAX_WIDTH = 4096
"""Largest width, indent or precision a template may pass to a padding operation, in characters."""

_MAX_INT_BITS = 8192

METER: "ContextVar[Meter | None]" = ContextVar("jaxinfer_template_meter", default=None)


class ChatTemplateError(ValueError):
    """A chat template is invalid, refused these messages, or cannot be rendered safely."""


class ChatTemplateLimitError(ChatTemplateError):
    """A chat template took too long, or would have written too much."""


class Meter:
    """Bounds one rendering: `max_chars` for any value it makes, `time_limit` seconds of CPU time in all, without that
    of the garbage collector, which in a process that holds models may take a second at a time."""

    def __init__(self, *, max_chars: int, time_limit: float):
        self.max_chars = max_chars
        self.time_limit = time_limit
        self._deadline = time.thread_time() + time_limit
        self._num_ticks = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The rendering of this thread, in the block."""
        thread = threading.get_ident()

        def collecting(phase: str, facts: dict[str, int]) -> None:
            if threading.get_ident() == thread:
                self._deadline += time.thread_time() if phase == "stop" else -time.thread_time()

        gc.callbacks.append(collecting)
        token = METER.set(self)
        try:
            yield
        finally:
            METER.reset(token)
            gc.callbacks.remove(collecting)

    def tick(self) -> None:
        """Count one operation; look at the clock at every eighth (reading it costs 0.7 microseconds)."""
        self._num_ticks += 1
        if not self._num_ticks & 7 and time.thread_time() > self._deadline:
            raise ChatTemplateLimitError(
                f"the chat template did not finish within {self.time_limit * 1000:.0f} ms of CPU time"
            )

    def check_size(self, size: int) -> None:
        """Raise unless a string of `size` characters (or a list of as many items) may be made."""
        if size > self.max_chars:
            raise ChatTemplateLimitError(
                f"the chat template would make a value of size {size}; the limit is {self.max_chars}"
            )

    def check_deep(self, value: Any) -> None:
        """Bound what `str(value)`, JSON or a comparison would visit; a list held twice counts twice."""
        if type(value) is str:
            return self.check_size(len(value))
        total = 0
        stack = [value]
        while stack:
            item = stack.pop()
            total += len(item) if isinstance(item, str) else 1
            self.check_size(total)
            self.tick()
            if isinstance(item, dict):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, (list, tuple, set, frozenset)):
                stack.extend(item)


def current_meter() -> Meter:
    """The meter of the rendering in progress."""
    meter = METER.get()
    if meter is None:
        raise ChatTemplateError("a chat template operation ran outside of a rendering")
    return meter


def bounded_concat(pieces: Iterable[str]) -> str:
    """`"".join(pieces)`, stopped as soon as it is too long."""
    meter = METER.get()
    if meter is None:  # constants joined while compiling
        return "".join(pieces)
    kept, total = [], 0
    for piece in pieces:
        total += len(piece)
        meter.check_size(total)
        kept.append(piece)
    return "".join(kept)


def bounded_list(meter: Meter, values: Iterable[Any]) -> list[Any]:
    """`list(values)`, stopped as soon as it is too long."""
    kept: list[Any] = []
    for value in values:
        kept.append(value)
        meter.tick()
        meter.check_size(len(kept))
    return kept


def check_bits(num_bits: int) -> None:
    """Raise unless an integer of `num_bits` bits may be computed."""
    if num_bits > _MAX_INT_BITS:
        raise ChatTemplateLimitError(f"the chat template computes an integer of {num_bits} bits")


def check_product(meter: Meter, left: Any, right: Any) -> None:
    """Check `left * right`."""
    if isinstance(left, int) and isinstance(right, int):
        return check_bits(left.bit_length() + right.bit_length())
    for value, count in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(count, int):
            meter.check_size(len(value) * max(count, 0))


def check_percent(meter: Meter, template: str, values: Any) -> None:
    """Check `template % values`."""
    meter.check_deep(values)
    widths = [int(digits) if len(digits) <= 4 else 1 << 62 for digits in re.findall(r"\d+", template)]
    if "*" in template:
        widths.append(1 << 62)
    num_fields = template.count("%")
    if num_fields and num_fields * max(widths, default=0) > meter.max_chars:
        raise ChatTemplateLimitError(f"the chat template formats to an unbounded width: {template[:80]!r}")
    meter.check_size(len(template) + num_fields * len(str(values)))


def check_string_method(meter: Meter, owner: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Check `owner.name(*args)`; returns the arguments to call it with (a generator becomes a list)."""
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        check_replace(meter, owner, args[0], args[1])
    elif name == "join" and args:
        if not isinstance(args[0], (str, list, tuple, dict)) and hasattr(args[0], "__iter__"):
            args = (bounded_list(meter, args[0]),)
        meter.check_deep(args[0])
        if hasattr(args[0], "__len__"):
            meter.check_size(len(owner) * len(args[0]))
    elif name in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        check_width(args)
        if name == "expandtabs":
            meter.check_size(len(owner) + owner.count("\t") * max((abs(int(n)) for n in args), default=8))
    elif name in ("encode", "translate"):
        raise ChatTemplateLimitError(f"a chat template may not call str.{name}")
    return args


def check_replace(meter: Meter, text: str, old: str, new: str) -> None:
    """Check `text.replace(old, new)`."""
    meter.check_size(len(text) + text.count(old) * max(len(new) - len(old), 0))


def check_width(args: Iterable[Any]) -> None:
    """Raise if one of the arguments is a width no prompt needs."""
    for value in args:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise ChatTemplateLimitError(f"the chat template pads to {value}; the limit is {MAX_WIDTH}")


def check_padding(meter: Meter, name: str, value: Any, arguments: list[Any]) -> None:
    """Check the filters `indent`, `wordwrap` and `urlize`, which write something per line or per word."""
    text = value if isinstance(value, str) else ""
    longest = max((len(item) for item in arguments if isinstance(item, str)), default=0)
    if name == "indent":
        width = next((item for item in arguments if type(item) is int), 4)
        meter.check_size(len(text) + (text.count("\n") + 1) * max(width, longest))
    elif name in ("wordwrap", "urlize"):
        meter.check_size((len(text) + 1) * (longest + 1))
