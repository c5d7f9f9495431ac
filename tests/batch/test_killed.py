"""A real batch with adapters, killed with SIGKILL at random moments: it ends with the bytes of an undisturbed run."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.batch.adapter_job import REFUSED

NUM_KILLS, SEEDS = int(os.environ.get("JAXINFER_CRASH_MOMENTS", "9")), ("1", "2", "3")
ROOT = Path(__file__).parents[2]


def start(path_in: Path, path_out: Path, seeds=SEEDS) -> "subprocess.Popen[str]":
    """The process, once it serves."""
    command = [sys.executable, "-m", "tests.batch.adapter_job", str(path_in), str(path_out), *seeds]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "serving\n", process.communicate()[1]
    return process


def end(process: "subprocess.Popen[str]") -> tuple[int, str]:
    output, errors = process.communicate(timeout=300)
    assert "Traceback" not in errors, errors
    return process.returncode, output


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_random_moments(tmp_path):
    rng = random.Random(9)
    path_in, whole, out = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    names = (None, "a0", "a1", "a2", "not loaded")
    rows = [
        {
            "prompt": f"def f{number % 7}(x",
            "adapter": names[number % 5],
            "max_tokens": 8 + number % 20,
            "temperature": 1,
        }
        for number in range(100)
    ]
    path_in.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    code, told = end(start(path_in, whole))  # compiles
    assert (code, told) == (0, "0 resumed, 80 ok, 20 failed\n")
    process = start(path_in, out)
    started = time.perf_counter()
    assert end(process)[0] == 0
    seconds = time.perf_counter() - started
    assert out.read_bytes() == whole.read_bytes()
    num_kills = num_refused = num_resumed = 0
    while num_kills < NUM_KILLS:
        if num_resumed % 4 == 0:  # from the start again
            for path in tmp_path.glob("out.*"):
                path.unlink()
        process = start(path_in, out)
        while num_resumed % 4 == 1 and process.poll() is None and not (out.exists() and out.stat().st_size):
            time.sleep(0.01)  # until there is a result that another job can be refused for
        time.sleep(rng.uniform(0, seconds / 3))
        process.kill()
        code, _ = end(process)
        num_kills += code != 0
        num_resumed += 1
        if num_resumed % 4 == 2:
            left = {path.name: path.read_bytes() for path in tmp_path.glob("out.*")}
            if left.get("out.jsonl"):
                code, told = end(start(path_in, out, ("1", "4", "3")))
                assert code == REFUSED
                assert "has results of another job; differences: adapter 'a1' (was " in told
                assert {path.name: path.read_bytes() for path in tmp_path.glob("out.*")} == left
                num_refused += 1
        if num_resumed % 4 == 0:
            code, told = end(start(path_in, out))
            print(told.strip())
            assert code == 0
            for name in ("jsonl", "errors.jsonl"):
                assert (tmp_path / f"out.{name}").read_bytes() == (tmp_path / f"whole.{name}").read_bytes()
    print(f"{num_kills} kills in {num_resumed} runs of {seconds:.1f} s, {num_refused} refused")
    assert num_refused > 0
