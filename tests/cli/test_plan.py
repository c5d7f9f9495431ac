"""`jaxinfer plan` without compiling: what it reads and prints. Compiled plans are tests/planning's."""

import json
import os
import subprocess
import sys

import pytest

from jaxinfer.engine.options import EngineOptions, parse_sizes
from jaxinfer.extras import install_hint
from pallas_kernels import ahead_of_time
from tests.cli.conftest import CONFIG, START

# 128 KiB of keys and values a token.
WIDE = {"num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 256}


def test_a_config_json_alone_is_enough(jaxinfer, json_lines, config_alone):
    options = ("--on", "v6e:1x1", "--no-compile", "--json", "--max-seqs", 4, "--context", 512, "--batch", "1,4")
    result = jaxinfer("plan", config_alone, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    [data] = json_lines(result.stdout)
    assert data["fits"] is True
    matrices = 2 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512) + 2 * 1024 * 256
    assert data["bytes"]["weights"] == 2 * (matrices + 5 * 256)
    assert data["cache"]["tokens_planned"] == 4 * 512
    assert [point["batch"] for point in data["roofline"]] == [1, 4]
    assert data["bytes"]["is_measured"] is False


def test_options_change_what_is_planned(jaxinfer, json_lines, config_alone):
    def plan(*options):
        result = jaxinfer("plan", config_alone, "--no-compile", "--json", *options)
        assert result.exit_code == 0, result.stderr
        return json_lines(result.stdout)[0]

    plain = plan("--on", "v5e:2x2", "--mesh", "model=2,data=2")
    assert plain["layout"] == {"mesh": "data=2,model=2", "devices": 4, "replicas": 2, "devices of a replica": 2}
    assert plan("--on", "v5e:2x2")["layout"] == plain["layout"]  # two key heads
    large, small = plan("--on", "h200x1"), plan("--on", "h200x1", "--quantize", "int8", "--kv-dtype", "int8")
    assert small["bytes"]["weights"] < 0.8 * large["bytes"]["weights"]
    assert small["bytes"]["cache"] < 0.6 * large["bytes"]["cache"]
    drafted = plan("--on", "h200x1", "--draft", config_alone, "--num-draft-tokens", 3)
    assert drafted["bytes"]["draft weights"] == drafted["bytes"]["weights"]
    assert drafted["rounds"][0]["num_draft_tokens"] == 3
    assert "adapters" not in plain
    adapted = plan("--on", "h200x1", "--max-adapters", 4, "--max-loaded-adapters", 32, "--max-adapter-rank", 8)
    slot = adapted["adapters"]["slot_bytes"]
    assert adapted["bytes"]["weights"] - large["bytes"]["weights"] <= 4 * slot < large["bytes"]["weights"]
    assert adapted["adapters"] == {
        "max_adapters": 4,
        "max_loaded_adapters": 32,
        "slot_bytes": slot,
        "host_bytes": 32 * slot,
    }
    assert any(note.startswith("32 loaded adapters take up to ") for note in adapted["notes"])


def test_the_sizes_for_a_trace_are_options_of_the_engine(jaxinfer, config_alone, tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps({"prompt_tokens": 9 * n, "output_tokens": n}) + "\n" for n in range(1, 40)))
    options = ("--on", "v6e:1x1", "--no-compile", "--context", 512)
    result = jaxinfer("plan", config_alone, *options, "--trace", file)
    assert (result.exit_code, result.stderr) == (0, "")
    [flags] = [line.split() for line in result.stdout.splitlines() if line.startswith("  --token-buckets")]
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    tokens, slots = (parse_sizes(given[name]) for name in ("--token-buckets", "--decode-slots"))
    EngineOptions(token_buckets=tokens, decode_slots=slots).check_buckets(prefill_chunk=512, max_seqs=64)
    with file.open("a") as lines:
        lines.write('{"prompt_tokens": 600, "output_tokens": 1}\n')
    result = jaxinfer("plan", config_alone, *options, "--trace", file)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "trace.jsonl, line 40: 600 + 1 tokens are more than the 512 of a sequence" in result.stderr


def test_the_training_of_a_head(jaxinfer, json_lines, config_alone):
    options = ("--on", "v6e:2x2", "--mesh", "data=2,model=2", "--no-compile", "--train-head")
    result = jaxinfer("plan", config_alone, *options, "eagle3", "--context", 128, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    [data] = json_lines(result.stdout)
    assert (data["mesh"], data["fits"]) == ("data=2,model=2", True)
    assert (data["options"]["length"], data["options"]["draft_vocab_size"]) == (128, 256)
    norms = 2 * 5 * 256
    matrices = 2 * (2 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512) + 2 * 1024 * 256)
    assert data["bytes"]["target"] == matrices // 2 + norms
    result = jaxinfer("plan", config_alone, *options, "dflash")
    assert "training a head for" in result.stdout
    assert "dflash, blocks of 8 tokens of 1,024; steps of 8 rows of 256 tokens" in result.stdout
    result = jaxinfer("plan", config_alone, *options, "eagle3", "--draft", config_alone)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--train-head plans no engine, and --draft is of one" in result.stderr


def test_the_embedded_model_for_people(jaxinfer):
    result = jaxinfer("plan", "demo", "--on", "rtx-4090", "--max-seqs", 4)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("demo fits on rtx-4090")
    assert "no compiler for NVIDIA GeForce RTX 4090" in result.stdout


def test_what_does_not_fit_comes_with_what_does(jaxinfer, json_lines, config_alone):
    (config_alone / "config.json").write_text(json.dumps({**CONFIG, **WIDE}))
    result = jaxinfer("plan", config_alone, "--on", "v5e:1x1", "--no-compile", "--json")
    assert result.exit_code == 0, result.stderr
    [data] = json_lines(result.stdout)
    assert data["fits"] is False
    assert data["changes"][0]["flags"]
    assert data["changes"][0]["fits"] is True


def test_a_picture(jaxinfer, config_alone, tmp_path):
    pytest.importorskip("matplotlib")
    result = jaxinfer("plan", config_alone, "--on", "v6e:1x1", "--no-compile", "--picture", tmp_path / "plan.png")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--on", "v7:2x2"), 1, "no chip is called 'v7'"),
        (("--on", "v5e:2x2", "--mesh", "rows=4"), 1, "'rows' is not one of the axes data, sequence, expert, model"),
        (("--on", "v5e:2x2", "--mesh", "model=2"), 1, "has 2 devices"),
        (("--on", "v5e:1x1", "--batch", "0"), 2, "not a list of positive numbers"),
        (("--on", "v5e:1x1", "--num-draft-tokens", "3"), 2, "needs --draft"),
        (("--on", "v5e:1x1", "--max-loaded-adapters", "3"), 2, "--max-loaded-adapters needs --max-adapters N"),
        (("--on", "v5e:1x1", "--picture", "plan.bmp"), 2, "ends in neither"),
        (("--on", "v5e:1x1", "--max-programs", "9"), 2, "--max-programs 9 needs --trace FILE"),
        (("--on", "v5e:1x1", "--context", "4096"), 1, "more than the 2048 tokens"),
        (("--on", "v5e:1x1", "--quantize", "int9"), 1, "did you mean"),
        (("--on", "v5e:1x1", "--kv-dtype", "int7"), 1, "kv_dtype='int7'"),
        (("--on", "v5e:1x1", "--draft", "layers:2"), 1, "use 1 to one less"),
    ],
)
def test_what_is_refused(jaxinfer, config_alone, options, code, message):
    result = jaxinfer("plan", config_alone, "--no-compile", *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_config_json_alone_that_declares_quantized_weights(jaxinfer, json_lines, config_alone):
    dense = json_lines(jaxinfer("plan", config_alone, "--on", "h200", "--no-compile", "--json").stdout)[0]
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    (config_alone / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    result = jaxinfer("plan", config_alone, "--on", "h200", "--no-compile", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    [data] = json_lines(result.stdout)
    linears = 2 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512)
    assert dense["bytes"]["weights"] - data["bytes"]["weights"] == linears * 2 - linears // 2 - linears // 128 * 2


@pytest.mark.parametrize("place", ["v6e:2x2", "h200x1"])
def test_without_a_compiler_it_says_so_before_it_reads_the_model(jaxinfer, tmp_path, monkeypatch, place):
    monkeypatch.setattr(ahead_of_time.importlib.util, "find_spec", lambda name: None)
    result = jaxinfer("plan", tmp_path / "missing", "--on", place)
    assert (result.exit_code, result.stdout) == (1, "")
    assert install_hint("aot") in result.stderr
    assert "--no-compile" in result.stderr
    assert len(result.stderr.splitlines()) == 1


MESSAGES = """
import os, sys
from jaxinfer.cli.plan import native_messages_hidden
with native_messages_hidden():
    os.write(2, b"cudart_stub.cc: no drivers\\n")
    print("ours", file=sys.stderr)
os.write(2, b"later\\n")
try:
    with native_messages_hidden():
        os.write(2, b"sort_rewriter.cc: the reason\\n")
        raise RuntimeError
except RuntimeError:
    print("the end", file=sys.stderr)
"""


def test_messages_of_native_code_are_kept_for_an_error():
    done = subprocess.run([sys.executable, "-c", MESSAGES], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "ours\nlater\n  sort_rewriter.cc: the reason\nthe end\n"


@pytest.mark.slow
@pytest.mark.parametrize("compiles", ["--no-compile", pytest.param("--compile", marks=pytest.mark.slow)])
def test_compilers_write_nothing_to_the_terminal(compiles):
    """Importing JAX beside a GPU's compiler and without its drivers writes six lines, and compiling more."""
    if (reason := ahead_of_time.missing_compiler("h200")) is not None:
        pytest.skip(reason)
    options = ("demo", "--on", "h200x1", "--max-seqs", "2", "--context", "64", compiles)
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", START, "plan", *options], capture_output=True, text=True, timeout=600, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("demo fits on h200x1")


def test_a_model_that_is_missing(jaxinfer, tmp_path):
    result = jaxinfer("plan", tmp_path, "--on", "v5e:1x1", "--no-compile")
    assert result.exit_code == 1
    assert "not a checkpoint" in result.stderr
