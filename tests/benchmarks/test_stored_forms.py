"""The random models of the comparison by stored form: their blocks, their files in both engines, their report."""

import numpy as np
import pytest

from benchmarks import stored_forms
from benchmarks.peers import mixture, workload
from checkpoints_convert.gguf.blocks import dequantize

TINY = {
    "vocab_size": 512,
    "hidden_size": 256,
    "expert_size": 256,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_token": 2,
}
TINY_LLAMA = {
    **workload.SHAPE,
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
PROMPT = [3, 70, 41, 19, 88, 5, 60, 33]


@pytest.mark.parametrize(("kind", "make"), [("Q4_K", mixture.q4_k_blocks), ("Q6_K", mixture.q6_k_blocks)])
def test_random_blocks_have_the_mean_and_deviation_of_a_fresh_model(kind, make):
    weights = dequantize(kind, make(np.random.default_rng(0), 200))
    assert weights.size == 200 * mixture.BLOCK
    assert abs(weights.mean()) < 0.02 * mixture.WEIGHT_SCALE
    assert weights.std() == pytest.approx(mixture.WEIGHT_SCALE, rel=0.05)


def test_the_types_are_those_of_a_q4_k_m():
    found = {name: kind for name, (kind, _) in mixture.tensors({**TINY, "num_layers": 16}).items()}
    finer = [layer for layer in range(16) if found[f"blk.{layer}.ffn_down_exps.weight"] == "Q6_K"]
    assert finer == [0, 1, 4, 7, 10, 13, 14, 15]
    assert [found[f"blk.{layer}.attn_v.weight"] for layer in finer] == ["Q6_K"] * 8
    assert (found["output.weight"], found["token_embd.weight"]) == ("Q6_K", "Q4_K")
    assert found["blk.0.ffn_gate_exps.weight"] == "Q4_K"


def test_the_mixture_of_the_comparison_has_at_least_1_gb():
    bits = {"Q4_K": 144 / 256, "Q6_K": 210 / 256, "F32": 4}
    assert sum(bits[kind] * np.prod(dims) for kind, dims in mixture.tensors(mixture.SHAPE).values()) > 1e9


@pytest.fixture
def llama_cpp():
    pytest.importorskip("gguf")
    return pytest.importorskip("llama_cpp")


@pytest.mark.oracle
def test_the_mixture_opens_in_both_engines_with_the_same_tokens(tmp_path, llama_cpp):
    from benchmarks.peers.with_jaxinfer import Jaxinfer
    from benchmarks.peers.with_llama_cpp import LlamaCpp

    file = tmp_path / "mixture.gguf"
    num_read = mixture.write_mixture(file, TINY)
    assert 0 < num_read < file.stat().st_size
    ours = Jaxinfer(file, None)
    found = ours.generate([PROMPT], [8])[0]
    ours.close()
    theirs = LlamaCpp(file, 1).generate([PROMPT], [8])[0]
    # llama.cpp rounds activations to 8 bits, so a near-tie may end the agreement.
    assert found[:3] == theirs[:3]


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_the_llama_in_16_bits_opens_in_both_engines_with_the_same_tokens(tmp_path, llama_cpp, kind):
    from benchmarks.peers.to_gguf import write_gguf
    from benchmarks.peers.with_jaxinfer import Jaxinfer
    from benchmarks.peers.with_llama_cpp import LlamaCpp

    workload.make_checkpoint(tmp_path, TINY_LLAMA, dtype="bfloat16")
    file = tmp_path / "model.gguf"
    write_gguf(tmp_path, file, kind)
    ours = Jaxinfer(tmp_path, None)
    found = ours.generate([PROMPT], [6])[0]
    ours.close()
    assert found[:3] == LlamaCpp(file, 1).generate([PROMPT], [6])[0][:3]


def test_the_report_names_the_cpu_and_the_ratios(tmp_path, monkeypatch):
    opened = {
        "jaxinfer": stored_forms.Opened("jaxinfer", tmp_path),
        "llama.cpp": stored_forms.Opened("llama_cpp", tmp_path),
    }
    monkeypatch.setattr(stored_forms, "prepare", lambda model, folder: (opened, 4))

    def turns(labels, jobs, python_of, folder, rounds, told):
        assert [jobs(label)[0]["system"] for label in labels] == ["jaxinfer", "llama_cpp"]
        run = {"answers": {}, "start_seconds": 1.0, "peak_rss_bytes": 2**30}
        seconds = {"jaxinfer": 1.0, "llama.cpp": 2.0}
        return {
            label: [{**run, "seconds": {key: [seconds[label]] for key in stored_forms.TITLES}}] for label in labels
        }, {}

    monkeypatch.setattr(stored_forms, "take_turns", turns)
    found = stored_forms.run("mixture", tmp_path, 1, 2)
    assert found["ratios"]["llama.cpp"]["decode"] == 2.0
    report = {"cpu": "A CPU", "instruction_sets": ["avx2"], "num_threads": 2, "models": {"mixture": found}}
    text = stored_forms.to_markdown(report)
    assert "A CPU: avx2; 2 threads each" in text
    assert "jaxinfer over llama.cpp: decode at batch 1 2.00x" in text
    assert set(stored_forms.cpu()) == {"cpu", "instruction_sets"}
