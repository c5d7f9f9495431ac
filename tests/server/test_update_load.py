"""Weights that are replaced over HTTP 200 times while 32 clients are answered, and by trainers that are killed."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from checkpoints_convert import save_huggingface
from jaxinfer.models import init_params
from tests.server import trainer
from tests.server.conftest import CONFIG

ROOT, USER = "the-admins-secret", "first-secret-key"
FIRST, NUM_VERSIONS = 100, 8  # tokens of the models that say their number
NUM_UPDATES, NUM_CLIENTS = 200, 32
GROWTH = 64 * 2**20  # bytes of the server over the second half of the updates
POINTS = [(step, where) for step in range(len(trainer.STEPS) - 1) for where in trainer.PLACES] + [
    (6, "half"),
    (6, "sent"),
]
SERVER = """
import json, sys
from pathlib import Path
from jaxinfer import AsyncEngine, compilation_cache
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.run import run_server
from tests.server.conftest import OPTIONS, tiny_model

compilation_cache.enable()
config, params, tokenizer = tiny_model()
sizes = {**OPTIONS, "max_seqs": 32, "num_pages": 400, "max_waiting": 64}
options = json.loads(sys.argv[1])
options |= {name: Path(options[name]) for name in ("api_keys", "admin_keys")}

def open_engine():
    engine = AsyncEngine((config, params, tokenizer), **sizes)
    engine.llm.warm_up()
    return engine

run_server(ServerOptions(**options), "tiny", open_engine)
"""


def numbered(number):
    """Weights of a model that says `number`, whatever it reads."""
    params = init_params(CONFIG, jax.random.key(number))
    head = jnp.zeros_like(params["lm_head"]).at[:, number].set(1)
    return {**params, "embed": jnp.abs(params["embed"]) + 1, "lm_head": head}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    """`jaxinfer serve` with the routes of administrators, in a process of its own."""

    def __init__(self, folder: Path):
        self.roots = folder / "weights"
        for number in range(FIRST, FIRST + NUM_VERSIONS):
            save_huggingface(CONFIG, numbered(number), self.roots / str(number), dtype="float32")
        for name, key in (("admins", ROOT), ("keys", USER)):
            (folder / name).write_text(key + "\n")
            (folder / name).chmod(0o600)
        self.port, self.admin_port = free_port(), free_port()
        options = {
            "port": self.port,
            "admin_port": self.admin_port,
            "api_keys": str(folder / "keys"),
            "admin_keys": str(folder / "admins"),
            "weight_routes": True,
            "weights_roots": [str(self.roots)],
        }
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        self.process = subprocess.Popen([sys.executable, "-c", SERVER, json.dumps(options)], env=environment)
        deadline = time.monotonic() + 300
        while self.ready()[0] != 200:
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.1)

    def send(self, method: str, path: str, body=None, *, port=None, key=USER):
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=120)
        with contextlib.closing(connection):
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read()

    def ready(self):
        try:
            return self.send("GET", "/ready")
        except OSError:
            return 0, b""

    def change(self, path: str, body=None) -> None:
        status, told = self.send("POST", path, body or {}, port=self.admin_port, key=ROOT)
        assert status == 200, (path, told)

    def update(self, number: int, mode: str = "keep", kv: str = "recompute") -> None:
        """A whole update, as a trainer does it."""
        self.change(f"/pause?mode={mode}")
        self.change("/start_weight_update", {"kv": kv})
        self.change("/update_weights", {"update_info": {"path": str(number)}})
        self.change("/finish_weight_update", {"weight_version": str(number)})
        self.change("/resume")

    def ask(self, prompt: str, max_tokens: int = 12):
        """The tokens of a greedy answer, and whether it was aborted."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        status, told = self.send("POST", "/v1/completions", {**body, "return_token_ids": True})
        if status == 503 and b"the answer was aborted" in told:
            return [], True
        assert status == 200, told
        return json.loads(told)["choices"][0]["token_ids"], False

    @property
    def num_compiled(self) -> int:
        lines = self.send("GET", "/metrics")[1].decode().splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("jaxinfer_compilations_total"))

    @property
    def resident_bytes(self) -> int:
        statm = Path(f"/proc/{self.process.pid}/statm").read_text()
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"))
    server.update(FIRST)
    yield server
    server.process.kill()
    server.process.wait()


@pytest.mark.slow
def test_200_updates_under_32_clients(server):
    ended, lock = threading.Event(), threading.Lock()
    begun, done = [0], [0]  # numbers of updates, so that an answer knows which weights it can have
    answers = []

    def client(number):
        count = 0
        while not ended.is_set():
            first = done[-1]
            tokens, is_aborted = server.ask(f"def f{number}_{count}(x):", 4 + (number + count) % 12)
            with lock:
                answers.append((first, begun[-1], tokens, is_aborted))
            count += 1

    for number in range(NUM_CLIENTS):  # every shape is there
        server.ask(f"def f{number}(x):")
    num_compiled, sizes = server.num_compiled, []
    modes = [("wait", "recompute"), ("keep", "recompute"), ("abort", "recompute"), ("keep", "retain")]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        running = [pool.submit(client, number) for number in range(NUM_CLIENTS)]
        for update in range(1, NUM_UPDATES + 1):
            begun.append(update)
            server.update(FIRST + update % NUM_VERSIONS, *modes[update % len(modes)])
            done.append(update)
            sizes.append(server.resident_bytes)
        ended.set()
        for task in running:
            task.result()
    compiled = server.num_compiled - num_compiled
    growth = sizes[-1] - max(sizes[: NUM_UPDATES // 2])
    num_mixed = sum(len({*tokens}) > 1 for _, _, tokens, _ in answers)
    num_aborted = sum(is_aborted for *_, is_aborted in answers)
    print(
        f"{len(answers)} answers, {num_aborted} aborted, {num_mixed} of several versions, {compiled} compiled, "
        f"{growth / 2**20:.1f} MiB more"
    )
    assert compiled == 0
    assert growth < GROWTH
    assert num_mixed > 0  # or nothing ran while weights changed
    for first, last, tokens, is_aborted in answers:
        assert tokens or is_aborted
        versions = list(range(first, last + 1))
        place = 0  # tokens are of the versions that there were meanwhile, in their order
        for token in tokens:
            while place < len(versions) and FIRST + versions[place] % NUM_VERSIONS != token:
                place += 1
            assert place < len(versions), (first, last, tokens)


@pytest.mark.slow
def test_a_trainer_that_is_killed_leaves_a_server_that_waits(server):
    waited = 0
    for number, (step, where) in enumerate(POINTS):
        old, new, good = (FIRST + (3 * number + shift) % NUM_VERSIONS for shift in range(3))
        server.update(old)
        arguments = [str(server.admin_port), ROOT, str(new), str(step), where]
        dead = subprocess.run([sys.executable, "-m", "tests.server.trainer", *arguments], timeout=120, check=False)
        assert dead.returncode == -signal.SIGKILL, (step, where)
        time.sleep(0.2)  # what was sent is done
        arrived = step + (where != "half")  # requests
        status, told = server.ready()
        is_open = arrived in (0, len(trainer.STEPS))
        assert status == (200 if is_open else 503), (step, where, told)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.ask, "def g(x):")
            if not is_open:
                waited += 1
                is_torn = 3 <= arrived <= 5  # begun and not ended
                assert (b"an update of the weights is under way" if is_torn else b"answers are paused") in told
                if is_torn:
                    server.change("/resume")
                time.sleep(0.2)
                assert not asked.done(), (step, where)
                server.update(good)
                expected = good
            else:
                expected = old if arrived == 0 else new
            assert asked.result(60) == ([expected] * 12, False), (step, where)
    print(f"killed at {len(POINTS)} points, {waited} of them leave a server that waits")
    assert waited >= 18
