"""Bytes read off a compiled program: as many as arithmetic says, a planted waste is found, and what a GPU's cache
serves in hand-counted programs, with bounds on any."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl

from jaxinfer.chips import chips
from pallas_kernels import ahead_of_time, mosaic_gpu_compat
from pallas_kernels.hbm_traffic import CACHE_SHARE, Access, HloProgram, Instruction, Move, through_cache
from tests.hbm import made_in_hbm

# Beyond the vector memory of any chip, so that the compiler leaves it in HBM.
LARGE = jax.ShapeDtypeStruct((16384, 16384), jnp.bfloat16)
ROWS = jax.ShapeDtypeStruct((64, 16384), jnp.bfloat16)
LARGE_BYTES = 2 * 16384**2
# The small arrays of an example may be in either memory.
SLACK = 8 * 2 * ROWS.size


def compiled(function, *arguments, chip: str = "v6e", **options) -> HloProgram:
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    return HloProgram(ahead_of_time.compile_for(chip, function, *arguments, **options).program.as_text())


def moved(program: HloProgram, **options) -> int:
    return sum(move.num_bytes for move in program.moves(**options))


def test_a_product_reads_its_weight_once():
    program = compiled(lambda x, w: x @ w, ROWS, LARGE)
    assert LARGE_BYTES <= moved(program) < LARGE_BYTES + SLACK
    assert made_in_hbm(program, LARGE_BYTES // 4) == []


@pytest.mark.slow
def test_a_copy_of_a_weight_is_found():
    order = jax.ShapeDtypeStruct((16384,), jnp.int32)
    program = compiled(lambda x, w, order: x @ w[order], ROWS, LARGE, order)
    assert moved(program) > 2.9 * LARGE_BYTES
    assert made_in_hbm(program, LARGE_BYTES)


@pytest.mark.slow
def test_a_gather_counts_its_rows_and_an_update_in_place_its_values():
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    assert moved(compiled(lambda w, ids: w[ids], LARGE, ids)) < SLACK

    def write(w, ids, x):
        return w.at[ids].set(x, mode="drop")

    program = compiled(write, LARGE, ids, ROWS, donate_argnums=(0,))
    assert moved(program) < SLACK
    assert made_in_hbm(program, LARGE_BYTES) == []
    # An argument that is not donated has to be copied first.
    program = compiled(write, LARGE, ids, ROWS)
    assert moved(program) > 2 * LARGE_BYTES
    assert made_in_hbm(program, LARGE_BYTES)


@pytest.mark.slow
def test_a_conditional_runs_its_false_branch_unless_told():
    is_needed = jax.ShapeDtypeStruct((), jnp.bool_)

    def maybe(is_needed, x, w):
        return lax.cond(is_needed, lambda: x @ w, lambda: x)

    program = compiled(maybe, is_needed, ROWS, LARGE)
    assert moved(program) < SLACK
    assert LARGE_BYTES <= moved(program, takes_branches=True) < LARGE_BYTES + SLACK


def test_a_loop_counts_once_unless_told_its_length():
    def many(count, x, w):
        return lax.while_loop(lambda carry: carry[0] < count, lambda carry: (carry[0] + 1, carry[1] @ w), (0, x))

    program = compiled(many, jax.ShapeDtypeStruct((), jnp.int32), ROWS, LARGE)
    assert LARGE_BYTES <= moved(program) < LARGE_BYTES + SLACK
    assert 3 * LARGE_BYTES <= moved(program, loop_trips=3) < 3 * (LARGE_BYTES + SLACK)


def test_a_kernel_counts_what_its_estimate_says_and_needs_one():
    def kernel(x, out):
        out[...] = x[...] + 1

    def call(estimate):
        x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
        return compiled(lambda x: pl.pallas_call(kernel, out_shape=x, cost_estimate=estimate)(x), x)

    program = call(pl.CostEstimate(flops=1, transcendentals=0, bytes_accessed=123_456))
    assert 123_456 in [move.num_bytes for move in program.moves()]
    with pytest.raises(ValueError, match="no cost estimate"):
        call(None).moves()


@pytest.mark.slow
def test_a_ragged_product_reads_each_expert_once():
    """It is a kernel of the compiler's own, without an estimate."""
    experts = jax.ShapeDtypeStruct((8, 8192, 2048), jnp.bfloat16)
    rows, sizes = jax.ShapeDtypeStruct((128, 8192), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.int32)
    program = compiled(lax.ragged_dot, rows, experts, sizes, chip="v5e")
    assert 2 * experts.size <= moved(program) < 2 * experts.size + 4 * 2 * rows.size


def test_what_is_executed_counts_loops_and_looks_inside():
    def several_times(x, w, count):
        return lax.fori_loop(0, count, lambda _, x: jnp.tanh(x @ w), x)

    def count(opcode: str, **options) -> int:
        return sum(times for one, times in program.executed(**options) if one.opcode == opcode)

    program = compiled(several_times, ROWS, LARGE, jax.ShapeDtypeStruct((), jnp.int32))
    assert count("tanh") == 1
    assert count("tanh", loop_trips=4) == 4
    assert count("while", loop_trips=4) == 0


# Of a GPU's programs, whose compiler counts no bytes: as many as their arrays have.
N = 4096
SQUARE, COLUMN = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((N, N), (N, 256)))
SQUARE_BYTES, COLUMN_BYTES = 2 * N * N, 2 * N * 256


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (lambda x: jnp.flip(x, 0), (SQUARE,), 2 * SQUARE_BYTES),
        (lambda w, x: w @ x, (SQUARE, SQUARE), 3 * SQUARE_BYTES),
        (lambda x: x + jnp.flip(x, 0) * x, (SQUARE,), 2 * SQUARE_BYTES),
        (lambda x: x[:1024].astype(jnp.float32), (SQUARE,), (SQUARE_BYTES + 2 * SQUARE_BYTES) // 4),
        (lambda x: x.astype(jnp.float32)[::4], (SQUARE,), (SQUARE_BYTES + 2 * SQUARE_BYTES) // 4),
    ],
    ids=["copy", "product", "twice", "slice", "slice of a conversion"],
)
def test_a_gpu_moves_what_arithmetic_says(function, arguments, expected):
    assert moved(compiled(function, *arguments, chip="h100")) == expected


def test_a_gpu_that_updates_in_place_moves_the_update():
    def write(x, start, row):
        return lax.dynamic_update_slice_in_dim(x, row * 2, start, 0)

    row, start = jax.ShapeDtypeStruct((1, N), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.int32)
    program = compiled(write, SQUARE, start, row, chip="h100", donate_argnums=(0,))
    assert moved(program) == 2 * 2 * N + 4  # the row, read and written, and its place


def test_a_gpu_loop_counts_its_trips():
    def many(x, w):
        return lax.fori_loop(0, 7, lambda _, x: jnp.tanh(w @ x), x)

    def one(x, w):
        return jnp.tanh(w @ x)

    seven, single = (moved(compiled(function, COLUMN, SQUARE, chip="h100")) for function in (many, one))
    assert 7 * SQUARE_BYTES <= 7 * single <= seven <= 7 * single + 7 * 2 * 2 * COLUMN_BYTES  # which it may copy


def hlo(body: str, *, fused: str = "") -> HloProgram:
    """A program with the arrays x and y and the index s."""
    text = f"""
{fused}
ENTRY %main (x: f32[1000], y: f32[1000], s: s32[]) -> f32[1000] {{
  %x = f32[1000]{{0}} parameter(0)
  %y = f32[1000]{{0}} parameter(1)
  %s = s32[] parameter(2)
{body}
}}
"""
    return HloProgram(text)


UPDATES = """
%fused (a: f32[1000], b: f32[1000], c: f32[1000], d: s32[]) -> (f32[1000], f32[1000], f32[10]) {
  %a = f32[1000]{0} parameter(0)
  %b = f32[1000]{0} parameter(1)
  %c = f32[1000]{0} parameter(2)
  %d = s32[] parameter(3)
  %part = f32[10]{0} dynamic-slice(%a, %d), dynamic_slice_sizes={10}
  %other = f32[10]{0} slice(%c), slice={[0:10]}
  %sum = f32[10]{0} add(%part, %other)
  %one = f32[1000]{0} dynamic-update-slice(%a, %sum, %d)
  %two = f32[1000]{0} dynamic-update-slice(%b, %other, %d)
  ROOT %all = (f32[1000]{0}, f32[1000]{0}, f32[10]{0}) tuple(%one, %two, %sum)
}
"""


def test_a_fusion_that_updates_several_arrays_writes_the_updates():
    """It reads what it adds to, as 10 elements of 3 arrays, and an index."""
    body = "  ROOT %f = (f32[1000]{0}, f32[1000]{0}, f32[10]{0}) fusion(%x, %y, %x, %s), kind=kLoop, calls=%fused"
    (move,) = hlo(body, fused=UPDATES).moves()
    assert [access.num_bytes for access in move.writes] == [40, 40, 40]
    assert {access.array: access.num_bytes for access in move.reads} == {"x": 80, "s": 4}


RELAID = """
%relaid (a: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  ROOT %copy = f32[1000]{0} copy(%a)
}

%fused (a: f32[1000], d: s32[]) -> f32[10] {
  %a = f32[1000]{0} parameter(0)
  %d = s32[] parameter(1)
  %all = f32[1000]{0} fusion(%a), kind=kLoop, calls=%relaid
  ROOT %part = f32[10]{0} dynamic-slice(%all, %d), dynamic_slice_sizes={10}
}
"""


def test_a_slice_of_what_an_inner_fusion_makes_reads_the_slice():
    """An expert of a stack in other tiles, as XLA:TPU writes it."""
    (move,) = hlo("  ROOT %f = f32[10]{0} fusion(%x, %s), kind=kLoop, calls=%fused", fused=RELAID).moves()
    assert {access.array: access.num_bytes for access in move.reads} == {"x": 40, "s": 4}


def test_kernels_of_a_gpu_count_their_estimate_or_all_their_arrays():
    target = 'custom_call_target="%s"'
    plain = f"  ROOT %c = f32[1000]{{0}} custom-call(%x, %y, %x), {target % 'mosaic_gpu_v2'}"
    assert moved(hlo(plain)) == 3 * 4000
    assert moved(hlo(plain + ', frontend_attributes={bytes_accessed="5000"}')) == 5000
    in_place = f"  ROOT %c = (f32[1000]{{0}}, f32[1000]{{0}}) custom-call(%x, %y), {target % 'mosaic_gpu_v2'}"
    in_place += ", output_to_operand_aliasing={{1}: (1, {})}"
    assert moved(hlo(in_place + ', frontend_attributes={bytes_accessed="4100"}')) == 4100
    library = f"  ROOT %c = (f32[1000]{{0}}, s8[9999]{{0}}) custom-call(%x, %y), {target % '__cublas$gemm'}"
    assert moved(hlo(library)) == 3 * 4000
    assert moved(hlo(f"  ROOT %c = f32[1000]{{0}} custom-call(%x), {target % 'Sharding'}")) == 0


def test_a_kernel_writes_its_estimate_into_a_gpus_program():
    def body(x, out):
        out[...] = x[...] + 1

    x, cost = jax.ShapeDtypeStruct((128,), jnp.float32), pl.CostEstimate(1, 0, 98_765)
    kernel = mosaic_gpu_compat.kernel(body, out_type=x, name="add", cost_estimate=cost)
    assert moved(compiled(kernel, x, chip="h100")) == 98_765


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="entry"):
        HloProgram("module @jit_f {}")


MB = 10**6
# A kernel makes `made` (4 MB of the type that 1,000,000 numbers have) of `weight`, another reads it with a weight.
TWO_KERNELS = """
HloModule two, is_scheduled=true

%double (parameter_0: f32[1000000]) -> f32[1000000] {
  %parameter_0 = f32[1000000]{0} parameter(0)
  ROOT %add = f32[1000000]{0} add(%parameter_0, %parameter_0)
}

ENTRY %main (first: f32[1000000], second: f32[500000]) -> f32[1000000] {
  %first = f32[1000000]{0} parameter(0)
  %second = f32[500000]{0} parameter(1)
  %made = f32[1000000]{0} fusion(%first), kind=kLoop, calls=%double
  %seen = f32[1000,1000]{1,0} bitcast(%made)
  %kernel = (f32[500000]{0}, f32[500000]{0}) custom-call(%second), custom_call_target="mosaic_gpu_v2"
  %half = f32[500000]{0} get-tuple-element(%kernel), index=1
  %again = f32[500000]{0} negate(%half)
  ROOT %last = f32[1000,1000]{1,0} negate(%seen)
}
"""


def move(name: str, reads: dict[str, int], writes: dict[str, int], times: int = 1) -> Move:
    accesses = [tuple(Access(one, size, size) for one, size in side.items()) for side in (reads, writes)]
    total = times * sum(one.num_bytes for side in accesses for one in side)
    return Move(Instruction(name, "fusion", (), (), "", False), total, *accesses, times=times)


def saved(moves: list[Move], l2_bytes: float, **options) -> list[int]:
    found = through_cache(moves, l2_bytes, **options)
    return [one.num_bytes - left.num_bytes for one, left in zip(moves, found, strict=True)]


def test_accesses_name_what_made_an_array():
    moves = HloProgram(TWO_KERNELS).moves()
    found = {one.instruction.name: ([a.array for a in one.reads], [a.array for a in one.writes]) for one in moves}
    assert found == {
        "made": (["first"], ["made"]),
        "kernel": (["second"], ["kernel#0", "kernel#1"]),
        "again": (["kernel#1"], ["again"]),
        "last": (["made"], ["last"]),
    }
    assert [one.num_bytes / MB for one in moves] == [8, 6, 4, 8]


def test_a_read_is_served_while_the_cache_holds_what_was_touched_since():
    """`last` reads 4 MB that were made before 2 MB of its maker's, 6 MB, 4 MB and 2 MB of its own were touched."""
    moves = HloProgram(TWO_KERNELS).moves()
    assert saved(moves, 18 * MB + 1, share=1.0) == [0, 0, 2 * MB, 4 * MB]
    assert saved(moves, 18 * MB - 1, share=1.0) == [0, 0, 2 * MB, 0]
    assert saved(moves, 2 * 18 * MB - 1) == [0, 0, 2 * MB, 0]
    assert saved(moves, 0) == [0, 0, 0, 0]


def test_a_large_product_evicts_what_it_makes_and_what_it_reads_late():
    """Half of a weight of 100 MB is read after the average byte of the result is written."""
    product = move("product", {"x": 1 * MB, "w": 100 * MB}, {"y": 1 * MB})
    rest = [move("next", {"y": 1 * MB}, {"z": 1 * MB}), move("other", {"z": 1 * MB, "v": 100 * MB}, {})]
    assert saved([product, *rest], 50 * MB) == [0, 0, 0]
    assert saved([product, *rest], 110 * MB) == [0, 1 * MB, 1 * MB]


def test_a_part_of_an_array_is_not_all_of_it():
    part = Move(Instruction("part", "fusion", (), (), "", False), MB, (Access("w", MB, 10 * MB),))
    whole = Move(Instruction("whole", "fusion", (), (), "", False), 10 * MB, (Access("w", 10 * MB, 10 * MB),))
    assert saved([part, whole], 50 * MB) == [0, 0]
    assert saved([whole, part], 50 * MB) == [0, MB]


SIZES = st.integers(1, 30)
KERNELS = st.lists(
    st.tuples(st.dictionaries(st.sampled_from("abcdef"), SIZES, max_size=3), SIZES, st.integers(1, 3)), max_size=12
)


@given(KERNELS, st.integers(0, 60), st.integers(0, 60))
def test_a_cache_serves_reads_only_and_a_larger_one_more(kernels, one, two):
    moves = [move(f"k{n}", reads, {f"o{n}": size}, times) for n, (reads, size, times) in enumerate(kernels)]
    small, large = sorted((one, two))
    for given_up, less in zip(saved(moves, large), saved(moves, small), strict=True):
        assert 0 <= less <= given_up
    for made, left in zip(moves, through_cache(moves, large), strict=True):
        assert left.num_bytes >= made.times * sum(access.num_bytes for access in made.writes)


def test_a_compiled_chain_reads_its_small_results_from_the_cache():
    """Sums of the rows of an array, which a second kernel reads with the array again."""

    def normalised(x):
        return x / jnp.sum(x, axis=1, keepdims=True)

    def read(rows: int) -> list[int]:
        x = jax.ShapeDtypeStruct((rows, 4096), jnp.float32)
        program = compiled(lambda x: jnp.flip(normalised(x), 0) @ normalised(x).T, x, chip="h100")
        moves = program.moves()
        left = through_cache(moves, chips()["h100"].l2_bytes or 0)
        return [sum(one.num_bytes for one in each) for each in (moves, left)]

    all_bytes, left = read(256)  # 4 MB
    assert left < 0.75 * all_bytes
    all_bytes, left = read(16384)  # 268 MB
    assert left > 0.95 * all_bytes


def test_half_of_the_cache_counts():
    assert CACHE_SHARE == 0.5
    assert [chips()[name].l2_bytes for name in ("h100", "h200", "v6e")] == [50 * 2**20, 50 * 2**20, 0]


def test_what_a_kernel_reads_from_vector_memory_is_free():
    """The compiler copies small arrays there; an estimate of all arrays in full counts them as if they were in HBM."""
    text = """
ENTRY %main (first: f32[256]) -> f32[256] {
  %first = f32[256]{0} parameter(0)
  %moved = f32[256]{0:S(1)} copy(%first)
  ROOT %kernel = f32[256]{0} custom-call(%moved), custom_call_target="tpu_custom_call", CONFIG
}
"""
    for estimate, moved in ((2048, 1024), (1500, 1500)):  # of both arrays, or of a part of them
        config = f'backend_config={{"cost_estimate":{{"flops":"0","bytes_accessed":"{estimate}"}}}}'
        moves = HloProgram(text.replace("CONFIG", config)).moves()
        assert [move.num_bytes for move in moves] == [1024, moved]
