"""A job from end to end with a model that computes nothing: what it refuses, resumes, retries and counts."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxinfer.batch import BatchError, BatchWriteError, open_job
from jaxinfer.batch.job import Job
from jaxinfer.engine.request import WeightsSpan
from jaxinfer.sampling.params import SamplingParams


@pytest.fixture
def path_in(write_rows, mixed):
    return write_rows(mixed(24))


def test_the_summary_counts_rows_and_tokens(path_in, run, records, tmp_path):
    summary = run(path_in)
    assert (summary.rows, summary.ok, summary.failed, summary.resumed) == (24, 21, 3, 0)
    used = [
        record["usage"] if "outputs" in record else record["response"]["body"]["usage"]
        for record in records(tmp_path / "out.jsonl")
    ]
    assert summary.output_tokens == sum(one["completion_tokens"] for one in used)
    assert summary.prompt_tokens == sum(one["prompt_tokens"] for one in used)
    assert (summary.out, summary.errors) == (str(tmp_path / "out.jsonl"), str(tmp_path / "out.errors.jsonl"))
    again = run(path_in)
    assert (again.ok, again.failed, again.resumed) == (21, 3, 24)
    assert (again.prompt_tokens, again.output_tokens) == (summary.prompt_tokens, summary.output_tokens)
    assert again.tokens_per_second == 0


def test_order_of_completion_changes_nothing(path_in, run, outcome, fake_llm, tmp_path):
    run(path_in)
    run(path_in, tmp_path / "other.jsonl", llm=fake_llm(order=1, num_slots=3))
    assert outcome(tmp_path) == outcome(tmp_path, "other")
    assert (tmp_path / "out.jsonl").read_bytes() != (tmp_path / "other.jsonl").read_bytes()


def test_a_job_without_failures_has_no_error_file(write_rows, run, tmp_path):
    run(write_rows([{"prompt": "x"}]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.job.json"]


def test_errors_go_where_they_are_wanted(path_in, run, records, tmp_path):
    run(path_in, errors=tmp_path / "bad.jsonl")
    assert len(records(tmp_path / "bad.jsonl")) == 3
    with pytest.raises(BatchError, match=r"errors \(was bad.jsonl, is out.errors.jsonl\)"):
        run(path_in)


def test_rows_may_name_other_models_and_are_counted(write_rows, run, outcome, tmp_path):
    def row(custom_id, **model):
        return {"custom_id": custom_id, "url": "/v1/completions", "body": {"prompt": "x", **model}}

    names = {"a": "gpt-4o", "b": "fake", "c": None, "d": "n", "e": "gpt-4o"}
    summary = run(write_rows([row(name, **({"model": model} if model else {})) for name, model in names.items()]))
    assert (summary.ok, summary.failed, summary.other_models) == (5, 0, {"gpt-4o": 2, "n": 1})
    found = outcome(tmp_path)
    assert {name: found[name]["response"]["body"]["model"] for name in names} == {**names, "c": "fake"}
    assert run(tmp_path / "in.jsonl").other_models == summary.other_models  # all were done before


def test_a_row_of_several_prompts_fails_whole_and_once(write_rows, run, records, tmp_path):
    body = {"prompt": ["x", "y" * 90, "z" * 90, "w"]}
    summary = run(write_rows([{"custom_id": "a", "url": "/v1/completions", "body": body}, {"prompt": "x"}]))
    assert (summary.ok, summary.failed) == (1, 1)
    assert len(records(tmp_path / "out.errors.jsonl")) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llm": {"weights": "b"}}, "the model"),
        ({"llm": {"seed": 3}}, r"seed \(was 0, is 3\)"),
        ({"llm": {"tool_parser": "hermes"}}, r"tool_parser \(was not given, is hermes\)"),
        ({"llm": {"temperature": 0.5}}, r"temperature of the checkpoint \(was 1.0, is 0.5\)"),
        ({"params": {"top_k": 5}}, r"top_k \(was not given, is 5\)"),
        ({"params": SamplingParams(seed=4)}, r"seed \(was 0, is 4\)"),
    ],
)
def test_another_jobs_results_are_refused_and_left_alone(path_in, run, fake_llm, tmp_path, outcome, change, message):
    run(path_in)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "out.jsonl").write_bytes(before["out.jsonl"] + b"{torn")
    other = {**change, "llm": fake_llm(**change.get("llm", {}))}
    with pytest.raises(BatchError, match=f"another job; differences: {message}"):
        run(path_in, **other)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        **before,
        "out.jsonl": before["out.jsonl"] + b"{torn",
    }
    run(path_in, **other, overwrite=True)
    assert len(outcome(tmp_path)) == 24


def test_another_input_is_told_before_a_model_is_needed(path_in, run, write_rows, mixed, tmp_path):
    run(path_in)
    write_rows(mixed(25))
    with (
        pytest.raises(BatchError, match=r"differences: the input's content; rows \(was 24, is 25\)"),
        open_job(path_in, tmp_path / "out.jsonl"),
    ):
        pass


def test_results_that_exist_without_a_job_are_not_ours(path_in, run, tmp_path):
    (tmp_path / "out.jsonl").write_text("precious\n")
    with pytest.raises(BatchError, match=r"exists without a out.jsonl.job.json"):
        run(path_in)
    assert (tmp_path / "out.jsonl").read_text() == "precious\n"


def test_resume_can_be_refused(path_in, run, outcome, tmp_path):
    run(path_in, resume=False)
    with pytest.raises(BatchError, match="results of an earlier run"):
        run(path_in, resume=False)
    run(path_in, resume=False, overwrite=True)
    assert len(outcome(tmp_path)) == 24


def test_errors_are_tried_again_when_asked(write_rows, run, fake_llm, tmp_path, outcome):
    path_in = write_rows([{"prompt": "x"}, {"prompt": "broken"}, {"prompt": "x", "top_p": 3}])
    assert run(path_in).failed == 2
    healed = fake_llm()
    healed._completion = lambda ids, params, index: fake_llm._completion(healed, [1], params, index)
    summary = run(path_in, llm=healed)
    assert (summary.ok, summary.failed, summary.resumed) == (1, 2, 3)
    summary = run(path_in, llm=healed, retry_errors=True)
    assert (summary.ok, summary.failed, summary.resumed) == (2, 1, 1)
    assert len(outcome(tmp_path)) == 3


@pytest.mark.parametrize("name", ["out.jsonl", "out.errors.jsonl"])
def test_a_record_that_is_there_twice_or_not_in_the_input_is_told(path_in, run, tmp_path, name):
    run(path_in)
    path = tmp_path / name
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines(keepends=True)[0])
    with pytest.raises(BatchError, match=r"line \d+: custom_id '.*' occurs twice"):
        run(path_in)
    path.write_bytes(whole + b'{"custom_id": "stranger"}\n')
    with pytest.raises(BatchError, match="'stranger' is not in"):
        run(path_in)


def test_a_removed_line_is_done_again(path_in, run, tmp_path, outcome):
    run(path_in)
    whole = outcome(tmp_path)
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines[:3] + lines[4:]))
    assert run(path_in).resumed == 23
    assert outcome(tmp_path) == whole


@pytest.mark.parametrize("same", ["out", "errors", "job"])
def test_files_must_differ(path_in, run, tmp_path, same):
    paths = {
        "out": {"path_out": path_in},
        "errors": {"errors": path_in},
        "job": {"errors": tmp_path / "out.jsonl.job.json"},
    }
    with pytest.raises(BatchError, match="must be different files"):
        run(path_in, **paths[same])
    assert len(path_in.read_text().splitlines()) == 24


def test_two_jobs_cannot_write_the_same_results(path_in, run, tmp_path):
    with (
        open_job(path_in, tmp_path / "out.jsonl"),
        pytest.raises(BatchError, match="being written by another process"),
    ):
        run(path_in)
    assert not (tmp_path / "out.jsonl").exists()  # nothing ran, nothing is left
    run(path_in)


def test_a_folder_that_is_missing_is_told(path_in, run, tmp_path):
    with pytest.raises(BatchError, match="there is no folder"):
        run(path_in, tmp_path / "nowhere" / "out.jsonl")


def test_a_broken_job_file_is_told(path_in, run, tmp_path):
    run(path_in)
    for text in ("{", "[]", "{}"):
        (tmp_path / "out.jsonl.job.json").write_text(text)
        with pytest.raises(BatchError, match=r"job.json (cannot be read|is not the job file of a batch)"):
            run(path_in)


def test_an_input_that_changes_under_the_job_stops_it(path_in, run, fake_llm, write_rows, mixed, tmp_path, records):
    class Changing(fake_llm):
        def fingerprint(self):
            write_rows([*mixed(20), *[{"prompt": "other"}] * 4])
            return super().fingerprint()

    with pytest.raises(BatchError, match="changed while the job ran, at line 21"):
        run(path_in, llm=Changing())
    assert records(tmp_path / "out.jsonl")


def test_the_job_file_says_whose_the_results_are(path_in, run, tmp_path):
    run(path_in, params={"stop": ["x"], "logit_bias": {5: 1.0}})
    stored = json.loads((tmp_path / "out.jsonl.job.json").read_text())
    assert (stored["rows"], stored["seed"], stored["model"], stored["format"]) == (24, 0, "fake", 1)
    assert stored["params"]["given"] == {"logit_bias": {"5": 1.0}, "stop": ["x"]}
    run(path_in, params={"stop": ["x"], "logit_bias": {5: 1.0}})  # reads back equal


def test_the_package_needs_no_jax():
    code = "import sys, jaxinfer.batch; print([name for name in ('jax', 'numpy', 'tqdm') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.fixture
def lines(records, tmp_path):
    return lambda: [one["custom_id"] for one in records(tmp_path / "out.jsonl")]


def test_sort_puts_answers_in_the_order_of_the_input(path_in, run, records, outcome, lines, mixed, tmp_path):
    run(path_in)
    assert run(path_in, tmp_path / "other.jsonl", sort=True).ok == 21
    assert outcome(tmp_path, "other") == outcome(tmp_path)
    wanted = [row.get("custom_id", f"row-{number}") for number, row in enumerate(mixed(24), 1)]
    for name, is_bad in (("other.jsonl", False), ("other.errors.jsonl", True)):
        found = [one["custom_id"] for one in records(tmp_path / name)]
        assert found == [one for one in wanted if one.startswith("bad") == is_bad]
    before = lines()
    run(path_in, sort=True)  # all were done before
    assert sorted(before) == sorted(lines())
    assert before != lines() == [one for one in wanted if not one.startswith("bad")]
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".part"]


def test_a_sorted_file_stays_locked_and_can_be_continued(path_in, run, outcome, fake_llm, tmp_path):
    with open_job(path_in, tmp_path / "out.jsonl", sort=True) as job:
        job.run(fake_llm(), use_tqdm=False)
        with pytest.raises(BatchError, match=r"out\.jsonl is being written by another process"):
            run(path_in)
    whole = outcome(tmp_path)
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[3:9]))
    assert run(path_in, sort=True).resumed == 9  # and 3 errors
    assert outcome(tmp_path) == whole


def test_without_room_for_sorting_the_answers_stay(path_in, run, outcome, tmp_path, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("jaxinfer.batch.results.atomic_writer", full)
    with pytest.raises(BatchWriteError, match="No space left on device; 24 of 24 rows are written completely"):
        run(path_in, sort=True)
    assert len(outcome(tmp_path)) == 24
    monkeypatch.undo()
    assert run(path_in, sort=True).resumed == 24


def test_a_row_names_all_weights_that_made_its_tokens():
    def named(*answers):
        outputs = [SimpleNamespace(outputs=[SimpleNamespace(weights=spans) for spans in answers])]
        job = SimpleNamespace(_model=SimpleNamespace(fingerprint_of={"1": "a", "2": "b"}.get), _identity=None)
        return Job._weights_of(job, outputs)

    first, second = WeightsSpan("1"), WeightsSpan("2", 3)
    assert named([first], [first]) == {"weights": {"version": "1", "fingerprint": "a"}}
    assert named([first, second]) == {"weights": {"version": "2", "fingerprint": "b", "versions": ["1", "2"]}}
    assert named([]) == {}
