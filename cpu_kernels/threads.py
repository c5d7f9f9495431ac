"""Divides a kernel's work among the threads that compute an XLA program.

XLA:CPU runs the calls of a program one after the other, on one thread. A kernel that is to use several cores schedules
tasks on XLA's pool of threads (XLA_FFI_ThreadPool_Schedule, xla/ffi/api/c_api.h).

The calling thread and the tasks take parts, one at a time, until none is left. A task may begin late, or after the call
has ended: it reads a block of memory that its last user frees, and the job only for a part that it took. A
call waits for parts that were taken, never for a task to begin, so that it ends on a pool of one thread, too.

To wake a thread takes as long as a small product (20 us for 576 x 960 weights). So a task that has no parts left waits
for the next call, in one of a process's slots, for a moment before it ends; a call hands its block to tasks that wait
and schedules others only where these are too few.
"""

import platform
from typing import Any

from llvmlite import ir
from numba import types

from cpu_kernels import kernels
from cpu_kernels.frames import API, inlined, internal, load_word
from cpu_kernels.memory import allocate, external, free, intrinsic, store_word
from cpu_kernels.vectors import LONG, at

# Byte offset of XLA_FFI_CallFrame.ctx, and of functions of XLA_FFI_Api.
CONTEXT = 24
DESTROY_ERROR, SCHEDULE, NUM_THREADS = 64, 136, 144
# Words of a block. The last five are XLA_FFI_ThreadPool_Schedule_Args.
JOB, NUM_PARTS, NEXT, DONE, USERS, TAKE_PARTS, ARGUMENTS = range(0, 56, 8)
BLOCK_BYTES = ARGUMENTS + 5 * 8
SPINS = 2000  # reads of a counter before the thread lets another one run
# What a slot holds, unless it is the address of a block that was handed to the task that waits there.
FREE, WAITING, BUSY = 0, 1, 2
NUM_SLOTS, SLOT_BYTES = 16, 64
WAIT_SPINS = 5_000  # reads of a slot, 50 to 250 us on x86; a counter of cycles may not be read on all processors
kernels.address_of_shared(kernels.THREAD_SLOTS)


@intrinsic
def _yield_thread(context):
    def generate(context, builder, signature, arguments):
        builder.call(external(builder, "sched_yield", ir.IntType(32)), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def add_word(context, address, word):
    """Adds to the int64 at an address, at once for all threads; returns what it was."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("add", at(builder, arguments[0], LONG), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _read(context, address):
    """The int64 at an address, as other threads have left it."""

    def generate(context, builder, signature, arguments):
        return builder.load_atomic(at(builder, arguments[0], LONG), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def _replace(context, address, old, new):
    """Stores an int64 where another one is, at once for all threads; returns whether it was there."""

    def generate(context, builder, signature, arguments):
        address, old, new = arguments
        exchanged = builder.cmpxchg(at(builder, address, LONG), old, new, "seq_cst", "seq_cst")
        return builder.extract_value(exchanged, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def _slot(context, index):
    """The address of a slot."""

    def generate(context, builder, signature, arguments):
        slots = builder.module.globals.get(kernels.THREAD_SLOTS)
        if slots is None:
            slots = ir.GlobalVariable(builder.module, LONG, kernels.THREAD_SLOTS)
            slots.linkage = "external"
        start = builder.ptrtoint(slots, LONG)
        return builder.add(start, builder.mul(arguments[0], ir.Constant(LONG, SLOT_BYTES)))

    return types.int64(types.int64), generate


@intrinsic
def _pause(context):
    """Tells the processor that this thread waits for another one's store."""

    def generate(context, builder, signature, arguments):
        if platform.machine() in ("x86_64", "AMD64"):
            builder.call(external(builder, "llvm.x86.sse2.pause", ir.VoidType()), [])
        return context.get_dummy_value()

    return types.void(), generate


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
    count = load_word(arguments + 32)
    free(arguments)
    return max(count, 1)


@internal("void(int64)")
def _release(block):
    if add_word(block + USERS, -1) == 1:
        free(block)


@internal("int64()")
def _take_slot():
    """The address of a free slot, which is then busy; 0 if there is none."""
    for index in range(NUM_SLOTS):
        slot = _slot(index)
        if _read(slot) == FREE and _replace(slot, FREE, BUSY):
            return slot
    return 0


@internal("int64(int64)")
def _next_block(slot):
    """Waits in a slot for the block of a call; 0 after a moment without one, when the slot is free."""
    if slot == 0:
        return 0
    _replace(slot, BUSY, WAITING)
    for _ in range(WAIT_SPINS):
        if _read(slot) != WAITING:
            break
        _pause()
    if _replace(slot, WAITING, FREE):
        return 0
    block = _read(slot)
    _replace(slot, block, BUSY)
    return block


@internal("int64(int64, int64)")
def _hand_over(block, num_tasks):
    """Hands a block to tasks that wait, `num_tasks` at most; returns their number."""
    num_woken = 0
    for index in range(NUM_SLOTS):
        if num_woken == num_tasks:
            break
        slot = _slot(index)
        if _read(slot) == WAITING and _replace(slot, WAITING, block):
            num_woken += 1
    return num_woken


@internal("void(int64, int64)")
def wait_for(address, count):
    """Waits until other threads have added so much to the int64 at an address that it is `count`."""
    spins = 0
    while _read(address) < count:
        spins += 1
        _pause()
        if spins > SPINS:
            _yield_thread()


@internal("int64(int64, int64, int64, int64)")
def _new_block(job, num_parts, num_users, take_parts):
    block = allocate(BLOCK_BYTES)
    store_word(block + JOB, job)
    store_word(block + NUM_PARTS, num_parts)
    store_word(block + NEXT, 0)
    store_word(block + DONE, 0)
    store_word(block + USERS, num_users)
    store_word(block + TAKE_PARTS, take_parts)
    return block


def in_parts(run: Any) -> Any:
    """A function (frame, job, num_parts), for a kernel, that calls `run(job, part)` for each part, on several threads.

    run: an `inlined` function of two int64, of a name that no other kernel has. job: the frame, or the address of what
    the parts share, which stays until the function returns.
    """
    suffix = f"_{run.py_func.__qualname__}"

    @internal(suffix=suffix)
    def take_parts(block):
        part = add_word(block + NEXT, 1)
        while part < load_word(block + NUM_PARTS):
            run(load_word(block + JOB), part)
            add_word(block + DONE, 1)
            part = add_word(block + NEXT, 1)
        _release(block)

    address_of_parts = _address_of_task(take_parts)

    @internal(suffix=suffix)
    def run_task(block):
        """Takes parts of a block, then of those that later calls, of any kernel, hand over."""
        take_parts(block)
        slot = _take_slot()
        block = _next_block(slot)
        while block != 0:
            _call(load_word(block + TAKE_PARTS), block)
            block = _next_block(slot)

    address_of_task = _address_of_task(run_task)

    @inlined
    def run_parts(frame, job, num_parts):
        num_tasks = min(num_threads(frame), num_parts) - 1
        block = _new_block(job, num_parts, 2 + num_tasks, address_of_parts())
        api, arguments = load_word(frame + API), block + ARGUMENTS
        store_word(arguments, 40)
        store_word(arguments + 8, 0)
        store_word(arguments + 16, load_word(frame + CONTEXT))
        store_word(arguments + 24, address_of_task())
        store_word(arguments + 32, block)
        for _ in range(num_tasks - _hand_over(block, num_tasks)):
            error = _call(load_word(api + SCHEDULE), arguments)
            if error != 0:
                _ignore(api, error)
                add_word(block + USERS, -1)
        take_parts(block)
        wait_for(block + DONE, num_parts)
        _release(block)

    return run_parts
