"""Programs of adapters by the compilers of TPUs and GPUs: stacks are read as they are, and no copy of one is made."""

import math
from functools import partial

import jax
import pytest

from pallas_kernels import ahead_of_time
from pallas_kernels.adapter_matmul import add_adapters
from pallas_kernels.hbm_traffic import HloProgram
from tests.hbm import made_in_hbm
from tests.pallas_kernels.quick import quick

# Inputs and outputs of Llama-3-8B's weights, those of the same inputs together.
WEIGHTS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "output": (4096, (4096,)),
    "gate_up": (4096, (14_336, 14_336)),
    "down": (14_336, (4096,)),
}
CASES = [(chip, name) for chip in ("v6e", "h100") for name in WEIGHTS]
ROWS = 32


def compiled(chip: str, name: str, slots: int, rank: int, rows: int = ROWS):
    """The program for bfloat16, and the bytes of its stacks and of its rows: x, and the products in and out."""
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    inputs, outputs = WEIGHTS[name]

    def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    products = [array(rows, count) for count in outputs]
    stacks = [(array(slots, rank, inputs), array(slots, rank, count)) for count in outputs]
    integers = array(rows, dtype="int32"), array(slots, dtype="int32")
    add = partial(add_adapters, implementation="xla")
    program = ahead_of_time.compile_for(
        chip, add, array(rows, inputs), products, stacks, *integers, donate_argnums=(1,)
    )
    sizes = [math.prod(stack.shape) for pair in stacks for stack in pair]
    return program, 2 * sum(sizes), 2 * rows * (inputs + 2 * sum(outputs)), min(sizes)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("chip", "name"), quick(CASES, ("v6e", "qkv"), ("h100", "qkv")))
def test_few_slots_are_read_once(chip, name):
    """On a GPU float32 sums are written to memory and read again, four bytes of each output each time, and so are the
    parts into which inputs are divided."""
    found, stacks, rows, smallest = compiled(chip, name, slots=8, rank=16)
    program = HloProgram(found.program.as_text())
    moved = sum(move.num_bytes for move in program.moves())
    print(f"{chip} {name}: {moved:,} bytes moved, {stacks:,} of stacks, {rows:,} of rows")
    made = {result.shape[-2:] for i in made_in_hbm(program, at_least=smallest) for result in i.results if result.shape}
    assert {shape[0] for shape in made} <= {ROWS}  # arrays of rows, not of stacks
    if chip == "v6e":
        assert moved <= 1.05 * (stacks + rows)
        assert found.temporary_bytes == 0
    else:
        assert moved <= 2 * (stacks + rows)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("chip", "name"), quick(CASES, ("v6e", "qkv")))
@pytest.mark.parametrize("rows", quick([32, 2048], 32))
def test_of_many_slots_nothing_is_copied(chip, name, rows):
    """Bytes of temporaries are those of a block of rows in float32, and of a block of ranks."""
    found, stacks, _, _ = compiled(chip, name, slots=64, rank=64, rows=rows)
    widest = max(WEIGHTS[name][0], sum(WEIGHTS[name][1]))
    print(f"{chip} {name}, {rows} rows: {found.temporary_bytes:,} bytes of temporaries, {stacks:,} of stacks")
    assert found.temporary_bytes <= 8 * widest * (min(rows, 256) + 2 * 32)
