"""A plan as a picture: memory of one device by part, and tokens/s at the roofline by batch size."""

from pathlib import Path
from typing import Any

from jaxinfer.checks import need_plotting
from jaxinfer.planning.plan import Memory, MemoryPlan

_COLOURS = {
    "weights": "#4269d0",
    "draft weights": "#97bbf5",
    "cache": "#3ca951",
    "draft cache": "#a3d9a5",
    "slots": "#efb118",
    "temporaries": "#ff725c",
    "code": "#9c6b4e",
    "padding and inputs": "#9498a0",
}


def draw(plan: MemoryPlan, file: Path) -> None:
    """Writes the picture in the format of the file's suffix. Raises ImportError without matplotlib."""
    need_plotting("a picture")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    figure.suptitle(_title(plan), fontsize=11)
    if plan.roofline:
        bars, curves = figure.subplots(1, 2, width_ratios=[1, 1.35])
        _draw_roofline(curves, plan)
    else:  # the rates of this device are unknown
        bars = figure.subplots()
    _draw_memory(bars, plan)
    figure.savefig(file, dpi=130)


def _title(plan: MemoryPlan) -> str:
    options = plan.request.options
    verdict = "fits" if plan.fits else "does not fit"
    return (
        f"{plan.request.name} {verdict} on {plan.request.place.name}\n"
        f"{options.max_seqs} sequences of {options.max_model_len:,} tokens, {plan.layout}"
    )


def _draw_memory(axes, plan: MemoryPlan) -> None:
    memory, gib = plan.memory, 2**30
    programs = plan.programs or {memory.peak: None}
    # A model that needs little of the memory fills the axis, or its parts could not be told apart.
    is_small = memory.total < memory.usable / 4
    height = (1.3 * memory.total if is_small else 1.12 * max(memory.usable, memory.total)) / gib
    visible: dict[str, Any] = {}
    for place, program in enumerate(programs.values()):
        parts = dict(memory.parts)
        if program is not None:
            figures = program.figures
            parts["temporaries"] = round(figures.temporary_bytes + figures.output_bytes - figures.aliased_bytes)
            parts["code"] = round(figures.code_bytes)
        bottom = 0.0
        for part, size in parts.items():
            bar = axes.bar(place, size / gib, 0.6, bottom=bottom, color=_COLOURS.get(part))
            if size / gib > 0.004 * height:
                visible.setdefault(part, bar)
            if size / gib > 0.05 * height:
                axes.text(place, bottom + size / gib / 2, f"{size / gib:.2g}", ha="center", va="center", color="white")
            bottom += size / gib
    if is_small:
        text = f"of {memory.usable / gib:.1f} GiB usable, {memory.budget / gib:.1f} of them the engine's share"
        axes.text(0.5, 0.97, text, ha="center", va="top", fontsize=8, transform=axes.transAxes)
    else:
        _draw_limits(axes, memory, right=len(programs) - 0.6)
    axes.set_xlabel("program")
    axes.set_xticks(range(len(programs)), list(programs))
    axes.set_xlim(-0.5, len(programs) - 0.5)
    axes.set_ylim(0, height)
    axes.set_ylabel("GiB per device")
    places = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 3}
    axes.legend(visible.values(), visible.keys(), fontsize=7, frameon=False, **places)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_limits(axes, memory: Memory, right: float) -> None:
    for line, size, name, offset, side in (
        ("-", memory.usable, "usable", 3, "bottom"),
        ("--", memory.budget, "the engine's share", -3, "top"),
    ):
        axes.axhline(size / 2**30, color="black", linewidth=1, linestyle=line)
        where = {"textcoords": "offset points", "xytext": (0, offset), "va": side, "ha": "right", "fontsize": 8}
        axes.annotate(name, (right, size / 2**30), **where)


def _draw_roofline(axes, plan: MemoryPlan) -> None:
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    axes.set_xlabel(f"batch size (sequences of {plan.request.options.max_model_len:,} tokens)")
    axes.set_ylabel("tokens/s at the roofline")
    axes.spines[["top", "right"]].set_visible(False)
    batches = [point.batch for point in plan.roofline]
    axes.plot(batches, [point.tokens_per_second for point in plan.roofline], "o-", color="#4269d0", label="decoding")
    for point in plan.roofline:
        label = f"{point.tokens_per_second:,.0f}/s\n{1000 * point.seconds:.3g} ms"
        place = (point.batch, point.tokens_per_second)
        axes.annotate(label, place, textcoords="offset points", xytext=(7, -4), va="top", fontsize=8)
    if plan.rounds:
        for rate in plan.rounds[0].tokens_per_second:
            values = [point.tokens_per_second[rate] for point in plan.rounds]
            axes.plot(batches, values, "--", linewidth=1, label=f"drafts, {float(rate):.0%} accepted")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.minorticks_off()
    rates = [point.tokens_per_second for point in plan.roofline]
    rates += [rate for point in plan.rounds for rate in point.tokens_per_second.values()]
    axes.set_ylim(min(rates) / 2, max(rates) * 2)
    axes.set_xlim(min(batches) / 1.3, max(batches) * 2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
