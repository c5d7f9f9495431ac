"""A plan for people and as JSON."""

from typing import Any

from jaxinfer.planning.plan import MemoryPlan
from jaxinfer.planning.remedy import Change


def to_dict(plan: MemoryPlan, changes: list[Change] | None = None) -> dict[str, Any]:
    """JSON-ready. Bytes, FLOPs and exchanges are of one device, tokens and sequences of one replica, rates of all."""
    request, memory = plan.request, plan.memory
    chip = request.place.chip
    return {
        "model": request.name,
        "on": request.place.name,
        "fits": plan.fits,
        "layout": {
            "mesh": str(plan.layout),
            "devices": request.place.num_devices,
            "replicas": plan.layout.num_replicas,
            "devices of a replica": plan.layout.num_devices,
        },
        "options": {
            "max_seqs": request.options.max_seqs,
            "context": request.options.max_model_len,
            "kv_dtype": request.options.kv_dtype,
            "memory_fraction": request.options.memory_fraction,
        },
        "bytes": {
            **memory.parts,
            "total": memory.total,
            "budget": memory.budget,
            "usable": memory.usable,
            "largest program": memory.peak,
            "is_measured": memory.is_measured,
        },
        "cache": {
            "page_size": memory.page_size,
            "page_bytes": memory.page_bytes,
            "tokens_planned": memory.planned_tokens,
            "tokens_that_fit": memory.tokens,
            "tokens_remaining": memory.remaining_tokens,
        },
        "programs": {
            name: {
                **one.figures.to_dict(),
                "layers_compiled": list(one.num_layers),
                "is_whole": one.is_whole,
            }
            for name, one in plan.programs.items()
        },
        "roofline": [point.to_dict() for point in plan.roofline],
        "rounds": [vars(point) for point in plan.rounds],
        "changes": [
            {"flags": change.flags, "bytes": change.total, "compiled_bytes": change.compiled, "fits": change.fits}
            for change in changes or []
        ],
        "compile_seconds": plan.compile_seconds,
        "seconds": plan.seconds,
        "notes": list(plan.notes),
        "chip": {
            "title": chip.title,
            "hbm_bytes": chip.hbm_bytes,
            "hbm_bandwidth": chip.hbm_bandwidth,
            "flops": chip.flops,
            "link_bandwidth": chip.link_bandwidth,
            "chips_per_host": chip.chips_per_host,
            "sources": [{"title": title, "url": url, "date": date} for title, url, date in chip.sources],
        },
    }


def to_text(plan: MemoryPlan, changes: list[Change] | None = None) -> str:
    """A page of text."""
    lines = [*_verdict(plan), "", *_memory(plan), "", *_programs(plan)]
    if plan.roofline:
        lines += ["", *_roofline(plan)]
    if plan.rounds:
        lines += ["", *_rounds(plan)]
    if changes is not None and not plan.fits:
        lines += ["", *_changes(changes)]
    lines += ["", *(f"  {note}" for note in plan.notes)]
    if plan.programs:
        lines.append(f"  {plan.compile_seconds:.0f} s of compiling")
    return "\n".join(lines)


def _verdict(plan: MemoryPlan) -> list[str]:
    request, memory = plan.request, plan.memory
    options = request.options
    word = "fits" if plan.fits else "does not fit"
    where = f"{request.place.name} ({request.place.num_chips} x {request.place.chip.title}, {plan.layout})"
    asked = f"{options.max_seqs} sequences of {options.max_model_len:,} tokens"
    if plan.layout.num_replicas > 1:
        asked += " on each replica"
    return [
        f"{request.name} {word} on {where}",
        f"  asked for: {asked}, cache in {_cache_name(plan)}",
        f"  {gib(memory.total)} of {gib(memory.budget)} a device: {100 * options.memory_fraction:.0f} % of the "
        f"{gib(memory.usable)} that programs may use",
    ]


def _cache_name(plan: MemoryPlan) -> str:
    name = plan.request.options.kv_dtype
    return "the dtype of computing" if name == "auto" else name


def _memory(plan: MemoryPlan) -> list[str]:
    memory = plan.memory
    how = f"while {memory.peak} runs" if memory.is_measured else "temporaries guessed"
    lines = [f"memory of one device, {how}"]
    lines += [f"  {name:<22}{gib(size):>12}{100 * size / memory.budget:>8.1f} %" for name, size in memory.parts.items()]
    lines.append(f"  {'total':<22}{gib(memory.total):>12}{100 * memory.total / memory.budget:>8.1f} %")
    rest = memory.remaining_tokens
    what = f"{rest:,} more than planned" if rest >= 0 else f"{-rest:,} fewer than planned"
    lines.append(f"  cache for {memory.tokens:,} tokens in all: {what}")
    return lines


def _programs(plan: MemoryPlan) -> list[str]:
    if not plan.programs:
        return ["programs: none compiled"]
    lines = ["programs, on one device" + " " * 9 + "TFLOP   HBM bytes  temporaries   exchanges   sent   compiled"]
    for name, one in plan.programs.items():
        found = one.figures
        flops = "-" if found.flops is None else f"{found.flops / 1e12:.3f}"
        moved = "-"
        if found.moved_bytes is not None and found.kernel_bytes is not None:
            moved = gib(found.moved_bytes + found.kernel_bytes)
        lines.append(
            f"  {name:<22}{flops:>13}{moved:>12}{gib(found.temporary_bytes):>13}{found.num_collectives:>12.0f}"
            f"{found.sent_bytes / 1e6:>8.1f} MB{found.seconds:>8.0f} s"
        )
    return lines


def _roofline(plan: MemoryPlan) -> list[str]:
    context = plan.roofline[0].context
    lines = [
        f"decoding at the roofline, every sequence {context:,} tokens long",
        "     batch     ms/token      tokens/s   HBM bytes       TFLOP    bound by",
    ]
    lines += [
        f"  {point.batch:>8}{1000 * point.seconds:>13.2f}{point.tokens_per_second:>14,.0f}{gib(point.hbm_bytes):>12}"
        f"{point.flops / 1e12:>12.3f}    {point.bound}"
        for point in plan.roofline
    ]
    return lines


def _rounds(plan: MemoryPlan) -> list[str]:
    first = plan.rounds[0]
    rates = list(first.tokens_per_second)
    names = "".join(f"{f'{float(rate):.0%} accepted':>17}" for rate in rates)
    lines = [f"rounds of {first.num_draft_tokens} drafted tokens, tokens/s if so many are accepted"]
    lines.append(f"     batch     ms/round{names}")
    for point in plan.rounds:
        cells = "".join(f"{point.tokens_per_second[rate]:>17,.0f}" for rate in rates)
        lines.append(f"  {point.batch:>8}{1000 * point.seconds:>13.2f}{cells}")
    return lines


def _changes(changes: list[Change]) -> list[str]:
    if not changes:
        return ["no single change makes it fit"]
    first = changes[0]
    how = "counted" if first.compiled is None else f"compiled: {gib(first.compiled)} of {gib(first.budget)}"
    lines = [f"cheapest change that fits: {first} ({how})"]
    lines += [f"  or {change} ({gib(change.total)} of {gib(change.budget)}, counted)" for change in changes[1:]]
    return lines


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:,.1f} MiB"
