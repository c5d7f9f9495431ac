"""Log-probabilities and pooled hidden states of prompts, piece by piece as their chunks are computed."""

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
from jaxinfer.engine.weights import WeightsView
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
    def end(self) -> int:
        """The row after its last."""
        return self.row + self.length

    @property
    def num_targets(self) -> int:
        """Tokens that the rows predict and the prompt has."""
        return max(min(self.length, len(self.sequence.request.token_ids) - self.start - 1), 0)

    @property
    def pooled(self) -> tuple[int, int]:
        """The rows that are pooled: from the first up to the second."""
        request = self.sequence.request
        if request.pooling is None:
            return self.row, self.row
        first, last = request.pooling.rows(request.num_prompt, self.start, self.start + self.length)
        return first - self.start + self.row, last - self.start + self.row

    @property
    def is_read(self) -> bool:
        """True if the request needs hidden states of these tokens."""
        first, last = self.pooled
        return self.sequence.request.scores_prompt or first < last


DeviceScores = tuple[TokenLogprobs | None, tuple[jax.Array | None, ...], jax.Array | None, jax.Array | None]
"""Raw scores of all rows, processed ones by piece, sums float32 [S, D] by pooled piece, and logits float32 [S, N]."""


@dataclass(frozen=True)
class PendingScores:
    """Arrays that are being computed on the device for the pieces of a step."""

    pieces: tuple[ScoredChunk, ...]
    arrays: DeviceScores

    def deliver(self) -> None:
        """Waits for it and adds it to the sequences."""
        raw, processed, sums, logits = jax.device_get(self.arrays)
        pooled = [owner for piece in self.pieces if (owner := piece.sequence).request.pooling is not None]
        for number, sequence in enumerate(pooled):
            num_logits = len(sequence.request.pooling.token_ids) if sequence.request.pooling is not None else 0
            values = logits[number, :num_logits] if num_logits else sums[number]
            sequence.pooled = values.copy() if sequence.pooled is None else sequence.pooled + values
        for piece, values in zip(self.pieces, processed, strict=True):
            rows, first = range(piece.row, piece.row + piece.num_targets), piece.start + 1
            if raw is not None:
                results.take_prompt_logprobs(piece.sequence, raw, rows, first)
            if values is not None:
                results.take_processed(piece.sequence, values, rows, first)


@dataclass(frozen=True)
class ScoreWork:
    """The tokens of one step that are scored, as host values.

    Attributes:
      targets: int32[T], the tokens that the rows predict. num_rows: of the step. wants_raw: True if a piece needs raw
        scores.
      processed: for each piece that is scored under its sampling parameters the number of its history, int32[2] with
        the first row that is scored and one past the last, and the parameters; else None.
      pooled: int32[S, 2], the first row and one past the last of each pooled piece, in their order; None for none.
      token_ids: int32[S, N], the tokens whose logits are wanted after the pooled rows; None for none.
      adapters: int32[T], of the rows; None for a model whose weights hold none.
    """

    targets: np.ndarray
    num_rows: int
    wants_raw: bool
    processed: tuple[tuple[int, np.ndarray, SamplingBatch] | None, ...]
    pooled: np.ndarray | None = None
    token_ids: np.ndarray | None = None
    adapters: np.ndarray | None = None

    def adapters_at(self, rows: np.ndarray) -> np.ndarray | None:
        """Adapters of some rows; any for one past the last one, which stands where there are none."""
        return None if self.adapters is None else self.adapters[np.minimum(rows, len(self.adapters) - 1)]


class ScoreOperations(Protocol):
    """The device's side of scoring, which an engine does on all hosts."""

    def start_scores(self, number: int, history: SamplingState) -> None: ...

    def stop_scores(self, number: int) -> None: ...

    def run_scores(self, work: ScoreWork) -> DeviceScores: ...


class PromptScorer:
    """Scores and pools the prompts of requests that ask for it: the host's side. `num_slots`: pieces of a step at
    most. `has_adapters`: of a model whose weights hold adapters."""

    def __init__(self, vocab_size: int, num_slots: int, operations: ScoreOperations, has_adapters: bool = False):
        self._vocab_size, self._num_slots, self._operations = vocab_size, num_slots, operations
        self._has_adapters = has_adapters
        self._numbers: dict[SequenceState, int] = {}  # of those with a history on the device
        self._next_number = 0

    def start(self, sequence: SequenceState) -> None:
        """Before the first chunk, and again where the prompt is computed once more."""
        sequence.prompt_logprobs, sequence.processed_logprobs, sequence.pooled = [], [], None
        self.stop(sequence)
        if sequence.request.score_from is not None and sequence.request.scores_under_params:
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
        pieces = tuple(piece for piece in pieces if piece.is_read)
        if not pieces:
            return None
        targets = np.zeros(hidden.shape[0], np.int32)
        adapters = np.zeros_like(targets) if self._has_adapters else None
        for piece in pieces:
            if adapters is not None:
                first = max(piece.sequence.request.adapter_start - piece.start, 0)
                adapters[min(piece.row + first, piece.end) : piece.end] = piece.sequence.adapter_slot
            following = piece.sequence.tokens[piece.start + 1 : piece.start + 1 + piece.num_targets]
            targets[piece.row : piece.row + piece.num_targets] = following
        wants_raw = any(piece.sequence.params.prompt_logprobs is not None for piece in pieces)
        processed = tuple(map(self._processed, pieces))
        work = ScoreWork(targets, num_rows, wants_raw, processed, *self._pooled(pieces), adapters)
        return PendingScores(pieces, self._operations.run_scores(work))

    def _pooled(self, pieces: tuple[ScoredChunk, ...]) -> tuple[np.ndarray | None, np.ndarray | None]:
        """`ScoreWork.pooled` and `ScoreWork.token_ids`."""
        pooled = [(piece, pooling) for piece in pieces if (pooling := piece.sequence.request.pooling) is not None]
        if not pooled:
            return None, None
        rows = np.zeros((self._num_slots, 2), np.int32)
        rows[: len(pooled)] = [piece.pooled for piece, _ in pooled]
        width = max(len(pooling.token_ids) for _, pooling in pooled)
        if not width:
            return rows, None
        token_ids = np.zeros((self._num_slots, width), np.int32)
        for row, (_, pooling) in zip(token_ids, pooled, strict=False):
            row[: len(pooling.token_ids)] = pooling.token_ids
        return rows, token_ids

    def _processed(self, piece: ScoredChunk) -> tuple[int, np.ndarray, SamplingBatch] | None:
        sequence = piece.sequence
        if sequence.request.score_from is None or not sequence.request.scores_under_params:
            return None
        end = piece.row + piece.num_targets
        first = piece.row + max(sequence.request.score_from - piece.start - 1, 0)
        rows = np.array([min(first, end), end], np.int32)
        return self._numbers[sequence], rows, make_batch([sequence.row], self._vocab_size)


class DeviceScorer:
    """Scores on the device, with the histories that processed scores need, by number. `head_rows`: positions whose
    logits are one product, of a deterministic engine, whose decode steps have products of as many rows."""

    def __init__(
        self,
        model: ProgramModel,
        weights: WeightsView[Weights],
        placement: DevicePlacement,
        head_rows: int | None = None,
    ):
        self._model, self._weights, self._placement = model, weights, placement
        self._head_rows = head_rows
        self._histories: dict[int, SamplingState] = {}

    def start(self, number: int, history: SamplingState) -> None:
        """Keeps a history on the device."""
        self._histories[number] = self._placement.put(history)

    def stop(self, number: int) -> None:
        """Drops it."""
        del self._histories[number]

    def lower(
        self, num_tokens: int, dtype: Any, has_adapters: bool = False
    ) -> tuple[Callable[[], Lowered], Callable[[], Lowered]]:
        """How the programs of raw and of processed scores are traced, for hidden states [num_tokens, D]."""
        adapters = np.zeros(num_tokens, np.int32) if has_adapters else None

        def arguments(*values: Any) -> tuple[Any, ...]:
            shape = (num_tokens, self._model.config.hidden_size)
            return self._model, self._weights.value, *self._placement.put((np.zeros(shape, dtype), *values))

        def lower_raw() -> Lowered:
            targets = np.zeros(num_tokens, np.int32)
            static = MAX_LOGPROBS, self._placement.put(adapters), self._head_rows
            return programs.score.lower(*arguments(targets, np.int32(0)), *static)

        def lower_processed() -> Lowered:
            targets, vocab_size = np.zeros(num_tokens, np.int32), self._model.config.vocab_size
            row = make_batch([None], vocab_size), make_state([None], vocab_size)
            rows = np.zeros(2, np.int32)
            return programs.score_processed.lower(*arguments(targets, rows, *row, adapters), self._head_rows)

        return lower_raw, lower_processed

    def run(self, work: ScoreWork, hidden: jax.Array) -> DeviceScores:
        """Raw scores of all rows if wanted, processed ones [T] of each piece, and what is pooled, from hidden states
        [T, D]. The programs that pool are compiled when they are first needed."""
        (targets, num_rows), raw = self._placement.put((work.targets, np.int32(work.num_rows))), None
        if work.wants_raw:
            adapters = self._placement.put(work.adapters)
            given = hidden, targets, num_rows, MAX_LOGPROBS, adapters, self._head_rows
            raw = programs.score(self._model, self._weights.value, *given)
        processed: list[jax.Array | None] = []
        for arguments in work.processed:
            values = None
            if arguments is not None:
                number, *arrays = arguments
                rows, batch, adapters = self._placement.put((*arrays, work.adapters))
                given = hidden, targets, rows, batch, self._histories[number], adapters, self._head_rows
                self._histories[number], values = programs.score_processed(self._model, self._weights.value, *given)
            processed.append(values)
        sums = logits = None
        if work.pooled is not None:
            sums = programs.pool(hidden, self._placement.put(work.pooled))
            if work.token_ids is not None:
                arrays = self._placement.put((work.token_ids, work.adapters_at(work.pooled[:, 0])))
                logits = programs.logits_of(self._model, self._weights.value, sums.astype(hidden.dtype), *arrays)
        return raw, tuple(processed), sums, logits
