"""Two processes answer as one; one that is left alone says so and ends."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxinfer import initialize_hosts

pytestmark = pytest.mark.alone
HERE = Path(__file__).parent
SECONDS_TO_START, SECONDS_TO_NOTICE = 200, 30


class Pair:
    """Two hosts on this machine, with one device each, that talk over loopback."""

    def __init__(self, task: str, folder: Path):
        folder.mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {
            **{name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"},
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        self.folder, self.processes = folder, []
        for index in range(2):
            command = [sys.executable, str(HERE / "host.py"), task, str(port), "2", str(index), str(folder)]
            with open(folder / f"stderr.{index}", "wb") as stderr:
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)
                )

    def said(self, index: int) -> str:
        return (self.folder / f"stderr.{index}").read_text()

    def wait(self, index: int, seconds: float) -> int:
        try:
            return self.processes[index].wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"host {index} still runs after {seconds} s: {self.said(index)[-2000:]}")

    def wait_until_ready(self) -> None:
        end = time.monotonic() + SECONDS_TO_START
        while not all((self.folder / f"ready.{index}").exists() for index in range(2)):
            assert all(process.poll() is None for process in self.processes), self.said(0) + self.said(1)
            assert time.monotonic() < end
            time.sleep(0.1)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def host_program():
    spec = importlib.util.spec_from_file_location("host_program", HERE / "host.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("variant", ["plain", pytest.param("int8 and a draft", marks=pytest.mark.slow)])
def test_two_hosts_answer_as_one(tmp_path, variant):
    program = host_program()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        lines = [{"prompt": prompt, "max_tokens": 4, "temperature": 0.7} for prompt in program.PROMPTS]
        (tmp_path / name / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pair = Pair(f"answers {variant}", tmp_path / "two")
    try:
        expected = json.loads(json.dumps(program.run(variant, tmp_path / "one", None)))
        codes = [pair.wait(index, SECONDS_TO_START) for index in range(2)]
        assert codes == [0, 0], pair.said(0)[-2000:] + pair.said(1)[-2000:]
    finally:
        pair.close()
    found = [json.loads((tmp_path / "two" / f"found.{index}.json").read_text()) for index in range(2)]
    assert found[0] == found[1]
    assert found[0] == expected
    files = [(tmp_path / name / "out.jsonl").read_text().splitlines() for name in ("one", "two")]
    rows = [sorted((row["custom_id"], row["outputs"][0]["text"]) for row in map(json.loads, lines)) for lines in files]
    assert rows[0] == rows[1]
    assert len(rows[0]) == len(program.PROMPTS)


@pytest.mark.slow
def test_a_host_that_is_left_alone_ends_and_says_why(tmp_path):
    """All three losses at once: most of the time is waiting."""
    killed = {0: Pair("lose", tmp_path / "zero"), 1: Pair("lose", tmp_path / "one")}
    failed = Pair("fail", tmp_path / "fail")
    try:
        for index, pair in killed.items():
            pair.wait_until_ready()
            os.kill(pair.processes[index].pid, signal.SIGKILL)
        lost = time.monotonic()
        for index, pair in killed.items():
            other = 1 - index
            code = pair.wait(other, max(SECONDS_TO_NOTICE - (time.monotonic() - lost), 0.1))
            assert code == 1, pair.said(other)[-2000:]
            said = [line for line in pair.said(other).splitlines() if line.startswith("error:")]
            assert len(said) == 1, said
            assert f"host {index} of 2" in said[0]
            assert "was lost" in said[0]
            assert "The job ends; start it again" in said[0]
            assert "stack trace" not in pair.said(other)
        failed.wait_until_ready()
        assert failed.wait(0, SECONDS_TO_NOTICE) == 1
        assert "host 1 of 2 has ended while host 0 still worked" in failed.said(0)
        assert "a fault of this host's own" in failed.said(1)
    finally:
        for pair in (*killed.values(), failed):
            pair.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("here", 2, 0), "HOST:PORT"),
        (("127.0.0.1:1", 2, 2), "process_id=2 is not one of 2"),
        (("127.0.0.1:1", 0, None), "at least 1"),
        (("127.0.0.1:1", None, 1), "needs num_processes"),
    ],
)
def test_flags_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        initialize_hosts(*arguments)


def test_hosts_join_before_jax_is_used():
    import jax

    jax.devices()
    with pytest.raises(RuntimeError, match="before JAX is used"):
        initialize_hosts("127.0.0.1:1", 2, 0)
