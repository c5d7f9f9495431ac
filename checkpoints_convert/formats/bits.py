"""Values of a few bits in 32-bit words: a dense stream, lowest bits first, that may cross from a word to the next."""

import math

import ml_dtypes
import numpy as np

_WORD = 32


def num_words(count: int, bits: int) -> int:
    """Words that hold `count` values."""
    return -(-count * bits // _WORD)


def unpack(words: np.ndarray, bits: int, count: int, *, axis: int) -> np.ndarray:
    """The first `count` codes along `axis` of 32-bit words, as uint8 in [0, 2^bits).

    The result lies in memory with `axis` first, so unpacking [N, words] along the inputs and transposing costs nothing.
    Raises ValueError unless the axis has exactly the words the codes need.
    """
    words = np.moveaxis(words.view(np.uint32), axis, 0)
    if len(words) != num_words(count, bits):
        raise ValueError(f"{len(words)} words cannot hold {count} values of {bits} bits, {num_words(count, bits)} can")
    step = math.gcd(_WORD, bits)
    period, width = _WORD // step, bits // step  # values and words until a value starts on a word again
    num_periods = -(-count // period)
    if missing := num_periods * width - len(words):
        words = np.concatenate([words, np.zeros((missing, *words.shape[1:]), np.uint32)])
    words = words.reshape(num_periods, width, *words.shape[1:])
    codes = np.empty((num_periods, period, *words.shape[2:]), np.uint8)
    for place in range(period):
        first, shift = divmod(bits * place, _WORD)
        code = words[:, first] >> np.uint32(shift)
        if shift + bits > _WORD:
            code |= words[:, first + 1] << np.uint32(_WORD - shift)
        codes[:, place] = code & np.uint32(2**bits - 1)
    return np.moveaxis(codes.reshape(num_periods * period, *codes.shape[2:])[:count], 0, axis)


def pack(codes: np.ndarray, bits: int, *, axis: int) -> np.ndarray:
    """int32 words of unsigned codes; the inverse of `unpack`. Bits after the last code are 0."""
    codes = np.moveaxis(codes, axis, 0)
    count = len(codes)
    words = np.zeros((num_words(count, bits) + 1, *codes.shape[1:]), np.uint32)
    period = _WORD // math.gcd(_WORD, bits)
    for place in range(min(period, count)):
        values = codes[place::period].astype(np.uint32)
        first, shift = divmod(bits * place, _WORD)
        stride = bits * period // _WORD
        words[first::stride][: len(values)] |= values << np.uint32(shift)
        if shift + bits > _WORD:
            words[first + 1 :: stride][: len(values)] |= values >> np.uint32(_WORD - shift)
    return np.ascontiguousarray(np.moveaxis(words[:-1], 0, axis)).view(np.int32)


def signed(codes: np.ndarray, bits: int) -> np.ndarray:
    """code - 2^(bits - 1), as int4 up to 4 bits and int8 beyond."""
    shifted = codes - np.uint8(2 ** (bits - 1))
    # Reading the bytes as int4 rather than casting them: the cast takes 0.4 us a value.
    return (shifted & np.uint8(15)).view(ml_dtypes.int4) if bits <= 4 else shifted.view(np.int8)


def unsigned(values: np.ndarray, bits: int) -> np.ndarray:
    """value + 2^(bits - 1) of int4 or int8 values, as uint8."""
    return as_int8(values).view(np.uint8) + np.uint8(2 ** (bits - 1))


def as_int8(values: np.ndarray) -> np.ndarray:
    """int4 or int8 values as int8."""
    if values.dtype != ml_dtypes.int4:
        return values
    nibbles = values.view(np.uint8) & np.uint8(15)
    return ((nibbles ^ np.uint8(8)) - np.uint8(8)).view(np.int8)


def transposed(matrix: np.ndarray) -> np.ndarray:
    """The transpose [K, N] of [N, K] in C order, copied in strips that stay in the processor's cache."""
    result = np.empty(matrix.shape[::-1], matrix.dtype)
    source, target = (array.view(f"u{matrix.dtype.itemsize}") for array in (matrix, result))
    for first in range(0, len(source), 64):
        target[:, first : first + 64] = source[first : first + 64].T
    return result
