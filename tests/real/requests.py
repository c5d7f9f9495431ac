"""Requests that a model of 135 million parameters answers right, and the one size of engine that answers them.

All engines have the same shapes, so that tests share compiled programs.
"""

from pathlib import Path
from typing import Any

from jaxinfer import LLM, SamplingParams

SIZES: dict[str, Any] = {"max_model_len": 512, "max_seqs": 4, "prefill_chunk": 252, "prefix_cache": False}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."

_FILLER = "The grass is green and the sky is blue. The sun is warm. Here we go, there and back again. "
_NEEDLE = "The secret number is 48213. "
_NUM_FILLERS = 14
NEEDLE_ANSWER = " 48213"
NEEDLE_TOKENS = 6  # of the answer


def opened(path: Path, **options: Any) -> LLM:
    """An engine of the size that all tests have."""
    return LLM(path, **{**SIZES, **options})


def needle_prompt(place: int) -> str:
    """About 350 tokens that end with a question for a number, which stands after `place` of 14 equal sentences."""
    return _FILLER * place + _NEEDLE + _FILLER * (_NUM_FILLERS - place) + _NEEDLE.partition(" 4")[0]


def greedy(num_tokens: int, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, **settings)


def texts(llm: LLM, prompts: list[Any], params: SamplingParams) -> list[str]:
    """Answers, all at once."""
    return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
