"""Grammars over the tiny model's 97 tokens: id 0 ends, ids 1 to 95 are the characters from space to `~`, 96 is "ab"."""

import random
import re
from dataclasses import replace

from jaxinfer import SamplingParams
from jaxinfer.engine.request import Request, SequenceState
from jaxinfer.grammar.automaton import build_automaton
from jaxinfer.grammar.compiler import Grammar, GrammarCompiler
from jaxinfer.grammar.spelling import Spelling
from jaxinfer.grammar.structured import StructuredOutputs
from jaxinfer.grammar.table_builder import build_table
from jaxinfer.grammar.vocabulary import Vocabulary

VOCABULARY = Vocabulary((None, *(bytes([code]) for code in range(32, 127)), b"ab"), (0,))
PATTERNS = [
    "[0-9]{2}-[a-f]+",
    "(red|green|blue)( and (red|green|blue))*",
    "(ab)+c?",
    "[ -~]{3,9}",
    '\\{"a":(true|false),"b":[0-9]{1,4}\\}',
    "x?y?z?[0-5]",
]
SCHEMAS = [
    {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["on"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 1, "maxItems": 3},
    {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},  # open: no table
]
CHOICES = [["yes", "no"], ["abab", "abba", "b"]]
FORMS = [
    *({"regex": one} for one in PATTERNS),
    *({"json": one} for one in SCHEMAS),
    *({"choice": one} for one in CHOICES),
]


def text_of(tokens) -> str:
    return b"".join(VOCABULARY.tokens[token] or b"" for token in tokens).decode()


def make_compiler() -> GrammarCompiler:
    spelling = Spelling(VOCABULARY, encode)
    return GrammarCompiler(spelling, {0: b"<end>"}, lambda language: build_table(build_automaton(language), spelling))


def encode(text: str) -> list[int]:
    return [VOCABULARY.id_of[piece.encode()] for piece in re.findall("ab|.", text)]


def random_params(number: int, forms=FORMS) -> SamplingParams:
    """Every kind of sampling under a grammar, by its number; one in eight is free."""
    kinds = (
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 1.5, "logit_bias": {3: 5.0, 40: -5.0}},
        {"temperature": 1.0, "stop_token_ids": [20, 30]},
    )
    numbers = random.Random(number)
    params = SamplingParams(max_tokens=numbers.randint(3, 24), seed=number, **kinds[number % len(kinds)])
    return params if number % 8 == 7 else replace(params, structured=numbers.choice(forms))


def make_sequence(
    compiler: GrammarCompiler, prompt: list[int], params: SamplingParams, *, waits: bool = False, **fields
) -> SequenceState:
    """An answer under the grammar of `params`, whose table is there at once if `waits`."""
    grammar: Grammar | None = None
    if params.structured is not None:
        grammar = compiler.compile(StructuredOutputs.of(params.structured))
        if waits:
            grammar.wait()
    request = Request(
        prompt, params, params.max_tokens or 16, params.seed or 0, eos_token_ids=(0,), grammar=grammar, **fields
    )
    return SequenceState(request)


def run(engine, sequences) -> list[list[int]]:
    """Their tokens, with a check that nothing is left behind."""
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert not any(one.num_users for one in engine.grammars.tables._held.values())
    return [sequence.output for sequence in sequences]
