"""The programs that a plan compiles: the largest of each kind that an engine of these options runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxinfer.engine.programs import paged, program_model
from jaxinfer.engine.programs.speculative import speculate
from jaxinfer.engine.spec import EngineSpec, abstract_decode_work, abstract_rounds, abstract_step_work
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.speculative import LayersDraft

PREFILL, DECODE, SPECULATE = "prefill", "decode", "speculate"


@dataclass(frozen=True)
class Planned:
    """A program with its abstract arguments.

    Attributes:
      resident_bytes: of one device, what lies in its memory while the program runs and is none of its arguments: a
        draft's weights and pages while the target works alone. Negative for arrays that are arguments twice: the layers
        of the target's that draft.
    """

    name: str
    function: Callable
    arguments: tuple[Any, ...]
    resident_bytes: int


def planned_programs(spec: EngineSpec) -> dict[str, Planned]:
    """By name: "prefill", a step of the most tokens; "decode" of all slots; "speculate" with the longest draft.

    A deterministic engine decodes with the step's program. Raises ValueError for a mesh that does not divide the model.
    """
    model, weights = program_model(spec.config, spec.placed_params, spec.program_mesh)
    common = (model, weights, spec.cache, *spec.slots)
    pages = spec.pages_per_sequence
    resident = 0
    if spec.has_own_draft:
        resident = num_bytes(spec.placed_draft) + num_bytes(spec.draft_cache)
    work = abstract_step_work(spec.token_buckets[-1], spec.step_slots[-1], pages)
    found = [Planned(PREFILL, paged.step, (*common, work, spec.options.deterministic), resident)]
    if not spec.options.deterministic:
        decoding = abstract_decode_work(spec.decode_slots[-1], pages)
        found.append(Planned(DECODE, paged.decode, (*common, decoding, spec.steps_per_dispatch), resident))
    if spec.draft is not None:
        is_shared = isinstance(spec.draft, LayersDraft)
        twice = -num_bytes(spec.placed_draft) if is_shared else 0
        found.append(Planned(SPECULATE, speculate, _rounds(spec, model, weights), twice))
    return {one.name: one for one in found}


def _rounds(spec: EngineSpec, model: Any, weights: Any) -> tuple[Any, ...]:
    kind, draft_weights = spec.draft, ()
    if spec.draft_model is not None:
        kind, draft_weights = program_model(spec.draft_model[0], spec.placed_draft or {}, spec.program_mesh)
    drafter = spec.drafters(kind)[spec.trees[-1]]  # pyright: ignore[reportArgumentType]
    work = abstract_rounds(spec.round_slots[-1], spec.pages_per_sequence)
    return model, weights, drafter, draft_weights, spec.cache, spec.draft_cache, *spec.slots, work, spec.max_rounds
