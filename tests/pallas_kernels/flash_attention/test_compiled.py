"""The kernels compiled by the TPU's and the GPU's own compilers, and what the programs hold in memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import ahead_of_time
from pallas_kernels.flash_attention import pallas_gpu, pallas_tpu
from tests.pallas_kernels.flash_attention.shapes import MODELS, FlashShape
from tests.pallas_kernels.quick import quick

CHIPS = (
    ("v4", "pallas_tpu"),
    ("v5e", "pallas_tpu"),
    ("v6e", "pallas_tpu"),
    ("tpu7x", "pallas_tpu"),
    ("h100", "pallas_gpu"),
)
PROGRAMS = quick(
    [(chip, kernel, name) for chip, kernel in CHIPS for name in MODELS],
    ("v6e", "pallas_tpu", "llama_3_8b_chunk"),
    ("h100", "pallas_gpu", "qwen3_32b_chunk"),
)


def compile_for(chip: str, shape: FlashShape, implementation: str | None = None):
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    return ahead_of_time.compile_for(chip, shape.call(implementation), shape.abstract())


def num_bytes(shape: FlashShape, *names: str) -> int:
    arguments = shape.abstract()
    return sum(arguments[name].size * arguments[name].dtype.itemsize for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "implementation", "name"), PROGRAMS)
def test_programs_of_real_models_hold_no_scores_and_no_copy_of_the_keys(chip, implementation, name):
    shape = MODELS[name]
    found = compile_for(chip, shape, implementation)
    # Queries and results may be transposed once each, in lanes of 128; a pair of numbers for each query comes along.
    lanes = max(1, 128 // shape.head_dim)
    # The GPU kernel takes tiles of 128 queries, and one block of values of each row with what lies beyond it zeroed.
    tile = pallas_gpu.WARPGROUPS * pallas_gpu.BLOCK_QUERIES if implementation == "pallas_gpu" else 1
    num_queries = -(-shape.num_queries // tile) * tile
    rows = 2 * lanes * num_bytes(shape, "q") * num_queries // shape.num_queries + 2**21
    if tile > 1 and shape.lengths is not None:
        rows += 2 * num_bytes(shape, "v") * pallas_gpu.BLOCK_KEYS // shape.num_keys
    is_compact = shape.head_dim % 128 == 0
    if not is_compact:
        # XLA keeps such keys and values with tokens in the lanes, and the kernel needs them otherwise.
        rows += lanes * num_bytes(shape, "k", "v")
    assert found.temporary_bytes < rows
    assert found.temporary_bytes < shape.batch_size * shape.heads[0] * num_queries * 4 * 1024
    text = found.program.as_text()
    assert "custom-call" in text
    # A copy into memory space 1 is a prefetch into VMEM.
    keys = "bf16[" + ",".join(map(str, shape.abstract()["k"].shape)) + "]"
    copies = [line for line in text.splitlines() if f"= {keys}" in line and " copy(" in line]
    copies = [line for line in copies if "S(1)}" not in line.split(" copy(")[0]]
    assert not (is_compact and copies)


def test_the_memory_check_sees_the_scores_of_dense_attention():
    shape = replace(MODELS["qwen3_0_6b_prefill"], num_queries=1024)
    found = compile_for("h100", shape, "reference")
    assert found.temporary_bytes > shape.heads[0] * shape.num_queries**2 * 4


@pytest.mark.slow
def test_the_gradient_on_a_tpu_holds_no_scores():
    shape = FlashShape(2048, heads=(4, 2), head_dim=128, dtype="bfloat16", sinks=True, return_lse=False)
    if (reason := ahead_of_time.missing_compiler("v6e")) is not None:
        pytest.skip(reason)

    def loss(arguments):
        return shape.call()(arguments).astype(jnp.float32).sum()

    found = ahead_of_time.compile_for("v6e", jax.grad(loss), shape.abstract())
    assert found.temporary_bytes < 6 * num_bytes(shape, "q", "k", "v")
    assert found.temporary_bytes < shape.heads[0] * shape.num_queries**2 * 4 / 2


@pytest.mark.slow
def test_the_automatic_choice_is_the_kernel_and_its_cost_is_counted():
    shape = FlashShape(1024, heads=(2, 1), head_dim=128, dtype="bfloat16", return_lse=False)
    found = compile_for("v6e", shape)
    assert "custom-call" in found.program.as_text()
    # Half of 2 products of 1024 x 1024 x 128, for 2 heads.
    assert found.cost["flops"] == pytest.approx(2 * 2 * 2 * 1024**2 * 128 / 2, rel=0.02)


EVERYTHING = FlashShape(
    300, 1000, heads=(6, 2), segments=True, sinks=True, soft_cap=3.0, window=400, offset=(3,), lengths=(900,)
)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", quick(pallas_tpu.HEAD_DIMS, 80))
def test_every_head_dim_compiles_for_a_tpu(head_dim):
    compile_for("v6e", replace(EVERYTHING, head_dim=head_dim), "pallas_tpu")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("head_dim", quick(pallas_gpu.HEAD_DIMS, 256))
def test_every_head_dim_compiles_for_a_hopper(head_dim):
    compile_for("h100", replace(EVERYTHING, head_dim=head_dim, dtype="float16"), "pallas_gpu")
