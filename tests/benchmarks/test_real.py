"""The comparison on published models: the CPU, requests, figures, tables, and how an interrupted run goes on."""

import json

import pytest

from benchmarks.peers.compare import SystemFailedError
from benchmarks.peers.workload import DECODE_TOKENS
from benchmarks.real import __main__ as real
from benchmarks.real.cpu import describe_cpu
from benchmarks.real.measures import TITLES, figure_of, job_of, measure_of
from benchmarks.real.report import ratio, to_markdown


def test_a_cpu_is_described_by_name_and_instruction_sets():
    text = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512f avx512_vnni\n\nprocessor\t: 1\n"
    assert describe_cpu(text) == {"cpu": "Some CPU", "instruction_sets": ["AVX2", "AVX-512", "VNNI"]}
    assert describe_cpu("")["instruction_sets"] == []


def test_all_systems_get_the_same_requests_and_llama_cpp_one_after_the_other():
    for name in TITLES:
        ours, theirs = measure_of(name, "jaxinfer"), measure_of(name, "llama_cpp")
        assert (ours.prompts, ours.lengths) == (theirs.prompts, theirs.lengths)
    assert (measure_of("batch64", "jaxinfer").kind, measure_of("batch64", "llama_cpp").kind) == ("batch", "each")
    assert [len(one) for one in measure_of("prompt", "jaxinfer").prompts] == [512]


def test_options_are_passed_to_jaxinfer_alone(tmp_path):
    given = {"activations": "int8"}
    assert job_of("jaxinfer", tmp_path, ["decode"], 2, given)["options"]["activations"] == "int8"
    assert "activations" not in job_of("jaxinfer", tmp_path, ["decode"], 2, {})["options"]
    assert "activations" not in job_of("llama_cpp", tmp_path, ["decode"], 2, given)["options"]


def test_figures_are_medians_in_the_units_of_their_titles():
    found = {"seconds": {"decode": [2.0, 1.0, 9.0], "prompt": [4.0]}, "peak_rss_bytes": 3 * 2**20}
    assert figure_of("decode", "jaxinfer", found) == (DECODE_TOKENS - 1) / 2
    assert figure_of("prompt", "jaxinfer", found) == 128
    assert figure_of("memory", "jaxinfer", found) == 3
    assert figure_of("start_cold", "jaxinfer", {"process_start_seconds": 1.5}) == 1.5


def test_the_table_has_medians_and_ratios_in_our_favour():
    models = {"smollm2": {"jaxinfer": {"decode": [50.0, 90.0, 60.0], "memory": [400.0]}, "llama_cpp": {}}}
    models["smollm2"]["llama_cpp"] = {"decode": [120.0], "memory": [200.0]}
    report = {**real.empty_report(3, 2, {}), "models": models, "cpu": "Some CPU", "instruction_sets": ["AVX2"]}
    text = to_markdown(report)
    assert "| decode at batch 1, tokens/s | 60.0 | 120 | 0.50x |" in text
    assert "| 400 | 200 | 0.50x |" in text
    assert "Some CPU (AVX2), 2 threads each, medians of 3 rounds" in text
    assert ratio("memory", 100, 200) == ratio("decode", 200, 100) == 2


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Measures with processes that only count, and of which one may fail or be stopped."""
    calls = []

    def run_job(job, name, folder):
        calls.append((job["system"], name))
        if run.failing == len(calls):
            raise run.error
        return {"seconds": {name: [1.0]}, "peak_rss_bytes": 1, "process_start_seconds": 1.0}

    monkeypatch.setattr(real, "run_job", run_job)
    monkeypatch.setattr(real, "work_folder", lambda: tmp_path)
    monkeypatch.setattr(real, "fetched_path", lambda name: tmp_path / name)
    file = tmp_path / "figures.json"

    def run():
        del calls[:]
        report = real.continued(file, real.empty_report(2, 2, {}))
        return real.measure(["smollm2"], ["decode", "memory"], ["jaxinfer", "llama_cpp"], report, file), list(calls)

    run.failing, run.error, run.file = 0, KeyboardInterrupt(), file
    return run


def test_systems_take_turns_within_a_measure(run):
    assert run()[1] == [(system, name) for name in ("decode", "memory") for system in ("jaxinfer", "llama_cpp")] * 2


def test_a_run_that_was_stopped_goes_on_and_loses_one_figure(run):
    run.failing = 4
    with pytest.raises(KeyboardInterrupt):
        run()
    run.failing = 0
    report, calls = run()
    assert calls[0] == ("llama_cpp", "memory")
    assert len(calls) == 5
    assert [len(figures) for row in report["models"]["smollm2"].values() for figures in row.values()] == [2] * 4


def test_a_system_that_fails_is_left_out_from_then_on(run):
    run.failing, run.error = 2, SystemFailedError("llama_cpp failed:\nno such file")
    report, calls = run()
    assert report["failed"] == {"llama_cpp": "no such file"}
    assert calls[2:] == [("jaxinfer", "memory"), ("jaxinfer", "decode"), ("jaxinfer", "memory")]


def test_figures_of_another_cpu_are_not_continued(run):
    run()
    report = json.loads(run.file.read_text())
    run.file.write_text(json.dumps({**report, "cpu": "Another CPU"}))
    with pytest.raises(SystemExit, match="made with cpu=Another CPU"):
        run()
