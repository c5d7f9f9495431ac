"""Calls of the `tokenizers` library, whose failures become ValueError.

It raises bare `Exception`, and where its Rust code panics a `PanicException`, which derives from `BaseException` and
would pass every `except Exception` on its way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import tokenizers

P = ParamSpec("P")
T = TypeVar("T")

_MAX_MESSAGE = 500  # characters; the library quotes values of the file, of any length
_PROBE = "Hello, wörld! 1,234 ﷺ 你好 🎉\n\n  x\t'll <|a|>\u200b\x00 İ e\u0301"


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Failures of the library become ValueError, with `what` before the reason."""
    try:
        yield
    except BaseException as error:
        if not (type(error) is Exception or is_panic(error)):
            raise
        raise ValueError(f"{what}: {_beginning(error)}") from None


def run(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function of the library. Raises ValueError where it fails."""
    with library_errors("the tokenizer failed"):
        return function(*args, **kwargs)


def check_works(backend: tokenizers.Tokenizer, name: Any, *, decodes_each_token: bool = False) -> None:
    """Raises ValueError if the tokenizer panics on a short text: later texts would do the same.

    Ordinary errors pass: a vocabulary may lack characters of this text. `decodes_each_token` tries them all.
    """
    for add_special_tokens in (False, True):
        _pass_panics(name, lambda: backend.encode(_PROBE, add_special_tokens=add_special_tokens))  # noqa: B023
    tokens = backend.get_vocab().values() if decodes_each_token else range(256)
    for ids in ([], *([token] for token in tokens)):
        _pass_panics(name, lambda: backend.decode(ids, skip_special_tokens=False))  # noqa: B023


def _pass_panics(name: Any, call: Callable[[], object]) -> None:
    try:
        call()
    except BaseException as error:
        if is_panic(error):
            raise ValueError(
                f"{name} is not a tokenizer that works: the library failed with: {_beginning(error)}"
            ) from None
        if not isinstance(error, Exception):
            raise


def is_panic(error: BaseException) -> bool:
    """True for a panic of Rust code: pyo3 makes their class at run time."""
    return type(error).__name__ == "PanicException"


def _beginning(error: BaseException) -> str:
    text = str(error)
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}... ({len(text)} characters)"
