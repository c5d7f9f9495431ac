"""Per-slot state of drafting, carried on the device from step to step."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftSlots:
    """Drafting state of S slots: a pytree. Programs take it donated and return it.

    Attributes:
      sequence: int32[S, L], tokens of prompt and answer; entries after a slot's newest token are unspecified.
      num_drafted: int32[S], leading tokens in the draft model's cache. It may be less than in the target's cache, where
        a slot was decoded without drafts or reused pages that the draft model did not write.
    """

    sequence: jax.Array
    num_drafted: jax.Array


def init_draft_slots(num_slots: int, length: int) -> DraftSlots:
    """The state of empty slots for sequences of up to `length` tokens, as NumPy arrays."""
    return DraftSlots(np.zeros((num_slots, length), np.int32), np.zeros((num_slots,), np.int32))  # pyright: ignore


def record(draft: DraftSlots | None, positions: jax.Array, tokens: jax.Array, is_new: jax.Array) -> DraftSlots | None:
    """Writes tokens int32[S] at positions int32[S] of the sequences where `is_new` bool[S]; None stays None."""
    if draft is None:
        return None
    rows, length = jnp.arange(tokens.shape[0]), draft.sequence.shape[1]
    columns = jnp.where(is_new, positions, length)
    return replace(draft, sequence=draft.sequence.at[rows, columns].set(tokens, mode="drop"))
