"""Cost and gain of few bits, smaller caches and drafts on real models: `make quality`, for docs/quality.md.

    python -m benchmarks.quality [--models NAMES] [--parts NAMES]

The file of a model in benchmarks/results is written after each part; a part that it has is not measured again unless
`--parts` names it.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

from benchmarks.quality.caches import measure_kv_dtypes, measure_policies
from benchmarks.quality.drafts import measure_drafts
from benchmarks.quality.report import RESULTS, draw
from benchmarks.quality.texts import TITLES, texts_for
from benchmarks.quality.weights import measure_weights
from benchmarks.real.models import fetched_path
from jaxinfer.files import write_text_atomically
from jaxinfer.measure.bench.model import machine

PARTS = ("kv_dtypes", "policies", "weights", "drafts")


def measure(model: str, part: str) -> list[dict[str, Any]]:
    path, texts = model if model == "demo" else str(fetched_path(model)), texts_for(model)

    def report(text: str) -> None:
        print(f"{model} {part}: {text}", flush=True)

    def reported(row: dict[str, Any]) -> dict[str, Any]:
        figures = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
        )
        report(", ".join(figures))
        return row

    measures: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "kv_dtypes": lambda: measure_kv_dtypes(path, texts.measured, report),
        "policies": lambda: measure_policies(path, texts.measured, report),
        "weights": lambda: [reported(row) for row in measure_weights(path, texts.calibration, texts.measured)],
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
            if arguments.parts or part not in figures:
                figures[part] = {"machine": machine(), "rows": measure(model, part)}
                write_text_atomically(file, json.dumps(figures, indent=1) + "\n")
    draw()


if __name__ == "__main__":
    main()
