"""Batches over Ray actors: every row once, with the tokens of one process, though a worker is killed."""

import json
import os
import signal
import threading
import time

import pytest

from jaxinfer import LLM
from jaxinfer.batch import BatchError, open_job

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(900)]
NUM_ROWS = 500
OPTIONS = {"max_model_len": 48, "max_seqs": 16}


@pytest.fixture(scope="module")
def path_in(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "in.jsonl"
    rows = [
        {"prompt": f"def f{number}(x):\n", "temperature": 0.9 if number % 2 else 0.0, "max_tokens": 3 + number % 10}
        for number in range(NUM_ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def expected(path_in):
    path = path_in.with_name("alone.jsonl")
    with LLM("demo-draft", **OPTIONS) as llm, open_job(path_in, path) as job:
        job.run(llm, use_tqdm=False)
    return answers(path)


def answers(path) -> dict[str, list[int]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line["outputs"][0]["token_ids"] for line in lines}
    assert len(found) == len(lines)
    return found


def kill_one(path, pids) -> None:
    while not path.exists() or path.read_bytes().count(b"\n") < NUM_ROWS // 4:
        time.sleep(0.05)
    os.kill(pids[0], signal.SIGKILL)


def test_a_worker_is_killed_midway(path_in, expected):
    import psutil

    from jaxinfer.fleet import RayPool

    path = path_in.with_name("fleet.jsonl")
    with RayPool("demo-draft", 2, options=OPTIONS) as pool, open_job(path_in, path) as job:
        pids = [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if "ray::_Worker" in " ".join(process.info["cmdline"] or [])
        ]
        assert len(pids) >= 2
        killer = threading.Thread(target=kill_one, args=(path, pids), daemon=True)
        killer.start()
        summary = job.run(pool, use_tqdm=False)
        killer.join(10)
    assert (summary.ok, summary.failed, pool.num_lost) == (NUM_ROWS, 0, 1)
    assert answers(path) == expected


@pytest.mark.parametrize("options", [{"prompt_column": "text", "keep": ["number"]}, {"prompt": "# {text} {number}"}])
def test_rows_of_a_table_are_those_of_one_process(tmp_path, options):
    from jaxinfer.fleet import RayPool

    path = tmp_path / "in.csv"
    path.write_text("text,number\n" + "".join(f"class A{number}:,{number}\n" for number in range(24)))
    found = []
    with LLM("demo-draft", **OPTIONS) as llm, RayPool("demo-draft", 2, options=OPTIONS) as pool:
        for model, name in ((llm, "alone.jsonl"), (pool, "fleet.jsonl")):
            with open_job(path, tmp_path / name, **options) as job:
                assert job.run(model, {"max_tokens": 6, "temperature": 0.9}, use_tqdm=False).ok == 24
            found.append(sorted((tmp_path / name).read_text().splitlines()))
    assert found[0] == found[1]
    assert len(set(map(tuple, answers(tmp_path / "fleet.jsonl").values()))) > 3


def test_rows_do_not_depend_on_their_batch_or_worker():
    from jaxinfer.fleet import RayDataGenerator

    generate = RayDataGenerator("demo-draft", {"temperature": 0.9, "max_tokens": 8}, seed=4, **OPTIONS)
    prompts = [f"class A{number}:" for number in range(6)]
    whole = generate({"prompt": prompts})
    other = generate({"prompt": prompts[:2:-1]})
    assert list(whole["text"][3:]) == list(other["text"][::-1])
    assert len(set(whole["text"])) > 3
    with pytest.raises(ValueError, match="no column 'question'"):
        RayDataGenerator("demo-draft", prompt_column="question", **OPTIONS)({"prompt": prompts})


def test_a_model_that_no_worker_can_open_says_so(tmp_path):
    from jaxinfer.fleet import RayPool

    with pytest.raises(BatchError, match="could not start"):
        RayPool(tmp_path / "nothing", 1)
