"""A replica: an engine and its server, in an actor that Ray places, checks and updates."""

import asyncio
import contextlib
import hmac
import logging
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxinfer import compilation_cache
from jaxinfer.api.async_engine import AsyncEngine
from jaxinfer.fleet.ray_serve.options import FleetOptions
from jaxinfer.server.api_error import APIError
from jaxinfer.server.app import make_app
from jaxinfer.server.auth import Keys
from jaxinfer.server.catalogue import locate, paths_of
from jaxinfer.server.listening import listen, uvicorn_for
from jaxinfer.server.models import ModelSource, OneModel
from jaxinfer.server.names import public_name, split_name
from jaxinfer.server.service import Service

_LOG = logging.getLogger("jaxinfer.fleet.ray_serve")
FRONT_KEY = b"x-jaxinfer-front-key"
"""A header of requests to a replica: the key that it tells fronts."""
_POLL_SECONDS = 0.01
T = TypeVar("T")


class FrontDoor:
    """Lets in requests of fronts alone, and none while it is closed: they wait.

    Args:
      key: that requests must have.
    """

    def __init__(self, app: ASGIApp, key: bytes):
        self._app, self._key = app, key
        self._is_open = asyncio.Event()
        self._is_open.set()
        self.num_inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"]
        given = next((value for name, value in headers if name == FRONT_KEY), b"")
        if not hmac.compare_digest(given, self._key):
            told = "this server answers to the fronts of its fleet alone"
            await APIError(403, told).response(scope["path"])(scope, receive, send)
            return
        while not self._is_open.is_set():
            await self._is_open.wait()
        self.num_inside += 1
        try:
            scope["headers"] = [(name, value) for name, value in headers if name != FRONT_KEY]
            await self._app(scope, receive, send)
        finally:
            self.num_inside -= 1

    @contextlib.asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """In the block there are no requests: those inside end first, those that come wait until it is over."""
        self._is_open.clear()
        try:
            while self.num_inside:
                await asyncio.sleep(_POLL_SECONDS)
            yield
        finally:
            self._is_open.set()


class ReplicaServer:
    """One engine and its server, in an event loop and a thread of their own.

    Args:
      name: in what fronts are told. node: the machine's, likewise. address: to listen at.

    Raises, where the model cannot be opened, what `LLM` raises.
    """

    def __init__(self, options: FleetOptions, name: str, node: str, address: str):
        compilation_cache.enable()
        self._options, self._server_options = options, options.server_options(address)
        given, model = split_name(options.model)
        names = tuple(dict.fromkeys((self._server_options.served_model_name or given, given)))
        self._engine = AsyncEngine(model, **options.llm_options())
        if not self._server_options.lazy:
            self._engine.llm.warm_up()
        paths = paths_of(model, locate(model))
        self._source = ModelSource(names, public_name(model), lambda _: self._engine, given=model, paths=paths)
        self._keys = None if self._server_options.api_keys is None else Keys.read(self._server_options.api_keys)
        self._key = secrets.token_urlsafe(32)
        self._weights: Mapping[str, str] | None = None
        self._adapters: dict[str, str] = {}
        self._listener = listen(address, 0, self._server_options.send_timeout)
        host, port = self._listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._told = {"name": name, "node": node, "url": url, "key": self._key}
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="jaxinfer server", daemon=True)
        self._thread.start()
        started.result()

    @property
    def told(self) -> dict[str, str]:
        """Facts that a front needs: name, node, url and key."""
        return self._told

    def check(self) -> None:
        """Raises RuntimeError if it does not answer any more."""
        if not self._thread.is_alive() or not self._service.is_healthy:
            raise RuntimeError("the engine or its server has stopped")

    async def change(self, config: Mapping[str, Any] | None) -> None:
        """Takes weights and adapters of a `FleetOptions.changeable`. Raises ValueError or OSError, and the caller ends
        the replica."""
        await self._call(self._change(config or {}))

    async def close(self) -> None:
        """Ends the server, and the engine."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        await asyncio.to_thread(self._thread.join)

    # In its own event loop.

    def _run(self, started: "Future[None]") -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(started))

    async def _serve(self, started: "Future[None]") -> None:
        try:
            self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
            self._service = service = Service(self._server_options, self._source.names[0], OneModel(self._source))
            self._door = FrontDoor(make_app(service, self._keys), self._key.encode())
            server = uvicorn_for(self._door, self._server_options)
            (await service.models.acquire(self._source.names[0])).release()
            service.state = "ready"
        except BaseException as error:
            started.set_exception(error)
            return
        serving = asyncio.create_task(server.serve([self._listener]))
        started.set_result(None)
        await asyncio.wait((serving, asyncio.create_task(self._stopping.wait())), return_when="FIRST_COMPLETED")
        service.state = "stopped"
        server.should_exit = True
        await serving
        self._listener.close()
        await service.models.close()

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _change(self, config: Mapping[str, Any]) -> None:
        weights, adapters = config.get("weights"), dict(config.get("adapters") or {})
        if weights != self._weights:
            if weights is None:
                raise ValueError("weights: those of the model are gone: the replica has to start again")
            async with self._door.closed():  # no answer has two versions, and none the other one's fingerprint
                await self._engine.update_params(weights["path"], version=weights["version"])
                self._weights = dict(weights)
                told = weights["version"], self._service.default.fingerprint
            _LOG.info("weights %s, system_fingerprint %s", *told)
        for name in [name for name in self._adapters if name not in adapters]:
            await self._engine.unload_adapter(name)
            del self._adapters[name]
        for name, path in adapters.items():
            if self._adapters.get(name) != path:
                await self._engine.load_adapter(name, path, replace=True)
                self._adapters[name] = path
                _LOG.info("adapter %s of %s", name, path)


def log_to_stderr() -> None:
    """Writes jaxinfer's log where Ray keeps what its processes print."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jaxinfer").setLevel(logging.INFO)


class FleetReplica:
    """The deployment of replicas. Args are `FleetOptions.fixed`."""

    def __init__(self, options: Mapping[str, Any]):
        import ray  # pyright: ignore[reportMissingImports]
        from ray import serve  # pyright: ignore[reportMissingImports]

        log_to_stderr()
        read = FleetOptions.read(options)
        address = "127.0.0.1" if read.replica_host == "loopback" else ray.util.get_node_ip_address()
        name = serve.get_replica_context().replica_id.unique_id
        self._server = ReplicaServer(read, name, ray.get_runtime_context().get_node_id(), address)

    async def reconfigure(self, config: Mapping[str, Any] | None) -> None:
        """Ray Serve calls it at the start, and where its `user_config` was changed."""
        await self._server.change(config)

    def check_health(self) -> None:
        """Raises RuntimeError where Ray Serve shall start it again."""
        self._server.check()

    async def hold(self, keys: Sequence[int] = (), avoided: Sequence[str] = ()) -> AsyncIterator[dict[str, str]]:
        """Tells a front where to send one request, and lasts until the front cancels it: as long, Ray counts it."""
        yield self._server.told
        await asyncio.Event().wait()

    async def __del__(self) -> None:
        if hasattr(self, "_server"):
            await self._server.close()
