"""Log-probabilities of prompts, piece by piece as their chunks are computed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.stages import Lowered

from jaxinfer.engine import programs, results
from jaxinfer.engine.placement import DevicePlacement
from jaxinfer.engine.programs import ProgramModel, Weights
from jaxinfer.engine.request import SequenceState
from jaxinfer.sampling import SamplingBatch, SamplingState, TokenLogprobs, make_batch, make_state
from jaxinfer.sampling.params import MAX_LOGPROBS


@dataclass(frozen=True)
class ScoredChunk:
    """Tokens `start` to `start + length` of a sequence's prompt, in the rows of hidden states from `row` on."""

    sequence: SequenceState
    row: int
    start: int
    length: int

    @property
    def num_targets(self) -> int:
        """Tokens that the rows predict and the prompt has."""
        return max(min(self.length, len(self.sequence.request.token_ids) - self.start - 1), 0)


@dataclass(frozen=True)
class PendingScores:
    """Scores that are computed on the device: raw ones of all rows, and processed ones by piece."""

    pieces: tuple[ScoredChunk, ...]
    raw: TokenLogprobs | None
    processed: tuple[jax.Array | None, ...]

    def deliver(self) -> None:
        """Waits for them and appends them to their sequences."""
        raw, processed = jax.device_get((self.raw, self.processed))
        for piece, values in zip(self.pieces, processed, strict=True):
            rows, first = range(piece.row, piece.row + piece.num_targets), piece.start + 1
            if raw is not None:
                results.take_prompt_logprobs(piece.sequence, raw, rows, first)
            if values is not None:
                results.take_processed(piece.sequence, values, rows, first)


@dataclass(frozen=True)
class ScoreWork:
    """What is scored of one step, as host values.

    Attributes:
      targets: int32[T], the tokens that the rows predict. num_rows: of the step. wants_raw: whether any piece asks for
        raw ones.
      processed: for each piece that is scored under its sampling parameters the number of its history, int32[2] with
        the first row that is scored and one past the last, and the parameters; else None.
    """

    targets: np.ndarray
    num_rows: int
    wants_raw: bool
    processed: tuple[tuple[int, np.ndarray, SamplingBatch] | None, ...]


class ScoreOperations(Protocol):
    """The device's side of scoring, which an engine does on all hosts."""

    def start_scores(self, number: int, history: SamplingState) -> None: ...

    def stop_scores(self, number: int) -> None: ...

    def run_scores(self, work: ScoreWork) -> tuple[TokenLogprobs | None, tuple[jax.Array | None, ...]]: ...


class PromptScorer:
    """Scores the prompts of requests that ask for it: the host's side."""

    def __init__(self, vocab_size: int, operations: ScoreOperations):
        self._vocab_size, self._operations = vocab_size, operations
        self._numbers: dict[SequenceState, int] = {}  # of those with a history on the device
        self._next_number = 0

    def start(self, sequence: SequenceState) -> None:
        """Before the first chunk, and again where the prompt is computed once more."""
        sequence.prompt_logprobs, sequence.processed_logprobs = [], []
        self.stop(sequence)
        if sequence.request.score_from is not None:
            history = make_state([sequence.tokens[: sequence.request.score_from]], self._vocab_size)
            self._numbers[sequence] = number = self._next_number
            self._next_number += 1
            self._operations.start_scores(number, history)

    def stop(self, sequence: SequenceState) -> None:
        """Ends scoring of a sequence: its prompt is finished, or the sequence has ended."""
        number = self._numbers.pop(sequence, None)
        if number is not None:
            self._operations.stop_scores(number)

    def score(self, pieces: tuple[ScoredChunk, ...], hidden: jax.Array, num_rows: int) -> PendingScores | None:
        """Starts scoring the pieces that ask for it from the final hidden states [T, D] of the step just sent, of which
        the first `num_rows` are of tokens; None if none does."""
        pieces = tuple(piece for piece in pieces if piece.sequence.request.scores_prompt and piece.num_targets >= 0)
        if not pieces:
            return None
        targets = np.zeros(hidden.shape[0], np.int32)
        for piece in pieces:
            following = piece.sequence.tokens[piece.start + 1 : piece.start + 1 + piece.num_targets]
            targets[piece.row : piece.row + piece.num_targets] = following
        wants_raw = any(piece.sequence.params.prompt_logprobs is not None for piece in pieces)
        work = ScoreWork(targets, num_rows, wants_raw, tuple(map(self._processed, pieces)))
        return PendingScores(pieces, *self._operations.run_scores(work))

    def _processed(self, piece: ScoredChunk) -> tuple[int, np.ndarray, SamplingBatch] | None:
        sequence = piece.sequence
        if sequence.request.score_from is None:
            return None
        end = piece.row + piece.num_targets
        first = piece.row + max(sequence.request.score_from - piece.start - 1, 0)
        rows = np.array([min(first, end), end], np.int32)
        return self._numbers[sequence], rows, make_batch([sequence.row], self._vocab_size)


class DeviceScorer:
    """Scores on the device, with the histories that processed scores need, by number."""

    def __init__(self, model: ProgramModel, weights: Weights, placement: DevicePlacement):
        self._model, self._weights, self._placement = model, weights, placement
        self._histories: dict[int, SamplingState] = {}

    def start(self, number: int, history: SamplingState) -> None:
        """Keeps a history on the device."""
        self._histories[number] = self._placement.put(history)

    def stop(self, number: int) -> None:
        """Drops it."""
        del self._histories[number]

    def lower(self, num_tokens: int, dtype: Any) -> tuple[Callable[[], Lowered], Callable[[], Lowered]]:
        """How the programs of raw and of processed scores are traced, for hidden states [num_tokens, D]."""

        def arguments(*values: Any) -> tuple[Any, ...]:
            shape = (num_tokens, self._model.config.hidden_size)
            return self._model, self._weights, *self._placement.put((np.zeros(shape, dtype), *values))

        def lower_raw() -> Lowered:
            targets = np.zeros(num_tokens, np.int32)
            return programs.score.lower(*arguments(targets, np.int32(0)), MAX_LOGPROBS)

        def lower_processed() -> Lowered:
            targets, vocab_size = np.zeros(num_tokens, np.int32), self._model.config.vocab_size
            row = make_batch([None], vocab_size), make_state([None], vocab_size)
            return programs.score_processed.lower(*arguments(targets, np.zeros(2, np.int32), *row))

        return lower_raw, lower_processed

    def run(self, work: ScoreWork, hidden: jax.Array) -> tuple[TokenLogprobs | None, tuple[jax.Array | None, ...]]:
        """Raw scores of all rows if wanted, and processed ones [T] of each piece, from hidden states [T, D]."""
        (targets, num_rows), raw = self._placement.put((work.targets, np.int32(work.num_rows))), None
        if work.wants_raw:
            raw = programs.score(self._model, self._weights, hidden, targets, num_rows, MAX_LOGPROBS)
        processed: list[jax.Array | None] = []
        for one in work.processed:
            values = None
            if one is not None:
                number, *arrays = one
                rows, batch = self._placement.put(tuple(arrays))
                self._histories[number], values = programs.score_processed(
                    self._model, self._weights, hidden, targets, rows, batch, self._histories[number]
                )
            processed.append(values)
        return raw, tuple(processed)
