"""Figures of published models as Markdown: what `make bench-real` prints, and the README shows."""

import statistics
from typing import Any

from benchmarks.peers.report import NAMES
from benchmarks.real.measures import LESS_IS_BETTER, TITLES

MODEL_TITLES: dict[str, str] = {"smollm2": "SmolLM2-135M-Instruct, Q4_1", "gemma3-270m": "Gemma 3 270M, Q4_K_M"}


def to_markdown(report: dict[str, Any]) -> str:
    """A table for each model: medians over the rounds, and jaxinfer over llama.cpp; then the machine."""
    systems = [name for name in NAMES if any(name in figures for figures in report["models"].values())]
    parts = [_table(MODEL_TITLES[name], found, systems) for name, found in report["models"].items() if found]
    absent = {**report["skipped"], **report["failed"]}
    if absent:
        parts.append("Not in this run: " + "; ".join(f"{name} ({why})" for name, why in absent.items()) + ".")
    options = "".join(f", {name}={value}" for name, value in report["options"].items())
    sets = ", ".join(report["instruction_sets"]) or "no vector instructions known here"
    rounds = report["rounds"]
    parts.append(
        f"{report['cpu']} ({sets}), {report['num_threads']} threads each, medians of {rounds} "
        f"round{'s' * (rounds != 1)}, JAX {report['jax']}{options}. Ratios above 1 are in jaxinfer's favour."
    )
    return "\n\n".join(parts)


def ratio(name: str, own: float, other: float) -> float:
    """How many times better our figure is."""
    return other / own if name in LESS_IS_BETTER else own / other


def _table(title: str, found: dict[str, dict[str, list[float]]], systems: list[str]) -> str:
    lines = [
        f"| {title} | {' | '.join(NAMES[name] for name in systems)} | over llama.cpp |",
        "| --- |" + " ---: |" * (len(systems) + 1),
    ]
    for measure, what in TITLES.items():
        medians = {name: statistics.median(row[measure]) for name, row in found.items() if row.get(measure)}
        if not medians:
            continue
        cells = [_number(medians[name]) if name in medians else "" for name in systems]
        is_compared = "jaxinfer" in medians and "llama_cpp" in medians
        cells.append(f"{ratio(measure, medians['jaxinfer'], medians['llama_cpp']):.2f}x" if is_compared else "")
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
