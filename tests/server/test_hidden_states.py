"""/v1/hidden_states: the states of an engine's own passes as safetensors, within its bound, behind keys, and only where
it is turned on."""

import asyncio

import numpy as np
import pytest
from safetensors.numpy import load

from jaxinfer import AsyncEngine, SamplingParams
from jaxinfer.cli.command import UsageError
from jaxinfer.cli.serve import ServeModelOptions, serve
from jaxinfer.server import hidden_states
from jaxinfer.server.app import make_app
from jaxinfer.server.auth import Keys
from jaxinfer.server.options import ServerOptions
from tests.server.asgi import Client
from tests.server.conftest import OPTIONS, is_idle, tiny_model
from tests.server.services import service_of

PATH, TEXT = "/v1/hidden_states", "def read(path):"


@pytest.fixture(scope="module")
def tapped():
    engine = AsyncEngine(tiny_model(), tapped_layers=(0, 1), **OPTIONS)
    yield engine
    asyncio.run(engine.close())


def post(engine, body, path=PATH, **options):
    return asyncio.run(Client(make_app(service_of(engine, **{"hidden_states": True, **options}))).post(path, body))


async def last_output(deltas):
    return [delta.output async for delta in deltas if delta.output is not None][-1]


@pytest.mark.slow
def test_states_are_those_of_generate(tapped):
    answer = post(tapped, {"prompt": TEXT, "layers": [1, 0], "max_tokens": 5})
    assert (answer.status, answer.headers["content-type"]) == (200, "application/octet-stream"), answer.body
    arrays = load(answer.body)
    params = SamplingParams(max_tokens=5, temperature=0)
    expected = asyncio.run(last_output(tapped.generate(TEXT, params, tapped_layers=(0, 1))))
    (own,) = expected.outputs
    assert arrays["token_ids"].tolist() == [*expected.prompt_token_ids, *own.token_ids]
    assert set(arrays) == {"layers.0", "layers.1", "token_ids"}
    for layer, states in own.hidden_states.items():
        np.testing.assert_array_equal(arrays[f"layers.{layer}"], states)
    ids = post(tapped, {"prompt": expected.prompt_token_ids, "layers": [0]})
    np.testing.assert_allclose(load(ids.body)["layers.0"], own.hidden_states[0][: len(expected.prompt_token_ids)])
    assert is_idle(tapped)


REFUSED = [
    ({"prompt": TEXT, "layers": [2]}, "layers", r"after layer 2: tapped_layers=(0, 1)"),
    ({"prompt": TEXT, "layers": []}, None, "layers"),
    ({"prompt": TEXT, "layers": [-1]}, None, "layers"),
    ({"prompt": TEXT}, None, "layers"),
    ({"prompt": "", "layers": [0]}, "prompt", "empty"),
    ({"prompt": TEXT, "layers": [0], "steering": {}}, None, "steering"),
    ({"prompt": TEXT, "layers": [0], "max_tokens": 1000}, None, "max_model_len"),
]


@pytest.mark.parametrize(("body", "param", "told"), REFUSED)
def test_refused(tapped, body, param, told):
    answer = post(tapped, body)
    assert answer.status == 400
    assert told in answer.json["error"]["message"]
    assert is_idle(tapped)


def test_more_bytes_than_may_be(tapped, monkeypatch):
    """With the numbers; nothing is computed."""
    counters = tapped.llm.engine.scheduler.counters
    body = {"prompt": [1] * 60, "layers": [0, 1], "max_tokens": 9}
    num_bytes, before = 4 * 2 * 68 * tapped.llm.config.hidden_size, counters.num_added
    monkeypatch.setattr(hidden_states, "_MIB", num_bytes - 1)
    answer = post(tapped, body, hidden_states_max_mib=1)
    assert (answer.status, answer.json["error"]["code"]) == (400, "answer_too_large")
    told = answer.json["error"]["message"]
    assert f"{num_bytes} bytes in float32, and at most {num_bytes - 1} are answered" in told
    assert counters.num_added == before
    monkeypatch.setattr(hidden_states, "_MIB", num_bytes)
    assert post(tapped, body, hidden_states_max_mib=1).status == 200


def test_it_is_off_by_default_and_behind_the_keys(tapped, tmp_path):
    body = {"prompt": TEXT, "layers": [0]}
    assert post(tapped, body, hidden_states=False).status == 404
    file = tmp_path / "keys"
    file.write_text("first-secret-key-of-16\n")
    file.chmod(0o600)
    app = make_app(service_of(tapped, hidden_states=True), Keys.read(file))
    assert asyncio.run(Client(app).post(PATH, body)).status == 401
    assert asyncio.run(Client(app, authorization="Bearer first-secret-key-of-16").post(PATH, body)).status == 200
    described = asyncio.run(Client(app, authorization="Bearer first-secret-key-of-16").get("/openapi.json")).json
    assert "application/octet-stream" in described["paths"][PATH]["post"]["responses"]["200"]["content"]


def test_the_command_needs_both_options():
    for model, server in (({"tapped_layers": "1"}, {}), ({}, {"hidden_states": True})):
        with pytest.raises(UsageError, match="need each other"):
            serve(ServeModelOptions(model="demo", **model), ServerOptions(**server))
