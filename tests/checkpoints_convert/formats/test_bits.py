import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert.formats.module import as_int8, pack, signed, transposed, unpack, unsigned
from tests.checkpoints_convert.formats import encoders


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [1, 8, 32, 33, 100, 128])
@pytest.mark.parametrize("axis", [0, 1])
def test_words_are_one_long_number_lowest_bits_first(bits, count, axis):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (5, count)).astype(np.uint8)
    words = encoders.pack_rows(codes, bits)
    if axis == 0:
        codes, words = np.ascontiguousarray(codes.T), np.ascontiguousarray(words.T)
    assert np.array_equal(pack(codes, bits, axis=axis), words)
    assert np.array_equal(unpack(words, bits, count, axis=axis), codes)


@pytest.mark.parametrize("num_words", [11, 13])
def test_too_few_or_too_many_words_are_refused(num_words):
    with pytest.raises(ValueError, match=rf"{num_words} words cannot hold 128 values of 3 bits, 12 can"):
        unpack(np.zeros((num_words, 2), np.int32), 3, 128, axis=0)


@pytest.mark.parametrize("bits", range(2, 9))
def test_signs(bits):
    codes = np.arange(2**bits, dtype=np.uint8)
    values = signed(codes, bits)
    assert values.dtype == (ml_dtypes.int4 if bits <= 4 else np.int8)
    assert values.astype(np.int64).tolist() == list(range(-(2 ** (bits - 1)), 2 ** (bits - 1)))
    assert as_int8(values).tolist() == values.astype(np.int64).tolist()
    assert np.array_equal(unsigned(values, bits), codes)


def test_transposed():
    matrix = np.random.default_rng(0).standard_normal((130, 67)).astype(ml_dtypes.bfloat16)
    assert np.array_equal(transposed(matrix), matrix.T)
    assert transposed(matrix).flags.c_contiguous
