"""Simulated fleets as a picture: times and the share that is served in time, by number of replicas; of one fleet, the
distributions of its times."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checks import need_plotting
from jaxinfer.fleet.simulate.options import ServiceGoal
from jaxinfer.fleet.simulate.report import PERCENTS, FleetFigures

_SHADES = ("#97bbf5", "#4269d0", "#1b2f66")


def draw_fleets(
    title: str,
    rows: Sequence[FleetFigures],
    goal: ServiceGoal,
    times: tuple[np.ndarray, np.ndarray],
    file: Path,
) -> None:
    """Writes the picture in the format of the file's suffix; `times` are TTFT and TPOT of the last fleet's requests.
    Raises ImportError without matplotlib."""
    need_plotting("a picture")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle(title, fontsize=10)
    if len(rows) > 1:
        panels = figure.subplots(1, 3)
        _draw_times(panels[0], rows, "ttft", "time to first token, ms", goal.slo_ttft)
        _draw_times(panels[1], rows, "tpot", "time per output token, ms", goal.slo_itl)
        _draw_share(panels[2], rows, goal)
    else:
        panels = figure.subplots(1, 2)
        _draw_distribution(panels[0], times[0], "time to first token, ms", goal.slo_ttft)
        _draw_distribution(panels[1], times[1], "time per output token, ms", goal.slo_itl)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=130)


def _draw_times(axes: Any, rows: Sequence[FleetFigures], name: str, label: str, limit: float) -> None:
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    sizes = [row.num_replicas for row in rows]
    for index, percent in enumerate(PERCENTS):
        values = [getattr(row, name)[index] for row in rows]
        axes.plot(sizes, values, "o-", color=_SHADES[index], markersize=4, label=f"p{percent}")
    axes.axhline(limit, color="#ff725c", linestyle="--", linewidth=1, label="limit")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
    axes.set_ylabel(label)
    _replicas_axis(axes, sizes)
    axes.legend(fontsize=8, frameon=False)


def _draw_share(axes: Any, rows: Sequence[FleetFigures], goal: ServiceGoal) -> None:
    sizes = [row.num_replicas for row in rows]
    axes.plot(sizes, [100 * row.share for row in rows], "o-", color="#3ca951", markersize=4)
    axes.axhline(100 * goal.slo_share, color="#ff725c", linestyle="--", linewidth=1)
    axes.set_ylim(0, 105)
    axes.set_ylabel("requests within both limits, %")
    _replicas_axis(axes, sizes)


def _replicas_axis(axes: Any, sizes: Sequence[int]) -> None:
    """A logarithmic axis with a tick at each size that has room for it."""
    axes.set_xscale("log", base=2)
    shown: list[int] = []
    for size in sizes:
        if not shown or size >= 1.25 * shown[-1]:
            shown.append(size)
    axes.set_xticks(shown, [str(size) for size in shown])
    axes.minorticks_off()
    axes.set_xlabel("replicas")


def _draw_distribution(axes: Any, values: np.ndarray, label: str, limit: float) -> None:
    values = np.sort(values[~np.isnan(values)])
    if len(values):
        shares = np.linspace(0, 100, min(len(values), 1000))
        axes.plot(np.percentile(values, shares), shares, color=_SHADES[1])
        if values[0] > 0:
            axes.set_xscale("log")
    axes.axvline(limit, color="#ff725c", linestyle="--", linewidth=1, label="limit")
    axes.set_xlabel(label)
    axes.set_ylabel("requests, %")
    axes.legend(fontsize=8, frameon=False)
