"""Weights that administrators replace over HTTP: who may, what is read, and what a client that dies leaves."""

import asyncio

import jax
import pytest

from checkpoints_convert import save_huggingface
from jaxinfer import AsyncEngine
from jaxinfer.engine.prefix_blocks import BlockCame, BlocksCleared, BlockWent
from jaxinfer.models import init_params
from jaxinfer.server.app import make_app
from jaxinfer.server.auth import Keys
from jaxinfer.server.options import ServerOptions
from tests.server.asgi import Client
from tests.server.conftest import OPTIONS, tiny_model
from tests.server.services import service_of

COMPLETIONS = "/v1/completions"
ASK = {"prompt": "def read_lines(path):", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
KEYS, ADMIN = {"first-secret-key": "alice"}, {"the-admins-secret": "root"}
ALICE, ROOT = "Bearer first-secret-key", "Bearer the-admins-secret"
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
POSTS = (START, UPDATE, FINISH, "/init_weight_transfer_engine", "/pause", "/resume", "/sleep", "/wake_up")
GETS = ("/is_paused", "/get_world_size", "/weight_info", "/is_sleeping", "/server_info")


def other_params(seed):
    config, params, _ = tiny_model()
    return jax.tree.map(
        lambda leaf, new: new * 4 if leaf.ndim == 2 else leaf, params, init_params(config, jax.random.key(seed))
    )


@pytest.fixture(scope="module")
def engine():
    engine = AsyncEngine(tiny_model(), **OPTIONS)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    config = tiny_model()[0]
    for seed in (1, 2):
        save_huggingface(config, other_params(seed), folder / "root" / str(seed), dtype="float32")
    save_huggingface(config, other_params(3), folder / "outside", dtype="float32")
    (folder / "root" / "link").symlink_to(folder / "outside")
    return folder / "root"


@pytest.fixture
def clients(engine, root):
    """Clients of the administrators' listener, with an admin key and with an API key, and one of the other listener."""
    service = service_of(engine, weight_routes=True, weights_roots=[str(root)])
    apps = [make_app(service, Keys(KEYS), Keys(ADMIN), for_admins=is_own) for is_own in (True, False)]
    yield Client(apps[0], authorization=ROOT), Client(apps[0], authorization=ALICE), Client(apps[1], authorization=ROOT)
    engine.resume()
    asyncio.run(engine.update_params(other_params(1)))  # in place of one that a test has not ended


async def update(client, seed, **more):
    steps = [(START, {}), (UPDATE, {"update_info": {"path": str(seed)}}), (FINISH, {"weight_version": f"v{seed}"})]
    for path, body in steps:
        answer = await client.post(path, body)
        assert answer.status == 200, answer.body
    return answer.json


async def ask(client):
    answer = await client.post(COMPLETIONS, {**ASK, "return_token_ids": True})
    return answer.json["choices"][0]["token_ids"], answer.json["system_fingerprint"]


def test_nobody_else_sees_the_routes(clients):
    admin, user, other = clients

    async def check():
        for client in (user, other):
            for path in POSTS:
                assert (await client.post(path, {})).status == 404, path
            for path in GETS:
                assert (await client.get(path)).status == 404, path
        assert (await admin.get("/is_paused")).json == {"is_paused": False}
        assert (await admin.get("/get_world_size")).json == {"world_size": 1}
        # Nor by other methods.
        for path in POSTS:
            assert (await user.get(path)).status == 404, path
            assert (await admin.get(path)).status == 405, path
        described = (await other.get("/openapi.json")).json["paths"]
        assert not {*POSTS, *GETS} & {*described}

    asyncio.run(check())


@pytest.mark.slow
def test_an_update_changes_answers_and_names(clients):
    admin, user, _ = clients

    async def check():
        seen = []
        for seed in (1, 2, 1):
            assert await update(admin, seed) == {"weight_version": f"v{seed}", "is_complete": True}
            seen.append(await ask(user))
        assert seen[0] == seen[2] != seen[1]
        assert seen[0][1] != seen[1][1]
        assert (await admin.get("/weight_info")).json["weight_version"] == "v1"

    asyncio.run(check())


@pytest.mark.slow
def test_an_update_clears_the_blocks_that_are_told_of(clients, engine):
    root, events = clients[0], []
    engine.llm.engine.scheduler.observe_blocks(events.extend)

    async def run():
        await ask(root)
        assert [type(event) for event in events] == [BlockCame]
        await update(root, 2)
        assert [type(event) for event in events] == [BlockCame, BlockWent, BlocksCleared]
        await ask(root)
        assert [type(event) for event in events[3:]] == [BlockCame]

    try:
        asyncio.run(run())
    finally:
        engine.llm.engine.scheduler.prefixes.observer = None


@pytest.mark.slow
def test_a_client_that_dies_leaves_a_model_that_waits(clients):
    admin, user, _ = clients

    async def check():
        await update(admin, 1)
        expected = await ask(user)
        for last in range(3):
            steps = (START, {}), (UPDATE, {"update_info": {"path": "2"}}), ("/pause?mode=keep", {})
            for path, body in steps[: last + 1]:
                assert (await admin.post(path, body)).status == 200
            ready = await user.get("/ready")
            assert ready.status == 503
            assert "an update of the weights is under way" in ready.body.decode()
            waiting = asyncio.ensure_future(ask(user))
            await admin.post("/resume", {})
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await update(admin, 1)
            assert await waiting == expected
            assert (await user.get("/ready")).status == 200

    asyncio.run(check())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        (UPDATE, {"update_info": {"path": "1"}}, 409, "no update of the weights has begun"),
        (FINISH, {}, 409, "no update of the weights has begun"),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "nccl"}}, 400, "none of path, process"),
        (START, {"is_checkpoint_format": False}, 400, "is_checkpoint_format"),
        ("/pause?mode=soon", {}, 400, "none of wait, keep, abort"),
        ("/sleep?level=3", {}, 400, "none of 1, 2"),
        ("/pause?mode=keep&wait_for_inflight_requests=true", {}, 400, "contradict each other"),
        ("/wake_up?tag=weights", {}, 400, "unknown parameter 'tag'"),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"master_address": "10.0.0.1"}},
            400,
            "init_info.master_address",
        ),
        (UPDATE, {"update_info": {"path": "1", "partial": True}}, 400, "update_info.partial is not for backend='path'"),
        (FINISH, {"weight_version": ""}, 400, "1 to 256 printable characters"),
    ],
)
def test_what_cannot_be_done_is_refused(clients, path, body, status, told):
    answer = asyncio.run(clients[0].post(path, body))
    assert answer.status == status
    assert told in answer.body.decode()


@pytest.mark.slow
def test_only_folders_below_the_root_are_read(clients, root):
    admin = clients[0]

    async def check():
        assert (await admin.post(START, {})).status == 200
        for info in ({"path": "../outside"}, {"path": str(root.parent / "outside")}, {"path": "link"}, {"path": "no"}):
            answer = await admin.post(UPDATE, {"update_info": info})
            assert answer.status == 400, info
            assert "is no folder below --weights-root" in answer.body.decode()
        assert (await admin.post(UPDATE, {"update_info": {"backend": "process", "name": "policy"}})).status == 400
        # Weights that did not come get no name.
        assert (await admin.post(FINISH, {"weight_version": "outside"})).status == 409
        assert (await admin.post(FINISH, {})).status == 200

    asyncio.run(check())


@pytest.mark.slow
def test_memory_is_given_back(clients):
    admin, user, _ = clients

    async def check():
        await update(admin, 2)
        expected = await ask(user)
        assert (await admin.post("/sleep?level=1", {})).json == {"is_sleeping": True}
        assert (await user.get("/ready")).status == 503
        assert (await admin.post("/wake_up?tags=weights", {})).json == {"is_sleeping": True}
        assert (await admin.post("/wake_up", {})).json == {"is_sleeping": False}
        assert await ask(user) == expected
        # Without the weights, and paused, which is another thing.
        await admin.post("/pause?wait_for_inflight_requests=true&clear_cache=true", {})
        assert (await admin.post("/sleep?level=2", {})).json == {"is_sleeping": True}
        assert (await admin.get("/is_sleeping")).json == {"is_sleeping": True}
        assert "were dropped" in (await user.get("/ready")).body.decode()
        assert (await admin.post("/wake_up", {})).json == {"is_sleeping": False}
        assert (await admin.post("/resume", {})).json == {"is_paused": True}
        await update(admin, 2)
        assert (await admin.get("/is_paused")).json == {"is_paused": False}
        assert (await ask(user))[0] == expected[0]

    asyncio.run(check())


def test_options_that_go_together():
    with pytest.raises(ValueError, match="weights_roots is for weight_routes"):
        ServerOptions(weights_roots=["x"])
    with pytest.raises(ValueError, match="admin_keys is for"):
        ServerOptions(admin_keys="x")
