"""A profile as a page of text."""

from typing import Any

from jaxinfer.measure.profiling.ops import KINDS

MS = 1e3
SHORT = {"matrix products": "products", "gathers, copies, transposes": "moves"}
CPU_NOTE = (
    "Device time on a CPU is the time in which at least one operation of a program ran on any thread; it is divided "
    "equally among operations that run at the same time."
)
DEVICE_NOTE = "Device time is the time in which at least one operation ran, averaged over the devices."


def note(platform: str) -> str:
    """The definition of device time."""
    return CPU_NOTE if platform == "cpu" else DEVICE_NOTE


def headline(phase: dict[str, Any]) -> list[str]:
    """What ran, how long it took, and the roofline."""
    steps, line, device = phase["steps"], phase["roofline"], phase["device"]
    unit = "step"
    if phase["phase"] == "prefill":
        what = f"{phase['prompt_tokens']:,} prompt tokens in {_count(steps, 'step')}"
    else:
        unit = {("decode",): "step", ("rounds",): "speculative round"}.get(tuple(phase["kinds"]), "step or round")
        batch = f"{phase['mean_batch']:g} sequence{'' if phase['mean_batch'] == 1 else 's'}"
        what = f"{_count(steps, unit)} of {batch} of {phase['mean_context']:,.0f} tokens"
    each, traced = phase["seconds"] / steps, phase["traced_seconds"] / steps
    lines = [
        f"{phase['phase']}: {what}, {_count(phase['dispatches'], 'dispatch', 'es')}",
        f"per {unit}: {each * MS:.2f} ms ({traced * MS:.2f} with the trace); "
        f"the device was idle for {100 * device['idle_share']:.1f} %" + _gap(phase["host_gap"]),
        f"at least {line['bytes'] / steps / 1e6:,.1f} MB and {line['flops'] / steps / 1e9:,.2f} GFLOP per step: "
        f"{line['seconds'] / steps * MS:.2f} ms at the measured rates ({line['bound']}-bound), "
        f"{line['percent']:.0f} % of the roofline",
    ]
    if line["percent"] > 100:
        lines.append("faster than the roofline: other work slowed down the machine while its rates were measured")
    if (layers := phase["layers"]) is not None:
        lines.append(
            f"slowest layer: {layers['slowest']}, {layers['slowest_seconds'] / steps * MS:.3f} ms per step; "
            f"median layer: {layers['median_seconds'] / steps * MS:.3f} ms"
        )
    return lines


def parts(phase: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows: milliseconds per step, by part of the model and kind of operation."""
    steps, total = phase["steps"], sum(phase["by_kind"].values())
    kinds = [kind for kind in KINDS if kind in phase["by_kind"]]
    rows = []
    for part, seconds in phase["by_part"].items():
        cells = phase["by_part_and_kind"][part]
        numbers = [f"{cells[kind] / steps * MS:.3f}" if kind in cells else "" for kind in kinds]
        rows.append([part, f"{seconds / steps * MS:.3f}", f"{100 * seconds / total:.1f} %", *numbers])
    sums = [phase["by_kind"][kind] for kind in kinds]
    rows.append(["all", f"{total / steps * MS:.3f}", "100.0 %", *(f"{one / steps * MS:.3f}" for one in sums)])
    rows.append(["", "", "", *(f"{100 * one / total:.1f} %" for one in sums)])
    return ["device ms per step", "all", "share", *(SHORT.get(kind, kind) for kind in kinds)], rows


def longest(phase: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows: the operations that took longest, summed over layers."""
    steps, total = phase["steps"], sum(phase["by_kind"].values())
    rows = [
        [
            one["name"],
            one["part"],
            SHORT.get(one["kind"], one["kind"]),
            f"{one['count'] / steps:,.3g}",
            f"{one['seconds'] / steps * MS:.3f}",
            f"{100 * one['seconds'] / total:.1f} %",
        ]
        for one in phase["longest"]
    ]
    return ["longest per step", "part", "kind", "runs", "ms", "share"], rows


def _gap(gap: dict[str, Any] | None) -> str:
    return "" if gap is None else f" and waited {gap['per_step_mean'] * MS:.3f} ms per step for the host"


def _count(number: int, unit: str, ending: str = "s") -> str:
    return f"{number:,} {unit}{'' if number == 1 else ending}"
