"""Divides a kernel's work among the threads that compute an XLA program.

XLA:CPU runs the calls of a program one after the other, on one thread. A kernel that is to use several cores schedules
tasks on XLA's pool of threads (XLA_FFI_ThreadPool_Schedule, xla/ffi/api/c_api.h).

The calling thread and the tasks take parts, one at a time, until none is left. A task may begin late, or after the call
has ended: it reads a block of memory that whoever uses it last frees, and the job only for a part that it took. A
call waits for parts that were taken, never for a task to begin, so that it ends on a pool of one thread, too.
"""

from typing import Any

from llvmlite import ir
from numba import types

from pallas_kernels.numba_cpu.frames import API, inlined, internal, load_word
from pallas_kernels.numba_cpu.memory import allocate, external, free, intrinsic, store_word
from pallas_kernels.numba_cpu.vectors import LONG, at

# Byte offset of XLA_FFI_CallFrame.ctx, and of functions of XLA_FFI_Api.
CONTEXT = 24
DESTROY_ERROR, SCHEDULE, NUM_THREADS = 64, 136, 144
# Words of a block. The last five are XLA_FFI_ThreadPool_Schedule_Args.
JOB, NUM_PARTS, NEXT, DONE, USERS, ARGUMENTS = range(0, 48, 8)
BLOCK_BYTES = ARGUMENTS + 5 * 8
SPINS = 2000  # reads of a counter before the thread lets another one run


@intrinsic
def _yield_thread(context):
    def generate(context, builder, signature, arguments):
        builder.call(external(builder, "sched_yield", ir.IntType(32)), [])
        return context.get_dummy_value()

    return types.void(), generate


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
        store_word(arguments, 24)
        store_word(arguments + 8, 0)
        store_word(arguments + 16, error)
        _call(load_word(api + DESTROY_ERROR), arguments)
        free(arguments)


@internal("int64(int64)")
def num_threads(frame):
    """The number of threads of XLA's pool."""
    arguments = allocate(40)
    store_word(arguments, 32)
    store_word(arguments + 8, 0)
    store_word(arguments + 16, load_word(frame + CONTEXT))
    store_word(arguments + 24, arguments + 32)
    store_word(arguments + 32, 1)
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
    """A function (frame, job, num_parts), for a kernel, that calls `run(job, part)` for each part, on several threads.

    run: an `inlined` function of two int64, of a name that no other kernel has. job: the frame, or the address of what
    the parts share, which stays until the function returns.
    """
    suffix = f"_{run.py_func.__qualname__}"

    @internal(suffix=suffix)
    def take_parts(block):
        part = _add(block + NEXT, 1)
        while part < load_word(block + NUM_PARTS):
            run(load_word(block + JOB), part)
            _add(block + DONE, 1)
            part = _add(block + NEXT, 1)
        _release(block)

    address_of_task = _address_of_task(take_parts)

    @inlined
    def run_parts(frame, job, num_parts):
        num_tasks = min(num_threads(frame), num_parts) - 1
        block = allocate(BLOCK_BYTES)
        store_word(block + JOB, job)
        store_word(block + NUM_PARTS, num_parts)
        store_word(block + NEXT, 0)
        store_word(block + DONE, 0)
        store_word(block + USERS, 2 + num_tasks)
        api, arguments = load_word(frame + API), block + ARGUMENTS
        store_word(arguments, 40)
        store_word(arguments + 8, 0)
        store_word(arguments + 16, load_word(frame + CONTEXT))
        store_word(arguments + 24, address_of_task())
        store_word(arguments + 32, block)
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
