"""The loops that the kernel calls by their addresses.

Each is compiled when a weight first needs it: together they would take ten seconds, and few are needed by one model.
"""

from collections.abc import Callable, Collection
from functools import partial
from types import FunctionType
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from cpu_kernels import kernels
from cpu_kernels import vectors as vec
from cpu_kernels.frames import Kernel, compiled
from cpu_kernels.memory import intrinsic
from cpu_kernels.packed_matmul import float_products, int8_products
from cpu_kernels.packed_matmul.forms import CHAINED_KERNELS, INT8_KERNELS, KERNELS, LANES, NUMBERS, OUTER
from cpu_kernels.packed_matmul.loads import (
    FEW_ROWS,
    INT8_TILE_ROWS,
    PANEL_BYTES,
    TILE_ROWS,
    TILE_VECTORS,
    VECTOR_BYTES,
    VECTORS,
    WIDTH,
    number_vector,
    offset,
)


def _filler(kind: str) -> Any:
    """An intrinsic that writes a panel's packed scales or offsets as float32."""
    size = {"float32": 4, "float16": 2, "bfloat16": 2}.get(kind, 1)

    @intrinsic
    def fill(context, target, source, outer, scales, first, count, segment, group):
        """Writes those of `count` segments of inputs, from the first on, to float32 [count, 64]. All are int64.

        source, outer: addresses of the panel's numbers; `source` is the number of "unit". scales: address of float32
        [count, 64] for numbers in their units. segment, group: inputs of a segment, and of a group with one number.
        """

        def generate(context, builder, signature, arguments):
            target, source, outer, scales, first, count, segment, group = arguments
            bytes_of_panel = vec.constant(LANES * size)
            with cgutils.for_range(builder, count, intp=vec.LONG) as index:
                start = builder.mul(builder.add(first, index.index), segment)
                at = builder.mul(index.index, vec.constant(PANEL_BYTES))
                own, other = source, builder.add(scales, at)
                if kind not in ("unit", "none"):
                    own = builder.add(source, builder.mul(builder.udiv(start, group), bytes_of_panel))
                    for line in range(0, LANES * size, 64):  # of the next panel, in most weights
                        vec.prefetch(builder, offset(builder, own, AHEAD_BYTES + line))
                if kind == "factored":
                    place = builder.mul(builder.udiv(start, vec.constant(OUTER)), vec.constant(2 * LANES))
                    other = builder.add(outer, place)
                for v in range(VECTORS):
                    numbers = number_vector(builder, kind, own, other, v * WIDTH)
                    vec.store(builder, numbers, offset(builder, builder.add(target, at), v * VECTOR_BYTES))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return fill


AHEAD_BYTES = 2**11


def _of_seven(a, b, c, d, e, f, g):
    _loop(a, b, c, d, e, f, g)  # noqa: F821  # pyright: ignore
    return 0


def _of_eight(a, b, c, d, e, f, g, h):
    _loop(a, b, c, d, e, f, g, h)  # noqa: F821  # pyright: ignore
    return 0


def _of_ten(a, b, c, d, e, f, g, h, i, j):
    _loop(a, b, c, d, e, f, g, h, i, j)  # noqa: F821  # pyright: ignore
    return 0


_FUNCTIONS = {7: _of_seven, 8: _of_eight, 10: _of_ten}


def _module(kernel: str) -> Any:
    return int8_products if kernel in INT8_KERNELS else float_products


# What makes each loop, by name, and the number of its arguments.
_LOOPS: dict[str, tuple[int, Callable[[], Any]]] = {
    **{
        f"multiply_{name}_{rows}": (10, lambda name=name, rows=rows: _module(name).multiplier(name, rows))
        for rows in range(1, FEW_ROWS + 1)
        for name in KERNELS
    },
    **{f"convert_{name}": (8, lambda name=name: _module(name).converter(name)) for name in KERNELS},
    **{
        f"tile_{name}_{rows}": (10, lambda module=module, rows=rows: module.tiler(rows, TILE_VECTORS))
        for name, module, tile_rows in (("float", float_products, TILE_ROWS), ("int8", int8_products, INT8_TILE_ROWS))
        for rows in tile_rows
    },
    **{
        f"tile_chained_{rows}": (10, lambda rows=rows: float_products.tiler(rows, TILE_VECTORS, is_chained=True))
        for rows in TILE_ROWS
    },
    "prepare_float": (7, lambda: float_products.preparer(False)),
    "prepare_scaled": (7, lambda: float_products.preparer(True)),
    "prepare_int8": (7, lambda: int8_products.preparer(False)),
    "prepare_nibbles_int8": (7, lambda: int8_products.preparer(True)),
    **{f"fill_{name}": (8, lambda name=name: _filler(name)) for name in NUMBERS},
}
PLACES = {name: index for index, name in enumerate(_LOOPS)}
kernels.address_of_shared(kernels.PACKED_LOOPS)


def register(kernel: str, numbers: tuple[str, str], row_counts: Collection[int]) -> None:
    """Makes the loops of a kernel ready, and those of the kinds of its scales and offsets, for numbers of rows."""
    prepare = {"nibbles": "scaled", "nibbles_int8": "nibbles_int8", "quads": "int8"}.get(kernel, "float")
    names = [f"prepare_{prepare}", *(f"fill_{kind}" for kind in numbers)]
    names += [f"multiply_{kernel}_{rows}" for rows in row_counts if rows <= FEW_ROWS]
    if max(row_counts) > FEW_ROWS:
        tile = "chained" if kernel in CHAINED_KERNELS else "int8" if kernel in INT8_KERNELS else "float"
        tile_rows = INT8_TILE_ROWS if tile == "int8" else TILE_ROWS
        names += [f"convert_{kernel}", *(f"tile_{tile}_{rows}" for rows in tile_rows)]
    for name in names:
        kernels.place(name, PLACES[name], partial(compile_loop, name))


def compile_loop(name: str) -> Kernel:
    """A loop of the table as a C function."""
    num_arguments, make = _LOOPS[name]
    # A function of its own for each loop, which is a global of it: Numba caches no closures.
    function = FunctionType(_FUNCTIONS[num_arguments].__code__, {"_loop": make()}, name)
    function.__module__, function.__qualname__ = __name__, name
    return compiled(function, types.int64(*[types.int64] * num_arguments))()


def _caller(num_arguments: int) -> Any:
    """An intrinsic that calls the loop at a place of the table with `num_arguments` arguments."""

    @intrinsic
    def call(context, place, *rest):
        def generate(context, builder, signature, arguments):
            table = builder.module.globals.get(kernels.PACKED_LOOPS)
            if table is None:
                table = ir.GlobalVariable(builder.module, vec.LONG, kernels.PACKED_LOOPS)
                table.linkage = "external"
            address = builder.add(builder.ptrtoint(table, vec.LONG), builder.mul(arguments[0], vec.constant(8)))
            kind = ir.FunctionType(vec.LONG, [vec.LONG] * num_arguments)
            loop = builder.inttoptr(builder.load(vec.at(builder, address, vec.LONG)), kind.as_pointer())
            builder.call(loop, [builder.extract_value(arguments[1], i) for i in range(num_arguments)])
            return context.get_dummy_value()

        arguments: Any = types.StarArgTuple.from_types([types.int64] * num_arguments)
        return types.void(types.int64, arguments), generate

    return call


call_multiply, call_convert, call_tile, call_prepare, call_fill = map(_caller, (10, 8, 10, 7, 8))
