"""A fleet of the tiny model in processes of its own, as `jaxinfer fleet serve` starts it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from jaxinfer import LLM
from tests.fleet.front.fakes import ask
from tests.server.adapter_folders import write_adapter
from tests.server.conftest import OPTIONS, tiny_model

REPLICA = "ServeReplica:jaxinfer:Replica"
FRONT = "ServeReplica:jaxinfer:Front"
PROXY = "ProxyActor"
LLM_OPTIONS = {**OPTIONS, "tool_parser": "hermes", "max_adapters": 2, "max_adapter_rank": 8}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def write_model(folder: Path) -> Path:
    """The tiny model as a checkpoint."""
    with LLM(tiny_model(), max_seqs=1, max_model_len=32) as llm:
        return Path(llm.save(folder / "tiny"))


def tiny_fleet(folder: Path, **more) -> "Fleet":
    """Three replicas with an adapter."""
    adapters = {"first": str(write_adapter(folder / "first", 1))}
    values = {"model": str(write_model(folder)), "options": LLM_OPTIONS, "adapters": adapters, "num_replicas": 3}
    return Fleet(folder, {**values, "server": {"served_model_name": "tiny"}, "placement": {"num_cpus": 0.2}, **more})


class Fleet:
    """A fleet, with the command that runs it."""

    def __init__(self, folder: Path, values: dict, **variables):
        self.port, self.direct_port = free_port(), free_port()
        ports = {"port": self.port, "direct_port": self.direct_port}
        self.values, self.file, self.log = {**ports, **values}, folder / "fleet.json", folder / "log.txt"
        self.env = {**os.environ, "PYTHONPATH": os.getcwd(), "RAY_AUTH_MODE": "token", **variables}
        self._write()
        with self.log.open("w") as log:
            command = [*self._command(), "--no-progress"]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.env)
        self._wait_for("ready:", 400)

    def _write(self) -> None:
        self.file.write_text(json.dumps(self.values))  # JSON is YAML too

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "jaxinfer.cli", "fleet", "serve", str(self.file)]

    def _wait_for(self, text: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while text not in (told := self.log.read_text()):
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.close()
                raise AssertionError(told)
            time.sleep(0.2)

    async def change(self, **values) -> str:
        """Changes the file and applies it, as another command does; what that prints."""
        self.values |= values
        self._write()
        command = [*self._command(), "--ray-address", "auto"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self.env
        )
        told = (await process.communicate())[0].decode()
        assert process.returncode == 0, told
        return told

    def pids(self, kind: str = REPLICA) -> list[int]:
        """Processes of one kind, the oldest first."""
        import psutil

        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if kind in " ".join(process.cmdline()):
                    found.append((process.create_time(), process.pid))
            except psutil.Error:
                continue
        return [pid for _, pid in sorted(found)]

    def seconds(self) -> dict[str, float]:
        """Processor time of the processes through which chunks pass."""
        import psutil

        def of(pid: int) -> float:
            times = psutil.Process(pid).cpu_times()
            return times.user + times.system

        return {kind: sum(map(of, self.pids(kind))) for kind in (FRONT, PROXY)}

    async def metrics(self) -> dict[str, str]:
        text = (await ask(self.port, "GET", "/metrics"))[2].decode()
        return dict(line.split(" ") for line in text.splitlines() if not line.startswith("#"))

    async def until_ready(self, num_replicas: int = 3) -> None:
        deadline = time.monotonic() + 300
        while len(self.pids()) < num_replicas or (await self.metrics()).get("jaxinfer_front_ready_replicas") != str(
            num_replicas
        ):
            assert time.monotonic() < deadline, self.log.read_text()[-2000:]
            await asyncio.sleep(0.2)

    def close(self) -> None:
        import psutil

        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for child in children:
            try:
                child.kill()
            except psutil.Error:
                continue


class KilledReplica:
    """One of a fleet's replicas, which Ray starts again."""

    def __init__(self, fleet: Fleet, number: int):
        self._fleet, self._number = fleet, number
        self.num_kills = 0

    def kill(self, *, gently: bool = False) -> None:
        pids = self._fleet.pids()
        os.kill(pids[self._number % len(pids)], signal.SIGKILL)
        self.num_kills += 1

    def start(self) -> None:
        """Ray does."""

    async def until_ready(self) -> None:
        await self._fleet.until_ready()
