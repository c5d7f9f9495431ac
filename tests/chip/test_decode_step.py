"""A decode step of Llama-3-8B on an H100, as CUDA 13's compiler plans it: launches, graphs, waits of the host."""

import re
from collections import Counter

import jax.numpy as jnp
import pytest

from benchmarks.decode_step import decode, launches
from jaxinfer.chips import chips
from jaxinfer.models import abstract_params
from jaxinfer.planning.compiled import read_figures
from jaxinfer.planning.step_model import LAUNCHES_BESIDE, LAUNCHES_OF_LAYER
from jaxinfer.quantization.tree import num_bytes
from pallas_kernels.hbm_traffic import HloProgram
from tests.planning.plan_models import LLAMA_3_8B

MOST_IN_STEP = 340


def test_launches_of_a_step():
    one = launches(1)
    print(f"8B bf16 b1: {one.of_layer} launches a layer, {one.beside} beside: {one.in_step} in a step")
    assert one.of_layer == LAUNCHES_OF_LAYER <= 9
    assert one.beside == LAUNCHES_BESIDE <= 40
    assert one.in_step <= MOST_IN_STEP


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
    """Those of 32 layers, from 2 and 3 layers: weights once, and attention as its kernels say."""
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
