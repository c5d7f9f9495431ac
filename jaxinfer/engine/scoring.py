"""Log-probabilities of prompts, piece by piece as their chunks are computed."""

from dataclasses import dataclass

import jax
import numpy as np

from jaxinfer.engine import programs, results
from jaxinfer.engine.programs import ProgramModel, Weights
from jaxinfer.engine.request import Generation
from jaxinfer.sampling import SamplingState, TokenLogprobs, make_batch, make_state
from jaxinfer.sampling.params import MAX_LOGPROBS


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `start + length` of a generation's prompt, in the rows of hidden states from `row` on."""

    generation: Generation
    row: int
    start: int
    length: int

    @property
    def num_targets(self) -> int:
        """Tokens that the rows predict and the prompt has."""
        return max(min(self.length, len(self.generation.prompt) - self.start - 1), 0)


@dataclass(frozen=True)
class PendingScores:
    """Scores on their way from the device: raw ones of all rows, and processed ones by piece."""

    pieces: tuple[Piece, ...]
    raw: TokenLogprobs | None
    processed: tuple[jax.Array | None, ...]

    def deliver(self) -> None:
        """Waits for them and appends them to their generations."""
        raw, processed = jax.device_get((self.raw, self.processed))
        for piece, values in zip(self.pieces, processed, strict=True):
            rows, first = range(piece.row, piece.row + piece.num_targets), piece.start + 1
            if raw is not None:
                results.take_prompt_logprobs(piece.generation, raw, rows, first)
            if values is not None:
                results.take_processed(piece.generation, values, rows, first)


class PromptScorer:
    """Scores the prompts of generations that ask for it."""

    def __init__(self, model: ProgramModel, weights: Weights, vocab_size: int):
        self._model, self._weights, self._vocab_size = model, weights, vocab_size
        self._histories: dict[Generation, SamplingState] = {}

    def start(self, generation: Generation) -> None:
        """Before the first chunk, and again where the prompt is computed once more."""
        generation.prompt_logprobs, generation.processed_logprobs = [], []
        self._histories.pop(generation, None)
        if generation.score_from is not None:
            history = make_state([generation.prompt[: generation.score_from]], self._vocab_size)
            self._histories[generation] = jax.device_put(history)

    def stop(self, generation: Generation) -> None:
        """Its prompt is done, or is not wanted any more."""
        self._histories.pop(generation, None)

    def score(self, pieces: tuple[Piece, ...], hidden: jax.Array) -> PendingScores | None:
        """Starts scoring the pieces that ask for it from the final hidden states [T, D]; None if none does."""
        pieces = tuple(piece for piece in pieces if needs_scores(piece.generation) and piece.num_targets >= 0)
        if not pieces:
            return None
        size, raw = hidden.shape[0], None
        targets = np.zeros(size, np.int32)
        for piece in pieces:
            following = piece.generation.prompt[piece.start + 1 : piece.start + 1 + piece.num_targets]
            targets[piece.row : piece.row + piece.num_targets] = following
        on_device = jax.device_put(targets)
        if any(piece.generation.params.prompt_logprobs is not None for piece in pieces):
            raw = programs.score(self._model, self._weights, hidden, on_device, MAX_LOGPROBS)
        processed = tuple(self._processed(piece, hidden, on_device) for piece in pieces)
        return PendingScores(pieces, raw, processed)

    def _processed(self, piece: Piece, hidden: jax.Array, targets: jax.Array) -> jax.Array | None:
        generation = piece.generation
        if generation.score_from is None:
            return None
        offset = np.arange(hidden.shape[0]) - piece.row
        is_scored = (offset >= 0) & (offset < piece.num_targets)
        is_scored &= piece.start + 1 + offset >= generation.score_from
        scored, batch = jax.device_put((is_scored, make_batch([generation.row], self._vocab_size)))
        self._histories[generation], values = programs.score_processed(
            self._model, self._weights, hidden, targets, scored, batch, self._histories[generation]
        )
        return values


def needs_scores(generation: Generation) -> bool:
    """Whether every token of its prompt must be computed, cached or not."""
    return generation.params.prompt_logprobs is not None or generation.score_from is not None
