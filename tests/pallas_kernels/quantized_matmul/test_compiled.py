"""What the TPU's compiler makes of products with quantized weights: the weight is read once, as it is stored."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.quantization import quantize
from jaxinfer.quantization.matmul import matmul
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram
from tests.hbm import made_in_hbm
from tests.pallas_kernels.quick import quick

K, N = 4096, 14_336  # of Llama-3-8B's feed-forward layer
FORMATS = ["int8", "int8-g128-asym", "int4", "int4-asym", "int4-g128", "int4-g128-asym", "int4-g32", "w8a8"]
FORMATS += ["fp8", "fp8-tensor", "fp8-block", "w8a8-fp8", "w8a8-fp8-block"]
CASES = [
    (chip, name, rows)
    for chip in ("v5e", "v6e", "tpu7x")
    for name in FORMATS
    for rows in (1, 64, 512)
    if chip != "tpu7x" or rows == 64
]
ALWAYS = [("v6e", "int4-g128-asym", 64), ("v6e", "w8a8-fp8-block", 64)]


# Where XLA moves more than it has to: the weight twice, or the scales once more, written as float32.
MOVES_MORE = {("v6e", "w8a8-fp8-block", 512): ("weight", 1), ("tpu7x", "int4-g32", 64): ("scales", 5)}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("chip", "name", "rows"), quick(CASES, *ALWAYS))
def test_xla_reads_the_weight_once_as_it_is_stored(chip, name, rows):
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    x = jax.ShapeDtypeStruct((rows, K), jnp.bfloat16)
    weight = jax.eval_shape(partial(quantize, how=name), jax.ShapeDtypeStruct((K, N), jnp.bfloat16))
    found = ahead_of_time.compile_for(chip, matmul, x, weight)
    program = HloProgram(found.program.as_text())
    moved = sum(move.num_bytes for move in program.moves())
    activations = 2 * rows * (K + N)
    print(f"{chip} {name} {rows} rows: {moved:,} bytes moved, {weight.num_bytes:,} of weights, {activations:,} of rows")
    what, times = MOVES_MORE.get((chip, name, rows), ("", 0))
    more = times * {"": 0, "weight": weight.num_bytes, "scales": weight.scales.size * 2}[what]
    # What is written besides is of the size of the rows.
    shapes = [r.shape for i in made_in_hbm(program, at_least=weight.num_bytes // 16) for r in i.results]
    assert [shape for shape in shapes if shape[0] != rows and (what, shape) != ("scales", weight.scales.shape)] == []
    assert found.temporary_bytes <= 2 * activations + (more if what == "scales" else 0)
    assert moved <= 1.03 * weight.num_bytes + 2 * activations + more
    assert more == 0 or moved > 1.2 * weight.num_bytes + 2 * activations  # else the table is out of date


@pytest.mark.parametrize("name", quick(["int8", "fp8", "w8a8"], "int8"))
def test_one_row_and_few_outputs_on_a_gpu(name):
    """Of keys: XLA would write the weight in float32."""
    if (reason := ahead_of_time.missing_compiler("h100")) is not None:
        pytest.skip(reason)
    x = jax.ShapeDtypeStruct((1, K), jnp.bfloat16)
    weight = jax.eval_shape(partial(quantize, how=name), jax.ShapeDtypeStruct((K, 1024), jnp.bfloat16))
    program = HloProgram(ahead_of_time.compile_for("h100", matmul, x, weight).program.as_text())
    assert sum(move.num_bytes for move in program.moves()) <= 1.1 * weight.num_bytes
