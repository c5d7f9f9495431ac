"""The decode kernel as CUDA 13's assembler leaves it: registers, spills, shared memory, instructions of a block."""

from functools import cache

import pytest

from benchmarks import gpu_resources
from benchmarks.gpu_kernels import CACHE_DTYPES
from benchmarks.gpu_resources import GpuResources
from pallas_kernels.paged_attention.gpu_sizes import PAIR_SHARED_BYTES

# Instructions of a warp for 64 keys of a head, at most.
MOST_INSTRUCTIONS = {"bfloat16": 560, "float8_e4m3fn": 650, "float8_e5m2": 650, "int8": 850, "int4": 850}
# Two thread blocks of 128 threads share the 65,536 registers.
MOST_REGISTERS = 255


@cache
def resources(dtype: str) -> GpuResources:
    if reasons := gpu_resources.missing_tools():
        pytest.skip("; ".join(reasons))
    return gpu_resources.measure(f"decode {dtype}")


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_decode_has_few_instructions_and_no_spills(dtype):
    found = resources(dtype)
    print(f"{dtype}: {found.instructions} instructions, {found.registers} registers, {found.shared_bytes} bytes")
    assert found.spill_bytes == 0
    assert found.registers <= MOST_REGISTERS
    assert found.shared_bytes <= PAIR_SHARED_BYTES
    assert 0 < found.instructions <= MOST_INSTRUCTIONS[dtype]


def test_the_products_are_transposed():
    """Eight columns of queries: 8 products for the scores of 128 features, 8 for the values of 64 keys."""
    assert resources("bfloat16").opcodes["HGMMA"] == 16


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int4"])
def test_pairs_are_converted_by_few_instructions(dtype):
    """64 keys and values of 128 numbers are 64 pairs for each of 128 threads."""
    opcodes = resources(dtype).opcodes
    converting = {"float8_e4m3fn": ("F2FP",), "int4": ("PRMT", "LOP3")}[dtype]
    assert sum(opcodes.get(opcode, 0) for opcode in converting) <= {"float8_e4m3fn": 70, "int4": 240}[dtype]


def test_copies_complete_their_barriers():
    """A copy is signalled by 128 threads. A block of 64 keys is 4 pages of 16: 512 arrivals, for 3 blocks in flight,
    keys and values; queries are one copy, new keys and values two."""
    assert resources("bfloat16").barriers == {128: 1, 256: 1, 512: 6}
