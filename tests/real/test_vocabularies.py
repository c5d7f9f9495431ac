"""SmolLM2 (byte level) and Gemma 3 (bytes as a fallback) draft for each other: the tokens of plain decoding for 100
requests of every kind, and at least 1.5 tokens a round on English."""

import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.loaded_tokenizers import tokenizer_of
from jaxinfer.speculative.vocabularies import MAX_PIECES, ModelTokens, make_tables
from tests.real.requests import opened
from tests.real.texts import HELD_OUT, LICENSE

pytestmark = [pytest.mark.real, pytest.mark.optimized]
SIZES = {"smollm2": 49152, "gemma3-270m": 262144}
PAIRS = [("gemma3-270m", "smollm2"), ("smollm2", "gemma3-270m")]
ENGLISH = [
    "The lighthouse stood at the end of a long pier, and every evening",
    "The history of the printing press begins in",
    "To make a good vegetable soup, you should first",
    "Scientists have recently discovered that the ocean floor",
    "The committee met on Tuesday to discuss the new library, and the chairman said",
    "Photosynthesis is the process by which",
    "Last winter my grandmother told me a story about",
    "When choosing a bicycle for commuting, the most important thing is",
    "The main causes of the industrial revolution were",
    "She opened the letter slowly. It was from her brother, who",
]
OTHERS = [
    "def read_lines(path):\n    ",
    "Größe und Straße: ",
    "1, 1, 2, 3, 5, 8, 13,",
    "😀 means",
    "你好，世界！",
    "\n\n\t* ",
]
KINDS = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "n": 2},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.9, "min_p": 0.05, "stop": [".", "\n"]},
    {"temperature": 1.0, "structured": {"regex": "[A-Z][a-z]{2,9}( [a-z]{1,7}){2,5}\\."}},
    {"temperature": 0.7, "structured": {"json": {"type": "object", "properties": {"name": {"type": "string"},
     "age": {"type": "integer"}}, "required": ["name", "age"], "additionalProperties": False}}},
    {"temperature": 1.2, "logit_bias": {1000: 3.0, 2000: -5.0}, "min_tokens": 4},
)  # fmt: skip
PROMPTS = [*ENGLISH, *OTHERS]
MIXED = [SamplingParams(max_tokens=4 + number % 9, seed=number, **KINDS[number % len(KINDS)]) for number in range(100)]


def answers(llm) -> list[list[tuple]]:
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(MIXED))]
    outputs = llm.generate(prompts, MIXED, use_tqdm=False)
    return [[(one.token_ids, one.finish_reason) for one in output.outputs] for output in outputs]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_answers_and_tokens_a_round(model_path, target, draft):
    with opened(model_path(target)) as llm:
        expected = answers(llm)
    with opened(model_path(target), draft=model_path(draft), num_draft_tokens=4) as llm:
        assert answers(llm) == expected
        for temperature in (0, 0.8):
            before = llm.speculation_stats()
            llm.generate(ENGLISH, SamplingParams(temperature=temperature, seed=7, max_tokens=48), use_tqdm=False)
            stats = llm.speculation_stats()
            rounds, tokens = stats.num_rounds - before.num_rounds, stats.num_tokens - before.num_tokens
            print(f"{draft} for {target}, temperature {temperature}: {tokens / rounds:.2f} tokens a round")
            assert tokens / rounds >= 1.5


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_tables(model_path, target, draft):
    """At least 95 % of tokens of English text are one token of the draft, and none needs more pieces than there are."""
    tokens = {}
    for name in (target, draft):
        tokenizer = tokenizer_of(model_path(name))
        tokens[name] = ModelTokens(name, tokenizer, SIZES[name], (tokenizer.eos_token_id,))
    tables = make_tables(tokens[target], tokens[draft])
    assert tables.num_predicted > 46_000
    text = HELD_OUT + " ".join(LICENSE.read_text().split())
    ids = np.array(tokens[target].tokenizer.encode(text, add_special_tokens=False))
    counts = tables.counts[ids]
    shares = [np.mean(part) for part in (counts == 1, (counts > 1) & (counts <= MAX_PIECES), counts > MAX_PIECES)]
    print(f"{target} read by {draft}: {len(ids)} tokens; " + ", ".join(f"{share:.2%}" for share in shares))
    assert shares[0] > 0.95
    assert shares[2] < 0.001
    read = [piece for token in ids for piece in tables.pieces[token] if piece < tables.size]
    assert tokens[draft].tokenizer.decode(read) == text
