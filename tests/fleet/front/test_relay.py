"""A front before replicas that die, stall, drain and refuse: what its client gets, and what the next replica gets."""

import array
import asyncio
import json
import subprocess
import sys

import msgspec
import pytest
import uvloop

from jaxinfer.fleet.front.options import FrontOptions
from jaxinfer.fleet.front.relay import _with_seed
from jaxinfer.fleet.front.replicas import Replica
from jaxinfer.server.api_error import unavailable
from tests.fleet.front.fakes import ID, FakeReplica, ask, chunk, event, front, start, whole

DONE = "data: [DONE]\n\n"
USAGE = 'data: {"usage":1}\n\n'


def shown(*numbers):
    """The part of these events that a client gets."""
    return "".join(f"id: {ID.format(1, f'{number:x}-{number:x}-1')}\ndata: {number}\n\n" for number in numbers)


def stream(*parts, media_type="text/event-stream"):
    """A script: the stream of these parts, to its end, or to its break where the last is None."""

    async def script(head, body):
        yield start(media_type)
        for part in parts:
            if part is None:
                await asyncio.sleep(0.02)  # what was sent arrives
                yield None
                return
            if callable(part):
                await part()
                continue
            yield chunk(part)
        yield b"0\r\n\r\n"

    return script


def run(first, second, *, options=None, **request):
    """Answers of a front whose first replica is asked first."""

    async def both():
        async with FakeReplica(first) as one, FakeReplica(second) as other:
            other.is_ready = False
            async with front(one, other, **(options or {})) as port:
                other.is_ready = True
                answer = await ask(port, **request)
                metrics = (await ask(port, "GET", "/metrics"))[2].decode()
                return answer, one.requests, other.requests, metrics

    return uvloop.run(both())


def test_a_stream_is_passed_on_and_its_tokens_are_kept_back():
    (status, head, body), (request,), _, metrics = run(
        stream(event(1)[:20], event(1)[20:] + event(2) + ": keep-alive\n\n", USAGE + DONE[:5], DONE[5:]),
        stream(),
        authorization="Bearer secret-key",
    )
    assert (status, body.decode()) == (200, shown(1, 2) + ": keep-alive\n\n" + USAGE + DONE)
    assert "x-jaxinfer-seed: 7" in head
    assert head.count("date:") == 1
    assert "authorization: Bearer secret-key" in request[0]
    assert "x-jaxinfer-tell-tokens: 1" in request[0]
    assert request[1] == b"{}"
    assert "jaxinfer_front_requests_total 1\n" in metrics
    assert "jaxinfer_front_lost_total 0\n" in metrics


@pytest.mark.parametrize(
    "end",
    [
        (None,),
        (event(3)[:40], None),
        (USAGE, None),  # it comes again with the end
        (),
        (f"data: {msgspec.json.encode(unavailable('it goes', 5).openai()).decode()}\n\n",),
    ],
    ids=["dies", "dies within an event", "dies before the end", "ends without an end", "drains"],
)
def test_another_replica_goes_on_after_the_last_whole_event(end):
    (status, _, body), _, (request,), metrics = run(
        stream(event(1), event(2), *end),
        stream(":tokens 0 0 101,102,103\n\n" + event(3), USAGE + DONE),
        body=b'{"a":1}',
    )
    assert (status, body.decode()) == (200, shown(1, 2, 3) + USAGE + DONE)
    head, body = request
    assert f"last-event-id: {ID.format(1, '2-2-1')}\r\n" in head
    assert "x-jaxinfer-sent-tokens: 2\r\n" in head
    assert body == b'{"a":1}' + array.array("i", [101, 102]).tobytes()
    assert "jaxinfer_front_continued_total 1\n" in metrics


def test_blocks_of_messages_are_opened_once():
    """Events without an id wait for the one after them that has one."""
    opened, written = "event: content_block_start\ndata: {}\n\n", ID.format(1, "1-5-1")
    delta = f"id: {written}\nevent: content_block_delta\ndata: {{}}\n\n"
    end = "event: message_delta\ndata: {}\n\nevent: message_stop\ndata: {}\n\n"
    (_, _, body), _, (request,), _ = run(
        stream(opened, None), stream(":tokens 0 0 7\n\n" + opened + delta, end), path="/v1/messages"
    )
    assert body.decode() == opened + delta + end
    (_, _, body), _, (request,), metrics = run(
        stream(":tokens 0 0 7\n\n" + opened + delta, end[:40], None), stream(end), path="/v1/messages"
    )
    assert body.decode() == opened + delta + end
    assert written in request[0]
    assert request[1].endswith(array.array("i", [7]).tobytes())
    assert "jaxinfer_front_continued_total 1\n" in metrics


def test_lines_of_json_are_continued_by_comments_that_clients_do_not_get():
    def line(number):
        at = ID.format(1, f"{number:x}-{number:x}-1")
        return f':tokens 0 {number - 1} {number}\n\n:id: {at}\n{{"response":"{number}","done":false}}\n'

    last, lines = '{"response":"","done":true}\n', {"media_type": "application/x-ndjson"}
    for end in ((None,), (line(3)[:50], None), (':unavailable\n{"error":"it goes"}\n',), ()):
        (_, _, body), _, (request,), _ = run(
            stream(line(1), line(2), *end, **lines), stream(line(3), last, **lines), path="/api/generate"
        )
        shown = "".join(f'{{"response":"{number}","done":false}}\n' for number in (1, 2, 3))
        assert body.decode() == shown + last
        assert ID.format(1, "2-2-1") in request[0]
    (_, _, body), _, requests, _ = run(
        stream(line(1), '{"error":"no"}\n', **lines), stream(**lines), path="/api/generate"
    )
    assert body.decode() == '{"response":"1","done":false}\n{"error":"no"}\n'
    assert requests == []


def test_a_request_that_is_sent_again_has_the_seed_that_its_client_was_told():
    for path, body, expected in (
        ("/v1/messages", {"a": 1}, {"a": 1, "seed": 7}),
        ("/api/chat", {"a": 1}, {"a": 1, "options": {"seed": 7}}),
        ("/api/chat", {"options": {"top_k": 3, "seed": None}}, {"options": {"top_k": 3, "seed": 7}}),
        ("/api/chat", {"options": {"seed": 4}}, {"options": {"seed": 4}}),
        ("/api/chat", {"options": 3}, {"options": 3}),
    ):
        assert json.loads(_with_seed(json.dumps(body).encode(), 7, is_ollama=path == "/api/chat")) == expected
    assert _with_seed(b"[]", 7, is_ollama=False) == b"[]"


def test_a_replica_that_stalls_is_given_up():
    async def wait():
        await asyncio.sleep(60)

    (status, _, body), _, (request,), _ = run(
        stream(event(1), wait), stream(event(2), DONE), options={"stall_timeout": 0.3}
    )
    assert (status, body.decode()) == (200, shown(1, 2) + DONE)
    assert "x-jaxinfer-sent-tokens: 1\r\n" in request[0]


def test_before_the_first_event_the_request_is_sent_again():
    (_, _, body), _, (request,), metrics = run(stream(None), stream(event(1), DONE), body=b'{"a": 1}')
    assert body.decode() == shown(1) + DONE
    assert request[1] == b'{"a": 1}'
    assert "last-event-id" not in request[0]
    assert "jaxinfer_front_repeated_total 1\n" in metrics
    # A client that has seen the headers has seen the seed.
    (_, _, body), _, (request,), _ = run(
        stream(": keep-alive\n\n", None), stream(event(1), DONE), body=b'{"a": 1, "seed": null}'
    )
    assert body.decode() == ": keep-alive\n\n" + shown(1) + DONE
    assert json.loads(request[1]) == {"a": 1, "seed": 7}


def test_a_position_of_the_client_is_passed_on_and_then_replaced():
    (_, _, body), (first,), (second,), _ = run(
        stream(event(3), None), stream(event(4), DONE), last_event_id="client", x_jaxinfer_resume="other"
    )
    assert body.decode() == shown(3, 4) + DONE
    assert "last-event-id: client" in first[0]
    assert second[0].count("last-event-id") == 1
    assert ID.format(1, "3-3-1") in second[0]
    assert "x-jaxinfer-resume" not in second[0]
    assert "x-jaxinfer-sent-tokens" not in second[0]  # the first two were never told


def test_a_replica_that_takes_no_tokens_makes_them_anew():
    async def script(head, body):
        if "x-jaxinfer-sent-tokens" in head:
            error = {"message": "no", "param": "x-jaxinfer-sent-tokens", "code": "sent_tokens_refused"}
            yield whole(403, json.dumps({"error": error}))
            return
        async for part in stream(event(2), DONE)(head, body):
            yield part

    (status, _, body), _, requests, _ = run(stream(event(1), None), script, body=b"{}")
    assert (status, body.decode()) == (200, shown(1, 2) + DONE)
    assert [request[1][:2] for request in requests] == [b"{}", b"{}"]
    assert requests[1][1] == b"{}"


def test_a_refusal_to_go_on_ends_the_stream_with_its_reason():
    refusal = json.dumps({"error": {"message": "another model", "param": None, "code": "resume_differs"}})

    async def script(head, body):
        yield whole(409, refusal)

    (status, _, body), _, _, _ = run(stream(event(1), None), script)
    assert (status, body.decode().startswith(shown(1))) == (200, True)
    error = json.loads(body.decode().removeprefix(shown(1)).removeprefix("data: "))["error"]
    assert error["code"] == "resume_differs"
    assert "another model" in error["message"]


def test_a_replica_with_newer_weights_is_passed_over():
    refusal = json.dumps({"error": {"message": "another model", "param": None, "code": "resume_differs"}})

    async def newer(head, body):
        yield whole(409, refusal)

    async def all_three():
        begun, rest = stream(event(1), None), stream(event(2), DONE)
        async with FakeReplica(begun) as one, FakeReplica(newer) as other, FakeReplica(rest) as third:
            other.is_ready = third.is_ready = False
            async with front(one, other, third) as port:
                other.is_ready = third.is_ready = True
                while "ready_replicas 3" not in (await ask(port, "GET", "/metrics"))[2].decode():
                    await asyncio.sleep(0.05)
                return await ask(port), len(other.requests)

    (status, _, body), num_asked = uvloop.run(all_three())
    assert (status, body.decode()) == (200, shown(1, 2) + DONE)
    assert num_asked == 1


def test_a_begun_stream_waits_for_room():
    """Whatever replica has some first; the one that was lost may be back by then."""

    def replica(*answers):
        left = list(answers)

        async def script(head, body):
            if not left:
                yield whole(429, "{}")
                return
            async for part in left.pop(0)(head, body):
                yield part

        return script

    async def full(head, body):
        yield whole(429, "{}")

    first, second = replica(stream(event(1), None)), replica(full, full, stream(event(2), DONE))
    (status, _, body), _, requests, _ = run(first, second)
    assert (status, body.decode(), len(requests)) == (200, shown(1, 2) + DONE, 3)
    (status, _, body), _, _, metrics = run(replica(stream(event(1), None)), full, options={"wait_timeout": 0.7})
    assert (status, b"no other one had room in 0.7 s" in body) == (200, True)
    assert "given_up_total 1\n" in metrics


def test_a_request_that_ends_two_replicas_is_not_tried_again():
    async def dies(head, body):
        yield None

    (status, _head, body), first, second, _ = run(dies, dies)
    assert (status, json.loads(body)["error"]["code"]) == (500, "replicas_lost")
    assert (len(first), len(second)) == (1, 1)
    (status, _, body), *_ = run(stream(event(1), None), stream(None))  # as a stream, with nothing new in between
    assert status == 200
    assert b"replicas_lost" in body


def test_a_stream_may_lose_several_replicas_if_it_gets_on():
    def script(head, body):
        number = len(body) // 4 + 1
        return stream(event(number), *([None] if number < 6 else [DONE]))(head, body)

    (status, _, body), first, second, metrics = run(script, script, body=b"")
    assert (status, body.decode()) == (200, shown(1, 2, 3, 4, 5, 6) + DONE)
    assert len(first) + len(second) == 6
    assert "jaxinfer_front_continued_total 5\n" in metrics


def test_whole_answers_are_asked_for_again():
    async def dies(head, body):
        yield whole(200, "x" * 100)[:-50]
        await asyncio.sleep(0.02)
        yield None

    async def answers(head, body):
        yield whole(201, '{"a":2}')

    (status, _, body), first, second, _ = run(dies, answers, body=b'{"b":1}')
    assert (status, body) == (201, b'{"a":2}')
    assert first[0][1] == second[0][1] == b'{"b":1}'


def test_what_a_replica_refuses_now_another_one_takes():
    async def full(head, body):
        yield whole(503, "{}")

    async def answers(head, body):
        yield whole(200, "{}")

    (status, _, _), first, second, metrics = run(full, answers)
    assert (status, len(first), len(second)) == (200, 1, 1)
    assert "jaxinfer_front_lost_total 0\n" in metrics

    async def busy(head, body):
        yield whole(429, '{"error":"of this key"}')

    (status, _, body), _, second, _ = run(busy, answers)
    assert (status, body, second) == (429, b'{"error":"of this key"}', [])


def test_streams_of_other_routes_end_with_an_error():
    (status, _, body), _, second, _ = run(stream("event: x\n\n", None), stream(), path="/v1/embeddings")
    assert (status, second) == (200, [])
    assert body.startswith(b'event: x\n\ndata: {"error":{')
    assert b"cannot be continued" in body


def test_replicas_of_other_answers_get_no_requests(caplog):
    async def answers(head, body):
        yield whole(200, "{}")

    async def both():
        others = FakeReplica(answers, "fp_2")
        async with FakeReplica(answers) as one, others as other, front(one, other) as port:
            for _ in range(4):
                assert (await ask(port))[0] == 200
            assert (len(one.requests), len(other.requests)) == (4, 0)
            one.is_ready = False
            await asyncio.sleep(1.2)  # the last of its kind has gone: the others are in use
            assert (await ask(port))[0] == 200
            assert len(other.requests) == 1

    caplog.set_level("INFO")
    uvloop.run(both())
    assert "its system_fingerprint is fp_2, and that of http://127.0.0.1" in caplog.text


def test_what_the_front_does_not_pass_on():
    async def answers(head, body):
        yield whole(200, "{}")

    async def check():
        async with FakeReplica(answers) as one, front(one, max_body_bytes=1024) as port:
            for path in ("/v1/load_lora_adapter", "/models/load", "/pause", "/v1/completions/", "//v1/completions"):
                assert (await ask(port, path=path))[0] == 404
            assert (await ask(port, "GET"))[0] == 405
            assert (await ask(port, body=b" " * 2000))[0] == 413
            assert (await ask(port, host="evil.example"))[0] == 400  # a second Host
            assert (await ask(port, x_jaxinfer_sent_tokens="1"))[0] == 400
            assert (await ask(port, "GET", "/health"))[0] == 200
            assert not one.requests
            assert (await ask(port, "GET", "/v1/models?x=1"))[0] == 200
            assert one.requests[0][0].startswith("GET /v1/models?x=1 HTTP/1.1\r\n")
            assert f"host: 127.0.0.1:{one.port}" in one.requests[0][0]

    uvloop.run(check())


@pytest.mark.slow
def test_without_a_ready_replica_requests_wait_and_then_get_503():
    async def check():
        async with FakeReplica(stream()) as one, front(one, wait_timeout=0.2) as port:
            one.is_ready = False
            while (await ask(port, "GET", "/ready"))[0] == 200:
                await asyncio.sleep(0.05)
            status, head, _ = await ask(port)
            assert (status, "retry-after: 5" in head, one.requests) == (503, True, [])

    uvloop.run(check())


def test_a_client_that_leaves_ends_the_answer():
    async def check():
        left = asyncio.Event()

        async def wait():
            try:
                for _ in range(200):
                    await asyncio.sleep(0.05)
            finally:
                left.set()

        async with FakeReplica(stream(event(1), wait)) as one, front(one) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}")
            await reader.readuntil(b"data: 1")
            writer.transport.abort()
            metrics = b"jaxinfer_front_running 1"
            while b"jaxinfer_front_running 0" not in metrics:
                metrics = (await ask(port, "GET", "/metrics"))[2]
                await asyncio.sleep(0.02)

    uvloop.run(asyncio.wait_for(check(), 20))


@pytest.mark.slow
def test_a_client_that_does_not_read_costs_its_own_stream_only():
    sent = []

    async def much(head, body):
        yield start()
        for _ in range(300):
            sent.append(1)
            yield chunk("id: x\ndata: " + "y" * (1 << 18) + "\n\n")
        yield chunk(DONE) + b"0\r\n\r\n"

    def script(head, body):
        return much(head, body) if body == b"{}" else stream(event(1), DONE)(head, body)

    async def check():
        async with FakeReplica(script) as one, front(one, stall_timeout=0.5) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}")
            await reader.readuntil(b"data: ")
            for _ in range(5):
                assert (await ask(port, body=b"[]"))[2].decode() == shown(1) + DONE
                await asyncio.sleep(0.2)
            assert len(sent) < 150  # the rest waits at the replica
            data = b""
            while DONE.encode() not in data:
                data = data[-100:] + await reader.read(1 << 20)
            assert len(sent) == 300
            writer.close()

    uvloop.run(asyncio.wait_for(check(), 60))


def test_conversations_stay_where_they_are_cached():
    """Unless that replica is too busy, for callers with one key; another caller's equal prompt is cached nowhere."""

    def body(name, num_turns):
        turns = [{"role": "user", "content": f"{name} {turn} " * 40} for turn in range(num_turns)]
        return json.dumps({"messages": turns}).encode()

    async def script(head, body):
        yield whole(200, "{}")

    async def both():
        replicas = FakeReplica(script), FakeReplica(script)
        async with replicas[0] as one, replicas[1] as other, front(one, other, max_imbalance=1) as port:

            async def asked(name, num_turns, **headers):
                before = len(one.requests)
                await ask(port, path="/v1/chat/completions", body=body(name, num_turns), **headers)
                return len(one.requests) > before

            one.is_ready = False
            await asyncio.sleep(0.7)
            assert not await asked("a", 1)
            one.is_ready = True
            await asyncio.sleep(0.7)
            answers = [await asked(*about) for about in (("a", 2), ("b", 2), ("a", 3), ("b", 3))]
            return [*answers, await asked("a", 3, authorization="Bearer other")]

    assert uvloop.run(both()) == [False, True, False, True, True]


def test_connections_are_kept_and_a_closed_one_is_no_death():
    async def answers(head, body):
        yield whole(200, "{}")
        if body == b"last":
            yield None

    def script(head, body):
        return stream(event(1), DONE)(head, body) if body == b"stream" else answers(head, body)

    async def check():
        async with FakeReplica(script) as one, front(one) as port:
            for body in (b"stream", b"{}", b"last", b"{}", b"{}"):
                await asyncio.sleep(0.05)
                assert (await ask(port, body=body))[0] == 200
            assert len(set(one.peers)) == 2
            assert b"jaxinfer_front_lost_total 0\n" in (await ask(port, "GET", "/metrics"))[2]

    uvloop.run(check())


def test_replicas_of_a_public_front_need_keys():
    async def look(status):
        async def script(head, body):
            yield whole(status, "{}")

        async with FakeReplica(script) as one:
            return await Replica(one.url, 30.0).look(needs_keys=True)

    assert uvloop.run(look(401)) is None
    assert "--api-keys" in uvloop.run(look(200))


def test_options_that_make_no_front_are_refused():
    for replicas in (None, [], ["127.0.0.1:1"], ["https://a"], ["http://a/b"], ["http://a", "http://a:80/"]):
        with pytest.raises(ValueError, match="replica"):
            FrontOptions(replicas=replicas)
    assert FrontOptions(replicas=["http://a:1", "http://[::1]:2/"]).hosts == ("localhost", "127.0.0.1", "::1")


def test_the_fronts_own_routes_are_as_those_of_a_server():
    async def check():
        async with FakeReplica(stream()) as one, front(one) as port:
            for path in ("/health", "/ready", "/metrics"):
                status, head, _ = await ask(port, "GET", path, x_request_id="mine")
                assert (status, "x-request-id: mine" in head) == (200, True)
                status, head, _ = await ask(port, "TRACE", path)
                assert (status, "allow: get, head" in head) == (405, True)
                assert "x-request-id: req-" in head
            assert "x-request-id: req-" in (await ask(port, "GET", "/none"))[1]

    uvloop.run(check())


def test_a_front_loads_nothing_of_an_engine():
    """It starts in a moment, and takes 55 MB instead of 220."""
    code = "import sys, jaxinfer.fleet.front.run; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
