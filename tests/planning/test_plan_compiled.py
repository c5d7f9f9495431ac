"""Plans as the real compilers make them: of few layers against whole, and of whole models within two minutes."""

import json
import os
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.models import abstract_params
from jaxinfer.planning import changes, compiled, make_plan
from jaxinfer.planning.compiled import chip_compiler, compile_programs
from jaxinfer.planning.counted import count
from jaxinfer.quantization import quantize_params
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.speculative import ModelDraft
from pallas_kernels import ahead_of_time
from pallas_kernels.ahead_of_time import Compilation
from pallas_kernels.hbm_traffic import HloProgram
from tests.planning.plan_models import GEMMA_3_27B, LLAMA_3_8B, LLAMA_3_70B, MIXTRAL_8X7B, TINY

# Of memory and of bytes moved, between a program of all layers and what few layers say of it.
BOUND = 0.02


def needs(chip: str) -> None:
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)


def test_what_asynchronous_operations_send():
    """As a GPU's compiler writes them: the operands come before the results, which are all that is counted."""
    text = """
ENTRY %main (a: f32[8,16], b: bf16[2,4]) -> f32[2,16] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = bf16[2,4]{1,0} parameter(1)
  %g = ((f32[8,16]{1,0}, bf16[2,4]{1,0}), (f32[32,16]{1,0}, bf16[8,4]{1,0})) all-gather-start(%a, %b), dimensions={0}
  %h = (f32[32,16]{1,0}, bf16[8,4]{1,0}) all-gather-done(%g)
  %s = (f32[8,16]{1,0}, f32[2,16]{1,0}) reduce-scatter-start(%a), dimensions={0}
  ROOT %t = f32[2,16]{1,0} reduce-scatter-done(%s)
}
"""
    gathered, scattered = compiled._exchanges(HloProgram(text), 4)
    assert gathered == (4 * 32 * 16 + 2 * 8 * 4) * 3 / 4
    assert scattered == 4 * 2 * 16 * 3


MB = 10**6
# Two layers: a product by a weight of 40 MB, and attention by a kernel for short queries and one for long ones.
TWO_LAYERS = """
ENTRY %main (w: bf16[2000,10000], x: f32[250000]) -> f32[250000] {
  %w = bf16[2000,10000]{1,0} parameter(0)
  %x = f32[250000]{0} parameter(1)
  %a = f32[250000]{0} custom-call(%w, %x), custom_call_target="__cublas$gemm"
  %b = f32[250000]{0} SHORT0
  %c = f32[250000]{0} LONG0
  %d = f32[250000]{0} custom-call(%w, %c), custom_call_target="__cublas$gemm"
  %e = f32[250000]{0} SHORT1
  ROOT %f = f32[250000]{0} LONG1
}
"""


def test_a_gpus_bytes_are_those_that_its_cache_leaves():
    """Each product moves 40 MB of weight and 2 MB of rows; of attention the mean of a layer's two kernels."""
    text = TWO_LAYERS
    for kind, size in (("SHORT", 30 * MB), ("LONG", 10 * MB)):
        for layer, operand in enumerate("ad"):
            call = f'custom-call(%{operand}), custom_call_target="mosaic_gpu_v2"'
            scope = f'metadata={{op_name="layers.{layer}/attention/paged_attention/mpmd_map"}}'
            attributes = f'frontend_attributes={{bytes_accessed="{size}"}}, {scope}'
            text = text.replace(f"{kind}{layer}", f"{call}, {attributes}")
    compilation = Compilation("h100", SimpleNamespace(as_text=lambda: text), 1.0, 0, 0, 0, 0, {})
    figures = compiled.read_figures(compilation, 1, "gpu")
    assert (figures.moved_bytes, figures.kernel_bytes) == (2 * 42 * MB, 2 * 20 * MB)
    # A cache of 200 MB, of which half counts, holds the weight and what lies between; the first rows are read once.
    cached = compiled.read_figures(compilation, 1, "gpu", 200 * MB)
    assert (cached.moved_bytes, cached.kernel_bytes) == (42 * MB + 1 * MB, 2 * 20 * MB)
    assert compiled.read_figures(compilation, 1, "cpu").moved_bytes is None


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_decoding_on_a_gpu(ask, num_layers):
    """Its arguments are the parts that are counted; memory for 6 layers follows from that for 2 and for 4."""
    needs("h200")
    request = ask(replace(TINY, num_layers=num_layers), "h200x1", max_model_len=256, max_seqs=4, page_size=16)
    spec = request.spec(compiles=True)
    compiler = chip_compiler("h200", spec.mesh)
    whole = compile_programs(spec, compiler, whole=True, only="decode")["decode"]
    assert 0 <= whole.figures.argument_bytes - sum(spec.parts.values()) < 2**12  # and what a dispatch takes
    assert whole.figures.moved_bytes is not None
    assert whole.figures.moved_bytes >= count(spec, spec.config, spec.placed_params, spec.cache).read_weight_bytes(4)
    if num_layers == 6:
        few = compile_programs(spec, compiler, whole=False, only="decode")["decode"]
        print(f"{whole.figures} whole, {few.figures} from {few.num_layers} layers")
        assert few.num_layers == (2, 4)
        assert few.figures.argument_bytes == whole.figures.argument_bytes
        assert few.figures.total_bytes == pytest.approx(whole.figures.total_bytes, rel=BOUND)
        assert few.figures.moved_bytes == pytest.approx(whole.figures.moved_bytes, rel=BOUND)
        assert few.figures.kernel_bytes == pytest.approx(whole.figures.kernel_bytes, rel=BOUND)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_few_layers_of_llama_3_8b_tell_what_all_do(ask):
    needs("v5e")
    request = ask(LLAMA_3_8B, "v5e:2x2", max_model_len=4096, max_seqs=64)
    spec = request.spec(compiles=True)
    compiler = chip_compiler("v5e", spec.mesh)
    wholes, fews = (compile_programs(spec, compiler, whole=how) for how in (True, False))
    for name, whole in wholes.items():
        few, expected = fews[name].figures, whole.figures
        print(f"{name}: {expected.to_dict()} whole; {few.to_dict()} from {fews[name].num_layers} layers")
        assert few.argument_bytes == expected.argument_bytes
        assert few.total_bytes == pytest.approx(expected.total_bytes, rel=BOUND)
        assert few.num_collectives == expected.num_collectives
        assert few.sent_bytes == pytest.approx(expected.sent_bytes, rel=BOUND)
        for figure in ("moved_bytes", "kernel_bytes", "flops"):
            assert getattr(few, figure) == pytest.approx(getattr(expected, figure), rel=BOUND), figure


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_few_layers_of_llama_3_70b_tell_what_all_do(ask):
    needs("v6e")
    spec = int8(ask(LLAMA_3_70B, "v6e:2x4", max_model_len=4096, max_seqs=64)).spec(compiles=True)
    compiler = chip_compiler("v6e", spec.mesh)
    whole, few = (compile_programs(spec, compiler, whole=how, only="decode")["decode"].figures for how in (True, False))
    print(f"{whole.to_dict()} whole; {few.to_dict()} from few layers")
    assert few.argument_bytes == whole.argument_bytes
    assert few.total_bytes == pytest.approx(whole.total_bytes, rel=BOUND)
    assert few.moved_bytes == pytest.approx(whole.moved_bytes, rel=BOUND)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("chip", "num_layers"), [("v6e", 12), ("h100", 12)])
def test_few_layers_of_gemma_3_27b_tell_what_all_do(ask, chip, num_layers):
    """Two kinds of layers, with a window and without, whose keys lie in two pools."""
    needs(chip)
    config = replace(GEMMA_3_27B, num_layers=num_layers, sliding_windows=GEMMA_3_27B.sliding_windows[:num_layers])
    request = ask(config, "v6e:1x1" if chip == "v6e" else "h100x1", max_model_len=4096, max_seqs=16)
    spec = request.spec(compiles=True)
    compiler = chip_compiler(chip, spec.mesh)
    whole, few = (compile_programs(spec, compiler, whole=how, only="decode")["decode"] for how in (True, False))
    expected, found = whole.figures, few.figures
    print(f"{chip}: {expected.to_dict()} whole; {found.to_dict()} from {few.num_layers} layers")
    assert 0 <= expected.argument_bytes - sum(spec.parts.values()) < 2**20  # and what a dispatch takes
    assert found.argument_bytes == expected.argument_bytes
    assert found.total_bytes == pytest.approx(expected.total_bytes, rel=BOUND)
    if chip == "v6e":
        assert found.moved_bytes == pytest.approx(expected.moved_bytes, rel=BOUND)
        assert found.kernel_bytes == pytest.approx(expected.kernel_bytes, rel=BOUND)
        counted = 16 * count(spec, spec.config, spec.placed_params, spec.cache).read_cache_bytes(4096)
        assert expected.kernel_bytes == pytest.approx(counted, rel=BOUND)


PLANS = {
    "llama-3-8b-v5e:2x2": (LLAMA_3_8B, "v5e:2x2", True),
    "llama-3-8b-v6e:1x1": (LLAMA_3_8B, "v6e:1x1", False),
    "llama-3-8b-h200x1": (LLAMA_3_8B, "h200x1", True),
    "llama-3-70b-v6e:2x4": (LLAMA_3_70B, "v6e:2x4", True),
    "mixtral-8x7b-v5e:4x4": (MIXTRAL_8X7B, "v5e:4x4", False),
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PLANS)
def test_whole_models(ask, name, tmp_path):
    """64 sequences of 4,096 tokens: whether they fit is what compiling says, and the parts are the arrays' bytes."""
    config, place, fits = PLANS[name]
    request = ask(config, place, max_model_len=4096, max_seqs=64)
    request = int8(request) if config is LLAMA_3_70B else request
    needs(request.place.chip.name)
    start, processor = time.perf_counter(), os.times()
    plan = make_plan(request)
    seconds = time.perf_counter() - start
    processor = sum(os.times()[:2]) - sum(processor[:2])
    print(plan)
    print(f"{name}: {seconds:.0f} s, {processor:.0f} s of processors; {json.dumps(plan.to_dict()['bytes'])}")
    assert plan.fits == fits
    assert processor < 2 * 120  # two minutes of two cores
    peak = plan.programs[plan.memory.peak].figures
    assert plan.memory.total == pytest.approx(peak.total_bytes, abs=8)
    spec = request.spec()
    held = num_bytes(spec.placed_params) + num_bytes(spec.cache) + num_bytes(spec.slots)
    assert plan.memory.parts["weights"] == num_bytes(spec.placed_params)
    assert peak.argument_bytes == pytest.approx(held, rel=0.002)
    decoding = plan.programs["decode"].figures
    if request.place.chip.platform == "tpu":
        assert 1.0 <= plan.roofline[-1].hbm_bytes / (spec.parts["cache"] + plan.counted.dense_bytes) < 1.1 or (
            config.moe is not None
        )
        assert decoding.flops == pytest.approx(plan.roofline[-1].flops, rel=0.1) or config.moe is not None
    if not fits:
        first = changes(plan)[0]
        print(f"{first}: {first.compiled:,} of {first.budget:,} bytes, {first.total:,} counted")
        assert first.fits
        assert first.compiled == pytest.approx(first.total, rel=BOUND)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_draft(ask):
    """Rounds are compiled too, and hold both models."""
    needs("v6e")
    small = replace(TINY, vocab_size=LLAMA_3_8B.vocab_size, num_layers=4)
    draft = ModelDraft("draft", small, abstract_params(small, jnp.bfloat16))
    config = replace(LLAMA_3_8B, num_layers=4)
    request = ask(config, "v6e:1x1", max_model_len=2048, max_seqs=16, draft=draft, num_draft_tokens=4)
    plan = make_plan(request)
    print(plan)
    assert set(plan.programs) == {"prefill", "decode", "speculate"}
    assert plan.memory.parts["draft weights"] > 0
    assert len(plan.rounds) == len(plan.roofline)
    rounds, alone = (plan.programs[name].figures for name in ("speculate", "decode"))
    assert rounds.argument_bytes == pytest.approx(alone.argument_bytes + alone.resident_bytes, rel=0.001)


def int8(request):
    return replace(request, params=jax.eval_shape(partial(quantize_params, how="int8"), request.params))
