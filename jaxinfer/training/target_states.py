"""A target's passes over rows of texts: the hidden states that heads read, and what it says next.

It computes them for each batch, or once for all rows, which are then read from files in each step.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.files import atomic_writer
from jaxinfer.models import ModelConfig, Params, bind, collect, compute_dtype
from jaxinfer.progress import Stage
from jaxinfer.sampling import exact
from jaxinfer.training.head_mesh import ONE_DEVICE, HeadPlacement
from jaxinfer.training.head_objectives import NOT_DRAFTED
from jaxinfer.training.head_rows import HeadRows
from jaxinfer.training.objectives import attend_by_head

MAX_STORED_BYTES = 8 * 2**30  # of all rows together, at most


class TargetStates(NamedTuple):
    """Attributes:
    states: the tapped ones, each [B, T, D]. hidden: the last ones [B, T, D], after the norm.
    total: float32 [B, T], the logarithm of the sum of the exponentials of all tokens' logits.
    best: int32 [B, T], the most probable token, in the numbers of a smaller vocabulary, or NOT_DRAFTED.
    """

    states: tuple[Any, ...]
    hidden: Any
    total: Any
    best: Any


class Target:
    """A target in passes over whole rows, with its parameters as plain arrays.

    Args:
      taps: names of the states that a head reads.
      index: the place of each token in the head's vocabulary, or that vocabulary's size; None for all tokens.
      temperature: divides its logits.
      placement: where passes run; the parameters are there.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        taps: Sequence[str],
        index: np.ndarray | None,
        temperature: float,
        placement: HeadPlacement = ONE_DEVICE,
    ):
        size = config.vocab_size if index is None else int(index.max())
        tokens_of = None if index is None else np.argsort(index, kind="stable")[:size]
        self.taps, self._params, self._placement = tuple(taps), params, placement
        self.dtype = compute_dtype(params)

        def summed(decoder, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Totals and best tokens of some rows: of all rows together the logits of all tokens would be held."""
            logits = decoder.logits(hidden)[..., : config.vocab_size]
            best, _ = exact.largest(logits.reshape(-1, logits.shape[-1]))
            best = best.reshape(logits.shape[:-1])
            if index is not None:
                place = jnp.asarray(index)[best]
                best = jnp.where(place < size, place, NOT_DRAFTED)
            return jax.nn.logsumexp(logits / temperature, axis=-1), best

        @jax.jit
        def observe(params: Params, tokens: jax.Array, positions: jax.Array, texts: jax.Array) -> TargetStates:
            states, tap = collect(taps)
            decoder = bind(config, params)
            hidden = decoder(tokens, positions, partial(attend_by_head, texts=texts), tap)
            # One row at a time, on a mesh one of each part of the rows.
            groups = placement.num_groups if len(tokens) % placement.num_groups == 0 else 1
            by_turn = hidden.reshape(groups, -1, *hidden.shape[1:]).swapaxes(0, 1)
            summaries = jax.lax.map(partial(summed, decoder), by_turn)
            total, best = (x.swapaxes(0, 1).reshape(tokens.shape) for x in summaries)
            return placement.rows(TargetStates(tuple(states[name] for name in taps), hidden, total, best))

        @jax.jit
        def log_probs(params: Params, hidden: jax.Array, total: jax.Array) -> jax.Array:
            logits = bind(config, _with_head_of(config, params, tokens_of)).logits(hidden)
            return placement.of_tokens(logits[..., :size] / temperature - total[..., None])

        self.programs = observe, log_probs

    def observe(self, rows: HeadRows, chosen: Any) -> TargetStates:
        """A pass over chosen rows."""
        arrays = (jnp.asarray(x[chosen]) for x in (rows.tokens, rows.positions, rows.texts))
        return self.programs[0](self._params, *self._placement.rows(tuple(arrays)))

    def log_probs(self, seen: TargetStates) -> jax.Array:
        """float32 [B, T, V] of the tokens of the head's vocabulary; of all tokens the probabilities add up to one."""
        return self.programs[1](self._params, *self._placement.rows((seen.hidden, seen.total)))


def _with_head_of(config: ModelConfig, params: Params, tokens: np.ndarray | None) -> Params:
    """The parameters with the vocabulary head of some tokens."""
    if tokens is None:
        return params
    changed = (
        {"embed": params["embed"][tokens]} if config.tie_word_embeddings else {"lm_head": params["lm_head"][:, tokens]}
    )
    if "lm_head_bias" in params:
        changed["lm_head_bias"] = params["lm_head_bias"][tokens]
    return {**params, **changed}


class StoredStates:
    """Passes of a target over all rows, in files of `at_once` rows; each is written once, also over interruptions.

    Tapped and last states are rounded to bfloat16. Raises ValueError if they take more than `MAX_STORED_BYTES`.
    """

    def __init__(self, folder: Path, rows: HeadRows, target: Target, at_once: int, *, show: bool | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        size = min(at_once, len(rows))
        # The last file overlaps the one before it: all passes have one shape.
        starts = [min(start, len(rows) - size) for start in range(0, len(rows), size)]
        self._starts, self._files, self._num_taps = np.array(starts), [], len(target.taps)
        self._dtype = target.dtype
        with Stage("computing the target's states", len(starts), "file", show=show) as stage:
            for start in starts:
                path = folder / f"{start:06d}.npy"
                if not path.exists():
                    _store(path, target.observe(rows, slice(start, start + size)), len(starts))
                self._files.append(np.load(path, mmap_mode="r"))
                stage.update()

    def __call__(self, chosen: np.ndarray) -> TargetStates:
        """The pass over rows with these numbers."""
        files = np.searchsorted(self._starts, chosen, side="right") - 1
        places = chosen - self._starts[files]
        whole = np.stack([self._files[file][place] for file, place in zip(files, places, strict=True)])
        *states, rest = np.split(whole, [whole.shape[-1] - 4], axis=-1)
        *states, hidden = np.split(states[0].view(jnp.bfloat16), self._num_taps + 1, axis=-1)
        total, best = (np.ascontiguousarray(rest[..., part]) for part in (slice(0, 2), slice(2, 4)))
        computed = (jnp.asarray(x, self._dtype) for x in states)
        return TargetStates(
            tuple(computed),
            jnp.asarray(hidden, self._dtype),
            total.view(np.float32)[..., 0],
            best.view(np.int32)[..., 0],
        )


def _store(path: Path, seen: TargetStates, num_files: int) -> None:
    states = [np.asarray(jnp.asarray(x, jnp.bfloat16)).view(np.uint16) for x in (*seen.states, seen.hidden)]
    numbers = np.asarray(seen.total, np.float32), np.asarray(seen.best, np.int32)
    whole = np.concatenate([*states, *(x[..., None].view(np.uint16) for x in numbers)], axis=-1)
    if (size := whole.nbytes * num_files) > MAX_STORED_BYTES:
        raise ValueError(
            f"the target's states of all rows take {size / 2**30:.1f} GiB, and {MAX_STORED_BYTES / 2**30:.0f} are "
            "allowed: compute them in each step, or train on less text"
        )
    with atomic_writer(path) as file:
        np.save(file, whole)
