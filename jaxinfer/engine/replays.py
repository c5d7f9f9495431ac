"""Answers that are computed again after a preemption, where their tokens attend to other keys than a prompt's.

Such a token chooses what it reads, so a step takes few of them; and what is stored of it is not what a text that begins
alike would have, so only pages of prompts are reused. Plain Python: no JAX here.
"""

from collections.abc import Sequence

from jaxinfer.engine.plans import Chunk
from jaxinfer.engine.request import SequenceState


class AnswerReplays:
    """How much of an answer is computed and shared; `limit` are its tokens in a step, None where they are as those of a
    prompt."""

    def __init__(self, limit: int | None):
        self._limit = limit

    def num_shareable(self, sequence: SequenceState, num_tokens: int) -> int:
        """Of a sequence's first `num_tokens` tokens, those whose pages any text that begins alike may have."""
        return num_tokens if self._limit is None else min(num_tokens, sequence.num_prompt)

    def next_stop(self, sequence: SequenceState, chunks: Sequence[Chunk]) -> int:
        """Where the next piece of its tokens ends, at most, in a step that has `chunks` already."""
        if self._limit is None:
            return sequence.target
        left = self._limit - sum(map(_num_replayed, chunks))
        return max(sequence.num_stored, sequence.num_prompt) + left


def _num_replayed(chunk: Chunk) -> int:
    """Tokens of an answer in a chunk."""
    end = chunk.start + chunk.length
    return max(end - max(chunk.start, chunk.sequence.num_prompt), 0)
