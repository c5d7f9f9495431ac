"""Cost and gain of few bits, smaller caches and drafts on real models: `make quality`, for docs/quality.md.

    python -m benchmarks.quality [--models NAMES] [--parts NAMES]

The file of a model in benchmarks/results is written after each part; a part that it has is not measured again unless
`--parts` names it. Weights take hours: they are written method by method, and a run that was stopped goes on.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

from benchmarks.quality.caches import measure_kv_dtypes, measure_policies
from benchmarks.quality.drafts import measure_drafts
from benchmarks.quality.report import RESULTS, Rows, draw
from benchmarks.quality.texts import TITLES, texts_for
from benchmarks.quality.weights import measure_weights
from benchmarks.real.models import fetched_path
from jaxinfer.files import write_text_atomically
from jaxinfer.measure.bench.model import machine

PARTS = ("kv_dtypes", "policies", "weights", "drafts")


def measure(model: str, part: str, begun: Rows, keep: Callable[[Rows], None]) -> Rows:
    """The rows of a part, of which some have `begun`; weights are kept one by one."""
    path, texts = model if model == "demo" else str(fetched_path(model)), texts_for(model)

    def report(text: str) -> None:
        print(f"{model} {part}: {text}", flush=True)

    def reported(row: dict[str, Any]) -> dict[str, Any]:
        figures = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
        )
        report(", ".join(figures))
        return row

    def weights() -> Rows:
        rows, done = list(begun), {row["method"] for row in begun}
        for row in measure_weights(path, texts.calibration, texts.measured, done):
            rows.append(reported(row))
            keep(rows)
        return rows

    measures: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "kv_dtypes": lambda: measure_kv_dtypes(path, texts.measured, report),
        "policies": lambda: measure_policies(path, texts.measured, report),
        "weights": weights,
        "drafts": lambda: [reported(row) for row in measure_drafts(path, texts)],
    }
    return measures[part]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(TITLES), help="default: %(default)s")
    parser.add_argument("--parts", help=f"of {', '.join(PARTS)}; default: those without figures")
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    parts = arguments.parts.split(",") if arguments.parts else PARTS
    for name, known in (*((model, TITLES) for model in models), *((part, PARTS) for part in parts)):
        if name not in known:
            parser.error(f"{name!r} is none of {', '.join(known)}")
    for model in models:
        file = RESULTS / f"quality_{model}.json"
        figures = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for part in parts:
            begun = figures.get(part, {}).get("rows", []) if figures.get(part, {}).get("is_unfinished") else []

            def keep(rows: Rows, is_unfinished: bool = True, figures=figures, part=part, file=file) -> None:
                unfinished = {"is_unfinished": True} if is_unfinished else {}
                figures[part] = {"machine": machine(), **unfinished, "rows": rows}
                write_text_atomically(file, json.dumps(figures, indent=1) + "\n")

            if arguments.parts or part not in figures or begun:
                keep(measure(model, part, begun, keep), is_unfinished=False)
    draw()


if __name__ == "__main__":
    main()
