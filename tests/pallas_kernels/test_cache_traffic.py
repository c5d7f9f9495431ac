"""What a GPU's cache serves: hand-counted programs, and bounds on any."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.chips import chips
from pallas_kernels import ahead_of_time
from pallas_kernels.cache_traffic import SHARE, through_cache
from pallas_kernels.hbm_traffic import Access, Instruction, Move, Program

MB = 10**6
# A kernel makes `made` (4 MB of the type that 1,000,000 numbers have) of `weight`, another reads it with a weight.
TEXT = """
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
    moves = Program(TEXT).moves(gpu_kernels="mosaic_gpu")
    found = {one.instruction.name: ([a.array for a in one.reads], [a.array for a in one.writes]) for one in moves}
    assert found == {
        "made": (["first"], ["made"]),
        "kernel": (["second"], ["kernel#0", "kernel#1"]),
        "again": (["kernel#1"], ["again"]),
        "last": (["made"], ["last"]),
    }
    assert [one.num_bytes / MB for one in moves] == [8, 6, 4, 8]
    assert "kernel" not in [one.instruction.name for one in Program(TEXT).moves()]


def test_a_read_is_served_while_the_cache_holds_what_was_touched_since():
    """`last` reads 4 MB that were made before 2 MB of its maker's, 6 MB, 4 MB and 2 MB of its own were touched."""
    moves = Program(TEXT).moves(gpu_kernels="mosaic_gpu")
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
    if (reason := ahead_of_time.missing_compiler("h100")) is not None:
        pytest.skip(reason)

    def normalised(x):
        return x / jnp.sum(x, axis=1, keepdims=True)

    def read(rows: int) -> list[int]:
        x = jax.ShapeDtypeStruct((rows, 4096), jnp.float32)
        text = ahead_of_time.compile_for("h100", lambda x: jnp.flip(normalised(x), 0) @ normalised(x).T, x)
        moves = Program(text.program.as_text()).moves(gpu_kernels="__cublas")
        left = through_cache(moves, chips()["h100"].l2_bytes or 0)
        return [sum(one.num_bytes for one in each) for each in (moves, left)]

    all_bytes, left = read(256)  # 4 MB
    assert left < 0.75 * all_bytes
    all_bytes, left = read(16384)  # 268 MB
    assert left > 0.95 * all_bytes


def test_half_of_the_cache_counts():
    assert SHARE == 0.5
    assert [chips()[name].l2_bytes for name in ("h100", "h200", "v6e")] == [50 * 2**20, 50 * 2**20, 0]
