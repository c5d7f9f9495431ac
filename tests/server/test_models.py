"""Several models in one server: who is loaded, who has to go, who waits, and what a budget bounds."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import os
import random
import threading
import time
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.memory import OutOfMemoryError
from jaxinfer.server import catalogue as catalogue_module
from jaxinfer.server.api_error import APIError
from jaxinfer.server.app import make_app
from jaxinfer.server.catalogue import LocalModels, count_needs, resident_bytes
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.models import ModelNeeds, ModelSource, ServedModel
from jaxinfer.server.options import ServerOptions, parse_bytes, parse_duration
from jaxinfer.server.pool import ModelPool
from jaxinfer.server.service import Service
from tests.checkpoints_convert.recurrent_files import FAMILIES
from tests.checkpoints_convert.recurrent_files import write as write_recurrent
from tests.cli import conftest as checkpoint_module
from tests.cli.conftest import write_checkpoint
from tests.pallas_kernels.quick import quick
from tests.server.asgi import Client
from tests.server.conftest import until


class FakeEngine:
    def __init__(self):
        self.is_alive = True
        self.llm = SimpleNamespace(max_model_len=64)

    async def close(self):
        await asyncio.sleep(0.001)
        self.is_alive = False


class Models:
    """A catalogue of models a, b, c and others, 10 bytes each, that load when they are told to."""

    is_store = False

    def __init__(self, names="abcde", budget=20, **sizes):
        self._names, self._budget, self.sizes = list(names), budget, sizes
        self.gate = threading.Event()
        self.gate.set()
        self.loads, self.failing, self.keys = [], {}, {}
        self.num_bytes = self.most_bytes = 0

    def names(self):
        return self._names

    def find(self, name):
        if name not in self._names:
            return None
        needs = ModelNeeds({"weights": self.sizes.get(name, 10)})
        key = self.keys.get(name, name)
        return ModelSource((name,), name, functools.partial(self._open, name), lambda budget: needs, key=key)

    def budget(self):
        return self._budget

    def _open(self, name, needs):
        assert self.gate.wait(30)
        if name in self.failing:
            raise self.failing[name]
        self.loads.append(name)
        return FakeEngine()


@pytest.fixture
def pool_of(monkeypatch):
    def attach(self, engine):
        self._engine, self.state, self.error = engine, "ready", None

    def detach(self):
        engine, self._engine = self._engine, None
        return engine

    monkeypatch.setattr(ServedModel, "attach", attach)
    monkeypatch.setattr(ServedModel, "detach", detach)

    def make(models, **options):
        return ModelPool(models, ServerOptions(**{"keep_alive": ["-1"], **options}), Metrics(""), None)

    return make


def loaded(pool):
    return {model.name for model in pool.models if model.state == "ready"}


async def use(pool, *names, **how):
    for name in names:
        (await pool.acquire(name, **how)).release()


def test_the_least_recently_used_model_goes(pool_of):
    async def run():
        models = Models()
        pool = pool_of(models)
        await use(pool, "a", "b", "a", "c")
        assert loaded(pool) == {"a", "c"}
        await use(pool, "a", "c", "a")
        assert models.loads == ["a", "b", "c"]
        assert pool.num_bytes == 20
        with pytest.raises(APIError, match=r"'x' is not served here; served are 'a', 'b'") as found:
            await pool.acquire("x")
        assert found.value.status == 404

    asyncio.run(run())


def test_a_busy_model_stays_and_is_then_not_used_again_before_the_one_that_waits(pool_of):
    async def run():
        pool = pool_of(Models())
        busy = [await pool.acquire("a"), await pool.acquire("b")]
        waiting = asyncio.ensure_future(pool.acquire("c"))
        await until(lambda: any(model.is_leaving for model in pool.models))
        later = asyncio.ensure_future(pool.acquire("a"))
        await asyncio.sleep(0.05)
        assert loaded(pool) == {"a", "b"}
        assert not waiting.done()
        assert not later.done()  # or a model in steady use would keep the others out
        busy[0].release()
        lease = await waiting
        assert loaded(pool) == {"b", "c"}
        assert not later.done()
        lease.release()
        (await later).release()
        assert loaded(pool) == {"a", "b"}
        busy[1].release()

    asyncio.run(run())


def test_a_model_that_waits_for_nobody_lets_the_others_stay(pool_of):
    async def run():
        pool = pool_of(Models())
        busy = [await pool.acquire("a"), await pool.acquire("b")]
        waiting = asyncio.ensure_future(pool.acquire("c"))
        await until(lambda: any(model.is_leaving for model in pool.models))
        later = asyncio.ensure_future(pool.acquire("a"))
        await asyncio.sleep(0.02)
        waiting.cancel()
        (await asyncio.wait_for(later, 5)).release()
        assert loaded(pool) == {"a", "b"}
        assert all(not model.is_leaving and not model.num_waiting for model in pool.models)
        for lease in busy:
            lease.release()

    asyncio.run(run())


def test_pinned_models_stay_and_what_never_fits_is_refused(pool_of):
    async def run():
        pool = pool_of(Models(d=21, e=11), pin=["a"])
        await use(pool, "a", "b", "c", "b", "c")
        assert loaded(pool) == {"a", "c"}
        for name in ("d", "e"):
            with pytest.raises(APIError, match="the budget of all models is 20") as found:
                await pool.acquire(name)
            assert found.value.status == 503
        assert loaded(pool) == {"a", "c"}
        assert (await pool.find("e")).status(time.monotonic())["value"] == "failed"

    asyncio.run(run())


def test_idle_models_go_after_their_keep_alive(pool_of):
    async def run():
        pool = pool_of(Models(), keep_alive=["0.05", "b=-1"], pin=["c"])
        await use(pool, "a", "b")
        await until(lambda: loaded(pool) == {"b"}, 5)
        await use(pool, "b", keep_alive=0.0)  # as a request says
        await until(lambda: not loaded(pool), 5)
        await use(pool, "c", keep_alive=0.0)
        await use(pool, "a", keep_alive=float("inf"))
        await asyncio.sleep(0.1)
        assert loaded(pool) == {"a", "c"}
        lease = await pool.acquire("a", keep_alive=0.0)
        await asyncio.sleep(0.05)
        assert loaded(pool) == {"a", "c"}  # in use
        lease.release()
        await until(lambda: loaded(pool) == {"c"}, 5)

    asyncio.run(run())


def test_a_model_that_was_just_given_to_a_request_does_not_expire(pool_of):
    """The request's own task has not run yet, and the timer of the model is still that of its idle time."""

    async def run():
        pool = pool_of(Models())
        await use(pool, "a", keep_alive=0.0)
        (model,) = pool.models
        model.num_users += 1
        await asyncio.sleep(0.02)
        assert model.state == "ready"
        pool._release(model, None)
        await until(lambda: model.state == "unloaded")

    asyncio.run(run())


def test_shared_weights_are_counted_once(pool_of):
    """Of a and b the weights are the same, and of c the draft's are those of d: three models fit where two would."""
    models = Models(names="abcd", budget=24)
    shared = {"a": {"ab": 8}, "b": {"ab": 8}, "c": {"c": 4, "d": 4}, "d": {"d": 4}}
    find = models.find

    def with_shared(name):
        needs = ModelNeeds({"weights": sum(shared[name].values()), "cache": 2}, shared=shared[name])
        return dataclasses.replace(find(name), count=lambda budget: needs)

    models.find = with_shared

    async def run():
        pool = pool_of(models)
        await use(pool, "a", "b")
        assert pool.num_bytes == 8 + 2 + 2
        await use(pool, "c")
        assert (loaded(pool), pool.num_bytes) == ({"a", "b", "c"}, 22)
        await use(pool, "d")
        assert (loaded(pool), pool.num_bytes) == ({"a", "b", "c", "d"}, 24)
        await pool.unload("a")
        assert pool.num_bytes == 22

    asyncio.run(run())


def test_a_failed_load_answers_those_that_wait_and_is_tried_again(pool_of):
    async def run():
        models = Models()
        pool = pool_of(models)
        models.gate.clear()
        models.failing["a"] = ValueError("config.json: vocab_size is missing")
        waiting = [asyncio.ensure_future(pool.acquire("a")) for _ in range(3)]
        await asyncio.sleep(0.02)
        models.gate.set()
        for one in waiting:
            with pytest.raises(APIError, match=r"'a' could not be loaded: config\.json: vocab_size is missing"):
                await one
        assert pool.num_bytes == 0
        models.failing.clear()
        await use(pool, "a")
        assert loaded(pool) == {"a"}

    asyncio.run(run())


def test_a_request_that_cannot_be_in_time_is_refused_with_the_time_to_come_back(pool_of):
    async def run():
        models = Models(budget=10)
        pool = pool_of(models)
        models.gate.clear()
        with pytest.raises(APIError) as found:
            await pool.acquire("a", timeout=0.05)
        assert found.value.status == 503
        assert int(found.value.headers["retry-after"]) >= 1
        models.gate.set()
        await until(lambda: not pool.is_loading)
        await use(pool, "a", "b")
        known = await pool.find("a")
        known.load_seconds = 100.0  # it may be faster next time
        await use(pool, "a", timeout=50)
        assert known.load_seconds < 50
        await use(pool, "b")
        known.load_seconds = 100.0
        models.gate.clear()
        loading = asyncio.ensure_future(pool.acquire("a"))
        await until(lambda: pool.is_loading)
        start = time.monotonic()
        with pytest.raises(APIError) as found:
            await pool.acquire("b", timeout=50)
        assert time.monotonic() - start < 5  # it is not kept waiting
        assert int(found.value.headers["retry-after"]) >= 90
        pool._load_start -= 90  # the time that has passed counts
        later = asyncio.ensure_future(pool.acquire("b", timeout=50))
        await asyncio.sleep(0.02)
        models.gate.set()
        (await loading).release()
        (await later).release()

    asyncio.run(run())


def test_requests_that_wait_for_a_model_count_in_the_one_queue(pool_of):
    async def run():
        models = Models()
        pool = pool_of(models, max_queued=4)
        models.gate.clear()
        waiting = [asyncio.ensure_future(pool.acquire("ab"[number % 2])) for number in range(5)]
        await asyncio.sleep(0.02)
        with pytest.raises(APIError, match="5 answers wait already") as found:
            await pool.acquire("c")
        assert found.value.status == 429
        models.gate.set()
        for lease in await asyncio.gather(*waiting):
            lease.release()

    asyncio.run(run())


def test_stop_waits_for_running_requests(pool_of):
    async def run():
        models = Models()
        pool = pool_of(models)
        lease = await pool.acquire("a")
        stopping = asyncio.ensure_future(pool.unload("a"))
        await asyncio.sleep(0.02)
        later = asyncio.ensure_future(pool.acquire("a"))
        await asyncio.sleep(0.02)
        assert loaded(pool) == {"a"}
        lease.release()
        await asyncio.wait_for(stopping, 5)
        (await asyncio.wait_for(later, 5)).release()
        assert models.loads == ["a", "a"]
        await pool.unload("b")  # is not loaded

    asyncio.run(run())


def test_names_of_one_model_may_come_to_mean_others(pool_of):
    async def run():
        models = Models(["alias", "repo"], 30)
        models.keys = {"alias": "one", "repo": "one"}
        pool = pool_of(models)
        await use(pool, "alias", "repo")
        assert models.loads == ["alias"]
        await pool.unload("repo")
        models.keys["alias"] = "other"
        await use(pool, "repo", "alias")
        assert models.loads == ["alias", "repo", "alias"]  # each by its own name
        await pool.unload("repo")
        models._names.remove("alias")
        await use(pool, "repo")
        await pool.unload("repo")
        models.failing["repo"] = FileNotFoundError("gone")
        with pytest.raises(APIError, match="gone"):
            await pool.acquire("repo")
        models._names.remove("repo")
        with pytest.raises(APIError) as found:
            await pool.acquire("repo")
        assert found.value.status == 404

    asyncio.run(run())


def test_a_model_that_is_loaded_while_it_is_looked_up_is_kept(pool_of, monkeypatch):
    async def run():
        models = Models()
        pool, looking, go_on = pool_of(models), threading.Event(), threading.Event()
        await use(pool, "a")
        await pool.unload("a")
        find = models.find

        def gone(name):
            looking.set()
            assert go_on.wait(30)

        monkeypatch.setattr(models, "find", gone)
        late = asyncio.ensure_future(pool.acquire("a"))
        await until(looking.is_set)
        monkeypatch.setattr(models, "find", find)
        lease = await pool.acquire("a")
        go_on.set()
        (await late).release()
        lease.release()
        assert pool.num_bytes == 10
        assert models.loads == ["a", "a"]

    asyncio.run(run())


def test_two_stops_of_a_model_while_another_is_loaded(pool_of):
    async def run():
        models = Models(budget=30)
        pool = pool_of(models)
        await use(pool, "a")
        models.gate.clear()
        loading = asyncio.ensure_future(pool.acquire("b"))
        await until(lambda: pool.is_loading)
        stops = [asyncio.ensure_future(pool.unload("a")) for _ in range(2)]
        await asyncio.sleep(0.02)
        models.gate.set()
        await asyncio.wait_for(asyncio.gather(*stops), 5)
        (await loading).release()
        assert loaded(pool) == {"b"}

    asyncio.run(run())


def test_a_stop_of_a_busy_model_holds_up_no_other(pool_of):
    async def run():
        pool = pool_of(Models(budget=30))
        busy = await pool.acquire("a")
        stop = asyncio.ensure_future(pool.unload("a"))
        await until(lambda: busy.model.is_leaving)
        later = asyncio.ensure_future(pool.acquire("a"))
        await until(lambda: pool._line)
        (await asyncio.wait_for(pool.acquire("b"), 5)).release()
        stop.cancel()
        (await asyncio.wait_for(later, 5)).release()  # it stays loaded
        busy.release()

    asyncio.run(run())


def test_stop_ends_a_load_that_nobody_waits_for_any_more(pool_of):
    async def run():
        models = Models()
        pool = pool_of(models)
        models.gate.clear()
        waiting = asyncio.ensure_future(pool.acquire("a"))
        await until(lambda: pool.is_loading)
        stopping = asyncio.ensure_future(pool.unload("a"))
        waiting.cancel()
        await asyncio.sleep(0.02)
        models.gate.set()
        await asyncio.wait_for(stopping, 5)
        assert not loaded(pool)

    asyncio.run(run())


def test_a_model_whose_engine_died_is_loaded_again(pool_of):
    async def run():
        models = Models()
        pool = pool_of(models)
        await use(pool, "a")
        (await pool.find("a"))._engine.is_alive = False
        await use(pool, "a")
        assert models.loads == ["a", "a"]

    asyncio.run(run())


def test_time_to_make_room_is_not_time_to_load(pool_of):
    async def run():
        pool = pool_of(Models(budget=10))
        lease = await pool.acquire("a")
        waiting = asyncio.ensure_future(pool.acquire("b"))
        await asyncio.sleep(0.3)
        lease.release()
        (await waiting).release()
        assert (await pool.find("b")).load_seconds < 0.25

    asyncio.run(run())


def test_models_that_were_removed_are_not_listed(pool_of):
    async def run():
        models = Models("abc", 30)
        models.keys = {"b": "same", "c": "same"}
        pool = pool_of(models)
        await use(pool, "a", "b", "c")
        await pool.drop("c", lambda: models._names.remove("c"))
        assert [model.names for model in await pool.all()] == [["a"], ["b"]]
        assert loaded(pool) == {"a", "b"}
        with pytest.raises(FileNotFoundError):
            await pool.drop("a", lambda: os.remove("/nowhere"))
        assert loaded(pool) == {"a", "b"}  # what cannot be removed stays
        await pool.drop("a", lambda: models._names.remove("a"))
        assert [model.names for model in await pool.all()] == [["b"]]
        await pool.unload("b")
        models._names.remove("b")  # by another process
        assert await pool.all() == []

    asyncio.run(run())


def test_a_model_that_is_pinned_is_not_stopped(pool_of):
    async def run():
        pool = pool_of(Models(), pin=["a"])
        await use(pool, "a")
        with pytest.raises(APIError, match="a is one of --pin: it stays") as found:
            await pool.unload("a")
        assert found.value.status == 400
        assert loaded(pool) == {"a"}

    asyncio.run(run())


def test_what_any_web_page_can_ask_for_loads_nothing():
    async def run():
        models = Models()
        service = Service(ServerOptions(), None, models)
        service.state = "ready"
        answer = await Client(make_app(service)).get("/tokenizer_info?model=a")
        assert (answer.status, answer.error["code"]) == (409, "model_not_loaded")
        assert models.loads == []

    asyncio.run(run())


def test_loading_downloads_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(catalogue_module, "AsyncEngine", None)
    for name, arguments in {"nobody/none": {}, "demo": {"draft": "nobody/none"}}.items():
        with pytest.raises(FileNotFoundError, match="nobody/none is not on this machine: jaxinfer pull nobody/n"):
            count_needs(name, arguments, 2**40)
        with pytest.raises(FileNotFoundError, match="nobody/none is not on this machine"):
            LocalModels({name: name}, arguments, ServerOptions())._open(name, name, arguments, ModelNeeds({}))


def test_a_failed_load_holds_nothing(pool_of, monkeypatch):
    class Weights:
        pass

    async def run():
        models, held, engine = Models(), [], FakeEngine()
        pool = pool_of(models)

        def fails(name, needs):
            weights = Weights()
            held.append(weakref.ref(weights))
            raise ValueError("half of it is loaded")

        monkeypatch.setattr(models, "_open", fails)
        with pytest.raises(APIError) as found:
            await pool.acquire("a")
        assert isinstance(found.value.__cause__, ValueError)
        assert held[0]() is None
        assert pool.num_bytes == 0
        assert (await pool.find("a")).status(0.0)["error"] == "half of it is loaded"

        def refuses(self, engine):
            raise ValueError("no such template")

        monkeypatch.setattr(models, "_open", lambda name, needs: engine)
        monkeypatch.setattr(ServedModel, "attach", refuses)
        with pytest.raises(APIError, match="no such template"):
            await pool.acquire("b")
        assert not engine.is_alive

    asyncio.run(run())


def test_a_model_has_one_timer(pool_of):
    async def run():
        pool = pool_of(Models(), keep_alive=["24h"])
        for _ in range(100):
            await use(pool, "a")
        assert sum(not timer.cancelled() for timer in asyncio.get_running_loop()._scheduled) == 1

    asyncio.run(run())


def test_a_client_that_leaves_waits_for_no_model(pool_of):
    async def run():
        models = Models()
        service = Service(ServerOptions(keep_alive=["-1"]), None, models)
        service.state = "ready"
        models.gate.clear()
        client = Client(make_app(service))
        bodies = {"/tokenize": {"prompt": "a"}, "/v1/embeddings": {"input": "a"}, "/models/load": {}}
        exchanges = [client.send("POST", path, {"model": "a", **body}) for path, body in bodies.items()]
        await until(lambda: any(model.num_waiting == 3 for model in service.models.models))
        for exchange in exchanges:
            exchange.leave()
        await until(lambda: not any(model.num_waiting for model in service.models.models))
        models.gate.set()
        await service.models.close()

    asyncio.run(run())


def test_a_server_that_ends_refuses_those_that_wait(pool_of):
    async def run():
        models = Models()
        pool = pool_of(models)
        engine = (await pool.acquire("b")).model._engine
        models.gate.clear()
        waiting = asyncio.ensure_future(pool.acquire("a"))
        await asyncio.sleep(0.02)
        closing = asyncio.ensure_future(pool.close())
        await until(lambda: not engine.is_alive)  # its readers need not wait for the load
        with pytest.raises(APIError, match="shutting down"):
            await waiting
        models.gate.set()
        await closing
        assert not loaded(pool)

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_requests_hangs_or_passes_the_budget(pool_of, seed):
    """Clients that use, cancel and time out, over models of different sizes."""

    async def run():
        models = Models(budget=25, a=5, b=10, c=15, d=20, e=25)
        pool, chance = pool_of(models, keep_alive=["0.01"]), random.Random(seed)
        outcomes = collections.Counter()

        async def client():
            for _ in range(20):
                how = {"timeout": chance.choice([None, None, 0.003]), "keep_alive": chance.choice([None, 0.0, 1.0])}
                one = asyncio.ensure_future(pool.acquire(chance.choice("abcde"), **how))
                if chance.random() < 0.2:
                    await asyncio.sleep(chance.random() * 0.005)
                    one.cancel()
                try:
                    lease = await one
                except (asyncio.CancelledError, APIError) as error:
                    outcomes[type(error).__name__] += 1
                    continue
                assert lease.model.state == "ready"
                assert pool.num_bytes <= 25
                await asyncio.sleep(chance.random() * 0.005)
                assert lease.model.state == "ready"
                lease.release()
                outcomes["answered"] += 1

        await asyncio.wait_for(asyncio.gather(*(client() for _ in range(8))), 30)
        assert outcomes.total() == 160
        assert outcomes["answered"] > 60
        assert all(not model.num_users and not model.num_waiting for model in pool.models)
        await pool.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("300", 300),
        ("5m", 300),
        ("1h30m", 5400),
        (0, 0),
        ("0s", 0),
        ("1.5s", 1.5),
        (-1, float("inf")),
        ("-1m", float("inf")),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "5 minutes", "5m!", "nan", True, 1e12, -(2**63)])
def test_no_durations(text):
    with pytest.raises(ValueError, match="is no time such as 300, 5m or -1"):
        parse_duration(text)


def test_bytes():
    assert [parse_bytes(text) for text in ("10", "2KiB", "1.5GB", "3 g", "7B")] == [
        10,
        2048,
        1_500_000_000,
        3 * 10**9,
        7,
    ]
    with pytest.raises(ValueError, match="model_memory: 'much'"):
        ServerOptions(model_memory="much")


# With real models.

ENGINE = {"max_seqs": 4, "max_model_len": 96, "prefill_chunk": 32}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [str(write_checkpoint(folder / f"model-{number}", seed=number)) for number in range(5)]


def test_what_is_counted_is_what_is_held(checkpoints):
    needs = count_needs(checkpoints[0], ENGINE, 2**40)
    assert needs.num_pages == 4 * 6 + 1
    with LLM(checkpoints[0], num_pages=needs.num_pages, **ENGINE) as llm:
        assert resident_bytes(SimpleNamespace(llm=llm)) == needs.num_bytes
        facts = llm.explain().to_dict()
        assert facts["model"]["parameter bytes"] == needs.parts["weights"]
        assert facts["cache"]["bytes"] == needs.parts["cache"]
    quantized = count_needs(checkpoints[0], {**ENGINE, "quantize": "int8", "draft": checkpoints[1]}, 2**40)
    with LLM(checkpoints[0], num_pages=quantized.num_pages, quantize="int8", draft=checkpoints[1], **ENGINE) as llm:
        assert resident_bytes(SimpleNamespace(llm=llm)) == quantized.num_bytes
    fixed = needs.num_bytes - needs.parts["cache"]
    page_bytes = needs.parts["cache"] // needs.num_pages
    assert count_needs(checkpoints[0], ENGINE, fixed + 8 * page_bytes).num_pages == 8
    with pytest.raises(OutOfMemoryError, match="and at least"):
        count_needs(checkpoints[0], ENGINE, fixed + 6 * page_bytes)


@pytest.mark.slow
def test_models_of_the_same_files_share_their_weights(checkpoints):
    """Also where their options differ, and a draft that is served itself; the last one that is closed frees them."""
    arguments = {**ENGINE, "draft": checkpoints[1], "max_seqs": 2}
    needs = [count_needs(checkpoints[0], arguments, 2**40), count_needs(checkpoints[1], ENGINE, 2**40)]
    assert [len(one.shared) for one in needs] == [2, 1]
    assert list(needs[0].shared)[1:] == list(needs[1].shared)
    assert sum(needs[0].shared.values()) == needs[0].parts["weights"] + needs[0].parts["draft weights"]
    with LLM(checkpoints[0], **ENGINE) as first, LLM(checkpoints[0], **{**ENGINE, "max_seqs": 2}) as second:
        leaves = [jax.tree.leaves(llm.params) for llm in (first, second)]
        assert all(one is other for one, other in zip(*leaves, strict=True))
        first.close()
        assert second.generate("def", SamplingParams(max_tokens=2), use_tqdm=False)
        with LLM(checkpoints[0], **ENGINE, quantize="int8") as quantized:
            assert quantized.params["embed"] is not second.params["embed"]
    assert all(leaf.is_deleted() for leaf in leaves[0])
    with LLM(checkpoints[0], **ENGINE) as again:
        assert again.generate("def", SamplingParams(max_tokens=2), use_tqdm=False)


def test_changed_files_are_read_again(tmp_path):
    path = write_checkpoint(tmp_path / "model")
    with LLM(str(path), **ENGINE) as before:
        other = write_checkpoint(tmp_path / "other", seed=1)
        os.replace(other / "model.safetensors", path / "model.safetensors")
        with LLM(str(path), **ENGINE) as after:
            embeddings = [np.asarray(jax.tree.leaves(llm.params["embed"])[0]) for llm in (before, after)]
            assert not np.array_equal(*embeddings)


def served(checkpoints, num_fitting, **options):
    """A service of several models with room for some of them, and the bytes of that room."""
    arguments = {**ENGINE, "num_pages": 4 * 6 + 1}
    budget = num_fitting * count_needs(checkpoints[0], arguments, 2**40).num_bytes
    options = ServerOptions(**{"model_memory": str(budget), "models": checkpoints, **options})
    # As if they had been compiled: what a request needs is compiled then.
    catalogue = LocalModels({name: name for name in checkpoints}, arguments, options, compiled=set(checkpoints))
    service = Service(options, None, catalogue)
    service.state = "ready"
    return service, budget


@functools.cache
def offline_llm(checkpoint):
    return LLM(checkpoint, **ENGINE, num_pages=25)


def offline(checkpoint, prompt, **params):
    llm = offline_llm(checkpoint)
    base = {"temperature": 0.8, "max_tokens": 8, **params}
    return llm.generate(prompt, SamplingParams(**base), use_tqdm=False)[0].outputs[0].text


@pytest.mark.slow
def test_a_server_of_two_models_with_room_for_one(checkpoints):
    names = checkpoints[:2]

    async def run():
        service, budget = served(names, 1)
        client = Client(make_app(service))
        listed = (await client.get("/v1/models")).json["data"]
        assert [one["id"] for one in listed] == names
        assert {one["status"]["value"] for one in listed} == {"unloaded"}
        answer = await client.post("/v1/completions", {"prompt": "a"})
        assert (answer.status, answer.error["param"]) == (400, "model")
        answer = await client.post("/v1/completions", {"prompt": "a", "model": "none"})
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        found = {}
        for number, name in enumerate([*names, *names]):
            body = {"model": name, "prompt": f"n{number}", "max_tokens": 8, "temperature": 0.8, "seed": number}
            answer = await client.post("/v1/completions", body)
            assert answer.status == 200, answer.body
            assert answer.json["model"] == name
            found[name, number] = answer.json["choices"][0]["text"]
            assert service.models.num_bytes <= budget
        statuses = {one["id"]: one["status"] for one in (await client.get("/v1/models")).json["data"]}
        assert [statuses[name]["value"] for name in names] == ["unloaded", "ready"]
        assert statuses[names[1]]["bytes"] == budget
        assert 290 < statuses[names[1]]["keep_alive_seconds"] <= 300
        text = (await client.get("/metrics")).body.decode()
        assert f'jaxinfer_model_loads_total{{model_name="{names[0]}"}} 2.0' in text
        answer = await client.post("/models/unload", {"model": names[0]})
        assert answer.json["status"]["value"] == "unloaded"
        answer = await client.post("/models/load", {"model": names[0], "keep_alive": -1})
        assert answer.json["status"]["value"] == "ready"
        await service.models.close()
        return found

    found = asyncio.run(run())
    for (name, number), text in found.items():
        assert text == offline(name, f"n{number}", seed=number)
    assert len(set(found.values())) > 2


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


@pytest.mark.slow
def test_five_models_with_room_for_two(checkpoints, monkeypatch, capsys):
    """500 requests in random order from 16 clients, of which some leave in the middle of an answer."""
    chance, num_left = random.Random(3), 500
    for name in checkpoints:
        offline(name, "warm")
    offline_bytes = live_bytes()
    most, answers, opened = [0], {}, catalogue_module.AsyncEngine

    def opens(*arguments, **keywords):  # before and after what is allocated
        most.append(live_bytes() - offline_bytes)
        engine = opened(*arguments, **keywords)
        most.append(live_bytes() - offline_bytes)
        return engine

    monkeypatch.setattr(catalogue_module, "AsyncEngine", opens)
    outcomes = collections.Counter()

    async def run():
        nonlocal num_left
        service, budget = served(checkpoints, 2)
        client = Client(make_app(service))

        async def one_client():
            nonlocal num_left
            while num_left > 0:
                num_left -= 1
                number, name = num_left, chance.choice(checkpoints)
                body = {"model": name, "prompt": f"p{number}", "max_tokens": 8, "temperature": 0.8, "seed": number}
                assert service.models.num_bytes <= budget
                if chance.random() < 0.2:
                    exchange = client.send("POST", "/v1/completions", {**body, "stream": True})
                    await asyncio.sleep(chance.random() * 0.2)
                    exchange.leave()
                    with contextlib.suppress(Exception):
                        await asyncio.wait_for(exchange.task, 60)
                    outcomes["left"] += 1
                    continue
                answer = await client.post("/v1/completions", body)
                assert answer.status == 200, answer.body
                answers[name, number] = answer.json["choices"][0]["text"]
                outcomes["answered"] += 1

        await asyncio.wait_for(asyncio.gather(*(one_client() for _ in range(16))), 500)
        assert not service.generations
        assert all(not one.num_users and not one.num_waiting for one in service.models.models)
        assert all(one.admission.num_running == one.admission.num_waiting == 0 for one in service.models.models)
        await service.models.close()
        return budget, sum(one.metrics.loads._value.get() for one in service.models.models)

    budget, num_loads = asyncio.run(run())
    for (name, number), text in answers.items():
        assert text == offline(name, f"p{number}", seed=number)
    assert max(most) <= budget
    with capsys.disabled():
        print(f"\n{dict(outcomes)}, {num_loads:.0f} loads, most bytes {max(most):,} of {budget:,}")
    assert outcomes.total() == 500


@pytest.mark.slow
def test_a_switch_back_takes_as_long_as_loading_weights(tmp_path, monkeypatch, capsys):
    """Of models of 130 MB, by processor time, since other processes share this machine's cores."""
    for name, size in {"HIDDEN": 512, "FFN": 2048, "LAYERS": 8}.items():
        monkeypatch.setattr(checkpoint_module, name, size)
    names, back, alone = [str(write_checkpoint(tmp_path / name)) for name in "ab"], [], []

    async def run():
        service, _ = served(names, 1)
        for number in range(24):
            start = time.process_time()
            (await service.models.acquire(names[number % 2])).release()
            back.append(time.process_time() - start)
        await service.models.close()

    asyncio.run(run())
    for number in range(24):
        start = time.process_time()
        llm = LLM(names[number % 2], **ENGINE, num_pages=25)
        alone.append(time.process_time() - start)
        llm.close()
    switch, load = (sorted(times[4:])[10] for times in (back, alone))
    with capsys.disabled():
        print(f"\nback to a model {1e3 * switch:.1f} ms, loaded alone {1e3 * load:.1f} ms: {switch / load:.2f}x")
    assert switch <= 1.3 * load


@pytest.mark.matrix
@pytest.mark.parametrize("family", quick(FAMILIES, "granite_hybrid_dense"))
@pytest.mark.parametrize("draft", [None, "layers:2", "itself"])
def test_states_are_a_part_of_the_budget(tmp_path, family, draft):
    """A model of which all slots have states finds room for them, or has fewer pages, and holds what was counted."""
    name = str(write_recurrent(family, tmp_path))
    arguments = {**ENGINE, "page_size": 8, **({} if draft is None else {"draft": draft.replace("itself", name)})}
    whole = count_needs(name, arguments, 2**40)
    budget = whole.num_bytes - 1
    needs = count_needs(name, arguments, budget)
    assert needs.num_pages == whole.num_pages - 1
    assert needs.num_bytes <= budget
    with pytest.raises(OutOfMemoryError, match="raise --model-memory"):
        count_needs(name, arguments, needs.num_bytes // 2)
    engine = LocalModels({name: name}, arguments, ServerOptions(lazy=True)).find(name).open(needs)
    assert resident_bytes(engine) == needs.num_bytes
    asyncio.run(engine.close())


@pytest.mark.slow
def test_a_server_of_models_with_states_and_room_for_one(tmp_path):
    """They take turns, and answer as they do offline."""
    names = [str(write_recurrent(family, tmp_path)) for family in FAMILIES]
    prompts = [[7, 8, 9], list(range(80)), [*range(80), 4]]
    body = {"temperature": 0, "max_tokens": 8, "return_token_ids": True}

    async def run():
        arguments = {**ENGINE, "page_size": 8, "draft": "layers:1"}
        budget = max(count_needs(name, arguments, 2**40).num_bytes for name in names)
        options = ServerOptions(model_memory=str(budget), models=names)
        service = Service(
            options, None, LocalModels({name: name for name in names}, arguments, options, compiled=set(names))
        )
        service.state = "ready"
        client, found = Client(make_app(service)), {}
        for turn in range(2):
            for name in names:
                for number, prompt in enumerate(prompts):
                    answer = await client.post("/v1/completions", {**body, "model": name, "prompt": prompt})
                    assert answer.status == 200, answer.body
                    found[turn, name, number] = answer.json["choices"][0]["token_ids"]
                assert service.models.num_bytes <= budget
        await service.models.close()
        return found

    found = asyncio.run(run())
    for name in names:
        with LLM(name, **ENGINE) as llm:
            params = SamplingParams(temperature=0, max_tokens=8)
            wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        for turn in range(2):
            assert [found[turn, name, number] for number in range(3)] == wanted
