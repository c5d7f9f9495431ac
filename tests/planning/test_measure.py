"""A whole program's figures from those of few layers."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxinfer.engine.abstract_work import layer_kinds
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import MoEConfig, abstract_params
from jaxinfer.planning.compiled import compile_programs, extrapolate
from jaxinfer.speculative import NO_DRAFT, LayersDraft, ModelDraft, NgramDraft
from tests.planning.plan_models import TINY

WINDOWS = replace(TINY, sliding_windows=(128, None, None) * 16)
MIXTURE = replace(
    TINY, num_layers=30, moe=MoEConfig(num_experts=4, num_experts_per_token=2, expert_size=64, layers=range(3, 30))
)
SMALL = replace(TINY, num_layers=20)
DRAFTS = {
    "none": NO_DRAFT,
    "model": ModelDraft("draft", SMALL, abstract_params(SMALL, jnp.bfloat16)),
    "layers": LayersDraft(5),
    "ngram": NgramDraft(),
}


@pytest.fixture
def spec(ask):
    def make(config, draft=NO_DRAFT) -> EngineSpec:
        drafting = {} if draft is NO_DRAFT else {"num_draft_tokens": 4}
        request = ask(config, "v6e:1x1", draft=draft, **drafting)
        return EngineSpec(config, request.params, request.options, "cpu", None, draft)

    return make


@pytest.mark.matrix
@pytest.mark.parametrize("config", [TINY, WINDOWS, MIXTURE], ids=["alike", "windows", "mixture"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_few_layers_tell_what_all_do(spec, fake, config, draft):
    whole_spec = spec(config, DRAFTS[draft])
    whole = compile_programs(whole_spec, fake, whole=True)
    assert fake.num_compiled == [config.num_layers] * len(whole)
    fake.num_compiled.clear()
    few = compile_programs(whole_spec, fake, whole=False)
    assert list(few) == list(whole) == ["prefill", "decode", *(["speculate"] if draft != "none" else [])]
    assert max(fake.num_compiled) < 10
    for name, one in whole.items():
        assert one.is_whole
        assert not few[name].is_whole
        assert few[name].figures.total_bytes == pytest.approx(one.figures.total_bytes, abs=1e-3)
        expected, found = one.figures.to_dict(), few[name].figures.to_dict()
        assert found.pop("seconds") >= 2
        for other in (found, expected):  # the target's layers that draft are arguments twice, and lie there once
            other["argument_bytes"] += other.pop("resident_bytes")
            other.pop("seconds", None)
        assert found == pytest.approx(expected)


def test_layers_that_differ_are_of_different_kinds(spec):
    def kinds(config):
        return [len(layers) for layers in layer_kinds(config, spec(config).params).values()]

    assert kinds(TINY) == [48]
    assert kinds(WINDOWS) == [16, 32]
    assert kinds(MIXTURE) == [3, 27]


def test_few_layers_are_compiled_whole(spec, fake):
    config = replace(TINY, num_layers=8)
    assert all(one.is_whole for one in compile_programs(spec(config), fake).values())
    assert not any(one.is_whole for one in compile_programs(spec(TINY), fake).values())
    # Where none can be left out, nothing else is possible.
    assert compile_programs(spec(replace(TINY, num_layers=2)), fake, whole=False)["decode"].is_whole


def test_one_program_alone(spec, fake):
    assert list(compile_programs(spec(TINY), fake, only="decode")) == ["decode"]


def test_a_draft_lies_there_while_the_target_works_alone(spec, fake):
    found = compile_programs(spec(TINY, DRAFTS["model"]), fake)
    assert found["decode"].figures.resident_bytes > 2 * 20 * 3 * 256 * 512
    assert found["speculate"].figures.resident_bytes == 0
    assert compile_programs(spec(TINY, DRAFTS["ngram"]), fake)["decode"].figures.resident_bytes == 0


def test_layers_that_draft_are_not_counted_twice(spec, fake):
    found = compile_programs(spec(TINY, DRAFTS["layers"]), fake, whole=True)
    extra = found["speculate"].figures.argument_bytes - found["decode"].figures.argument_bytes
    assert extra > 2 * 5 * 3 * 256 * 512
    assert extra + found["speculate"].figures.resident_bytes < 2 * 3 * 256 * 512


def test_what_one_lacks_is_not_made_up(spec, fake):
    first = compile_programs(spec(TINY), fake, only="decode")["decode"].figures
    assert extrapolate(first, [(replace(first, flops=None), 3.0)]).flops is None
    assert (
        extrapolate(first, [(replace(first, code_bytes=first.code_bytes + 7), 3.0)]).code_bytes == first.code_bytes + 7
    )
    # Scratch memory is never less than what was seen.
    assert extrapolate(first, [(replace(first, temporary_bytes=0), 3.0)]).temporary_bytes == first.temporary_bytes
