"""Conversions of stored numbers in registers, and stores of transposed matrices: what Pallas has no operation for.

A word is 32 bits: four stored bytes, eight codes of 4 bits, or two numbers of 16 bits. Functions of words take their
operations from `ops`: the kernel's emit instructions (`_Emitter`), a test's compute with NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu_compat as compat
from pallas_kernels.paged_attention.rotation import LEVEL_STEP, LEVELS, levels_of

WARPS, LANES = 4, 32  # of a warpgroup, of a warp
# Numbers of a row that a thread converts at once: 8 bytes are loaded, 16 stored.
VECTOR = 8
_MATRIX = plgpu.Layout.WGMMA
_SIGNS = 0x80808080


def vector_layout(width: int) -> Any:
    """Layout of a matrix of rows of this width in which each thread has `VECTOR` neighbours of a row. The number of
    rows is a multiple of `_rows_of_layout`."""
    rows = _rows_of_layout(width)
    columns = WARPS * LANES // rows * VECTOR
    tiling = plgpu.Tiling(((rows, columns), (rows // WARPS, columns), (VECTOR,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _rows_of_layout(width: int) -> int:
    """Rows that the warpgroup has at once, at least two a warp: a power of two of its threads lie along a row."""
    along = width // VECTOR & -(width // VECTOR)
    return WARPS * LANES // min(along, LANES // 2)


def rows_at_once(width: int) -> int:
    """Rows of stored bytes that are converted at once: 32 bytes for each thread, so that registers suffice."""
    return max(_rows_of_layout(width), min(64, WARPS * LANES * 32 // (width & -width)))


def convert(stored: Any, dtype: str, target: str) -> list[Any]:
    """Stored numbers [rows, width] in `vector_layout` as float16 or bfloat16 (`target`), in the same layout.

    int4, two codes a byte, gives two results, the first half of each row and the second. They are levels in steps.
    """
    if compat.is_interpreted():
        return [part.astype(target) for part in (_steps(stored) if dtype == "int4" else [stored])]
    layout = vector_layout(stored.shape[1])
    num_results = 2 if dtype == "int4" else 1
    shape = plgpu.ShapeDtypeStruct(stored.shape, jnp.dtype(target), layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=[shape] * num_results)
    def converted(_, array):
        return _Emitter.map_words(array, num_results, target, lambda word, ops: words_of(word, dtype, target, ops))

    return converted(stored)  # pyright: ignore[reportCallIssue]


def _steps(codes):
    """Levels in steps of the low and of the high bits."""
    codes = codes.astype(jnp.int32)
    return [jnp.round(levels_of(part) / LEVEL_STEP) for part in (codes & 15, codes >> 4)]


def words_of(word: Any, dtype: str, target: str, ops: Any) -> list[list[Any]]:
    """The two words with the four numbers of a stored word; for int4 those of the low bits, and those of the high."""
    if dtype == "int8":
        return [_integers(word, target, ops)]
    if dtype == "int4":
        return _levels(word, target, ops)
    if dtype == "float8_e5m2":  # the upper half of a float16
        return [[ops.permute(word, 0, pick) for pick in (0x1404, 0x3424)]]
    return [ops.floats(word)]


def _integers(word: Any, target: str, ops: Any) -> list[Any]:
    """float16: a byte with its sign flipped, u, after the byte 0x64 is 1,024 + u. bfloat16: its lower 7 bits after 0x43
    are 128 + u, and its sign after 0xC3 is -128 or -256. Sums of two such numbers are exact."""
    if target == "float16":
        flipped = ops.xor(word, _SIGNS)
        return [ops.add(ops.permute(flipped, 0x64646464, pick), 0xE480E480, target) for pick in (0x4140, 0x4342)]
    low, sign = ops.and_(word, 0x7F7F7F7F), ops.and_(word, _SIGNS)
    return [
        ops.add(ops.permute(low, 0x43434343, pick), ops.permute(sign, 0xC3C3C3C3, pick), target)
        for pick in (0x4140, 0x4342)
    ]


def _levels(word: Any, target: str, ops: Any) -> list[list[Any]]:
    """The lower 3 bits of four codes select four of eight bytes in one instruction, which has tables of the levels'
    upper and lower bytes; a fourth bit of a selector spreads a byte's sign over it."""
    upper, lower = _level_bytes(target)
    selectors, shifted = ops.and_(word, 0x77777777), ops.shift_left(word, 4)
    halves = []
    for half, signs in ((selectors, 0x9D8C), (ops.shift_right(selectors, 16), 0xBFAE)):
        sign = ops.and_(ops.permute(word, shifted, signs), _SIGNS)
        halves.append((ops.permute(*lower, half), ops.or_(ops.permute(*upper, half), sign)))
    return [[ops.permute(low, high, pick) for low, high in halves] for pick in (0x6240, 0x7351)]


def _level_bytes(target: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Upper and lower bytes of the positive levels, four in each word."""
    bits = np.asarray(LEVELS, np.float32).astype(jnp.dtype(target)).view(np.uint16)
    upper, lower = ((bits >> shift).astype(np.uint8).view("<u4") for shift in (8, 0))
    return (int(upper[0]), int(upper[1])), (int(lower[0]), int(lower[1]))


def keep_rows(stored: Any, is_kept: Any) -> Any:
    """Stored numbers [rows, width] in `vector_layout`, zero in the other rows. is_kept: bool [rows]."""
    if compat.is_interpreted():
        return jnp.where(is_kept[:, None], stored, jnp.zeros_like(stored))
    layout = vector_layout(stored.shape[1])
    shape = plgpu.ShapeDtypeStruct(stored.shape, stored.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout.reduce(1)), return_type=shape)
    def kept(_, array, mask):
        return _Emitter.mask_rows(array, mask)

    return kept(stored, jnp.where(is_kept, jnp.int32(-1), jnp.int32(0)))  # pyright: ignore[reportCallIssue]


def store_transposed(ref: Any, value: Any, pitch: int, swizzle: int, transforms: Sequence[Any]) -> None:
    """Stores a matrix [M, N] of 16-bit numbers, in the layout of matrix products, to `ref` [N, M] in shared memory.

    `stmatrix` exchanges rows and columns of blocks of 8 x 8. pitch: numbers from row to row of `ref`, which may be some
    columns of a matrix without tiles. swizzle: of its tiles, 0 without them.
    """
    if compat.is_interpreted():
        ref[...] = value.T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(tuple(transforms)), _MATRIX))
    def store(_, memory, array):
        _Emitter.store_blocks(memory, array, pitch, swizzle)

    store(ref, value)  # pyright: ignore[reportCallIssue]


def chunk_offset(row: Any, chunk: Any, width: int, swizzle: int, ops: Any) -> Any:
    """Bytes from the start of a matrix [rows, width] of 16-bit numbers to eight of them, the chunk-th of a row."""
    if not swizzle:
        return ops.add_int(ops.times(row, 2 * width), ops.times(chunk, 16))
    across = swizzle // 16  # chunks of a tile's row, a power of two
    tile = ops.add_int(
        ops.times(ops.shift_right(row, 3), 16 * width),
        ops.times(ops.shift_right(chunk, across.bit_length() - 1), 8 * swizzle),
    )
    inside = ops.add_int(ops.times(ops.and_(row, 7), swizzle), ops.times(ops.and_(chunk, across - 1), 16))
    offset = ops.add_int(tile, inside)
    return ops.xor(offset, ops.and_(ops.shift_right(offset, 3), swizzle - 16))


def block_of_lane(thread: Any, ops: Any) -> tuple[Any, Any]:
    """Row and chunk of a transposed matrix [16, 64] that a thread gives `stmatrix` the address of. A warp has 16
    numbers of each row, two blocks; the next two blocks are 8 rows below."""
    lane, warp = ops.and_(thread, LANES - 1), ops.and_(ops.shift_right(thread, 5), WARPS - 1)
    row = ops.add_int(ops.and_(lane, 7), ops.times(ops.shift_right(lane, 4), 8))
    return row, ops.add_int(ops.times(warp, 2), ops.and_(ops.shift_right(lane, 3), 1))


class _Emitter:
    """Emits the instructions of functions of words into a Mosaic GPU kernel."""

    def __init__(self):
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        self.ir, self.arith, self.llvm, self.vector = ir, arith, llvm, vector
        self.i32 = ir.IntegerType.get_signless(32)

    @classmethod
    def map_words(cls, array: Any, num_results: int, target: str, function: Any) -> list[Any]:
        """Arrays of the numbers that `function` makes of each word of an array of bytes."""
        from jax.experimental.mosaic.gpu import FragmentedArray
        from jax.experimental.mosaic.gpu.utils import dtype_to_ir_type

        ops = cls()
        results = [np.empty_like(array.registers) for _ in range(num_results)]
        for index, register in np.ndenumerate(array.registers):
            parts = [function(word, ops) for word in ops.words(register)]
            for number, result in enumerate(results):
                words = [word for part in parts for word in part[number]]
                result[index] = ops.join(words, dtype_to_ir_type(jnp.dtype(target)), VECTOR)
        return [FragmentedArray(_registers=values, _layout=array.layout, _is_signed=None) for values in results]

    @classmethod
    def mask_rows(cls, array: Any, mask: Any) -> Any:
        """The array's bits where a row's mask is -1. The first index of registers is of rows."""
        from jax.experimental.mosaic.gpu import FragmentedArray

        ops = cls()
        masks = [ops.words(register)[0] for register in mask.registers.flat]
        result = np.empty_like(array.registers)
        for index, register in np.ndenumerate(array.registers):
            words = [ops.and_(word, masks[index[0]]) for word in ops.words(register)]
            result[index] = ops.join(words, array.mlir_dtype, VECTOR)
        return FragmentedArray(_registers=result, _layout=array.layout, _is_signed=array.is_signed)

    @classmethod
    def store_blocks(cls, memory: Any, array: Any, pitch: int, swizzle: int) -> None:
        """`store_transposed` of registers: [M / 64, N / 8, ..., 2 (halves of a warp's 16 rows), ...]."""
        from jax.experimental.mosaic.gpu.utils import memref_ptr, thread_idx

        ops = cls()
        height, width = array.shape
        base = ops.llvm.ptrtoint(ops.i32, memref_ptr(memory))
        registers = array.registers.reshape(height // 64, width // 8, 2)
        row, chunk = block_of_lane(thread_idx(), ops)
        for block in range(height // 64):
            for first in range(0, width // 8, 2):
                at = ops.add_int(row, 8 * first)
                address = ops.add_int(base, chunk_offset(at, ops.add_int(chunk, 8 * block), pitch, swizzle, ops))
                pair = registers[block, first : first + 2].reshape(-1)
                words = [word for register in pair for word in ops.words(register)]
                places = ", ".join(f"${number + 1}" for number in range(len(words)))
                text = f"stmatrix.sync.aligned.m8n8.x{len(words)}.trans.shared.b16 [$0], {{{places}}};"
                ops.assemble(text, [address, *words], None)

    def assemble(self, text: str, operands: list[Any], result: Any) -> Any:
        """One instruction; `$0` is its result if it has one."""
        if result is None:
            void = self.ir.Type.parse("!llvm.void")
            return self.llvm.inline_asm(void, operands, text, ",".join("r" * len(operands)), has_side_effects=True)
        return self.llvm.inline_asm(result, operands, text, ",".join(["=r", *("r" * len(operands))]))

    def words(self, register: Any) -> list[Any]:
        """The words of a vector."""
        kind = self.ir.VectorType(register.type)
        count = kind.shape[0] * _bits(kind.element_type) // 32
        packed = self.vector.bitcast(self.ir.VectorType.get((count,), self.i32), register)
        return [self.llvm.extractelement(packed, self.word(position)) for position in range(count)]

    def join(self, words: list[Any], element: Any, count: int) -> Any:
        """The vector of `count` elements with these words."""
        packed = self.vector.from_elements(self.ir.VectorType.get((len(words),), self.i32), words)
        return self.vector.bitcast(self.ir.VectorType.get((count,), element), packed)

    def word(self, value: Any) -> Any:
        """A register; integers become constants."""
        if not isinstance(value, int):
            return value
        signed = value - 2**32 if value >= 2**31 else value
        return self.arith.constant(self.i32, self.ir.IntegerAttr.get(self.i32, signed))

    def and_(self, a, b):
        return self.arith.andi(self.word(a), self.word(b))

    def or_(self, a, b):
        return self.arith.ori(self.word(a), self.word(b))

    def xor(self, a, b):
        return self.arith.xori(self.word(a), self.word(b))

    def shift_left(self, a, count: int):
        return self.arith.shli(self.word(a), self.word(count))

    def shift_right(self, a, count: int):
        return self.arith.shrui(self.word(a), self.word(count))

    def add_int(self, a, b):
        return self.arith.addi(self.word(a), self.word(b))

    def times(self, a, factor: int):
        return self.arith.muli(self.word(a), self.word(factor))

    def permute(self, a, b, selector):
        """Bytes 0 to 3 of a and 4 to 7 of b, by the four lowest nibbles of the selector."""
        operands = [self.word(value) for value in (a, b, selector)]
        return self.assemble("prmt.b32 $0, $1, $2, $3;", operands, self.i32)

    def add(self, a, b, target: str):
        """Sums of two numbers of 16 bits each."""
        instruction = "add.rn.f16x2" if target == "float16" else "add.rn.bf16x2"
        return self.assemble(f"{instruction} $0, $1, $2;", [self.word(a), self.word(b)], self.i32)

    def floats(self, word):
        """The two words with the float16 numbers of four float8_e4m3fn."""
        parts = (f"mov.b32 {{low, high}}, $1; cvt.rn.f16x2.e4m3x2 $0, {part};" for part in ("low", "high"))
        return [self.assemble(f"{{ .reg .b16 low, high; {part} }}", [word], self.i32) for part in parts]


def _bits(element: Any) -> int:
    from jax.experimental.mosaic.gpu import utils

    return utils.bitwidth(element)
