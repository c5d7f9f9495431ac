"""A decode step of Llama-3-8B under `kv_policy="quest(1024)"` as compilers make it: 32 sequences of 8,192 tokens."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxinfer.cache import abstract_paged_cache
from jaxinfer.cache.policy.kinds import parse_policy
from jaxinfer.engine import spec as abstract
from jaxinfer.engine.abstract_work import abstract_decode_work
from jaxinfer.engine.programs import paged as paged_programs
from jaxinfer.engine.programs import program_model
from jaxinfer.models import abstract_params
from jaxinfer.quantization.tree import num_bytes
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram
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
    best = parse_policy(f"quest({BUDGET})").bound(page_size, None)
    bounded, num_pages = range(NUM_DENSE, NUM_LAYERS), SLOTS * CONTEXT // page_size + 1

    def leaves(layer, pages):
        return best.page_leaves(config, layer, pages, "bfloat16", layout)

    cache = abstract_paged_cache(config, num_pages, page_size, "bfloat16", layout, leaves=leaves)
    full, bounds = num_bytes(cache.layers[0]), num_bytes(cache.layers[-1].leaves)
    params = abstract.placed_params(config, abstract_params(config, jnp.bfloat16), None)
    model, weights = program_model(config, params, policy=best)
    slots, batch = abstract_slots(config, SLOTS)
    operands = (model, weights, cache, slots, batch, abstract_decode_work(SLOTS, CONTEXT // page_size), MAX_STEPS)
    memory = ahead_of_time.compile_for(chip, paged_programs.decode, *operands)
    program = HloProgram(memory.program.as_text())
    assert memory.aliased_bytes >= num_bytes((cache, slots))
    smallest = min(num_bytes(leaf) for leaf in weights if leaf.ndim == 2)
    assert memory.temporary_bytes < smallest + 8 * 4 * SLOTS * config.vocab_size
    # Where a program returns the bounds of all pages, it has written those of the filled ones in place.
    shape = cache.layers[-1].leaves.shape
    moves = program.moves()
    written = [move for move in moves if any(array.shape == shape for array in move.instruction.results)]
    assert len(written) == len(bounded)
    assert max(move.num_bytes for move in written) < bounds / 4
    if chip == "v6e":
        kernels = sorted(move.num_bytes for move in moves if move.instruction.opcode == "custom-call")
        assert len(kernels) == NUM_LAYERS
        assert kernels[NUM_DENSE] > 0.99 * full
        pages = kernels[0]
        # In a loop, whose gathers together take every page of the tables; they stay in vector memory.
        gathers = [move.instruction for move in moves if "gather" in move.instruction.name]
        gathers = [one for one in gathers if one.results[0].shape[1:] == shape[1:]]
        assert [one.results[0].in_hbm for one in gathers] == [False] * len(bounded)
        read = bounds
        large = made_in_hbm(program, at_least=smallest)
        assert [str(one) for one in large if not (has_rows(one, SLOTS) or is_eviction(one))] == []
    else:  # a kernel there states what its table may hold at most
        tables = [line for line in memory.program.as_text().splitlines() if 'custom_call_target="mosaic_gpu' in line]
        assert sum(f"s32[{SLOTS},{best.num_pages + 1}]" in line for line in tables) == len(bounded)
        pages = SLOTS * best.num_kept * full // (num_pages * page_size)
        scores = (SLOTS, CONTEXT // page_size, config.num_kv_heads, config.num_heads // config.num_kv_heads)
        sums = [move.num_bytes for move in moves if move.instruction.results[0].shape == scores]
        read = max(sums)
        assert sum(bounds < size < 1.1 * bounds for size in sums) == len(bounded)
    filled = SLOTS * page_size * full // (num_pages * page_size)
    share = (pages + read + filled) / full
    of_model = (NUM_DENSE + (32 - NUM_DENSE) * share) / 32
    print(
        f"{memory.seconds:.1f} s to compile; of {full:,} bytes a layer, one that chooses reads {pages:,} of pages, "
        f"{read:,} of bounds and at most {filled:,} of filled pages: {share:.4f}; all 32 layers, of which {NUM_DENSE} "
        f"attend to everything: {of_model:.4f}; {memory.temporary_bytes:,} temporaries"
    )
    assert share <= MOST
