"""Structured output of the embedded models, by `LLM` and by files of requests: it matches, and its tokens do not depend
on where masks come from, on drafts, on pages or on a kill."""

import collections
import json
import random
import signal
import subprocess
import sys
import time

import pytest

from jaxinfer import LLM, CompletionOutput, SamplingParams
from tests.structured_forms import matches, random_form

pytestmark = [
    pytest.mark.slow,
    pytest.mark.optimized,
]  # quick tests of the same are tests/engine/test_structured.py, of a tiny model

PROMPTS = ("def f(x):\n", '"""Returns ', "import ", "class Name:\n    def __init__(self", "{")
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.8},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.1, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"temperature": 0.9, "logit_bias": {40: 3.0, 300: -4.0}, "n": 2},
    {"temperature": 1.0, "stop": ["zz", "q"], "bad_words": ["the"]},
)
NUMBERS, NUM_FORMS = range(200), 250
OPTIONS = {"max_seqs": 16, "max_model_len": 256}
# Options in place of: tables of grammars, 16 slots, no draft.
WAYS = {
    "host masks, one step a dispatch": {"grammar_memory": 0, "steps_per_dispatch": 1},
    "host masks": {"grammar_memory": 0},
    "few tables": {"grammar_memory": 1, "steps_per_dispatch": 3},
    "few pages": {"num_pages": 60, "prefix_cache": False},
    "n-grams": {"draft": "ngram"},
    "n-grams, host masks": {"draft": "ngram", "grammar_memory": 0},
    "its own layers": {"draft": "layers:2", "num_draft_tokens": 3},
    "a draft model": {"draft": "demo-draft"},
    "a draft model, host masks": {"draft": "demo-draft", "grammar_memory": 0},
    "a tree": {"draft": "demo-draft", "draft_tree": (3, 2, 1)},
}


def params_of(number: int, max_tokens: int = 96) -> SamplingParams:
    kind = KINDS[number % len(KINDS)]
    return SamplingParams(structured=random_form(number % NUM_FORMS), seed=number, max_tokens=max_tokens, **kind)


def check(number: int, wanted: SamplingParams, answer: CompletionOutput) -> str:
    """An answer that ended by itself matches, and the others say why they ended."""
    assert answer.finish_reason in ("stop", "length"), answer.error
    if answer.finish_reason == "length":
        assert len(answer.token_ids) == wanted.max_tokens
        return "length"
    if isinstance(answer.stop_reason, str):
        assert answer.stop_reason in wanted.stop
        return "stop text"
    assert matches(random_form(number % NUM_FORMS), answer.text), (wanted.structured, answer.text)
    return "finished"


def ask(llm: LLM, numbers: range) -> list[list[list[int]]]:
    """Tokens of each request's answers. Those that ended by themselves match, the others say that they did not."""
    prompts = [PROMPTS[number % len(PROMPTS)] for number in numbers]
    params = [params_of(number) for number in numbers]
    outputs = llm.generate(prompts, params)
    for number, one, wanted in zip(numbers, outputs, params, strict=True):
        for answer in one.outputs:
            check(number, wanted, answer)
    return [[answer.token_ids for answer in one.outputs] for one in outputs]


@pytest.fixture(scope="module")
def expected():
    with LLM("demo", **OPTIONS) as llm:
        found = ask(llm, NUMBERS)
        assert ask(llm, NUMBERS) == found  # now under tables from the first token on, with cached prefixes
        return found


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_the_same(expected, way):
    with LLM("demo", **{**OPTIONS, **WAYS[way]}) as llm:
        found = ask(llm, NUMBERS)
        assert {number for number, one, other in zip(NUMBERS, found, expected, strict=True) if one != other} == set()


def test_a_batch_that_was_killed_goes_on_with_the_same_tokens(tmp_path):
    rows = []
    for number in NUMBERS:
        kind = {"temperature": 0.8, "seed": number, "max_tokens": 96, "structured": random_form(number)}
        rows.append({"custom_id": str(number), "prompt": PROMPTS[number % len(PROMPTS)], **kind})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name: str, stop_after: float | None) -> bool:
        command = [sys.executable, "-m", "jaxinfer.cli", "batch", tmp_path / "in.jsonl", tmp_path / f"{name}.jsonl"]
        with subprocess.Popen([*map(str, command), "--model", "demo", "--max-seqs", "8"]) as process:
            if stop_after is not None:
                while process.poll() is None and num_lines(name) < stop_after:
                    time.sleep(0.02)
                process.send_signal(signal.SIGKILL)
            return process.wait() == 0

    def num_lines(name: str) -> int:
        path = tmp_path / f"{name}.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def texts(name: str) -> dict[str, str]:
        found = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(found) == len(rows) == len({one["custom_id"] for one in found})
        return {one["custom_id"]: json.dumps(one["outputs"]) for one in found}

    assert run("whole", None)
    for stop_after in sorted(random.Random(0).sample(range(1, 180), 5)):
        assert not run("killed", stop_after)
    assert run("killed", None)
    assert texts("killed") == texts("whole")


@pytest.mark.timeout(3000)
def test_all_of_2000_finished_answers_match():
    """`jsonschema` and `re` are the judges."""
    reasons = collections.Counter()
    with LLM("demo", **OPTIONS) as llm:
        for start in range(1000, 4000, 250):
            numbers = range(start, start + 250)
            params = [params_of(number, max_tokens=160) for number in numbers]
            outputs = llm.generate([PROMPTS[number % len(PROMPTS)] for number in numbers], params)
            for number, wanted, found in zip(numbers, params, outputs, strict=True):
                reasons.update(check(number, wanted, answer) for answer in found.outputs)
    print(
        f"\nanswers that match: {reasons['finished']}; cut by max_tokens: {reasons['length']}, by a stop text: "
        f"{reasons['stop text']}"
    )
    assert reasons["finished"] >= 2000
