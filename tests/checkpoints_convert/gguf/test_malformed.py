"""Malformed files: one clear error of our type, in under a second, with memory of at most twice the file's size."""

import gc
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints_convert import CheckpointError, load
from checkpoints_convert.gguf.checkpoint import GGUFCheckpoint
from checkpoints_convert.gguf.file import MAX_NAME_BYTES, MAX_STRINGS, GGUFFile
from tests.checkpoints_convert.gguf.gguf_models import metadata_of, tensors_of
from tests.checkpoints_convert.gguf.gguf_writer import Blocks, header, info, string, write

SIZE = 2**20  # so that "twice the file's size" leaves room for an interpreter's own objects
PADDED = np.zeros(SIZE, np.uint8)
KEYS = {"general.architecture": "llama", "a.number": 7, "a.text": "word"}
_U32, _STRING, _ARRAY = 4, 8, 9


def with_data(front: bytes) -> bytes:
    return front + bytes(-len(front) % 32) + PADDED.tobytes()


def one_tensor(name: str | bytes = "x", shape: tuple[int, ...] = (4, 64), number: int = 0, offset: int = 0) -> bytes:
    return with_data(header(KEYS, [info(name, shape, number, offset)]))


def keyed(raw: bytes, count: int = 1) -> bytes:
    """A file whose keys are these bytes."""
    return with_data(struct.pack("<4sIQQ", b"GGUF", 3, 0, count) + raw)


def key(name: str | bytes, number: int, raw: bytes) -> bytes:
    return string(name) + struct.pack("<I", number) + raw


def array(number: int, count: int, raw: bytes = b"") -> bytes:
    return struct.pack("<IQ", number, count) + raw


HUGE = 2**62
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not with b'GGUF'"),
    "three bytes": (b"GGU", "not with b'GGUF'"),
    "another format": (b"\x80\x02}q\x00" + PADDED.tobytes(), "not with b'GGUF'"),
    "only the magic": (b"GGUF", "the version takes 4 bytes from byte 4 on, 0 are left: truncated"),
    "version 1": (with_data(header(KEYS, [], version=1)), "GGUF version 1: this version reads 2 and 3"),
    "big-endian": (with_data(header(KEYS, [], version=0x03000000)), "GGUF version 50331648: a big-endian file"),
    "version of the future": (with_data(header(KEYS, [], version=9)), "GGUF version 9: this version reads"),
    "no counts": (b"GGUF\x03\0\0\0\0\0", "the number of tensors takes 8 bytes"),
    "tensors beyond the limit": (with_data(struct.pack("<4sIQQ", b"GGUF", 3, HUGE, 0)), f"{HUGE} tensors, the limit"),
    "keys beyond the limit": (with_data(struct.pack("<4sIQQ", b"GGUF", 3, 0, HUGE)), f"{HUGE} keys, the limit"),
    "more tensors than bytes": (
        with_data(struct.pack("<4sIQQ", b"GGUF", 3, 60000, 0))[:SIZE],
        "60000 tensors take at least 1920000 bytes",
    ),
    "a key longer than the file": (keyed(struct.pack("<Q", HUGE)), f"key 0 has a name of {HUGE} bytes, not 1 to"),
    "a key without a name": (keyed(key("", _U32, b"\0\0\0\0")), "key 0 has a name of 0 bytes"),
    "a key too long": (keyed(key("k" * (MAX_NAME_BYTES + 1), _U32, b"\0\0\0\0")), "a name of 1025 bytes"),
    "a key that is not UTF-8": (keyed(key(b"\xff\xfe", _U32, b"\0\0\0\0")), "key 0 is not UTF-8"),
    "the same key twice": (keyed(key("a", _U32, bytes(4)) * 2, 2), "key 'a' appears twice"),
    "a value of no type": (keyed(key("a", 13, bytes(8))), "key 'a' has the value type 13, which does not exist"),
    "a boolean of 2": (keyed(key("a", 7, b"\x02")), "key 'a' is a boolean of value 2"),
    "a string longer than the file": (
        keyed(key("a", _STRING, struct.pack("<Q", HUGE))),
        f"key 'a' takes {HUGE} bytes from byte 45 on",
    ),
    "an array longer than the file": (keyed(key("a", _ARRAY, array(_U32, HUGE))), f"key 'a' takes {4 * HUGE} bytes"),
    "an array of no type": (keyed(key("a", _ARRAY, array(13, 1))), "key 'a' is an array of type 13"),
    "an array of arrays": (keyed(key("a", _ARRAY, array(_ARRAY, 1))), "key 'a' is an array of arrays"),
    "more strings than the limit": (keyed(key("a", _ARRAY, array(_STRING, HUGE))), f"key 'a' has {HUGE} strings"),
    "more strings than bytes": (keyed(key("a", _ARRAY, array(_STRING, 2**20))), "key 'a' takes 8388608 bytes"),
    "a string of an array beyond the end": (
        keyed(key("a", _ARRAY, array(_STRING, 2, string("x") + struct.pack("<Q", HUGE)))),
        f"string 1 of key 'a' takes {HUGE} bytes",
    ),
    "alignment 0": (with_data(header({"general.alignment": 0}, [])), "alignment is 0, not a power of two"),
    "alignment 48": (with_data(header({"general.alignment": 48}, [])), "alignment is 48, not a power of two"),
    "alignment a string": (with_data(header({"general.alignment": "32"}, [])), "a string of 2 bytes, not a power"),
    "no dimensions": (one_tensor(shape=()), "tensor 'x' has 0 dimensions, not 1 to 4"),
    "five dimensions": (one_tensor(shape=(1, 1, 1, 1, 64)), "tensor 'x' has 5 dimensions"),
    "a dimension of 0": (one_tensor(shape=(0, 64)), r"tensor 'x' has the shape \[0, 64\]"),
    "dimensions whose product overflows": (one_tensor(shape=(2**40, 2**40)), "tensor 'x' has the shape"),
    "a tensor beyond the end": (one_tensor(shape=(2**20, 64)), r"ends at byte 268435\d+, the file has \d+ bytes"),
    "an offset beyond the end": (one_tensor(offset=2**40), "tensor 'x' ends at byte 1099511"),
    "an offset off the alignment": (one_tensor(offset=8), "offset 8, not a multiple of the alignment 32"),
    "an unknown type": (one_tensor(number=77), "tensor 'x' has the type 77, which ggml does not have"),
    "a type that is not read": (one_tensor(number=15), "tensor 'x' is stored as Q8_K, which is not read; read are F32"),
    "an integer type": (one_tensor(number=26), "tensor 'x' is stored as I32"),
    "a row of half a block": (one_tensor(shape=(4, 48), number=8), "rows of 48 values, not a multiple of Q8_0's 32"),
    "the same tensor twice": (
        with_data(header(KEYS, [info("x", (64,), 0, 0), info("x", (64,), 0, 256)])),
        "tensor 'x' appears twice",
    ),
    "tensors that overlap": (
        with_data(header(KEYS, [info("x", (64,), 0, 0), info("y", (64,), 0, 224)])),
        r"tensor 'y' begins at byte \d+, inside 'x'",
    ),
    "a tensor without a name": (one_tensor(name=""), "tensor 0 has a name of 0 bytes"),
    "a table cut off": (header(KEYS, [info("x", (64,), 0, 0)])[:-6], "truncated"),
}


class Stopwatch:
    """Processor seconds of this thread while it is entered. Nothing else of the process counts: neither the garbage of
    a thousand other tests, nor what their threads still do."""

    def __enter__(self) -> "Stopwatch":
        gc.disable()
        self._start = time.thread_time()
        return self

    def __exit__(self, *exception: object) -> None:
        self.seconds = time.thread_time() - self._start
        gc.enable()


def measured(action: Callable[[], object]) -> tuple[BaseException | None, float, int]:
    """The error that it raised, the processor seconds it took, and the most bytes it held, in another run of it."""
    with Stopwatch() as watch:
        error = raised_by(action)
    tracemalloc.start()
    again = raised_by(action)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert type(error) is type(again)
    return error, watch.seconds, peak


def raised_by(action: Callable[[], object]) -> BaseException | None:
    try:
        action()
    except Exception as error:
        return error
    return None


@pytest.mark.matrix
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files(tmp_path, name):
    raw, message = MALFORMED[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 3000
    error, seconds, peak = measured(lambda: load(path))
    assert isinstance(error, CheckpointError)
    assert seconds < 1
    assert peak <= max(2 * len(raw), 2**18)


def test_there_are_30_kinds():
    assert len(MALFORMED) >= 30


def test_what_is_no_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone\.gguf"):
        GGUFFile(tmp_path / "gone.gguf")
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    with pytest.raises(CheckpointError, match="is not a regular file"):
        GGUFFile(folder)


def test_a_file_that_shrinks_while_it_is_open(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(one_tensor())
    with GGUFFile(path) as file:
        path.write_bytes(one_tensor()[:200])
        with pytest.raises(CheckpointError, match="bytes too soon"):
            file.read_into("x", 0, memoryview(bytearray(1024)))


def test_every_cut_of_a_header_is_refused(tmp_path):
    whole = header({**KEYS, "list": ["a", "bb"], "numbers": [1, 2]}, [info("x", (64,), 0, 0)])
    path = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            GGUFFile(path)


def test_a_million_strings_are_walked_in_time(tmp_path):
    """The most that one array may have; nothing of them is kept."""
    path = tmp_path / "many.gguf"
    path.write_bytes(keyed(key("a", _ARRAY, array(_STRING, MAX_STRINGS, bytes(8 * MAX_STRINGS)))))
    with Stopwatch() as watch:
        GGUFFile(path).close()
    assert watch.seconds < 1


def test_many_tensors_are_refused_in_time(tmp_path):
    infos = [info(f"blk.{i}.x", (8,), 0, 32 * i) for i in range(20000)]
    path = tmp_path / "many.gguf"
    path.write_bytes(header({"general.architecture": "llama"}, infos) + bytes(32 * 20001))
    with Stopwatch() as watch, pytest.raises(CheckpointError, match=r"there is no tensor 'token_embd\.weight'"):
        load(path)
    assert watch.seconds < 1


@pytest.fixture(scope="module")
def whole(make_checkpoint, tmp_path_factory) -> tuple[Path, bytes, int]:
    """A small whole file with a tokenizer, and where its data begin."""
    source = make_checkpoint(tmp_path_factory.mktemp("fuzz"), "LlamaForCausalLM")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(64)), *"abcdefghijklm"]
    scores = -np.arange(len(tokens), dtype=np.float32)
    kinds = np.array([2, 3, 3, *[6] * 64, *[1] * 13], np.int32)
    metadata = {
        **metadata_of(source.config),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }
    tensors = tensors_of(source.config, source.tensors)
    path = write(source.directory / "whole.gguf", metadata, tensors)
    with GGUFFile(path) as file:
        begin = min(entry.begin for entry in file.tensors.values())
    return path, path.read_bytes(), begin


def open_all(path: Path) -> None:
    """Everything that opening a model does with a file, but for the device."""
    with GGUFCheckpoint(path, dtype="float32") as source:
        for unit in source.units():
            for _ in source.read(unit):
                pass
        assert source.eos_token_ids is not None
        source.tokenizer_files()


def test_the_whole_file_opens(whole):
    open_all(whole[0])


INTERESTING = (0, 1, 2, 7, 8, 9, 31, 32, 127, 128, 255)


@st.composite
def damage(draw: st.DrawFn, length: int, begin: int) -> list[tuple[int, bytes]]:
    """Bytes to put at places, most of them in the header."""
    places = st.integers(0, begin - 1) | st.integers(0, length - 1)
    single = st.sampled_from(INTERESTING).map(lambda byte: bytes([byte]))
    wide = st.sampled_from((0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)).map(lambda n: struct.pack("<Q", n))
    return draw(st.lists(st.tuples(places, single | wide | st.binary(min_size=1, max_size=12)), min_size=1, max_size=4))


def fuzz(whole: tuple[Path, bytes, int], data: st.DataObject) -> None:
    path, raw, begin = whole
    damaged = bytearray(raw)
    for place, new in data.draw(damage(len(raw), begin)):
        damaged[place : place + len(new)] = new
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    target = path.with_name("damaged.gguf")
    target.write_bytes(damaged)
    error, seconds, peak = measured(lambda: open_all(target))
    assert error is None or isinstance(error, CheckpointError), repr(error)
    assert seconds < 1
    # A file of some kilobytes: beside its size there is room for the interpreter's and the model's own objects.
    assert peak <= 2 * len(raw) + 2**20


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_fuzz(whole, data):
    fuzz(whole, data)


@pytest.mark.slow
def test_fuzz_for_a_minute(whole):
    """Damages files for a minute, with other damage each time."""
    end = time.monotonic() + 60
    rounds = 0

    @given(st.data())
    @settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
    def some(data: st.DataObject) -> None:
        fuzz(whole, data)

    while time.monotonic() < end:
        some()
        rounds += 1
    assert rounds


def refused_in_time(path: Path, message: str) -> None:
    load_error, seconds, peak = measured(lambda: load(path))
    assert isinstance(load_error, CheckpointError)
    assert message in str(load_error)
    assert seconds < 1
    assert peak <= 2 * path.stat().st_size + 2**20


@pytest.mark.parametrize("num_layers", [100, 400])
def test_layers_that_only_the_metadata_have(make_checkpoint, tmp_path, num_layers):
    """Padding tensors make room for the count; the names of layers do not."""
    source = make_checkpoint(tmp_path, "LlamaForCausalLM")
    tensors = tensors_of(source.config, source.tensors)
    tensors |= {f"padding.{number}": np.zeros(32, np.float32) for number in range(num_layers)}
    metadata = {**metadata_of(source.config), "llama.block_count": num_layers}
    path = write(tmp_path / "layers.gguf", metadata, tensors)
    refused_in_time(path, f"llama.block_count is {num_layers}, but layer 2 has 0 of the file's")


@pytest.mark.parametrize("has_router", [True, False])
def test_experts_that_only_the_metadata_have(make_checkpoint, tmp_path, has_router):
    source = make_checkpoint(tmp_path, "LlamaForCausalLM")
    tensors = tensors_of(source.config, source.tensors)
    tensors["wide.weight"] = Blocks("Q4_0", np.zeros((1, 2**18 // 32 * 18), np.uint8))
    if has_router:
        tensors["blk.0.ffn_gate_inp.weight"] = np.zeros((4, 32), np.float32)
    more = {"llama.expert_count": 2**18, "llama.expert_used_count": 2}
    path = write(tmp_path / "experts.gguf", {**metadata_of(source.config), **more}, tensors)
    found = "expert_count is 262144, the router 'blk.0.ffn_gate_inp.weight' has the shape [4, 32]"
    refused_in_time(path, found if has_router else "tensor 'blk.0.ffn_gate_inp.weight' [262144, 32] is missing")
