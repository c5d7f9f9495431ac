"""Raw bytes over sockets: requests that two servers would read differently, clients that send without end or slowly, or
do not read, and too many connections. See test_security.py."""

import json
import re
import resource
import socket
import time

import pytest

from jaxinfer.server import connection as limits
from jaxinfer.server import http
from jaxinfer.server.auth import Keys
from tests.server.conftest import is_idle
from tests.server.sockets import connect, exchange, received, send, served

HOST, JSON = b"host: localhost\r\n", b"content-type: application/json\r\n"
BODY = b'{"prompt":"a","max_tokens":1}'
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + JSON
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
SECOND = b"GET /version HTTP/1.1\r\n" + HOST + b"\r\n"

SMUGGLED = {
    "both lengths": POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths, the other way": POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"content-length: 29\r\ncontent-length: 28\r\n\r\n" + BODY,
    "a list of lengths": POST + b"content-length: 29, 29\r\n\r\n" + BODY,
    "a length with a sign": POST + b"content-length: +29\r\n\r\n" + BODY,
    "a negative length": POST + b"content-length: -1\r\n\r\n" + BODY,
    "a length beyond 64 bits": POST + b"content-length: 99999999999999999999\r\n\r\n" + BODY,
    "a coding that is not chunked": POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked is not last": POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "two codings": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
    "a space before the colon": POST + b"content-length : 29\r\n\r\n" + BODY,
    "a folded header": b"GET /health HTTP/1.1\r\n" + HOST + b"x: a\r\n b\r\n\r\n",
    "a bare line feed": b"GET /health HTTP/1.1\nhost: localhost\n\n",
    "a bare carriage return": b"GET /health HTTP/1.1\r\n" + HOST + b"x: a\rb: c\r\n\r\n",
    "NUL in a header": b"GET /health HTTP/1.1\r\n" + HOST + b"x: a\x00b\r\n\r\n",
    "a size that is none": CHUNKED + b"zz\r\n" + BODY,
    "a size beyond 64 bits": CHUNKED + b"ffffffffffffffffff\r\n" + BODY,
    "no sizes": CHUNKED + BODY,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "CONNECT": b"CONNECT localhost:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00",
}


def test_a_request_that_two_servers_read_differently_is_refused(service):
    with served(service) as port:
        for name, data in SMUGGLED.items():
            statuses, found, is_closed = exchange(port, data + SECOND)
            assert (statuses, is_closed) == ([400], True), (name, found)


TARGETS = {
    b"GET http://evil.example/health HTTP/1.1\r\n" + HOST: 200,  # the path of an absolute target counts
    b"GET http://localhost/health HTTP/1.1\r\nhost: evil.example\r\n": 403,
    b"GET http://localhost/v1/models HTTP/1.1\r\n" + HOST: 401,
    b"GET http://localhost/health@x/v1/models HTTP/1.1\r\n" + HOST: 401,
    b"GET /v1%2fmodels HTTP/1.1\r\n" + HOST: 401,
    b"GET /%76%31/models HTTP/1.1\r\n" + HOST: 401,
    b"GET //health HTTP/1.1\r\n" + HOST: 401,
    b"GET /health%2f..%2fv1%2fmodels HTTP/1.1\r\n" + HOST: 401,
    b"GET /v1/models?/health HTTP/1.1\r\n" + HOST: 401,
    b"GET /v1/models#/health HTTP/1.1\r\n" + HOST: 401,
    b"GET /v1/models/%0d%0aset-cookie:x HTTP/1.1\r\n" + HOST: 401,
    b"GET /v1/models/%ff%00 HTTP/1.1\r\n" + HOST: 401,
    b"OPTIONS * HTTP/1.1\r\n" + HOST: 401,
    b"GET /v1/models HTTP/1.1\r\n" + HOST + b"connection: upgrade\r\nupgrade: websocket\r\n": 401,
    b"GET /v1/models HTTP/1.1\r\n" + HOST + b"connection: upgrade\r\nupgrade: h2c\r\n": 401,
    b"GET /v1/models HTTP/1.1\r\n" + HOST + b"x-forwarded-host: localhost\r\nx-original-url: /health\r\n": 401,
    b"GET /health HTTP/1.1\r\n": 403,
    b"GET /health HTTP/1.1\r\n" + HOST + b"host: evil.example\r\n": 400,
    b"GET /v1/models HTTP/1.1\r\n" + HOST + b"authorization: Bearer \xff\xfe\r\n": 401,
}


def test_request_targets_open_no_route(make_service):
    with served(make_service(api_keys="keys"), Keys({"first-secret-key": "alice"})) as port:
        for data, status in TARGETS.items():
            assert exchange(port, data + b"\r\n")[0] == [status], data


def test_trailers_are_no_key(make_service):
    with served(make_service(api_keys="keys"), Keys({"first-secret-key": "alice"})) as port:
        data = CHUNKED + b"1d\r\n" + BODY + b"\r\n0\r\nauthorization: Bearer first-secret-key\r\n\r\n"
        assert exchange(port, data)[0] == [401]


ENDLESS = {
    "headers": (b"GET /health HTTP/1.1\r\n" + HOST, b"x: " + b"y" * 1000 + b"\r\n"),
    "one header": (b"GET /health HTTP/1.1\r\n" + HOST + b"x: ", b"y" * 1000),
    "the target": (b"GET /", b"a" * 1000),
    "trailers": (CHUNKED + b"1d\r\n" + BODY + b"\r\n0\r\n", b"x: " + b"y" * 1000 + b"\r\n"),
    "one trailer": (CHUNKED + b"1d\r\n" + BODY + b"\r\n0\r\nx: ", b"y" * 1000),
    "the size of a chunk": (CHUNKED + b"1d;", b"y" * 1000),
    "small chunks": (CHUNKED, b"1\r\ny\r\n" * 1000),
    "a body that nobody reads": (
        b"POST /nothing HTTP/1.1\r\n" + HOST + JSON + b"transfer-encoding: chunked\r\n\r\n",
        b"",
    ),
    "a body": (CHUNKED, b""),
    "before a request": (b"", b"\r\n" * 1000),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDLESS)
def test_what_does_not_end_is_cut_off(make_service, name):
    head, piece = ENDLESS[name]
    piece = (piece or b"ffff\r\n" + b"y" * 65535 + b"\r\n") * 20
    with served(make_service(max_header_bytes=4096, max_body_bytes=1 << 20)) as port:
        with connect(port) as connection:
            send(connection, head)
            for _ in range(200):
                if not send(connection, piece):
                    break
            else:
                assert received(connection, 5)[1], "the connection is still open"
        assert exchange(port, SECOND)[0] == [200]


def test_slow_clients_are_let_go_and_the_others_served(make_service, monkeypatch):
    monkeypatch.setattr(limits, "HEAD_SECONDS", 0.4)
    monkeypatch.setattr(limits, "MESSAGE_SECONDS", 0.8)
    monkeypatch.setattr(http, "_BODY_SECONDS", 0.4)
    service = make_service()
    with served(service) as port:
        slow = {name: connect(port) for name in ("silent", "head", "body", "unread body", "second head")}
        slow["head"].sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"x")
        slow["body"].sendall(POST + b"content-length: 29\r\n\r\n{")
        slow["unread body"].sendall(b"POST /nothing HTTP/1.1\r\n" + HOST + b"content-length: 29\r\n\r\n{")
        slow["second head"].sendall(SECOND + b"GET ")
        deadline = time.monotonic() + 20
        closed = {}
        while len(closed) < len(slow) and time.monotonic() < deadline:
            for name in slow.keys() - closed.keys():
                if name not in ("silent", "second head"):
                    send(slow[name], b"x")  # they are slow, not idle
                found, is_closed = received(slow[name], 0.02)
                closed |= {name: found} if is_closed else {}
            assert exchange(port, SECOND)[0] == [200]
        assert closed.keys() == slow.keys()
        for connection in slow.values():
            connection.close()


def test_connections_have_a_limit(make_service):
    with served(make_service(max_connections=3)) as port:
        held = [connect(port) for _ in range(3)]
        for connection in held:
            connection.sendall(SECOND)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        statuses, found, is_closed = exchange(port, SECOND)
        assert (statuses, is_closed) == ([503], True)
        assert b"retry-after: 5" in found
        assert json.loads(found.rpartition(b"\r\n\r\n")[2])["error"]["type"] == "service_unavailable"
        held.pop().close()
        while exchange(port, SECOND)[0] != [200]:  # until the server has noticed
            time.sleep(0.05)
        for connection in held:
            connection.close()


def test_connections_leave_room_for_other_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert limits.max_connections(10) == 10
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert limits.max_connections(10**9) < raised <= max(soft, limits._MAX_FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


READERS = {
    "a stream": (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 240, "stream": True, "logprobs": 20, "n": 16, "ignore_eos": True},
    ),
    "a whole answer": ("/detokenize", {"tokens": [700] * 60_000}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a whole answer", pytest.param("a stream", marks=pytest.mark.slow)])
def test_a_client_that_does_not_read_is_disconnected(make_service, engine, monkeypatch, name):
    """Also where its answer is larger than the buffers of both systems."""
    path, body = READERS[name]
    service = make_service(send_timeout=1.0)
    with served(service) as port:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", port))
        data = json.dumps(body).encode()
        head = b"POST %b HTTP/1.1\r\n" % path.encode() + HOST + JSON + b"content-length: %d\r\n\r\n" % len(data)
        times = 1 if name == "a stream" else 60
        for _ in range(times):  # pipelined
            send(connection, head + data)
        deadline = time.monotonic() + 60
        while _num_connections(port) or service.generations or not is_idle(engine):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        connection.close()


def _num_connections(port):
    """Established connections of the listening side, as the system knows them."""
    with open("/proc/net/tcp", encoding="ascii") as file:
        lines = [line.split() for line in file]
    return sum(line[1].endswith(f":{port:04X}") and line[3] == "01" for line in lines)


def test_headers_come_back_as_they_are_safe(service):
    with served(service) as port:
        for value in (b"abc\xff", b"a b", b"x" * 129, b'"', b"a,b"):
            found = exchange(port, b"GET /health HTTP/1.1\r\n" + HOST + b"x-request-id: " + value + b"\r\n\r\n")[1]
            assert re.search(rb"x-request-id: req-[0-9a-f]+\r\n", found)
