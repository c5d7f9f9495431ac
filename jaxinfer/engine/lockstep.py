"""Several hosts, one scheduler: the engines of the other hosts repeat what those of host 0 run on their devices.

An engine touches its devices in operations only: methods that take host values, marked with `operation`. On host 0 each
call is published before it runs; the other hosts read the calls in the same order and run the same methods. Whatever
depends on time or chance is decided on host 0, once.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import jax

from jaxinfer.cache.paged import PromptPages
from jaxinfer.engine.programs.compaction import CompactionWork
from jaxinfer.engine.programs.grammar import GrammarRows, TableBlock
from jaxinfer.engine.request import (
    AdapterUse,
    AnswerOrigin,
    CompletionOutput,
    Logprob,
    Prompt,
    Request,
    RequestOptions,
    RequestOutput,
    RequestTimings,
    Score,
    StreamDelta,
    WeightsSpan,
)
from jaxinfer.engine.scoring import ScoreWork
from jaxinfer.grammar.structured import StructuredOutputs
from jaxinfer.parallel.hosts import Hosts
from jaxinfer.parallel.wire import Codec
from jaxinfer.sampling import SamplingBatch, SamplingParams, SamplingState
from jaxinfer.speculative import SpeculationStats

CLASSES = (
    AdapterUse,
    AnswerOrigin,
    CompletionOutput,
    CompactionWork,
    GrammarRows,
    Logprob,
    PromptPages,
    RequestOutput,
    RequestTimings,
    SamplingBatch,
    SamplingParams,
    SamplingState,
    Score,
    ScoreWork,
    SpeculationStats,
    StreamDelta,
    StructuredOutputs,
    TableBlock,
    WeightsSpan,
)
_RAISED = (ValueError, TypeError, RuntimeError, FloatingPointError, FileNotFoundError, OSError, KeyboardInterrupt)
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Key = TypeVar("Key")


class Operated(Protocol):
    """Base class of objects with operations. `publish` sends a call to the other hosts; None on a single host."""

    publish: Callable[[str, Sequence[Any]], None] | None


Engine = TypeVar("Engine", bound=Operated)


def operation(method: Callable[Concatenate[Engine, P], R]) -> Callable[Concatenate[Engine, P], R]:
    """Marks a method that runs something on the devices. Its arguments, all by position, are values that a `Codec`
    carries."""
    method.is_operation = True  # type: ignore[attr-defined]
    return method


def _published(engine: Operated, method: Callable[..., R]) -> Callable[..., R]:
    """An operation of an engine that is sent to the other hosts first."""

    @functools.wraps(method)
    def run(*arguments: Any) -> R:
        if engine.publish is not None:
            engine.publish(method.__name__, arguments)
        return method(engine, *arguments)

    return run


class Lockstep:
    """Keeps the engines of all hosts in step. Every host makes the same calls of `lead_or_follow`, in the same order.

    Args:
      engines: of this host, in the order of all hosts. classes: whose instances may be results, beside `CLASSES`.
    """

    def __init__(self, hosts: Hosts, engines: Sequence[Operated], classes: Sequence[type] = ()):
        self.hosts, self._engines = hosts, list(engines)
        self._codec = Codec((*CLASSES, *classes))
        self._depth = 0  # calls inside a call
        self._numbers = itertools.count()
        if hosts.is_leader:
            for number, engine in enumerate(self._engines):
                engine.publish = functools.partial(self._publish_operation, number)
                for name in dir(type(engine)):
                    if getattr(method := getattr(type(engine), name), "is_operation", False):
                        setattr(engine, name, _published(engine, method))

    @property
    def is_inside(self) -> bool:
        """True if a call of `lead_or_follow` is in progress."""
        return self._depth > 0

    def lead_or_follow(self, name: str, work: Callable[[], T]) -> T:
        """Runs `work` on host 0; the others follow its operations, and return or raise the same."""
        if self.is_inside:
            return work()
        number = next(self._numbers)
        if not self.hosts.is_leader:
            return self._follow(number, name)[1]
        with self._leading():
            try:
                result = work()
                self._publish("end", number, name, result)
            except BaseException as error:
                self._fail(error, number, name)
                raise
        return result

    def each(self, name: str, items: Callable[[], Iterable[T]]) -> Iterator[T]:
        """As `lead_or_follow` for an iterator: what host 0 gets from `items`, everyone gets, one by one."""
        if self.is_inside:
            yield from items()
            return
        number = next(self._numbers)
        if not self.hosts.is_leader:
            while (message := self._follow(number, name))[0] == "item":
                yield message[1]
            return
        iterator = iter(items())
        try:
            while True:
                with self._leading():
                    try:
                        item = next(iterator)
                        self._publish("item", number, name, item)
                    except StopIteration:
                        self._publish("end", number, name, None)
                        return
                    except BaseException as error:
                        self._fail(error, number, name)
                        raise
                yield item
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def each_request(
        self,
        requests: Iterator[tuple[Key, Prompt | Request, SamplingParams, RequestOptions]],
        run: Callable[
            [Iterator[tuple[Any, Prompt | Request, SamplingParams, RequestOptions]]],
            Iterator[tuple[Any, RequestOutput | ValueError]],
        ],
    ) -> Iterator[tuple[Key, RequestOutput | ValueError]]:
        """`Client.generate_each`, which is `run`, on host 0. Keys are what the caller likes: the other hosts find them,
        by number, among requests of their own."""
        if self.is_inside:
            yield from run(requests)
            return
        keys: dict[int, Key] = {}
        numbers = itertools.count()

        def numbered() -> Iterator[tuple[int, Prompt | Request, SamplingParams, RequestOptions]]:
            for number, (key, prompt, params, options) in zip(numbers, requests, strict=False):
                keys[number] = key
                yield number, prompt, params, options

        def items() -> Iterator[tuple[int, RequestOutput | str]]:
            for number, result in run(numbered()):
                yield number, str(result) if isinstance(result, ValueError) else result

        taken = iter(()) if self.hosts.is_leader else numbered()
        for number, result in self.each("generate_each", items):
            while number not in keys and next(taken, None) is not None:
                pass
            if number not in keys:
                raise RuntimeError(f"host 0 has a request {number}, and this host has fewer")
            yield keys.pop(number), ValueError(result) if isinstance(result, str) else result

    # Host 0.

    def _publish_operation(self, engine: int, name: str, arguments: Sequence[Any]) -> None:
        self._publish("run", engine, name, tuple(arguments))

    def _publish(self, kind: str, number: int, name: str, value: Any) -> None:
        self.hosts.publish(self._codec.encode([kind, number, name, value]))

    @contextmanager
    def _leading(self) -> Iterator[None]:
        self._depth += 1
        try:
            with self.hosts.needing():
                yield
        finally:
            self._depth -= 1

    def _fail(self, error: BaseException, number: int, name: str) -> None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            self.hosts.await_verdict(error)
        kind = next((error_type.__name__ for error_type in _RAISED if isinstance(error, error_type)), "RuntimeError")
        self._publish("error", number, name, (kind, str(error) or type(error).__name__))

    # The others.

    def _follow(self, number: int, name: str) -> tuple[str, Any]:
        """Runs the operations of host 0 until this call ends or yields an item."""
        with self.hosts.needing():
            while True:
                kind, which, what, value = self._codec.decode(self.hosts.receive())
                if kind == "run":
                    self._repeat(which, what, value)
                    continue
                if (which, what) != (number, name):
                    message = (
                        f"host {self.hosts.index} called {name} where host 0 called {what}: every host must run the "
                        f"same program"
                    )
                    self.hosts.end(message)
                    raise RuntimeError(message)
                if kind == "error":
                    raise next(error_type for error_type in _RAISED if error_type.__name__ == value[0])(value[1])
                return kind, value

    def _repeat(self, engine: int, name: str, arguments: Sequence[Any]) -> None:
        try:
            method = getattr(type(self._engines[engine]), name)
            if not getattr(method, "is_operation", False):
                raise ValueError(f"{name} is no operation")
            method(self._engines[engine], *arguments)
        except Exception as error:
            if isinstance(error, jax.errors.JaxRuntimeError):
                self.hosts.await_verdict(error)
            self.hosts.end(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            raise
