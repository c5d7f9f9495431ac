"""Decode steps of a model of the shape of Llama 3 8B as `jaxinfer.planning.step_model` predicts them: a table.

    python -m benchmarks.predicted_steps

Nothing is measured or compiled; the table of docs/planning.md is made of it.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.on_chip.sizes import LLAMA_3_8B
from jaxinfer.chips import chips
from jaxinfer.engine.options import EngineOptions
from jaxinfer.loading import load_shapes
from jaxinfer.planning import PlanRequest, parse_place
from jaxinfer.planning.counted import count
from jaxinfer.planning.step_model import COSTS, predict

WEIGHTS = (None, "int8", "int4-g128")
BATCHES, CONTEXTS = (1, 8, 64, 256), (1536, 8192)
CACHES = ("int8", "int4")
CACHED_BATCH = 64


def rows() -> Iterator[tuple[str, str, str, int, int, float, float, int]]:
    """Chip, weights, cache, sequences, tokens of each, milliseconds, share of the memory's rate, launches."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA_3_8B), encoding="utf-8")
        models = {recipe: load_shapes(folder, quantize=recipe) for recipe in WEIGHTS}
    cases = [(recipe, "auto", batch) for recipe in WEIGHTS for batch in BATCHES]
    cases += [(None, kv_dtype, CACHED_BATCH) for kv_dtype in CACHES]
    for chip in COSTS:
        place = parse_place(f"{chip}x1" if chips()[chip].platform == "gpu" else f"{chip}:1x1")
        for recipe, kv_dtype, batch in cases:
            options = EngineOptions(max_model_len=max(CONTEXTS), max_seqs=batch, kv_dtype=kv_dtype)
            spec = PlanRequest("llama-3-8b", *models[recipe], place, options).spec()
            counted = count(spec, spec.config, spec.placed_params, spec.cache)
            for context in CONTEXTS:
                step = predict(place.chip, spec, counted, batch, context)
                if step is None:  # a chip of two devices
                    continue
                cache = "bfloat16" if kv_dtype == "auto" else kv_dtype
                predicted = 1000 * step.seconds, step.memory_share, step.launches
                yield chip, recipe or "bfloat16", cache, batch, context, *predicted


def table() -> str:
    """The rows as Markdown, a line for both contexts of each case."""
    titles = " | ".join(f"at {context:,} tokens" for context in CONTEXTS)
    lines = [f"| chip | weights | cache | batch | {titles} |", "| --- | --- | --- | ---: |" + " ---: |" * len(CONTEXTS)]
    every = list(rows())
    for first in range(0, len(every), len(CONTEXTS)):
        chip, weights, cache, batch = every[first][:4]
        cells = (f"{ms:.2f} ms, {share:.0%}" for *_, ms, share, _ in every[first : first + len(CONTEXTS)])
        lines.append(f"| {chip} | {weights} | {cache} | {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
