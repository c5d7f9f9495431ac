"""Products of rows with low-rank adapters (LoRA, Hu et al. 2021), of which each row has its own.

The rows are ordered by adapter, and those of one are multiplied together (as in Punica's SGMV, Chen et al. 2023): first
with A, whose results are kept, then with B. Threads share ranks of the first products and outputs of the second ones.
Each sum has one order, whatever else is computed: along the inputs in 16 lanes, which are added at the end, and along
the ranks. So a row's result does not depend, to the bit, on the other rows and the adapter's slot.
"""

from typing import Any

from numba import types
from numba.core import cgutils

from cpu_kernels import vectors as vec
from cpu_kernels.frames import (
    answers_metadata,
    compiled,
    inlined,
    internal,
    load_word,
    num_operands,
    operand,
    operand_size,
    result,
)
from cpu_kernels.memory import allocate, free, intrinsic, store_word
from cpu_kernels.packed_matmul.loads import HAS_AVX512
from cpu_kernels.packed_matmul.memory import load_int32
from cpu_kernels.threads import add_word, in_parts, num_threads, wait_for

# Operands: the rows, their adapters and the ranks of slots, then a product, A and B for each weight.
IDS, RANKS, ARRAYS, ARRAYS_OF_WEIGHT = 1, 2, 3, 3
# Words of a job: addresses of the order of rows, of the groups, and of products with A [weights, rows, R].
# Then units and parts of the products with A, and of those with B.
FRAME, ORDER, GROUPS, NUM_GROUPS, HIDDEN = range(0, 40, 8)
FIRST_UNITS, FIRST_PARTS, FIRST_DONE, SECOND_UNITS, SECOND_PARTS, JOB_BYTES = range(40, 88, 8)
# Words of a group of rows with the same adapter, the first one by its place in the order.
SLOT, FIRST, ROWS, RANK, GROUP_BYTES = range(0, 40, 8)
GROUP_ROWS = 32
# Rows, ranks and vectors of outputs whose sums are in registers at once.
MOST_ROWS, MOST_RANKS, MOST_VECTORS = (4, 4, 4) if HAS_AVX512 else (2, 2, 2)
BLOCK_RANKS, BLOCK_OUTPUTS = 8, 128  # of a unit
PARTS_OF_THREAD, MIN_PART = 4, 2**13  # parts at most, and weights of a part at least
VECTOR_BYTES = 4 * vec.LANES


def _rows(builder: Any, start: Any, order: Any, width: Any, count: int) -> list[Any]:
    """The addresses of rows of an array of float32 with `width` columns, by their numbers at `order`."""
    numbers = [vec.load(builder, builder.add(order, vec.constant(8 * row)), vec.LONG) for row in range(count)]
    stride = builder.mul(width, vec.constant(4))
    return [builder.add(start, builder.mul(number, stride)) for number in numbers]


def _first_tile(rows: int, ranks: int) -> Any:
    """An intrinsic for the products of `rows` rows with `ranks` ranks of A."""

    @intrinsic
    def multiply(context, hidden, width, x, order, a, inputs, ahead):
        """hidden[row, rank] = sum of x[order[row], k] * a[rank, k] over the inputs. All are int64.

        hidden: address of float32 [rows, width]. order: address of int64. x, a: addresses of float32 [:, inputs].
        ahead: bytes from what is read to what is prefetched of A.
        """

        def generate(context, builder, signature, arguments):
            hidden, width, x, order, a, inputs, ahead = arguments
            tile = [(row, rank) for row in range(rows) for rank in range(ranks)]
            sums = {place: cgutils.alloca_once_value(builder, vec.splat(vec.FLOATS, 0.0)) for place in tile}
            stride = builder.mul(inputs, vec.constant(4))
            own_rows = _rows(builder, x, order, inputs, rows)
            own_ranks = [builder.add(a, builder.mul(stride, vec.constant(rank))) for rank in range(ranks)]

            def add(place: Any, load: Any) -> None:
                numbers = [load(builder.add(address, place)) for address in own_rows]
                for rank in range(ranks):
                    weights = load(builder.add(own_ranks[rank], place))
                    for row in range(rows):
                        total = builder.load(sums[row, rank])
                        builder.store(vec.multiply_add(builder, numbers[row], weights, total), sums[row, rank])

            whole = builder.udiv(inputs, vec.constant(vec.LANES))
            with cgutils.for_range(builder, whole, intp=vec.LONG) as step:
                place = builder.mul(step.index, vec.constant(VECTOR_BYTES))
                for address in own_ranks:
                    vec.prefetch(builder, builder.add(builder.add(address, place), ahead))
                add(place, lambda address: vec.load(builder, address))
            left = builder.urem(inputs, vec.constant(vec.LANES))
            with builder.if_then(builder.icmp_signed(">", left, vec.constant(0))):
                place = builder.mul(whole, vec.constant(VECTOR_BYTES))
                add(place, lambda address: vec.load_first(builder, address, vec.FLOATS, left))
            for row, rank in tile:
                own = builder.add(hidden, builder.mul(width, vec.constant(4 * row)))
                total = vec.total(builder, builder.load(sums[row, rank]))
                builder.store(total, vec.at(builder, builder.add(own, vec.constant(4 * rank)), vec.FLOAT))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return multiply


def _second_tile(rows: int, vectors: int, *, is_part: bool = False) -> Any:
    """An intrinsic for the products of `rows` rows with `vectors` times 16 outputs of B; `is_part`: with the first
    `count` of 16."""

    @intrinsic
    def add_products(context, out, order, hidden, width, b, outputs, rank, count):
        """out[order[row], n] += sum of hidden[row, r] * b[r, n] over the ranks. All are int64.

        out, b: addresses of float32 [:, outputs], of the first output. order: address of int64. hidden: address of
        float32 [rows, width]. The same outputs that follow are prefetched.
        """

        def generate(context, builder, signature, arguments):
            out, order, hidden, width, b, outputs, rank, count = arguments
            tile = [(row, vector) for row in range(rows) for vector in range(vectors)]
            sums = {place: cgutils.alloca_once_value(builder, vec.splat(vec.FLOATS, 0.0)) for place in tile}
            stride, size = builder.mul(outputs, vec.constant(4)), vec.constant(VECTOR_BYTES)

            def load(address: Any) -> Any:
                return vec.load_first(builder, address, vec.FLOATS, count) if is_part else vec.load(builder, address)

            def vectors_at(address: Any) -> list[Any]:
                return [builder.add(address, builder.mul(size, vec.constant(vector))) for vector in range(vectors)]

            with cgutils.for_range(builder, rank, intp=vec.LONG) as step:
                places = vectors_at(builder.add(b, builder.mul(step.index, stride)))
                weights = [load(place) for place in places]
                for place in places if not is_part else []:
                    vec.prefetch(builder, builder.add(place, vec.constant(VECTOR_BYTES * vectors)))
                for row in range(rows):
                    own = builder.add(hidden, builder.mul(width, vec.constant(4 * row)))
                    own = builder.add(own, builder.mul(step.index, vec.constant(4)))
                    number = vec.broadcast(builder, vec.load(builder, own, vec.FLOAT))
                    for vector in range(vectors):
                        place = sums[row, vector]
                        builder.store(vec.multiply_add(builder, number, weights[vector], builder.load(place)), place)
            for row, address in enumerate(_rows(builder, out, order, outputs, rows)):
                for vector, place in enumerate(vectors_at(address)):
                    total = builder.fadd(load(place), builder.load(sums[row, vector]))
                    if is_part:
                        _store_first(builder, total, place, count)
                    else:
                        vec.store(builder, total, place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return add_products


def _store_first(builder: Any, value: Any, address: Any, count: Any) -> None:
    """Stores the first `count` numbers of a vector."""
    numbers = cgutils.alloca_once_value(builder, value)
    start = builder.ptrtoint(numbers, vec.LONG)
    with cgutils.for_range(builder, count, intp=vec.LONG) as lane:
        place = builder.mul(lane.index, vec.constant(4))
        number = vec.load(builder, builder.add(start, place), vec.FLOAT)
        builder.store(number, vec.at(builder, builder.add(address, place), vec.FLOAT), align=4)


_multiply_2, _multiply_row, _multiply_last = _first_tile(2, MOST_RANKS), _first_tile(1, MOST_RANKS), _first_tile(1, 1)
_multiply = _first_tile(MOST_ROWS, MOST_RANKS) if MOST_ROWS > 2 else _multiply_2
_add_2, _add_row = _second_tile(2, MOST_VECTORS), _second_tile(1, MOST_VECTORS)
_add = _second_tile(MOST_ROWS, MOST_VECTORS) if MOST_ROWS > 2 else _add_2
_add_last = _second_tile(1, 1, is_part=True)


@internal("int64(int64)")
def _num_weights(frame):
    return (num_operands(frame) - ARRAYS) // ARRAYS_OF_WEIGHT


@internal("int64(int64, int64)")
def _outputs(frame, weight):
    return operand_size(frame, ARRAYS + ARRAYS_OF_WEIGHT * weight, 1)


@internal("int64(int64)")
def _most(frame):
    """R of the stacks."""
    return operand_size(frame, ARRAYS + 1, 1)


@internal("int64(int64, int64)")
def _num_blocks(count, size):
    return (count + size - 1) // size


@internal("int64(int64, int64)")
def _group(job, index):
    return load_word(job + GROUPS) + GROUP_BYTES * index


@internal("int64(int64, int64)")
def _id(frame, row):
    """The adapter of a row, 0 for none."""
    own = load_int32(operand(frame, IDS), row)
    return own if own > 0 and own <= operand_size(frame, RANKS, 0) else 0


@internal("int64(int64, int64)")
def _order_rows(frame, order):
    """Writes the numbers of rows in the order of their adapters; returns the address of int64: where the rows of each
    end, to be freed."""
    rows, ids = operand_size(frame, 0, 0), operand_size(frame, RANKS, 0) + 1
    ends = allocate(8 * (ids + 1))
    for index in range(ids + 1):
        store_word(ends + 8 * index, 0)
    for row in range(rows):
        place = ends + 8 * _id(frame, row) + 8
        store_word(place, load_word(place) + 1)
    for index in range(ids):
        place = ends + 8 * index
        store_word(place + 8, load_word(place) + load_word(place + 8))
    for row in range(rows):
        place = ends + 8 * _id(frame, row)
        store_word(order + 8 * load_word(place), row)
        store_word(place, load_word(place) + 1)
    return ends


@internal("int64(int64, int64)")
def _write_groups(job, ends):
    """Divides the rows of each adapter into groups; returns the number of blocks of ranks of all."""
    frame = load_word(job + FRAME)
    count, blocks, start = 0, 0, load_word(ends)
    for own in range(1, operand_size(frame, RANKS, 0) + 1):
        end = load_word(ends + 8 * own)
        if start < end:
            rank = min(load_int32(operand(frame, RANKS), own - 1), _most(frame))
            while start < end and rank > 0:
                size, group = min(end - start, GROUP_ROWS), _group(job, count)
                store_word(group + SLOT, own - 1)
                store_word(group + FIRST, start)
                store_word(group + ROWS, size)
                store_word(group + RANK, rank)
                blocks += _num_blocks(rank, BLOCK_RANKS)
                start, count = start + size, count + 1
            start = end
    store_word(job + NUM_GROUPS, count)
    return blocks


@internal("void(int64, int64, int64, int64, int64)")
def _run_ranks(job, group, weight, first, last):
    """The products of a group's rows with A of a weight, of some ranks."""
    frame = load_word(job + FRAME)
    inputs, most, rows = operand_size(frame, 0, 1), _most(frame), load_word(group + ROWS)
    start = load_word(group + FIRST)
    a = operand(frame, ARRAYS + ARRAYS_OF_WEIGHT * weight + 1) + 4 * load_word(group + SLOT) * most * inputs
    hidden = load_word(job + HIDDEN) + 4 * (weight * operand_size(frame, 0, 0) + start) * most
    x, order = operand(frame, 0), load_word(job + ORDER) + 8 * start
    row = 0
    while row < rows:
        size = MOST_ROWS if row + MOST_ROWS <= rows else (2 if row + 2 <= rows else 1)
        own_order = order + 8 * row
        rank = first
        while rank + MOST_RANKS <= last:
            own, ranks = hidden + 4 * (row * most + rank), a + 4 * rank * inputs
            ahead = 4 * MOST_RANKS * inputs if row == 0 and rank + MOST_RANKS < load_word(group + RANK) else 0
            if size == MOST_ROWS:
                _multiply(own, most, x, own_order, ranks, inputs, ahead)
            elif size == 2:
                _multiply_2(own, most, x, own_order, ranks, inputs, ahead)
            else:
                _multiply_row(own, most, x, own_order, ranks, inputs, ahead)
            rank += MOST_RANKS
        while rank < last:
            for index in range(row, row + size):
                own = hidden + 4 * (index * most + rank)
                _multiply_last(own, most, x, order + 8 * index, a + 4 * rank * inputs, inputs, 0)
            rank += 1
        row += size


@internal("void(int64, int64, int64, int64, int64)")
def _run_outputs(job, group, weight, first, last):
    """Adds the products of a group's rows with B of a weight, of some outputs."""
    frame = load_word(job + FRAME)
    outputs, most, rows = _outputs(frame, weight), _most(frame), load_word(group + ROWS)
    start, rank = load_word(group + FIRST), load_word(group + RANK)
    b = operand(frame, ARRAYS + ARRAYS_OF_WEIGHT * weight + 2) + 4 * load_word(group + SLOT) * most * outputs
    hidden = load_word(job + HIDDEN) + 4 * (weight * operand_size(frame, 0, 0) + start) * most
    out, order = result(frame, weight), load_word(job + ORDER) + 8 * start
    n = first
    while n < last:
        is_whole = n + MOST_VECTORS * vec.LANES <= last
        row = 0
        while row < rows:
            own, own_order, own_hidden = out + 4 * n, order + 8 * row, hidden + 4 * row * most
            if not is_whole:
                _add_last(own, own_order, own_hidden, most, b + 4 * n, outputs, rank, min(last - n, vec.LANES))
                row += 1
            elif row + MOST_ROWS <= rows:
                _add(own, own_order, own_hidden, most, b + 4 * n, outputs, rank, 0)
                row += MOST_ROWS
            elif row + 2 <= rows:
                _add_2(own, own_order, own_hidden, most, b + 4 * n, outputs, rank, 0)
                row += 2
            else:
                _add_row(own, own_order, own_hidden, most, b + 4 * n, outputs, rank, 0)
                row += 1
        n += MOST_VECTORS * vec.LANES if is_whole else vec.LANES


@internal("void(int64, int64, int64)")
def _run_some_ranks(job, first, last):
    """Some units of the products with A: blocks of ranks, of the weights, of the groups."""
    frame, start = load_word(job + FRAME), 0
    for index in range(load_word(job + NUM_GROUPS)):
        group = _group(job, index)
        rank = load_word(group + RANK)
        blocks = _num_blocks(rank, BLOCK_RANKS)
        for weight in range(_num_weights(frame)):
            low, high = max(first - start, 0), min(last - start, blocks)
            if low < high:
                _run_ranks(job, group, weight, low * BLOCK_RANKS, min(high * BLOCK_RANKS, rank))
            start += blocks


@internal("void(int64, int64, int64)")
def _run_some_outputs(job, first, last):
    """Some units of the products with B: blocks of outputs, of the weights, of the groups."""
    frame, start = load_word(job + FRAME), 0
    for index in range(load_word(job + NUM_GROUPS)):
        for weight in range(_num_weights(frame)):
            outputs = _outputs(frame, weight)
            blocks = _num_blocks(outputs, BLOCK_OUTPUTS)
            low, high = max(first - start, 0), min(last - start, blocks)
            if low < high:
                end = min(high * BLOCK_OUTPUTS, outputs)
                _run_outputs(job, _group(job, index), weight, low * BLOCK_OUTPUTS, end)
            start += blocks


def _run_adapter_part(job, part):
    """Parts of the products with A come first: when one of those with B is taken, all of them are at work."""
    parts, units = load_word(job + FIRST_PARTS), load_word(job + FIRST_UNITS)
    if part < parts:
        _run_some_ranks(job, part * units // parts, (part + 1) * units // parts)
        add_word(job + FIRST_DONE, 1)
    else:
        wait_for(job + FIRST_DONE, parts)
        own, parts, units = part - parts, load_word(job + SECOND_PARTS), load_word(job + SECOND_UNITS)
        _run_some_outputs(job, own * units // parts, (own + 1) * units // parts)


_run_parts = in_parts(inlined(_run_adapter_part))


@internal("int64(int64, int64, int64)")
def _num_parts(frame, units, weights_of_unit):
    most = min(units, num_threads(frame) * PARTS_OF_THREAD)
    return max(min(most, units * weights_of_unit // MIN_PART), 1)


@internal("void(int64, int64)")
def _plan(job, blocks):
    """Counts units and parts; `blocks`: of ranks, of the groups."""
    frame, units = load_word(job + FRAME), 0
    for weight in range(_num_weights(frame)):
        units += _num_blocks(_outputs(frame, weight), BLOCK_OUTPUTS)
    units, first_units = units * load_word(job + NUM_GROUPS), blocks * _num_weights(frame)
    store_word(job + FIRST_UNITS, first_units)
    store_word(job + FIRST_PARTS, _num_parts(frame, first_units, BLOCK_RANKS * operand_size(frame, 0, 1)))
    store_word(job + FIRST_DONE, 0)
    store_word(job + SECOND_UNITS, units)
    store_word(
        job + SECOND_PARTS,
        _num_parts(frame, units, BLOCK_OUTPUTS * BLOCK_RANKS * blocks // load_word(job + NUM_GROUPS)),
    )


@inlined
def _add_all(frame):
    rows = operand_size(frame, 0, 0)
    job, order, groups = allocate(JOB_BYTES), allocate(8 * rows), allocate(GROUP_BYTES * rows)
    store_word(job + FRAME, frame)
    store_word(job + ORDER, order)
    store_word(job + GROUPS, groups)
    ends = _order_rows(frame, order)
    blocks = _write_groups(job, ends)
    free(ends)
    if blocks > 0:
        hidden = allocate(4 * _num_weights(frame) * rows * _most(frame))
        store_word(job + HIDDEN, hidden)
        _plan(job, blocks)
        if load_word(job + FIRST_PARTS) + load_word(job + SECOND_PARTS) == 2:
            _run_some_ranks(job, 0, load_word(job + FIRST_UNITS))
            _run_some_outputs(job, 0, load_word(job + SECOND_UNITS))
        else:
            _run_parts(frame, job, load_word(job + FIRST_PARTS) + load_word(job + SECOND_PARTS))
        free(hidden)
    free(groups)
    free(order)
    free(job)


@compiled
def adapter_matmul(frame):
    """Results have the memory of the products."""
    if not answers_metadata(frame):
        _add_all(frame)
    return 0
