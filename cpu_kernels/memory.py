"""Memory by address, for kernels. Arrays of NumPy would do, but take Numba seconds to compile."""

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from cpu_kernels.frames import answers_metadata, compiled, operand, operand_size, result
from cpu_kernels.vectors import BYTE, FLOAT, LONG, at, constant

POINTER = ir.PointerType(BYTE)
intrinsic: Any = extending.intrinsic  # whose calls have an argument less than its functions


def external(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A function of the C library."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


@intrinsic
def allocate(context, size):
    """The address of `size` bytes of memory, until `free`."""

    def generate(context, builder, signature, arguments):
        return builder.ptrtoint(builder.call(external(builder, "malloc", POINTER, LONG), arguments), LONG)

    return types.int64(types.int64), generate


@intrinsic
def free(context, address):
    """Frees memory of `allocate`."""

    def generate(context, builder, signature, arguments):
        builder.call(external(builder, "free", ir.VoidType(), POINTER), [builder.inttoptr(arguments[0], POINTER)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def store_word(context, address, word):
    """Stores an int64 at an address."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], at(builder, arguments[0], LONG))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _element(builder: Any, address: Any, index: Any) -> Any:
    return at(builder, builder.add(address, builder.mul(index, constant(4))), FLOAT)


@intrinsic
def get(context, address, index):
    """The float32 at an index of the array at an address."""

    def generate(context, builder, signature, arguments):
        return builder.load(_element(builder, *arguments), align=4)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def put(context, address, index, number):
    """Stores a float32 at an index of the array at an address."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[2], _element(builder, *arguments[:2]), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@compiled
def copy_handler(frame):
    """The kernel of `pallas_kernels.cpu_calls.materialized`."""
    if not answers_metadata(frame):
        source, target = operand(frame, 0), result(frame, 0)
        for index in range(operand_size(frame, 0, 0)):
            put(target, index, get(source, index))
    return 0
