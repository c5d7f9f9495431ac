"""Bytes read off a compiled program: as many as arithmetic says, and a planted waste is found."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import Program
from tests.hbm import made_in_hbm

# Beyond the vector memory of any chip, so that the compiler leaves it in HBM.
LARGE = jax.ShapeDtypeStruct((16384, 16384), jnp.bfloat16)
ROWS = jax.ShapeDtypeStruct((64, 16384), jnp.bfloat16)
LARGE_BYTES = 2 * 16384**2
# The small arrays of an example may be in either memory.
SLACK = 8 * 2 * ROWS.size


def compiled(function, *arguments, chip: str = "v6e", **options) -> Program:
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    return Program(ahead_of_time.compile_for(chip, function, *arguments, **options).program.as_text())


def moved(program: Program, **options) -> int:
    return sum(move.num_bytes for move in program.moves(**options))


def test_a_product_reads_its_weight_once():
    program = compiled(lambda x, w: x @ w, ROWS, LARGE)
    assert LARGE_BYTES <= moved(program) < LARGE_BYTES + SLACK
    assert made_in_hbm(program, LARGE_BYTES // 4) == []


def test_a_copy_of_a_weight_is_found():
    order = jax.ShapeDtypeStruct((16384,), jnp.int32)
    program = compiled(lambda x, w, order: x @ w[order], ROWS, LARGE, order)
    assert moved(program) > 2.9 * LARGE_BYTES
    assert made_in_hbm(program, LARGE_BYTES)


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


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="entry"):
        Program("module @jit_f {}")
