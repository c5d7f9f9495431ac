"""Progress of long work: a bar on a terminal or in a notebook, a line every 30 s in a log.

In a library whose standard error is a file nothing is shown, nor anywhere with JAXINFER_PROGRESS=0.
"""

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

REFRESH_SECONDS = 0.5  # between two drawings of a bar; a stage that ends sooner shows none
LOG_SECONDS = 30.0  # between two lines in a log
COMPILED_SECONDS = 0.2  # JAX's cache does not keep what compiles faster

# JAX's names of what it does for a program (jax._src.dispatch), and what to call it.
_COMPILED = "/jax/core/compile/backend_compile_duration"
_READ = "/jax/compilation_cache/cache_hits"
_COMPILER_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "tracing",
    _COMPILED: "compiling",
}


class Stage:
    """A stage of work that may take seconds or hours. Only the innermost stage is shown.

    Args:
      description: what is done, such as "loading demo".
      total: of what `update` counts; None shows the time alone.
      unit: of the counts, in the singular; "B" for bytes.
      initial: what earlier runs have done.
      show: True, also in a log; False; None shows it on a terminal, in a notebook, and in the log of a command.
    """

    def __init__(
        self, description: str, total: int | None = None, unit: str = "", *, initial: int = 0, show: bool | None = None
    ):
        self.description, self.total, self.unit = description, total, unit
        self.num_done = self._initial = initial
        self.began_at = time.monotonic()
        self._detail: str | Callable[[], str] = ""
        self._form = _form(show)
        self._bar: Any = None

    @property
    def seconds(self) -> float:
        """Since it began; never 0."""
        return max(time.monotonic() - self.began_at, 1e-9)

    def update(self, count: int = 1) -> None:
        """Counts what was done since the last call."""
        self.num_done += count

    def describe(self, detail: str | Callable[[], str]) -> None:
        """Shows what is done at present, or figures; a function is called whenever they are shown."""
        self._detail = detail

    def restart(self, description: str, total: int | None = None) -> None:
        """Begins the next part of the work in the same place."""
        with _display.lock:
            self.close()
            self.description, self.total, self._detail = description, total, ""
            self.num_done = self._initial = 0
            self.began_at = time.monotonic()

    def __enter__(self) -> "Stage":
        self.began_at = time.monotonic()
        if self._form is not None:
            _display.push(self)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._form is not None:
            _display.remove(self)

    # Called by the display, which holds its lock.

    @property
    def is_logged(self) -> bool:
        return self._form == "log"

    def draw(self, *, is_inner: bool) -> None:
        """Draws the bar."""
        if self._bar is None:
            self._bar = self._make_bar(keep=(self.total or 0) > 1 and not is_inner)
            self._bar.start_t -= self.seconds
        self._bar.n = self.num_done
        self._bar.set_postfix_str(self._now(), refresh=False)
        self._bar.refresh()

    def _make_bar(self, *, keep: bool) -> Any:
        if _in_notebook():
            from tqdm.auto import tqdm
        else:
            from tqdm import tqdm
        timed: dict[str, Any] = {} if self.total is not None else {"bar_format": "{desc}: {elapsed}{postfix}"}
        return tqdm(
            total=self.total,
            initial=self._initial,
            desc=self.description,
            unit=self.unit,
            unit_scale=self.unit == "B",
            leave=keep,
            disable=False,
            position=0,  # the stages around it are cleared
            dynamic_ncols=_has_width(),
            ncols=None if _has_width() else 80,
            mininterval=0,
            **timed,
        )

    def clear(self) -> None:
        """Removes the bar from the terminal until it is drawn again."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        """Draws the bar for the last time."""
        if self._bar is not None:
            self._bar.n = self.num_done
            self._bar.set_postfix_str(self._now(), refresh=False)
            self._bar.close()
            self._bar = None

    def line(self) -> str:
        """The stage as a line of a log."""
        from tqdm import tqdm

        elapsed = self.seconds
        parts = [tqdm.format_interval(elapsed)]
        if self.total is not None:
            is_bytes, rate = self.unit == "B", (self.num_done - self._initial) / elapsed
            done, total = (tqdm.format_sizeof(n, "B") if is_bytes else f"{n:,}" for n in (self.num_done, self.total))
            parts = [f"{done} of {total}" if is_bytes else f"{done} of {total} {self.unit}s", f"{parts[0]} so far"]
            if rate > 0:
                left = tqdm.format_interval(max(self.total - self.num_done, 0) / rate)
                parts += [
                    tqdm.format_sizeof(rate, "B/s") if is_bytes else f"{rate:,.3g} {self.unit}s/s",
                    f"{left} left",
                ]
        return f"{self.description}: " + ", ".join([*parts, *filter(None, [self._now()])])

    def _now(self) -> str:
        detail = self._detail() if callable(self._detail) else self._detail
        return ", ".join(filter(None, (detail, programs())))


@contextlib.contextmanager
def of_command(*, is_off: bool = False) -> Iterator[None]:
    """While the block runs, stages are those of a command: they are shown in a log too, or with `is_off` nowhere."""
    before = dict(_settings)
    hub_bars = os.environ.get(_NO_HUB_BARS)
    _settings.update(in_command=True, is_off=is_off)
    if is_off:
        os.environ[_NO_HUB_BARS] = "1"
    _display.logged_at = _display.idle_since = time.monotonic()
    try:
        yield
    finally:
        _settings.update(before)
        if is_off and hub_bars is None:
            del os.environ[_NO_HUB_BARS]


def is_shown() -> bool:
    """True if stages are shown as bars, unless they say otherwise."""
    return _form(None) == "bar"


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """While the block runs, which may write to standard error, no bar is there."""
    with _display.lock:
        if _display.stages:
            with _no_terminal:
                _display.stages[-1].clear()
        yield


# The terminal has gone, or a program has closed its standard error: work goes on.
_no_terminal = contextlib.suppress(OSError, ValueError)
_NO_HUB_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"  # of huggingface_hub, whose downloads have bars of their own
_settings = {"in_command": False, "is_off": False}


def _form(show: bool | None) -> str | None:
    """How a stage is shown: "bar", "log" or None."""
    is_off = _settings["is_off"] or os.environ.get("JAXINFER_PROGRESS") == "0"
    if show is False or (show is None and is_off) or sys.stderr is None or sys.stderr.closed:
        return None
    if sys.stderr.isatty() or _in_notebook():
        return "bar"
    return "log" if show or _settings["in_command"] else None


def _has_width() -> bool:
    """True if the terminal says how wide it is. Some that programs make say 0, and tqdm would cut off all text."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError, AttributeError):
        return False


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class _Display:
    """The stages that are shown, from the outermost to the innermost, and the thread that shows the last of them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.stages: list[Stage] = []
        self.logged_at = self.idle_since = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def push(self, stage: Stage) -> None:
        with self.lock:
            if self.stages:
                if self.stages[-1].description == stage.description:
                    return  # the same work, which a command and what it calls both name
                with _no_terminal:
                    self.stages[-1].clear()
            self.stages.append(stage)
            if self._thread is None:
                # Only the time of stages counts for the next line of a log.
                self.logged_at += time.monotonic() - self.idle_since
                follow_compiler()
                self._ended = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._ended,), name="progress", daemon=True)
                self._thread.start()

    def remove(self, stage: Stage) -> None:
        thread = None
        with self.lock:
            if stage not in self.stages:
                return
            with _no_terminal:
                stage.close()
            self.stages.remove(stage)
            if not self.stages:
                thread, self._thread = self._thread, None
                self.idle_since = time.monotonic()
                self._ended.set()
        if thread is not None:
            thread.join()

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(REFRESH_SECONDS):
            follow_compiler()
            with self.lock, _no_terminal:
                if self.stages and not ended.is_set():
                    self._show(self.stages[-1])

    def _show(self, stage: Stage) -> None:
        now = time.monotonic()
        if not stage.is_logged:
            if stage.seconds >= REFRESH_SECONDS:
                stage.draw(is_inner=len(self.stages) > 1)
        elif now - self.logged_at >= LOG_SECONDS:
            self.logged_at = now
            print(stage.line(), file=sys.stderr, flush=True)


_display = _Display()

# By thread: what JAX traces or compiles there, the innermost last.
_programs: dict[int, list[str]] = {}


_num_compiled = 0  # since the first stage that was shown
_compile_seconds = 0.0
_reading: set[int] = set()  # threads that have found a program in JAX's cache


def num_compiled() -> int:
    """How many programs JAX has compiled since the first stage that was shown, each for over `COMPILED_SECONDS`."""
    return _num_compiled


def compile_seconds() -> float:
    """Seconds that JAX has spent compiling since `follow_compiler` was first called, added over threads; programs read
    from its cache count with the time of reading."""
    return _compile_seconds


def programs(threads: tuple[str, ...] = ("",)) -> str:
    """The programs that are traced and compiled, such as "compiling step", in threads whose names begin so, or ""."""
    named = {thread.ident for thread in threading.enumerate() if thread.name.startswith(threads)}
    latest = [running[-1] for ident, running in list(_programs.items()) if running and ident in named]
    return ", ".join(dict.fromkeys(latest))


def follow_compiler() -> None:
    """Makes `programs` know what JAX compiles, once JAX is imported."""
    if hasattr(sys.modules.get("jax.monitoring"), "register_scalar_listener"):
        _listen()


@cache
def _listen() -> None:
    from jax import monitoring

    def begun(event: str, value: float | int, **facts: object) -> None:
        if event in _COMPILER_EVENTS:
            name = re.sub(r"^jit[_(](.*?)\)?$", r"\1", str(facts.get("fun_name", "")))
            _programs.setdefault(threading.get_ident(), []).append(f"{_COMPILER_EVENTS[event]} {name}")

    def ended(event: str, duration_secs: float, **_: object) -> None:
        global _num_compiled, _compile_seconds
        if event == _COMPILED:
            _compile_seconds += duration_secs
            is_read = threading.get_ident() in _reading
            _reading.discard(threading.get_ident())
            _num_compiled += not is_read and duration_secs > COMPILED_SECONDS
        if event in _COMPILER_EVENTS and (running := _programs.get(threading.get_ident())):
            running.pop()
            if not running:
                _programs.pop(threading.get_ident(), None)

    def happened(event: str, **_: object) -> None:
        if event == _READ:  # before its duration
            _reading.add(threading.get_ident())

    # JAX sends a scalar when it begins, and a duration when it ends.
    monitoring.register_event_listener(happened)
    monitoring.register_scalar_listener(begun)
    monitoring.register_event_duration_secs_listener(ended)
