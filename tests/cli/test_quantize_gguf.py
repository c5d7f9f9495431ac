"""`jaxinfer quantize --to gguf` and `--imatrix`: files that open, and options that would do nothing."""

import struct

import numpy as np
import pytest

import checkpoints_convert
from checkpoints_convert.gguf.index import GGUFIndex
from jaxinfer import LLM, SamplingParams
from jaxinfer.quantization.tree import is_quantized, weights


@pytest.fixture
def imatrix(model, tmp_path):
    """A binary importance matrix of the model's linear layers."""
    config, _ = checkpoints_convert.load(model)
    sizes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"), config.hidden_size)
    sizes |= {"attn_output": config.num_heads * config.head_dim, "ffn_down": config.intermediate_size}
    random, parts = np.random.default_rng(0), []
    for layer in range(config.num_layers):
        for name, size in sizes.items():
            raw = f"blk.{layer}.{name}.weight".encode()
            values = np.exp(random.standard_normal(size) * 2).astype("<f4").tobytes()
            parts.append(struct.pack("<i", len(raw)) + raw + struct.pack("<ii", 1, size) + values)
    path = tmp_path / "imatrix.dat"
    path.write_bytes(struct.pack("<i", len(parts)) + b"".join(parts))
    return path


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", [None, "q4_0"])
def test_a_file_is_written_and_opens(kind, jaxinfer, json_lines, model, tmp_path):
    out = tmp_path / "m.gguf"
    options = [] if kind is None else ["--type", kind]
    result = jaxinfer("quantize", model, out, "--to", "gguf", *options, "--json")
    assert result.exit_code == 0, result.stderr
    [report] = json_lines(result.stdout)
    assert (report["type"], report["num_bytes"]) == (kind or "q8_0", out.stat().st_size)
    assert max(report["errors"].values()) < (0.01 if kind is None else 0.12)
    with GGUFIndex(out) as index:
        assert index.tensors["blk.0.ffn_up.weight"].kind.name == report["type"].upper()
    with LLM(out) as quantized, LLM(model) as original:
        assert quantized.eos_token_ids == original.eos_token_ids
        assert quantized.tokenizer is not None
        assert original.tokenizer is not None
        assert quantized.tokenizer.encode("text") == original.tokenizer.encode("text")
        [answer] = quantized.generate("the model", SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(answer.outputs[0].token_ids) == 4


def test_the_summary_says_what_is_stored_otherwise(jaxinfer, model, tmp_path):
    result = jaxinfer("quantize", model, tmp_path / "m.gguf", "--to", "gguf", "--type", "q4_k")
    assert result.exit_code == 0, result.stderr
    assert "rounding error" in result.stdout
    assert "since their rows are no whole blocks of Q4_K" in result.stdout


def test_importances_change_a_gguf_file(jaxinfer, model, imatrix, tmp_path):
    found = []
    for number, options in enumerate(([], ["--imatrix", imatrix])):
        out = tmp_path / f"{number}.gguf"
        result = jaxinfer("quantize", model, out, "--to", "gguf", "--type", "q4_0", *options)
        assert result.exit_code == 0, result.stderr
        found.append(out.read_bytes())
    assert len(found[0]) == len(found[1])
    assert found[0] != found[1]


@pytest.mark.slow
def test_importances_weigh_the_error_of_rounding(jaxinfer, model, imatrix, tmp_path):
    found = []
    for number, options in enumerate(([], ["--imatrix", imatrix])):
        out = tmp_path / str(number)
        result = jaxinfer("quantize", model, out, "--method", "rtn", "--group-size", 16, *options)
        assert result.exit_code == 0, result.stderr
        found.append([leaf for leaf in weights(checkpoints_convert.load(out)[1]) if is_quantized(leaf)])
    assert all(not np.array_equal(a.scales, b.scales) for a, b in zip(*found, strict=True))


def test_layers_without_importances_are_named(jaxinfer, model, imatrix, tmp_path):
    raw = b"blk.0.attn_q.weight"
    config, _ = checkpoints_convert.load(model)
    values = np.ones(config.hidden_size, "<f4").tobytes()
    one = struct.pack("<i", len(raw)) + raw + struct.pack("<ii", 1, config.hidden_size) + values
    imatrix.write_bytes(struct.pack("<i", 1) + one)
    result = jaxinfer("quantize", model, tmp_path / "o", "--method", "rtn", "--group-size", 16, "--imatrix", imatrix)
    assert result.exit_code == 0, result.stderr
    assert "13 of 14 linear layers are not in" in result.stderr


def test_importances_of_another_model_are_refused(jaxinfer, model, imatrix, tmp_path):
    imatrix.write_bytes(struct.pack("<ii", 1, 5) + b"other" + struct.pack("<iif", 1, 1, 1.0))
    result = jaxinfer("quantize", model, tmp_path / "out", "--method", "rtn", "--imatrix", imatrix)
    assert result.exit_code != 0
    assert "the imatrix has no tensor of this model" in result.stderr
    result = jaxinfer("quantize", model, tmp_path / "m.gguf", "--to", "gguf", "--type", "q4_0", "--imatrix", imatrix)
    assert result.exit_code != 0
    assert "the imatrix has no tensor 'blk.0." in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imatrix.dat"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "gguf", "--method", "gptq"], "--to gguf rounds to nearest: --method gptq is not applied there"),
        (["--to", "gguf", "--bits", "4"], "--bits is not applied by --to gguf: --type names the type"),
        (["--to", "gguf", "--asymmetric"], "--asymmetric is not applied by --to gguf"),
        (["--to", "gguf", "--keep", "layers.0"], "--keep is not applied by --to gguf"),
        (["--to", "gguf", "--imatrix", "x"], "--imatrix is for --type q4_0 and q4_k; q8_0 is rounded without weights"),
        (["--to", "gguf", "--samples", "4"], "--samples is of --calibration, which is not given"),
        (["--to", "gguf", "--damping", "0.1"], "--damping is of --method gptq and auto, not of rtn"),
        (["--type", "q4_0", "--method", "rtn"], "--type is of --to gguf"),
        (["--imatrix", "x", "--calibration", "y"], "--imatrix is of --method rtn and --to gguf; gptq measures"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, message, jaxinfer, model, tmp_path):
    result = jaxinfer("quantize", model, tmp_path / "m.gguf", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_destination_must_be_a_file_that_does_not_exist(jaxinfer, model, tmp_path):
    result = jaxinfer("quantize", model, tmp_path / "folder", "--to", "gguf")
    assert "must be a file whose name ends in .gguf" in result.stderr
    (tmp_path / "m.gguf").write_text("mine")
    result = jaxinfer("quantize", model, tmp_path / "m.gguf", "--to", "gguf")
    assert "exists: choose another destination, or replace it with --overwrite" in result.stderr
    assert jaxinfer("quantize", model, tmp_path / "m.gguf", "--to", "gguf", "--overwrite").exit_code == 0
