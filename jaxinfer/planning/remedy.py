"""What to change where a model does not fit: every kind of change by arithmetic, the cheapest one by compiling.

Cheapest first: fewer sequences or shorter ones, an 8-bit cache, weights in 8 and in 4 bits, more chips. A change that
does not suffice alone is taken with as many sequences as fit then.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import jax

from jaxinfer.planning.chips import larger_places
from jaxinfer.planning.measure import OutOfChipMemory, chip_compiler, measure
from jaxinfer.planning.plan import MemoryPlan, PlanRequest, ProgressCallback, no_progress, with_options
from jaxinfer.quantization import quantize_params
from jaxinfer.quantization.tree import describe, num_bytes

# Fewer sequences, or shorter ones, than this share of what was asked are a change only where nothing else helps.
LEAST_SHARE = 0.25
WEIGHTS = ("int8", "int4-g128")


@dataclass(frozen=True)
class Change:
    """A change that makes the model fit.

    Attributes:
      flags: what to write, such as {"--kv-dtype": "int8"}. total: bytes of one device then, by arithmetic; compiled:
        by the compiler's analysis of the program that needs most, None where it was not compiled.
    """

    flags: dict[str, str]
    total: int
    budget: int
    compiled: int | None = None

    @property
    def fits(self) -> bool:
        """As compiled, else as counted."""
        return (self.total if self.compiled is None else self.compiled) <= self.budget

    def __str__(self) -> str:
        return " ".join(f"{name} {value}" for name, value in self.flags.items())


def changes(plan: MemoryPlan, *, compiles: bool = True, told: ProgressCallback = no_progress) -> list[Change]:
    """Changes that make a plan fit that does not, cheapest first; the first one is verified by compiling, unless not
    even that can be. () where nothing helps."""
    found = list(_candidates(plan, LEAST_SHARE)) or list(_candidates(plan, 0.0))
    if not compiles or not plan.programs:
        return [change for change, _ in found]
    while found:
        change, request = found[0]
        told(f"verifying {change}")
        verified = _verified(change, request, plan.memory.peak)
        if verified.fits:
            return [verified, *(change for change, _ in found[1:])]
        found.pop(0)
    return []


def _verified(change: Change, request: PlanRequest, peak: str) -> Change:
    subject = request.subject(compiles=True)
    try:
        measured = measure(subject, chip_compiler(request.place.chip.name, subject.mesh), only=peak)
    except OutOfChipMemory:
        return replace(change, compiled=change.budget + 1)
    return replace(change, compiled=round(measured[peak].figures.total_bytes))


def _candidates(plan: MemoryPlan, least: float) -> Iterator[tuple[Change, PlanRequest]]:
    """Each kind of change, cheapest first, that fits by arithmetic: what is not an array of the engine stays as
    compiled."""
    asked = plan.request
    overhead = plan.memory.total - sum(asked.subject().parts.values())
    yield from _fewer(asked, {}, overhead, least)
    for flags, request in _kinds(asked):
        budget = int(request.options.memory_fraction * request.place.device_bytes)
        total = sum(request.subject().parts.values()) + overhead
        if total <= budget:
            yield Change(flags, total, budget), request
            if "--on" in flags:  # still more chips help no more
                return
        else:
            yield from islice(_fewer(request, flags, overhead, least), 1)


def _fewer(
    request: PlanRequest, flags: dict[str, str], overhead: int, least: float
) -> Iterator[tuple[Change, PlanRequest]]:
    """The request with as many sequences as fit, and with sequences as long as fit."""
    subject, options = request.subject(), request.options
    budget = int(options.memory_fraction * request.place.device_bytes)
    slot_bytes = subject.parts["slots"] / options.max_seqs
    sequence_bytes = subject.page_bytes * subject.pages_per_sequence + slot_bytes
    rest = overhead + sum(size for name, size in subject.parts.items() if "cache" not in name and name != "slots")
    left = budget - rest - subject.page_bytes
    num = min(int(left // sequence_bytes), options.max_seqs)
    if 1 <= num < options.max_seqs and num >= least * options.max_seqs:
        total = round(rest + subject.page_bytes + num * sequence_bytes)
        smaller = with_options(request, max_seqs=num)
        yield Change({**flags, "--max-seqs": str(num)}, total, budget), smaller
    pages = int((left - slot_bytes * options.max_seqs) // (options.max_seqs * subject.page_bytes))
    context = pages * subject.page_size
    if pages >= 1 and least * options.max_model_len <= context < options.max_model_len:
        slots = slot_bytes * options.max_seqs
        total = round(rest + subject.page_bytes * (1 + options.max_seqs * pages) + slots)
        yield Change({**flags, "--context": str(context)}, total, budget), with_options(request, max_model_len=context)


def _kinds(asked: PlanRequest) -> Iterator[tuple[dict[str, str], PlanRequest]]:
    """Requests with another cache, other weights, or more chips, cheapest first."""
    cache = _with_small_cache(asked)
    if cache is not None:
        yield cache
    if not describe(asked.params):
        for recipe in WEIGHTS:
            quantized = replace(asked, params=_quantized(asked.params, recipe))
            yield {"--quantize": recipe}, quantized
            if (both := _with_small_cache(quantized)) is not None:
                yield {"--quantize": recipe, **both[0]}, both[1]
    for place in larger_places(asked.place):
        larger = replace(asked, place=place, mesh=None)
        try:
            one_device = larger.layout.num_devices <= asked.layout.num_devices
        except ValueError:
            continue
        if not one_device:  # more replicas alone leave each device as full as it is
            yield {"--on": place.name}, larger


def _with_small_cache(request: PlanRequest) -> tuple[dict[str, str], PlanRequest] | None:
    """With a cache of 8 bits, None where it has them."""
    name = "int8" if request.config.caches_values else "fp8_e4m3"
    before, smaller = request.subject(), with_options(request, kv_dtype=name)
    try:
        after = smaller.subject()
        if num_bytes(after.cache) / after.num_pages / after.page_size >= 0.75 * (
            num_bytes(before.cache) / before.num_pages / before.page_size
        ):
            return None
    except (ValueError, NotImplementedError):
        return None
    return {"--kv-dtype": name}, smaller


def _quantized(params: Any, recipe: str) -> Any:
    return jax.eval_shape(partial(quantize_params, how=recipe), params)
