"""The picture of a comparison of drafts."""

from collections.abc import Sequence
from pathlib import Path

from jaxinfer.measure.speculation.report import DraftReport


def draw(path: Path, reports: Sequence[DraftReport], title: str) -> None:
    """Draws acceptance by position, tokens per round by kind of text, and speedup by draft length and by load."""
    from matplotlib.figure import Figure

    has_kinds = any(report.best.by_kind for report in reports)
    has_loads = any(len(report.loads) > 1 for report in reports)
    figure = Figure(figsize=(5 * (2 + has_kinds + has_loads), 4), layout="constrained")
    positions, *others = figure.subplots(1, 2 + has_kinds + has_loads)
    for number, report in enumerate(reports):
        color, name = f"C{number}", report.draft
        for row in report.lengths if len(reports) == 1 else [report.best]:
            rates = row.stats.acceptance_by_position
            label = f"k = {row.num_draft_tokens}" if len(reports) == 1 else name
            own = {} if len(reports) == 1 else {"color": color}
            positions.plot(range(1, len(rates) + 1), rates, marker="o", label=label, **own)
    positions.set(xlabel="position in the round", ylabel="acceptance rate", ylim=(0, 1.02))
    positions.xaxis.get_major_locator().set_params(integer=True)
    positions.legend(frameon=False)
    if has_kinds:
        _draw_kinds(others.pop(0), reports)
    _draw_lengths(others.pop(0), reports)
    if has_loads:
        _draw_loads(others.pop(0), reports)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _draw_kinds(axes, reports: Sequence[DraftReport]) -> None:
    kinds = list(reports[0].best.by_kind)
    width = 0.8 / len(reports)
    for number, report in enumerate(reports):
        lengths = [report.best.by_kind[kind].mean_accepted_length for kind in kinds]
        places = [place + (number - (len(reports) - 1) / 2) * width for place in range(len(kinds))]
        axes.bar(places, lengths, width, color=f"C{number}", label=report.draft)
    axes.set(xticks=range(len(kinds)), xticklabels=kinds, ylabel="tokens per round")
    axes.axhline(1, color="0.4", linewidth=1)
    if len(reports) > 1:
        axes.legend(frameon=False)


def _draw_lengths(axes, reports: Sequence[DraftReport]) -> None:
    for number, report in enumerate(reports):
        lengths = [row.num_draft_tokens for row in report.lengths]
        color, name = f"C{number}", "" if len(reports) == 1 else f"{report.draft}, "
        expected = [row.expected for row in report.lengths]
        axes.plot(lengths, expected, linestyle="--", color=color, alpha=0.5, label=f"{name}expected")
        measured = [row.measured for row in report.lengths]
        axes.plot(lengths, measured, marker="o", color=color, label=f"{name}measured")
        axes.set_xticks(lengths)
    axes.axhline(1, color="0.4", linewidth=1, label="plain decoding")
    axes.set(xlabel="draft tokens (k)", ylabel="speedup, one answer at a time")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _draw_loads(axes, reports: Sequence[DraftReport]) -> None:
    for number, report in enumerate(reports):
        loads = list(report.loads)
        axes.plot(loads, report.loads.values(), marker="o", color=f"C{number}", label=report.draft)
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, map(str, loads))
    axes.axhline(1, color="0.4", linewidth=1, label="plain decoding")
    axes.set(xlabel="answers at a time", ylabel='speedup, num_draft_tokens="auto"')
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
