"""The programs that a plan compiles: the largest of each kind that an engine of these options runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxinfer.cache import PagedCache
from jaxinfer.engine import paged_programs
from jaxinfer.engine.abstract import abstract_decode_work, abstract_rounds, abstract_step_work
from jaxinfer.engine.programs import program_model
from jaxinfer.engine.speculative_programs import Drafter, speculate
from jaxinfer.planning.subject import Subject
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.speculative import LayersDraft, NgramDraft

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


def planned_programs(subject: Subject) -> dict[str, Planned]:
    """By name: "prefill", a step of the most tokens; "decode" of all slots; "speculate" with the longest draft.

    A deterministic engine decodes with the step's program. Raises ValueError for a mesh that does not divide the model.
    """
    options = subject.options
    mesh = subject.mesh if subject.is_sharded else None
    model, weights = program_model(subject.config, subject.placed_params, mesh)
    common = (model, weights, subject.cache, *subject.slots)
    pages = subject.pages_per_sequence
    resident = 0
    if subject.has_own_draft:
        resident = num_bytes(subject.placed_draft) + num_bytes(subject.draft_cache)
    work = abstract_step_work(options.token_buckets[-1], options.step_slots[-1], pages)
    found = [Planned(PREFILL, paged_programs.step, (*common, work, options.deterministic), resident)]
    if not options.deterministic:
        decoding = abstract_decode_work(options.decode_slots[-1], pages)
        found.append(Planned(DECODE, paged_programs.decode, (*common, decoding, options.steps_per_dispatch), resident))
    if subject.draft is not None:
        is_shared = isinstance(subject.draft, LayersDraft)
        twice = -num_bytes(subject.placed_draft) if is_shared else 0
        found.append(Planned(SPECULATE, speculate, _rounds(subject, model, weights), twice))
    return {one.name: one for one in found}


def _rounds(subject: Subject, model: Any, weights: Any) -> tuple[Any, ...]:
    options, settings = subject.options, subject.options.speculation
    if settings is None:
        raise ValueError("a draft needs EngineOptions.speculation")
    mesh = subject.mesh if subject.is_sharded else None
    kind: Any = subject.draft
    draft_weights: Any = ()
    if not isinstance(subject.draft, NgramDraft) and subject.draft_model is not None:
        kind, draft_weights = program_model(subject.draft_model[0], subject.placed_draft or {}, mesh)
    drafter = Drafter(
        kind,
        settings.trees[-1],
        is_maximal=settings.acceptance == "maximal",
        shares_cache=isinstance(subject.draft, LayersDraft),
        min_rows=options.token_buckets[-1] if options.deterministic else 0,
        is_uniform=options.deterministic,
    )
    slots = (options.step_slots if options.deterministic else options.decode_slots)[-1]
    max_rounds = 1 if options.deterministic else max(1, options.steps_per_dispatch // 2)
    caches: tuple[PagedCache, PagedCache | None] = (subject.cache, subject.draft_cache)
    work = abstract_rounds(slots, subject.pages_per_sequence)
    return model, weights, drafter, draft_weights, *caches, *subject.slots, work, max_rounds
