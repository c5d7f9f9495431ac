"""One request on its way through the front: dispatched, passed on, and continued at another replica."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import msgspec
from starlette.types import Send

from jaxinfer.fleet.front.connection import Headers, NotReachedError, ReplicaConnection, ReplicaLostError
from jaxinfer.fleet.front.options import FrontOptions
from jaxinfer.fleet.front.replicas import FrontReplica, FrontReplicas
from jaxinfer.fleet.front.sent import SentLines, SentStream
from jaxinfer.fleet.routing import block_keys
from jaxinfer.server.api_error import APIError, failed, unavailable
from jaxinfer.server.sent_tokens import SENT_TOKENS, TELL_TOKENS

_LOG = logging.getLogger("jaxinfer.fleet.front")
_MOST_DEATHS = 2  # of replicas that answer a request, without anything new in between; then it is not tried again
_ROOM_SECONDS = 0.5  # until replicas whose queues are full are asked again
_LAST_SECONDS = 1.0  # for the last bytes of a stream whose end has come
_CONTINUED = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"), SentStream),
    **dict.fromkeys(("/api/chat", "/api/generate"), SentLines),
}
_OF_A_CONNECTION = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade", b"expect", b"proxy-connection"),
    )
)
_OF_A_REQUEST = _OF_A_CONNECTION | {b"host", b"content-length", b"accept-encoding", TELL_TOKENS.encode()}
_OF_AN_ANSWER = _OF_A_CONNECTION | {b"date"}
_POSITION = (b"last-event-id", b"x-jaxinfer-resume")
_PROMPTS = ("messages", "prompt", "input")
_BEFORE_PROMPTS = ("model", "cache_salt", "system", "instructions", "tools")  # what separates caches, or begins prompts
_CALLERS = (b"authorization", b"x-api-key")  # of whom no two share a cache
_BLOCK_BYTES = 128  # of text: about two pages of 16 tokens


class FrontCounts:
    """Totals of a front since its start: requests, streams that another replica continued, whole requests that another
    one answered, replicas that were lost, and requests that were given up."""

    def __init__(self) -> None:
        self.requests = self.continued = self.repeated = self.lost = self.given_up = 0


class Relay:
    """A request and what its client has of the answer.

    Args:
      path: for the form of errors. target: path and query as they came. headers: the client's. body: all of it.
      send: to the client.
    """

    def __init__(
        self,
        replicas: FrontReplicas,
        options: FrontOptions,
        counts: FrontCounts,
        method: str,
        path: str,
        target: str,
        headers: Headers,
        body: bytes,
        send: Send,
    ):
        self._replicas, self._options, self._counts, self._send = replicas, options, counts, send
        self._method, self._path, self._target, self._body = method, path, target, body
        self._headers = [(name, value) for name, value in headers if name not in _OF_A_REQUEST]
        self._sent = _CONTINUED[path]() if method == "POST" and path in _CONTINUED else None
        if self._sent is not None:
            self._headers.append((TELL_TOKENS.encode(), b"1"))
        self._has_started = False  # the status was sent
        self._seed: int | None = None  # that the client was told
        self._keys = prompt_keys(headers, body) if method == "POST" else []
        self._is_stream = False
        self._takes_tokens = True
        self._num_deaths = self._num_refused = 0
        self._full_since = 0.0  # when the first replica had no room
        self._avoided: set[FrontReplica] = set()

    async def run(self) -> None:
        """Answers the request. Raises APIError where no replica does and nothing was sent."""
        self._counts.requests += 1
        try:
            await self._run()
        except Exception as error:
            self._counts.given_up += 1
            if not self._has_started:
                raise
            await self._fail(failed(error))

    async def _run(self) -> None:
        while (replica := await self._replicas.choose(self._keys, self._avoided)) is not None:
            replica.begin()
            try:
                if await self._answer(replica):
                    return
            except ReplicaLostError as error:
                self._lose(replica, error)
            finally:
                replica.end()
        raise unavailable("no replica is ready to answer", 5)

    async def _fail(self, error: APIError) -> None:
        """Ends a stream that has begun with an error."""
        if self._path.startswith("/api/"):
            event = msgspec.json.encode({"error": error.message}) + b"\n"
        elif self._path.startswith("/v1/messages"):
            event = b"event: error\ndata: %b\n\n" % msgspec.json.encode(error.anthropic())
        else:
            event = b"data: %b\n\n" % msgspec.json.encode(error.openai())
        await self._pass(event if self._is_stream else b"")
        await self._end()

    def _lose(self, replica: FrontReplica, error: ReplicaLostError) -> None:
        """A replica was lost. Raises APIError where the request is not tried again."""
        self._replicas.lost(replica, str(error))
        self._avoided = {replica}
        if isinstance(error, NotReachedError):
            return
        self._counts.lost += 1
        self._num_deaths += 1
        has_events = self._sent is not None and self._sent.last_id is not None
        _LOG.warning("replica %s was lost with a request that it answered: %s", replica.url, error)
        if self._num_deaths >= _MOST_DEATHS:
            told = f"{self._num_deaths} replicas ended while they answered this request; it is not tried again"
            raise APIError(500, told, code="replicas_lost", headers={"x-should-retry": "false"})
        if self._has_started and self._sent is None:
            raise APIError(502, f"the replica was lost, and streams of {self._path} cannot be continued")
        if has_events:
            self._counts.continued += 1
        else:
            self._counts.repeated += 1

    # To a replica.

    def _request(self) -> tuple[Headers, Sequence[bytes]]:
        """Headers and body for the next replica: of the client, or with what was sent."""
        sent = self._sent
        if sent is None or not self._has_started:
            return self._headers, (self._body,)
        if sent.last_id is None:  # the client knows nothing but the seed
            return self._headers, (_with_seed(self._body, self._seed, is_ollama=self._path.startswith("/api/")),)
        headers = [(name, value) for name, value in self._headers if name not in _POSITION]
        headers.append((_POSITION[0], sent.last_id))
        tokens = sent.tokens() if self._takes_tokens else None
        if tokens is None:
            return headers, (self._body,)
        headers.append((SENT_TOKENS.encode(), ",".join(str(len(ids)) for ids in tokens).encode()))
        return headers, (self._body, *(ids.tobytes() for ids in tokens))

    async def _open(self, replica: FrontReplica) -> ReplicaConnection:
        """A connection with the head of an answer. Raises ReplicaLostError."""
        headers, body = self._request()
        headers = [*replica.headers, *headers]
        for fresh in (False, True):
            try:
                connection = await replica.pool.take(fresh=fresh)
            except NotReachedError as error:
                if fresh:  # it had the request, on the connection before
                    raise ReplicaLostError(str(error)) from None
                raise
            is_reused = connection.num_answers > 0
            try:
                connection.request(self._method, self._target, headers, body)
                await connection.head()
                return connection
            except ReplicaLostError as error:
                replica.pool.give_back(connection)
                if error.has_begun or not is_reused:  # else it may have been closed for being idle
                    raise
            except BaseException:
                connection.close()
                replica.pool.give_back(connection)
                raise
        raise ReplicaLostError("two connections to it were closed")

    async def _answer(self, replica: FrontReplica) -> bool:
        """Passes on an answer; false where another replica is to be asked. Raises ReplicaLostError, APIError."""
        connection = await self._open(replica)
        try:
            headers = dict(connection.headers)
            is_stream = b"content-length" not in headers
            if connection.status == 503 and not is_stream and await self._is_refused(replica, connection):
                return False
            if self._has_started:
                if connection.status == 429:
                    return await self._wait_for_room(replica, connection)
                if connection.status != 200:
                    return self._take_refusal(replica, await _whole(connection))
                if self._sent is not None:
                    _LOG.info("replica %s goes on with a stream after %d events", replica.url, self._sent.num_events)
            elif not is_stream:
                return await self._pass_whole(connection)
            self._is_stream = True
            connection.expect_bytes(self._options.stall_timeout)
            if self._sent is not None and headers.get(b"content-type", b"").startswith(self._sent.media_type):
                return await self._pass_events(connection, self._sent)
            self._sent = None
            while data := await connection.read():
                await self._start(connection)
                await self._pass(data)
            await self._start(connection)
            await self._end()
            return True
        finally:
            if not connection.is_done:
                connection.close()
            replica.pool.give_back(connection)

    async def _is_refused(self, replica: FrontReplica, connection: ReplicaConnection) -> bool:
        """True if another replica may take what this one does not take now."""
        self._num_refused += 1
        if self._num_refused > 2 * len(self._replicas.all):
            return False
        await _whole(connection)
        self._avoided.add(replica)
        self._replicas.lost(replica, "it takes no requests (status 503)")
        return True

    async def _wait_for_room(self, replica: FrontReplica, connection: ReplicaConnection) -> bool:
        """A replica that has no room for a begun stream: others may have, or this one later. Raises APIError."""
        await _whole(connection)
        loop = asyncio.get_running_loop()
        self._full_since = self._full_since or loop.time()
        if loop.time() - self._full_since > self._options.wait_timeout:
            raise APIError(503, f"the replica was lost, and no other one had room in {self._options.wait_timeout:g} s")
        self._avoided.add(replica)
        if self._avoided.issuperset(self._replicas.ready):
            self._avoided.clear()
            await asyncio.sleep(_ROOM_SECONDS)
        return False

    def _take_refusal(self, replica: FrontReplica, told: bytes) -> bool:
        """A replica does not continue the stream. Raises APIError unless it may without the tokens, or another one may,
        whose weights were not replaced yet."""
        try:
            error = msgspec.json.decode(told)["error"]
            param, code, message = error["param"], error["code"], error["message"]
        except (msgspec.MsgspecError, KeyError, TypeError):
            param = code = None
            message = "another replica did not continue the stream"
        if self._takes_tokens and param == SENT_TOKENS:
            _LOG.warning("a replica takes no tokens that were sent, and makes them anew: %s", message)
            self._takes_tokens = False
            return False
        self._num_refused += 1
        self._avoided.add(replica)
        if code == "resume_differs" and len(self._avoided) < len(self._replicas.all) >= self._num_refused:
            return False
        raise APIError(409, f"the replica was lost, and another one refused: {message}", code=code)

    # To the client.

    async def _pass_whole(self, connection: ReplicaConnection) -> bool:
        body = await _whole(connection)
        await self._start(connection)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        return True

    async def _pass_events(self, connection: ReplicaConnection, sent: SentStream) -> bool:
        """Events of a stream that another replica can continue."""
        sent.begin_again()
        num_events = sent.num_events
        while not sent.is_done and sent.error is None and (data := await connection.read()):
            if passed := sent.feed(data):
                await self._start(connection)
                await self._pass(passed)
                if sent.num_events > num_events:
                    self._num_deaths = 0
        if sent.is_unavailable:
            raise ReplicaLostError("it ended the stream: it is going away")
        if sent.error is None and not sent.is_done:
            raise ReplicaLostError("its stream had no end", True)
        await self._start(connection)
        if sent.error is not None:
            await self._pass(sent.error)
        await self._end()
        with contextlib.suppress(ReplicaLostError, TimeoutError):  # to its end, so that the connection can be kept
            async with asyncio.timeout(_LAST_SECONDS):
                while await connection.read():
                    pass
        return True

    async def _start(self, connection: ReplicaConnection) -> None:
        if self._has_started:
            return
        self._has_started = True
        headers = [(name, value) for name, value in connection.headers if name not in _OF_AN_ANSWER]
        self._seed = _number(dict(headers).get(b"x-jaxinfer-seed"))
        await self._send({"type": "http.response.start", "status": connection.status, "headers": headers})

    async def _pass(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def prompt_keys(headers: Headers, body: bytes) -> list[int]:
    """Keys of a request's prompt, for routing by prefix: of its text, as it stands in the body."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return []
    callers = [value for name, value in headers if name in _CALLERS]
    salt = b"\0".join((*callers, *(bytes(fields.get(name, b"")) for name in _BEFORE_PROMPTS)))
    prompt = next((bytes(fields[name]) for name in _PROMPTS if name in fields), b"")
    return block_keys(prompt, _BLOCK_BYTES, salt)


async def _whole(connection: ReplicaConnection) -> bytes:
    """The rest of a body. Raises ReplicaLostError."""
    parts = []
    while data := await connection.read():
        parts.append(data)
    return b"".join(parts)


def _number(text: bytes | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _with_seed(body: bytes, seed: int | None, *, is_ollama: bool) -> bytes:
    """The body with the seed that its client was told, where it has none."""
    try:
        fields = msgspec.json.decode(body)
        seeded = (fields.get("options") or {}) if is_ollama else fields
        if seed is None or seeded.get("seed") is not None:
            return body
    except (msgspec.MsgspecError, AttributeError):
        return body
    seeded = {**seeded, "seed": seed}
    return msgspec.json.encode({**fields, "options": seeded} if is_ollama else seeded)
