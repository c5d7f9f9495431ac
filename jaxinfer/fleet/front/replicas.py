"""The replicas: which are ready, which give the same answers, and which one a request goes to."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from jaxinfer.fleet.front.connection import ConnectionPool, Headers, ReplicaLostError
from jaxinfer.fleet.front.options import FrontOptions, address_of
from jaxinfer.fleet.routing import PrefixRouter

_LOG = logging.getLogger("jaxinfer.fleet.front")
_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 2.0  # of a replica to the question whether it is ready
FINGERPRINT = b"x-jaxinfer-fingerprint"


class FrontReplica(Protocol):
    """A server to which requests are passed on, for one request or for all. Equal ones are one server.

    Attributes:
      url: in messages. pool: of connections to it. headers: that it gets before those of a client.
    """

    url: str
    pool: ConnectionPool
    headers: Headers

    def begin(self) -> None:
        """It gets a request."""
        ...

    def end(self) -> None:
        """That request was answered, or it was lost with it."""
        ...

    def __hash__(self) -> int: ...


class FrontReplicas(Protocol):
    """The servers of a front. `all` are those that there should be, `ready` those that get requests."""

    @property
    def all(self) -> Sequence[Any]: ...

    @property
    def ready(self) -> Sequence[Any]: ...

    async def choose(self, keys: Sequence[int] = (), avoided: Collection[Any] = ()) -> FrontReplica | None:
        """As of `ReplicaSet`."""
        ...

    def lost(self, replica: Any, why: str) -> None:
        """A server failed a request."""
        ...


class Replica:
    """One server.

    Attributes:
      url: as it was given. headers: that it gets before a client's. num_running: requests of this front that it
        answers.
      fingerprint: of its model and options; "" for a server of several models, or before it was ready.
      why_not: the reason why it gets no requests; None where it does.
    """

    def __init__(self, url: str, stall_timeout: float):
        host, port = address_of(url)
        self.url = url.rstrip("/")
        self.headers: Headers = [(b"host", f"{f'[{host}]' if ':' in host else host}:{port}".encode())]
        self.pool = ConnectionPool(host, port)
        self.num_running = 0
        self.fingerprint = ""
        self.why_not: str | None = "it was not asked yet"
        self._stall_timeout, self._answered_at = stall_timeout, 0.0
        self._is_open: bool | None = None  # whether it answers without a key

    def begin(self) -> None:
        self.num_running += 1

    def end(self) -> None:
        self.num_running -= 1

    async def look(self, *, needs_keys: bool) -> str | None:
        """Asks it whether it is ready; returns the reason why not. One that has not answered for `stall_timeout` is
        given up, with all that it answers."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                status, headers = await self._ask("/ready")
                if status != 200:
                    self._is_open = None
                elif needs_keys and self._is_open is None:
                    self._is_open = (await self._ask("/v1/models"))[0] != 401
        except (ReplicaLostError, TimeoutError) as error:
            if loop.time() - self._answered_at > self._stall_timeout and self.num_running:
                self.pool.give_up(f"it has not answered for {self._stall_timeout:g} s")
            return str(error) or f"it does not answer within {_ANSWER_SECONDS:g} s"
        self._answered_at = loop.time()
        if status != 200:
            return f"it is not ready (status {status})"
        self.fingerprint = dict(headers).get(FINGERPRINT, b"").decode("latin-1")
        if needs_keys and self._is_open:
            return "it answers without a key, and the front can be reached from other machines: give it --api-keys"
        return None

    async def _ask(self, path: str) -> tuple[int, list[tuple[bytes, bytes]]]:
        connection = await self.pool.take(fresh=True)
        try:
            connection.request("GET", path, self.headers, ())
            await connection.head()
            while await connection.read():
                pass
            return connection.status, connection.headers
        finally:
            connection.close()
            self.pool.give_back(connection)


class ReplicaSet:
    """All replicas of a front. `watch` runs beside the requests."""

    def __init__(self, options: FrontOptions):
        self.all = [Replica(url, options.stall_timeout) for url in options.replicas or ()]
        self._needs_keys = not options.is_loopback
        self._wait_timeout = options.wait_timeout
        self._router = PrefixRouter[Replica](max_imbalance=options.max_imbalance)
        self._changed = asyncio.Event()  # some became ready
        self._look_again = asyncio.Event()

    @property
    def ready(self) -> list[Replica]:
        """Those that get requests."""
        return [replica for replica in self.all if replica.why_not is None]

    async def watch(self) -> None:
        """Asks all of them again and again, until it is cancelled."""
        while True:
            self._look_again.clear()
            whys = await asyncio.gather(*(replica.look(needs_keys=self._needs_keys) for replica in self.all))
            self._take(whys)
            try:
                async with asyncio.timeout(_POLL_SECONDS):
                    await self._look_again.wait()
            except TimeoutError:
                continue

    def _take(self, whys: Sequence[str | None]) -> None:
        """Those that are ready must have one fingerprint: that of those that are in use, else of the first."""
        able = [replica for replica, why in zip(self.all, whys, strict=True) if why is None]
        used = [replica for replica in able if replica.why_not is None] or able
        for replica, why in zip(self.all, whys, strict=True):
            if why is None and replica.fingerprint != used[0].fingerprint:
                own, other = replica.fingerprint or "of several models", used[0].fingerprint or "of several models"
                why = (
                    f"its system_fingerprint is {own}, and that of {used[0].url} is {other}: they would give different "
                    f"answers (weights, options or the version of jaxinfer differ)"
                )
            self._set(replica, why)

    def _set(self, replica: Replica, why: str | None) -> None:
        if why == replica.why_not:
            return
        replica.why_not = why
        if why is None:
            _LOG.info("replica %s gets requests, system_fingerprint %s", replica.url, replica.fingerprint or "unknown")
            self._changed.set()
        else:
            _LOG.warning("replica %s gets no requests: %s", replica.url, why)
            self._router.remove(replica)

    def lost(self, replica: Replica, why: str) -> None:
        """It failed a request: it gets no other one before it has said that it is ready."""
        self._set(replica, why)
        self._look_again.set()

    async def choose(self, keys: Sequence[int] = (), avoided: Collection[Replica] = ()) -> Replica | None:
        """The one that has most of a prompt cached, of those that are not too busy, else the one with the fewest
        requests; one of the `avoided` only where there is no other. Waits for one that is ready; None where none has
        become ready in time.

        Args:
          keys: of the prompt (`jaxinfer.fleet.routing.block_keys`).
        """
        try:
            async with asyncio.timeout(self._wait_timeout):
                while not (ready := self.ready):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self._router.choose(keys, {replica: replica.num_running for replica in ready}, avoided)
