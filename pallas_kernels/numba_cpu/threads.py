"""Divides a kernel's work among the threads that compute an XLA program.

XLA:CPU runs the calls of a program one after the other, on one thread. A kernel that is to use several cores schedules
tasks on XLA's pool of threads (XLA_FFI_ThreadPool_Schedule, xla/ffi/api/c_api.h).

The calling thread and the tasks take parts, one at a time, until none is left. A task may begin late, or after the call
has ended: it reads a block of memory that whoever uses it last frees, and the frame only for a part that it took. A
call waits for parts that were taken, never for a task to begin, so that it ends on a pool of one thread, too.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pallas_kernels.numba_cpu.frames import API, internal, load_word
from pallas_kernels.numba_cpu.vectors import BYTE, LONG, at

# Byte offset of XLA_FFI_CallFrame.ctx, and of functions of XLA_FFI_Api.
CONTEXT = 24
DESTROY_ERROR, SCHEDULE, NUM_THREADS = 64, 136, 144
# Words of a block. The last five are XLA_FFI_ThreadPool_Schedule_Args.
FRAME, NUM_PARTS, NEXT, DONE, USERS, ARGUMENTS = range(0, 48, 8)
BLOCK_BYTES = ARGUMENTS + 5 * 8
SPINS = 2000  # reads of a counter before the thread lets another one run
POINTER = ir.PointerType(BYTE)


def _external(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


@intrinsic
def allocate(context, size):
    """The address of `size` bytes of memory, until `free`."""

    def generate(context, builder, signature, arguments):
        return builder.ptrtoint(builder.call(_external(builder, "malloc", POINTER, LONG), arguments), LONG)

    return types.int64(types.int64), generate


@intrinsic
def free(context, address):
    """Frees memory of `allocate`."""

    def generate(context, builder, signature, arguments):
        builder.call(_external(builder, "free", ir.VoidType(), POINTER), [builder.inttoptr(arguments[0], POINTER)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _yield_thread(context):
    def generate(context, builder, signature, arguments):
        builder.call(_external(builder, "sched_yield", ir.IntType(32)), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _store(context, address, word):
    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], at(builder, arguments[0], LONG))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _add(context, address, word):
    """Adds to the int64 at an address, at once for all threads; returns what it was."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("add", at(builder, arguments[0], LONG), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _call(context, function, argument):
    """Calls a C function, by its address, with a pointer; returns its result."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(LONG, [LONG])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])

    return types.int64(types.int64, types.int64), generate


def _address_of_task(work: Any) -> Any:
    """An intrinsic: the address of a C function that calls `work`, compiled for an int64, with a pointer."""

    @intrinsic
    def address(typing):
        def generate(context, builder, signature, arguments):
            work.compile((types.int64,))
            compiled = work.overloads[types.int64,]
            context.active_code_library.add_linking_library(compiled.library)
            name = f"task_{compiled.fndesc.unique_name}"
            if (task := builder.module.globals.get(name)) is None:
                task = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [LONG]), name)
                task.linkage = "internal"
                inner = ir.IRBuilder(task.append_basic_block())
                function = context.declare_function(builder.module, compiled.fndesc)
                context.call_conv.call_function(inner, function, types.void, [types.int64], task.args)
                inner.ret_void()
            return builder.ptrtoint(task, LONG)

        return types.int64(), generate

    return address


@internal("void(int64, int64)")
def _ignore(api, error):
    """Frees an XLA_FFI_Error, unless it is 0."""
    if error != 0:
        arguments = allocate(24)
        _store(arguments, 24)
        _store(arguments + 8, 0)
        _store(arguments + 16, error)
        _call(load_word(api + DESTROY_ERROR), arguments)
        free(arguments)


@internal("int64(int64)")
def num_threads(frame):
    """The number of threads of XLA's pool."""
    arguments = allocate(40)
    _store(arguments, 32)
    _store(arguments + 8, 0)
    _store(arguments + 16, load_word(frame + CONTEXT))
    _store(arguments + 24, arguments + 32)
    _store(arguments + 32, 1)
    api = load_word(frame + API)
    _ignore(api, _call(load_word(api + NUM_THREADS), arguments))
    found = load_word(arguments + 32)
    free(arguments)
    return max(found, 1)


@internal("void(int64)")
def _release(block):
    if _add(block + USERS, -1) == 1:
        free(block)


def in_parts(run: Any) -> Any:
    """A function (frame, num_parts), for a kernel, that calls `run(frame, part)` for each part, on several threads.

    run: a function of two int64, compiled by `internal`.
    """

    @internal()
    def take_parts(block):
        part = _add(block + NEXT, 1)
        while part < load_word(block + NUM_PARTS):
            run(load_word(block + FRAME), part)
            _add(block + DONE, 1)
            part = _add(block + NEXT, 1)

    @internal()
    def work(block):
        take_parts(block)
        _release(block)

    address_of_task = _address_of_task(work)

    @internal()
    def run_parts(frame, num_parts):
        num_tasks = min(num_threads(frame), num_parts) - 1
        block = allocate(BLOCK_BYTES)
        _store(block + FRAME, frame)
        _store(block + NUM_PARTS, num_parts)
        _store(block + NEXT, 0)
        _store(block + DONE, 0)
        _store(block + USERS, 1 + num_tasks)
        api, arguments = load_word(frame + API), block + ARGUMENTS
        _store(arguments, 40)
        _store(arguments + 8, 0)
        _store(arguments + 16, load_word(frame + CONTEXT))
        _store(arguments + 24, address_of_task())
        _store(arguments + 32, block)
        for _ in range(num_tasks):
            error = _call(load_word(api + SCHEDULE), arguments)
            if error != 0:
                _ignore(api, error)
                _add(block + USERS, -1)
        take_parts(block)
        spins = 0
        while _add(block + DONE, 0) < num_parts:
            spins += 1
            if spins > SPINS:
                _yield_thread()
        _release(block)

    return run_parts
