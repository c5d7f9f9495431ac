"""What a decode step moves on chips that are not here, by the real compilers, next to what it must move.

    PYTHONPATH=.venv/compilers python -m benchmarks.compiled_roofline [--chip v6e ...] [--weights int8 ...]
        [--batch 64 ...] [--context 1536 ...] [--kv-dtype int8] [--adapters 8 ...] [--resume FILE] [--picture FILE]

The model has the shape of Llama 3 8B. Programs of 2 and of 4 layers are compiled, and the bytes of 32 follow. Ideal:
the weights once, but of the embedding only rows, and the pages of all sequences once. On TPUs the bytes of attention
are those of the kernels' cost estimates; on GPUs attention reads each page once and is counted as ideal, and our
products of quantized weights read each operand once. A cell takes one to two minutes; with --resume what is in the file
is not compiled again.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.extras import install_hint
from jaxinfer.models import ModelConfig, RopeConfig, abstract_params
from jaxinfer.planning.chips import parse_place
from jaxinfer.planning.compiled import DECODE, is_attention, planned_programs
from jaxinfer.planning.counted import count
from jaxinfer.planning.plan import PlanRequest
from jaxinfer.planning.roofline import Rates, decode_point
from jaxinfer.quantization import quantize_params
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram

CHIPS = ("v5e", "v6e", "tpu7x", "h100", "h200")
WEIGHTS = ("bfloat16", "int8", "int4-g128", "fp8")
BATCHES, CONTEXTS = (1, 8, 64), (1536, 8192)
BOUND = 1.10
FEW, MORE = 2, 4  # layers that are compiled
# A pool that a TPU's vector memory does not hold: the compiler brings smaller ones there and back.
MIN_POOL_BYTES = 32 * 2**28
GPU_PRODUCT = re.compile('custom_call_target="mosaic_gpu.*quantized_matmul')
LLAMA_3_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=RopeConfig("llama3", 500_000.0, 128, factor=8.0, original_length=8192),
    max_position_embeddings=131_072,
    dtype="bfloat16",
)


@dataclass(frozen=True)
class Cell:
    """One decode step: weights' recipe, sequences and their tokens, the type of the cache, and LoRA adapters of rank 16
    for which all linear layers have room."""

    chip: str
    weights: str
    batch: int
    context: int
    kv_dtype: str = "auto"
    adapters: int = 0

    @property
    def name(self) -> str:
        adapters = f" {self.adapters} adapters" if self.adapters else ""
        return f"{self.chip} {self.weights} b{self.batch} c{self.context} {self.kv_dtype}{adapters}"


@dataclass(frozen=True)
class CellFigures:
    """Bytes of one device for one step, of temporaries, and milliseconds of the roofline: bytes or FLOPs over the
    chip's rate, whichever is more."""

    moved: float
    ideal: float
    temporary: int
    milliseconds: float
    bound: str
    seconds: float

    @property
    def ratio(self) -> float:
        return self.moved / self.ideal


def spec_of(cell: Cell, model: ModelConfig = LLAMA_3_8B) -> EngineSpec:
    """The engine of a cell, as shapes."""
    params = abstract_params(model, jnp.bfloat16)
    if cell.weights != "bfloat16":
        params = jax.eval_shape(partial(quantize_params, how=cell.weights), params)
    options = EngineOptions(
        max_seqs=cell.batch,
        max_model_len=cell.context,
        kv_dtype=cell.kv_dtype,
        max_adapters=cell.adapters,
        max_adapter_rank=16 if cell.adapters else None,
    )
    spec = PlanRequest("8b", model, params, parse_place(cell.chip), options).spec(compiles=True)
    return spec.with_pages(max(1 + cell.batch * spec.pages_per_sequence, MIN_POOL_BYTES // spec.page_bytes))


def measure(cell: Cell, model: ModelConfig = LLAMA_3_8B) -> CellFigures:
    """Compiles a cell. Raises RuntimeError if its compiler is not installed, and the compiler's own errors."""
    start = time.perf_counter()
    spec = spec_of(cell, model)
    few, more = (_compiled(spec.with_layers(range(count)), cell.chip) for count in (FEW, MORE))
    factor = (model.num_layers - FEW) / (MORE - FEW)
    beside = few[0] + factor * (more[0] - few[0])
    kernels = few[1] + factor * (more[1] - few[1])
    counted = count(spec, spec.config, spec.placed_params, spec.cache)
    pages = cell.batch * counted.read_cache_bytes(cell.context)
    if spec.platform == "gpu":
        kernels = pages
    ideal = counted.read_weight_bytes(cell.batch) + pages
    chip = parse_place(cell.chip).chip
    rates = Rates.of(chip)
    point = decode_point(
        rates,
        counted,
        None,
        batch=cell.batch,
        context=cell.context,
        compiled_batch=cell.batch,
        compiled_context=cell.context,
        num_replicas=1,
    )
    seconds = max((beside + kernels) / rates.hbm, point.compute_seconds)
    bound = "compute" if point.compute_seconds == seconds else "memory"
    spent = time.perf_counter() - start
    return CellFigures(beside + kernels, ideal, more[2], 1e3 * seconds, bound, round(spent, 1))


def _compiled(spec: EngineSpec, chip: str) -> tuple[float, float, int]:
    """Bytes moved beside attention and by its kernels, and temporaries."""
    planned = planned_programs(spec)[DECODE]
    found = ahead_of_time.compile_for(chip, planned.function, *planned.arguments, chip_mesh=spec.mesh)
    program = HloProgram(found.program.as_text())
    moves = program.moves()
    kernels = sum(move.num_bytes for move in moves if is_attention(move.instruction))
    beside = sum(move.num_bytes for move in moves) - kernels + _gpu_product_bytes(program)
    return beside, kernels, found.temporary_bytes


def _gpu_product_bytes(program: HloProgram) -> int:
    """Operands and results of our GPU kernels of quantized products, which `moves` does not count."""
    arrays = {instruction.name: instruction.results for instruction in program.instructions}
    total = 0
    for instruction, times in program.executed():
        if instruction.opcode == "custom-call" and GPU_PRODUCT.search(instruction.text):
            read = sum(array.hbm_bytes for name in instruction.operands for array in arrays[name])
            total += times * (read + instruction.hbm_bytes)
    return total


def run(cells: list[Cell], file: Path | None, report: Callable[[Cell, CellFigures | str], None]) -> dict[str, Any]:
    """Measures what the file does not have yet, and writes it after each cell."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {}
    for cell in cells:
        if cell.name not in found:
            try:
                found[cell.name] = asdict(cell) | asdict(measure(cell))
            except Exception as error:  # the compiler's message is the cell's result
                found[cell.name] = asdict(cell) | {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            if file:
                partial_file = file.with_suffix(".partial")
                partial_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                partial_file.replace(file)
        line = found[cell.name]
        fields = CellFigures.__dataclass_fields__
        report(cell, line["error"] if "error" in line else CellFigures(**{name: line[name] for name in fields}))
    return found


def _print(cell: Cell, found: CellFigures | str) -> None:
    head = f"{cell.chip:7}{cell.weights:11}{cell.batch:5}{cell.context:7}{cell.adapters:9}"
    if isinstance(found, str):
        print(f"{head}  {found[:140]}", flush=True)
        return
    verdict = "ok" if found.ratio <= BOUND else "SHORT"
    figures = f"{found.moved / 1e9:9.3f}{found.ideal / 1e9:9.3f}{found.ratio:8.3f}{found.temporary / 1e6:9.0f}"
    print(f"{head}{figures}{found.milliseconds:9.2f} {found.bound:8}{verdict}", flush=True)


def draw(found: dict[str, Any], file: Path) -> None:
    """A panel for each chip: moved bytes over ideal ones, by weights, batch and context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [line for line in found.values() if "error" not in line]
    chips = [chip for chip in CHIPS if any(line["chip"] == chip for line in lines)]
    cases = sorted({(line["context"], line["batch"]) for line in lines})
    figure, panels = pyplot.subplots(1, len(chips), figsize=(3.2 * len(chips), 3.4), sharey=True, squeeze=False)
    for panel, chip in zip(panels[0], chips, strict=True):
        for weights in WEIGHTS:
            points = [line for line in lines if line["chip"] == chip and line["weights"] == weights]
            points.sort(key=lambda line: (line["context"], line["batch"]))
            places = [cases.index((line["context"], line["batch"])) for line in points]
            panel.plot(places, [line["moved"] / line["ideal"] for line in points], marker="o", label=weights)
        panel.axhline(BOUND, color="grey", linestyle=":", linewidth=1)
        panel.set_title(chip)
        panel.set_xticks(range(len(cases)), [f"{batch} x {context}" for context, batch in cases], rotation=70)
    panels[0][0].set_ylabel("bytes moved / ideal")
    panels[0][-1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.compiled_roofline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chip", action="append", choices=CHIPS, help="default: all")
    parser.add_argument("--weights", action="append", choices=WEIGHTS, help="default: all")
    parser.add_argument("--batch", action="append", type=int, help=f"default: {BATCHES}")
    parser.add_argument("--context", action="append", type=int, help=f"default: {CONTEXTS}")
    parser.add_argument("--kv-dtype", default="auto", help="of the cache (default: the model's)")
    parser.add_argument("--adapters", action="append", type=int, help="LoRA adapters of rank 16 (default: 0)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="JSON of the figures; what it has is not compiled")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write a picture there")
    options = parser.parse_args(argv)
    cells = [
        Cell(chip, weights, batch, context, options.kv_dtype, adapters)
        for adapters in options.adapters or (0,)
        for batch in options.batch or reversed(BATCHES)
        for context in options.context or CONTEXTS
        for weights in options.weights or WEIGHTS
        for chip in options.chip or CHIPS
    ]
    if reasons := ahead_of_time.missing_compilers(cell.chip for cell in cells):
        print(*reasons, install_hint("aot"), sep="\n", file=sys.stderr)
        return 2
    columns = f"{'moved':>9}{'ideal':>9}{'ratio':>8}{'temp':>9}{'step':>9}"
    print(f"{'chip':7}{'weights':11}{'batch':>5}{'tokens':>7}{'adapters':>9}{columns} bound; GB, MB, ms")
    found = run(cells, options.resume, _print)
    if options.picture:
        draw(found, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
