"""A decode step of Llama-3-8B on an H100, as CUDA 13's compiler plans it: launches, graphs, waits of the host."""

import re
from collections import Counter
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.chips import chips
from jaxinfer.engine.options import EngineOptions
from jaxinfer.models import abstract_params
from jaxinfer.planning import PlanRequest, parse_place
from jaxinfer.planning.compiled import planned_programs, read_figures
from jaxinfer.planning.step_model import LAUNCHES_BESIDE, LAUNCHES_OF_LAYER
from jaxinfer.quantization import quantize_params
from jaxinfer.quantization.tree import num_bytes
from pallas_kernels.ahead_of_time import Compilation
from pallas_kernels.gpu_launches import LaunchPlan, compile_with_plan
from pallas_kernels.hbm_traffic import HloProgram
from tests.planning.plan_models import LLAMA_3_8B

MOST_IN_STEP = 340


@cache
def decode(
    num_layers: int, batch: int = 1, recipe: str | None = None, kv_dtype: str = "auto", num_devices: int = 1
) -> tuple[Compilation, LaunchPlan]:
    config = replace(LLAMA_3_8B, num_layers=num_layers)
    params = abstract_params(config, jnp.bfloat16)
    if recipe is not None:
        params = jax.eval_shape(lambda params: quantize_params(params, recipe), params)
    options = EngineOptions(max_model_len=8192, max_seqs=batch, kv_dtype=kv_dtype)
    spec = PlanRequest("llama", config, params, parse_place(f"h100x{num_devices}"), options).spec(compiles=True)
    program = planned_programs(spec)["decode"]
    return compile_with_plan("h100", program.function, *program.arguments, chip_mesh=spec.mesh)


def num_launches(num_layers: int, **options) -> int:
    return len(decode(num_layers, **options)[1].loop)


def test_launches_of_a_step():
    of_layer = num_launches(3) - num_launches(2)
    beside = num_launches(2) - 2 * of_layer
    print(f"8B bf16 b1: {of_layer} launches a layer, {beside} beside: {32 * of_layer + beside} in a step")
    assert of_layer == LAUNCHES_OF_LAYER <= 9
    assert beside == LAUNCHES_BESIDE <= 40
    assert 32 * of_layer + beside <= MOST_IN_STEP


@pytest.mark.parametrize("batch", [1, 64])
def test_a_dispatch_is_one_graph_and_the_host_waits_for_nothing(batch):
    plan = decode(2, batch=batch)[1]
    assert (plan.num_graphs, plan.num_waits) == (1, 0)


def test_no_array_as_large_as_a_weight_is_written():
    """With one row XLA multiplies a weight of few columns by way of all its products."""
    logits = 8 * 128256 * 4
    assert decode(2)[0].temporary_bytes <= logits + 2**20


def test_no_float32_partial_sums_at_64_rows():
    """Sums of products that are cut into parts: 96 MB a layer without an option of the compiler's."""
    program = HloProgram(decode(2, batch=64)[0].program.as_text())
    logits = 64 * LLAMA_3_8B.vocab_size
    partial_bytes = sum(
        array.num_bytes
        for instruction in program.instructions
        for array in instruction.results
        if "gemm" in instruction.name and array.dtype == "f32" and array.num_elements < logits
    )
    assert partial_bytes / 2 <= 8 * 2**20


def test_bytes_that_a_step_moves():
    """Of 32 layers, from those of 2 and 3: weights once, and attention as its kernels say."""
    two, three = (read_figures(decode(layers)[0], 1, "gpu", chips()["h100"].l2_bytes or 0) for layers in (2, 3))
    moved = two.moved_bytes + 30 * (three.moved_bytes - two.moved_bytes)
    params = abstract_params(LLAMA_3_8B, jnp.bfloat16)
    needed = num_bytes(params) - num_bytes(params["embed"])  # of which a row is read
    print(f"8B bf16 b1: {moved / 1e9:.3f} GB without attention, {moved / needed:.4f} of the weights")
    assert moved <= 1.03 * needed


def test_weights_side_by_side_are_cut_where_their_devices_are():
    """Each device has its heads of queries, keys and values: only the two sums of a layer go between devices."""
    per_layer = [
        Counter(re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(", program.as_text()))
        for program in (decode(layers, batch=8, num_devices=2)[0].program for layers in (2, 3))
    ]
    assert per_layer[1] - per_layer[0] == Counter({"all-reduce": 2})
