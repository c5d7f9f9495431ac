"""Generation over a contiguous cache: a fixed number of slots, each refilled as soon as its answer ends."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.cache import ContiguousCache, KVScales, applied_scales, check_kv_dtype, init_cache, stored_dtype
from jaxinfer.engine import contiguous_programs, programs, results
from jaxinfer.engine.contiguous_programs import DecodeOutput, DecodeState, PrefillRequest
from jaxinfer.engine.request import Generation
from jaxinfer.models import ModelConfig, Params, compute_dtype
from jaxinfer.sampling import (
    SampleOutput,
    SamplingBatch,
    SamplingParams,
    SamplingRow,
    SamplingState,
    TokenLogprobs,
    make_batch,
    make_state,
)
from jaxinfer.sampling.params import MAX_LOGPROBS

MAX_DISPATCHES = 2  # one computes while the other's results are read
MAX_STEPS = 2**30


@dataclass(frozen=True)
class ContiguousOptions:
    """Attributes:
    max_model_len: tokens of prompt and answer together. max_seqs: answers generated at once.
    prefill_chunks: sizes of prompt chunks; a prompt takes the largest for as long as it fills them, then the smallest
      that holds the rest. steps_per_dispatch: decode steps per device call. kv_dtype: as `EngineOptions` has it.
    """

    max_model_len: int
    max_seqs: int
    prefill_chunks: tuple[int, ...] = (32, 128, 512)
    steps_per_dispatch: int = 8
    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        check_kv_dtype(self.kv_dtype)
        for name in ("max_model_len", "max_seqs", "steps_per_dispatch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")

    @property
    def slot_buckets(self) -> tuple[int, ...]:
        """Numbers of slots that programs exist for: 1, 4, 16, ... and max_seqs."""
        smaller = (4**i for i in range(16))
        return (*(size for size in smaller if size < self.max_seqs), self.max_seqs)


@dataclass(frozen=True)
class _Prefilled:
    slot: int
    sequence: Generation
    first: SampleOutput
    prompt_scores: tuple[tuple[int, int, TokenLogprobs], ...]
    processed: tuple[tuple[int, int, jax.Array], ...]


@dataclass(frozen=True)
class _Decoded:
    sequences: tuple[Generation | None, ...]  # who held each slot at dispatch
    output: DecodeOutput


class ContiguousEngine:
    """Runs `Generation`s to their end. Results are read one dispatch late, so that the device never waits for the host.

    Owns its cache (`close` frees it); the parameters belong to the caller. `kv_scales` as `PagedEngine` takes them.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        options: ContiguousOptions,
        *,
        kv_scales: KVScales | None = None,
    ):
        self.config, self.options = config, options
        self.model, self.weights = programs.program_model(config, params)
        self.dtype = compute_dtype(params)
        self.kv_dtype = stored_dtype(options.kv_dtype, self.dtype)
        self.kv_scales = applied_scales(kv_scales, self.kv_dtype, config)
        chunks = [size for size in options.prefill_chunks if size < options.max_model_len]
        self.chunks = (*chunks, min(options.max_model_len, max(options.prefill_chunks)))
        self.chunks = tuple(dict.fromkeys(self.chunks))
        self._state: DecodeState | None = None
        self._batch: SamplingBatch | None = None
        self._slots: list[Generation | None] = []
        self._waiting: deque[Generation] = deque()
        self._in_flight: deque[_Prefilled | _Decoded] = deque()

    # What callers do.

    def add(self, sequence: Generation) -> None:
        """Queues a sequence; it must fit: len(prompt) + max_tokens <= max_model_len."""
        sequence.arrival = time.monotonic()
        self._waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._in_flight or any(slot is not None for slot in self._slots))

    def step(self, max_steps: int | None = None) -> list[Generation]:
        """One turn: fill free slots, send a decode dispatch, read the oldest result. Returns who made progress.

        `max_steps` shortens the dispatch, for a caller who shows every token as it comes.
        """
        self._admit()
        self._dispatch_decode(min(max_steps or MAX_STEPS, self.options.steps_per_dispatch))
        if not self._in_flight:
            return []
        oldest = self._in_flight.popleft()
        return self._commit_prefill(oldest) if isinstance(oldest, _Prefilled) else self._commit_decode(oldest)

    def finish(self, sequence: Generation, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a sequence from outside (a stop string, an abort); its slot is free at once."""
        if sequence.finish_reason is not None:
            return
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        for slot, holder in enumerate(self._slots):
            if holder is sequence:
                self._state = contiguous_programs.deactivate(self._device_state()[0], np.int32(slot))
        self._end(sequence, reason, stop_reason)
        if not self._waiting and not any(slot is not None for slot in self._slots):
            self._in_flight.clear()  # nobody waits for what is still coming

    def warm_up(self, progress: Callable[[Iterator], Iterable] | None = None) -> int:
        """Compiles what requests without taps need; returns how many programs. `progress` may wrap the iteration."""
        pairs = [(slots, chunk) for slots in self.options.slot_buckets for chunk in self.chunks]
        for slots, chunk in progress(iter(pairs)) if progress else iter(pairs):
            self._use_slots(slots)
            length = min(chunk, self.options.max_model_len - 2)
            params = SamplingParams(max_tokens=2, logprobs=0, prompt_logprobs=0, seed=0)
            sequence = Generation(prompt=[0] * max(length, 1), row=SamplingRow(params), max_tokens=2, score_from=0)
            self.add(sequence)
            while self.has_work:
                self._admit(num_slots=slots)
                self.step()
            self._state = contiguous_programs.deactivate(self._device_state()[0], np.int32(0))
        # prefill for every pair; score and score_processed for every chunk; decode and deactivate for every bucket.
        return len(pairs) + 2 * len(self.chunks) + 2 * len(self.options.slot_buckets)

    @property
    def num_warm_up_calls(self) -> int:
        """How many steps `warm_up` has, for a progress bar."""
        return len(self.options.slot_buckets) * len(self.chunks)

    def hidden_states(self, tokens: Sequence[int], taps: tuple[str, ...]) -> dict[str, np.ndarray]:
        """The tapped hidden states [len(tokens), D] of a token sequence, without touching the cache."""
        return programs.tapped_states(self.model, self.weights, tokens, taps, self.kv_dtype, self.kv_scales)

    def close(self) -> None:
        """Frees the cache's memory now; everything still running is aborted."""
        for sequence in [*self._waiting, *(slot for slot in self._slots if slot is not None)]:
            self._end(sequence, "abort", None)
        self._waiting.clear()
        self._in_flight.clear()
        self._free_state()

    @property
    def num_slots(self) -> int:
        """Slots allocated at the moment; 0 before the first request."""
        return len(self._slots)

    def cache_bytes(self) -> int:
        """Bytes of keys and values, int8's scales included, for max_seqs slots."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.abstract_cache))

    @property
    def abstract_cache(self) -> ContiguousCache:
        """Shapes and dtypes of the cache of max_seqs slots."""
        options = self.options
        return jax.eval_shape(lambda: init_cache(self.config, options.max_seqs, options.max_model_len, self.kv_dtype))

    # Filling slots.

    def _admit(self, num_slots: int | None = None) -> None:
        if not self._waiting:
            return
        if not any(slot is not None for slot in self._slots) and not self._in_flight:
            wanted = num_slots or len(self._waiting)
            self._use_slots(next((b for b in self.options.slot_buckets if b >= wanted), self.options.max_seqs))
        for slot, holder in enumerate(self._slots):
            if holder is None and self._waiting:
                sequence = self._waiting.popleft()
                sequence.admitted = time.monotonic()
                self._slots[slot] = sequence
                self._in_flight.append(self._prefill(slot, sequence))

    def _use_slots(self, num_slots: int) -> None:
        if self._state is not None and self._state.num_slots == num_slots:
            return
        self._free_state()
        length = self.options.max_model_len
        self._state, self._batch = contiguous_programs.init_state(
            self.config, num_slots, length, self.kv_dtype, self.kv_scales
        )
        self._slots = [None] * num_slots

    def _device_state(self) -> tuple[DecodeState, SamplingBatch]:
        if self._state is None or self._batch is None:
            raise RuntimeError("the engine has no slots: it is closed or nothing was admitted")
        return self._state, self._batch

    def _free_state(self) -> None:
        for leaf in jax.tree.leaves((self._state, self._batch)):
            leaf.delete()
        self._state, self._batch, self._slots = None, None, []

    def _prefill(self, slot: int, sequence: Generation) -> _Prefilled:
        vocab_size = self.config.vocab_size
        prompt = np.asarray(sequence.prompt, np.int32)
        batch = jax.device_put(make_batch([sequence.row], vocab_size))
        history = jax.device_put(make_state([sequence.prompt], vocab_size))
        first: SampleOutput | None = None
        scores: list[tuple[int, int, TokenLogprobs]] = []
        processed: list[tuple[int, int, jax.Array]] = []
        score_history: SamplingState | None = None
        if sequence.score_from is not None:
            score_history = jax.device_put(make_state([sequence.prompt[: sequence.score_from]], vocab_size))
        start = 0
        while start < len(prompt):
            rest = len(prompt) - start
            size = next((chunk for chunk in self.chunks if chunk >= rest), self.chunks[-1])
            length = min(rest, size)
            # NumPy values go to the device with the call; Python numbers would be traced as weakly typed constants.
            chunk_fields: dict[str, Any] = {
                "tokens": results.padded(prompt[start : start + length], size),
                "start": np.int32(start),
                "length": np.int32(length),
                "slot": np.int32(slot),
                "is_last": np.bool_(start + length == len(prompt)),
                "max_tokens": np.int32(sequence.max_tokens),
                "batch": batch,
                "history": history,
            }
            request = PrefillRequest(**chunk_fields)
            state, batch_of_slots = self._device_state()
            self._state, self._batch, first, hidden = contiguous_programs.prefill(
                self.model, self.weights, state, batch_of_slots, request
            )
            targets = results.padded(prompt[start + 1 : start + length + 1], size)
            count = min(length, len(prompt) - start - 1)
            if sequence.params.prompt_logprobs is not None:
                found = programs.score(self.model, self.weights, hidden, targets, MAX_LOGPROBS)
                scores.append((start + 1, count, found))
            if score_history is not None and sequence.score_from is not None:
                target_index = start + 1 + np.arange(size)
                is_scored = (target_index >= sequence.score_from) & (target_index < len(prompt))
                score_history, values = programs.score_processed(
                    self.model, self.weights, hidden, targets, is_scored, batch, score_history
                )
                processed.append((start + 1, count, values))
            start += length
        assert first is not None
        return _Prefilled(slot, sequence, first, tuple(scores), tuple(processed))

    # Decoding.

    def _dispatch_decode(self, num_steps: int) -> None:
        num_sent = sum(isinstance(result, _Decoded) for result in self._in_flight)
        if num_sent >= MAX_DISPATCHES or not any(slot is not None for slot in self._slots):
            return
        state, batch = self._device_state()
        self._state, output = contiguous_programs.decode(
            self.model, self.weights, state, batch, self.options.steps_per_dispatch, np.int32(num_steps)
        )
        self._in_flight.append(_Decoded(tuple(self._slots), output))

    # Reading results.

    def _commit_prefill(self, result: _Prefilled) -> list[Generation]:
        sequence = result.sequence
        if sequence.finish_reason is not None:
            return []
        first, scores, processed = jax.device_get((result.first, result.prompt_scores, result.processed))
        for start, count, found in scores:
            results.take_prompt_logprobs(sequence, found, range(count), start)
        for start, count, values in processed:
            results.take_processed(sequence, values, range(count), start)
        sequence.first_token = time.monotonic()
        self._append(sequence, first, (0,))
        return [sequence]

    def _commit_decode(self, result: _Decoded) -> list[Generation]:
        output = jax.device_get(result.output)
        progressed = []
        for slot, sequence in enumerate(result.sequences):
            if sequence is None or sequence.finish_reason is not None:
                continue
            for step in range(output.is_produced.shape[0]):
                if not output.is_produced[step, slot]:
                    break
                self._append(sequence, output.samples, (step, slot))
                if sequence.finish_reason is not None:
                    break
            progressed.append(sequence)
        return progressed

    def _append(self, sequence: Generation, samples: SampleOutput, index: tuple[int, ...]) -> None:
        """Takes one token, or the error that stands in its place."""
        if not samples.ok[index]:
            end = results.take_error(sequence)
        else:
            end = results.take_token(sequence, int(samples.tokens[index]))
            results.take_logprobs(sequence, samples, index)
        if end is not None:
            self._end(sequence, *end)

    def _end(self, sequence: Generation, reason: str, stop_reason: int | str | None) -> None:
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        sequence.finished = time.monotonic()
        for slot, holder in enumerate(self._slots):
            if holder is sequence:
                self._slots[slot] = None
