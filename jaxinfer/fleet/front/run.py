"""Runs the front: the socket, signals, draining."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable

import uvloop

from jaxinfer.fleet.front.app import FrontApp
from jaxinfer.fleet.front.options import FrontOptions
from jaxinfer.fleet.front.replicas import ReplicaSet
from jaxinfer.server.listening import listen, uvicorn_for
from jaxinfer.server.options import ServerOptions

_LOG = logging.getLogger("jaxinfer.fleet.front")
_POLL_SECONDS = 0.05


def run_front(options: FrontOptions, on_listening: Callable[[str], None] = lambda url: None) -> int:
    """Serves until a signal comes; returns the exit code. Raises OSError for an address that cannot be used."""
    listener = listen(options.host, options.port, options.send_timeout)
    host, port = listener.getsockname()[:2]
    on_listening(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_front(options, listener))
    finally:
        listener.close()
    return 0


async def serve_front(options: FrontOptions, listener: socket.socket, stopping: asyncio.Event | None = None) -> None:
    """Serves at a listening socket until a signal comes, or `stopping` is set; a second signal ends it at once."""
    stopping, num_signals, loop = stopping or asyncio.Event(), 0, asyncio.get_running_loop()

    def on_signal() -> None:
        nonlocal num_signals
        num_signals += 1
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):  # not in the main thread
            loop.add_signal_handler(number, on_signal)
    replicas = ReplicaSet(options)
    app = FrontApp(options, replicas)
    limits = ServerOptions(max_connections=options.max_connections, send_timeout=options.send_timeout)
    server = uvicorn_for(app, limits)
    watching, serving = asyncio.create_task(replicas.watch()), asyncio.create_task(server.serve([listener]))
    try:
        await asyncio.wait((asyncio.create_task(stopping.wait()), serving, watching), return_when="FIRST_COMPLETED")
        app.is_draining = True
        deadline = loop.time() + options.drain_timeout
        if app.num_running:
            _LOG.info(
                "%d requests have %g s to end; a second signal ends at once", app.num_running, options.drain_timeout
            )
        while app.num_running and num_signals < 2 and loop.time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        server.should_exit = True
        await serving
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
