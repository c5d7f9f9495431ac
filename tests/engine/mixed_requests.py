"""Requests of every kind."""

import random

from jaxinfer import SamplingParams


def random_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(97) for _ in range(numbers.randint(1, longest))] for _ in range(count)]


def mixed_params(number: int) -> SamplingParams:
    """Every kind of request, by its number."""
    kinds = (
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 1.0, "seed": number},
        {"temperature": 0.7, "top_k": 5, "seed": number},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01, "seed": number, "prompt_logprobs": 1},
        {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": number},
        {"temperature": 1.0, "logit_bias": {3: 5.0}, "seed": number, "min_tokens": 1},
        {"temperature": 1.0, "allowed_token_ids": [1, 2, 3, 4], "seed": number},
        {"temperature": 1.0, "stop_token_ids": [7, 8, 9], "seed": number},
    )
    return SamplingParams(max_tokens=1 + number % 13, **kinds[number % len(kinds)])
