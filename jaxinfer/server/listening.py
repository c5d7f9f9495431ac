"""A listening socket, and uvicorn for it."""

import contextlib
import errno
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from jaxinfer.server.connection import limited_protocol
from jaxinfer.server.options import ServerOptions

FLUSH_SECONDS = 2.0  # for the last events of streams that were ended
_BACKLOG = 2048  # connections that wait to be accepted


def listen(host: str, port: int, send_timeout: float, *, is_shared: bool = False) -> socket.socket:
    """A listening socket; several `is_shared` ones of one address get connections in turn. Raises OSError with the
    address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Closing a connection waits until its client has read what was sent. The kernel gives up one that does not;
        # the connections inherit this.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(send_timeout * 1000))
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        hint = "; --port N takes another one, 0 a free one" if error.errno == errno.EADDRINUSE else ""
        raise OSError(error.errno, f"cannot listen: {error.strerror}{hint}", f"{host}:{port}") from None
    return listener


class QuietUvicorn(uvicorn.Server):
    """Without its own handling of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def uvicorn_for(app: ASGIApp, options: ServerOptions) -> QuietUvicorn:
    """uvicorn for an application, with the limits on connections that the options have."""
    config = uvicorn.Config(
        app,
        http=limited_protocol(options),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(FLUSH_SECONDS),
    )
    return QuietUvicorn(config)
