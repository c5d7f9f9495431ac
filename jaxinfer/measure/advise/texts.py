"""What trials are measured on: texts for the quality, and prompts cut from them."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxinfer.llm import LLM
from jaxinfer.measure.bench.workload import Ask, DatasetRow, Workload
from jaxinfer.sampling import SamplingParams

NUM_TEXTS, TEXT_TOKENS = 8, 256
# Of the baseline's log-probabilities, which are held.
MAX_BYTES = 2**30


def encoded(tokenizer: Any, documents: Sequence[str]) -> list[list[int]]:
    """Token ids of documents of more than a token."""
    return [tokens for tokens in (tokenizer.encode_content(text) for text in documents) if len(tokens) > 1]


def sampled(llm: LLM, seed: int) -> list[list[int]]:
    """Token ids of the model's own text: from tokens drawn at random, at temperature 1."""
    rows = llm.config.vocab_size if llm.tokenizer is None else min(llm.config.vocab_size, llm.tokenizer.vocab_size)
    starts = np.random.default_rng(seed).integers(0, rows, NUM_TEXTS).tolist()
    length = min(TEXT_TOKENS, llm.max_model_len - 1)
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=length, ignore_eos=True)
    outputs = llm.generate([[start] for start in starts], params, use_tqdm=False)
    return [[start, *one.outputs[0].token_ids] for start, one in zip(starts, outputs, strict=True)]


def for_quality(texts: Sequence[Sequence[int]], vocab_size: int, max_model_len: int) -> list[list[int]]:
    """The beginnings of texts, as many as log-probabilities may be held of."""
    length = min(TEXT_TOKENS, max_model_len - 1)
    count = max(min(NUM_TEXTS, MAX_BYTES // (4 * vocab_size * length)), 1)
    return [list(text[:length]) for text in texts if len(text) > 1][:count]


def requests(
    workload: Workload, texts: Sequence[Sequence[int]], count: int, vocab_size: int, num_shared: int = 0
) -> list[Ask]:
    """So many requests: of the workload's dataset where it has one, else prompts cut from the texts at random places.
    Before each stand the same `num_shared` tokens."""
    if not workload.dataset:
        numbers = np.random.default_rng([workload.seed, 2])
        stream = [token for text in texts for token in text]
        prompts = [_cut(numbers, stream, length) for length in workload.prompt_tokens.draw(numbers, count)]
        shared = _cut(numbers, stream, num_shared) if num_shared else []
        rows = tuple(DatasetRow([*shared, *prompt], None) for prompt in prompts)
        workload = Workload(workload.prompt_tokens, workload.answer_tokens, rows, workload.seed)
    return workload.asks(count, vocab_size)


def _cut(numbers: np.random.Generator, stream: list[int], length: int) -> list[int]:
    """So many tokens from a random place; a stream that is too short goes round."""
    start = int(numbers.integers(0, max(len(stream) - length, 0) + 1))
    return [stream[(start + place) % len(stream)] for place in range(length)]


def shared_share(prompts: Sequence[Sequence[int]]) -> float:
    """The share of all tokens that another prompt, in any order, has begun with too: what reuse could save."""
    ordered = sorted(map(tuple, prompts))
    total = sum(map(len, ordered))
    same = 0
    for before, after in itertools.pairwise(ordered):
        pairs = enumerate(zip(before, after, strict=False))
        same += next((place for place, (one, other) in pairs if one != other), min(len(before), len(after)))
    return same / total if total else 0.0
