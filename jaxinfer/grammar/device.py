"""Grammars on the device: a state of each row, the tokens that it allows, and the state after a token.

All grammars share one set of arrays of fixed shapes, so that no grammar compiles a program. State 0 allows everything
for ever: a row without a grammar. States 1 to S belong to the slots: their masks are computed on the host, and the
token after next is free again, for the host to check. The other states are those of tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Float32, Int32, UInt32

MASK_ROW, CLASS_ROW, FIRST_SUCCESSOR, DRAFT = range(4)  # rows of `GrammarTables.states`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GrammarTables:
    """Tables of all grammars in use over V tokens.

    Attributes:
      masks: uint32[M, W] of W = ceil(V / 32) words, as `interleave` makes them. Row 0 is all ones.
      states: int32[4, Q]: row of `masks`, row of `classes`, index of the first of `successors`, and the token to draft,
        -1 for none.
      classes: int16[G, V], the class of each token; row 0 is all zero.
      successors: int32[N], the state after a token of a class; -1 where the token is refused.
    """

    masks: jax.Array
    states: jax.Array
    classes: jax.Array
    successors: jax.Array


@dataclass(frozen=True)
class TableSizes:
    """How much room there is.

    Attributes:
      num_slots: slots with a mask of their own. vocab_size: V.
      num_masks, num_states, num_grammars, num_successors: for tables, beside what the slots need.
    """

    num_slots: int
    vocab_size: int
    num_masks: int
    num_states: int
    num_grammars: int
    num_successors: int

    @classmethod
    def of_bytes(cls, num_bytes: int, num_slots: int, vocab_size: int) -> TableSizes:
        """Tables of about `num_bytes`: half of it for masks, a quarter each for classes and successors. Small
        vocabularies need less."""
        quarter = num_bytes // 4
        return cls(
            num_slots,
            vocab_size,
            num_masks=min(2 * quarter // (4 * _num_words(vocab_size)), 8192),
            num_states=min(quarter // 256, 16384),
            num_grammars=min(quarter // (2 * vocab_size), 256),
            num_successors=min(quarter // 4, 2**21),
        )

    @property
    def num_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in vars(self.abstract()).values())

    def abstract(self) -> GrammarTables:
        """The shapes."""
        shapes = (
            ((1 + self.num_slots + self.num_masks, _num_words(self.vocab_size)), np.uint32),
            ((4, 1 + self.num_slots + self.num_states), np.int32),  # not [Q, 4], which a TPU pads to 128 columns
            ((1 + self.num_grammars, self.vocab_size), np.int16),
            ((1 + self.num_successors,), np.int32),
        )
        return GrammarTables(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes))  # pyright: ignore


def empty_tables(sizes: TableSizes) -> GrammarTables:
    """Tables without a grammar, as NumPy arrays: nothing is refused in any state."""
    tables = GrammarTables(*(np.zeros(leaf.shape, leaf.dtype) for leaf in vars(sizes.abstract()).values()))  # pyright: ignore
    np.asarray(tables.masks)[: 1 + sizes.num_slots] = 0xFFFFFFFF
    states = np.asarray(tables.states)
    states[DRAFT] = -1
    states[MASK_ROW, : 1 + sizes.num_slots] = np.arange(1 + sizes.num_slots)
    return tables


def slot_state(slot: int) -> int:
    """The state in which a slot's next token is under its own mask."""
    return 1 + slot


def apply_masks(
    logits: Float32[Array, "S V"], states: Int32[Array, " S"], tables: GrammarTables
) -> Float32[Array, "S V"]:
    """Logits float32[S, V] with -inf where the row's state refuses the token."""
    words = tables.masks[tables.states[MASK_ROW, states]]
    bits = (words[:, None, :] >> jnp.arange(32, dtype=jnp.uint32)[:, None]) & 1
    bits = bits.reshape(words.shape[0], -1)[:, : logits.shape[1]]
    return jnp.where(bits > 0, logits, -jnp.inf)


def interleave(masks: UInt32[Array, "R W"]) -> UInt32[Array, "R W"]:
    """Masks whose bit v // W of word v % W is token v, from masks whose bit v % 32 of word v // 32 is: so that the bits
    of a row unfold to its tokens in whole registers."""
    num_rows, num_words = masks.shape
    places = jnp.arange(32, dtype=jnp.uint32)
    bits = ((masks[:, :, None] >> places) & 1).reshape(num_rows, 32, num_words)
    return jnp.sum(bits << places[:, None], axis=1, dtype=jnp.uint32)


def next_states(tables: GrammarTables, states: Int32[Array, " S"], tokens: Int32[Array, " S"]) -> Int32[Array, " S"]:
    """States int32[S] after tokens int32[S]. After a refused token, which is never sampled, it is unspecified."""
    token = jnp.clip(tokens, 0, tables.classes.shape[1] - 1)
    token_class = tables.classes[tables.states[CLASS_ROW, states], token]
    return jnp.maximum(tables.successors[tables.states[FIRST_SUCCESSOR, states] + token_class], 0)


def draft_tokens(tables: GrammarTables, states: Int32[Array, " S"]) -> Int32[Array, " S"]:
    """The token int32[S] that each state's grammar forces, -1 where it leaves a choice."""
    return tables.states[DRAFT, states]


def _num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)
