"""Layers of experts as the compilers of a TPU and a GPU make them: 64 sequences of Qwen3-30B-A3B, one layer."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.models.experts import Experts, run_experts
from jaxinfer.quantization import quantize
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram
from tests.hbm import made_in_hbm
from tests.models.decoded_experts import check_decoding
from tests.pallas_kernels.quick import quick

E, D, F, C = 128, 2048, 768, 8
EXPERT = D * F  # values of one projection of one expert


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def compiled(chip: str, num_tokens: int, recipe: str | None = None, form: str | None = None):
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    weights = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((E, D, F), (E, D, F), (E, F, D))]
    if recipe is not None:
        weights = [jax.eval_shape(partial(quantize, how=recipe), weight) for weight in weights]
    x = jax.ShapeDtypeStruct((num_tokens, D), jnp.bfloat16)
    chosen, scores = (jax.ShapeDtypeStruct((num_tokens, C), dtype) for dtype in (jnp.int32, jnp.float32))

    def layer(x, chosen, scores, *weights):
        return run_experts(x, chosen, scores, Experts(*weights), swiglu, form=form)

    found = ahead_of_time.compile_for(chip, layer, x, chosen, scores, *weights)
    flops = found.cost.get("flops", 0)
    print(f"{chip} {num_tokens} {recipe} {form}: {found.temporary_bytes:,} temporary bytes, {flops:.4g} FLOPs")
    return found


def made(found, at_least: int) -> list[str]:
    return [i.name for i in made_in_hbm(HloProgram(found.program.as_text()), at_least=at_least)]


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v6e", pytest.param("v5e", marks=pytest.mark.slow)])
def test_a_tpu_computes_what_was_routed_and_writes_no_weight(chip):
    found = compiled(chip, 64)
    assert made(found, EXPERT) == []
    assert found.temporary_bytes < 2 * EXPERT
    assert found.cost["flops"] <= 1.02 * 6 * 64 * C * D * F


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "recipe"),
    [("v6e", "int8")]
    + [pytest.param("v6e", how, marks=pytest.mark.slow) for how in ("int4-g128", "mxfp4")]
    + [pytest.param("v5e", "int8", marks=pytest.mark.slow)],
)
def test_a_tpu_reads_quantized_experts_as_they_are_stored(chip, recipe):
    assert made(compiled(chip, 64, recipe), EXPERT // 2) == []


FORMS = ("int8", "int4", "int4-g128", "int4-g128-asym", "int8-g128", "int4-g32", "nf4", "nf4-dq", "mxfp4", "fp8")
FORMS += ("fp8-block", "w8a8", "w8a8-fp8", "w8a8-fp8-block")
DECODED = [
    (chip, recipe, *sizes)
    for chip in ("h100", "v6e")
    for recipe in FORMS
    for sizes in ((1, 32, 4), (8, 32, 4), (1, 8, 2), (64, 64, 8))
    if chip == "h100" or sizes[0] == 8
]


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("chip", "recipe", "num_tokens", "num_experts", "num_choices"),
    quick(DECODED, ("h100", "int4-g128", 8, 32, 4), ("h100", "nf4-dq", 1, 8, 2), ("v6e", "int4-g128", 8, 32, 4)),
)
def test_decoding_reads_the_integers_of_the_chosen_experts(chip, recipe, num_tokens, num_experts, num_choices):
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    check_decoding(chip, recipe, num_tokens, num_experts, num_choices)


def test_a_gpu_that_decodes_holds_less_than_a_stack():
    """Rows of all experts, [128, 64, 2048], are the largest thing it writes: a twelfth of one stack."""
    found = compiled("h100", 64)
    assert found.temporary_bytes < 0.15 * 2 * E * EXPERT


@pytest.mark.slow
def test_a_gpu_that_prefills_holds_one_expert_at_a_time():
    rows = 2048 * C * D * 2  # the results to be combined
    assert compiled("h100", 2048).temporary_bytes < rows + 8 * 2 * EXPERT


@pytest.mark.slow
def test_the_check_finds_what_a_ragged_product_costs_a_gpu():
    assert compiled("h100", 64, form="ragged").temporary_bytes > 0.5 * 2 * E * EXPERT
