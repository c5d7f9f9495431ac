"""What drafting carries from step to step for each slot, on the device."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftSlots:
    """Of S slots.

    Attributes:
      sequence: int32[S, L], the tokens of prompt and answer, a slot's newest at its position; beyond that, anything.
      num_drafted: int32[S], how many leading tokens the draft model has stored. It may be less than what the target
        has stored, where the slot was decoded without drafts or reused pages that the draft never saw.
    """

    sequence: jax.Array
    num_drafted: jax.Array


def init_draft_slots(num_slots: int, length: int) -> DraftSlots:
    """Empty slots for sequences of up to `length` tokens, as NumPy arrays."""
    return DraftSlots(np.zeros((num_slots, length), np.int32), np.zeros((num_slots,), np.int32))  # pyright: ignore


def record(draft: DraftSlots | None, positions: jax.Array, tokens: jax.Array, is_new: jax.Array) -> DraftSlots | None:
    """Notes tokens int32[S] at positions int32[S] where bool[S] says so; nothing where nobody drafts."""
    if draft is None:
        return None
    rows, length = jnp.arange(tokens.shape[0]), draft.sequence.shape[1]
    columns = jnp.where(is_new, positions, length)
    return replace(draft, sequence=draft.sequence.at[rows, columns].set(tokens, mode="drop"))
