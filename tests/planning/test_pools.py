"""Plans of models in which layers have windows: the pools, what fits, and what would help."""

from dataclasses import replace

import pytest

from jaxinfer.cache import state_bytes
from jaxinfer.models import abstract_params
from jaxinfer.planning import make_plan
from jaxinfer.planning.counted import count
from jaxinfer.planning.planner import plan_here
from jaxinfer.planning.remedy import changes
from jaxinfer.quantization.tree import num_bytes
from tests.engine.test_states import MODELS as RECURRENT
from tests.planning.plan_models import LLAMA_3_8B

WINDOWED = replace(LLAMA_3_8B, sliding_windows=(512, None) * 16)


@pytest.fixture
def plan(ask):
    def make(place, **options):
        return make_plan(ask(WINDOWED, place, **{"max_model_len": 8192, "max_seqs": 16, **options}), compiles=False)

    return make


def test_the_pools_are_in_the_plan(plan):
    found = plan("v5e:2x2")
    memory, spec = found.memory, found.request.spec()
    assert memory.pools == {group.name: group.pool_bytes for group in spec.groups}
    assert list(memory.pools) == ["full", "window of 512"]
    assert memory.parts["cache"] == sum(memory.pools.values())
    whole = plan("v5e:2x2", max_seqs=1).request.spec()
    assert memory.sequence_bytes == whole.pool_sizes.sequence_bytes
    assert 0.5 < memory.sequence_bytes / (128 * sum(whole.group_page_bytes)) < 0.54
    assert found.to_dict()["cache"]["pools"] == memory.pools
    assert "pages by layers: full: " in found.to_text()


def test_as_many_tokens_as_it_says_fit_and_not_a_page_more(plan):
    found = plan("v5e:2x2")
    assert found.fits
    most = found.memory.tokens // found.memory.page_size + 1
    assert plan("v5e:2x2", num_pages=most).fits
    assert not plan("v5e:2x2", num_pages=most + 1).fits


def test_fewer_and_shorter_sequences_fit_when_they_are_tried(plan):
    found = plan("v6e:1x1", max_model_len=16_384)
    assert not found.fits
    flags = dict(str(change).split()[:2] for change in changes(found, compiles=False))
    seqs, context = int(flags["--max-seqs"]), int(flags["--context"])
    assert plan("v6e:1x1", max_model_len=16_384, max_seqs=seqs).fits
    assert not plan("v6e:1x1", max_model_len=16_384, max_seqs=seqs + 1).fits
    assert plan("v6e:1x1", max_model_len=context).fits
    assert not plan("v6e:1x1", max_model_len=context + 64).fits


def test_a_model_with_recurrent_layers_is_planned():
    """Its layers without attention have no pages and read no keys; its states are among what stays allocated."""
    config = RECURRENT["delta"]
    plan = plan_here("tiny", config, abstract_params(config))
    assert plan is not None
    spec = plan.request.spec()
    assert plan.memory.parts["cache"] == num_bytes(spec.cache) > spec.max_seqs * state_bytes(config, spec.dtype) > 0
    counted = count(spec, config, spec.params, spec.cache)
    assert counted.token_cache_bytes == 2 * config.num_kv_heads * config.head_dim * spec.dtype.itemsize
