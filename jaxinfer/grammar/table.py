"""Tables of a regular language over a vocabulary: which tokens may follow in each state, and where they lead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class TokenTable:
    """A finite automaton over tokens, with Q states, C classes of tokens and M distinct masks over V tokens.

    State 0 is the first. Tokens of one class lead from every state to the same state, or are refused in it.

    Attributes:
      classes: int16[V], the class of each token.
      successors: int32[Q, C], the state after a token of a class, -1 where it is refused. An end-of-sequence id leads
        to the last state, in which only end-of-sequence ids are allowed.
      masks: uint32[M, ceil(V / 32)], bit v % 32 of word v // 32 is token v. mask_of: int32[Q], each state's mask.
      drafts: int32[Q], the token to draft where the text that follows is forced, -1 elsewhere. Other tokens may be
        allowed there too, which spell the same text in other pieces.
    """

    classes: np.ndarray
    successors: np.ndarray
    masks: np.ndarray
    mask_of: np.ndarray
    drafts: np.ndarray

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in vars(self).values())

    def state_after(self, tokens: Sequence[int]) -> int:
        """The state after these tokens from the first one on, which must be allowed."""
        state = 0
        for token in tokens:
            state = int(self.successors[state, self.classes[token]])
            if state < 0:
                raise ValueError(f"token {token} is refused by the grammar's table")
        return state
