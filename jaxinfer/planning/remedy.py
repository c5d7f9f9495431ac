"""Changes that make a model fit: each kind is counted, and the cheapest is verified by compiling.

In the order of their cost: a larger share of the memory, fewer or shorter sequences, an 8-bit cache, weights of 8 and
of 4 bits, more chips. A change that is not enough alone is combined with fewer sequences; a share is not combined.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

import jax

from jaxinfer.chips import GPU_SHARE_VARIABLE
from jaxinfer.planning.chips import larger_places
from jaxinfer.planning.compiled import OutOfChipMemory, ProgressCallback, chip_compiler, compile_programs
from jaxinfer.planning.plan import Change, Memory, MemoryPlan, PlanRequest
from jaxinfer.quantization import quantize_params
from jaxinfer.quantization.tree import describe

# Fewer or shorter sequences than this share of the request are proposed only if nothing else helps.
LEAST_SHARE = 0.25
# Of the memory that programs may use, and of a GPU's: the rest is for what is not planned, such as fragments between
# arrays, the context of CUDA and the workspaces of its libraries.
MAX_FRACTION, MAX_GPU_SHARE = 0.95, 0.95
WEIGHTS = ("int8", "int4-g128")


def changes(plan: MemoryPlan, *, compiles: bool = True, progress: ProgressCallback = lambda step: None) -> list[Change]:
    """Changes that make the plan fit, cheapest first; [] if none does. The first one is verified by compiling, unless
    `compiles` is False or the plan itself was only counted."""
    candidates = list(_candidates(plan, LEAST_SHARE)) or list(_candidates(plan, 0.0))
    if not compiles or not plan.programs:
        return [change for change, _ in candidates]
    while candidates:
        change, request = candidates[0]
        progress(f"verifying {change}")
        verified = _verified(change, request, plan)
        if verified.fits:
            return [verified, *(change for change, _ in candidates[1:])]
        candidates.pop(0)
    return []


def _verified(change: Change, request: PlanRequest, plan: MemoryPlan) -> Change:
    if change.total == plan.memory.total:  # the same programs, in a larger share of the memory
        return replace(change, compiled=plan.memory.total)
    peak = plan.memory.peak
    spec = request.spec(compiles=True)
    try:
        programs = compile_programs(spec, chip_compiler(request.place.chip.name, spec.mesh), only=peak)
    except OutOfChipMemory:
        return replace(change, compiled=change.budget + 1)
    return replace(change, compiled=round(programs[peak].figures.total_bytes))


def _candidates(plan: MemoryPlan, least: float) -> Iterator[tuple[Change, PlanRequest]]:
    """Each kind of change that fits by arithmetic, cheapest first, with the changed request. Memory that is not of the
    engine's arrays is assumed to stay as in the plan."""
    original = plan.request
    overhead = plan.memory.total - sum(original.spec().parts.values())
    yield from _shares(original, plan.memory)
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


def _shares(request: PlanRequest, memory: Memory) -> Iterator[tuple[Change, PlanRequest]]:
    """The request with a larger --memory-fraction, the engine's share of the usable memory, then, on a GPU, a larger
    XLA_PYTHON_CLIENT_MEM_FRACTION, JAX's share of the GPU's."""
    total, place, fraction = memory.total, request.place, request.options.memory_fraction

    def least(limit: int, most: float) -> float | None:
        """The smallest share of `limit` bytes, in hundredths, that holds `total`; None above `most`."""
        share = math.ceil(100 * total / limit) / 100 if limit else math.inf
        return share if share <= most else None

    if (needed := least(memory.usable, MAX_FRACTION)) is not None:
        larger = request.with_options(memory_fraction=needed)
        yield Change({"--memory-fraction": f"{needed:g}"}, total, int(needed * memory.usable)), larger
    whole = int(fraction * place.chip.hbm_bytes)
    if place.chip.platform == "gpu" and (share := least(whole, MAX_GPU_SHARE)) is not None:
        larger = replace(place, chip=replace(place.chip, usable_bytes=int(share * place.chip.hbm_bytes)))
        flags = {GPU_SHARE_VARIABLE: f"{share:g}"}
        yield Change(flags, total, int(fraction * larger.device_bytes)), replace(request, place=larger)


def _fewer(
    request: PlanRequest, flags: dict[str, str], overhead: int, least: float
) -> Iterator[tuple[Change, PlanRequest]]:
    """The request with as many sequences as fit, and with sequences as long as fit."""
    spec = request.spec()
    max_seqs, max_model_len, page_size = spec.max_seqs, spec.max_model_len, spec.page_size
    budget = int(spec.options.memory_fraction * request.place.device_bytes)
    slot_bytes = (spec.parts["slots"] + spec.state_bytes) / max_seqs
    others = {name: size for name, size in spec.parts.items() if "cache" not in name}
    rest = overhead + sum(size for name, size in others.items() if name not in ("slots", "saved states"))

    def total(num_seqs: int, num_tokens: int) -> int:
        sizes = replace(spec.pool_sizes, max_seqs=num_seqs, max_model_len=num_tokens)
        return round(rest + sizes.bytes_of(sizes.default) + num_seqs * slot_bytes)

    num = bisect_right(range(1, max_seqs + 1), budget, key=lambda num_seqs: total(num_seqs, max_model_len))
    if 1 <= num < max_seqs and num >= least * max_seqs:
        smaller = request.with_options(max_seqs=num)
        yield Change({**flags, "--max-seqs": str(num)}, total(num, max_model_len), budget), smaller
    pages = bisect_right(
        range(1, spec.pages_per_sequence), budget, key=lambda num_pages: total(max_seqs, num_pages * page_size)
    )
    context = pages * page_size
    if pages >= 1 and least * max_model_len <= context < max_model_len:
        flags = {**flags, "--context": str(context)}
        yield Change(flags, total(max_seqs, context), budget), request.with_options(max_model_len=context)


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
        if after.pool_sizes.token_bytes >= 0.75 * before.pool_sizes.token_bytes:
            return None
    except (ValueError, NotImplementedError):
        return None
    return {"--kv-dtype": name}, smaller
