"""The front in a deployment of Ray Serve: Ray says which replica gets a request, and whether it is still there.

Requests go straight to the replicas' servers: through a handle of Ray every chunk would be an object of its own, for 13
times the processor time.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayActorError, RayError  # pyright: ignore[reportMissingImports]
from ray.serve.exceptions import RayServeException  # pyright: ignore[reportMissingImports]
from ray.serve.handle import DeploymentHandle  # pyright: ignore[reportMissingImports]
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxinfer.fleet.front.app import FrontApp
from jaxinfer.fleet.front.connection import ConnectionPool, Headers
from jaxinfer.fleet.front.options import address_of
from jaxinfer.fleet.ray_serve.choice import running_replicas
from jaxinfer.fleet.ray_serve.options import FleetOptions
from jaxinfer.fleet.ray_serve.replica import FRONT_KEY, log_to_stderr
from jaxinfer.server.api_error import APIError
from jaxinfer.server.listening import listen, uvicorn_for
from jaxinfer.server.options import LOOPBACK, ServerOptions

_LOG = logging.getLogger("jaxinfer.fleet.front")
_AGAIN_SECONDS = 0.05  # after a replica was not reached through Ray


class FleetReplicas:
    """The replicas of a deployment, as the front sees them.

    Args:
      hold: the method of a replica's handle, for streams.
    """

    def __init__(self, hold: Any, options: FleetOptions, node: str):
        self._hold, self._options, self._node = hold, options, node
        self._servers: dict[str, ReplicaAddress] = {}

    @property
    def all(self) -> Sequence[object]:
        """As many as are running, at least as many as there should be."""
        return range(max(self._options.num_replicas, len(running_replicas())))

    @property
    def ready(self) -> Sequence[str]:
        """Names of those that get requests, each equal to its `LeasedReplica`."""
        return running_replicas()

    async def choose(
        self, keys: Sequence[int] = (), avoided: "Collection[LeasedReplica]" = ()
    ) -> "LeasedReplica | None":
        """As of `ReplicaSet`: Ray chooses, by `FleetRequestRouter`."""
        names = sorted(replica.server.name for replica in avoided)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.wait_timeout):
                while True:
                    stream = self._hold.remote(list(keys), names)
                    try:
                        return LeasedReplica(self._server(await anext(aiter(stream))), stream)
                    except (RayError, RayServeException, StopAsyncIteration) as error:  # it died before it was reached
                        _LOG.info("a replica was not reached: %s", _first_line(error))
                        await asyncio.sleep(_AGAIN_SECONDS)
                    except BaseException:
                        stream.cancel()
                        raise
        return None

    def lost(self, replica: "LeasedReplica", why: str) -> None:
        """Ray finds out by itself, and starts another one."""
        _LOG.warning("replica %s failed a request: %s", replica.url, why)

    def _server(self, told: Mapping[str, str]) -> "ReplicaAddress":
        server = self._servers.get(told["name"])
        if server is None:
            running = running_replicas()
            for name in [name for name in self._servers if name not in running]:
                self._servers.pop(name).close()
            server = self._servers[told["name"]] = ReplicaAddress(told)
        if address_of(server.url)[0] in LOOPBACK and told["node"] != self._node:
            raise APIError(
                500, "a replica on another machine than the front listens at a loopback address: set replica_host: node"
            )
        return server


class ReplicaAddress:
    """The server of a replica: its name, its URL, and connections to it."""

    def __init__(self, told: Mapping[str, str]):
        self.name, self.url = told["name"], told["url"]
        self.pool = ConnectionPool(*address_of(self.url))
        host = self.url.removeprefix("http://").encode()
        self.headers: Headers = [(b"host", host), (FRONT_KEY, told["key"].encode())]

    def close(self) -> None:
        """Ends idle connections; the others end with their requests."""
        self.pool.close_idle()


class LeasedReplica:
    """A replica for one request. Equal ones are one replica, and equal to its name.

    Args:
      stream: the call that Ray counts as this request; it fails if the replica dies.
    """

    def __init__(self, server: ReplicaAddress, stream: Any):
        self.server, self._stream = server, stream
        self.url, self.pool, self.headers = server.url, server.pool, server.headers
        self._watching = asyncio.create_task(self._watch())

    def __eq__(self, other: object) -> bool:
        return self.server.name == (other.server.name if isinstance(other, LeasedReplica) else other)

    def __hash__(self) -> int:
        return hash(self.server.name)

    def begin(self) -> None:
        """It was counted when it was chosen."""

    def end(self) -> None:
        """Ray counts it no more."""
        self._watching.cancel()
        self._stream.cancel()

    async def _watch(self) -> None:
        """A machine that is gone closes no connection."""
        try:
            await anext(aiter(self._stream))
        except RayActorError as error:
            self.pool.give_up(f"Ray has lost it: {_first_line(error)}")
        except (RayError, RayServeException, StopAsyncIteration):  # it was cancelled by `end`
            return


class FleetFront:
    """The deployment of the front. Args are a handle of the replicas and `FleetOptions.fixed`."""

    def __init__(self, replicas: DeploymentHandle, options: Mapping[str, Any], num_replicas: int):
        log_to_stderr()
        read = FleetOptions.read({**options, "num_replicas": num_replicas})
        hold = replicas.options(method_name="hold", stream=True)
        known = FleetReplicas(hold, read, ray.get_runtime_context().get_node_id())
        self._options = read.front_options()
        self._app = FrontApp(self._options, known)
        self._direct: asyncio.Task[None] | None = None
        if read.direct_port is not None:
            listener = listen(read.host, read.direct_port, self._options.send_timeout, is_shared=True)
            self._direct = asyncio.get_running_loop().create_task(self._listen(listener))

    async def __call__(self, request: Request) -> Response:
        """Answers a request over HTTP."""
        return _Answer(self._app)

    def check_health(self) -> None:
        """Raises RuntimeError where Ray Serve shall start it again."""
        if self._direct is not None and self._direct.done():
            raise RuntimeError("the front does not listen any more")

    async def _listen(self, listener: socket.socket) -> None:
        options = self._options
        limits = ServerOptions(max_connections=options.max_connections, send_timeout=options.send_timeout)
        server = uvicorn_for(self._app, limits)
        try:
            await server.serve([listener])
        finally:
            listener.close()

    async def __del__(self) -> None:
        """Ray waits for its own requests; those that came directly have as long."""
        if not hasattr(self, "_app"):
            return
        self._app.is_draining = True
        deadline = time.monotonic() + self._options.drain_timeout
        while self._app.num_running and time.monotonic() < deadline:
            await asyncio.sleep(_AGAIN_SECONDS)


class _Answer(Response):
    """The answer of the application."""

    def __init__(self, app: FrontApp):
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("raw_path", scope["path"].encode("latin-1", "replace"))
        await self._app(scope, receive, send)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
