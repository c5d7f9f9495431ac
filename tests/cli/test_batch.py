"""`jaxinfer batch`: a file in, a file out; killed, interrupted or without room, it goes on as if nothing had been."""

import json
import random
import re
import resource
import signal
import time

import pytest

from jaxinfer import SamplingParams

SLOTS = ("--max-seqs", 4, "--prefill-chunk", 28)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def body(custom_id, url="/v1/chat/completions", **fields):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": fields}


def many_rows(count):
    """Short and long answers, so that many are always between their first token and their last."""
    return [
        body(f"chat-{i}", model="m", messages=[{"role": "user", "content": f"say {i}"}], max_tokens=1 + i * 7 % 30)
        if i % 2
        else {"custom_id": f"plain-{i}", "prompt": f"write {i}", "max_tokens": 1 + i * 7 % 30, "temperature": 0.9}
        for i in range(count)
    ]


def answers(path):
    """The records by custom_id, none twice, all whole, without the time in them."""
    data = path.read_bytes() if path.exists() else b""
    assert not data or data.endswith(b"\n")
    found = {}
    for line in data.splitlines():
        record = json.loads(line)
        assert record["custom_id"] not in found
        record.get("response", {}).get("body", {}).pop("created", None)
        found[record["custom_id"]] = record
    return found


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture
def batch(jaxinfer, model, tmp_path):
    """Runs rows to their end in this process."""

    def batch(rows, *options, name="out", seed=0):
        path_in = write(tmp_path / "in.jsonl", rows)
        return jaxinfer("batch", path_in, tmp_path / f"{name}.jsonl", "-m", model, *SLOTS, "--seed", seed, *options)

    return batch


@pytest.mark.slow
def test_every_form_in_one_file(batch, tmp_path, llm):
    messages = [{"role": "user", "content": "hi"}]
    rows = [
        body("chat", messages=messages, max_tokens=5),
        body("text", "/v1/completions", prompt="def f(", echo=True, logprobs=2, max_tokens=4),
        {"prompt": "import os"},
    ]
    result = batch(rows, "--json")
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert (summary["rows"], summary["ok"], summary["failed"]) == (3, 3, 0)
    assert result.stderr.startswith("3 rows: 3 ok, 0 failed · ")
    found = answers(tmp_path / "out.jsonl")
    chat = found["chat"]["response"]["body"]
    expected = llm.chat(messages, SamplingParams(max_tokens=5, seed=chat["seed"]))[0]
    assert chat["choices"][0]["message"]["content"] == expected.outputs[0].text
    text = found["text"]["response"]["body"]["choices"][0]
    assert text["text"].startswith("def f(")
    assert "".join(text["logprobs"]["tokens"]).startswith("def f(")
    assert len(found["row-3"]["outputs"][0]["token_ids"]) == 8  # the checkpoint's generation_config


@pytest.mark.slow
def test_rows_without_a_seed_are_sampled_as_generate_samples_them(batch, tmp_path, model):
    from jaxinfer import LLM

    prompts = [f"prompt {number}" for number in range(6)]
    assert batch([{"prompt": prompt} for prompt in prompts], seed=5).exit_code == 0
    found = answers(tmp_path / "out.jsonl")
    with LLM(model, max_seqs=4, prefill_chunk=28, seed=5) as llm:
        for number, output in enumerate(llm.generate(prompts), 1):
            assert found[f"row-{number}"]["outputs"][0]["token_ids"] == output.outputs[0].token_ids


@pytest.mark.slow
def test_options_are_for_what_rows_do_not_say(batch, tmp_path):
    assert batch([{"prompt": "x", "max_tokens": 3}, {"prompt": "x"}], "--max-tokens", 5, "--ignore-eos").exit_code == 0
    found = answers(tmp_path / "out.jsonl")
    assert [len(found[name]["outputs"][0]["token_ids"]) for name in ("row-1", "row-2")] == [3, 5]


def test_partial_failure_is_3_and_a_second_run_says_the_same(batch, tmp_path):
    rows = [{"prompt": "x"}, {"prompt": "x", "max_tokns": 3}, {"prompt": "x" * 200}]
    for what in ("tokens", "all were done before"):
        result = batch(rows)
        assert result.exit_code == 3
        assert "line 2: unknown field 'max_tokns': did you mean 'max_tokens'?" in result.stderr
        assert "3 rows: 1 ok, 2 failed" in result.stderr
        assert what in result.stderr
        assert result.stderr.rstrip().endswith(f"errors in {tmp_path / 'out.errors.jsonl'}")
    assert len(answers(tmp_path / "out.errors.jsonl")) == 2


def test_when_all_rows_fail_it_is_1(batch):
    assert batch([{"prompt": ""}]).exit_code == 1


@pytest.mark.parametrize(
    ("rows", "options", "code", "message"),
    [
        ([{"custom_id": "a", "prompt": "x"}] * 2, [], 1, "lines 1 and 2 have the same custom_id 'a'"),
        ([], [], 1, "has no rows"),
        ([{"prompt": "x"}], ["--top-p", "2"], 2, "top_p must be"),
        ([{"prompt": "x"}], ["--overwrite", "--retry-errors"], 2, "omit --retry-errors"),
        ([{"prompt": "x"}], ["--errors", "nowhere/x"], 1, "there is no folder nowhere"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(batch, tmp_path, rows, options, code, message):
    result = batch(rows, *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_the_wrong_model_is_told_and_the_results_stay(batch, tmp_path, jaxinfer, model_without_template):
    assert batch([{"prompt": "x"}]).exit_code == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    arguments = ("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "-m", model_without_template, *SLOTS)
    result = jaxinfer(*arguments)
    assert result.exit_code == 1
    assert "differences: the model" in result.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert jaxinfer(*arguments, "--overwrite").exit_code == 0


@pytest.fixture
def start(jaxinfer_process, model, tmp_path):
    arguments = ("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", "-m", model, *SLOTS, "--seed", 0)
    return lambda: jaxinfer_process(*arguments)


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(batch, start, tmp_path):
    rows = many_rows(400)
    write(tmp_path / "in.jsonl", rows)
    with start() as process:
        while num_lines(tmp_path / "out.jsonl") < 5:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    num_written = num_lines(tmp_path / "out.jsonl")
    assert (process.returncode, 5 <= num_written < 400) == (130, True), error
    assert f"{num_written} of 400 rows are written; the same command continues from there" in error
    assert error.endswith("interrupted\n")
    answers(tmp_path / "out.jsonl")


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux, to limit the size of a process's files")
@pytest.mark.slow
def test_a_full_disk_keeps_earlier_rows_and_the_job_goes_on_with_room(batch, start, tmp_path):
    rows = many_rows(60)
    assert batch(rows, name="whole").exit_code == 0
    limit = (tmp_path / "whole.jsonl").stat().st_size // 2
    with start() as process:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        output, error = process.communicate(timeout=120)
    assert (process.returncode, output) == (1, "")
    written = answers(tmp_path / "out.jsonl")
    assert 10 < len(written) < 60
    assert f"out.jsonl: File too large; {len(written)} of 60 rows are written completely" in error
    whole = answers(tmp_path / "whole.jsonl")
    assert written == {name: whole[name] for name in written}
    assert batch(rows).exit_code == 0
    assert answers(tmp_path / "out.jsonl") == whole


@pytest.mark.parametrize("num_kills", [3, pytest.param(50, marks=pytest.mark.timeout(1200))])
@pytest.mark.slow
def test_kill_9_at_random_points_of_200_rows(batch, start, tmp_path, num_kills):
    rows = many_rows(200)
    assert batch(rows, name="whole").exit_code == 0
    whole, path_out = answers(tmp_path / "whole.jsonl"), tmp_path / "out.jsonl"
    assert sorted(whole) == sorted(row["custom_id"] for row in rows)
    chance = random.Random(num_kills)
    num_killed = num_killed_at_work = 0
    while num_killed < num_kills:
        # So many more rows, then some milliseconds: each kill finds the job at a point of its own, a few in its start.
        before = num_lines(path_out)
        target = before + chance.randrange(max(3, 150 // num_kills))
        with start() as process:
            while num_lines(path_out) < target and process.poll() is None:
                time.sleep(0.001)
            time.sleep(chance.random() * 0.02)
            process.kill()
            _, error = process.communicate()
        if process.returncode == 0:  # it was faster than we
            assert answers(path_out) == whole
            path_out.unlink()
            continue
        assert process.returncode == -signal.SIGKILL, error
        num_killed += 1
        num_killed_at_work += num_lines(path_out) > before
    assert num_killed_at_work > num_kills // 3
    result = batch(rows)
    assert result.exit_code == 0, result.stderr
    assert answers(path_out) == whole


def test_input_and_output_may_be_pipes(jaxinfer, model):
    """Failed rows are written beside the others, in the form of their answers."""
    rows = [{"prompt": "a", "max_new_tokens": 2}, {"prompt": "b", "top_p": 2}, {"prompt": 5}]
    lines = "".join(json.dumps(row) + "\n" for row in rows) + "nope\n"
    result = jaxinfer("batch", "-", "-", "-m", model, *SLOTS, input=lines)
    assert result.exit_code == 3
    found = {record["custom_id"]: record for record in map(json.loads, result.stdout.splitlines())}
    assert len(found["row-1"]["outputs"][0]["token_ids"]) == 2
    for name, line, parameter in (("row-2", 2, "top_p"), ("row-3", 3, "prompt"), ("row-4", 4, None)):
        error = found[name]["error"]
        assert (error["line"], error["param"], found[name]["outputs"]) == (line, parameter, [])
    assert "standard input line 4: not JSON" in result.stderr
    assert "/" not in result.stderr.replace("tokens/s", "")  # no path of a copy


def test_paths_by_name(jaxinfer, model, tmp_path):
    path = write(tmp_path / "in.jsonl", [{"prompt": "a", "max_tokens": 1}])
    result = jaxinfer("batch", "-i", path, "-o", tmp_path / "out.jsonl", "-m", model, *SLOTS)
    assert result.exit_code == 0
    assert len(answers(tmp_path / "out.jsonl")) == 1


def test_a_table_in_the_order_of_its_rows(jaxinfer, model, tmp_path):
    (tmp_path / "in.csv").write_text("text,n\n" + "".join(f"line {i},{i}\n" for i in range(9)) + ",9\n")
    path_out = tmp_path / "out.jsonl"
    options = ("--prompt", "# {text}\n", "--keep", "n", "--sort", "--max-tokens", 2)
    result = jaxinfer("batch", tmp_path / "in.csv", path_out, "-m", model, *SLOTS, *options)
    assert result.exit_code == 3, result.stderr
    assert f"{tmp_path / 'in.csv'} row 10: the cell of text is empty" in result.stderr
    assert re.search(r" · \d+ prompt tokens, 18 output tokens · .* output tokens/s", result.stderr)
    found = [json.loads(line) for line in path_out.read_text().splitlines()]
    assert [one["columns"] for one in found] == [{"n": str(i)} for i in range(9)]
    assert found[3]["prompt"] == "# line 3\n"
    result = jaxinfer("batch", tmp_path / "in.csv", path_out, "-m", model, *SLOTS)
    assert "has no column 'prompt': its columns are 'text', 'n'" in result.stderr


def test_a_chat_of_a_table(jaxinfer, model, tmp_path, llm):
    (tmp_path / "in.txt").write_text("hi\n")
    result = jaxinfer("batch", tmp_path / "in.txt", "-", "-m", model, *SLOTS, "--chat", "--max-tokens", 3)
    record = json.loads(result.stdout)
    messages = [{"role": "user", "content": "hi"}]
    assert record["messages"] == messages
    answer = record["outputs"][0]
    expected = llm.chat(messages, SamplingParams(max_tokens=3, seed=answer["seed"]))[0].outputs[0]
    assert answer["text"] == expected.text


@pytest.mark.slow
def test_the_time_of_compiling_is_told(jaxinfer, model, tmp_path):
    path = write(tmp_path / "in.jsonl", [{"prompt": "a", "max_tokens": 1}])
    own = ("--max-seqs", 3, "--prefill-chunk", 20)  # whose programs no other test has compiled in this process
    result = jaxinfer("batch", path, tmp_path / "out.jsonl", "-m", model, *own, "--json")
    summary = json.loads(result.stdout)
    assert 0 < summary["compile_seconds"] < summary["seconds"] * 3
    assert " compiling), " in result.stderr


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["in"], "jaxinfer batch IN OUT -m MODEL"),
        (["-i", "in"], "jaxinfer batch IN OUT -m MODEL"),
        (["in", "out", "more"], "'more' is one path too many"),
        (["-i", "in", "out", "more"], "'more' is one path too many"),
        (["in", "-", "--json"], "--json is for answers in a file"),
        (["in", "-", "--overwrite"], "--overwrite is for answers in a file"),
        (["in", "-", "--sort"], "--sort is for answers in a file"),
    ],
)
def test_wrong_paths(jaxinfer, paths, message):
    result = jaxinfer("batch", *paths, "-m", "m")
    assert result.exit_code == 2
    assert message in result.stderr


LONG = "word " * 10_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": LONG},
        pytest.param(body("long", messages=[{"role": "user", "content": LONG}]), marks=pytest.mark.slow),
        pytest.param({"prompt": "x", "stop": LONG}, marks=pytest.mark.slow),
        pytest.param({"prompt": "x", "no such field": LONG}, marks=pytest.mark.slow),
    ],
    ids=lambda row: ", ".join(row),
)
def test_a_line_of_50_megabytes_costs_that_line_only(jaxinfer, model, tmp_path, row):
    row = {"custom_id": "long", **row}
    first, last = ({"custom_id": name, "prompt": "a", "max_tokens": 2} for name in ("first", "last"))
    short, long = [first, last], [first, row, last]
    seconds = []
    for name, rows in {"compiles": short, "short": short, "again": long, "out": long}.items():
        path_in = write(tmp_path / f"{name}.in.jsonl", rows)
        started = time.process_time()
        result = jaxinfer("batch", path_in, tmp_path / f"{name}.jsonl", "-m", model, *SLOTS)
        seconds.append(time.process_time() - started)
        assert result.exit_code == (3 if rows is long else 0)
    assert min(seconds[2:]) - seconds[1] < 1
    assert set(answers(tmp_path / "out.jsonl")) == {"first", "last"}
    failed = answers(tmp_path / "out.errors.jsonl")
    assert set(failed) == {"long"}
    assert len(json.dumps(failed)) < 2000
