"""Slots, and what the programs take of each dispatch, as shapes, to compile them without weights or a chip."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer import parallel
from jaxinfer.cache import PageTables
from jaxinfer.engine.programs.paged import DecodeWork, Slots, StepSlots, StepWork, init_slots, slot_axes
from jaxinfer.engine.programs.speculative import SpeculativeWork
from jaxinfer.sampling import SamplingBatch


def abstract_slots(
    num_slots: int, vocab_size: int, mesh: Mesh | None = None, draft_length: int | None = None
) -> tuple[Slots, SamplingBatch]:
    """Slots and sampling parameters; `draft_length` as in `init_slots`."""
    rows = jax.eval_shape(lambda: init_slots(num_slots, vocab_size, draft_length))
    return rows if mesh is None else placed(rows, parallel.array_shardings(mesh, rows, slot_axes(*rows)))


def abstract_step_work(num_tokens: int, num_slots: int, pages_per_sequence: int, num_groups: int = 1) -> StepWork:
    """What a step of so many tokens takes."""
    rows, counts, flags = (
        abstract_array(jnp.int32, num_tokens),
        abstract_array(jnp.int32, num_slots),
        abstract_array(jnp.bool_, num_slots),
    )
    tables = abstract_tables(num_slots, pages_per_sequence, num_groups)
    return StepWork(rows, rows, StepSlots(counts, counts, counts, flags, flags, counts), tables)


def abstract_decode_work(num_slots: int, pages_per_sequence: int, num_groups: int = 1) -> DecodeWork:
    """What decoding takes."""
    return DecodeWork(
        is_scheduled=abstract_array(jnp.bool_, num_slots),
        page_tables=abstract_tables(num_slots, pages_per_sequence, num_groups),
        num_steps=abstract_array(jnp.int32),
    )


def abstract_rounds(num_slots: int, pages_per_sequence: int, num_groups: int = 1) -> SpeculativeWork:
    """What speculative rounds take."""
    return SpeculativeWork(
        is_scheduled=abstract_array(jnp.bool_, num_slots),
        page_tables=abstract_tables(num_slots, pages_per_sequence, num_groups),
        num_rounds=abstract_array(jnp.int32),
        num_drafts=abstract_array(jnp.int32, num_slots),
    )


def abstract_array(dtype: Any, *shape: int) -> Any:
    """An array that every device has all of."""
    return jax.ShapeDtypeStruct(shape, dtype)


def abstract_tables(num_slots: int, pages_per_sequence: int, num_groups: int) -> PageTables:
    """The page tables of the groups of layers."""
    return (abstract_array(jnp.int32, num_slots, pages_per_sequence),) * num_groups


def placed(arrays: Any, shardings: Any) -> Any:
    """Abstract arrays with a sharding each."""
    return jax.tree.map(lambda a, where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), arrays, shardings)
