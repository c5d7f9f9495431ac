"""The arguments of the engine's programs as shapes, to compile them where there are neither weights nor a chip."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer import parallel
from jaxinfer.cache import PagedCache, abstract_paged_cache
from jaxinfer.engine import paged_programs
from jaxinfer.engine.paged_programs import DecodeWork, StepWork
from jaxinfer.engine.programs import ProgramModel, Weights, program_model
from jaxinfer.engine.speculative_programs import SpeculativeWork
from jaxinfer.models import ModelConfig, Params, abstract_params, parameter_shardings
from jaxinfer.sampling import SamplingBatch


def abstract_model(
    config: ModelConfig, num_pages: int, page_size: int, mesh: Mesh | None = None, *, dtype: Any = jnp.bfloat16
) -> tuple[ProgramModel, Weights, PagedCache]:
    """A model, its weights and its pages for a TPU, all of `dtype`, as a program takes them. Raises ValueError as
    `models.check_divides`."""
    params = placed_params(config, abstract_params(config, dtype), mesh)
    cache = abstract_paged_cache(config, num_pages, page_size, dtype, "interleaved", mesh)
    return *program_model(config, params, mesh), cache


def placed_params(config: ModelConfig, params: Params, mesh: Mesh | None) -> Params:
    """Abstract parameters, of which some may be quantized, with their shardings. Raises ValueError as
    `models.check_divides`."""
    return params if mesh is None else placed(params, parameter_shardings(mesh, config, params))


def abstract_slots(
    num_slots: int, vocab_size: int, mesh: Mesh | None = None, draft_length: int | None = None
) -> tuple[paged_programs.Slots, SamplingBatch]:
    """Slots and sampling parameters; `draft_length` as in `paged_programs.init_slots`."""
    rows = jax.eval_shape(lambda: paged_programs.init_slots(num_slots, vocab_size, draft_length))
    return rows if mesh is None else placed(rows, parallel.array_shardings(mesh, rows, paged_programs.slot_axes(*rows)))


def abstract_step_work(num_tokens: int, num_slots: int, pages_per_sequence: int) -> StepWork:
    """What a step of so many tokens takes."""
    rows, counts, flags = (
        abstract_array(jnp.int32, num_tokens),
        abstract_array(jnp.int32, num_slots),
        abstract_array(jnp.bool_, num_slots),
    )
    table = abstract_array(jnp.int32, num_slots, pages_per_sequence)
    return StepWork(rows, rows, counts, counts, counts, flags, flags, counts, table)


def abstract_decode_work(num_slots: int, pages_per_sequence: int) -> DecodeWork:
    """What decoding takes."""
    table = abstract_array(jnp.int32, num_slots, pages_per_sequence)
    return DecodeWork(
        is_scheduled=abstract_array(jnp.bool_, num_slots), page_table=table, num_steps=abstract_array(jnp.int32)
    )


def abstract_rounds(num_slots: int, pages_per_sequence: int) -> SpeculativeWork:
    """What speculative rounds take."""
    return SpeculativeWork(
        is_scheduled=abstract_array(jnp.bool_, num_slots),
        page_table=abstract_array(jnp.int32, num_slots, pages_per_sequence),
        num_rounds=abstract_array(jnp.int32),
        num_drafts=abstract_array(jnp.int32, num_slots),
    )


def abstract_array(dtype: Any, *shape: int) -> Any:
    """An array that every device has all of."""
    return jax.ShapeDtypeStruct(shape, dtype)


def placed(arrays: Any, shardings: Any) -> Any:
    """Abstract arrays with a sharding each."""
    return jax.tree.map(lambda a, where: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), arrays, shardings)
