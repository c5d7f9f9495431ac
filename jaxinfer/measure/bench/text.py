"""Results for people: a table and a few lines."""

from typing import Any

GIB, MS = 2**30, 1e3
TITLES = {"latency": ("batch", "batch"), "load": ("requests/s", "rate"), "throughput": ("requests", "requests")}


def header(result: dict[str, Any]) -> list[str]:
    """The machine, the start, the measured roofline."""
    machine, start, roofline = result["machine"], result["start"], result["roofline"]
    lines = [
        f"{result['model']} on {machine['num_devices']} x {machine['device']}, {machine['num_cores']} cores, "
        f"JAX {machine['jax']}"
    ]
    if start is not None:
        lines.append(
            f"loaded in {start['load_seconds']:.1f} s; {start['programs']} programs ready after "
            f"{start['compile_seconds']:.1f} s more ({start['from_cache']} from the cache)"
        )
    if roofline is not None:
        by = ", ".join(f"{name} {rate / 1e9:,.1f}" for name, rate in roofline["bytes_per_second_by"].items())
        flops = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s {name}" for name, rate in roofline["flops_per_second"].items())
        lines.append(f"measured here: {by} GB/s; {flops}")
    return lines


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Column titles and cells, a row for each run."""
    title, key = TITLES[result["command"]]
    columns = [title, "TTFT ms p50/p90/p99", "TPOT ms p50/p90/p99", "ITL ms p50/p99", "E2EL s p50/p99"]
    columns += ["tokens/s in", "out", "roofline out", "of roofline"]
    cells = []
    for run in result["runs"]:
        decode = run["decode"]
        cells.append(
            [
                _number(run[key]),
                _times(run["ttft"], MS, ("p50", "p90", "p99")),
                _times(run["tpot"], MS, ("p50", "p90", "p99")),
                _times(run["itl"], MS, ("p50", "p99")),
                _times(run["e2el"], 1, ("p50", "p99")),
                f"{run['tokens_per_second']['in']:,.1f}",
                f"{run['tokens_per_second']['out']:,.1f}",
                "" if decode is None else f"{decode['roofline_tokens_per_second']:,.1f}",
                "" if decode is None else f"{decode['percent']:.0f} %",
            ]
        )
    return columns, cells


def details(result: dict[str, Any]) -> list[str]:
    """What has no column, a line for each run."""
    _, key = TITLES[result["command"]]
    lines = []
    for run in result["runs"]:
        parts = [f"{run['compiled_after_warm_up']} programs compiled after warm-up"]
        if (gap := run["host_gap"]) is not None:
            parts.append(f"host gap {gap['per_step_mean'] * MS:.3f} ms a step")
        if (prefill := run.get("prefill")) is not None:
            parts.append(f"prompts at {prefill['percent']:.0f} % of the measured FLOP/s")
        if (drafts := run.get("speculation")) is not None:
            parts.append(
                f"{drafts['acceptance_rate']:.0%} of drafted tokens accepted, "
                f"{drafts['mean_accepted_length']:.1f} tokens a round"
            )
        if (good := run.get("goodput")) is not None:
            parts.append(f"goodput {good['requests_per_second']:.2f} requests/s ({good['share']:.0%})")
        if (cost := run.get("cost_per_million_tokens")) is not None:
            parts.append(f"a million tokens out cost {cost['out']:.2f}, in and out {cost['total']:.2f}")
        memory = run["memory"]
        parts.append(f"peak {memory['peak_rss_bytes'] / GIB:.2f} GiB resident")
        if memory["peak_device_bytes"] is not None:
            parts.append(f"{memory['peak_device_bytes'] / GIB:.2f} GiB on a device")
        lines.append(f"{TITLES[result['command']][0]} {_number(run[key])}: " + "; ".join(parts))
    return lines


def _number(value: float | str) -> str:
    return f"{float(value):g}"


def _times(found: dict[str, float] | None, unit: float, names: tuple[str, ...]) -> str:
    return "" if found is None else " / ".join(f"{found[name] * unit:.{1 if unit == MS else 2}f}" for name in names)
