"""llama.cpp's importance matrices: both forms give the same numbers, and malformed files are named."""

import struct
from pathlib import Path

import numpy as np
import pytest

from checkpoints_convert import CheckpointError, load
from checkpoints_convert.gguf.imatrix import by_parameter, read_imatrix
from tests.checkpoints_convert.gguf.gguf_writer import write

NAMES = ("blk.0.attn_q.weight", "blk.0.ffn_gate_exps.weight")
TOKENS = {NAMES[0]: [512], NAMES[1]: [100, 0, 412]}
RANDOM = np.random.default_rng(0)
SUMS = {name: (RANDOM.random((len(counts), 8)) * 50).astype(np.float32) for name, counts in TOKENS.items()}


def as_gguf(path: Path, *, kind="imatrix", without=(), **changes) -> Path:
    tensors = {f"{name}.in_sum2": array for name, array in SUMS.items()}
    tensors |= {f"{name}.counts": np.array(counts, np.float32)[:, None] for name, counts in TOKENS.items()}
    tensors = {name: array for name, array in (tensors | changes).items() if name not in without}
    metadata = {"general.type": kind, "imatrix.datasets": ["text.txt"], "imatrix.chunk_count": 1}
    return write(path, metadata | {"imatrix.chunk_size": 512}, tensors)


def entry(name: str, calls: int, values: np.ndarray) -> bytes:
    raw = name.encode()
    front = struct.pack("<i", len(raw)) + raw
    return front + struct.pack("<ii", calls, values.size) + values.astype("<f4").tobytes()


def as_binary(path: Path, calls: int = 3, *, number: int | None = None, raw: bytes | None = None) -> Path:
    """As of 2024, the sums of the means of every call; llama.cpp appends the calls and the name of the text."""
    entries = [entry(NAMES[0], calls, SUMS[NAMES[0]] * calls)]
    tail = struct.pack("<ii", calls, 8) + b"text.txt"
    path.write_bytes(struct.pack("<i", number or len(entries)) + b"".join(entries) + tail if raw is None else raw)
    return path


def test_gguf_form(tmp_path):
    found = read_imatrix(as_gguf(tmp_path / "m.gguf"))
    assert set(found) == set(NAMES)
    np.testing.assert_array_equal(found[NAMES[0]], SUMS[NAMES[0]] / np.float32(512))
    np.testing.assert_array_equal(found[NAMES[1]][2], SUMS[NAMES[1]][2] / np.float32(412))
    np.testing.assert_array_equal(found[NAMES[1]][1], np.ones(8))  # an expert without tokens


def test_binary_form(tmp_path):
    found = read_imatrix(as_binary(tmp_path / "imatrix.dat"))
    assert list(found) == [NAMES[0]]
    np.testing.assert_allclose(found[NAMES[0]], SUMS[NAMES[0]], rtol=1e-6)
    assert found[NAMES[0]].shape == (1, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "model"}, "general.type is 'model', not 'imatrix'"),
        ({"without": (f"{NAMES[0]}.counts",)}, r"tensor 'blk\.0\.attn_q\.weight\.counts' is missing"),
        ({f"{NAMES[0]}.counts": np.ones((2, 1), np.float32)}, r"has 2 counts for 1 rows"),
        ({f"{NAMES[0]}.in_sum2": np.ones((1, 8), np.float16)}, "is F16, not F32"),
        ({f"{NAMES[0]}.in_sum2": np.full((1, 8), -1, np.float32)}, "8 of 8 values are negative or not finite"),
        ({f"{NAMES[0]}.in_sum2": np.full((1, 8), np.nan, np.float32)}, "8 of 8 values are negative or not finite"),
        ({"without": [f"{name}.in_sum2" for name in NAMES]}, r"has no tensor whose name ends in \.in_sum2"),
    ],
)
def test_malformed_gguf(changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        read_imatrix(as_gguf(tmp_path / "m.gguf", **changes))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the number of entries takes 4 bytes from byte 0 on, 0 are left: truncated"),
        (struct.pack("<i", 0), "begins with 0 entries: not an imatrix"),
        (struct.pack("<i", -5), "begins with -5 entries"),
        (b"PK\3\4" + bytes(50), r"begins with \d+ entries: not an imatrix"),
        (struct.pack("<ii", 1, 0), "entry 0 has a name of 0 bytes"),
        (struct.pack("<ii", 1, 2**30), "entry 0 has a name of 1073741824 bytes"),
        (struct.pack("<ii", 1, 2) + b"\xff\xff" + bytes(8), "the name of entry 0 is not UTF-8"),
        (struct.pack("<i", 2) + 2 * entry("x", 1, np.ones(2)), "'x' appears twice"),
        (struct.pack("<i", 1) + entry("x", 0, np.ones(2)), "'x' has 2 values of 0 calls"),
        (struct.pack("<i", 1) + entry("x", 1, np.ones(2))[:-1], "x takes 8 bytes from byte 17 on, 7 are left"),
        (struct.pack("<i", 1) + entry("x", 1, np.array([1, -1])), "1 of 2 values are negative"),
    ],
)
def test_malformed_binary(raw, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        read_imatrix(as_binary(tmp_path / "imatrix.dat", raw=raw))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be opened"):
        read_imatrix(tmp_path / "none")


def test_names_of_parameters(checkpoint, tmp_path):
    config, _ = load(checkpoint().write())
    one = np.ones((1, 32), np.float32)
    found = by_parameter({"blk.1.attn_k.weight": one, "blk.0.ffn_down.weight": 2 * one, "other": one}, config, tmp_path)
    wanted = {("layers", "1", "attention", "k_proj", "weight"), ("layers", "0", "mlp", "down_proj", "weight")}
    assert set(found) == wanted
    with pytest.raises(CheckpointError, match="has no tensor of this model, 1 of others"):
        by_parameter({"other": one}, config, tmp_path)
