"""Clients of a server whose model has adapters: the openai package names them, TRL's client sends them."""

import asyncio
import json

import pytest

from jaxinfer import AsyncEngine
from jaxinfer.server.auth import Keys
from tests.server.adapter_folders import make_adapter, write_adapter
from tests.server.clients.test_clients import ENVIRONMENTS, use
from tests.server.conftest import OPTIONS, offline, tiny_model
from tests.server.services import service_of
from tests.server.sockets import served

pytestmark = [pytest.mark.slow, pytest.mark.clients]
ADMIN = "the-admins-secret"


@pytest.fixture(scope="module")
def engine():
    if not ENVIRONMENTS["clients"].exists():
        pytest.skip("clients: there is no .venv-clients; make test-clients makes it")
    engine = AsyncEngine(tiny_model(), adapters={"first": make_adapter(1)}, max_adapters=4, **OPTIONS)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def port(engine, tmp_path):
    (tmp_path / "root").mkdir()
    service = service_of(engine, adapter_routes=True, adapter_roots=[str(tmp_path / "root")])
    with served(service, Keys({"first-secret-key": "alice"}), Keys({ADMIN: "root"})) as port:
        yield port


@pytest.mark.timeout(300)
def test_the_openai_package_names_an_adapter(engine, port):
    url = f"http://127.0.0.1:{port}"
    found = json.loads(use("openai_adapters", "clients", url, "first-secret-key", "first"))
    assert all(base != adapted for base, adapted in zip(found["tiny"], found["first"], strict=True))


@pytest.mark.timeout(300)
def test_trls_client_sends_adapters(engine, port, tmp_path):
    """Its class unchanged; the admin key is in the server's URL."""
    for version in (1, 2, 3, 4):
        write_adapter(tmp_path / "root" / f"policy-v{version}", 10 + version)
    found = json.loads(use("trl", "clients", f"http://admin:{ADMIN}@127.0.0.1:{port}", tmp_path / "root"))
    assert found["versions"] == 4
    params = {"max_tokens": 24, "temperature": 1.0, "seed": 2**62 + 12345, "logprobs": 0}
    own = offline(engine, [5, 17, 29, 41], adapter="policy-v4", **params).outputs[0]
    assert found["tokens"] == own.token_ids
    expected = [entry[token].logprob for token, entry in zip(own.token_ids, own.logprobs, strict=True)]
    assert found["logprobs"] == pytest.approx(expected, abs=1e-6)
    assert set(engine.llm.adapters) == {"first", "policy-v3", "policy-v4"}
    assert engine.llm.adapters["policy-v4"].fingerprint == make_adapter(14).fingerprint
