"""What the sampler remembers of the tokens so far, carried on the device from step to step."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling.batch import BAD_WORD_TOKENS

NUM_RECENT = BAD_WORD_TOKENS - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """History of S slots over V tokens: a pytree, every leaf with S in front. Programs take it donated and return it.

    Attributes:
      output_counts: int32[S, V], how often each token was generated; 4 * S * V bytes.
      prompt_mask: bool[S, V], tokens of the prompt.
      num_output: int32[S], tokens generated.
      recent: int32[S, 15], the last generated tokens, newest on the right, V where there are fewer.
    """

    output_counts: jax.Array
    prompt_mask: jax.Array
    num_output: jax.Array
    recent: jax.Array


def make_state(
    prompts: Sequence[Sequence[int] | None], vocab_size: int, outputs: Sequence[Sequence[int]] | None = None
) -> SamplingState:
    """Builds a state on the host, as NumPy arrays. None is an empty slot.

    `outputs` are the tokens already generated, where a request was preempted or resumed. Raises ValueError for a token
    outside the vocabulary.
    """
    outputs = [()] * len(prompts) if outputs is None else outputs
    if len(outputs) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and {len(outputs)} outputs")
    num_slots = len(prompts)
    arrays: dict[str, Any] = {
        "output_counts": np.zeros((num_slots, vocab_size), np.int32),
        "prompt_mask": np.zeros((num_slots, vocab_size), np.bool_),
        "num_output": np.array([len(output) for output in outputs], np.int32),
        "recent": np.full((num_slots, NUM_RECENT), vocab_size, np.int32),
    }
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        for tokens in (prompt or (), output):
            _check_tokens(tokens, vocab_size)
        if prompt is not None and len(prompt):
            arrays["prompt_mask"][i, np.asarray(prompt)] = True
        if len(output):
            np.add.at(arrays["output_counts"][i], np.asarray(output), 1)
            last = list(output)[-NUM_RECENT:]
            arrays["recent"][i, NUM_RECENT - len(last) :] = last
    return SamplingState(**arrays)


def advance(state: SamplingState, tokens: jax.Array, is_active: jax.Array) -> SamplingState:
    """The state after each active row (bool[S]) has generated its token (int32[S]). Other rows stay as they are.

    Writes S counts in place when `state` is donated.
    """
    columns = jnp.where(is_active, tokens, state.output_counts.shape[1])
    recent = jnp.concatenate([state.recent[:, 1:], tokens[:, None]], axis=1)
    return dataclasses.replace(
        state,
        output_counts=_add(state.output_counts, columns[:, None], 1),
        num_output=state.num_output + is_active.astype(jnp.int32),
        recent=jnp.where(is_active[:, None], recent, state.recent),
    )


def rewind(state: SamplingState, earlier: SamplingState, tokens: jax.Array, num_kept: jax.Array) -> SamplingState:
    """Takes back what speculation rejected.

    `state` is `earlier` advanced by the columns of `tokens` int32[S, K], the same tokens for every row that took part
    (V, one past the end, where a row did not); the first `num_kept` int32[S] stay. Counts are taken from `state` and
    corrected in place; of `earlier` only the small arrays are read, so its counts may have been donated.
    """
    columns = jnp.arange(tokens.shape[1])[None, :]
    vocab_size = state.output_counts.shape[1]
    rejected = jnp.where(columns >= num_kept[:, None], tokens, vocab_size)
    history = jnp.concatenate([earlier.recent, tokens], axis=1)
    return dataclasses.replace(
        state,
        output_counts=_add(state.output_counts, rejected, -1),
        num_output=earlier.num_output + num_kept,
        recent=jnp.take_along_axis(history, num_kept[:, None] + jnp.arange(NUM_RECENT)[None, :], axis=1),
    )


def _add(counts: jax.Array, columns: jax.Array, amount: int) -> jax.Array:
    rows = jnp.arange(counts.shape[0])[:, None]
    return jnp.asarray(counts).at[rows, columns].add(amount, mode="drop")


def _check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    array = np.asarray(tokens, np.int64)
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise ValueError(f"token id {outside[0]}, the vocabulary has {vocab_size} tokens")
