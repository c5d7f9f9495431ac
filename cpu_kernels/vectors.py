"""Vectors of 16 float32 as LLVM instructions, for loops that Numba itself would not vectorize.

Each function is called while LLVM code is generated (inside `numba.extending.intrinsic`): it takes and returns LLVM
values. LLVM divides the vectors as the machine needs.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 16
BYTE, HALF, INT, LONG, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)


def constant(value: int) -> Any:
    return ir.Constant(LONG, value)


def splat(kind: Any, value: int | float) -> Any:
    """A vector of equal constants."""
    return ir.Constant(kind, [value] * kind.count)


def at(builder: Any, address: Any, kind: Any) -> Any:
    """An address as a pointer to `kind`."""
    return builder.inttoptr(address, kind.as_pointer())


def load(builder: Any, address: Any, kind: Any = FLOATS) -> Any:
    return builder.load(at(builder, address, kind), align=1)


def load_first(builder: Any, address: Any, kind: Any, count: Any) -> Any:
    """The first `count` numbers of a vector; the others are 0 and are not read."""
    size = kind.count
    longs = ir.VectorType(LONG, size)
    undefined = ir.Constant(longs, ir.Undefined)
    counts = builder.insert_element(undefined, count, ir.Constant(INT, 0))
    counts = builder.shuffle_vector(counts, undefined, splat(ir.VectorType(INT, size), 0))
    is_read = builder.icmp_signed("<", ir.Constant(longs, list(range(size))), counts)
    pointer, name = ir.PointerType(BYTE), f"v{size}{'f32' if kind.element == FLOAT else 'i8'}"
    signature = ir.FunctionType(kind, [pointer, INT, is_read.type, kind])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.masked.load.{name}.p0")
    zeros = ir.Constant(kind, [0] * size)
    return builder.call(function, [builder.inttoptr(address, pointer), ir.Constant(INT, 1), is_read, zeros])


def store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, at(builder, address, value.type), align=1)


def prefetch(builder: Any, address: Any) -> None:
    """Loads a cache line that is read soon into the second cache; any address is allowed. The first has too few
    outstanding misses: one row of a 1,536 x 576 int8 weight would take 63 us instead of 34."""
    pointer = ir.PointerType(BYTE)
    kind = ir.FunctionType(ir.VoidType(), [pointer, INT, INT, INT])
    options = [ir.Constant(INT, option) for option in (0, 2, 1)]  # to read, into the second cache, data
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, pointer), *options])


def broadcast(builder: Any, number: Any) -> Any:
    """A float32 in all lanes."""
    undefined = ir.Constant(FLOATS, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, undefined, splat(INTS, 0))


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [a, b, c])


def from_int8(builder: Any, numbers: Any) -> Any:
    """float32 of int8."""
    return builder.sitofp(builder.sext(numbers, ir.VectorType(INT, numbers.type.count)), FLOATS)


def from_int4(builder: Any, pairs: Any) -> list[Any]:
    """Two vectors of float32 from 16 bytes of int4, the first of a byte in its low bits."""
    eight = splat(pairs.type, 8)
    low = builder.sub(builder.xor(builder.and_(pairs, splat(pairs.type, 15)), eight), eight)
    high = builder.ashr(pairs, splat(pairs.type, 4))
    halves = []
    for start in (0, LANES // 2):
        order = [start + lane // 2 + (lane % 2) * LANES for lane in range(LANES)]
        halves.append(from_int8(builder, builder.shuffle_vector(low, high, ir.Constant(INTS, order))))
    return halves


def from_bfloat16(builder: Any, bits: Any) -> Any:
    """float32 of bfloat16, given as uint16."""
    wide = builder.zext(bits, ir.VectorType(INT, bits.type.count))
    return builder.bitcast(builder.shl(wide, splat(INTS, 16)), FLOATS)


def total(builder: Any, vector: Any) -> Any:
    """The sum of all lanes: halves are added until one is left."""
    size = vector.type.count
    while size > 1:
        size //= 2
        kind = ir.VectorType(INT, size)
        low, high = (ir.Constant(kind, [first + lane for lane in range(size)]) for first in (0, size))
        vector = builder.fadd(builder.shuffle_vector(vector, vector, low), builder.shuffle_vector(vector, vector, high))
    return builder.extract_element(vector, ir.Constant(INT, 0))
