"""The rows of a step's program: first those of the decoding slots, then the prompts' tokens."""

import numpy as np

from jaxinfer.engine.plans import Chunk
from jaxinfer.engine.programs.paged import empty_work
from jaxinfer.engine.request import SequenceState
from jaxinfer.engine.scoring import ScoredChunk


def step_rows(
    chunks: list[tuple[int, Chunk]],
    decodes: list[tuple[int, SequenceState]],
    num_tokens: int,
    num_slots: int,
    has_prompt_lengths: bool = False,
) -> tuple[dict[str, np.ndarray], list[ScoredChunk]]:
    """The arrays of a step's work by name, and where the pieces of prompts are in it; `has_prompt_lengths` as
    `empty_work`."""
    work = empty_work(num_tokens, num_slots, has_prompt_lengths)
    slots = [slot for slot, _ in decodes]
    work["token_slots"][: len(slots)] = slots
    work["query_starts"][slots] = np.arange(len(slots))
    work["query_lengths"][slots] = 1
    row, pieces = len(slots), []
    for slot, chunk in chunks:
        sequence, rows = chunk.sequence, slice(row, row + chunk.length)
        end = chunk.start + chunk.length
        work["tokens"][rows] = sequence.tokens[chunk.start : end]
        work["token_slots"][rows] = slot
        work["query_starts"][slot], work["query_lengths"][slot] = row, chunk.length
        work["starts"][slot], work["is_prompt"][slot], work["is_last"][slot] = chunk.start, True, chunk.is_last
        work["remaining"][slot] = sequence.num_storable + 1 - end
        if has_prompt_lengths:
            work["prompt_lengths"][slot] = sequence.num_prompt
        pieces.append(ScoredChunk(sequence, row, chunk.start, chunk.length))
        row += chunk.length
    return work, pieces


def slot_of(sequence: SequenceState) -> int:
    """The slot of a planned sequence. Raises RuntimeError if it has none."""
    if sequence.slot is None:
        raise RuntimeError("a sequence without a slot was planned")
    return sequence.slot
