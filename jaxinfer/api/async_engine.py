"""Many clients, one engine: requests as async iterators over an engine that runs in a thread of its own."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxinfer.api.arguments import as_one_of, as_prompts, takes_other_names
from jaxinfer.api.embedding import best_first
from jaxinfer.api.live_weights import UPDATE_MODES, UpdateMode, check_how, check_version
from jaxinfer.api.llm import LLM
from jaxinfer.engine.adapter_slots import LoadedAdapter
from jaxinfer.engine.request import (
    DEFAULT_REQUEST_OPTIONS,
    Prompt,
    Request,
    RequestOptions,
    RequestOutput,
    SequenceState,
    StreamDelta,
)
from jaxinfer.engine.results import RequestJob, VectorJob
from jaxinfer.engine.scheduler import QueueFullError
from jaxinfer.loading import LiveModel
from jaxinfer.models import Params
from jaxinfer.models.adapter import Adapter
from jaxinfer.parallel import hosts
from jaxinfer.sampling import SamplingParams

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

MAX_PENDING_BYTES = 2**20  # that a reader may be behind
TOKEN_BYTES = 8  # of a token id on its way to a reader


class EngineDeadError(RuntimeError):
    """The engine's thread has ended: by `close`, or by the error that is this one's cause."""


class AsyncEngine:
    """Serves many requests at once from one event loop or several.

    Args:
      model: as for `LLM`.
      **options: as for `LLM`. `max_waiting` bounds the queue (default 1,024): a request beyond it raises
        QueueFullError. `steps_per_dispatch` is 1 by default, so that tokens come one by one.

    Close it, or use it in `async with`: running requests then end with finish_reason "abort".
    """

    def __init__(self, model: str | Path | LiveModel, **options: Any):
        if (others := hosts.current()) is not None:
            raise ValueError(f"an AsyncEngine runs on one host, and this is one of {others.count}")
        self.llm = LLM(model, **{"max_waiting": 1024, "steps_per_dispatch": 1, **options})
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._readers: dict[SequenceState, _Reader] = {}  # of unfinished answers; touched by the engine's thread only
        self._to_wake: list[_Reader] = []  # that have got something in this step
        self._death: BaseException | None = None
        self._is_closed = self._is_paused = False
        self._is_stopped = False  # nothing is computed; touched by the engine's thread only, as the next two
        self._when_idle: list[tuple[Callable[[], None], concurrent.futures.Future]] = []  # wait for no request
        self._held: dict[_Reader, None] = {}  # whose requests wait for these calls
        self._lock = threading.Lock()  # of being closed against commands that still come
        self._thread = threading.Thread(target=self._run, name="jaxinfer engine", daemon=True)
        self._thread.start()
        # A thread that still runs programs while Python shuts down may abort the process.
        atexit.register(self._stop)

    @takes_other_names
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        adapter: str | None = None,
        arrays: Mapping[str, Any] | None = None,
        steering: Mapping[int, Any] | None = None,
        tapped_layers: Sequence[int] = (),
    ) -> AsyncIterator[StreamDelta]:
        """Yields what is added to the request's answers; the last delta has the whole output. `adapter` is the name of
        a loaded one, `arrays` are those of processors, `steering` and `tapped_layers` as of `LLM.generate`.

        A slow reader gets several tokens in one delta; the request of a reader that is 1 MiB behind is aborted. Leaving
        the loop early, or cancelling the task, aborts the request and frees what it holds.

        Raises ValueError or TypeError for what cannot be served, QueueFullError where too many wait, EngineDeadError
        where the engine is closed or has failed.
        """
        options = RequestOptions(priority, timeout, cache_salt, adapter, arrays, steering, tapped_layers)
        request = await self.prepare(prompt, params, options)
        reader = self._start(request)
        try:
            while not reader.is_done:
                for delta in await reader.read():
                    yield delta
        finally:
            self._leave(reader)

    async def load_adapter(self, name: str, adapter: str | Path | Adapter, **options: Any) -> LoadedAdapter:
        """As `LLM.load_adapter`, in a thread: requests go on."""
        self._check_alive()
        return await asyncio.to_thread(self.llm.load_adapter, name, adapter, **options)

    async def unload_adapter(self, name: str) -> None:
        """As `LLM.unload_adapter`."""
        self.llm.unload_adapter(name)

    async def pause(self, mode: UpdateMode = "keep") -> None:
        """Computes nothing until `resume`, and takes new requests, which wait. Pausing twice is harmless.

        Args:
          mode: of the requests that there are: "keep" keeps them as they are, after the step that runs; "wait" ends
            them first; "abort" aborts them.
        """
        as_one_of("mode", mode, UPDATE_MODES)

        def stop() -> None:
            if mode == "abort":
                self._abort_all()
            self._is_paused = True

        await self._in_engine(stop, drains=mode == "wait")

    def resume(self) -> None:
        """Goes on with the requests, unless an update of the weights has not ended. Harmless if none was paused."""

        def go_on() -> None:
            self._is_paused = False

        self._send(go_on)

    async def update_params(self, params: Params | str | Path, *, mode: UpdateMode = "wait", **options: Any) -> str:
        """As `LLM.update_params`: requests that come meanwhile wait."""
        check_how(mode, options.get("kv", "recompute"))
        check_version(options.get("version"))

        def update() -> str:
            if mode == "abort":
                self.llm.check_update(draft=options.get("draft", False))  # before requests end for nothing
                self._abort_all()
            return self.llm.update_params(params, mode="keep", **options)

        return await self._in_engine(update, drains=mode == "wait")

    async def begin_update(self, **options: Any) -> None:
        """As `LLM.begin_update` with mode="keep"."""
        await self._in_engine(lambda: self.llm.begin_update(mode="keep", **options))

    async def write_update(self, params: Params | str | Path, **options: Any) -> None:
        """As `LLM.write_update`."""
        await self._in_engine(lambda: self.llm.write_update(params, **options))

    async def finish_update(self, version: str | None = None, **options: Any) -> str:
        """As `LLM.finish_update`."""
        return await self._in_engine(lambda: self.llm.finish_update(version, **options))

    async def sleep(self, **options: Any) -> None:
        """As `LLM.sleep`: requests wait until `wake_up`."""
        await self._in_engine(lambda: self.llm.sleep(**options))

    async def wake_up(self, **options: Any) -> None:
        """As `LLM.wake_up`."""
        await self._in_engine(lambda: self.llm.wake_up(**options))

    async def _in_engine(self, call: Callable[[], T], *, drains: bool = False) -> T:
        """Calls `call` between two steps of the engine, with `drains` when no request is left; returns its result.
        Requests that come meanwhile wait. A caller that leaves does not interrupt it."""
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                result.set_result(call())
            except Exception as error:
                result.set_exception(error)

        def drain() -> None:
            if self._is_stopped and self.llm.engine.has_work:
                told = f"{self.why_not_ready}: what runs would never end; mode='keep' and mode='abort' do not wait"
                result.set_exception(RuntimeError(told))
            else:
                self._when_idle.append((run, result))

        self._send(drain if drains else run)
        return await asyncio.shield(asyncio.wrap_future(result))

    @property
    def why_not_ready(self) -> str | None:
        """The reason why requests wait, whatever their number; None where they are computed."""
        return self.why_stopped or ("answers are paused" if self._is_paused else None)

    @property
    def why_stopped(self) -> str | None:
        """The reason why nothing can be computed, paused or not; None where it can."""
        return next((why for engine in self.llm.engine.engines if (why := engine.why_stopped) is not None), None)

    @property
    def is_paused(self) -> bool:
        """True between `pause` and `resume`."""
        return self._is_paused

    async def embed(self, texts: Prompt | Sequence[Prompt], **options: Any) -> np.ndarray:
        """As `LLM.embed`, beside other requests. Cancelling it frees what it holds."""
        prompts = as_prompts(texts, "text")
        return await self._result(lambda: self.llm.embedder.embed(prompts, **options))

    async def relevance(self, queries: str | Sequence[str], documents: Sequence[str], **options: Any) -> np.ndarray:
        """As `LLM.relevance`, beside other requests."""
        asked = [queries] if isinstance(queries, str) else queries
        return await self._result(lambda: self.llm.embedder.relevance(asked, documents, **options))

    async def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, **options: Any
    ) -> list[tuple[int, float]]:
        """As `LLM.rerank`, beside other requests."""
        return best_first(await self.relevance(query, documents, **options), top_n)

    async def _result(self, make: Callable[[], VectorJob]) -> np.ndarray:
        self._check_alive()
        job = await asyncio.to_thread(make)
        return job.result(await self.run_job(job))

    async def run_job(self, job: RequestJob) -> list[RequestOutput]:
        """The outputs of a job's requests, of which twice max_seqs at most wait or run at once."""
        room = asyncio.Semaphore(2 * self.llm.engine.spec.max_seqs)

        async def run(request: Request) -> RequestOutput:
            async with room:
                reader = self._start(request)
                output = None
                try:
                    while not reader.is_done:
                        output = (await reader.read())[-1].output
                finally:
                    self._leave(reader)
            if output is None:
                raise EngineDeadError("the engine is closed")
            return output

        tasks = [asyncio.ensure_future(run(request)) for request in job.requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions = DEFAULT_REQUEST_OPTIONS,
        *,
        what: str = "the prompt",
    ) -> Request:
        """`LLM.prepare` in a thread: a checked and tokenized request for `submit`. Raises as `generate`."""
        self._check_alive()
        # Not in the event loop: a long text takes a while to tokenize.
        try:
            return await asyncio.to_thread(self.llm.prepare, prompt, params, options, what=what)
        except RuntimeError:
            self._check_alive()  # it may have been closed meanwhile
            raise

    async def submit(self, request: Request) -> "AnswerStream":
        """Queues a prepared request; returns when the engine has taken it. Raises QueueFullError or EngineDeadError."""
        stream = AnswerStream(self, self._start(request))
        try:
            await stream._reader.taken()
        except BaseException:
            stream.abort()
            raise
        return stream

    def _start(self, request: Request) -> "_Reader":
        reader = _Reader(request, asyncio.get_running_loop())
        self._send(lambda: self._add(reader))
        return reader

    def _leave(self, reader: "_Reader") -> None:
        if not reader.is_done:
            self._send_quietly(lambda: self._abort(reader, "its reader has left"))

    def compile_ahead(self) -> threading.Thread:
        """Compiles, in a thread, every program that a request can need, while requests are served; `LLM.warm_up` does
        so before. Closing the engine ends it after the program that is being compiled: the thread is a daemon."""

        def run() -> None:
            try:
                self.llm.engine.compile_ahead(lambda: not self.is_alive)
            except Exception:
                if self.is_alive:  # else its arrays have gone
                    _LOG.exception("programs could not be compiled ahead; requests compile what they need")

        thread = threading.Thread(target=run, name="jaxinfer compile", daemon=True)
        thread.start()
        return thread

    @property
    def is_alive(self) -> bool:
        """True while requests can be served."""
        return self._death is None and not self._is_closed

    async def close(self) -> None:
        """Aborts what runs, ends the thread, frees the memory. Closing twice is harmless."""
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        if is_first:
            self._commands.put(None)
        self._thread.join()
        atexit.unregister(self._stop)

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _send(self, command: Callable[[], None]) -> None:
        with self._lock:
            self._check_alive()
            self._commands.put(command)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise _dead(self._death) from self._death
        if self._is_closed:
            raise EngineDeadError("the engine is closed")

    def _send_quietly(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self.is_alive:
                self._commands.put(command)

    # In the engine's thread.

    def _run(self) -> None:
        try:
            while self._take_commands():
                self.llm.step()
                self._deliver_progress()
        except BaseException as error:  # whatever it is, the readers must not wait for ever
            _LOG.critical("the engine has failed", exc_info=error)
            self._death = error
        finally:
            self._end()

    def _take_commands(self) -> bool:
        """Runs the commands that have come, and waits for one without work or while it is paused; False when the engine
        is to be closed."""
        while True:
            if self._when_idle and not self.llm.engine.has_work:
                waiting, self._when_idle = self._when_idle, []
                for call, _ in waiting:
                    call()
                self._add_held()
                self._after_command()
            is_idle = self._is_stopped or not self.llm.engine.has_work
            if not is_idle and self._commands.empty():
                return True
            command = self._commands.get()
            if command is None:
                return False
            command()
            self._after_command()

    def _after_command(self) -> None:
        self._is_stopped = self.why_not_ready is not None
        self._deliver_progress()  # an update commits what was in flight

    def _deliver_progress(self) -> None:
        for answer in self.llm.client.take_progress(self._readers):
            self._deliver(answer)
        self._wake_readers()

    def _add(self, reader: "_Reader") -> None:
        if reader.has_left:
            return
        if self._when_idle:
            most = self.llm.engine.spec.options.max_waiting
            if most is not None and len(self._held) >= most:
                reader.fail(QueueFullError(f"{len(self._held)} requests wait already, the limit is max_waiting={most}"))
            else:
                self._held[reader] = None
            return
        try:
            reader.answers = self.llm.submit(reader.request)
        except Exception as error:  # this request's own, of whatever type: the others go on
            reader.fail(error)
            return
        self._readers |= dict.fromkeys(reader.answers, reader)
        reader.take()

    def _add_held(self) -> None:
        held, self._held = self._held, {}
        for reader in held:
            self._add(reader)

    def _abort_all(self) -> None:
        waiting, self._when_idle = self._when_idle, []
        self._add_held()
        self._when_idle = waiting
        for reader in dict.fromkeys(self._readers.values()):
            self._abort(reader, "all requests were aborted")

    def _deliver(self, answer: SequenceState) -> None:
        if (reader := self._readers.get(answer)) is None:  # aborted with another answer of its request
            return
        try:
            delta = self.llm.advance(answer)
            if answer.is_finished:
                del self._readers[answer]
            if delta.text or delta.token_ids or answer.is_finished:
                output = self._output(reader)
                reader.put(delta if output is None else replace(delta, output=output))
                self._to_wake.append(reader)
        except Exception as error:
            self._fail(reader, error)
            return
        if (behind := reader.num_pending_bytes) > MAX_PENDING_BYTES:
            self._abort(reader, f"its reader is {behind:,} bytes behind, {MAX_PENDING_BYTES:,} are allowed")

    def _wake_readers(self) -> None:
        """Wakes each event loop once, whatever the number of its readers that have got something."""
        readers, self._to_wake = self._to_wake, []
        loops: dict[asyncio.AbstractEventLoop, list[_Reader]] = {}
        for reader in readers:
            loops.setdefault(reader.loop, []).append(reader)
        for loop, others in loops.items():
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(_arrive, others)

    def _abort(self, reader: "_Reader", why: str) -> None:
        reader.has_left |= not reader.answers  # its request may not be queued yet
        self._held.pop(reader, None)
        for answer in reader.answers:
            if self._readers.pop(answer, None) is not None:
                self.llm.client.abort([answer], why)
                reader.put(replace(self.llm.advance(answer), output=self._output(reader)))
                reader.wake()

    def _fail(self, reader: "_Reader", error: Exception) -> None:
        """Ends one request whose own processing failed; the others go on."""
        for answer in reader.answers:
            self._readers.pop(answer, None)
        self.llm.client.abort(reader.answers)
        reader.fail(error)

    def _output(self, reader: "_Reader") -> RequestOutput | None:
        """The whole request once all of its answers were delivered."""
        if any(answer in self._readers for answer in reader.answers):
            return None
        return self.llm.collect(reader.answers)

    def _end(self) -> None:
        """Ends all waiting: every reader and every command gets an answer."""
        with self._lock:
            self._is_closed = True
        try:
            self._wake_readers()
            waiting, self._when_idle = self._when_idle, []
            for _, result in waiting:
                result.set_exception(EngineDeadError("the engine is closed"))
            self._end_command(self._add_held)
            while not self._commands.empty():
                command = self._commands.get()
                if command is not None:
                    self._end_command(command)
            for reader in list(self._readers.values()):
                if self._death is None:
                    self._end_reader(reader)
                else:
                    error = _dead(self._death)
                    error.__cause__ = self._death
                    reader.fail(error)
        finally:
            self._readers.clear()
            self.llm.close()

    def _end_command(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception:  # the others are ended all the same
            _LOG.exception("a command failed while the engine ended")

    def _end_reader(self, reader: "_Reader") -> None:
        try:
            self._abort(reader, "the engine was closed")
        except Exception as error:
            reader.fail(error)


def _dead(death: BaseException) -> EngineDeadError:
    return EngineDeadError(f"the engine has failed: {type(death).__name__}: {death}")


class AnswerStream:
    """The deltas of a request that `AsyncEngine.submit` has queued, as `AsyncEngine.generate` yields them. A reader
    that stops before the end calls `abort`."""

    def __init__(self, engine: AsyncEngine, reader: "_Reader"):
        self._engine, self._reader = engine, reader

    @property
    def is_done(self) -> bool:
        """True once all was read."""
        return self._reader.is_done

    def read(self) -> Coroutine[Any, Any, list[StreamDelta]]:
        """Waits for what is new, one delta for each answer that has something. Raises what the request failed with."""
        return self._reader.read()

    def abort(self) -> None:
        """Ends the request and frees what it holds, unless it has ended."""
        self._engine._leave(self._reader)


class _Reader:
    """One request's deltas between the engine's thread, which puts, and an event loop, which reads.

    What a slow reader has not taken is merged, one delta for each answer.
    """

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop):
        self.request = request
        self.answers: list[SequenceState] = []  # once submitted
        self.is_done = self.has_left = False
        self.loop, self._taken = loop, asyncio.Event()
        self._has_arrived = False  # this and the waiter are touched in the event loop only
        self._waiter: asyncio.Future[None] | None = None
        self._lock = threading.Lock()
        self._pending: dict[int, StreamDelta] = {}
        self._error: BaseException | None = None
        self.num_pending_bytes = 0

    def put(self, delta: StreamDelta) -> None:
        """Adds what is new. The reader is to be woken then."""
        with self._lock:
            earlier = self._pending.pop(delta.index, None)
            merged = delta if earlier is None else earlier.merged(delta)
            self._pending[delta.index] = merged
            self.num_pending_bytes += len(delta.text.encode()) + TOKEN_BYTES * len(delta.token_ids)

    def wake(self) -> None:
        """Something has been put."""
        self._call(self.arrive)

    def take(self) -> None:
        """The request is queued."""
        self._call(self._taken.set)

    async def taken(self) -> None:
        """Waits until the request is queued; raises the error for which it was not."""
        await self._taken.wait()
        if self._error is not None:
            self.is_done = True
            raise self._error

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
        self._call(self._taken.set)
        self._call(self.arrive)

    async def read(self) -> list[StreamDelta]:
        """Waits for something new; raises what the request failed with."""
        if not self._has_arrived:
            self._waiter = self.loop.create_future()
            await self._waiter
        self._has_arrived = False
        with self._lock:
            deltas, self._pending, self.num_pending_bytes = list(self._pending.values()), {}, 0
            error = self._error
        if error is not None:
            self.is_done = True
            raise error
        if len(deltas) > 1:  # the one with the whole output is the last
            deltas.sort(key=lambda delta: delta.output is not None)
        self.is_done = bool(deltas) and deltas[-1].output is not None
        return deltas

    def arrive(self) -> None:
        """Something has been put. In the event loop."""
        self._has_arrived = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the reader's event loop is closed
            self.loop.call_soon_threadsafe(function)


def _arrive(readers: list[_Reader]) -> None:
    for reader in readers:
        reader.arrive()
