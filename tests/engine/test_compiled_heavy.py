"""Steps under `kv_policy="h2o(1024)"`, as compilers make them: 32 sequences of 8,192 tokens of Llama-3-8B's shape in
bfloat16, two layers with a small vocabulary. Keys and values are evicted where they are: no pool is copied."""

from dataclasses import replace

import pytest

from jaxinfer.engine.memory import activation_bytes
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import abstract_params
from jaxinfer.planning.compiled import chip_compiler, planned_programs
from jaxinfer.quantization.tree import num_bytes
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram
from tests.hbm import made_in_hbm
from tests.planning.plan_models import LLAMA_3_8B

CONFIG = replace(LLAMA_3_8B, num_layers=2, vocab_size=8192)
SLOTS, CONTEXT, PAGE, BUDGET = 32, 8192, 64, 1024


def compiled(chip: str, policy: str | None, program: str):
    options = EngineOptions(max_seqs=SLOTS, max_model_len=CONTEXT, page_size=PAGE, kv_policy=policy)
    spec = EngineSpec(CONFIG, abstract_params(CONFIG, "bfloat16"), options, "gpu" if chip == "h100" else "tpu")
    one = planned_programs(spec)[program]
    return spec, chip_compiler(chip, None)(one.function, one.arguments)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", ["decode", "prefill"])
@pytest.mark.parametrize("chip", ["v6e", "h100"])
def test_no_pool_is_copied(chip, program):
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    spec, found = compiled(chip, f"h2o({BUDGET})", program)
    pages, sums = map(num_bytes, spec.cache.layers[0])
    assert found.aliased_bytes >= CONFIG.num_layers * (pages + sums)
    # Sums are so few that a TPU's compiler keeps them in vector memory for a loop.
    assert sums < pages / 100
    assert made_in_hbm(HloProgram(found.program.as_text()), at_least=pages // 2) == []
    estimate = activation_bytes(spec)
    print(f"{chip}, {program}: {found.temporary_bytes:,} bytes beside, {estimate:,} estimated")
    assert found.temporary_bytes <= estimate


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_decode_moves_less_than_with_all_keys():
    """On a TPU, whose compiled program has the kernels' bytes: the kernel reads the kept 1,088 tokens, and the second
    pass gathers them, writes them and reads them again."""
    if (reason := ahead_of_time.missing_compiler("v6e")) is not None:
        pytest.skip(reason)
    spec, found = compiled("v6e", f"h2o({BUDGET})", "decode")
    full = HloProgram(compiled("v6e", None, "decode")[1].program.as_text())
    program, weights = HloProgram(found.program.as_text()), num_bytes(spec.params)
    moved = [sum(move.num_bytes for move in one.moves()) - weights for one in (full, program)]
    kept = SLOTS * (BUDGET + PAGE) * CONFIG.num_layers * 2 * 2 * CONFIG.num_kv_heads * CONFIG.head_dim
    print(f"{moved[0]:,} bytes beside the weights with all keys, {moved[1]:,} with the policy; {kept:,} are kept")
    kernels = [move.num_bytes for move in program.moves() if move.instruction.opcode == "custom-call"]
    assert kept < sum(kernels) < 1.02 * kept
    assert moved[1] < 0.65 * moved[0]
