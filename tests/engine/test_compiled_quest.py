"""A decode step of Llama-3-8B under `kv_policy="quest(1024)"` as the compilers make it: 32 sequences of 8,192 tokens."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxinfer.cache import abstract_paged_cache
from jaxinfer.cache.policies import parse_policy
from jaxinfer.engine import spec as abstract
from jaxinfer.engine.abstract_work import abstract_decode_work
from jaxinfer.engine.programs import paged as paged_programs
from jaxinfer.engine.programs import program_model
from jaxinfer.models import abstract_params
from jaxinfer.quantization.tree import num_bytes
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import Program
from tests.engine.test_compiled import MAX_STEPS, abstract_slots, has_rows, is_eviction
from tests.hbm import made_in_hbm
from tests.planning.plan_models import LLAMA_3_8B

SLOTS, CONTEXT, BUDGET = 32, 8192, 1024
NUM_LAYERS, NUM_DENSE = 4, 2
MOST = 0.20  # of what a layer reads that attends to everything


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("chip", "layout", "page_size"), [("v6e", "interleaved", 64), ("h100", "separate", 16)])
def test_a_decode_step_reads_the_bounds_and_the_best_pages(chip, layout, page_size):
    """Kernels have tables of the best pages only, bounds are read once and written in place, and nothing of a weight's
    size is made."""
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    config = replace(LLAMA_3_8B, num_layers=NUM_LAYERS)
    best = parse_policy(f"quest({BUDGET})").pages(page_size)
    bounded, num_pages = range(NUM_DENSE, NUM_LAYERS), SLOTS * CONTEXT // page_size + 1
    cache = abstract_paged_cache(config, num_pages, page_size, "bfloat16", layout, bounded=bounded)
    full, bounds = num_bytes(cache.layers[0]), num_bytes(cache.layers[-1].bounds)
    params = abstract.placed_params(config, abstract_params(config, jnp.bfloat16), None)
    model, weights = program_model(config, params, None, None, best)
    slots, batch = abstract_slots(config, SLOTS)
    operands = (model, weights, cache, slots, batch, abstract_decode_work(SLOTS, CONTEXT // page_size), MAX_STEPS)
    memory = ahead_of_time.compile_for(chip, paged_programs.decode, *operands)
    open(f"/tmp/q/{chip}.hlo","w").write(memory.program.as_text())
    program = Program(memory.program.as_text())
    for mv in program.moves():
        if mv.num_bytes > 1000000: print("  ", mv.num_bytes, str(mv.instruction)[:200])
    print(f"{memory.seconds:.1f} s; {full:,} a layer; {bounds:,} bounds; temporaries {memory.temporary_bytes:,}")
    print(memory.aliased_bytes , num_bytes((cache, slots)))
