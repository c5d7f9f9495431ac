"""Batches for heads, and the acceptance of what a head drafts in held-out texts."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import Params
from jaxinfer.training.acceptance import Acceptance, simulate_drafts
from jaxinfer.training.head_objectives import HeadBatch
from jaxinfer.training.head_rows import HeadRows, chosen_anchors
from jaxinfer.training.target_states import TargetStates


def make_batch(
    rows: HeadRows, chosen: Any, anchors: np.ndarray, seen: TargetStates, log_probs: jax.Array | None = None
) -> HeadBatch:
    """The batch of chosen rows with their anchors, and what the target computes of them; without log-probabilities, for
    what needs no loss."""
    tokens, positions, texts = (jnp.asarray(x[chosen]) for x in (rows.tokens, rows.positions, rows.texts))
    weights, best = jnp.asarray(rows.weights[chosen]), jnp.asarray(seen.best)
    log_probs = jnp.zeros((0,)) if log_probs is None else log_probs
    return HeadBatch(tokens, positions, texts, weights, jnp.asarray(anchors), seen.states, log_probs, best)


class DraftedPlaces(NamedTuple):
    """A held-out text: its tokens int32 [T] that a head is to draft, and bool [T, K], whether the draft tokens that
    begin with each, k places later, are right. A token that is drafted too early in the text is not."""

    tokens: np.ndarray
    is_right: np.ndarray


def acceptance_of(drafted: Sequence[DraftedPlaces]) -> Acceptance:
    """Speculation over texts, simulated."""
    first = np.concatenate([text.is_right[:, 0] for text in drafted])
    return simulate_drafts([text.is_right for text in drafted], float(first.mean()))


class HeadMeter:
    """Measures a head on held-out texts, of which the target computes its states once.

    A draft token is accepted if it is the target's best one after the true tokens before it. `logits` makes those of
    draft tokens [B, A, N, V] of parameters and a batch; the first of an anchor is said `distance` places later.
    `seconds`: of the last measurement.
    """

    def __init__(
        self,
        logits: Callable[[Params, HeadBatch], jax.Array],
        rows: HeadRows,
        observe: Callable[[HeadRows, Any], TargetStates],
        *,
        distance: int,
        batch_size: int,
    ):
        self._rows, self._distance, self.seconds = rows, distance, 0.0
        is_anchor = rows.anchors(distance)
        anchors, size = chosen_anchors(is_anchor, max(1, int(is_anchor.sum(axis=1).max()))), min(batch_size, len(rows))
        # The last batch overlaps the one before it: all have one shape.
        self._starts = [min(start, len(rows) - size) for start in range(0, len(rows), size)]
        chosen = (slice(start, start + size) for start in self._starts)
        self._batches = [jax.device_get(make_batch(rows, some, anchors[some], observe(rows, some))) for some in chosen]
        self._choose = jax.jit(lambda params, batch: jnp.argmax(logits(params, batch), axis=-1))

    def __call__(self, params: Params) -> Acceptance:
        began = time.perf_counter()
        drafted = self.drafted(params)
        self.seconds = time.perf_counter() - began
        return acceptance_of(drafted)

    def drafted(self, params: Params) -> list[DraftedPlaces]:
        """Drafted tokens of each text."""
        rows, length = self._rows, self._rows.tokens.shape[1]
        agrees: dict[int, np.ndarray] = {}
        for start, batch in zip(self._starts, self._batches, strict=True):
            chosen = np.asarray(self._choose(params, batch))
            for row, (anchors, best) in enumerate(zip(batch.anchors, batch.best, strict=True)):
                roots = anchors[anchors < length] + self._distance
                places = np.minimum(roots[:, None] + np.arange(chosen.shape[-1]), length - 1)
                agrees[start + row] = np.zeros((length, chosen.shape[-1]), bool)
                agrees[start + row][roots] = chosen[row, : len(roots)] == best[places]
        texts = []
        for row, numbers in enumerate(rows.texts):
            for number in range(numbers.max() + 1):
                places = np.flatnonzero((numbers == number) & (rows.weights[row] > 0))
                texts.append(DraftedPlaces(rows.tokens[row][places + 1], agrees[row][places]))
        return texts
