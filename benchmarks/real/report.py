"""Figures of published models as Markdown: printed by `make bench-real`, shown in docs/speed.md and the README."""

import statistics
from typing import Any

from benchmarks.peers.report import NAMES
from benchmarks.real.measures import LESS_IS_BETTER, QUICK, TITLES

MODEL_TITLES: dict[str, str] = {"smollm2": "SmolLM2-135M-Instruct, Q4_1", "gemma3-270m": "Gemma 3 270M, Q4_K_M"}


def to_markdown(report: dict[str, Any]) -> str:
    """A table for each model: medians over the rounds, and jaxinfer over llama.cpp; then the machine."""
    systems = [name for name in NAMES if any(name in figures for figures in report["models"].values())]
    parts = [_table(MODEL_TITLES[name], figures, systems) for name, figures in report["models"].items() if figures]
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


def ratios(report: dict[str, Any]) -> str:
    """A row for each model: how many times as fast as llama.cpp jaxinfer is in each measure, and on what machine."""
    rows = ["| | " + " | ".join(TITLES[name].removesuffix(", tokens/s") for name in QUICK) + " |"]
    rows.append("| --- |" + " ---: |" * len(QUICK))
    for model, systems in report["models"].items():
        own, peer = systems["jaxinfer"], systems["llama_cpp"]
        cells = (f"{ratio(name, *(statistics.median(row[name]) for row in (own, peer))):.2f}x" for name in QUICK)
        rows.append(f"| {MODEL_TITLES[model]} | {' | '.join(cells)} |")
    return "\n".join([*rows, "", f"{report['cpu']}, {report['num_threads']} threads each, medians."])


def ratio(name: str, own: float, other: float) -> float:
    """How many times better our figure is."""
    return other / own if name in LESS_IS_BETTER else own / other


def _table(title: str, figures: dict[str, dict[str, list[float]]], systems: list[str]) -> str:
    lines = [
        f"| {title} | {' | '.join(NAMES[name] for name in systems)} | over llama.cpp |",
        "| --- |" + " ---: |" * (len(systems) + 1),
    ]
    for measure, what in TITLES.items():
        medians = {name: statistics.median(row[measure]) for name, row in figures.items() if row.get(measure)}
        if not medians:
            continue
        cells = [_number(medians[name]) if name in medians else "" for name in systems]
        is_compared = "jaxinfer" in medians and "llama_cpp" in medians
        cells.append(f"{ratio(measure, medians['jaxinfer'], medians['llama_cpp']):.2f}x" if is_compared else "")
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
