"""Products with few bits as the compiler of CUDA 13 makes them: registers, shared memory, and sums of splits."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format

from jaxinfer.quantization import quantize
from jaxinfer.quantization.matmul import matmul
from jaxinfer.quantization.on_device import OUTPUT_MAJOR
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram
from pallas_kernels.quantized_matmul import make_spec
from pallas_kernels.quantized_matmul.gpu_blocks import plan

REGISTERS = 65_536  # of a multiprocessor
CASES = [(name, rows) for name in ("int4-g128", "int4-g64", "int8-g128", "int4-g128-asym") for rows in (1, 16, 64, 128)]


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_blocks_fit_as_planned_and_spill_nothing(name, rows, tmp_path, monkeypatch):
    if (reason := ahead_of_time.missing_compiler("h100")) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    inputs, outputs = 4096, 4096
    x = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
    weight = jax.eval_shape(partial(quantize, how=name), jax.ShapeDtypeStruct((inputs, outputs), jnp.bfloat16))
    with ahead_of_time.as_if_on("h100") as whole:
        values = jax.ShapeDtypeStruct(weight.shape, weight.values.dtype, sharding=Format(OUTPUT_MAJOR, whole))
    found = ahead_of_time.compile_for("h100", matmul, x, replace(weight, values=values))
    planned = plan(make_spec(x, values, weight.zeros, None, block=weight.scheme.block, activations=None))
    text = "".join(path.read_text() for path in tmp_path.glob("*.ptxas"))
    shared = int(re.findall(r"smem_scratch_bytes=(\d+)", next(tmp_path.glob("*.resources.txt")).read_text())[0])
    (registers,) = map(int, re.findall(r"Used (\d+) registers", text))
    print(f"{name} {rows}: {registers} registers, {shared} bytes, {planned}")
    assert set(re.findall(r"(\d+) bytes spill", text)) == {"0"}
    assert shared == planned.shared_bytes
    assert -(-registers // 8) * 8 * 128 * planned.resident_blocks <= REGISTERS
    moved = sum(move.num_bytes for move in HloProgram(found.program.as_text()).moves())
    sums = 2 * 4 * planned.splits * planned.num_tiles * 64 * planned.tile_rows
    groups = 8 * rows * inputs // weight.scheme.block[0]
    assert moved <= weight.num_bytes + sums + 8 * max(rows, 8) * (inputs + outputs) + 2 * groups
