"""A feature that is off costs nothing: a warm request makes no call into its modules."""

import sys
from pathlib import Path

import pytest

import jaxinfer
from jaxinfer import LLM, SamplingParams
from tests.engine.test_policies import model_of

ROOT = Path(jaxinfer.__file__).parents[1]
# Of policies, drafts, grammars, calls of tools, tiers, states and several hosts.
OFF = {
    "policies": ("jaxinfer/cache/policy", "jaxinfer/engine/prompt_ends.py", "jaxinfer/engine/programs/compaction.py"),
    "drafts": ("jaxinfer/speculative", "jaxinfer/engine/speculation.py", "jaxinfer/engine/programs/speculative.py"),
    "grammars": ("jaxinfer/grammar", "jaxinfer/engine/grammars.py", "jaxinfer/engine/programs/grammar.py"),
    "calls of tools": ("jaxinfer/tool_calls", "jaxinfer/openai"),
    "tiers": ("jaxinfer/engine/tiers",),
    "states": ("jaxinfer/engine/saved_states.py", "jaxinfer/cache/state.py"),
    "several hosts": ("jaxinfer/engine/lockstep.py", "jaxinfer/parallel/hosts.py"),
}
PROMPT, PARAMS = [1, 2, 3, 4, 5], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def called(llm: LLM, params: SamplingParams = PARAMS) -> dict[str, set[str]]:
    """By feature, the functions of its modules that a request calls after two others."""
    found: dict[str, set[str]] = {name: set() for name in OFF}

    def watch(frame, event, argument):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT):
            place = file.relative_to(ROOT).as_posix()
            for name, modules in OFF.items():
                if place.startswith(modules):
                    found[name].add(f"{place}: {frame.f_code.co_qualname}")

    for _ in range(2):
        llm.generate([PROMPT], params)
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        llm.generate([PROMPT], params)
    finally:
        sys.setprofile(before)
    return found


def open_llm(**options) -> LLM:
    return LLM(model_of((None, None)), max_seqs=4, max_model_len=128, page_size=8, **options)


@pytest.mark.slow
def test_a_warm_request_calls_nothing_that_is_off():
    with open_llm() as llm:
        assert called(llm) == {name: set() for name in OFF}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("feature", "options"),
    [
        ("policies", {"kv_policy": "sinks(4)+window(16)"}),
        ("drafts", {"draft": "ngram", "num_draft_tokens": 2}),
        ("tiers", {"host_cache_gib": 0.01}),
    ],
)
def test_what_is_on_is_seen(feature, options):
    with open_llm(**options) as llm:
        found = called(llm)
    assert found[feature]
    assert {name for name, functions in found.items() if functions} == {feature}
