"""Processors in the engine: its own parameters written as functions, and tokens so far, in every kind of step."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import Processor, RequestArray, SamplingParams
from jaxinfer.engine import kept_programs
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.request import Request, SequenceState
from jaxinfer.models import init_params
from jaxinfer.request_arrays import check_arrays
from jaxinfer.speculative import NO_DRAFT, Draft, HeadDraft, LayersDraft, ModelDraft, NgramDraft, head_for
from tests import compilation
from tests.engine.grammars import make_compiler, make_sequence, random_params, run
from tests.engine.mixed_requests import random_prompts
from tests.pallas_kernels.quick import quick
from tests.sampling.test_processors import MIN_P, REPETITION
from tests.speculative.tiny_heads import config_of
from tests.speculative.tiny_heads import random_params as random_params_of_head
from tests.tiny import CONTIGUOUS_OPTIONS, OPTIONS

NUM_REQUESTS = 24
PROMPTS = random_prompts(NUM_REQUESTS, 30, seed=5)
VARIANTS = {
    "steps": ({}, ""),
    "one step a dispatch": ({"steps_per_dispatch": 1}, ""),
    "few pages": ({"num_pages": 11}, ""),
    "contiguous": ({"cache": "contiguous"}, ""),
    "deterministic": ({"deterministic": True}, ""),
    "n-grams": ({"num_draft_tokens": 3}, "n-grams"),
    "n-grams, host masks, few pages": ({"grammar_memory": 0, "num_pages": 11}, "n-grams"),
    "model": ({"num_draft_tokens": 3}, "model"),
    "model, adaptive": ({}, "model"),
    "layers": ({"num_draft_tokens": 3}, "layers"),
    "a tree of a model": ({"draft_tree": (2, 2, 1)}, "model"),
    "a tree of layers": ({"draft_tree": (2, 2, 1)}, "layers"),
    "a head": ({"num_draft_tokens": 3}, "head"),
}
# By rejection sampling, answers are others than those of plain decoding, where the sampler has a choice.
OTHER_ANSWERS = {"maximal": ({"num_draft_tokens": 3, "acceptance": "maximal"}, "model")}
GREEDY, SAMPLED = {"temperature": 0}, {"temperature": 1}


def draft_of(tiny, name: str) -> Draft:
    if name == "model":
        config = replace(tiny[0], num_layers=1)
        params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, init_params(config, jax.random.key(1)))
        return ModelDraft("small", config, params)
    if name == "head":
        config, taps = head_for(config_of("eagle3", tiny[0]), tiny[0])
        return HeadDraft("eagle3", config, random_params_of_head(config), taps)
    return {"": NO_DRAFT, "n-grams": NgramDraft(), "layers": LayersDraft(1)}[name]


def open_engine(tiny, variant: str, **more) -> Engine:
    options, draft = {**VARIANTS, **OTHER_ANSWERS}[variant]
    usual = CONTIGUOUS_OPTIONS if options.get("cache") == "contiguous" else OPTIONS
    return Engine(*tiny, EngineOptions(**{**usual, **options, **more}), draft=draft_of(tiny, draft))


@pytest.fixture(scope="module")
def compiler():
    return make_compiler()


def params_of(number: int, **more) -> SamplingParams:
    """Greedy and sampled requests, most of them under a grammar."""
    own = {"n": 1, "seed": number, "max_tokens": 4 + number, **(GREEDY, SAMPLED)[number % 2], **more}
    return SamplingParams(structured=random_params(number).structured, **own)


@pytest.fixture(scope="module")
def expected(tiny, compiler):
    """Answers by the engine's own parameters, without a draft."""
    engine = open_engine(tiny, "steps")
    each = [params_of(n, repetition_penalty=1 + 0.1 * n, min_p=0.02 * (n % 8)) for n in range(NUM_REQUESTS)]
    answers = run(engine, [make_sequence(compiler, p, one, waits=True) for p, one in zip(PROMPTS, each, strict=True)])
    engine.close()
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("variant", quick(VARIANTS, "n-grams"))
def test_own_penalty_and_min_p_give_the_tokens_of_the_parameters(tiny, compiler, expected, variant):
    """Oracle: the engine's own, at temperatures of 0 and 1, under grammars and without."""
    engine = open_engine(tiny, variant, processors=[REPETITION, MIN_P])
    declared = engine.spec.processors.arrays
    sequences = []
    for number, prompt in enumerate(PROMPTS):
        given = {"penalty": 1 + 0.1 * number, "p": 0.02 * (number % 8) if number % 2 else 0.0}
        if number == 0:
            given = {}  # the defaults
        arrays = check_arrays(declared, given, "processors")
        waits = engine.spec.options.grammar_memory > 0
        sequences.append(make_sequence(compiler, prompt, params_of(number), waits=waits, arrays=arrays))
    found = run(engine, sequences)
    assert found == expected
    if engine.speculation is not None:
        stats = engine.speculation.stats
        assert stats.proposed > 0
        assert variant.startswith("n-grams, host") or stats.accepted > 0
    engine.close()


def recurrence(logits, history, factor):
    """Leaves one token: a function of the first token of the prompt, its length, the last two tokens, and an array; 96
    where the tokens are not as many as they are said to be."""
    vocab_size, count = logits.shape[-1], history.num_prompt + history.num_output
    rows = jnp.arange(logits.shape[0])
    last, before = history.tokens[rows, count - 1], history.tokens[rows, jnp.maximum(count - 2, 0)]
    token = (last + factor * before + history.tokens[:, 0] + history.num_prompt) % 7
    is_right = (jnp.sum(history.tokens < vocab_size, axis=1) == count) & (count > 0)
    token = jnp.where(is_right, token, 96)
    return jnp.where(jnp.arange(vocab_size) == token[:, None], 0.0, -jnp.inf)


def recurrent_answer(prompt: list[int], factor: int, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append((tokens[-1] + factor * tokens[max(len(tokens) - 2, 0)] + prompt[0] + len(prompt)) % 7)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("variant", quick({**VARIANTS, **OTHER_ANSWERS}, "n-grams, host masks, few pages"))
def test_a_processor_sees_all_tokens_before_each_that_is_chosen(tiny, variant):
    """Oracle: the same recurrence in Python. Drafts, preempted answers and several answers of a request included."""
    processor = Processor(recurrence, {"factor": RequestArray((), "int32", 1)})
    engine = open_engine(tiny, variant, processors=[processor], shuffle_seed=1)
    sequences = []
    for number, prompt in enumerate(PROMPTS[:16]):
        params = SamplingParams(n=1 + number % 2, max_tokens=8 + 3 * number, **SAMPLED, seed=number)
        given = {} if number % 3 == 0 else {"factor": number % 5}
        arrays = check_arrays(engine.spec.processors.arrays, given, "processors")
        request = Request(prompt, params, params.max_tokens or 16, number, arrays=arrays)
        sequences += [SequenceState(request, index) for index in range(params.n)]
    found = run(engine, sequences)
    for sequence, tokens in zip(sequences, found, strict=True):
        factor = int(sequence.request.arrays.get("factor", 1))
        assert tokens == recurrent_answer(list(sequence.request.token_ids), factor, sequence.request.max_tokens)
    if "few pages" in variant:
        assert sum(one.num_preemptions for one in sequences) > 0
    if engine.speculation is not None:
        assert engine.speculation.stats.accepted > 0
    engine.close()


@pytest.mark.slow
def test_nothing_is_compiled_for_requests_after_warm_up_and_nan_ends_its_request_alone(tiny, compiler):
    def spoil(logits, history, after):
        return jnp.where((history.num_output >= after)[:, None], jnp.nan, logits)

    processors = [Processor(spoil, {"after": RequestArray((), "int32", 1000)}), REPETITION]
    engine = open_engine(tiny, "n-grams", processors=processors)
    engine.warm_up()
    compilation.num_programs = 0
    each = [params_of(n, max_tokens=8) for n in range(12)]
    afters = {1: 0, 4: 3, 6: 5}  # the last under a grammar

    def answers(afters):
        arrays = [{} if n not in afters else {"after": np.int32(afters[n])} for n in range(len(each))]
        given = zip(PROMPTS, each, arrays, strict=False)
        sequences = [make_sequence(compiler, p, one, waits=True, arrays=own) for p, one, own in given]
        return sequences, run(engine, sequences)

    plain, tokens = answers({})
    spoiled, others = answers(afters)
    for number, (sequence, output) in enumerate(zip(spoiled, others, strict=True)):
        if number not in afters or len(tokens[number]) <= afters[number]:
            assert (output, sequence.finish_reason) == (tokens[number], plain[number].finish_reason)
            continue
        assert output == tokens[number][: afters[number]]
        assert sequence.finish_reason == "error"
        assert "processors 'spoil', 'repetition'" in (sequence.error or "")
    assert sum(one.finish_reason == "error" for one in spoiled) >= 2
    assert compilation.num_programs == 0
    engine.close()


def test_an_engine_without_processors_has_no_arrays_for_them(tiny):
    engine = open_engine(tiny, "steps")
    runner = engine.runner
    assert runner._batch.processors is None
    assert runner._slots.history.sequence is None
    engine.close()


def test_programs_with_processors_are_not_kept_between_processes(tiny):
    """Their functions are of this process: a later one may have others of the same names."""
    for processors, is_kept in (((), True), ([MIN_P], False)):
        engine = open_engine(tiny, "steps", processors=processors)
        leaves, structure = jax.tree.flatten([engine.runner._batch])
        key = kept_programs._key("sample_step", (engine.runner._batch,), (), leaves, structure)
        assert (key is not None) == is_kept
        engine.close()
