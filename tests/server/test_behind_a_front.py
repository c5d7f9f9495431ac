"""Real answers through a front whose connections to the server are cut: the client cannot tell."""

import asyncio
import json

import pytest

from tests.fleet.front.fakes import ask, front
from tests.server.sockets import served
from tests.server.test_begun_answers import CASES, joined, nearly
from tests.server.test_resume import content


class Cutter:
    """Passes bytes on to a server, and cuts each answer after a number of bytes, at least one whole event:
    a front gives up a request that two servers in a row did not get on with. 0: none is cut."""

    def __init__(self, port):
        self._server_port, self.after, self.num_cut = port, 0, 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _serve(self, reader, writer):
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        there, passed = None, b""
        try:
            asked = await reader.readuntil(b"\r\n\r\n")
            after = self.after if asked.startswith(b"POST") else 0
            other_writer.write(asked)
            there = asyncio.create_task(_pass(reader, other_writer))
            while data := await other_reader.read(1 << 16):
                whole = passed + data
                end = max(after, _first_event_end(whole))
                is_cut = after > 0 and end <= len(whole)
                writer.write(data[: end - len(passed)] if is_cut else data)
                await writer.drain()
                if is_cut:
                    self.num_cut += 1
                    break
                passed = whole
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if there is not None:
                there.cancel()
            writer.close()
            other_writer.transport.abort()


def _first_event_end(data):
    """The end of the first event that has an id; beyond the data where it does not end in them."""
    event = data.find(b"\nid: ")
    end = -1 if event < 0 else data.find(b"\n\n", event)
    return end + 2 if end >= 0 else len(data) + 1


async def _pass(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)


def events_in(text):
    return [
        type("Event", (), {"data": json.loads(line.removeprefix("data: "))})
        for line in text.splitlines()
        if line.startswith("data: {")
    ]


@pytest.mark.slow
def test_the_front_describes_what_it_passes_on(make_service):
    """Each route of its description is answered, and none that changes a server is in it."""

    async def described(port):
        async with Cutter(port) as one, front(one) as front_port:
            status, _, own = await ask(front_port, "GET", "/openapi.json")
            _, _, whole = await ask(port, "GET", "/openapi.json")
            own, whole = json.loads(own)["paths"], json.loads(whole)["paths"]
            statuses = [
                (await ask(front_port, method.upper(), path.replace("{id}", "tiny"), b"{"))[0]
                for path, methods in own.items()
                for method in methods
            ]
            return status, own, whole, statuses

    with served(make_service(accept_sent_tokens=True)) as port:
        status, own, whole, statuses = asyncio.run(described(port))
    assert status == 200
    assert {"/v1/chat/completions", "/api/chat", "/v1/models/{id}", "/health"} <= own.keys() < whole.keys()
    assert all(own[path] == whole[path] for path in own)
    assert not {"/models/load", "/api/delete"} & own.keys()
    assert set(statuses) == {200, 400}


@pytest.mark.slow
def test_streams_whose_server_is_lost_are_what_they_would_have_been(make_service):
    path, body = CASES["two answers"]
    data = json.dumps({**body, "stream": True}).encode()

    async def answers(port):
        _, _, whole = await ask(port, "POST", path, data)
        async with Cutter(port) as one, Cutter(port) as other, front(one, other) as front_port:
            found = []
            for one.after, other.after in ((900, 0), (3000, 0), (5000, 1500), (8000, 2500)):
                found.append(await ask(front_port, "POST", path, data))
            metrics = (await ask(front_port, "GET", "/metrics"))[2].decode()
        return whole.decode(), found, one.num_cut + other.num_cut, metrics

    with served(make_service(accept_sent_tokens=True)) as port:
        whole, found, num_cut, metrics = asyncio.run(answers(port))
    expected = events_in(whole)
    assert num_cut >= 4
    assert f"jaxinfer_front_lost_total {num_cut}\n" in metrics
    assert "jaxinfer_front_given_up_total 0\n" in metrics
    for status, _, text in found:
        assert (status, text[-14:], b":tokens" in text) == (200, b"data: [DONE]\n\n", False)
        events = events_in(text.decode())
        assert content(events) == content(expected)
        assert joined(events) == nearly(joined(expected))
