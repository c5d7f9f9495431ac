"""Acceptance of a draft's tokens by its target, from teacher-forced choices, without generating text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import ModelConfig, Params
from jaxinfer.training.objectives import sequence_logits
from jaxinfer.training.texts import NO_TOKEN

NUM_DRAFT_TOKENS = 4
ROWS_AT_ONCE = 10


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of a draft on greedy text of its target, with chains of k draft tokens.

    Attributes:
      agreement: share of tokens that the draft would have chosen, given the true text before them.
      num_accepted, num_proposed: draft tokens in all rounds. num_rounds: calls of the target.
      num_tokens: tokens of the text.
      by_position: of each draft token of a round, the share of rounds in which it was accepted, of those with so many.
    """

    agreement: float
    num_accepted: int
    num_proposed: int
    num_rounds: int
    num_tokens: int
    by_position: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Accepted draft tokens per proposed one."""
        return self.num_accepted / self.num_proposed if self.num_proposed else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens per call of the target, including its own."""
        return self.num_tokens / self.num_rounds


def simulate(agrees: Sequence[np.ndarray] | np.ndarray, num_draft_tokens: int = NUM_DRAFT_TOKENS) -> Acceptance:
    """Simulates speculation over texts, each bool [T]: whether the draft, given the true text, chooses each token.

    Greedy drafts are accepted while they equal the target's choice, so until the first disagreement the draft has
    seen the true text, and a round accepts the run of agreements. The target adds a token of its own; the next round
    starts behind it. At the end of a text no more is drafted than the text has.
    """
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens must be at least 1, got {num_draft_tokens}")
    if not len(agrees) or any(text.ndim != 1 or not len(text) for text in agrees):
        raise ValueError("texts of agreements are needed, each bool [T] of at least one token")
    steps = np.arange(num_draft_tokens)
    texts = [text[np.minimum(np.arange(len(text))[:, None] + steps, len(text) - 1)] for text in agrees]
    return simulate_drafts(texts, float(np.concatenate(agrees).mean()))


def simulate_drafts(texts: Sequence[np.ndarray], agreement: float) -> Acceptance:
    """Simulates speculation over texts, each bool [T, K]: whether draft token k is the one that comes k places after
    each, where the draft has the true tokens before it. `agreement` is that of the result."""
    most = max((text.shape[1] for text in texts), default=0)
    accepted_at, proposed_at, num_rounds = np.zeros(most, np.int64), np.zeros(most, np.int64), 0
    for text in texts:
        at = 0
        while at < len(text):
            proposed = text[at, : len(text) - at]
            accepted = len(proposed) if proposed.all() else int(np.argmin(proposed))
            accepted_at[:accepted] += 1
            proposed_at[: len(proposed)] += 1
            num_rounds += 1
            at += accepted + 1
    by_position = tuple((accepted_at / np.maximum(proposed_at, 1)).tolist())
    num_accepted, num_proposed = int(accepted_at.sum()), int(proposed_at.sum())
    return Acceptance(agreement, num_accepted, num_proposed, num_rounds, sum(map(len, texts)), by_position)


class AcceptanceMeter:
    """Measures drafts of one configuration on the target's greedy continuations.

    Args:
      rows: int32 [N, T]: prompts of `prompt_lengths` tokens, one number or int [N], each with the target's greedy
        continuation; NO_TOKEN after its end.
    """

    def __init__(
        self, config: ModelConfig, rows: np.ndarray, prompt_lengths: Any, num_draft_tokens: int = NUM_DRAFT_TOKENS
    ):
        first, ends = np.broadcast_to(prompt_lengths, len(rows)), (rows != NO_TOKEN).sum(axis=1)
        for prompt, end in zip(first, ends, strict=True):
            if not 0 < prompt < end:
                raise ValueError(f"a prompt of {prompt} tokens leaves no continuation in a row of {end}")
        self._rows, self._spans, self._num_draft_tokens = rows, list(zip(first, ends, strict=True)), num_draft_tokens
        self._choose = jax.jit(lambda params, tokens: jnp.argmax(sequence_logits(config, params, tokens), axis=-1))

    def __call__(self, params: Params) -> Acceptance:
        before = np.maximum(self._rows[:, :-1], 0)
        blocks = [before[start : start + ROWS_AT_ONCE] for start in range(0, len(before), ROWS_AT_ONCE)]
        choices = np.concatenate([np.asarray(self._choose(params, jnp.asarray(block))) for block in blocks])
        same = choices == self._rows[:, 1:]
        agrees = [row[first - 1 : end - 1] for row, (first, end) in zip(same, self._spans, strict=True)]
        return simulate(agrees, self._num_draft_tokens)
