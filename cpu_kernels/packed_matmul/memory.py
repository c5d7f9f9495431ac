"""Small reads and writes of the kernel."""

from numba import types
from numba.core import cgutils

from cpu_kernels import vectors as vec
from cpu_kernels.memory import intrinsic
from cpu_kernels.packed_matmul.loads import VECTOR_BYTES, WIDTH


@intrinsic
def load_int32(context, address, index):
    """The int32 at an index of the array at an address, as int64."""

    def generate(context, builder, signature, arguments):
        place = builder.add(arguments[0], builder.mul(arguments[1], vec.constant(4)))
        return builder.sext(builder.load(vec.at(builder, place, vec.INT), align=4), vec.LONG)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def copy_lanes(context, target, source, count):
    """Copies the first `count` of 16 float32."""

    def generate(context, builder, signature, arguments):
        target, source, count = arguments
        with builder.if_else(builder.icmp_signed(">=", count, vec.constant(WIDTH))) as (is_whole, is_part):
            with is_whole:
                vec.store(builder, vec.load(builder, source), target)
            with is_part, cgutils.for_range(builder, count, intp=vec.LONG) as lane:
                at = builder.mul(lane.index, vec.constant(4))
                number = builder.load(vec.at(builder, builder.add(source, at), vec.FLOAT), align=4)
                builder.store(number, vec.at(builder, builder.add(target, at), vec.FLOAT), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def clear(context, address, count):
    """Sets `count` vectors of 16 float32 to 0."""

    def generate(context, builder, signature, arguments):
        with cgutils.for_range(builder, arguments[1], intp=vec.LONG) as index:
            vec.store(
                builder,
                vec.splat(vec.FLOATS, 0.0),
                builder.add(arguments[0], builder.mul(index.index, vec.constant(VECTOR_BYTES))),
            )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def prefetch_line(context, address):
    """Loads a cache line that is read soon into the second cache."""

    def generate(context, builder, signature, arguments):
        vec.prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate
