"""Vector code of paged attention on CPUs, as LLVM instructions: what Numba does not vectorize itself.

Addresses are int64. Rows of queries, keys, values and sums are float32, in whole vectors of 16. A query's arithmetic is
the same whatever the other rows of a call are.
"""

import itertools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cpu_kernels import vectors
from cpu_kernels.paged_attention.masks import MASKED
from cpu_kernels.vectors import BYTE, FLOAT, FLOATS, HALF, INT, INTS, LANES, LONG, constant, load, splat

BYTES, HALVES = ir.VectorType(BYTE, LANES), ir.VectorType(HALF, LANES)
VECTOR = 4 * LANES  # bytes
CACHE_LINE = 64
# How numbers are stored; two of `NIBBLES` share a byte.
FLOAT32, BFLOAT16, FLOAT16, E4M3, E5M2, INT8, NIBBLES = range(7)
# Rows, and vectors of a row, that are computed at once, with their sums in registers.
MAX_ROWS, MAX_VECTORS = 4, 4
KEYS_OF_ROWS = (16, 8, 4, 4)  # whose products with 1, 2, 3 and 4 rows are computed at once
ADDRESS, COUNT, NUMBER = types.int64, types.int64, types.float32


def _intrinsic(function: Any) -> Any:
    """`intrinsic`, whose functions take one argument less than pyright sees."""
    return intrinsic(function)


def _outlined(generate: Any) -> Any:
    """Code as a function of its own, compiled once: inlined at each call, all of it would be optimized again in every
    caller."""

    def call(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(builder.module, kind, f"jaxinfer_paged_attention{generate.__name__}")
        if function.is_declaration:
            function.linkage = "linkonce_odr"
            function.attributes.add("noinline")
            inner = ir.IRBuilder(function.append_basic_block())
            generate(context, inner, signature, function.args)
            inner.ret_void()
        builder.call(function, arguments)
        return context.get_dummy_value()

    return call


@_intrinsic
def score(context, out, out_stride, q, q_stride, rows, k, k_stride, vecs, factors):
    """Products of `rows` queries and 16 keys of `vecs` vectors, times the keys' `factors`, to 16 floats of each row."""
    return types.void(*[ADDRESS] * 9), _outlined(_score)


@_intrinsic
def soften(context, scores, vecs, base, low, high, first_new, bits, v_factors, highest, total, sums, sum_vecs):
    """A block of keys in the online softmax of one query (Milakov & Gimelshein 2018).

    Replaces the scores of `vecs` vectors of keys, from position `base` on, by weights, times the keys' `v_factors`.
    Keys from `low` to `high` - 1 are visible, and those of the tree whose bit, from `first_new` on, is set; others have
    the weight 0. `highest` has the highest score in all lanes, `total` sums of weights by lane; these and `sums`, of
    `sum_vecs` vectors, are rescaled.
    """
    return types.void(*[ADDRESS] * 12), _outlined(_soften)


@_intrinsic
def add_weighted(context, sums, sum_stride, weights, weight_stride, rows, v, v_stride, count, vecs):
    """Adds `count` values of `vecs` vectors, times their weights, to the sums of `rows` queries, in order."""
    return types.void(*[ADDRESS] * 9), _outlined(_add_weighted)


@_intrinsic
def cap(context, scores, vecs, soft_cap):
    """soft_cap * tanh(score / soft_cap)."""
    return types.void(ADDRESS, COUNT, NUMBER), _outlined(_cap)


@_intrinsic
def divide(context, out, sums, vecs, total):
    """The sums over the sum of all lanes of `total`."""
    return types.void(*[ADDRESS] * 4), _outlined(_divide)


@_intrinsic
def convert(context, out, out_stride, stored, stride, rows, vecs, kind):
    """float32 of `vecs` vectors of each of `rows` rows of stored numbers.

    Those of 4 bits are levels in steps, `vecs` vectors of each half byte, and `E4M3` is 1/256 of the number: factors of
    keys and values have the rest. Conversions of float16 keep subnormal numbers, which arithmetic does not: XLA sets
    its threads to flush them to zero.
    """
    return types.void(*[ADDRESS] * 7), _outlined(_convert)


@_intrinsic
def prefetch(context, start, stride, rows, size):
    """Prefetches `size` bytes of each row."""
    return types.void(*[ADDRESS] * 4), _outlined(_prefetch)


def _address(builder: Any, start: Any, index: Any, stride: Any) -> Any:
    return builder.add(start, builder.mul(index, stride))


def _tiles(builder: Any, total: Any, size: int) -> Any:
    return builder.sdiv(builder.add(total, constant(size - 1)), constant(size))


def _least(builder: Any, a: Any, limit: int) -> Any:
    return builder.select(builder.icmp_signed("<", a, constant(limit)), a, constant(limit))


def _scalar(builder: Any, address: Any) -> Any:
    """A float32 in all lanes."""
    return vectors.broadcast(builder, builder.load(vectors.at(builder, address, FLOAT), align=4))


def _integers(builder: Any, number: Any) -> Any:
    """An int64, as int32 in all lanes."""
    undefined = ir.Constant(INTS, ir.Undefined)
    first = builder.insert_element(undefined, builder.trunc(number, INT), ir.Constant(INT, 0))
    return builder.shuffle_vector(first, undefined, splat(INTS, 0))


def _variable(builder: Any, value: Any) -> Any:
    place = cgutils.alloca_once(builder, value.type)
    builder.store(value, place)
    return place


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(INTS, lanes))


def _lane_sums(builder: Any, rows: list[Any]) -> Any:
    """The vector of the sums of 16 vectors."""
    step = 1
    while len(rows) > 1:
        low = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
        high = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
        rows = [
            builder.fadd(_shuffle(builder, a, b, low), _shuffle(builder, a, b, high))
            for a, b in zip(rows[::2], rows[1::2], strict=True)
        ]
        step *= 2
    return rows[0]


def _across(builder: Any, vector: Any, combine: Any) -> Any:
    """All lanes combined, in all lanes."""
    step = LANES // 2
    while step:
        vector = combine(vector, _shuffle(builder, vector, vector, [lane ^ step for lane in range(LANES)]))
        step //= 2
    return vector


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of two; b if a is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _polynomial(builder: Any, x: Any, coefficients: tuple[float, ...]) -> Any:
    result = splat(FLOATS, coefficients[0])
    for coefficient in coefficients[1:]:
        result = vectors.multiply_add(builder, result, x, splat(FLOATS, coefficient))
    return result


_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_ROUNDS = 1.5 * 2.0**23  # added to a float32 of less than 2^22, rounds it to an integer in the low bits


def _exp(builder: Any, x: Any) -> Any:
    """The exponential of x <= 0, as Cephes' expf; 1 for 0, 0 below -87, NaN for NaN."""
    shifted = vectors.multiply_add(builder, x, splat(FLOATS, 1.44269504088896341), splat(FLOATS, _ROUNDS))
    power = builder.fsub(shifted, splat(FLOATS, _ROUNDS))
    rest = vectors.multiply_add(builder, power, splat(FLOATS, -0.693359375), x)
    rest = vectors.multiply_add(builder, power, splat(FLOATS, 2.12194440e-4), rest)
    result = vectors.multiply_add(builder, _polynomial(builder, rest, _EXP), builder.fmul(rest, rest), rest)
    result = builder.fadd(result, splat(FLOATS, 1.0))
    exponent = builder.add(builder.bitcast(shifted, INTS), splat(INTS, 127 - 0x4B400000))
    two_to = builder.bitcast(builder.shl(exponent, splat(INTS, 23)), FLOATS)
    is_tiny = builder.fcmp_ordered("<", x, splat(FLOATS, -87.0))
    return builder.select(is_tiny, splat(FLOATS, 0.0), builder.fmul(result, two_to))


_TANH_TOP = (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08)
_TANH_TOP += (1.48572235717979e-05, 6.37261928935436e-04, 4.89352455891786e-03)
_TANH_BOTTOM = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


def _tanh(builder: Any, x: Any) -> Any:
    """The rational function of Eigen and XLA; NaN for NaN."""
    for sign, compare in ((1, ">"), (-1, "<")):
        bound = splat(FLOATS, sign * 7.90531110763549805)
        x = builder.select(builder.fcmp_ordered(compare, x, bound), bound, x)
    square = builder.fmul(x, x)
    top = builder.fmul(x, _polynomial(builder, square, _TANH_TOP))
    return builder.fdiv(top, _polynomial(builder, square, _TANH_BOTTOM))


def _score(context, builder, signature, arguments):
    out, out_stride, q, q_stride, rows, k, k_stride, vecs, factors = arguments

    def offset(place: Any, index: Any) -> Any:
        return builder.add(place, builder.mul(index, constant(4)))

    with cgutils.for_range(builder, _tiles(builder, rows, MAX_ROWS), intp=LONG) as group:
        first_row = builder.mul(group.index, constant(MAX_ROWS))
        num_rows = _least(builder, builder.sub(rows, first_row), MAX_ROWS)
        outs = [_address(builder, out, builder.add(first_row, constant(row)), out_stride) for row in range(MAX_ROWS)]
        queries = [_address(builder, q, builder.add(first_row, constant(row)), q_stride) for row in range(MAX_ROWS)]
        end = builder.append_basic_block("scored")
        switch = builder.switch(num_rows, end)
        for count, num_keys in enumerate(KEYS_OF_ROWS, start=1):
            block = builder.append_basic_block()
            switch.add_case(constant(count), block)
            builder.position_at_end(block)
            with cgutils.for_range(builder, constant(LANES // num_keys), intp=LONG) as tile:
                first = builder.mul(tile.index, constant(num_keys))
                keys = [_address(builder, k, builder.add(first, constant(key)), k_stride) for key in range(num_keys)]
                places = [offset(place, first) for place in outs[:count]]
                _score_tile(builder, queries[:count], keys, places, offset(factors, first), vecs)
            builder.branch(end)
        builder.position_at_end(end)
    return context.get_dummy_value()


def _score_tile(builder: Any, queries: list, keys: list, outs: list, factors: Any, vecs: Any) -> None:
    """`_score` of up to 16 pairs of queries and keys, whose sums are in registers."""
    zero = splat(FLOATS, 0.0)
    sums = [[_variable(builder, zero) for _ in keys] for _ in queries]
    for place in itertools.chain(*sums):
        builder.store(zero, place)
    with cgutils.for_range(builder, vecs, intp=LONG) as vec:
        at = builder.mul(vec.index, constant(VECTOR))
        query_numbers = [load(builder, builder.add(query, at)) for query in queries]
        key_numbers = [load(builder, builder.add(key, at)) for key in keys]
        for numbers, places in zip(query_numbers, sums, strict=True):
            for others, place in zip(key_numbers, places, strict=True):
                builder.store(vectors.multiply_add(builder, others, numbers, builder.load(place)), place)
    pairs = [builder.load(place) for place in itertools.chain(*sums)]
    scores = _lane_sums(builder, pairs + [zero] * (LANES - len(pairs)))
    some = load(builder, factors, ir.VectorType(FLOAT, len(keys)))
    repeated = ir.Constant(INTS, [lane % len(keys) for lane in range(LANES)])
    scores = builder.fmul(scores, builder.shuffle_vector(some, some, repeated))
    for row, out in enumerate(outs):
        lanes = ir.VectorType(INT, len(keys))
        of_row = ir.Constant(lanes, [row * len(keys) + key for key in range(len(keys))])
        vectors.store(builder, builder.shuffle_vector(scores, scores, of_row), out)


def _prefetch(context, builder, signature, arguments):
    start, stride, rows, size = arguments
    lines = builder.sdiv(builder.add(size, constant(CACHE_LINE - 1)), constant(CACHE_LINE))
    with cgutils.for_range(builder, rows, intp=LONG) as row:
        at = _address(builder, start, row.index, stride)
        with cgutils.for_range(builder, lines, intp=LONG) as line:
            vectors.prefetch(builder, _address(builder, at, line.index, constant(CACHE_LINE)))
    return context.get_dummy_value()


def _cap(context, builder, signature, arguments):
    scores, vecs, soft_cap = arguments
    limit = vectors.broadcast(builder, soft_cap)
    with cgutils.for_range(builder, vecs, intp=LONG) as vec:
        at = _address(builder, scores, vec.index, constant(VECTOR))
        capped = builder.fmul(limit, _tanh(builder, builder.fdiv(load(builder, at), limit)))
        vectors.store(builder, capped, at)
    return context.get_dummy_value()


def _soften(context, builder, signature, arguments):
    scores, vecs, base, low, high, first_new, bits, v_factors, highest, total, sums, sum_vecs = arguments
    low, high, first_new, bits = (_integers(builder, number) for number in (low, high, first_new, bits))
    lanes = ir.Constant(INTS, list(range(LANES)))

    def is_visible(index: Any) -> Any:
        first = builder.add(base, builder.mul(index, constant(LANES)))
        position = builder.add(_integers(builder, first), lanes)
        is_between = builder.and_(builder.icmp_signed(">=", position, low), builder.icmp_signed("<", position, high))
        new = builder.sub(position, first_new)
        shifted = builder.lshr(bits, builder.and_(new, splat(INTS, 31)))
        is_ancestor = builder.icmp_signed("!=", builder.and_(shifted, splat(INTS, 1)), splat(INTS, 0))
        is_ancestor = builder.and_(is_ancestor, builder.icmp_unsigned("<", new, splat(INTS, 32)))
        return builder.or_(is_between, is_ancestor)

    masked = splat(FLOATS, MASKED)
    top = _variable(builder, masked)
    with cgutils.for_range(builder, vecs, intp=LONG) as vec:
        numbers = load(builder, _address(builder, scores, vec.index, constant(VECTOR)))
        numbers = builder.select(is_visible(vec.index), numbers, masked)
        builder.store(_larger(builder, numbers, builder.load(top)), top)
    before = load(builder, highest)
    above = _larger(builder, _across(builder, builder.load(top), lambda a, b: _larger(builder, a, b)), before)
    is_higher = builder.extract_element(builder.fcmp_unordered("!=", above, before), ir.Constant(INT, 0))
    with builder.if_then(is_higher):
        vectors.store(builder, above, highest)
        decay = _exp(builder, builder.fsub(before, above))
        vectors.store(builder, builder.fmul(load(builder, total), decay), total)
        with cgutils.for_range(builder, sum_vecs, intp=LONG) as vec:
            at = _address(builder, sums, vec.index, constant(VECTOR))
            vectors.store(builder, builder.fmul(load(builder, at), decay), at)
    weight_sum = _variable(builder, load(builder, total))
    with cgutils.for_range(builder, vecs, intp=LONG) as vec:
        offset = builder.mul(vec.index, constant(VECTOR))
        at = builder.add(scores, offset)
        weights = _exp(builder, builder.fsub(load(builder, at), above))
        visible = is_visible(vec.index)
        weights = builder.select(visible, weights, splat(FLOATS, 0.0))
        builder.store(builder.fadd(builder.load(weight_sum), weights), weight_sum)
        weights = builder.fmul(weights, load(builder, builder.add(v_factors, offset)))
        vectors.store(builder, builder.select(visible, weights, splat(FLOATS, 0.0)), at)
    vectors.store(builder, builder.load(weight_sum), total)
    return context.get_dummy_value()


def _add_weighted(context, builder, signature, arguments):
    sums, sum_stride, weights, weight_stride, rows, v, v_stride, count, vecs = arguments
    with cgutils.for_range(builder, _tiles(builder, vecs, MAX_VECTORS), intp=LONG) as tile:
        first_vec = builder.mul(tile.index, constant(MAX_VECTORS))
        num_vecs = _least(builder, builder.sub(vecs, first_vec), MAX_VECTORS)
        offset = builder.mul(first_vec, constant(VECTOR))
        values, sums_of_tile = builder.add(v, offset), builder.add(sums, offset)
        with cgutils.for_range(builder, _tiles(builder, rows, MAX_ROWS), intp=LONG) as group:
            first_row = builder.mul(group.index, constant(MAX_ROWS))
            num_rows = _least(builder, builder.sub(rows, first_row), MAX_ROWS)
            case = builder.add(builder.mul(num_rows, constant(MAX_VECTORS)), num_vecs)
            place = (
                _address(builder, sums_of_tile, first_row, sum_stride),
                sum_stride,
                _address(builder, weights, first_row, weight_stride),
                weight_stride,
                values,
                v_stride,
                count,
            )
            end = builder.append_basic_block("added")
            switch = builder.switch(case, end)
            for rows_of_case in range(1, MAX_ROWS + 1):
                for vecs_of_case in range(1, MAX_VECTORS + 1):
                    block = builder.append_basic_block()
                    switch.add_case(constant(rows_of_case * MAX_VECTORS + vecs_of_case), block)
                    builder.position_at_end(block)
                    _add_tile(builder, rows_of_case, vecs_of_case, *place)
                    builder.branch(end)
            builder.position_at_end(end)
    return context.get_dummy_value()


def _add_tile(builder, num_rows, num_vecs, sums, sum_stride, weights, weight_stride, v, v_stride, count) -> None:
    """`_add_weighted` of a fixed number of rows and vectors, whose sums are in registers."""
    row_sums, row_weights = [sums], [weights]
    for _ in range(num_rows - 1):
        row_sums.append(builder.add(row_sums[-1], sum_stride))
        row_weights.append(builder.add(row_weights[-1], weight_stride))
    at = [[builder.add(row, constant(VECTOR * vec)) for vec in range(num_vecs)] for row in row_sums]
    places = [[_variable(builder, load(builder, address)) for address in row] for row in at]
    with cgutils.for_range(builder, count, intp=LONG) as key:
        value = _address(builder, v, key.index, v_stride)
        numbers = [load(builder, builder.add(value, constant(VECTOR * vec))) for vec in range(num_vecs)]
        for row_weight, row in zip(row_weights, places, strict=True):
            weight = _scalar(builder, _address(builder, row_weight, key.index, constant(4)))
            for number, place in zip(numbers, row, strict=True):
                builder.store(vectors.multiply_add(builder, number, weight, builder.load(place)), place)
    for addresses, row in zip(at, places, strict=True):
        for address, place in zip(addresses, row, strict=True):
            vectors.store(builder, builder.load(place), address)


def _divide(context, builder, signature, arguments):
    out, sums, vecs, total = arguments
    divisor = _across(builder, load(builder, total), builder.fadd)
    with cgutils.for_range(builder, vecs, intp=LONG) as vec:
        offset = builder.mul(vec.index, constant(VECTOR))
        quotient = builder.fdiv(load(builder, builder.add(sums, offset)), divisor)
        vectors.store(builder, quotient, builder.add(out, offset))
    return context.get_dummy_value()


def _convert(context, builder, signature, arguments):
    out, out_stride, stored, stride, rows, vecs, kind = arguments
    end = builder.append_basic_block("converted")
    switch = builder.switch(kind, end)
    for number, (source, write) in _CONVERSIONS.items():
        block = builder.append_basic_block()
        switch.add_case(constant(number), block)
        builder.position_at_end(block)
        size = {FLOATS: 4, HALVES: 2, BYTES: 1}[source] * LANES
        with cgutils.for_range(builder, rows, intp=LONG) as row:
            out_row = _address(builder, out, row.index, out_stride)
            stored_row = _address(builder, stored, row.index, stride)
            with cgutils.for_range(builder, vecs, intp=LONG) as vec:
                numbers = load(builder, _address(builder, stored_row, vec.index, constant(size)), source)
                for half, result in enumerate(write(builder, numbers)):
                    # The second halves of bytes are the second half of the row.
                    vec_of_row = builder.add(vec.index, builder.mul(vecs, constant(half)))
                    vectors.store(builder, result, _address(builder, out_row, vec_of_row, constant(VECTOR)))
        builder.branch(end)
    builder.position_at_end(end)
    return context.get_dummy_value()


def _from_half(builder: Any, bits: Any) -> Any:
    return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), FLOATS)


def _from_e4m3(builder: Any, numbers: Any) -> Any:
    """A float16 of the same fraction and an exponent that is 8 less; NaN is the largest."""
    wide = builder.zext(numbers, HALVES)
    sign = builder.shl(builder.and_(wide, splat(HALVES, 0x80)), splat(HALVES, 8))
    magnitude = builder.and_(wide, splat(HALVES, 0x7F))
    is_nan = builder.icmp_unsigned("==", magnitude, splat(HALVES, 0x7F))
    magnitude = builder.select(is_nan, splat(HALVES, 0x7E00), builder.shl(magnitude, splat(HALVES, 7)))
    return _from_half(builder, builder.or_(sign, magnitude))


def _level(builder: Any, codes: Any) -> Any:
    """The level in steps of each code of 4 bits in int32, as `rotation.LEVELS`: 2c + 1 up to 4, then 12, 15, 20."""
    code = builder.and_(codes, splat(INTS, 7))
    level = builder.add(builder.add(code, code), splat(INTS, 1))
    for special, more in ((5, 1), (6, 2), (7, 5)):
        is_it = builder.icmp_unsigned("==", code, splat(INTS, special))
        level = builder.add(level, builder.select(is_it, splat(INTS, more), splat(INTS, 0)))
    number = builder.bitcast(builder.sitofp(level, FLOATS), INTS)
    sign = builder.shl(builder.and_(codes, splat(INTS, 8)), splat(INTS, 28))
    return builder.bitcast(builder.or_(number, sign), FLOATS)


def _from_nibbles(builder: Any, numbers: Any) -> list[Any]:
    wide = builder.zext(numbers, INTS)
    return [_level(builder, wide), _level(builder, builder.lshr(wide, splat(INTS, 4)))]


_CONVERSIONS: dict[int, Any] = {
    FLOAT32: (FLOATS, lambda builder, numbers: [numbers]),
    BFLOAT16: (HALVES, lambda builder, numbers: [vectors.from_bfloat16(builder, numbers)]),
    FLOAT16: (HALVES, lambda builder, numbers: [_from_half(builder, numbers)]),
    E4M3: (BYTES, lambda builder, numbers: [_from_e4m3(builder, numbers)]),
    E5M2: (
        BYTES,
        lambda builder, numbers: [_from_half(builder, builder.shl(builder.zext(numbers, HALVES), splat(HALVES, 8)))],
    ),
    INT8: (BYTES, lambda builder, numbers: [vectors.from_int8(builder, numbers)]),
    NIBBLES: (BYTES, _from_nibbles),
}
