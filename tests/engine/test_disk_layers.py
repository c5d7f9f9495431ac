"""Layers that stay in a checkpoint's files change no token, and take the memory of a few layers, not of the model."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert.huggingface.save import save_huggingface
from jaxinfer import LLM, SamplingParams
from jaxinfer.api.options import parse_offload
from jaxinfer.engine.offload import layers_for_host
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.loading import load_shapes
from jaxinfer.models import MoEConfig, abstract_params, host_layers, init_params
from jaxinfer.models.disk_layers import DISK_LAYERS, DiskLayers, LayerReader
from jaxinfer.quantization.tree import num_bytes, weights
from tests.checkpoints_convert.gguf.gguf_models import write_random_llama
from tests.pallas_kernels.quick import quick
from tests.tiny import OPTIONS, TINY

ROOT = Path(__file__).parents[2]
# The third is longer than a chunk; together they are a batch.
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [number % 97 for number in range(45)]]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0),
    SamplingParams(max_tokens=10, temperature=0.8, seed=3),
    SamplingParams(max_tokens=8, temperature=0, repetition_penalty=1.3),
]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    """GGUF files of random weights, by the type of their blocks."""
    folder = tmp_path_factory.mktemp("disk")
    return lambda kind: write_random_llama(folder / f"{kind}.gguf", kind)


def answers(path, **options):
    with LLM(path, **OPTIONS, **options) as llm:
        found = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        return found, llm.fingerprint(), llm.engine.spec, str(llm.explain())


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", quick(["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"], "Q4_K"))
def test_the_tokens_are_those_of_loaded_weights(path_of, kind):
    path = path_of(kind)
    expected, fingerprint, _, _ = answers(path)
    found, same, spec, text = answers(path, offload="disk")
    assert all(len(set(one)) > 4 for one in expected)  # the check could fail: answers vary
    assert (found, same) == (expected, fingerprint)
    disk = spec.params[DISK_LAYERS]
    moved = [host_layers.split(layer)[1] for layer in load_shapes(path, dtype="float32")[1]["layers"].values()]
    assert disk.num_bytes == num_bytes(moved) == num_bytes(host_layers.all_layers(spec.params)) - num_bytes(spec.params)
    assert spec.parts["arriving layers"] == disk.buffer_bytes > 2 * num_bytes(moved[0])
    assert max(leaf.ndim for leaf in jax.tree.leaves(spec.params["layers"])) == 1
    assert "layers on the disk        4 of 4" in text
    assert f"bytes arriving in a step  {disk.num_bytes:,}" in text


OTHERS = [("draft", "ngram"), ("draft", "layers:2"), ("host_cache_gib", 0.01)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), quick(OTHERS, ("draft", "layers:2")))
def test_other_options_change_no_token(path_of, name, value):
    path = path_of("Q4_K")
    assert answers(path, offload="disk", **{name: value})[0] == answers(path)[0]


@pytest.mark.slow
def test_a_folder_of_safetensors_stays_on_the_disk_too():
    found = []
    for offload in (0, "disk"):
        with LLM("demo", max_seqs=2, max_model_len=64, offload=offload) as llm:
            tokens = llm.generate("Once", SamplingParams(max_tokens=6, seed=1))[0].outputs[0].token_ids
            taps = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), taps=["layers.3.mlp"])[0].taps
            found.append((tokens, llm.fingerprint(), taps["layers.3.mlp"]))
    assert found[0][:2] == found[1][:2]
    # Weights that stay in memory are packed, and multiplied by another kernel.
    np.testing.assert_allclose(found[0][2], found[1][2], rtol=1e-5, atol=5e-5)


@pytest.mark.slow
def test_of_a_mixture_only_experts_stay_on_the_disk(tmp_path):
    moe = MoEConfig(num_experts=4, num_experts_per_token=2, expert_size=24, layers=(0, 1))
    config = replace(TINY, architecture="Qwen3MoeForCausalLM", qk_norm=True, moe=moe)
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, init_params(config, jax.random.key(2)))
    save_huggingface(config, params, tmp_path / "mixture")
    found, _, spec, _ = answers(tmp_path / "mixture", offload="disk")
    assert found == answers(tmp_path / "mixture")[0]
    kept = weights(spec.params["layers"])  # packed ones, whose arrays have three axes, as one
    assert max(leaf.ndim for leaf in kept) == 2
    assert spec.params[DISK_LAYERS].num_bytes == 2 * 4 * 3 * 32 * 24 * 4


@pytest.mark.slow
def test_a_file_that_was_cut_ends_the_step_with_its_name(path_of, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(path_of("Q4_K").read_bytes())
    with LLM(path, **OPTIONS, offload="disk") as llm:
        expected = llm.generate(PROMPTS[:1], PARAMS[0], use_tqdm=False)
        assert expected[0].outputs[0].finish_reason == "length"
        whole = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(len(whole) // 2)
        with pytest.raises(Exception, match=r"cut\.gguf"):
            llm.generate(PROMPTS[1:2], PARAMS[1], use_tqdm=False)


def test_the_files_are_closed_with_the_model(path_of):
    path = path_of("Q4_K")

    def num_open() -> int:
        return sum(os.path.realpath(one) == str(path) for one in Path("/proc/self/fd").iterdir())

    with LLM(path, **OPTIONS, offload="disk"):
        assert num_open() == 1
    assert num_open() == 0
    assert not any(thread.name.startswith("disk-layers") for thread in threading.enumerate())


# Refusals.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "model=2"}, r"offload='disk' is for one device, and mesh='model=2'"),
        ({"quantize": "int8"}, "offload='disk' reads weights in each step: it excludes quantize='int8'"),
        ({"requantize": "int8"}, "it excludes requantize='int8'"),
        ({"prefix_store": "/tmp/x", "host_cache_gib": 1.0}, "it excludes prefix_store='/tmp/x'"),
    ],
)
def test_what_cannot_be_combined_is_refused(path_of, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(path_of("Q4_K"), offload="disk", **options)


def test_live_parameters_plans_and_other_devices_are_refused(monkeypatch, path_of):
    params = init_params(TINY, jax.random.key(0))
    with pytest.raises(ValueError, match="offload='disk' is for the files of a checkpoint, not for live parameters"):
        LLM((TINY, params), offload="disk")
    spec = EngineSpec(TINY, abstract_params(TINY, jnp.float32), EngineOptions(), "cpu")
    with pytest.raises(ValueError, match='offload="disk" reads layers from files on a CPU'):
        layers_for_host(spec, "disk", 10**9)
    path = path_of("Q4_K")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="offload='disk' is for a CPU, not for gpu"):
        LLM(path, offload="disk")
    assert parse_offload("disk") == "disk"


# Reading.


def reader_of(num_layers: int = 3) -> tuple[LayerReader, list[int]]:
    """A reader whose layer n is full of n, and the layers that it has read, in order."""
    shape, done = jax.ShapeDtypeStruct((2, 3), jnp.float32), []

    def read(path):
        if path[-2] == "b":
            done.append(int(path[1]))
        return np.full((2, 3), int(path[1]), np.float32)

    shapes = {layer: {"a": {"weight": shape}, "b": {"weight": shape}} for layer in range(num_layers)}
    return LayerReader(shapes, read, lambda: done.append(-1)), done


def test_the_next_layer_is_read_ahead_whatever_the_order():
    reader, done = reader_of()
    orders = [0, 1, 2, 0, 1, 2, 0, 0, 2, 2, 1]
    for layer in orders:
        arrays = reader.read(layer)
        assert [one.tolist() for one in arrays] == [[[layer] * 3] * 2] * 2
    reader._ahead[1].result()
    # The first six were each read once, ahead of their use but for the first.
    assert done[:6] == [0, 1, 2, 0, 1, 2]
    reader.close()
    assert done[-1] == -1
    assert reader.takes(("layers", "2", "a", "weight"))
    assert not reader.takes(("layers", "3", "a", "weight"))


def test_an_error_of_reading_ahead_is_that_of_its_layer():
    reader, _ = reader_of()
    right, failing = reader._read, True

    def read(path):
        if failing and path[1] == "1":
            raise OSError("layer 1 cannot be read")
        return right(path)

    reader._read = read
    reader.read(0)
    with pytest.raises(OSError, match="layer 1"):
        reader.read(1)
    failing = False
    assert reader.read(1)[0][0, 0] == 1
    reader.close()


def test_some_layers_of_a_model_keep_their_numbers_in_the_file():
    reader, _ = reader_of()
    disk = DiskLayers.of(reader)
    taken = disk.take([2, 0])
    assert taken == DiskLayers.of(reader).take([2, 0]) != disk  # equal ones share their programs
    found = jax.jit(lambda x: [taken.arriving(layer, x)["a"]["weight"] for layer in (0, 1)])(jnp.uint32(7))
    assert [one[0, 0] for one in found] == [2, 0]
    reader.close()


def test_a_layer_is_not_read_before_the_hidden_states_that_it_runs_on(path_of):
    """Otherwise all layers could be in memory at once."""
    reader, _ = reader_of()
    params = {"layers": {str(layer): {} for layer in range(3)}, DISK_LAYERS: DiskLayers.of(reader)}

    def read(first, second):
        layers = host_layers.HostLayers(params)
        return layers.take(0, first), layers.take(1, second)

    x = jax.ShapeDtypeStruct((1, 4), jnp.float32)
    traced = jax.make_jaxpr(read)(x, x).jaxpr
    users = {id(variable): number for number, one in enumerate(traced.eqns) for variable in one.invars}
    assert all(id(x) in users for x in traced.invars)
    reader.close()


# Memory.

LIMITED = """
import json, resource, sys, threading, time
import jax
from jaxinfer import LLM, SamplingParams
from jaxinfer.quantization import on_device
path, offload, allowed = sys.argv[1], sys.argv[2], int(sys.argv[3])
on_device.float32_copies.__defaults__ = (0,)
if allowed:
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
peak, done = 0, False
def watch():
    global peak
    while not done:
        status = open("/proc/self/status").read()
        peak = max(peak, int(status.partition("RssAnon:")[2].split()[0]) * 1024)
        time.sleep(0.01)
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
options = {"max_seqs": 1, "max_model_len": 64, "prefill_chunk": 16, "num_pages": 8, "grammar_memory": 1}
with LLM(path, offload=offload if offload == "disk" else 0, **options) as llm:
    sampling = SamplingParams(max_tokens=3, temperature=0)
    first, second = time.monotonic(), 0.0
    tokens = llm.generate([[1, 2, 3, 4, 5]], sampling, use_tqdm=False)[0].outputs[0].token_ids
    second = time.monotonic()
    llm.generate([[1, 2, 3, 4, 5]], sampling, use_tqdm=False)
    seconds = (time.monotonic() - second) / 3
done = True
watcher.join()
print(json.dumps({"tokens": tokens, "peak": peak, "seconds": seconds}))
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_file_of_three_times_the_memory_that_a_process_may_have(tmp_path):
    """Under a limit of the kernel, all threads' stacks and the programs included, and with the limit's inverse: weights
    that are loaded do not fit."""
    path = write_random_llama(tmp_path / "large.gguf", "F32", num_layers=32, width=1536, inner=6144, num_alike=16)
    size = path.stat().st_size
    allowed = size // 3

    def run(offload: str, limit: int) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", LIMITED, str(path), offload, str(limit)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    limited = run("disk", allowed)
    assert limited.returncode == 0, limited.stderr[-2000:]
    found = json.loads(limited.stdout.splitlines()[-1])
    assert run("0", allowed).returncode != 0
    expected = json.loads(run("0", 0).stdout.splitlines()[-1])
    print(
        f"a file of {size:,} bytes, {allowed:,} allowed: {found['peak']:,} anonymous at most, "
        f"{found['seconds']:.1f} s a token; loaded {expected['peak']:,} and {expected['seconds']:.1f} s"
    )
    assert found["tokens"] == expected["tokens"]
    assert found["peak"] < allowed
