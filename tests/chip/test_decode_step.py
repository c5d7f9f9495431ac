"""A decode step of Llama-3-8B on an H100, as CUDA 13's compiler plans it: launches, graphs, waits of the host."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.engine.options import EngineOptions
from jaxinfer.models import abstract_params
from jaxinfer.planning import PlanRequest, parse_place
from jaxinfer.planning.compiled import planned_programs
from jaxinfer.quantization import quantize_params
from pallas_kernels.ahead_of_time import Compilation
from pallas_kernels.gpu_launches import LaunchPlan, compile_with_plan
from tests.planning.plan_models import LLAMA_3_8B

MOST_IN_LAYER, MOST_BESIDE, MOST_IN_STEP = 9, 40, 340


@cache
def decode(
    num_layers: int, batch: int = 1, recipe: str | None = None, kv_dtype: str = "auto"
) -> tuple[Compilation, LaunchPlan]:
    config = replace(LLAMA_3_8B, num_layers=num_layers)
    params = abstract_params(config, jnp.bfloat16)
    if recipe is not None:
        params = jax.eval_shape(lambda params: quantize_params(params, recipe), params)
    options = EngineOptions(max_model_len=8192, max_seqs=batch, kv_dtype=kv_dtype)
    spec = PlanRequest("llama", config, params, parse_place("h100x1"), options).spec(compiles=True)
    program = planned_programs(spec)["decode"]
    return compile_with_plan("h100", program.function, *program.arguments, chip_mesh=spec.mesh)


def num_launches(num_layers: int, **options) -> int:
    return len(decode(num_layers, **options)[1].loop)


def test_launches_of_a_step():
    of_layer = num_launches(3) - num_launches(2)
    beside = num_launches(2) - 2 * of_layer
    print(f"8B bf16 b1: {of_layer} launches a layer, {beside} beside: {32 * of_layer + beside} in a step")
    assert of_layer <= MOST_IN_LAYER
    assert beside <= MOST_BESIDE
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
    text = decode(2, batch=64)[0].program.as_text()
    assert "split" not in text or "f32[16,64," not in text
