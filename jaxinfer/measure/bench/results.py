"""Results of benchmarks: one JSON schema for all commands, read again for pictures and for resuming; tables."""

import json
from pathlib import Path
from typing import Any

from jaxinfer.checks import format_bytes
from jaxinfer.files import write_text_atomically

SCHEMA, VERSION = "jaxinfer.bench", 1
COMMANDS = ("latency", "throughput", "load")


class ResultError(ValueError):
    """A file is not a result of this program, or not of the same benchmark."""


def read_result(file: Path) -> dict[str, Any]:
    """Reads a result. Raises ResultError, with the file's name, for other content or versions; FileNotFoundError."""
    result = read_schema(file, SCHEMA, VERSION)
    if result.get("command") not in COMMANDS or not isinstance(result.get("runs"), list):
        raise ResultError(f"{file.name} is not complete: its command is {result.get('command')!r}")
    return result


def read_schema(file: Path, schema: str, version: int) -> dict[str, Any]:
    """Reads a JSON object of a schema ("jaxinfer.COMMAND") and version. Raises ResultError for others;
    FileNotFoundError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ResultError(f"{file.name}: not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("schema") != schema:
        raise ResultError(f"{file.name} is not a result of `{schema.replace('.', ' ')}`")
    if content.get("version") != version:
        raise ResultError(f"{file.name} has version {content.get('version')!r} of the format, this program {version}")
    return content


def write_result(file: Path, result: dict[str, Any]) -> None:
    """Replaces the file atomically."""
    write_text_atomically(file, json.dumps(result, indent=1, allow_nan=False) + "\n")


def earlier_runs(file: Path, result: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs in the file of an earlier result of the same benchmark; [] if there is no file.

    Raises ResultError, with the difference, if it is of another benchmark or machine.
    """
    if not file.exists():
        return []
    earlier = read_result(file)
    check_same(file, earlier, result, ("command", "model"))
    return earlier["runs"]


def check_same(file: Path, earlier: dict[str, Any], result: dict[str, Any], parts: tuple[str, ...]) -> None:
    """Raises ResultError, with the difference, unless both have the same `parts`, options and machine."""
    for part in parts:
        if earlier[part] != result[part]:
            raise ResultError(f"--resume: {file.name} is of {part} {earlier[part]!r}, not {result[part]!r}")
    for part in ("options", "machine"):
        for name in sorted({*earlier[part], *result[part]}):
            recorded, other = earlier[part].get(name), result[part].get(name)
            if recorded != other:
                raise ResultError(f"--resume: {file.name} was made with {name}={recorded!r}, not {other!r}")


MS = 1e3
TITLES = {"latency": ("batch", "batch"), "load": ("requests/s", "rate"), "throughput": ("requests", "requests")}


def header(result: dict[str, Any]) -> list[str]:
    """Lines on the machine, the start and the measured roofline."""
    machine, start, roofline = result["machine"], result["start"], result["roofline"]
    lines = [
        f"{result['model']} on {machine['num_devices']} x {machine['device']}, {machine['num_cores']} cores, "
        f"JAX {machine['jax']}"
        if "device" in machine
        else f"{result['model']} over HTTP"
    ]
    if start is not None:
        lines.append(
            f"loaded in {start['load_seconds']:.1f} s; {start['programs']} programs ready in "
            f"{start['compile_seconds']:.1f} s ({start['from_cache']} from the cache)"
        )
    if roofline is not None:
        by = ", ".join(f"{name} {rate / 1e9:,.1f}" for name, rate in roofline["bytes_per_second_by"].items())
        flops = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s {name}" for name, rate in roofline["flops_per_second"].items())
        lines.append(f"measured rates: {by} GB/s; {flops}")
    return lines


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Column titles, and a row of cells for each run."""
    title, key = TITLES[result["command"]]
    columns = [title, "TTFT ms p50/p90/p99", "TPOT ms p50/p90/p99", "ITL ms p50/p99", "E2EL s p50/p99"]
    columns += ["tokens/s in", "out", "roofline out", "of roofline"]
    cells = []
    for run in result["runs"]:
        decode = run.get("decode")
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
                "" if decode is None or decode["percent"] is None else f"{decode['percent']:.0f} %",
            ]
        )
    return columns, cells


def details(result: dict[str, Any]) -> list[str]:
    """Further results, a line for each run."""
    _, key = TITLES[result["command"]]
    lines = []
    for run in result["runs"]:
        parts = []
        if "compiled_after_warm_up" in run:
            parts.append(f"{run['compiled_after_warm_up']} programs compiled after warm-up")
        if (gap := run.get("host_gap")) is not None:
            parts.append(f"host gap {gap['per_step_mean'] * MS:.3f} ms per step")
        if (prefill := run.get("prefill")) is not None:
            parts.append(f"prefill at {prefill['percent']:.0f} % of the measured FLOP/s")
        if (drafts := run.get("speculation")) is not None:
            parts.append(
                f"{drafts['acceptance_rate']:.0%} of draft tokens accepted, "
                f"{drafts['mean_accepted_length']:.1f} tokens per round"
            )
        if (good := run.get("goodput")) is not None:
            parts.append(f"goodput {good['requests_per_second']:.2f} requests/s ({good['share']:.0%})")
        if (cost := run.get("cost_per_million_tokens")) is not None:
            parts.append(f"cost per million tokens: output {cost['out']:.2f}, all {cost['total']:.2f}")
        if (memory := run.get("memory")) is not None:
            parts.append(f"peak {format_bytes(memory['peak_rss_bytes'])} resident")
            if memory["peak_device_bytes"] is not None:
                parts.append(f"{format_bytes(memory['peak_device_bytes'])} on a device")
        if "failed" in run:
            parts += _http_details(run)
        lines.append(f"{TITLES[result['command']][0]} {_number(run[key])}: " + "; ".join(parts))
    return lines


def _http_details(run: dict[str, Any]) -> list[str]:
    """Results of a run over HTTP."""
    parts = [f"{run['requests']} requests answered, {run['answer_tokens']} tokens"]
    if run["ended_early"]:
        parts.append(f"{run['ended_early']} answers ended early")
    if run["failed"]:
        failures = ", ".join(
            f"{count} with status {status}" if status != "0" else f"{count} cut off"
            for status, count in run["failed"].items()
        )
        parts.append(f"failed: {failures}, after {_times(run['failed_seconds'], MS, ('p50', 'p99'))} ms p50/p99")
    return parts


def _number(value: float | str) -> str:
    return f"{float(value):g}"


def _times(percentiles: dict[str, float] | None, unit: float, names: tuple[str, ...]) -> str:
    return (
        ""
        if percentiles is None
        else " / ".join(f"{percentiles[name] * unit:.{1 if unit == MS else 2}f}" for name in names)
    )
