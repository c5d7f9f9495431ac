"""Answers under grammars: they match, and their tokens do not depend on where masks come from."""

import json
import re

import jax
import jsonschema
import numpy as np
import pytest

from jaxinfer import SamplingParams, compilation_cache
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.grammars import TablePool
from jaxinfer.engine.options import EngineOptions
from jaxinfer.grammar.compiler import Grammar
from jaxinfer.grammar.device import TableSizes
from jaxinfer.grammar.gate import gate_of
from jaxinfer.grammar.structured import StructuredOutputs
from jaxinfer.grammar.table_builder import TokenTable
from jaxinfer.sampling import SamplingRow, make_batch, make_state, sample
from jaxinfer.speculative import NO_DRAFT, LayersDraft, NgramDraft
from jaxinfer.text.reasoning import Tags
from jaxinfer.training.objectives import sequence_logits
from tests.engine.grammars import VOCABULARY, make_compiler, make_sequence, random_params, run, text_of
from tests.engine.mixed_requests import random_prompts
from tests.pallas_kernels.quick import quick
from tests.tiny import CONTIGUOUS_OPTIONS, OPTIONS

NUM_REQUESTS = 40
PROMPTS = random_prompts(NUM_REQUESTS, 30, seed=5)
PARAMS = [random_params(number) for number in range(NUM_REQUESTS)]
# What differs from tables in several steps of a dispatch: options of the engine, its draft, whether tables are waited
# for. Without waiting, answers move to their tables on the way.
VARIANTS = {
    "host masks": ({"grammar_memory": 0}, None, False),
    "host masks, one step a dispatch": ({"grammar_memory": 0, "steps_per_dispatch": 1}, None, False),
    "tables that come later": ({}, None, False),
    "one step a dispatch": ({"steps_per_dispatch": 1}, None, True),
    "few pages": ({"num_pages": 14}, None, False),
    "contiguous": ({"cache": "contiguous"}, None, True),
    "deterministic": ({"deterministic": True}, None, True),
    "n-grams": ({}, NgramDraft(), True),
    "n-grams, host masks": ({"grammar_memory": 0}, NgramDraft(), False),
    "layers": ({}, LayersDraft(1), True),
    "layers, host masks": ({"grammar_memory": 0}, LayersDraft(1), False),
    "a tree of layers": ({"draft_tree": (2, 2, 1)}, LayersDraft(1), True),
}


@pytest.fixture(scope="module")
def compiler():
    return make_compiler()


def open_engine(tiny, draft=None, **options) -> Engine:
    usual = CONTIGUOUS_OPTIONS if options.get("cache") == "contiguous" else OPTIONS
    return Engine(*tiny, EngineOptions(**{**usual, **options}), draft=draft or NO_DRAFT)


def answers(engine, compiler, waits=True, params=PARAMS) -> list[list[int]]:
    pairs = zip(PROMPTS, params, strict=True)
    return run(engine, [make_sequence(compiler, prompt, one, waits=waits) for prompt, one in pairs])


@pytest.fixture(scope="module")
def expected(tiny, compiler):
    engine = open_engine(tiny)
    found = answers(engine, compiler)
    assert len(engine.grammars.tables) >= 8
    engine.close()
    return found


@pytest.mark.slow
def test_finished_answers_match(expected):
    num_finished = 0
    for params, tokens in zip(PARAMS, expected, strict=True):
        if params.structured is None or tokens[-1] != 0:
            continue
        num_finished += 1
        text, wanted = text_of(tokens), StructuredOutputs.of(params.structured)
        if wanted.kind == "json":
            jsonschema.validate(json.loads(text), json.loads(wanted.json))
        elif wanted.kind == "regex":
            assert re.fullmatch(wanted.regex, text), (wanted, text)
        else:
            assert text in wanted.choice
    assert num_finished >= 12


@pytest.mark.slow
def test_tokens_are_those_of_masked_logits(tiny, compiler, expected):
    """Oracle: dense attention over each whole answer, llguidance's mask at each place, the sampler once over all."""
    config, params = tiny
    sequences = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    model = jax.jit(lambda params, tokens: sequence_logits(config, params, tokens))
    logits = np.asarray(model(params, np.array([(one + [0] * 64)[:64] for one in sequences])))
    rows, masks, positions, histories = [], [], [], []
    for n, (prompt, tokens, one) in enumerate(zip(PROMPTS, expected, PARAMS, strict=True)):
        matcher = None if one.structured is None else compiler.compile(StructuredOutputs.of(one.structured)).start()
        for k, token in enumerate(tokens):
            mask = np.full((1, VOCABULARY.num_words), 0xFFFFFFFF, np.uint32)
            if matcher is not None:
                matcher.library.fill([matcher], mask)
                assert matcher.accept([token]) == 1
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: config.vocab_size]
            position = len(prompt) + k
            masks.append(np.where(bits, logits[n, position - 1], -np.inf))
            rows.append(SamplingRow(one, one.seed, (0,)))
            positions.append(position)
            histories.append((prompt, tokens[:k]))
    prompts, outputs = ([one[which] for one in histories] for which in (0, 1))
    batch, state = make_batch(rows, config.vocab_size), make_state(prompts, config.vocab_size, outputs)
    found = jax.jit(sample)(np.array(masks, np.float32), np.array(positions, np.int32), batch, state).tokens
    assert found.tolist() == [token for tokens in expected for token in tokens]


@pytest.mark.matrix("host masks", "n-grams")
@pytest.mark.parametrize("variant", quick(VARIANTS, "host masks", "tables that come later", "n-grams"))
def test_tokens_are_the_same(tiny, compiler, expected, variant):
    options, draft, waits = VARIANTS[variant]
    engine = open_engine(tiny, draft, **options)
    assert answers(engine, make_compiler() if not waits else compiler, waits) == expected
    engine.close()


def test_tokens_that_do_not_count_leave_nothing_behind(tiny, compiler, monkeypatch):
    """Half of all tokens are allowed at a place, the other half at the next: many free tokens are taken back, and those
    that are not must be what top-k, top-p, min-p and penalties leave of the masked ones. So must it be for answers that
    move to their table in the middle."""
    kinds = ({}, {"frequency_penalty": 2.0}, {"repetition_penalty": 2.0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2})
    usual = {"max_tokens": 16, "temperature": 2.0, "structured": {"regex": "([ -O][P-~]){7}"}}
    params = [
        SamplingParams(seed=number, **usual, **kinds[number * len(kinds) // NUM_REQUESTS])
        for number in range(NUM_REQUESTS)
    ]
    engine = open_engine(tiny)
    expected = answers(engine, compiler, params=params)
    engine.close()
    engine, num_refused = open_engine(tiny, grammar_memory=0), 0
    accept = engine.grammars.accept

    def refusing(sequence, tokens):
        nonlocal num_refused
        found = accept(sequence, tokens)
        num_refused += len(sequence.grammar.rejected)
        return found

    monkeypatch.setattr(engine.grammars, "accept", refusing)
    assert answers(engine, compiler, params=params) == expected
    assert num_refused > 20
    engine.close()

    engine, num_steps, num_moved = open_engine(tiny), 0, 0
    step = engine.step

    def counting():
        nonlocal num_steps, num_moved
        num_steps += 1
        num_moved += num_steps == 8 and sum(len(one.sequence.output) > 1 for one in engine.snapshot().running)
        return step()

    monkeypatch.setattr(engine, "step", counting)
    monkeypatch.setattr(Grammar, "table", property(lambda grammar: grammar.wait() if num_steps >= 8 else None))
    assert answers(engine, compiler, params=params) == expected
    assert num_moved > 1
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("grammar_memory", [0, 32])
def test_several_answers_with_prefixes(tiny, compiler, expected, grammar_memory):
    """Twice in one engine: the second time prompts are found in the cache."""
    engine = open_engine(tiny, grammar_memory=grammar_memory)
    for _ in range(2):
        assert answers(engine, compiler) == expected
    assert engine.scheduler.counters.reused_tokens > 0
    engine.close()


def test_a_grammar_that_fails_ends_its_answer_alone(tiny, compiler, expected, monkeypatch):
    engine = open_engine(tiny, grammar_memory=0)
    pairs = zip(PROMPTS, PARAMS, strict=True)
    sequences = [make_sequence(compiler, prompt, one) for prompt, one in pairs]
    bad = next(n for n, one in enumerate(PARAMS) if one.structured is not None and len(expected[n]) > 3)
    start = sequences[bad].request.grammar.start

    def failing():
        matcher = start()
        matcher.of_library.consume_tokens([0])  # llguidance stays in an error after a wrong token
        return matcher

    monkeypatch.setattr(sequences[bad].request.grammar, "start", failing)
    others = [n for n, one in enumerate(sequences) if one.request.grammar is not sequences[bad].request.grammar]
    found = run(engine, sequences)
    assert sequences[bad].finish_reason == "error"
    assert "grammar" in (sequences[bad].error or "")
    assert [found[n] for n in others] == [expected[n] for n in others]
    engine.close()


@pytest.mark.parametrize(
    ("options", "draft"), [({"grammar_memory": 0}, None), ({}, None), ({}, NgramDraft()), ({}, LayersDraft(1))]
)
def test_what_contradicts_the_grammar(tiny, compiler, options, draft):
    """A finished answer ends, whatever the parameters forbid; one that cannot be finished says what excludes it."""
    engine = open_engine(tiny, draft, **options)
    x, y, z = (VOCABULARY.id_of[letter] for letter in (b"x", b"y", b"z"))
    # Id 0 ends answers.
    ended = [{"min_tokens": 5}, {"min_tokens": 3}, {"allowed_token_ids": [x, y, z]}, {"min_tokens": 8, "seed": 2}]
    failed = [{"allowed_token_ids": [x, z]}, {"allowed_token_ids": [5]}]
    params = [
        SamplingParams(**{"max_tokens": 8, "seed": 1, "structured": {"regex": "xyz"}, **one}) for one in ended + failed
    ]
    sequences = [make_sequence(compiler, [5, 6], one, waits=True) for one in params]
    run(engine, sequences)
    for sequence in sequences[: len(ended)]:
        assert (sequence.finish_reason, text_of(sequence.output), sequence.error) == ("stop", "xyz", None)
    for sequence, position in zip(sequences[len(ended) :], (3, 2), strict=True):
        assert sequence.finish_reason == "error"
        excluded = "those that the answer must match are excluded by allowed_token_ids"
        assert sequence.error == f"no token is left at position {position}: {excluded}"
        assert sequence.excludes_itself
    engine.close()


@pytest.mark.slow
def test_the_grammar_begins_after_the_reasoning(tiny, compiler):
    """The reasoning is free text without an end; one that does not open is under the grammar at once."""
    think, params = Tags("<", ">"), SamplingParams(max_tokens=60, temperature=1.5, seed=3, top_p=0.9)
    params = SamplingParams(**{**vars(params), "structured": {"regex": "[0-9]{3}"}, "logit_bias": {31: 4.0}})
    found = {}
    for end in ("<", ">", ""):
        for options in ({}, {"grammar_memory": 0}, {"steps_per_dispatch": 1}):
            engine = open_engine(tiny, **options)
            gate = gate_of(think, end, VOCABULARY, {})
            assert (gate is None) == (end == ">")
            sequence = make_sequence(compiler, [5, 6, 7], params, waits=True, gate=gate)
            found.setdefault(end, []).append(text_of(run(engine, [sequence])[0]))
            assert sequence.finish_reason == "stop"
            engine.close()
    assert all(len(set(texts)) == 1 for texts in found.values())
    assert re.fullmatch("[^>]+>[0-9]{3}", found["<"][0])
    assert re.fullmatch("[0-9]{3}", found[">"][0])
    assert re.fullmatch("(<[^>]*>)?[0-9]{3}", found[""][0])


@pytest.mark.slow
@pytest.mark.parametrize("num_grammars", quick([20, 500], 20))
def test_no_grammar_compiles_a_program(tiny, compiler, num_grammars):
    engine = open_engine(tiny, grammar_memory=1)
    engine.warm_up()
    with compilation_cache.counting() as counts:
        for number in range(num_grammars):
            form = {"regex": f"[0-{number % 9 + 1}]{{1,{number + 2}}}{'x' * (number % 5)}"}
            params = SamplingParams(max_tokens=8, seed=number, structured=form)
            run(engine, [make_sequence(compiler, [1, 2], params, waits=number % 2 == 0)])
    assert counts.compiled + counts.hits == 0
    engine.close()


def test_tables_never_overlap_and_give_way():
    """Random tables come and go: what is held is disjoint, what is used stays, and blocks write what the table says."""
    numbers = np.random.default_rng(0)
    sizes = TableSizes(2, 40, num_masks=30, num_states=50, num_grammars=6, num_successors=300)
    pool, users, num_refused = TablePool(sizes), {}, 0
    for number in range(400):
        key = str(numbers.integers(12))
        if key in users and numbers.random() < 0.6:
            pool.release(key)
            users[key] -= 1
            users = {key: count for key, count in users.items() if count}
            continue
        count, classes, masks = (int(one) for one in numbers.integers(2, [20, 10, 12]))
        table = TokenTable(
            numbers.integers(0, classes, 40).astype(np.int16),
            numbers.integers(-1, count, (count, classes)).astype(np.int32),
            numbers.integers(0, 2**32, (masks, 2), dtype=np.uint32),
            numbers.integers(0, masks, count).astype(np.int32),
            np.full(count, -1, np.int32),
        )
        if pool.acquire(key, table, []) is None:
            num_refused += 1
        else:
            users[key] = users.get(key, 0) + 1
        for which in range(4):
            rows = [row for held in pool._held.values() for row in held.ranges[which]]
            assert len(rows) == len(set(rows)), number
            assert min(rows, default=3) >= (3 if which < 2 else 1)
        assert set(users) <= set(pool._held)
    assert num_refused > 5
