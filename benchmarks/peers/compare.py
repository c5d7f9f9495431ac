"""Runs the systems in turn, round by round, and sums up: medians, ranges, equal tokens, ratios."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.systems import PEERS
from benchmarks.peers.workload import DECODE_TOKENS, Measure
from jaxinfer.measure.bench.model import machine

ROOT = Path(__file__).parents[2]
TIMEOUT = 3600  # seconds of one process
PROGRAMS = "programs"  # the folder of the compilation cache
REFERENCE = "transformers_eager"  # whose tokens are compared with
Goals = Sequence[tuple[str, str, float]]
# What must hold: jaxinfer over the best of the systems whose names begin so.
GOALS: Goals = (
    ("decode", "transformers", 2.5),
    ("decode", "llama_cpp", 1.0),
    ("mixed32", "transformers", 3.0),
    ("mixed32", "llama_cpp", 1.2),
    ("prefill", "transformers", 1.1),
    ("prefill", "llama_cpp", 1.1),
)


class SystemFailedError(RuntimeError):
    """A system's process ended with an error; the message has the end of what it said."""


def run_process(job: dict[str, Any], python: str, folder: Path) -> dict[str, Any]:
    """What a process of one system found, and the seconds from its launch to its first token. Raises
    SystemFailedError."""
    file = folder / "job.json"
    file.write_text(json.dumps(job), encoding="utf-8")
    threads = str(job["num_threads"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    environment["JAXINFER_CACHE_DIR"] = str(folder / PROGRAMS)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a second start reads compiled modules, as users' do
    launched_at = time.time()
    try:
        done = subprocess.run(
            [python, "-m", "benchmarks.peers.worker", str(file)],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=environment,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise SystemFailedError(f"{job['system']} took more than {TIMEOUT} s") from None
    if done.returncode:
        raise SystemFailedError(f"{job['system']} failed:\n{done.stderr.strip()[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {**found, "process_start_seconds": found["started_at"] - launched_at}


def figure(name: str, measure: Measure, seconds: float) -> float:
    """What a measure reports: tokens a second, or for "first" seconds."""
    if name == "first":
        return seconds
    if measure.kind == "decode":
        return (DECODE_TOKENS - 1) / seconds
    if name == "prefill":
        return len(measure.prompts[0]) / seconds
    return measure.num_tokens / seconds


def take_turns(
    systems: list[str],
    jobs: Callable[[str], list[dict[str, Any]]],
    python_of: Callable[[str], str],
    folder: Path,
    rounds: int,
    told: Callable[[str], None],
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Each system's processes, `rounds` times, in turn; and of those that failed, why. A system that fails is left out
    from then on."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for name in systems:
            if name in failed:
                continue
            for job in jobs(name):
                try:
                    found = start_twice(job, python_of(name), folder)
                except SystemFailedError as error:
                    failed[name] = str(error).splitlines()[-1]
                    told(f"round {number + 1}  {error}")
                    break
                runs[name].append(found)
                measures = {key: Measure(**values) for key, values in job["measures"].items()}
                shown = ", ".join(
                    f"{key} {figure(key, measures[key], statistics.median(values)):.4g}"
                    for key, values in found["seconds"].items()
                )
                told(f"round {number + 1}  {name:<24}{shown}")
    return {name: found for name, found in runs.items() if found and name not in failed}, failed


def start_twice(job: dict[str, Any], python: str, folder: Path) -> dict[str, Any]:
    """A process that finds no compiled programs; and where they are kept, the start of a second one, which does."""
    shutil.rmtree(folder / PROGRAMS, ignore_errors=True)
    found = run_process(job, python, folder)
    if PEERS[job["system"]].keeps_programs:
        again = run_process({**job, "only_starts": True}, python, folder)
        found["second_start_seconds"] = again["start_seconds"]
    return found


def summed_up(runs: list[dict[str, Any]], measures: dict[str, Measure]) -> dict[str, Any]:
    """Median, slowest and fastest of each measure over all repeats of all rounds, and what starting took."""
    row: dict[str, Any] = {}
    for name, measure in measures.items():
        found = [figure(name, measure, one) for run in runs for one in run["seconds"].get(name, ())]
        if found:
            row[name] = {"median": statistics.median(found), "least": min(found), "most": max(found)}
    main = [run for run in runs if set(run["seconds"]) - {"pair"}] or runs
    row["start_seconds"] = statistics.median(run["start_seconds"] for run in main)
    if all("second_start_seconds" in run for run in main):
        row["second_start_seconds"] = statistics.median(run["second_start_seconds"] for run in main)
    row["peak_rss_bytes"] = max(run["peak_rss_bytes"] for run in main)
    return row


def equal_tokens(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, dict[str, int]]]:
    """Of each system and measure: how many answer tokens there are, and how many stand before the first that is not
    the reference's."""
    if REFERENCE not in runs:
        return {}
    expected = _answers(runs[REFERENCE])
    found: dict[str, dict[str, dict[str, int]]] = {}
    for name, processes in runs.items():
        if name == REFERENCE:
            continue
        for measure, answers in _answers(processes).items():
            if measure not in expected:
                continue
            equal = sum(_num_equal(one, other) for one, other in zip(answers, expected[measure], strict=True))
            total = sum(len(one) for one in expected[measure])
            found.setdefault(name, {})[measure] = {"equal": equal, "tokens": total}
    return found


def _answers(processes: list[dict[str, Any]]) -> dict[str, list[list[int]]]:
    return {measure: answers for one in processes for measure, answers in one["answers"].items()}


def _num_equal(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(other))


def ratios(systems: dict[str, dict[str, Any]], wanted: Goals = GOALS) -> list[dict[str, Any]]:
    """jaxinfer over the best system of each other family, for each measure; with the goal where there is one."""
    found = []
    own = systems.get("jaxinfer", {})
    goals = {(measure, family): goal for measure, family, goal in wanted}
    for measure in ("decode", "mixed8", "mixed32", "prefill", "first"):
        for family in ("transformers", "llama_cpp", "easydel", "vllm"):
            others = {
                name: row[measure]["median"]
                for name, row in systems.items()
                if name.startswith(family) and measure in row and not PEERS[name].speculates
            }
            if measure not in own or not others:
                continue
            is_time = measure == "first"
            best = (min if is_time else max)(others, key=lambda name: others[name])
            ratio = own[measure]["median"] / others[best]
            row = {"measure": measure, "over": best, "ratio": 1 / ratio if is_time else ratio}
            if (goal := goals.get((measure, family))) is not None:
                row["goal"] = goal
            found.append(row)
    return found


def versions() -> dict[str, str]:
    """Of the systems' packages that are installed."""
    from importlib import metadata

    found = {}
    for package in ("jax", "torch", "transformers", "llama-cpp-python", "vllm"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def job(
    system: str, folder: Path, measures: dict[str, Measure], num_threads: int, draft: Path | None = None
) -> dict[str, Any]:
    """What a worker is told."""
    return {
        "system": system,
        "folder": str(folder),
        "draft": None if draft is None else str(draft),
        "num_threads": num_threads,
        "measures": {name: asdict(measure) for name, measure in measures.items()},
    }


def report(
    runs: dict[str, list[dict[str, Any]]],
    failed: dict[str, str],
    skipped: dict[str, str],
    all_measures: dict[str, Measure],
    weight_bytes: int,
    goals: Goals = GOALS,
) -> dict[str, Any]:
    systems = {name: summed_up(found, all_measures) for name, found in runs.items()}
    return {
        "version": 1,
        "systems": systems,
        "ratios": ratios(systems, goals),
        "equal_tokens": equal_tokens(runs),
        "reference": REFERENCE,
        "skipped": skipped,
        "failed": failed,
        "weight_bytes": weight_bytes,
        **machine(),
        "packages": versions(),
    }


def python_for(easydel_python: str | None) -> Callable[[str], str]:
    return lambda name: easydel_python or sys.executable if PEERS[name].own_python else sys.executable
