"""The kernel of `pallas_kernels.cpu_calls.untouched_zeros`: a pool of pages takes memory as it is used."""

from typing import Any

from llvmlite import ir
from numba import types

from cpu_kernels.frames import answers_metadata, attribute, compiled, result
from cpu_kernels.memory import POINTER, external, intrinsic
from cpu_kernels.vectors import INT, LONG, constant

PAGE_BYTES = 4096  # of the system's memory; where pages are larger, madvise may refuse, and zeros are written
_DONT_NEED = 4  # MADV_DONTNEED: private memory reads as zeros from then on, and is not resident


@intrinsic
def _give_back(context, address, size):
    """Clears `size` bytes at an address: whole pages are given back to the system, the rest is written."""

    def generate(context, builder, signature, arguments):
        start, size = arguments
        end = builder.add(start, size)
        mask = constant(-PAGE_BYTES)
        first = builder.and_(builder.add(start, constant(PAGE_BYTES - 1)), mask)
        last = builder.and_(end, mask)
        clear = external(builder, "memset", POINTER, POINTER, INT, LONG)

        def write(place: Any, count: Any) -> None:
            builder.call(clear, [builder.inttoptr(place, POINTER), ir.Constant(INT, 0), count])

        with builder.if_else(builder.icmp_signed("<", first, last)) as (has_pages, has_none):
            with has_pages:
                advise = external(builder, "madvise", INT, POINTER, LONG, INT)
                pages = [builder.inttoptr(first, POINTER), builder.sub(last, first), ir.Constant(INT, _DONT_NEED)]
                failed = builder.icmp_signed("!=", builder.call(advise, pages), ir.Constant(INT, 0))
                with builder.if_then(failed):  # memory that is locked, for example
                    write(first, builder.sub(last, first))
                write(start, builder.sub(first, start))
                write(last, builder.sub(end, last))
            with has_none:
                write(start, size)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@compiled
def zeros_handler(frame):
    if not answers_metadata(frame):
        _give_back(result(frame, 0), attribute(frame, 0))
    return 0
