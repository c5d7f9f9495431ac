"""Thread blocks of the GPU kernel: enough of them, and enough bytes on the way to each multiprocessor."""

import pytest

from pallas_kernels.quantized_matmul.gpu_blocks import MULTIPROCESSORS, SHARED_BYTES, plan
from pallas_kernels.quantized_matmul.specs import MatmulSpec

# [K, N] of Llama-3-8B: outputs, queries with keys and values, gate with up, down, logits.
LLAMA_3_8B = [(4096, 4096), (4096, 6144), (4096, 28_672), (14_336, 4096), (4096, 128_256)]


def spec(inputs: int, outputs: int, dtype: str = "int4", rows: int = 1, group: int = 128) -> MatmulSpec:
    return MatmulSpec(rows, inputs, outputs, "bfloat16", dtype, (group, 1), False, False, False, None)


@pytest.mark.parametrize("dtype", ["int4", "int8"])
@pytest.mark.parametrize(("inputs", "outputs"), LLAMA_3_8B)
def test_one_row_keeps_the_whole_chip_busy(inputs, outputs, dtype):
    """Two blocks or more on nearly every multiprocessor, and 64 KB of weights on their way to each."""
    found = plan(spec(inputs, outputs, dtype))
    print(f"{dtype} {inputs} x {outputs}: {found}, {found.bytes_in_flight // 1024} KB in flight, {found.balance:.2f}")
    assert found.stages == 8
    assert found.num_blocks > 1.9 * MULTIPROCESSORS
    assert found.resident_blocks >= 2
    assert found.bytes_in_flight >= 64 * 1024
    assert found.balance > 0.9
    sums = 4 * found.splits * found.tile_rows * outputs
    assert sums <= 0.07 * inputs * outputs * (0.5 if dtype == "int4" else 1)


def test_splits_of_each_product():
    splits = [plan(spec(inputs, outputs)).splits for inputs, outputs in LLAMA_3_8B]
    assert splits == [4, 4, 2, 4, 1]
    # A stack of 1,024 outputs has 16 tiles: 4 splits of 8 groups, and no more, which would have too few to overlap.
    assert plan(spec(4096, 1024)).splits == 4
    assert plan(spec(256, 64)).splits == 1


@pytest.mark.parametrize("rows", [1, 8, 16, 64, 128, 512])
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_a_multiprocessor_has_room(dtype, rows):
    for inputs, outputs in LLAMA_3_8B:
        found = plan(spec(inputs, outputs, dtype, rows))
        assert found.resident_blocks * found.shared_bytes <= SHARED_BYTES
        assert found.steps * found.splits * 128 == inputs
        assert found.stages >= 4
        # Sums of splits take at most half of the weight's bytes.
        assert (
            found.splits == 1 or 2 * 4 * found.splits * found.num_tiles * 64 * found.tile_rows <= 2 * inputs * outputs
        )
        if rows <= 64:
            assert found.resident_blocks >= 2
