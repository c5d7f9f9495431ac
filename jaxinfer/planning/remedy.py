"""Changes that make a model fit: each kind is counted, and the cheapest is verified by compiling.

In the order of their cost: fewer or shorter sequences, an 8-bit cache, weights of 8 and of 4 bits, more chips. A change
that is not enough alone is combined with fewer sequences.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

import jax

from jaxinfer.planning.chips import larger_places
from jaxinfer.planning.compiled import (
    OutOfChipMemory,
    ProgressCallback,
    chip_compiler,
    compile_programs,
    no_progress,
)
from jaxinfer.planning.plan import Change, MemoryPlan, PlanRequest
from jaxinfer.quantization import quantize_params
from jaxinfer.quantization.tree import describe, num_bytes

# Fewer or shorter sequences than this share of the request are proposed only if nothing else helps.
LEAST_SHARE = 0.25
WEIGHTS = ("int8", "int4-g128")


def changes(plan: MemoryPlan, *, compiles: bool = True, progress: ProgressCallback = no_progress) -> list[Change]:
    """Changes that make the plan fit, cheapest first; [] if none does. The first one is verified by compiling, unless
    `compiles` is False or the plan itself was only counted."""
    found = list(_candidates(plan, LEAST_SHARE)) or list(_candidates(plan, 0.0))
    if not compiles or not plan.programs:
        return [change for change, _ in found]
    while found:
        change, request = found[0]
        progress(f"verifying {change}")
        verified = _verified(change, request, plan.memory.peak)
        if verified.fits:
            return [verified, *(change for change, _ in found[1:])]
        found.pop(0)
    return []


def _verified(change: Change, request: PlanRequest, peak: str) -> Change:
    spec = request.spec(compiles=True)
    try:
        programs = compile_programs(spec, chip_compiler(request.place.chip.name, spec.mesh), only=peak)
    except OutOfChipMemory:
        return replace(change, compiled=change.budget + 1)
    return replace(change, compiled=round(programs[peak].figures.total_bytes))


def _candidates(plan: MemoryPlan, least: float) -> Iterator[tuple[Change, PlanRequest]]:
    """Each kind of change that fits by arithmetic, cheapest first, with the changed request. Memory beside the engine's
    arrays is taken from the plan."""
    original = plan.request
    overhead = plan.memory.total - sum(original.spec().parts.values())
    yield from _fewer(original, {}, overhead, least)
    for flags, request in _kinds(original):
        budget = int(request.options.memory_fraction * request.place.device_bytes)
        total = sum(request.spec().parts.values()) + overhead
        if total <= budget:
            yield Change(flags, total, budget), request
            if "--on" in flags:  # larger places need not be tried
                return
        else:
            yield from islice(_fewer(request, flags, overhead, least), 1)


def _fewer(
    request: PlanRequest, flags: dict[str, str], overhead: int, least: float
) -> Iterator[tuple[Change, PlanRequest]]:
    """The request with as many sequences as fit, and with sequences as long as fit."""
    spec = request.spec()
    max_seqs, max_model_len = spec.max_seqs, spec.max_model_len
    budget = int(spec.options.memory_fraction * request.place.device_bytes)
    slot_bytes = spec.parts["slots"] / max_seqs
    sequence_bytes = spec.page_bytes * spec.pages_per_sequence + slot_bytes
    rest = overhead + sum(size for name, size in spec.parts.items() if "cache" not in name and name != "slots")
    left = budget - rest - spec.page_bytes
    num = min(int(left // sequence_bytes), max_seqs)
    if 1 <= num < max_seqs and num >= least * max_seqs:
        total = round(rest + spec.page_bytes + num * sequence_bytes)
        smaller = request.with_options(max_seqs=num)
        yield Change({**flags, "--max-seqs": str(num)}, total, budget), smaller
    pages = int((left - slot_bytes * max_seqs) // (max_seqs * spec.page_bytes))
    context = pages * spec.page_size
    if pages >= 1 and least * max_model_len <= context < max_model_len:
        slots = slot_bytes * max_seqs
        total = round(rest + spec.page_bytes * (1 + max_seqs * pages) + slots)
        yield Change({**flags, "--context": str(context)}, total, budget), request.with_options(max_model_len=context)


def _kinds(request: PlanRequest) -> Iterator[tuple[dict[str, str], PlanRequest]]:
    """Requests with another cache, other weights, or more chips, cheapest first."""
    cache = _with_small_cache(request)
    if cache is not None:
        yield cache
    if not describe(request.params):
        for recipe in WEIGHTS:
            quantized = replace(request, params=jax.eval_shape(partial(quantize_params, how=recipe), request.params))
            yield {"--quantize": recipe}, quantized
            if (both := _with_small_cache(quantized)) is not None:
                yield {"--quantize": recipe, **both[0]}, both[1]
    for place in larger_places(request.place):
        larger = replace(request, place=place, mesh=None)
        try:
            is_sharded_more = larger.layout.num_devices > request.layout.num_devices
        except ValueError:
            continue
        if is_sharded_more:  # more replicas alone do not relieve any device
            yield {"--on": place.name}, larger


def _with_small_cache(request: PlanRequest) -> tuple[dict[str, str], PlanRequest] | None:
    """The request with an 8-bit cache; None if it has one already."""
    name = "int8" if request.config.caches_values else "fp8_e4m3"
    before, smaller = request.spec(), request.with_options(kv_dtype=name)
    try:
        after = smaller.spec()
        if num_bytes(after.cache) / after.num_pages / after.page_size >= 0.75 * (
            num_bytes(before.cache) / before.num_pages / before.page_size
        ):
            return None
    except (ValueError, NotImplementedError):
        return None
    return {"--kv-dtype": name}, smaller
