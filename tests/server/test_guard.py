"""What stands before the routes: keys, hosts, origins, headers, request ids. One test for each known hole."""

import asyncio
import time

import pytest

from jaxinfer.server.app import make_app
from jaxinfer.server.auth import Keys
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.page import chat_page
from tests.server.asgi import Client

KEYS = {"first-secret-key": "alice", "second-secret-key": "bob"}
PATHS = ["/v1/models", "/metrics", "/version", "/v1/nothing", "//", "//v1/models", "/health/", "/v1/../health"]


def run(coroutine):
    return asyncio.run(coroutine)


@pytest.fixture
def guarded(make_service):
    return make_app(make_service(api_keys="keys"), Keys(KEYS))


def test_every_route_but_the_probes_needs_a_key(guarded):
    async def ask():
        client = Client(guarded)
        for path in PATHS:
            answer = await client.get(path)
            assert answer.status == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.error["code"] == "invalid_api_key"
        for body in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"):
            assert (await client.post(body, {})).status == 401
        assert (await client.post("/v1/messages", {})).json["type"] == "error"
        assert (await client.get("/health")).status == (await client.get("/ready")).status == 200
        for key in KEYS:
            assert (await client.get("/v1/models", authorization=f"Bearer {key}")).status == 200
            assert (await client.get("/v1/models", x_api_key=key)).status == 200
        for wrong in (
            "Bearer",
            "Bearer ",
            "Bearer first-secret-ke",
            "Basic first-secret-key",
            "Bearer " + "x" * 10_000,
        ):
            assert (await client.get("/v1/models", authorization=wrong)).status == 401

    run(ask())


def test_open_metrics_open_that_path_alone(make_service):
    async def ask():
        client = Client(make_app(make_service(api_keys="keys", open_metrics=True), Keys(KEYS)))
        assert (await client.get("/metrics")).status == 200
        assert (await client.get("/metrics", x_api_key="first-secret-key")).status == 200
        assert (await client.get("/metrics", x_api_key="no-such-key")).status == 401
        for path in {*PATHS, "/metrics/", "/openapi.json"} - {"/metrics"}:
            assert (await client.get(path)).status == 401, path
        described = (await client.get("/openapi.json", x_api_key="first-secret-key")).json
        assert "security" not in described["paths"]["/metrics"]["get"]
        assert described["paths"]["/v1/models"]["get"]["security"]

    run(ask())


def test_the_chat_page_needs_no_key_but_its_requests_do(make_service):
    async def ask():
        for options, keys in (({}, None), ({"api_keys": "keys"}, Keys(KEYS))):
            client = Client(make_app(make_service(**options), keys))
            answer = await client.get("/")
            assert (answer.status, answer.body) == (200, chat_page().content)
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            assert answer.headers["content-security-policy"] == chat_page().headers["Content-Security-Policy"]
            models = await client.get("/v1/models")
            assert models.status == (200 if keys is None else 401)
            assert (await client.get("/", host="evil.example")).status == 403
            without = Client(make_app(make_service(ui=False, **options), keys))
            assert (await without.get("/")).status == 404

    run(ask())


@pytest.mark.parametrize("host", ["localhost:8000/health?x=", "localhost/health", "x/health", "localhost:8000#/health"])
def test_the_host_header_does_not_open_a_route(make_service, host):
    async def ask():
        for options in ({"allowed_hosts": [host.lower(), "localhost"]}, {}):
            app = make_app(make_service(api_keys="keys", **options), Keys(KEYS))
            assert (await Client(app).get("/v1/models", host=host)).status in (401, 403)

    run(ask())


def test_keys_are_compared_in_constant_time(monkeypatch):
    compared = []
    from jaxinfer.server import auth

    original = auth.hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: compared.append(len(a)) or original(a, b))
    keys = Keys(KEYS)
    assert [keys.name_of(key) for key in (b"first-secret-key", b"second-secret-key", b"f", b"x" * 1000)] == [
        "alice",
        "bob",
        None,
        None,
    ]
    assert compared == [32] * 8


def test_files_of_keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\nfirst-secret-key alice\n\nsecond-secret-key\n")
    keys = Keys.read(path)
    assert (keys.name_of(b"first-secret-key"), keys.name_of(b"second-secret-key")) == ("alice", "key-2")
    for text, told in (("short", "line 1"), ("same-long-key\nsame-long-key", "line 2"), ("# none", "no keys")):
        path.write_text(text)
        with pytest.raises(ValueError, match=told):
            Keys.read(path)


def test_a_public_address_needs_keys():
    with pytest.raises(ValueError, match="api_keys"):
        ServerOptions(host="0.0.0.0")
    assert ServerOptions(host="0.0.0.0", api_keys="keys").hosts is None


def test_names_that_point_at_the_loopback_are_refused(client):
    async def ask():
        for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"):
            assert (await client.get("/v1/models", host=host)).status == 200, host
        for host in ("evil.example", "localhost.evil.example:8000", "", "127.0.0.1.evil.example"):
            assert (await client.get("/v1/models", host=host)).status == 403, host

    run(ask())


def test_pages_of_other_origins(make_service):
    async def ask():
        preflight = {"origin": "http://a.example", "access_control_request_method": "POST"}
        closed = Client(make_app(make_service()))
        assert (await closed.call("OPTIONS", "/v1/completions", **preflight)).status == 403
        assert "access-control-allow-origin" not in (await closed.get("/v1/models", **preflight)).headers
        opened = Client(make_app(make_service(allowed_origins=["http://a.example"], api_keys="keys"), Keys(KEYS)))
        answer = await opened.call(
            "OPTIONS", "/v1/completions", access_control_request_headers="authorization", **preflight
        )
        assert answer.status == 204
        assert answer.headers["access-control-allow-origin"] == "http://a.example"
        assert answer.headers["access-control-allow-headers"] == "authorization"
        other = await opened.call("OPTIONS", "/v1/completions", **{**preflight, "origin": "http://b.example"})
        assert other.status == 403
        assert "access-control-allow-origin" not in other.headers
        assert (await opened.get("/v1/models", **preflight)).headers[
            "access-control-allow-origin"
        ] == "http://a.example"

    run(ask())


def test_large_headers_and_bodies_are_refused(make_service):
    client = Client(make_app(make_service(max_header_bytes=4096, max_body_bytes=2048)))

    async def ask():
        assert (await client.get("/v1/models", x_big="x" * 5000)).status == 431
        assert (await client.post("/v1/completions", {"prompt": "a " * 2000})).status == 413
        assert (await client.post("/v1/completions", {"prompt": "a"}, content_length="999999")).status == 413
        assert (await client.post("/v1/completions", {"prompt": "a"}, content_length="-x")).status == 400

    run(ask())


def test_request_ids(client):
    async def ask():
        assert (await client.get("/health", x_request_id="abc-1.2:3")).headers["x-request-id"] == "abc-1.2:3"
        for unsafe in ("x" * 129, "a b", 'a"b', ""):
            assert (await client.get("/health", x_request_id=unsafe)).headers["x-request-id"].startswith("req-")

    run(ask())


def test_clients_of_different_keys_share_no_prefix(make_service):
    service = make_service()
    salts = [service.salt(key, salt) for key in ("", "a", "b") for salt in ("", "x")]
    assert len(set(salts)) == len(salts)
    assert service.salt("", "") == ""
    assert service.salt("a", "bc") != service.salt("ab", "c")


def test_an_error_in_a_route_is_told_without_details(make_service, monkeypatch, caplog):
    service = make_service()
    client = Client(make_app(service))
    monkeypatch.setattr(type(service), "check_accepts", lambda self: 1 / 0)

    async def ask():
        answer = await client.post("/v1/completions", {"prompt": "a"})
        assert answer.status == 500
        assert "division" not in answer.body.decode()

    run(ask())
    assert "division" in caplog.text


def test_a_client_that_stops_reading_is_let_go(make_service, engine):
    service = make_service(send_timeout=0.3)
    client = Client(make_app(service))

    async def ask():
        body = {"prompt": "def", "max_tokens": 200, "ignore_eos": True, "seed": 1, "stream": True}
        stalled = client.send("POST", "/v1/completions", body, max_unread=3)
        other = await client.post("/v1/completions", {"prompt": "a", "max_tokens": 5, "seed": 1})
        assert other.status == 200
        start = time.monotonic()
        await stalled.task
        assert time.monotonic() - start < 30
        assert not service.generations
        assert service.default.admission.num_running == 0

    run(ask())


def test_metrics_count_what_was_answered(client, service):
    async def ask():
        await client.post("/v1/completions", {"prompt": "a", "max_tokens": 4, "seed": 1, "ignore_eos": True})
        await client.post("/v1/completions", {"prompt": 5})
        await client.get("/no/such/path")
        return (await client.get("/metrics")).body.decode()

    text = run(ask())
    assert 'jaxinfer_generation_tokens_total{model_name="tiny"} 4.0' in text
    assert 'jaxinfer_request_success_total{finished_reason="length",model_name="tiny"} 1.0' in text
    assert 'jaxinfer_http_requests_total{code="400",model_name="tiny",route="/v1/completions"} 1.0' in text
    assert 'route="other"' in text
    assert "/no/such/path" not in text
    assert "jaxinfer_compilations_total" in text
    assert 'jaxinfer_time_to_first_token_seconds_count{model_name="tiny"} 1.0' in text
