"""The pass that compacts a prompt of Llama-3-8B as the compilers make it: 8,192 tokens to 1,024, of 32 sequences."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.memory import activation_bytes
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.plans import GroupMove
from jaxinfer.engine.programs import program_model
from jaxinfer.engine.programs.compaction import compact_prompt, compaction_work
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import abstract_params
from jaxinfer.quantization.tree import num_bytes
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram
from tests.planning.plan_models import LLAMA_3_8B

SLOTS, CONTEXT, LAYERS = 32, 8192, 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["snapkv(1024)", "keydiff(1024)", "expected_attention(1024)"])
@pytest.mark.parametrize(
    ("chip", "platform", "kv_dtype"),
    [("v6e", "tpu", "bfloat16"), ("v6e", "tpu", "int8"), ("h100", "gpu", "bfloat16"), ("h100", "gpu", "int4")],
)
def test_it_moves_a_prompt_and_no_cache(chip, platform, kv_dtype, policy):
    """The cache is updated in place, nothing of a pool's size is copied, and temporaries are less than was counted."""
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    config = replace(LLAMA_3_8B, num_layers=LAYERS)
    options = EngineOptions(kv_policy=policy, kv_dtype=kv_dtype, max_model_len=CONTEXT, max_seqs=SLOTS)
    spec = EngineSpec(config, abstract_params(config, jnp.bfloat16), options, platform)
    model, weights = program_model(config, spec.placed_params, None, spec.policy)
    moves = tuple(GroupMove((), (), 0) for _ in spec.groups)
    work = compaction_work([0] * 32, 32, moves, spec.groups, spec.pages_per_sequence, spec.policy)
    work = jax.tree.map(lambda array: jax.ShapeDtypeStruct(np.shape(array), array.dtype), work)
    memory = ahead_of_time.compile_for(chip, compact_prompt, model, weights, spec.cache, work, SLOTS, False, None)
    pool = num_bytes(spec.cache.layers[0])
    others = (
        move for move in HloProgram(memory.program.as_text()).moves() if "dot_general" not in move.instruction.text
    )
    largest = max(move.num_bytes for move in others)
    print(
        f"{memory.seconds:.0f} s to compile; {memory.temporary_bytes:,} temporary bytes, pages of a layer {pool:,}; "
        f"{largest:,} are moved at most by what is no product of weights"
    )
    assert memory.aliased_bytes >= num_bytes(spec.cache)
    assert memory.temporary_bytes < min(activation_bytes(spec), pool / 2)
    # Scores by moments read the prompt's keys in float32, and products as large, for each query head of a key head.
    keys = CONTEXT * config.num_kv_heads * config.head_dim * 4
    assert largest < (max(pool / 4, 5 * keys) if policy.startswith("expected") else pool / 4)
