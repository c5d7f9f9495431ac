import ml_dtypes
import numpy as np
import pytest
import xxhash

from checkpoints_convert import array_store
from checkpoints_convert.array_store import ArrayChecksums, copy_blocks
from tests.checkpoints_convert.test_regions import DTYPES


@pytest.mark.parametrize(("shape", "chunk"), [((7, 10), (3, 4)), ((4, 5, 6), (2, 5, 4)), ((9,), (9,)), ((), ())])
@pytest.mark.parametrize("block_bytes", [8, 100, 10**6])
def test_chunks_are_hashed_in_c_order(shape, chunk, block_bytes, monkeypatch):
    monkeypatch.setattr(array_store, "_BLOCK_BYTES", block_bytes)
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    found = array_store.checksums(array, chunk)
    wanted = [array[tuple(slice(*pair) for pair in bounds)].tobytes() for bounds in array_store.chunks(shape, chunk)]
    assert found == ArrayChecksums(chunk, tuple(xxhash.xxh3_64_hexdigest(part) for part in wanted))
    assert sum(map(len, wanted)) == array.nbytes
    assert ArrayChecksums.from_json(found.to_json(), shape) == found


def test_an_empty_array_has_no_chunks():
    found = array_store.checksums(np.zeros((0, 4), np.int8), (1, 4))
    assert found.digests == ()
    assert ArrayChecksums.from_json(found.to_json(), (0, 4)) == found


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.float8_e4m3fn])
def test_every_flipped_bit_changes_a_checksum(dtype):
    array = np.arange(64).reshape(8, 8).astype(dtype)
    before = array_store.checksums(array, (8, 5))
    other = array.copy()
    other.view(np.uint8)[3, 2] ^= 1
    after = array_store.checksums(other, (8, 5))
    assert before.digests[0] != after.digests[0]
    assert before.digests[1] == after.digests[1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "no chunk shape"),
        ({"xxh3": []}, "no chunk shape"),
        ({"chunk": [4], "xxh3": ["0", "1"]}, r"\[4\] do not fit an array of shape \[4, 6\]"),
        ({"chunk": [4, 0], "xxh3": []}, "do not fit"),
        ({"chunk": [4, True], "xxh3": []}, "do not fit"),
        ({"chunk": [4, 3], "xxh3": ["0"]}, "needs the xxh3 of 2 chunks"),
        ({"chunk": [4, 3], "xxh3": [0, 1]}, "needs the xxh3 of 2 chunks"),
    ],
)
def test_malformed_checksums_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        ArrayChecksums.from_json(data, (4, 6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_strided", [False, True])
def test_arrays_in_memory_are_checked_hashed_and_cast(dtype, is_strided, monkeypatch):
    monkeypatch.setattr(array_store, "_BLOCK_BYTES", 64)
    array = np.random.default_rng(0).standard_normal((30, 7)).astype(np.float32)
    array[3, 4], array[29, 6] = np.nan, 1e38
    target = np.zeros((30, 14), dtype)[:, 3:10] if is_strided else np.zeros((30, 7), dtype)
    hasher = xxhash.xxh3_64()
    seen = copy_blocks(array, target, hasher=hasher, measure_cast=True)
    with np.errstate(over="ignore"):
        assert target.tobytes() == array.astype(dtype).tobytes()
    assert hasher.hexdigest() == xxhash.xxh3_64_hexdigest(array.tobytes())
    assert (seen.size, seen.num_nonfinite, seen.num_overflowed) == (210, 1, int(dtype == np.float16))
    assert (seen.max_relative_error > 0) == (dtype != np.float32)
