"""Conversions in registers and transposed stores, with NumPy in the place of instructions."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import gpu_registers, rotation


class NumpyWords:
    """The operations of `gpu_registers` on uint32 arrays, as PTX defines them."""

    def and_(self, a, b):
        return np.uint32(a) & np.uint32(b)

    def or_(self, a, b):
        return np.uint32(a) | np.uint32(b)

    def xor(self, a, b):
        return np.uint32(a) ^ np.uint32(b)

    def shift_left(self, a, count):
        return np.uint32(a) << np.uint32(count)

    def shift_right(self, a, count):
        return np.uint32(a) >> np.uint32(count)

    def add_int(self, a, b):
        return np.uint32(a) + np.uint32(b)

    def times(self, a, factor):
        return np.uint32(a) * np.uint32(factor)

    def permute(self, a, b, selector):
        """`prmt`: a nibble's lower bits pick a byte of b:a, its highest bit replaces the byte by its sign."""
        both = np.uint64(a) | (np.uint64(b) << np.uint64(32))
        result = np.uint32(0)
        for place in range(4):
            nibble = (np.uint32(selector) >> np.uint32(4 * place)) & np.uint32(15)
            byte = (both >> (np.uint64(8) * (nibble & np.uint32(7)).astype(np.uint64))) & np.uint64(255)
            byte = np.where(nibble & 8, np.where(byte & np.uint64(128), 255, 0), byte).astype(np.uint32)
            result = result | (byte << np.uint32(8 * place))
        return result

    def add(self, a, b, target):
        return _words(_numbers(a, target) + _numbers(b, target))

    def floats(self, word):
        codes = np.ascontiguousarray(word, np.uint32).view(jnp.float8_e4m3fn).reshape(*np.shape(word), 4)
        return [_words(codes[..., part : part + 2].astype(np.float16)) for part in (0, 2)]


def _numbers(words, target):
    words = np.ascontiguousarray(np.broadcast_to(words, np.shape(words) or (1,)), np.uint32)
    return words.view(jnp.dtype(target)).reshape(*words.shape, 2)


def _words(numbers):
    return np.ascontiguousarray(numbers).view(np.uint32)[..., 0]


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
def test_every_stored_byte_is_converted(dtype, target):
    """In each place of a word, all bytes become the numbers that they stand for."""
    if dtype.startswith("float8") and target == "bfloat16":
        pytest.skip("8-bit floats become float16")
    stored = np.random.default_rng(0).permuted(np.tile(np.arange(256, dtype=np.uint8), (4, 1)), axis=1).T
    words = np.ascontiguousarray(stored).view(np.uint32)[:, 0]
    found = [
        np.concatenate([_numbers(word, target).astype(np.float32) for word in part], axis=1)
        for part in gpu_registers.words_of(words, dtype, target, NumpyWords())
    ]
    if dtype == "int4":
        steps = np.array([*rotation.LEVELS, *(-level for level in rotation.LEVELS)], np.float32)
        expected = [steps[stored & 15], steps[stored >> 4]]
    else:
        expected = [stored.view(jnp.dtype(dtype)).astype(np.float32)]
    for one, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, wanted)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("height", [64, 128])
@pytest.mark.parametrize("width", [8, 16, 24])
def test_transposed_store(height, width, swizzle):
    """Each number of a matrix [M, N] in the layout of products comes to its place in the tiles of a matrix [N, M]."""
    ops, matrix = NumpyWords(), np.arange(height * width, dtype=np.uint16).reshape(height, width)
    memory = np.zeros(height * width, np.uint16)
    thread = np.arange(128)
    row, chunk = gpu_registers.block_of_lane(thread, ops)
    lane, warp = thread % 32, thread // 32
    for block in range(height // 64):
        for first in range(0, width // 8, 2):
            at = ops.add_int(row, 8 * first)
            address = gpu_registers.chunk_offset(at, ops.add_int(chunk, 8 * block), height, swizzle, ops)
            num_blocks = 2 * min(2, width // 8 - first)
            for number in range(num_blocks):  # `stmatrix.trans`: lanes 8 n to 8 n + 7 have the rows of the n-th block
                column, half = first + number // 2, number % 2
                for pair in range(2):
                    place = 2 * (lane % 4) + pair
                    target = address[32 * warp + 8 * number + place] // 2 + lane // 4
                    memory[target] = matrix[64 * block + 16 * warp + 8 * half + lane // 4, 8 * column + place]
    np.testing.assert_array_equal(memory, _tiled(matrix.T, swizzle))


def _tiled(matrix, swizzle):
    """The numbers of a matrix in memory: in tiles of 8 rows, whose chunks of 16 bytes are exchanged."""
    if not swizzle:
        return matrix.reshape(-1)
    rows, columns = matrix.shape
    across = swizzle // 16
    tiles = matrix.reshape(rows // 8, 8, columns // (8 * across), across, 8).transpose(0, 2, 1, 3, 4)
    row = np.arange(8)[:, None]
    source = np.arange(across) ^ (row * swizzle // 128) % across
    return tiles[:, :, row, source].reshape(-1)


def test_registers_of_a_product():
    """Registers are by blocks of 64 rows, of 8 columns, and the halves of a warp's 16 rows."""
    layout = plgpu.Layout.WGMMA.to_mgpu()
    assert [size for size in layout.registers_shape((128, 24)) if size > 1] == [2, 3, 2]


@pytest.mark.parametrize("width", [32, 48, 64, 80, 96, 128, 256])
def test_registers_of_stored_numbers(width):
    """The first index of registers is one of rows; a register has neighbours of one row."""
    layout = gpu_registers.vector_layout(width).to_mgpu()
    first, *others = layout.registers_shape((64, width))
    assert first * np.prod(others) * gpu_registers.VECTOR * 128 == 64 * width
    assert layout.reduce((1,)).registers_shape((64,))[0] == first
