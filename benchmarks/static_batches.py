"""What continuous batching is measured against: fixed batches that wait for their longest answer.

The same model, weights and kernels, the usual way around a contiguous cache: take the first `batch_size` requests that
have arrived, pad their prompts to the longest, decode until the last one is done, then take the next ones. Nothing
joins, nothing leaves.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache import CachedAttention, init_cache
from jaxinfer.engine.programs import ProgramModel, Weights, program_model
from jaxinfer.models import ModelConfig, Params, compute_dtype

PROMPT_BUCKETS = tuple(range(64, 1025, 64))


@dataclass(frozen=True)
class Timed:
    """Greedy tokens of one request, and the seconds since the start at which each was there for its reader."""

    tokens: list[int]
    times: list[float]


class StaticBatches:
    """Greedy generation in batches of one size; prompts and answers together fit `max_length` tokens."""

    def __init__(self, config: ModelConfig, params: Params, batch_size: int, max_length: int):
        self.config, self.batch_size, self.max_length = config, batch_size, max_length
        self.model, self.weights = program_model(config, params)
        self.dtype = compute_dtype(params)
        self.cache = init_cache(config, batch_size, max_length, self.dtype)

    def warm_up(self) -> None:
        for size in PROMPT_BUCKETS:
            if size <= self.max_length:
                self._run([[0] * size], [2], time.perf_counter)

    def serve(self, prompts: Sequence[list[int]], lengths: Sequence[int], arrivals: Sequence[float]) -> list[Timed]:
        """Answers of exactly `lengths` tokens; request i may start `arrivals[i]` seconds after the call."""
        start = time.perf_counter()
        found: list[Timed] = []
        while len(found) < len(prompts):
            first = len(found)
            wait = arrivals[first] - (time.perf_counter() - start)
            if wait > 0:
                time.sleep(wait)
            now = time.perf_counter() - start
            last = first + 1
            while last < len(prompts) and last - first < self.batch_size and arrivals[last] <= now:
                last += 1
            found += self._run(prompts[first:last], lengths[first:last], lambda: time.perf_counter() - start)
        return found

    def _run(self, prompts: Sequence[list[int]], lengths: Sequence[int], clock: Callable[[], float]) -> list[Timed]:
        size = next(bucket for bucket in PROMPT_BUCKETS if bucket >= max(len(prompt) for prompt in prompts))
        tokens = np.zeros((self.batch_size, size), np.int32)
        counts = np.zeros(self.batch_size, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], counts[row] = prompt, len(prompt)
        self.cache, newest = _prefill(self.model, self.weights, self.cache, tokens, counts)
        steps, times, positions = [np.asarray(newest)], [clock()], counts
        for _ in range(max(lengths) - 1):
            self.cache, newest = _decode(self.model, self.weights, self.cache, newest, positions)
            positions = positions + 1
            steps.append(np.asarray(newest))
            times.append(clock())
        return [
            Timed([int(step[row]) for step in steps[:length]], times[:length]) for row, length in enumerate(lengths)
        ]


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill(model: ProgramModel, weights: Weights, cache, tokens: jax.Array, counts: jax.Array):
    decoder = model.bind(weights)
    rows, size = tokens.shape
    attend = CachedAttention(cache, jnp.arange(rows), jnp.zeros(rows, jnp.int32), counts, size)
    hidden = decoder(tokens, jnp.broadcast_to(jnp.arange(size), tokens.shape), attend)
    last = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    return attend.cache, jnp.argmax(decoder.logits(last), axis=-1).astype(jnp.int32)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _decode(model: ProgramModel, weights: Weights, cache, newest: jax.Array, positions: jax.Array):
    decoder = model.bind(weights)
    rows = newest.shape[0]
    attend = CachedAttention(cache, jnp.arange(rows), positions, jnp.ones(rows, jnp.int32), 1)
    hidden = decoder(newest[:, None], positions[:, None], attend)[:, 0]
    return attend.cache, jnp.argmax(decoder.logits(hidden), axis=-1).astype(jnp.int32)
