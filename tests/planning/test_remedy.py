"""Where a model does not fit: what would help, cheapest first."""

from dataclasses import replace
from functools import partial

import jax
import pytest

from jaxinfer.engine.spec import EngineSpec
from jaxinfer.planning import changes, make_plan, remedy
from jaxinfer.planning.chips import chips
from jaxinfer.planning.compiled import compile_programs
from jaxinfer.planning.planner import assemble
from jaxinfer.quantization import quantize_params
from tests.planning.plan_models import LLAMA_3_8B, TINY

LONG = {"max_model_len": 4096, "max_seqs": 64}


@pytest.fixture
def plan(ask):
    def make(place, config=LLAMA_3_8B, **options):
        return make_plan(ask(config, place, **{**LONG, **options}), compiles=False)

    return make


def flags(plan):
    return [str(change) for change in changes(plan, compiles=False)]


def test_what_fits_needs_nothing(plan):
    found = plan("v5e:2x2")
    assert found.fits
    assert found.memory.remaining_tokens > 0
    # As many tokens as it says fit, and not a page more.
    page = found.memory.page_size
    most = replace(found.request.options, num_pages=found.memory.tokens // page + 1)
    assert make_plan(replace(found.request, options=most), compiles=False).fits
    more = replace(most, num_pages=most.num_pages + 1)
    assert not make_plan(replace(found.request, options=more), compiles=False).fits


def test_cheapest_first_and_each_fits_when_it_is_tried(plan):
    found = plan("v6e:1x1")
    assert not found.fits
    assert found.memory.remaining_tokens < 0
    helping = flags(found)
    assert helping[0].startswith("--max-seqs ")
    assert helping[1].startswith("--context ")
    kinds = [change.split()[0] for change in helping]
    assert kinds == sorted(kinds, key=["--max-seqs", "--context", "--kv-dtype", "--quantize", "--on"].index)
    assert helping[-1] == "--on v6e:2x2"
    seqs, context = (int(change.split()[1]) for change in helping[:2])
    assert plan("v6e:1x1", max_seqs=seqs).fits
    assert not plan("v6e:1x1", max_seqs=seqs + 1).fits
    assert plan("v6e:1x1", max_model_len=context).fits
    assert not plan("v6e:1x1", max_model_len=context + 64).fits


def first_that_does_not_fit(plan, place):
    """The plan of the smallest batch that does not fit, and how many sequences it has."""
    return next((found, n) for n in range(8, 129, 2) if not (found := plan(place, max_seqs=n)).fits)


def test_a_little_more_memory_is_the_cheapest_change(plan):
    found, seqs = first_that_does_not_fit(plan, "v6e:1x1")
    name, value = flags(found)[0].split()
    assert name == "--memory-fraction"
    assert 0.9 < float(value) <= 0.95
    assert plan("v6e:1x1", max_seqs=seqs, memory_fraction=float(value)).fits
    assert not plan("v6e:1x1", max_seqs=seqs, memory_fraction=float(value) - 0.01).fits
    assert flags(found)[1] in (f"--max-seqs {seqs - 2}", f"--max-seqs {seqs - 1}")


@pytest.mark.slow
def test_on_a_gpu_jax_may_take_more_of_the_memory(plan, monkeypatch):
    found, seqs = first_that_does_not_fit(plan, "h100x1")
    assert flags(found)[0].startswith("--memory-fraction ")
    assert flags(found)[1].startswith("XLA_PYTHON_CLIENT_MEM_FRACTION=0.7")
    more = plan("h100x1", max_seqs=seqs + 16)
    name, share = flags(more)[0].split("=")
    assert (name, 0.75 < float(share) <= 0.95) == ("XLA_PYTHON_CLIENT_MEM_FRACTION", True)
    chips.cache_clear()
    try:
        monkeypatch.setenv(name, share)
        assert plan("h100x1", max_seqs=seqs + 16).fits
    finally:
        chips.cache_clear()


def test_a_larger_share_is_not_compiled_again(ask, fake, monkeypatch):
    """The programs are the same, so that the compiled total is the plan's."""
    monkeypatch.setattr(remedy, "compile_programs", None)
    request = ask(replace(TINY, num_layers=4), "v6e:1x1")
    spec = EngineSpec(request.config, request.params, request.options, "cpu", None, None)
    programs = compile_programs(spec, fake)
    total = max(one.figures.total_bytes for one in programs.values())
    found = assemble(request, spec, programs, request.place.chip, int(total / 0.925), [], 0.0)
    assert not found.fits
    first = changes(found)[0]
    assert (str(first), first.compiled, first.fits) == ("--memory-fraction 0.93", found.memory.total, True)


def test_weights_that_are_too_large_need_fewer_bits_or_more_chips(plan):
    helping = flags(plan("v5e:1x1"))  # 16 GB of weights, 15.75 GiB of memory
    assert not [change for change in helping if change.startswith(("--max-seqs", "--context", "--kv-dtype"))]
    assert helping[0].startswith("--quantize int")
    assert helping[-1].startswith("--on v5e:2x2")


def test_quantized_weights_are_not_quantized_again(plan, ask):
    request = ask(LLAMA_3_8B, "v5e:1x1", **LONG)
    params = jax.eval_shape(partial(quantize_params, how="int8"), request.params)
    helping = flags(make_plan(replace(request, params=params), compiles=False))
    assert helping
    assert not [change for change in helping if "--quantize" in change]


def test_a_cache_of_8_bits_stays_as_it_is(plan):
    assert not [change for change in flags(plan("v6e:1x1", kv_dtype="int8")) if "--kv-dtype" in change]


def test_nothing_helps(plan):
    huge = replace(LLAMA_3_8B, num_layers=2, intermediate_size=2**28)
    assert flags(plan("rtx-4090x8", config=huge)) == []
