"""config.json from anywhere: every value of every field is used, or refused by a short sentence with file and field."""

import copy
import json
import math
import os
import shutil
import socket
import time
import tracemalloc

import pytest

from checkpoints_convert import CheckpointError, abstract, convert, load, model_config, open_checkpoint, plan
from checkpoints_convert.files import parse_json
from tests.checkpoints_convert.family_files import GOLDEN, read

NESTED: list = []
for _ in range(50):
    NESTED = [NESTED]
HOSTILE = {
    "10**400": 10**400,
    "-10**400": -(10**400),
    "10**9": 10**9,
    "1e308": 1e308,
    "infinite": math.inf,
    "nan": math.nan,
    "0": 0,
    "text": "x" * 100_000,
    "nested": NESTED,
    "numbers": [10**400],
    "object": {"x": {}},
    "null": None,
}
SECONDS = 2.0


@pytest.fixture
def tiny(checkpoint):
    source = checkpoint(rope_scaling={"rope_type": "linear", "factor": 2.0})
    source.write()
    return source


def rewrite(source, **changes):
    (source.directory / "config.json").write_text(json.dumps({**source.config, **changes}))
    return source.directory


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", 10**400, "vocab_size must be an integer from 1 to 2147483647, got 1000"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000, the 21 tensors name 2 layers"),
        ("head_dim", 10**400, "head_dim must be an integer from 1 to 2147483647, got 1000"),
        ("max_position_embeddings", 2**63, "max_position_embeddings must be an integer from 1 to 2147483647"),
        ("rms_norm_eps", 1e9, r"rms_norm_eps must be a positive number of at most 1, got 1000000000"),
        ("rms_norm_eps", 10**400, "rms_norm_eps must be a positive number of at most 1, got 1000"),
        ("rope_theta", 1e308, r"rope_theta must be a positive number of at most 1e\+15, got 1e\+308"),
        ("rope_scaling", {"rope_type": "linear", "factor": 10**400}, r"rope_scaling\.factor must be a positive number"),
        ("rope_scaling", NESTED, r"rope_scaling must be an object or null, got \[\[\["),
        ("architectures", NESTED, r"architectures must be a list of names, got \[\[\["),
        ("vocab_size", NESTED, r"vocab_size must be an integer of at least 1, got \[\[\["),
        ("hidden_act", "x" * 10**6, r"hidden_act 'xxx.*\.\.\. \(\d+ characters\)"),
    ],
)
def test_hostile_values_are_refused_with_file_and_field(tiny, field, value, message):
    directory = rewrite(tiny, **{field: value})
    for read_it in (open_checkpoint, abstract):
        with pytest.raises(CheckpointError, match=rf"source/config\.json: {message}") as caught:
            read_it(directory)
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("field", ["eos_token_id", "bos_token_id"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("value", "message"), [(80, "80 is not below the vocab_size of 80"), ([1, 10**400], "1000")])
def test_token_ids_outside_of_the_vocabulary_are_refused(tiny, field, name, value, message):
    path = tiny.directory / name
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**data, field: value}))
    with (
        open_checkpoint(tiny.directory) as opened,
        pytest.raises(CheckpointError, match=rf"{name}: {field} .*{message}"),
    ):
        _ = opened.eos_token_ids, opened.bos_token_id


def check_value(config, headers, field, label, value):
    """Raises AssertionError unless a configuration is used, or refused in time with its file and a short message."""
    start = time.process_time()
    try:
        plan(config, headers)
    except CheckpointError as error:
        problem = error
    else:
        problem = None
    seconds = time.process_time() - start
    assert seconds < SECONDS, f"{field}={label}: {seconds:.1f} s"
    if problem is not None:
        assert len(str(problem)) < 35_000, f"{field}={label}: {len(str(problem))} characters"
        assert "values that do not fit" not in str(problem), f"{field}={label}: {problem}"  # it names no field
        assert "config.json" in str(problem) or "tensor" in str(problem), f"{field}={label}: {problem}"


def check_all(files, fields):
    headers = {name: ("F32", tensor.shape) for name, tensor in files.tensors.items()}
    plan(files.config, headers)
    for field in fields:
        for label, value in HOSTILE.items():
            check_value({**files.config, field: value}, headers, field, label, value)
        if isinstance(files.config.get(field), dict):
            for inner in files.config[field]:
                for label, value in HOSTILE.items():
                    changed = copy.deepcopy(files.config)
                    changed[field][inner] = value
                    check_value(changed, headers, f"{field}.{inner}", label, value)


def test_a_hostile_size_makes_no_list_of_that_size():
    files = read("phi3_longrope")
    headers = {name: ("F32", tensor.shape) for name, tensor in files.tensors.items()}
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="must be a list of 93750000 positive numbers, got 6 of them"):
            plan({**files.config, "hidden_size": 10**9}, headers)
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


def one_of_each_family():
    return list({read(path.stem).config["architectures"][0]: path.stem for path in GOLDEN}.values())


def test_hostile_values_of_some_fields():
    check_all(read("llama_bias"), ["rope_parameters", "architectures", "head_dim"])


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("name", one_of_each_family())
def test_hostile_values_of_every_field_of_every_family(name):
    files = read(name)
    check_all(files, list(files.config))


def test_a_configuration_alone_has_a_limit_of_layers(tiny):
    (tiny.directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: num_hidden_layers must be an integer from 1 to 1000"):
        abstract(rewrite(tiny, num_hidden_layers=10**6))


def write_header(directory, header):
    raw = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (11_000, "11000 tensors, the model that config.json describes has 21"),
        pytest.param(99_999, "99999 tensors, the model that config.json", marks=pytest.mark.slow),
        pytest.param(200_000, "200000 tensors, the limit of a file is 100000", marks=pytest.mark.slow),
    ],
)
def test_many_empty_tensors_are_refused_at_once(tiny, count, message):
    write_header(tiny.directory, {f"model.layers.{i}.self_attn.q_proj.weight": EMPTY for i in range(count)})
    check_time(lambda: open_checkpoint(tiny.directory), message)


@pytest.mark.parametrize("count", [20_000, pytest.param(500_000, marks=pytest.mark.slow)])
def test_a_repeated_key_among_many_is_found_at_once(count):
    raw = ",".join(f'"key{i}":1' for i in (*range(count), count - 1))
    check_time(lambda: parse_json(f"{{{raw}}}".encode(), "file", unique_keys=True), f"the key 'key{count - 1}' appears")


@pytest.mark.parametrize("count", [10_000, pytest.param(10**6, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("rope_scaling", lambda keys: {"rope_type": "linear", "factor": 2.0, **keys}, "key1 is not a setting"),
        ("layer_types", list, "layer_types "),
        ("architectures", dict, "architectures must be a list"),
        ("vocab_size", dict, "vocab_size must be an integer"),
    ],
)
def test_a_million_keys_are_refused_at_once(tiny, count, name, make, message):
    directory = rewrite(tiny, **{name: make({f"key{i}": i for i in range(count)})})
    check_time(lambda: open_checkpoint(directory), message)


@pytest.mark.parametrize("count", [20_000, pytest.param(10**6, marks=pytest.mark.slow)])
def test_an_index_of_a_million_names_is_refused_at_once(tiny, count):
    index = {"weight_map": {f"key{i}": f"model-{i}.safetensors" for i in range(count)}}
    (tiny.directory / "model.safetensors.index.json").write_text(json.dumps(index))
    check_time(lambda: open_checkpoint(tiny.directory), r"index\.json: weight_map (has|names) \d+ (tensors|files), the")


def check_time(call, message):
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message) as caught:
        call()
    assert time.process_time() - start < SECONDS
    assert len(str(caught.value)) < 35_000


KINDS = ("pipe", "directory", "socket", "device")


def put(path, kind, monkeypatch):
    """Replaces a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        monkeypatch.chdir(path.parent)  # the path of a socket is limited to 107 bytes
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_what_is_no_file_is_refused(tiny, name, kind, monkeypatch):
    put(tiny.directory / name, kind, monkeypatch)

    def read_all():
        with open_checkpoint(tiny.directory) as opened:
            _ = opened.eos_token_ids, opened.generation_config

    with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + "|no model.safetensors"):
        read_all()


@pytest.fixture(scope="module")
def converted(tmp_path_factory, make_checkpoint):
    root = tmp_path_factory.mktemp("hostile")
    convert(make_checkpoint(root / "source").write(), root / "native", progress=None)
    return root / "native"


@pytest.mark.matrix
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["manifest.json", "jaxinfer_config.json", "config.json", "params"])
def test_what_is_no_file_of_a_converted_checkpoint_is_refused(converted, name, tmp_path, monkeypatch):
    for kind in KINDS:
        path = shutil.copytree(converted, tmp_path / kind) / name
        if name == "params":
            path = next(file for file in path.rglob("d/*") if file.is_file())
        put(path, kind, monkeypatch)
        for verify in (None, True, False):
            with pytest.raises(CheckpointError, match=path.name):
                load(tmp_path / kind, verify=verify)


def test_a_pipe_as_a_gguf_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        open_checkpoint(tmp_path)


def test_model_config_names_the_file():
    with pytest.raises(CheckpointError, match=r"^config\.json: architectures is missing"):
        model_config({})
