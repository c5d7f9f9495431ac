"""Pictures of results: latency by load, tokens/s by batch size with the roofline, acceptance, memory."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.checks import need_plotting

LATENCIES = {"ttft": "time to first token (TTFT)", "tpot": "time per output token (TPOT)"}
PERCENTS = {"p50": ("#4269d0", "o-"), "p90": ("#efb118", "s-"), "p99": ("#ff725c", "^-")}
COLOURS = ("#4269d0", "#3ca951", "#ff725c", "#a463f2", "#9c6b4e", "#efb118")
GIB = 2**30


def draw(results: Sequence[dict[str, Any]], file: Path) -> list[str]:
    """Writes a picture with a panel for each kind of data in the results; returns the panels' titles.

    Raises ImportError without matplotlib; ValueError if there is nothing to draw.
    """
    need_plotting("a picture")
    from matplotlib.figure import Figure

    panels: list[tuple[str, Any]] = []
    loads = [result for result in results if result["command"] == "load" and result["runs"]]
    batches = [result for result in results if result["command"] == "latency" and result["runs"]]
    drafted = [result for result in results if any(run.get("speculation") for run in result["runs"])]
    measured = [result for result in results if any("memory" in run for run in result["runs"])]
    if loads:
        panels += [(title, lambda axes, name=name: _load(axes, loads, name)) for name, title in LATENCIES.items()]
        panels.append(("tokens/s by load", lambda axes: _load_tokens(axes, loads)))
    if batches:
        panels.append(("tokens/s by batch size", lambda axes: _batch_tokens(axes, batches)))
    if drafted:
        panels.append(("draft tokens accepted", lambda axes: _acceptance(axes, drafted)))
    if measured:
        panels.append(("memory over time", lambda axes: _memory(axes, measured)))
    panels = [panel for panel in panels if _has_content(panel[1])]
    if not panels:
        raise ValueError("these results have no runs: nothing to draw")
    columns = 2 if len(panels) in (2, 4) else min(len(panels), 3)
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.6 * columns, 4.2 * lines), layout="constrained")
    figure.suptitle(_title(results), fontsize=11)
    for place, (title, paint) in enumerate(panels, 1):
        axes = figure.add_subplot(lines, columns, place)
        axes.set_title(title, fontsize=10)
        paint(axes)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if handles := axes.get_legend_handles_labels()[0]:
            size, width = (6.5, 2) if len(handles) > 6 else (8, 1)
            axes.legend(fontsize=size, ncols=width, frameon=False)
    figure.savefig(file, dpi=130)
    return [title for title, _ in panels]


def _has_content(paint: Callable[[Any], None]) -> bool:
    """Tells if a panel would show anything."""
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    paint(axes)
    return bool(axes.lines)


def _line(axes, x: Sequence[float], y: Sequence[float], style: str, **more: Any) -> None:
    """A line; none where no value is finite, since a legend would name what is not there. A lone point is marked."""
    if any(map(math.isfinite, y)):
        axes.plot(x, y, "o" if len(y) == 1 and style in ("-", "--") else style, **more)


def _title(results: Sequence[dict[str, Any]]) -> str:
    machine = results[0]["machine"]
    models = ", ".join(dict.fromkeys(_name(result) for result in results))
    if "device" not in machine:
        return f"{models} over HTTP"
    where = f"{machine['num_devices']} x {machine['device']}, {machine['num_cores']} cores"
    return f"{models} on {where}, JAX {machine['jax']}"


def _name(result: dict[str, Any]) -> str:
    """The model and the options that distinguish results of one model."""
    options = result["options"]
    said = [f"{name}={options[name]}" for name in ("quantize", "kv_dtype", "draft", "mesh") if options.get(name)]
    return " ".join([result["model"], *said])


def _label(results: Sequence[dict[str, Any]], result: dict[str, Any], text: str) -> str:
    return text if len(results) == 1 else f"{_name(result)}: {text}"


def _rates(result: dict[str, Any]) -> tuple[list[float], list[dict[str, Any]]]:
    """The finite rates in ascending order, with their runs."""
    pairs = [(float(run["rate"]), run) for run in result["runs"]]
    pairs = sorted((pair for pair in pairs if math.isfinite(pair[0])), key=lambda pair: pair[0])
    return [rate for rate, _ in pairs], [run for _, run in pairs]


def _load(axes, results: Sequence[dict[str, Any]], name: str) -> None:
    for number, result in enumerate(results):
        rates, runs = _rates(result)
        for percent, (colour, style) in PERCENTS.items():
            values = [run[name][percent] * 1e3 if run[name] else math.nan for run in runs]
            _line(
                axes,
                rates,
                values,
                style,
                color=colour if len(results) == 1 else COLOURS[number % len(COLOURS)],
                alpha={"p50": 1.0, "p90": 0.75, "p99": 0.5}[percent] if len(results) > 1 else 1.0,
                markersize=4,
                label=_label(results, result, percent.upper()),
            )
    axes.set_xlabel("request rate (requests/s)")
    axes.set_ylabel(f"{name.upper()} (ms)")
    axes.set_ylim(bottom=0)


def _load_tokens(axes, results: Sequence[dict[str, Any]]) -> None:
    for number, result in enumerate(results):
        rates, runs = _rates(result)
        values = [run["tokens_per_second"]["out"] for run in runs]
        colour = COLOURS[number % len(COLOURS)]
        _line(axes, rates, values, "o-", color=colour, label=_label(results, result, "answer tokens"))
    axes.set_xlabel("request rate (requests/s)")
    axes.set_ylabel("answer tokens/s")
    axes.set_ylim(bottom=0)


def _batch_tokens(axes, results: Sequence[dict[str, Any]]) -> None:
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    sizes: set[int] = set()
    for number, result in enumerate(results):
        runs = sorted((run for run in result["runs"] if run["decode"] is not None), key=lambda run: run["batch"])
        batches = [run["batch"] for run in runs]
        sizes |= set(batches)
        colour = COLOURS[number % len(COLOURS)]
        made = [run["batch"] / run["decode"]["step_seconds"] for run in runs]
        ideal = [run["decode"]["roofline_tokens_per_second"] for run in runs]
        _line(axes, batches, made, "o-", color=colour, label=_label(results, result, "decoding"))
        _line(axes, batches, ideal, "--", color=colour, label=_label(results, result, "roofline, measured rates"))
        for batch, value, run in zip(batches, made, runs, strict=True):
            text = f"{run['decode']['percent']:.0f} %"
            axes.annotate(text, (batch, value), textcoords="offset points", xytext=(4, -11), fontsize=7)
    axes.set_xlabel("batch size (sequences)")
    axes.set_ylabel("answer tokens/s after the first")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(sizes), [str(size) for size in sorted(sizes)])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.minorticks_off()
    axes.margins(0.12)


def _acceptance(axes, results: Sequence[dict[str, Any]]) -> None:
    for number, result in enumerate(results):
        runs = [run for run in result["runs"] if run.get("speculation")]
        for place, run in enumerate(runs):
            values = [100 * value for value in run["speculation"]["acceptance_by_position"]]
            label = f"{_run_name(result, run)}, {run['speculation']['mean_accepted_length']:.1f} tokens per round"
            colour = COLOURS[(number + place) % len(COLOURS)]
            positions = list(range(1, len(values) + 1))
            _line(axes, positions, values, "o-", color=colour, label=_label(results, result, label))
    axes.set_xlabel("position of the draft token in its round")
    axes.set_ylabel("accepted (% of draft tokens)")
    axes.set_ylim(0, 105)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _memory(axes, results: Sequence[dict[str, Any]]) -> None:
    """Draws the memory of the runs one after another."""
    number, highest = 0, 0.0
    for result in results:
        begin = 0.0
        for run in result["runs"]:
            memory, colour = run["memory"], COLOURS[number % len(COLOURS)]
            label = _label(results, result, _run_name(result, run))
            resident = [value / GIB for value in memory["rss_bytes"]]
            times = [begin + value for value in memory["seconds"]]
            _line(axes, times, resident, "-", color=colour, label=label)
            highest = max(highest, *resident)
            if memory["device_bytes"] is not None:
                values = [value / GIB for value in memory["device_bytes"]]
                _line(axes, times, values, "--", color=colour)
                highest = max(highest, *values)
            begin, number = times[-1], number + 1
    axes.set_xlabel("time, runs one after another (s)")
    has_devices = any(run["memory"]["device_bytes"] is not None for result in results for run in result["runs"])
    axes.set_ylabel("memory (GiB)" + (": process solid, device dashed" if has_devices else " of the process"))
    axes.set_ylim(0, 1.7 * highest)  # with room for the legend


def _run_name(result: dict[str, Any], run: dict[str, Any]) -> str:
    if result["command"] == "load":
        return f"{float(run['rate']):g} requests/s"
    return f"batch {run['batch']}" if result["command"] == "latency" else f"{run['requests']} requests"
