from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints_convert import host_arrays
from checkpoints_convert.host_arrays import Region, count_nonfinite, empty_aligned, read_tensor

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BF16]


@pytest.fixture(scope="module")
def executor():
    with ThreadPoolExecutor(3) as pool:
        yield pool


def stored(array):
    raw = array.tobytes()

    def read(offset, buffer):
        buffer[:] = raw[offset : offset + len(buffer)]

    return read


@pytest.mark.matrix
@pytest.mark.parametrize("block_bytes", [64, 4096, 2**24])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("original", [*DTYPES, np.dtype(np.float64)], ids=str)
@pytest.mark.parametrize(
    ("shape", "transpose"),
    [((70, 33), True), ((70, 33), False), ((129,), False), ((), False), ((0, 5), True), ((1, 1), True)],
)
def test_result_is_the_cast_transpose(shape, transpose, original, dtype, block_bytes, executor, monkeypatch):
    monkeypatch.setattr(host_arrays, "BLOCK_BYTES", block_bytes)
    array = np.random.default_rng(0).standard_normal(shape).astype(original)
    found, seen = read_tensor(stored(array), shape, original, dtype, transpose=transpose, executor=executor)
    wanted = (array.T if transpose else array).astype(dtype)
    assert (found.shape, found.dtype) == (wanted.shape, dtype)
    assert found.tobytes() == np.ascontiguousarray(wanted).tobytes()
    assert found.flags.c_contiguous
    assert (seen.num_nonfinite, seen.num_overflowed) == (0, 0)


def test_cpu_device_adopts_the_buffer(executor):
    array = np.random.default_rng(0).standard_normal((300, 200)).astype(np.float32)
    found, _ = read_tensor(stored(array), array.shape, array.dtype, array.dtype, transpose=True, executor=executor)
    on_device = jax.device_put(found)
    assert on_device.unsafe_buffer_pointer() == found.ctypes.data
    assert jnp.array_equal(on_device, array.T)


def test_empty_aligned_is_aligned():
    assert all(empty_aligned((n,), np.dtype(np.int8)).ctypes.data % 64 == 0 for n in range(1, 20))


@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype(np.float64)], ids=str)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_every_nonfinite_value_is_counted(dtype, value):
    array = np.array([1, -1, 0, -0.0, 6e4, -6e4], np.float64).astype(dtype)
    assert count_nonfinite(array) == 0
    array[2] = array[4] = value
    assert count_nonfinite(array) == 2
    assert count_nonfinite(array[2:3].reshape(())) == 1


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BF16], ids=str)
def test_count_nonfinite_on_every_16_bit_pattern(dtype):
    values = np.arange(2**16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        is_finite = np.isfinite(values[::7])
    found = np.array([count_nonfinite(values[i : i + 1]) for i in range(0, 2**16, 7)])
    assert np.array_equal(found, ~is_finite)


@given(st.lists(st.floats(width=32), max_size=20))
def test_count_nonfinite_agrees_with_numpy(values):
    array = np.array(values, np.float32)
    assert count_nonfinite(array) == np.sum(~np.isfinite(array))


def test_overflow_of_a_cast_is_counted_apart_from_what_was_stored(executor):
    array = np.array([1, 1e5, -1e6, np.inf, np.nan], np.float32)
    _, found = read_tensor(stored(array), (5,), array.dtype, np.dtype(np.float16), transpose=False, executor=executor)
    assert (found.num_nonfinite, found.num_overflowed) == (2, 2)


def test_error_of_a_cast_is_measured(executor):
    def error(values, dtype, original=np.float32):
        array = np.array(values, original)
        _, found = read_tensor(
            stored(array),
            array.shape,
            array.dtype,
            np.dtype(dtype),
            transpose=False,
            executor=executor,
            measure_cast=True,
        )
        return found.max_relative_error

    assert error([1.0, 0.0, -2.5], BF16) == 0.0
    assert error([1.0 + 2**-9], BF16) == pytest.approx(2**-9, rel=0.01)
    assert error([1e-30, 1.0], np.float16) == 1.0  # underflow to zero
    assert error([0.1, np.nan], np.float32, np.float16) == 0.0


@given(st.data())
def test_regions_are_what_numpy_takes(data):
    """Rows and columns in any order, gaps merged or not, one or two parts side by side, either memory order."""
    num_rows, row_length = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 20))
    whole = np.random.default_rng(0).standard_normal((num_rows, row_length), np.float32)
    whole[0, 0] = np.inf
    rows = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, unique=True)))
    numbers = data.draw(st.lists(st.integers(0, row_length - 1), min_size=1, unique=True))
    split = data.draw(st.integers(1, len(numbers)))
    columns = [np.array(part) for part in (numbers[:split], numbers[split:]) if part]
    dtype = data.draw(st.sampled_from(DTYPES))
    results = [
        np.empty((len(part), len(rows)), dtype).T if is_transposed else np.empty((len(rows), len(part)), dtype)
        for part, is_transposed in zip(columns, data.draw(st.tuples(st.booleans(), st.booleans())), strict=False)
    ]
    read_bytes = 0
    plain = stored(whole)

    def read(offset, buffer):
        nonlocal read_bytes
        read_bytes += len(buffer)
        plain(offset, buffer)

    min_piece = data.draw(st.sampled_from([1, 20, 100, 10**6]))
    region = Region("w", read, whole.dtype, row_length, rows, tuple(zip(columns, results, strict=True)))
    with patch.object(host_arrays, "BLOCK_BYTES", 10**6), ThreadPoolExecutor(2) as pool, np.errstate(over="ignore"):
        seen = host_arrays.read_regions([region], executor=pool, min_piece_bytes=min_piece)["w"]
        for part, result in zip(columns, results, strict=True):
            wanted = whole[np.ix_(rows, part)].astype(dtype)
            assert result.tobytes() == wanted.tobytes()
    assert seen.size == len(rows) * len(numbers)
    assert seen.num_nonfinite == (0 in rows and 0 in numbers)
    assert read_bytes == host_arrays.bytes_to_read(rows, columns, row_length, 4, min_piece)
