"""The jitted programs that bring grammars to the device: masks and states of rows, and tables.

Shapes use the legend of jaxinfer/README.md.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.engine.programs.paged import constrain_sharding, replicate
from jaxinfer.engine.programs.work import Slots
from jaxinfer.grammar.device import GrammarTables, TableSizes, interleave
from jaxinfer.sampling import SamplingBatch
from jaxinfer.sampling.state import NUM_RECENT

ROWS = 16  # of one call of `set_rows`
MASKS, STATES, SUCCESSORS = 16, 256, 16384  # of one call of `write_table`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GrammarRows:
    """States of R slots' grammars, made on the host; rows that are not used have the slot S, one past the end.

    Attributes:
      slots, states, min_tokens: int32[R]. has_mask: bool[R], whether the slot's own mask becomes `masks`
        uint32[R, ceil(V / 32)].
      is_rewound: bool[R], whether tokens of the slot are taken back. Then, int32[R], its newest token that counts, the
        position of that, the tokens that it may still generate, and those that it has generated; recent int32[R, 15]
        as in `SamplingState`; and rejected int32[R, K], the tokens that do not count, V elsewhere.
    """

    slots: jax.Array
    states: jax.Array
    min_tokens: jax.Array
    has_mask: jax.Array
    masks: jax.Array
    is_rewound: jax.Array
    tokens: jax.Array
    positions: jax.Array
    remaining: jax.Array
    num_output: jax.Array
    recent: jax.Array
    rejected: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TableBlock:
    """A part of a table: masks uint32[16, ceil(V / 32)], states int32[4, 256] and successors int32[16384], each with
    the rows where they go, one past the end for padding; and the classes int16[V] with their row."""

    masks: jax.Array
    masks_at: jax.Array
    states: jax.Array
    states_at: jax.Array
    successors: jax.Array
    successors_at: jax.Array
    classes: jax.Array
    class_row: jax.Array


def empty_rows(num_slots: int, vocab_size: int, num_rejected: int) -> GrammarRows:
    """Rows that change nothing, as NumPy arrays. `num_rejected`: tokens of a dispatch at most."""
    counts = ("states", "min_tokens", "tokens", "positions", "remaining", "num_output")
    arrays: dict[str, Any] = {name: np.zeros(ROWS, np.int32) for name in counts}
    arrays |= {name: np.zeros(ROWS, bool) for name in ("has_mask", "is_rewound")}
    arrays["slots"] = np.full(ROWS, num_slots, np.int32)
    arrays["masks"] = np.zeros((ROWS, -(-vocab_size // 32)), np.uint32)
    arrays["recent"] = np.full((ROWS, NUM_RECENT), vocab_size, np.int32)
    arrays["rejected"] = np.full((ROWS, num_rejected), vocab_size, np.int32)
    return GrammarRows(**arrays)


def empty_block(sizes: TableSizes) -> TableBlock:
    """A block that changes nothing, as NumPy arrays."""
    ends, arrays = sizes.abstract(), {}
    for name, size in (("masks", MASKS), ("successors", SUCCESSORS)):
        rows = getattr(ends, name)
        arrays[name] = np.zeros((size, *rows.shape[1:]), rows.dtype)
        arrays[f"{name}_at"] = np.full(size, rows.shape[0], np.int32)
    arrays["states"] = np.zeros((4, STATES), np.int32)
    arrays["states_at"] = np.full(STATES, ends.states.shape[1], np.int32)
    arrays["classes"] = np.zeros(sizes.vocab_size, np.int16)
    arrays["class_row"] = np.int32(ends.classes.shape[0])
    return TableBlock(**arrays)


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2, 3))
def set_rows(
    mesh: Mesh | None, slots: Slots, batch: SamplingBatch, tables: GrammarTables, rows: GrammarRows
) -> tuple[Slots, SamplingBatch, GrammarTables]:
    """Writes masks and states, and takes back tokens. Donates slots, batch and tables."""
    num_slots, num_masks = slots.tokens.shape[0], tables.masks.shape[0]
    history, place = slots.history, jnp.where(rows.is_rewound, rows.slots, num_slots)

    def rewound(values: jax.Array, new: jax.Array) -> jax.Array:
        return values.at[place].set(new, mode="drop")

    history = replace(
        history,
        grammar=history.grammar.at[rows.slots].set(rows.states, mode="drop"),
        num_output=rewound(history.num_output, rows.num_output),
        recent=rewound(history.recent, rows.recent),
        output_counts=history.output_counts.at[place[:, None], rows.rejected].add(-1, mode="drop"),
    )
    draft = slots.draft
    if draft is not None:
        draft = replace(draft, num_drafted=draft.num_drafted.at[place].min(rows.positions, mode="drop"))
    slots = replace(
        slots,
        tokens=rewound(slots.tokens, rows.tokens),
        positions=rewound(slots.positions, rows.positions),
        remaining=rewound(slots.remaining, rows.remaining),
        is_active=rewound(slots.is_active, jnp.ones_like(rows.is_rewound)),
        history=history,
        draft=draft,
    )
    mask_rows = jnp.where(rows.has_mask & (rows.slots < num_slots), 1 + rows.slots, num_masks)
    tables = replace(tables, masks=tables.masks.at[mask_rows].set(interleave(rows.masks), mode="drop"))
    batch = replace(batch, min_tokens=batch.min_tokens.at[rows.slots].set(rows.min_tokens, mode="drop"))
    return *constrain_sharding(mesh, (slots, batch)), replicate(mesh, tables)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def write_table(mesh: Mesh | None, tables: GrammarTables, block: TableBlock) -> GrammarTables:
    """Writes a part of a table. Donates the tables."""

    written = GrammarTables(
        masks=tables.masks.at[block.masks_at].set(interleave(block.masks), mode="drop"),
        states=tables.states.at[:, block.states_at].set(block.states, mode="drop"),
        classes=tables.classes.at[block.class_row].set(block.classes, mode="drop"),
        successors=tables.successors.at[block.successors_at].set(block.successors, mode="drop"),
    )
    return replicate(mesh, written)
