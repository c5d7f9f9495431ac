"""The comparison's own machinery: requests, checkpoints, sums, ratios. No peer is needed."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.peers import compare, hybrid, systems, workload
from benchmarks.peers.report import to_markdown
from benchmarks.peers.to_gguf import _interleaved
from benchmarks.peers.workload import Measure

TINY = {
    **workload.SHAPE,
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def test_requests_repeat_and_have_the_lengths_of_the_comparison():
    found = workload.measures()
    assert found == workload.measures()
    mixed = found["mixed32"]
    assert len(mixed.prompts) == 32
    assert all(16 <= len(prompt) <= 256 for prompt in mixed.prompts)
    assert all(32 <= length <= 128 for length in mixed.lengths)
    assert (len(found["prefill"].prompts[0]), found["prefill"].lengths) == (1024, [1])
    assert max(map(len, mixed.prompts)) + max(mixed.lengths) <= workload.CACHE_TOKENS // workload.MAX_SEQS


def test_the_checkpoint_opens_and_its_bytes_are_counted(tmp_path):
    from jaxinfer.loading import load_shapes

    workload.make_checkpoint(tmp_path, TINY)
    config, _ = load_shapes(tmp_path, dtype="float32")
    assert (config.num_layers, config.tie_word_embeddings) == (2, True)
    tensors = load_file(tmp_path / "model.safetensors")
    assert workload.num_weight_bytes(TINY) == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.slow
def test_the_hybrid_checkpoint_opens_and_its_bytes_are_counted(tmp_path):
    from jaxinfer.loading import load_shapes

    sizes = {**hybrid.SIZES, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_layers": 4}
    num_bytes = hybrid.make_hybrid(tmp_path / "model", sizes)
    config, _ = load_shapes(tmp_path / "model", dtype="float32")
    assert config.layer_kinds == ("gated_delta",) * 3 + ("attention",)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert num_bytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.slow
def test_jaxinfer_as_a_peer_answers_exactly(tmp_path):
    from benchmarks.peers.with_jaxinfer import Jaxinfer
    from benchmarks.peers.worker import run

    workload.make_checkpoint(tmp_path, TINY)
    measure = Measure([[3, 4, 5]], [5], "decode", 2)
    job = compare.job("jaxinfer", tmp_path, {"decode": measure}, 1)
    found = run(json.loads(json.dumps(job)))
    assert len(found["seconds"]["decode"]) == 2
    assert [len(one) for one in found["answers"]["decode"]] == [5]
    peer = Jaxinfer(tmp_path, None)
    assert peer.generate([[3, 4, 5]], [5]) == found["answers"]["decode"]
    peer.close()


def test_rows_of_queries_are_interleaved_pairs():
    weight = np.arange(8, dtype=np.float32)[:, None]  # a head of 8: halves 0-3 and 4-7
    assert _interleaved(weight, 1)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert _interleaved(weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_names_mean_systems():
    assert systems.chosen("llama_cpp,jaxinfer") == ["llama_cpp", "jaxinfer", "jaxinfer_draft", "jaxinfer_ngram"]
    assert "transformers_continuous" in systems.chosen("transformers")
    with pytest.raises(ValueError, match="'vlm' is none of"):
        systems.chosen("vlm")
    assert systems.why_not("jaxinfer", None) is None
    assert systems.why_not("easydel", None) == "no --easydel-python"


def runs_of(decode, answers):
    seconds = {"decode": decode, "mixed8": [2.0]}
    return [{"seconds": seconds, "answers": {"decode": answers}, "start_seconds": 1.0, "peak_rss_bytes": 2**30}]


def test_figures_ratios_and_equal_tokens():
    measures = {
        "decode": Measure([[1]], [workload.DECODE_TOKENS], "decode", 3),
        "mixed8": Measure([[1]] * 8, [10] * 8, "batch", 1),
    }
    runs = {
        "jaxinfer": runs_of([0.5, 1.0, 4.0], [[1, 2, 3, 4]]),
        "transformers_eager": runs_of([2.0], [[1, 2, 9, 4]]),
        "transformers_static": runs_of([4.0], [[1, 2, 9, 4]]),
    }
    found = compare.report(runs, {"llama_cpp": "no file"}, {"vllm": "no CUDA GPU"}, measures, 4)
    row = found["systems"]["jaxinfer"]
    assert row["decode"] == {"median": 95.0, "least": 95 / 4, "most": 190.0}
    assert row["mixed8"]["median"] == 40.0
    ratio = next(one for one in found["ratios"] if one["measure"] == "decode")
    assert ratio == {"measure": "decode", "over": "transformers_eager", "ratio": 2.0, "goal": 2.5}
    assert found["equal_tokens"]["jaxinfer"]["decode"] == {"equal": 2, "tokens": 4}
    text = to_markdown(found)
    assert "decode 2.00x Transformers' best (goal 2.5x)" in text
    assert "decode 2 of 4" in text
    assert "llama.cpp (failed: no file)" in text
    assert "vLLM (no CUDA GPU)" in text


def test_a_failing_system_is_left_out_and_told_of(tmp_path, monkeypatch):
    def fails(job, python, folder):
        if job["system"] == "llama_cpp":
            raise compare.SystemFailedError("llama_cpp failed:\nthe last line")
        return runs_of([1.0], [[1]])[0]

    monkeypatch.setattr(compare, "run_process", fails)
    measures = {"decode": Measure([[1]], [1], "decode", 1), "mixed8": Measure([[1]], [1], "batch", 1)}
    lines = []
    runs, failed = compare.take_turns(
        ["jaxinfer", "llama_cpp"],
        lambda name: [compare.job(name, tmp_path, measures, 1)],
        lambda name: "python",
        tmp_path,
        2,
        lines.append,
    )
    assert list(runs) == ["jaxinfer"]
    assert failed == {"llama_cpp": "the last line"}
    assert len(lines) == 3  # it is not tried again


def test_a_process_that_ends_with_an_error_says_what_it_said(tmp_path):
    import sys

    job = {"system": "no such system", "folder": str(tmp_path), "num_threads": 1, "measures": {}}
    with pytest.raises(compare.SystemFailedError, match="no such system"):
        compare.run_process(job, sys.executable, tmp_path)


def test_only_a_system_that_keeps_programs_starts_twice(tmp_path, monkeypatch):
    """The first process finds no compiled programs, the second one those of the first."""
    programs = tmp_path / compare.PROGRAMS
    seen = []

    def run_process(job, python, folder):
        seen.append((job["system"], job.get("only_starts", False), programs.exists()))
        programs.mkdir(exist_ok=True)
        return {"seconds": {}, "start_seconds": 5.0 if job.get("only_starts") else 12.0, "peak_rss_bytes": 1}

    programs.mkdir()
    monkeypatch.setattr(compare, "run_process", run_process)
    found = compare.start_twice({"system": "jaxinfer"}, "python", tmp_path)
    assert (found["start_seconds"], found["second_start_seconds"]) == (12.0, 5.0)
    assert "second_start_seconds" not in compare.start_twice({"system": "llama_cpp"}, "python", tmp_path)
    assert seen == [("jaxinfer", False, False), ("jaxinfer", True, True), ("llama_cpp", False, False)]
