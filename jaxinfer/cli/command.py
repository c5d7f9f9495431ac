"""Shared by all commands: dataclasses of options as flags, and errors as one sentence with an exit code."""

import contextlib
import dataclasses
import functools
import inspect
import os
import signal
import sys
import threading
import typing
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NoReturn

import typer

from jaxinfer import progress
from jaxinfer.options import Description

OK, ERROR, USAGE, PARTIAL, INTERRUPTED, BROKEN_PIPE, TERMINATED = 0, 1, 2, 3, 130, 141, 143
_SECONDS_TO_END = 4.0  # after SIGTERM; process managers wait for 10 before they kill


_NO_PROGRESS = inspect.Parameter(
    "no_progress",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--no-progress", metavar="", help="Show no progress: no bars, no lines in a log.")
    ],
)


class UsageError(Exception):
    """A wrong command line; the message says what to write instead."""


_has_sigterm = threading.Event()


@contextlib.contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """In the block SIGTERM raises KeyboardInterrupt in the main thread, which native code may delay. A process that has
    not ended after 4 seconds ends without cleaning up, which files survive: they survive kill -9."""
    is_done = threading.Event()

    def interrupt(number: int, frame: Any) -> None:
        _has_sigterm.set()
        raise KeyboardInterrupt

    def end_in_time() -> None:
        while received := os.read(reader, 1):
            if received[0] == signal.SIGTERM and not is_done.wait(_SECONDS_TO_END):
                _terminate()
        os.close(reader)

    def raise_again(unraisable: "sys.UnraisableHookArgs") -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt) and _has_sigterm.is_set():
            # It was raised in a destructor, where it is lost: it is raised again when that has ended.
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            sys.__unraisablehook__(unraisable)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    former = signal.signal(signal.SIGTERM, interrupt)
    former_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    former_hook, sys.unraisablehook = sys.unraisablehook, raise_again
    threading.Thread(target=end_in_time, name="jaxinfer-sigterm", daemon=True).start()
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        # Outside of a command's body, while its arguments are read, an interrupt has no message.
        if not _has_sigterm.is_set() or getattr(error, "code", INTERRUPTED) != INTERRUPTED:
            raise
        _terminate()
    finally:
        signal.signal(signal.SIGTERM, former)
        signal.set_wakeup_fd(former_writer)
        sys.unraisablehook = former_hook
        is_done.set()
        os.close(writer)
        _has_sigterm.clear()


def command(function: Callable[..., int | None]) -> Callable[..., None]:
    """Makes a function a command for typer.

    A parameter whose type is a dataclass of `jaxinfer.options` becomes one flag for each field, so that commands share
    groups of options. The function returns the exit code (None: 0); an exception is printed as one sentence.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if dataclasses.is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _options_of(hints[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    parameters.append(_NO_PROGRESS)

    @functools.wraps(function)
    def run(*, no_progress: bool = False, **values: Any) -> None:
        def call() -> int | None:
            arguments = {name: values[name] for name in hints if name in values}
            for name, group in groups.items():  # which may refuse their values
                arguments[name] = group(**{field.name: values[field.name] for field in dataclasses.fields(group)})
            return function(**arguments)

        with progress.of_command(is_off=no_progress):
            code = guarded(call)
        if code:
            raise typer.Exit(code)

    # Each paragraph on one line: typer would keep the line breaks of the source.
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    run.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def guarded(call: Callable[[], int | None]) -> int:
    """Runs a command's body; prints an error and returns the exit code."""
    try:
        with _plain_warnings():
            code = call() or OK
            sys.stdout.flush()
        return code
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except KeyboardInterrupt as error:
        return _interrupted(str(error))
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if is_interrupt(error):
            return _interrupted()
        if os.environ.get("JAXINFER_TRACEBACK", "0") not in ("", "0"):
            raise
        say(f"error: {sentence(error)}")
        from jaxinfer.sampling.params import SamplingParamsError

        return USAGE if isinstance(error, (UsageError, SamplingParamsError)) else ERROR


def _interrupted(note: str = "") -> int:
    if _has_sigterm.is_set():
        _terminate(note)
    _say_end("interrupted", note)
    return INTERRUPTED


def _terminate(note: str = "") -> NoReturn:
    """Ends the process at once. Threads of libraries and destructors would otherwise print what they could not do."""
    _say_end("terminated", note)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(TERMINATED)


def _say_end(what: str, note: str) -> None:
    line = f"{what}; {note}" if note else what
    say(f"\n{line}" if sys.stderr.isatty() else line)


@contextlib.contextmanager
def resumes(how: str) -> Iterator[None]:
    """If the block is interrupted, the message ends with "the same command continues" and `how`."""
    try:
        yield
    except BaseException as error:
        if not is_interrupt(error):
            raise
        raise KeyboardInterrupt(f"the same command continues {how}") from error


def is_interrupt(error: BaseException | None) -> bool:
    """Tells if Ctrl-C caused an error: directly, through another exception, or inside JAX's compiler, which raises an
    error of its own whose text names KeyboardInterrupt."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or (
            type(error).__module__.startswith("jax") and "KeyboardInterrupt" in str(error)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def sentence(error: BaseException) -> str:
    """An error as one sentence."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    message = str(error).strip()
    if isinstance(error, (ValueError, OSError, RuntimeError, TypeError, ImportError, UsageError, ArithmeticError)):
        if type(error).__module__.startswith("jax"):  # its messages go on for pages
            message = message.partition("\n")[0]
        return message or type(error).__name__
    return f"{type(error).__name__}: {message} (JAXINFER_TRACEBACK=1 shows where)"


def say(message: str) -> None:
    """Prints a line to standard error."""
    with contextlib.suppress(OSError), progress.hidden():
        print(message, file=sys.stderr, flush=True)


def _options_of(group: type) -> list[inspect.Parameter]:
    """The parameters for typer that a dataclass of options stands for."""
    hints = typing.get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=Annotated[hints[field.name], _typer_option(field, hints[field.name])],
        )
        for field in dataclasses.fields(group)
    ]


def _typer_option(field: "dataclasses.Field[Any]", hint: Any) -> Any:
    """The option as typer takes it; a switch that is off by default has no negative form."""
    about: Description = field.metadata["option"]
    text = about.help.removesuffix(".") + "; may be repeated." if about.is_repeated else about.help
    texts: dict[str, Any] = {"help": text, "rich_help_panel": about.group, "min": about.min, "max": about.max}
    if about.is_argument:
        return typer.Argument(metavar=about.metavar, **texts)
    is_switch = bool in (hint, *typing.get_args(hint))
    flags = about.flags or (("--" + field.name.replace("_", "-"),) if is_switch and field.default is False else ())
    return typer.Option(*flags, metavar="" if is_switch else about.metavar, **texts)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as a line of text, without the file and line of our code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *rest, **more: say(f"warning: {message}")
        yield
