"""Requests to measure with: lengths, prompts, arrivals. The same seed gives the same ones. Plain Python and NumPy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.engine.request import Prompt
from jaxinfer.files import json_lines


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, from `low` to `high` inclusive.

    Attributes:
      kind: "fixed", "uniform" or "log" (uniform in the logarithm, as in conversations: few are long).
    """

    kind: str
    low: int
    high: int

    @classmethod
    def parse(cls, text: str, option: str) -> "Lengths":
        """Parses "128", "16:256" (uniform) or "log:16:256". Raises ValueError with the option's name."""
        kind, body = ("log", text[4:]) if text.startswith("log:") else ("uniform", text)
        parts = body.split(":")
        try:
            numbers = [int(part) for part in parts]
        except ValueError:
            numbers = []
        if len(numbers) == 1 and kind == "uniform":
            kind, numbers = "fixed", numbers * 2
        if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
            raise ValueError(f"{option}: {text!r} is none of 128, 16:256 (uniform) and log:16:256")
        return cls(kind, numbers[0], numbers[1])

    def draw(self, numbers: np.random.Generator, count: int) -> list[int]:
        """Draws `count` lengths."""
        if self.kind == "log":
            drawn = np.exp(numbers.uniform(math.log(self.low), math.log(self.high + 1), count)).astype(int)
            return np.clip(drawn, self.low, self.high).tolist()
        return numbers.integers(self.low, self.high + 1, count).tolist()

    def __str__(self) -> str:
        if self.kind == "fixed":
            return str(self.low)
        return f"{'log:' if self.kind == 'log' else ''}{self.low}:{self.high}"


@dataclass(frozen=True)
class WorkloadRequest:
    """A prompt, as text or token ids, and the exact number of tokens of its answer."""

    prompt: Prompt
    num_tokens: int


# A line of a dataset: its prompt, and the tokens of its answer; None takes these from the options.
DatasetRow = tuple[Prompt, int | None]


@dataclass(frozen=True)
class BenchWorkload:
    """A source of requests.

    Attributes:
      prompt_tokens, answer_tokens: distributions of lengths. dataset: rows with prompts and optional lengths, used in
        order and repeated when they end; () draws random prompts. seed: of everything that is drawn.
    """

    prompt_tokens: Lengths
    answer_tokens: Lengths
    dataset: tuple[DatasetRow, ...] = ()
    seed: int = 0

    def requests(self, count: int, vocab_size: int, part: int = 0) -> list[WorkloadRequest]:
        """`count` requests; each `part` (a repeat, a rate) has different ones."""
        numbers = np.random.default_rng([self.seed, part])
        answers = self.answer_tokens.draw(numbers, count)
        if self.dataset:
            rows = [self.dataset[(part * count + i) % len(self.dataset)] for i in range(count)]
            pairs = zip(rows, answers, strict=True)
            return [WorkloadRequest(prompt, num_tokens or length) for (prompt, num_tokens), length in pairs]
        lengths = self.prompt_tokens.draw(numbers, count)
        prompts = [numbers.integers(0, vocab_size, length).tolist() for length in lengths]
        return [WorkloadRequest(prompt, length) for prompt, length in zip(prompts, answers, strict=True)]


def read_dataset(file: Path) -> tuple[DatasetRow, ...]:
    """Reads JSON lines with "prompt", a text or token ids, and optionally "output_tokens".

    Raises ValueError, with file and line, for other content; FileNotFoundError.
    """
    rows = tuple(_checked(row, where) for where, row in json_lines(file))
    if not rows:
        raise ValueError(f"{file.name} has no rows")
    return rows


def _checked(row: Any, where: str) -> DatasetRow:
    prompt = row.get("prompt") if isinstance(row, dict) else None
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (is_ids or isinstance(prompt, str)):
        raise ValueError(f'{where}: "prompt" must be a text or a list of token ids')
    length = row.get("output_tokens")
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError(f'{where}: "output_tokens" must be a positive integer, got {length!r}')
    return prompt, length


def arrivals(rate: float, count: int, *, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Arrival times in seconds, the first at 0: gaps of mean 1/rate from a gamma distribution of shape `burstiness` (1
    is a Poisson process, less is burstier). With an infinite rate all requests arrive at 0.

    Raises ValueError for a rate or burstiness that is not positive.
    """
    if not rate > 0:
        raise ValueError(f"a request rate must be positive, got {rate}")
    if not 0 < burstiness < math.inf:
        raise ValueError(f"burstiness must be positive, got {burstiness}")
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng([seed, 1]).gamma(burstiness, 1 / (rate * burstiness), max(count - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:count]


def parse_numbers(text: str, option: str, *, integers: bool = False) -> list[float]:
    """Parses positive numbers separated by commas, without repeats; "inf" unless `integers`. Raises ValueError."""
    try:
        numbers: Sequence[float] = [int(part) if integers else float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(number > 0 for number in numbers):
        example = "1,8,32" if integers else "0.5,2,inf"
        raise ValueError(f"{option}: {text!r} is not a list of positive numbers, such as {example}")
    return list(dict.fromkeys(numbers))
