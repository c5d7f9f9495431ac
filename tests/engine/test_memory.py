"""Bytes of a step beside its weights and its cache: what rounds of speculation keep of recurrent layers."""

from dataclasses import replace

import pytest

from jaxinfer.cache import deferred_bytes, state_bytes
from jaxinfer.engine.memory import activation_bytes
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import DeltaConfig, abstract_params
from jaxinfer.planning.compiled import SPECULATE, planned_programs
from jaxinfer.speculative import LayersDraft, ModelDraft, NgramDraft
from tests.engine.test_states import BASE, MODELS

CONFIG = replace(MODELS["delta"], delta=DeltaConfig(2, 4, 128, 128))  # whose states outweigh everything else
PARAMS = abstract_params(CONFIG, "float32")
SHAPES = {"max_model_len": 128, "max_seqs": 50, "page_size": 8, "num_pages": 40, "num_saved_states": 0}
DRAFTS = {
    "ngram": (NgramDraft(), None),
    "plain": (ModelDraft("plain", BASE, abstract_params(BASE, "float32")), None),
    "layers": (LayersDraft(1), CONFIG.with_layers([0])),
    "itself": (ModelDraft("itself", CONFIG, PARAMS), CONFIG),
}


def spec_of(draft, **options) -> EngineSpec:
    return EngineSpec(CONFIG, PARAMS, EngineOptions(**SHAPES, **options), "cpu", draft=draft)


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_rounds_keep_rows_and_a_copy_of_the_drafts_states(name, deterministic):
    draft, drafted = DRAFTS[name]
    options = {"deterministic": deterministic}
    plain, spec = spec_of(None, **options), spec_of(draft, num_draft_tokens=3, **options)
    assert plain.token_buckets == spec.token_buckets
    rows = 256 if deterministic else 50 * 4  # every pass of a deterministic engine has one shape
    copied = 0 if drafted is None else 50 * state_bytes(drafted, "float32")
    assert activation_bytes(spec) - activation_bytes(plain) == rows * deferred_bytes(CONFIG, PARAMS) + copied


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layers", "itself"])
def test_the_compiled_round_has_that_copy(name):
    def temporary_bytes(draft) -> int:
        program = planned_programs(spec_of(draft, num_draft_tokens=3))[SPECULATE]
        return program.function.lower(*program.arguments).compile().memory_analysis().temp_size_in_bytes

    more = temporary_bytes(DRAFTS[name][0]) - temporary_bytes(NgramDraft())
    assert more > 0.9 * 50 * state_bytes(DRAFTS[name][1], "float32")
