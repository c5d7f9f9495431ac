"""Where a model does not fit: what would help, cheapest first."""

from dataclasses import replace
from functools import partial

import jax
import pytest

from jaxinfer.planning import changes, make_plan
from jaxinfer.quantization import quantize_params
from tests.planning.plan_models import LLAMA_3_8B

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
