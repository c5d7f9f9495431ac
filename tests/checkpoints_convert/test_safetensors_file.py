import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.safetensors_files import SafetensorsFile, parse_header


def entry(dtype="F32", shape=(2, 2), offsets=(0, 16), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def write(path: Path, header, data: bytes, *, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


GOOD = {"a": entry(), "b": entry("F16", (3,), (16, 22))}
ZEROS = bytes(22)

MALFORMED = {
    "data cut off": (GOOD, ZEROS[:-1], "tensor 'b': ends at byte 22, the file has 21 bytes"),
    "bytes at the end": (GOOD, ZEROS + b"x", "the last 1 bytes belong to no tensor"),
    "hole": ({"a": entry(), "b": entry("F16", (3,), (18, 24))}, bytes(24), r"bytes \[16, 18\) before tensor 'b'"),
    "hole at the start": ({"a": entry(offsets=(4, 20))}, bytes(20), r"bytes \[0, 4\) before tensor 'a'"),
    "overlap": (
        {"a": entry(), "b": entry("F16", (3,), (14, 20))},
        bytes(20),
        "tensor 'b' begins at byte 14, inside 'a' which ends at 16",
    ),
    "same bytes twice": ({"a": entry(), "b": entry()}, bytes(16), "tensor 'b' begins at byte 0, inside 'a'"),
    "size of another shape": ({"a": entry(shape=(2, 3))}, bytes(16), "is 24 bytes, its data_offsets hold 16"),
    "size of another dtype": ({"a": entry("F64")}, bytes(16), "is 32 bytes, its data_offsets hold 16"),
    "shape overflows 64 bits": ({"a": entry(shape=(2**40, 2**40))}, bytes(16), "data_offsets hold 16"),
    "negative size": ({"a": entry(shape=(-2, -2))}, bytes(16), "is not a list of sizes"),
    "fractional size": ({"a": entry(shape=(2.0, 2))}, bytes(16), "is not a list of sizes"),
    "boolean size": ({"a": entry(shape=(True, 4))}, bytes(16), "is not a list of sizes"),
    "negative offset": ({"a": entry(offsets=(-16, 0))}, bytes(16), "is not a pair of byte positions"),
    "three offsets": ({"a": entry(offsets=(0, 8, 16))}, bytes(16), "is not a pair of byte positions"),
    "reversed offsets": ({"a": entry(offsets=(16, 0))}, bytes(16), "begins at byte 16, after its end"),
    "huge offset": ({"a": entry(offsets=(0, 2**64))}, bytes(16), "is not a pair of byte positions"),
    "unknown dtype": ({"a": entry("F31")}, bytes(16), "unknown dtype 'F31': did you mean"),
    "dtype is a number": ({"a": entry(32)}, bytes(16), "unknown dtype 32"),
    "half a byte": ({"a": entry("F4", (3,), (0, 2))}, bytes(2), "is 12 bits, not whole bytes"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 16]}}, bytes(16), "not 'dtype', 'shape' and"),
    "unknown field": ({"a": entry(scale=2)}, bytes(16), "has .*'scale'"),
    "entry is a list": ({"a": [1]}, bytes(16), "has list, not"),
    "metadata of numbers": ({"__metadata__": {"n": 1}, **GOOD}, ZEROS, "__metadata__ must map strings to strings"),
    "metadata is a list": ({"__metadata__": [], **GOOD}, ZEROS, "__metadata__ must map"),
    "duplicate name": (b'{"a":1,"a":2}', b"", "the key 'a' appears twice"),
    "duplicate field": (b'{"a":{"dtype":"F32","dtype":"F16"}}', b"", "the key 'dtype' appears twice"),
    "not an object": (b"[1, 2]", b"", "begins with"),
    "not JSON": (b'{"a": ', b"", "is not JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "is not JSON"),
    "nested too deep": (b'{"a":' + b"[" * 100_000, b"", "is not JSON"),
    "a number of 5,000 digits": (b'{"a":' + b"9" * 5000 + b"}", b"", "is not JSON"),
    "leading space": (b'  {"a": 1}', b"", "the header begins with"),
}


@pytest.mark.parametrize("case", MALFORMED, ids=str)
def test_malformed_file_is_refused_with_the_reason(case, tmp_path):
    header, data, message = MALFORMED[case]
    path = write(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes, too short"),
        (b"\x10\x00\x00", "3 bytes, too short"),
        (struct.pack("<Q", 50) + b"{}", "header of 50 bytes in a file of 10 bytes: truncated?"),
        (struct.pack("<Q", 100_000_001) + b"{}", "header of 100000001 bytes, the limit is 100000000"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "the limit is 100000000"),
        (struct.pack("<Q", 0), "the header begins with b''"),
    ],
)
def test_bad_header_length_is_refused(content, message, tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.safetensors: cannot be opened: No such file"):
        SafetensorsFile(tmp_path / "none.safetensors")


def test_all_bad_tensors_are_listed_at_once(tmp_path):
    header = {name: entry("F31") for name in "abc"}
    with pytest.raises(CheckpointError, match="3 problems") as caught:
        SafetensorsFile(write(tmp_path / "bad.safetensors", header, b""))
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["tensor 'a'", "tensor 'b'", "tensor 'c'"]


def test_reads_what_the_library_writes(tmp_path):
    random = np.random.default_rng(0)
    dtypes = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", ml_dtypes.bfloat16]
    arrays = {f"t{i}": (random.standard_normal((3, 5)) * 9).astype(dtype) for i, dtype in enumerate(dtypes)}
    arrays |= {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 7), np.float16)}
    path = tmp_path / "good.safetensors"
    save_file(arrays, path, metadata={"format": "pt"})
    with SafetensorsFile(path) as file:
        assert file.metadata == {"format": "pt"}
        assert set(file.tensors) == set(arrays)
        for name, array in arrays.items():
            buffer = bytearray(array.nbytes)
            file.read_into(name, 0, memoryview(buffer))
            assert (file.tensors[name].shape, bytes(buffer)) == (array.shape, array.tobytes())


def test_reads_part_of_a_tensor_and_nothing_beyond_it(tmp_path):
    with SafetensorsFile(write(tmp_path / "f.safetensors", GOOD, bytes(range(22)))) as file:
        buffer = bytearray(4)
        file.read_into("a", 12, memoryview(buffer))
        assert bytes(buffer) == bytes(range(12, 16))
        with pytest.raises(IndexError, match=r"bytes \[13, 17\) of tensor 'a', which has 16"):
            file.read_into("a", 13, memoryview(buffer))


def test_file_that_shrinks_while_it_is_open_is_an_error(tmp_path):
    path = write(tmp_path / "f.safetensors", GOOD, ZEROS)
    with SafetensorsFile(path) as file:
        with path.open("r+b") as writer:
            writer.truncate(path.stat().st_size - 4)
        with pytest.raises(CheckpointError, match=r"tensor 'b': the file ends at byte .*, 4 bytes too soon"):
            file.read_into("b", 0, memoryview(bytearray(6)))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["dtype", "shape", "data_offsets"])


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=3), JSON_VALUES | st.dictionaries(FIELDS, JSON_VALUES), max_size=4))
def test_any_json_object_is_parsed_or_refused_as_a_checkpoint_error(header):
    try:
        entries, _ = parse_header(json.dumps(header).encode(), 16, "f")
    except CheckpointError:
        return
    assert sum(entry.end - entry.begin for entry in entries.values()) == 16


@given(st.data())
def test_any_bytes_are_parsed_or_refused_as_a_checkpoint_error(data):
    raw = bytearray(json.dumps(GOOD).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        entries, _ = parse_header(bytes(raw), 22, "f")
    except CheckpointError:
        return
    assert sum(entry.end - entry.begin for entry in entries.values()) == 22
