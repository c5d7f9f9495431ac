"""Tables and pictures of what `make quality` measured, for docs/quality.md."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.quality.texts import TITLES

RESULTS = Path(__file__).parents[1] / "results"
PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
Rows = list[dict[str, Any]]


def rows_of(part: str) -> dict[str, Rows]:
    """Rows of a part by the title of each model that has been measured."""
    files = {title: RESULTS / f"quality_{model}.json" for model, title in TITLES.items()}
    figures = {title: json.loads(file.read_text(encoding="utf-8")) for title, file in files.items() if file.exists()}
    return {title: parts[part]["rows"] for title, parts in figures.items() if part in parts}


def across_models(part: str, head: str, name_of: Callable[[dict[str, Any]], str]) -> str:
    """A table with two columns for each model: KL, and the perplexity of its texts."""
    models = rows_of(part)
    names = list(dict.fromkeys(name_of(row) for rows in models.values() for row in rows))
    lines = [
        f"| {head} |" + "".join(f" {title}: KL | perplexity |" for title in models),
        "| --- |" + " ---: | ---: |" * len(models),
    ]
    for name in names:
        rows = [next((row for row in rows if name_of(row) == name), {}) for rows in models.values()]
        lines.append(
            f"| {name} |" + "".join(f" {_number(row, 'kl', 5)} | {_number(row, 'perplexity', 2)} |" for row in rows)
        )
    reasons = {
        f"{title}, {name_of(row)}: {row['reason']}"
        for title, rows in models.items()
        for row in rows
        if row.get("reason")
    }
    return "\n".join([*lines, *(["", "Refused: " + "; ".join(sorted(reasons)) + "."] if reasons else [])])


def weights() -> str:
    models = rows_of("weights")
    sizes = "; ".join(
        f"{title}: {rows[0]['num_tokens']:,} tokens, calibrated on {rows[0]['num_calibration_tokens']:,}"
        for title, rows in models.items()
    )
    return across_models("weights", "method", lambda row: row["method"]) + f"\n\n{sizes}."


def kv_dtypes() -> str:
    return across_models("kv_dtypes", "kv_dtype", _kv_dtype)


def _kv_dtype(row: dict[str, Any]) -> str:
    return "activations int8" if row.get("activations") else row["kv_dtype"]


def policies() -> str:
    """A table for each model: KL and the lines that can be copied, by the depth of their first occurrence."""
    parts = []
    for title, rows in rows_of("policies").items():
        cells = rows[0]["needle"]
        depths = [f"{cell['num_tokens']} tokens, depth {cell['depth']:.0%}" for cell in cells]
        lines = [
            f"| {title} | KiB of a text | KL | same best token | {' | '.join(depths)} |",
            "| --- |" + " ---: |" * (3 + len(cells)),
        ]
        for row in rows:
            copied = [f"{cell['num_correct']} of {cell['num_lines']}" for cell in row["needle"]] or [""] * len(cells)
            size = "" if row["sequence_bytes"] is None else f"{row['sequence_bytes'] / 1024:,.0f}"
            agreement = "" if row["top1_agreement"] is None else f"{row['top1_agreement']:.1%}"
            lines.append(
                f"| {row['kv_policy']} | {size} | {_number(row, 'kl', 4)} | {agreement} | {' | '.join(copied)} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def drafts() -> str:
    lines = [
        "| model | draft | task | tokens a round | accepted | speedup, median | from, to |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for title, rows in rows_of("drafts").items():
        for row in rows:
            lines.append(
                f"| {title} | `{row['draft']}` | {row['task']} | {_number(row, 'mean_accepted_length', 2)} "
                f"| {_number(row, 'acceptance_rate', 2)} | {row['speedup']:.2f}x "
                f"| {row['slowest']:.2f}x, {row['fastest']:.2f}x |"
            )
    return "\n".join(lines)


def draw() -> None:
    """Writes the pictures: KL by bits of the weights, by the cache's bytes, and by each policy's budget."""
    _picture("weights", "bits a weight", lambda row: row["bits_per_weight"], lambda row: row["method"])
    _picture("kv_dtypes", "bytes of a token in the cache", lambda row: row["token_bytes"], _kv_dtype)
    _picture(
        "policies",
        "KiB kept of a text",
        lambda row: row["sequence_bytes"] / 1024,
        lambda row: row["kv_policy"].partition("(")[0],
    )


def _picture(part: str, what: str, x: Callable[[dict[str, Any]], float], name: Callable[[dict[str, Any]], str]) -> None:
    from matplotlib.figure import Figure

    models = rows_of(part)
    if not models:
        return
    labels = list(dict.fromkeys(name(row) for rows in models.values() for row in rows))
    figure = Figure(figsize=(5 * len(models), 4), layout="constrained")
    for axes, (title, rows) in zip(figure.subplots(1, len(models), squeeze=False)[0], models.items(), strict=True):
        measured = [row for row in rows if row.get("kl")]
        for label in dict.fromkeys(map(name, measured)):
            number = labels.index(label)
            points = [(x(row), row["kl"]) for row in measured if name(row) == label]
            style = "osD^vP*X"[number % 8] + ("-" if len(points) > 1 else "")
            axes.plot(*zip(*points, strict=True), style, color=f"C{number % 10}", label=label, markersize=5)
        axes.set(title=title, xlabel=what, ylabel="KL in nats", yscale="log")
        axes.legend(fontsize=6)
    figure.savefig(PICTURES / f"quality_{part}.png", dpi=110)


def _number(row: dict[str, Any], name: str, digits: int) -> str:
    return "" if row.get(name) is None else f"{row[name]:.{digits}f}"


if __name__ == "__main__":
    draw()
