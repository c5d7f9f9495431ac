"""Drafts change no answer of a model with recurrent layers, whose states cannot be cut: chains of every kind of draft,
alone and together, in chunks and with preemption, give the tokens of plain decoding."""

import random
from dataclasses import replace

import jax
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.grammar.structured import StructuredOutputs
from jaxinfer.models import abstract_params, init_params
from jaxinfer.planning.compiled import planned_programs
from jaxinfer.speculative import LayersDraft, ModelDraft, NgramDraft
from tests.engine.grammars import make_compiler, make_sequence, run
from tests.engine.mixed_requests import mixed_params, random_prompts
from tests.engine.test_states import BASE, MODELS
from tests.pallas_kernels.quick import quick

ALL = {**MODELS, "beside attention": replace(MODELS["mamba"], layer_kinds=("attention_and_mamba2",) * 3)}
OPTIONS = {"max_model_len": 128, "page_size": 8, "steps_per_dispatch": 6, "max_seqs": 6}
PROMPTS = random_prompts(18, 70, seed=4)
PARAMS = [replace(mixed_params(number), max_tokens=6 + number) for number in range(18)]
PARAMS[4] = replace(PARAMS[4], prompt_logprobs=None, logprobs=3)
PARAMS[7] = replace(PARAMS[7], max_tokens=30)  # of 4 tokens: n-grams are found and accepted
PARAMS[9] = replace(PARAMS[9], n=2, temperature=0.8, seed=5)
PARAMS[11] = SamplingParams(max_tokens=30, temperature=0.3, seed=2, min_tokens=9, stop_token_ids=list(range(3, 12)))
DRAFTS = ("ngram", "layers:2", "itself", "near", "attention")
SETTINGS = {
    "chunks of 64": {"prefill_chunk": 64},
    "chunks of 16": {"prefill_chunk": 16},
    "few pages": {"prefill_chunk": 64, "page_size": 2, "num_pages": 64},
}


def model_of(config, seed=0):
    leaves, tree = jax.tree.flatten(init_params(config, jax.random.key(seed)))
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    pairs = zip(leaves, keys, strict=True)
    return config, jax.tree.unflatten(tree, [leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in pairs])


@pytest.fixture(scope="module", params=quick(ALL, "mamba"))
def model(request):
    return model_of(replace(ALL[request.param], vocab_size=97))


@pytest.fixture(scope="module")
def drafts(model):
    """What drafts, by name; "near" errs now and then, and has states of its own, as "itself" has."""
    config, params = model
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    pairs = zip(leaves, keys, strict=True)
    noisy = [leaf + 0.01 * jax.random.normal(key, leaf.shape) for leaf, key in pairs]
    models = {"itself": model, "near": (config, jax.tree.unflatten(tree, noisy))}
    return {**models, "attention": model_of(replace(BASE, vocab_size=97), 5)}


@pytest.fixture(scope="module")
def expected(model):
    with LLM(model, **OPTIONS, prefill_chunk=64) as llm:
        found = answers(llm)
    assert len({str(one) for one in found}) > 14
    return found


def answers(llm: LLM, end: int = 18) -> list:
    outputs = [one for output in llm.generate(PROMPTS[:end], PARAMS[:end], use_tqdm=False) for one in output.outputs]
    llm.engine.scheduler.check()
    return [(one.token_ids, one.finish_reason, [[*entry] for entry in one.logprobs or ()]) for one in outputs]


CASES = [(name, setting) for name in DRAFTS for setting in SETTINGS]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "setting"), quick(CASES, ("near", "chunks of 64"), ("layers:2", "chunks of 16")))
def test_drafts_change_no_answer(model, drafts, expected, name, setting):
    options = {**OPTIONS, **SETTINGS[setting], "num_draft_tokens": 3}
    with LLM(model, draft=drafts.get(name, name), **options) as llm:
        assert answers(llm) == expected
        alone = [one for number in range(3) for one in answers(llm, number + 1)[-1:]]
        assert alone == expected[:3]
        assert (llm.engine.scheduler.counters.num_preemptions > 0) == (setting == "few pages")
        stats = llm.speculation_stats()
    assert stats is not None
    assert stats.accepted > 0
    if name == "itself":
        assert stats.acceptance_rate == 1.0
    elif name == "near":
        assert 0.2 < stats.acceptance_rate < 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", quick(DRAFTS, "near"))
def test_drafts_go_on_from_saved_states(model, drafts, name):
    """Prompts of which a part is known: found, restored and drafted, also under few pages."""
    rng = random.Random(3)
    shared = [rng.randrange(97) for _ in range(130)]
    prompts = [shared[: 66 + 12 * number] + [number] * (number + 1) for number in range(6)]
    params = [SamplingParams(max_tokens=24, temperature=0.2 * number, seed=number) for number in range(6)]
    few = dict.fromkeys(range(4), 100.0)  # of 4 tokens, so that n-grams are found and accepted
    params[5] = SamplingParams(max_tokens=40, temperature=0.5, seed=5, logit_bias=few)
    options = {"max_model_len": 256, "page_size": 8, "max_seqs": 3, "prefill_chunk": 64}

    def tokens(llm: LLM) -> list[list[int]]:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        llm.engine.scheduler.check()
        return found

    with LLM(model, prefix_cache=False, **options) as llm:
        expected = tokens(llm)
    for more in ({}, {"num_pages": 48}):
        with LLM(model, draft=drafts.get(name, name), num_draft_tokens=3, **options, **more) as llm:
            for _ in range(3):
                assert tokens(llm) == expected
            assert llm.engine.scheduler.counters.reused_tokens >= 6 * 64
            stats = llm.speculation_stats()
            assert stats is not None
            assert stats.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 8, "auto"])
@pytest.mark.parametrize("name", ["ngram", "near"])
def test_lengths_change_no_answer(model, drafts, expected, name, length):
    with LLM(model, draft=drafts.get(name, name), **OPTIONS, num_draft_tokens=length) as llm:
        for _ in range(3):  # lengths that adapt need times first
            assert answers(llm) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "near"])
def test_deterministic_drafts_keep_every_bit(model, drafts, name):
    params = [replace(one, logprobs=2) for one in PARAMS]

    def bits(**options):
        with LLM(model, **OPTIONS, deterministic=True, **options) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            return [[(one.token_ids, one.logprobs) for one in output.outputs] for output in outputs]

    assert bits(draft=drafts.get(name, name), num_draft_tokens=3) == bits()


@pytest.mark.slow
def test_a_draft_with_states_for_a_model_without(drafts, model):
    target = model_of(replace(BASE, vocab_size=97), 5)
    with LLM(target, **OPTIONS) as llm:
        wanted = answers(llm, 8)
    with LLM(target, draft=drafts["itself"], num_draft_tokens=3, **OPTIONS) as llm:
        for _ in range(2):  # the second time with prefix hits, which hold no states
            assert answers(llm, 8) == wanted
        assert llm.engine.scheduler.counters.reused_tokens > 0
        assert llm.explain().to_dict()["cache"]["state bytes"] == llm.engine.spec.state_bytes > 0


# Acceptance, grammars, and what a draft starts from.


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", quick(DRAFTS, "itself"))
def test_maximal_acceptance_reads_the_same_states(model, drafts, name):
    """Greedy answers are those of plain decoding, and what the model itself draws is accepted, always."""
    params = [replace(one, temperature=0, seed=None, max_tokens=12, n=1) for one in PARAMS]
    with LLM(model, **OPTIONS) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    options = {**OPTIONS, "acceptance": "maximal", "num_draft_tokens": 3}
    with LLM(model, draft=drafts.get(name, name), **options) as llm:
        for _ in range(2):
            assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params, use_tqdm=False)] == wanted
        drawn = [SamplingParams(temperature=1.0, seed=number, max_tokens=24, n=2) for number in range(18)]
        llm.generate(PROMPTS, drawn, use_tqdm=False)
        llm.engine.scheduler.check()
        stats = llm.speculation_stats()
    if name == "itself":
        assert stats.proposed > 500
        assert stats.acceptance_rate == 1.0


GRAMMAR = StructuredOutputs(regex="([ -O][P-~]){7}")
# The target, what drafts, and how drafts are accepted; greedy under "maximal", where sampled tokens may differ.
UNDER_GRAMMARS = [
    (target, draft, acceptance)
    for target in ("states", "attention")
    for draft in ("ngram", "layers", "near")
    for acceptance in ("exact", "maximal")
    if (target, draft) not in (("attention", "ngram"), ("attention", "layers"))
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("target", "draft", "acceptance"),
    quick(UNDER_GRAMMARS, ("states", "near", "exact")),
)
def test_drafts_change_no_answer_under_a_grammar(model, drafts, target, draft, acceptance):
    """With tables on the device, and with masks from the host, which refuse tokens that were computed."""
    config, params = model if target == "states" else drafts["attention"]
    kinds = {"ngram": NgramDraft(), "layers": LayersDraft(2), "near": ModelDraft("near", *drafts["near"])}
    compiler, prompts = make_compiler(), [[5] * 9, [7, 8, 9], [60] * 20, [31], [2] * 70]
    form = {"temperature": 0 if acceptance == "maximal" else 2.0, "max_tokens": 16, "structured": GRAMMAR}

    def answers(draft, **options):
        options = {**OPTIONS, "max_seqs": 3, **options}
        engine = Engine(config, params, EngineOptions(**options), draft=draft)
        asked = [SamplingParams(seed=number, **form) for number in range(len(prompts))]
        pairs = zip(prompts, asked, strict=True)
        found = [make_sequence(compiler, prompt, one, waits=True) for prompt, one in pairs]
        return run(engine, found), engine.speculation_stats

    expected, _ = answers(None)
    assert len({tuple(one) for one in expected}) > 2
    for more in ({}, {"grammar_memory": 0}):
        found, stats = answers(kinds[draft], num_draft_tokens=3, acceptance=acceptance, **more)
        assert found == expected
        if not more and draft == "near" and target == "states":
            assert stats.accepted > 0


@pytest.mark.parametrize("target", ["states", pytest.param("attention", marks=pytest.mark.slow)])
def test_a_draft_with_states_begins_anew_wherever_a_sequence_does(model, drafts, target):
    """Its states are of no saved prompt: after admission, prefix hits, for further answers and after preemption it has
    read nothing."""
    prompts = [PROMPTS[0][:1] * 3 + [number] * 80 for number in (1, 1, 2)]
    params = [SamplingParams(temperature=1.0, seed=number, max_tokens=40, n=1 + number) for number in range(3)]
    options = {"max_model_len": 128, "page_size": 8, "max_seqs": 4, "num_pages": 40, "num_draft_tokens": 3}
    with LLM(model if target == "states" else drafts["attention"], draft=drafts["near"], **options) as llm:
        found, write = [], llm.engine.runner._write_draft_row

        def record(slot, tokens, num_drafted):
            found.append(num_drafted)
            write(slot, tokens, num_drafted)

        llm.engine.runner._write_draft_row = record
        for _ in range(2):
            llm.generate(prompts, params, use_tqdm=False)
        counters = llm.engine.scheduler.counters
        assert (counters.num_preemptions > 0, counters.reused_tokens > 0) == (True, True)
        assert len(found) == counters.num_added + counters.num_preemptions
    assert not any(found)


@pytest.mark.all_buckets
def test_states_of_a_draft_move_with_slots(model, drafts):
    """When few sequences are left: the model itself goes on to draft what it would choose."""
    params = [SamplingParams(temperature=0.8, seed=one, max_tokens=8 + 12 * one) for one in range(4)]
    options = {**OPTIONS, "max_seqs": 4, "num_draft_tokens": 3, "steps_per_dispatch": 2}
    with LLM(model, draft=drafts["itself"], **options) as llm:
        moves, move = [], llm.engine.runner._move_slots
        llm.engine.runner._move_slots = lambda order: (moves.append(order), move(order))
        llm.generate(PROMPTS[:4], params, use_tqdm=False)
        assert moves
        assert llm.speculation_stats().acceptance_rate == 1.0


def test_branches_are_refused_by_name(model):
    with pytest.raises(
        ValueError, match=r"Tiny has layers of kind .*: states follow one chain of tokens, so draft_tree"
    ):
        LLM(model, draft="layers:1", draft_tree=(2, 1), **OPTIONS)


@pytest.mark.slow
def test_a_round_updates_states_in_place():
    """The compiled program aliases the donated states, and copies none of their size."""
    config, num_slots = MODELS["delta"], 50
    params = abstract_params(config, "float32")
    shapes = {"max_model_len": 128, "max_seqs": num_slots, "page_size": 8, "num_pages": 40, "num_saved_states": 0}
    options = EngineOptions(num_draft_tokens=3, **shapes)
    for draft in (NgramDraft(), ModelDraft("plain", BASE, abstract_params(BASE, "float32"))):
        spec = EngineSpec(config, params, options, "cpu", draft=draft)
        program = planned_programs(spec)["speculate"]
        compiled = program.function.lower(*program.arguments).compile()
        shape = "f32[{}]".format(",".join(map(str, (num_slots, *config.delta.state_shape))))
        lines = compiled.as_text().splitlines()
        assert any(f"= {shape}" in line and " parameter(" in line for line in lines)
        assert not [line for line in lines if f"= {shape}" in line and " copy(" in line]
        assert compiled.memory_analysis().alias_size_in_bytes >= spec.state_bytes
