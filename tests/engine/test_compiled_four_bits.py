"""A decode step of Llama-3-8B over an int4 cache as the compilers make it: 32 sequences of 8,192 tokens."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxinfer.cache import abstract_paged_cache
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

SLOTS, CONTEXT = 32, 8192
MOST = 0.30  # of bfloat16's bytes


def pages_of(config, dtype: str, layout: str, page_size: int):
    return abstract_paged_cache(config, SLOTS * CONTEXT // page_size + 1, page_size, dtype, layout)


@pytest.mark.parametrize(("layout", "page_size"), [("interleaved", 64), ("separate", 32)])
def test_an_int4_cache_of_llama_3_8b_is_less_than_a_third(layout, page_size):
    """Of the layouts of TPUs and GPUs, scales and padding included."""
    wide, narrow = (num_bytes(pages_of(LLAMA_3_8B, dtype, layout, page_size)) for dtype in ("bfloat16", "int4"))
    print(f"{layout}: {narrow:,} bytes of {wide:,}: {narrow / wide:.4f}")
    assert 0.25 < narrow / wide <= MOST


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_layers", [2])
@pytest.mark.parametrize(("chip", "layout", "page_size"), [("v6e", "interleaved", 64), ("h100", "separate", 32)])
def test_a_decode_step_reads_the_four_bits(chip, layout, page_size, num_layers):
    """The kernels move less than a third of what bfloat16's pages have, and nothing of a weight's size is made."""
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    config = replace(LLAMA_3_8B, num_layers=num_layers)
    cache, in_bfloat16 = (pages_of(config, dtype, layout, page_size) for dtype in ("int4", "bfloat16"))
    params = abstract.placed_params(config, abstract_params(config, jnp.bfloat16), None)
    model, weights = program_model(config, params, None)
    slots, batch = abstract_slots(config, SLOTS)
    operands = (model, weights, cache, slots, batch, abstract_decode_work(SLOTS, CONTEXT // page_size), MAX_STEPS)
    memory = ahead_of_time.compile_for(chip, paged_programs.decode, *operands)
    program = HloProgram(memory.program.as_text())
    kernels = [move.num_bytes for move in program.moves() if move.instruction.opcode == "custom-call"]
    wide = num_bytes(in_bfloat16)
    print(
        f"{memory.seconds:.1f} s to compile; {num_bytes(cache):,} bytes of pages, {wide:,} in bfloat16; the kernels "
        f"move {sum(kernels):,}: {sum(kernels) / wide:.4f}; {memory.temporary_bytes:,} temporaries"
    )
    assert memory.aliased_bytes >= num_bytes((cache, slots))
    smallest = min(num_bytes(leaf) for leaf in weights if leaf.ndim == 2)
    assert memory.temporary_bytes < smallest + 8 * 4 * SLOTS * config.vocab_size
    if chip == "h100":  # a kernel there states what its sequences may hold at most
        assert memory.program.as_text().count('custom_call_target="mosaic_gpu') >= num_layers
        assert num_bytes(cache) <= MOST * wide
        return
    assert len(kernels) == num_layers
    assert 0.2 * wide < sum(kernels) <= MOST * wide
    large = made_in_hbm(program, at_least=smallest)
    assert [str(one) for one in large if not (has_rows(one, SLOTS) or is_eviction(one))] == []
