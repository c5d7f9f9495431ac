"""Runs the server: the socket, the loading of the model, signals, draining, and the exit code."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import uvloop

from jaxinfer import progress
from jaxinfer.api.async_engine import AsyncEngine
from jaxinfer.extras import install_hint
from jaxinfer.server.api_error import unavailable
from jaxinfer.server.app import make_app
from jaxinfer.server.auth import Keys, read_admin_keys
from jaxinfer.server.catalogue import locate, paths_of
from jaxinfer.server.listening import FLUSH_SECONDS, QuietUvicorn, listen, uvicorn_for
from jaxinfer.server.models import ModelSource, OneModel
from jaxinfer.server.names import public_name
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.service import Service

if TYPE_CHECKING:
    from jaxinfer.server.kv_events import KVEvents
    from jaxinfer.server.tracing import RequestTracer

_LOG = logging.getLogger("jaxinfer.server")
_POLL_SECONDS = 0.1

_OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_ENGINE_THREADS = ("jaxinfer engine", "jaxinfer-compile")  # that run a request's programs, and compile for them
_COMPILED_AFTER = 1.0  # seconds without a program: several follow one another
_LOOPBACK = "127.0.0.1"

OK, FAILED = 0, 1


def run_server(
    options: ServerOptions,
    name: str,
    open_engine: Callable[[], AsyncEngine],
    *,
    model: str = "",
    on_listening: Callable[[str], None] = lambda url: None,
    on_ready: Callable[[Service], None] = lambda service: None,
) -> int:
    """Serves one model, as `run_service`; `open_engine` loads it, in a thread.

    Args:
      name: of the model in requests, beside that of the options, which answers have. model: what is loaded; "" for the
        model of that name.
    """
    model = model or name
    names = tuple(dict.fromkeys((options.served_model_name or name, name)))
    paths = paths_of(model, locate(model))
    events = None if options.kv_events is None else _open_events(options)

    def open_with_events() -> AsyncEngine:
        engine = open_engine()
        if events is not None:
            events.follow(engine.llm.engine.engines)
        return engine

    try:
        source = ModelSource(names, public_name(model), lambda _: open_with_events(), given=model, paths=paths)
        service = Service(options, names[0], OneModel(source))
        service.prefix_names = None if events is None else events.names
        return run_service(service, names[:1], on_listening=on_listening, on_ready=on_ready)
    finally:
        if events is not None:
            events.close()


def _open_events(options: ServerOptions) -> "KVEvents":
    """The sockets of events of cached blocks. Raises ImportError without the extra, OSError for an address in use."""
    try:
        from jaxinfer.server.kv_events import KVEvents
    except ImportError as error:
        raise ImportError(f"kv_events needs {error.name}: {install_hint('events')}", name=error.name) from None
    return KVEvents(options)


def run_service(
    service: Service,
    first: Sequence[str] = (),
    *,
    on_listening: Callable[[str], None] = lambda url: None,
    on_ready: Callable[[Service], None] = lambda service: None,
) -> int:
    """Serves until a signal comes; returns the exit code: 1 where a first model could not be loaded, or the only one's
    engine died.

    The server listens before the models named `first` are loaded, so that an address in use is known at once; `/ready`
    is 503 until then.

    Raises OSError, ValueError for an address or a file of keys that cannot be used, ImportError for traces without the
    extra `tracing`, before anything is loaded.
    """
    options = service.options
    keys = None if options.api_keys is None else Keys.read(options.api_keys)
    has_admins = options.adapter_routes or options.weight_routes
    admin_keys = read_admin_keys(options.admin_keys, os.environ) if has_admins else None
    server = _Server(service, keys, admin_keys, first, on_ready)
    tracer = _tracer(options, service.models.default_name or "")
    listeners = [listen(options.host, options.port, options.send_timeout)]
    if options.weight_routes:
        try:
            listeners.append(listen(_LOOPBACK, options.admin_port, options.send_timeout))
        except OSError:
            listeners[0].close()
            raise
    host, port = listeners[0].getsockname()[:2]
    on_listening(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    for listener in listeners[1:]:
        _LOG.info("routes of administrators are at http://%s:%d", *listener.getsockname()[:2])
    if tracer is not None:
        service.on_finish = tracer.trace
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.run(listeners))
    finally:
        for listener in listeners:
            listener.close()
        if tracer is not None:
            tracer.close()
    if any(thread.is_alive() for thread in service.models.compiling):  # a compiler that outlives Python aborts
        sys.stderr.flush()
        os._exit(server.exit_code)
    if server.error is not None:
        raise server.error
    return server.exit_code


def _tracer(options: ServerOptions, name: str) -> "RequestTracer | None":
    """The maker of traces, where they are wanted. Raises ImportError without the extra, if a flag asks for them; the
    environment variables may be meant for other programs."""
    if options.otlp_endpoint is None and not any(os.environ.get(variable) for variable in _OTLP_VARIABLES):
        return None
    try:
        from jaxinfer.server.tracing import open_tracer
    except ImportError as error:
        told = f"traces need {error.name}: {install_hint('tracing')}"
        if options.otlp_endpoint is None:
            _LOG.warning("%s; there are none", told)
            return None
        raise ImportError(told, name=error.name) from None
    return open_tracer(options.otlp_endpoint, name)


class _Server:
    """One run. `error`: why a first model could not be loaded."""

    def __init__(
        self,
        service: Service,
        keys: Keys | None,
        admin_keys: Keys | None,
        first: Sequence[str],
        on_ready: Callable[[Service], None],
    ):
        self.error: BaseException | None = None
        self.exit_code = OK
        self._service, self._first, self._on_ready = service, first, on_ready
        self._stopping = asyncio.Event()  # a signal has come, or loading has failed
        self._num_signals = 0
        self._uvicorns = [make_uvicorn(service, keys, admin_keys)]
        if service.options.weight_routes:
            self._uvicorns.append(make_uvicorn(service, keys, admin_keys, for_admins=True))

    async def run(self, listeners: Sequence[socket.socket]) -> None:
        """Serves at the listener of clients and, if there is one, that of administrators."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, self._on_signal)
        pairs = zip(self._uvicorns, listeners, strict=True)
        serving = asyncio.gather(*(server.serve([listener]) for server, listener in pairs))
        loading = asyncio.create_task(self._load())
        compilations = CompilationLog(self._service)
        try:
            while not self._stopping.is_set() and not serving.done():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _POLL_SECONDS)
                compilations.look()
                if not self._service.is_healthy:
                    _LOG.error("the engine has died; the server ends")
                    self.exit_code = FAILED
                    break
            await self._drain()
        finally:
            self._service.state = "stopped"
            for server in self._uvicorns:
                server.should_exit = True
            await serving
            # Loading cannot be interrupted, and nothing would be lost.
            if (not loading.done() or self._service.models.is_loading) and self._num_signals:
                os._exit(OK)
            await loading
            await self._service.models.close()

    async def _load(self) -> None:
        service = self._service
        for name in self._first:
            try:
                (await service.models.acquire(name)).release()
            except Exception as error:
                if self._stopping.is_set():
                    return
                self.error, self.exit_code = error.__cause__ or error, FAILED
                self._stopping.set()
                return
        if not self._stopping.is_set():
            service.state = "ready"
            self._on_ready(service)

    def _on_signal(self) -> None:
        """The first signal drains, a second one ends at once."""
        self._num_signals += 1
        self._stopping.set()

    async def _drain(self) -> None:
        """Waits for running answers, at most `drain_timeout` seconds; those that are left are ended with an error."""
        service = self._service
        if service.state == "ready":
            service.state = "draining"
        service.models.refuse_waiting(unavailable("the server is shutting down and takes no new requests", 5))
        if service.is_one and service.default.state == "ready" and not service.default.is_dead:
            service.default.engine.resume()  # answers that are paused would never end
        if service.generations:
            seconds = service.options.drain_timeout
            _LOG.info("%d answers have %g s to end; a second signal ends at once", len(service.generations), seconds)
        deadline = asyncio.get_running_loop().time() + service.options.drain_timeout
        while service.generations and self._num_signals < 2 and service.is_healthy:
            if asyncio.get_running_loop().time() > deadline:
                _LOG.warning("%d answers had not ended in time and are aborted", len(service.generations))
                break
            await asyncio.sleep(_POLL_SECONDS / 2)
        if service.generations:
            with contextlib.suppress(TimeoutError):  # a load that runs cannot be interrupted
                async with asyncio.timeout(FLUSH_SECONDS):
                    await service.models.close()  # every reader gets an abort, which its client is told
            deadline = asyncio.get_running_loop().time() + FLUSH_SECONDS
            while service.generations and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(_POLL_SECONDS / 4)


class CompilationLog:
    """Says in the log when answers wait for a program that is compiled at their request, and for how long they did.

    Programs that are compiled ahead of requests, in other threads, are not mentioned.
    """

    def __init__(self, service: Service):
        self._service = service
        self._since: float | None = None  # when programs were first seen to be compiled
        self._seen = 0.0  # when they were last
        self._is_said = False
        progress.follow_compiler()

    def look(self) -> None:
        """Called every `_POLL_SECONDS`. What takes less than one of them is not mentioned."""
        now = time.monotonic()
        # What loads a model compiles in threads of the second kind too.
        threads = _ENGINE_THREADS[:1] if self._service.models.is_loading else _ENGINE_THREADS
        if self._service.generations and (programs := progress.programs(threads)):
            if self._since is None:
                self._since = now
            elif not self._is_said:
                _LOG.info("answers wait for programs to be compiled: %s", programs)
                self._is_said = True
            self._seen = now
        elif self._since is not None and now - self._seen > _COMPILED_AFTER:
            if self._is_said:
                _LOG.info("compiled in %.1f s", self._seen - self._since)
            self._since, self._is_said = None, False


def make_uvicorn(
    service: Service, keys: Keys | None = None, admin_keys: Keys | None = None, *, for_admins: bool = False
) -> QuietUvicorn:
    """uvicorn for a service, to be given a listening socket. Arguments and errors as of `make_app`."""
    return uvicorn_for(make_app(service, keys, admin_keys, for_admins=for_admins), service.options)
