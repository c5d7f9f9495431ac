"""What deterministic=True costs on chips that are not here, by the real compilers and the roofline.

    PYTHONPATH=.venv/compilers python -m benchmarks.deterministic_cost [--chip v6e ...] [--weights int8 ...]
        [--resume FILE]

The model has the shape of Llama 3 8B, on one device, and an engine 64 slots of 1,536 tokens. Programs of 2 and of 4
layers are compiled; bytes of 32 follow. Time of a step: for each layer the products (bytes of weights at the memory's
bandwidth, or FLOPs at the chip's rate, on a TPU at the share of it that bundles reach, whichever takes longer), then
all other bytes that the program moves, then the pages of the sequences; and the same of the output layer and the
sampler. A deterministic engine decodes 1, 8 or 64 sequences with one program, of all slots; without, each number has a
program. Prefill is a step full of tokens of one prompt. A GPU's bytes are those beside what its cache serves
(`pallas_kernels.hbm_traffic.through_cache`); the last column is the ratio if it served nothing. Queries and results of
attention's kernel are not counted on a GPU.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.compiled_roofline import FEW, LLAMA_3_8B, MIN_POOL_BYTES, MORE
from jaxinfer.chips import Rates
from jaxinfer.engine.determinism import share_of_flops, stored_bits
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.engine.weight_work import weight_work
from jaxinfer.extras import install_hint
from jaxinfer.models import abstract_params
from jaxinfer.planning.chips import parse_place
from jaxinfer.planning.compiled import DECODE, PREFILL, is_attention, planned_programs
from jaxinfer.planning.counted import count
from jaxinfer.planning.plan import PlanRequest
from jaxinfer.quantization import quantize_params
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram, Move, through_cache

CHIPS, WEIGHTS = ("v6e", "h100", "v5e", "tpu7x"), ("bfloat16", "int8", "int4-g128")
BATCHES, SLOTS, CONTEXT = (1, 8, 64), 64, 1536
GPU_KERNELS = "mosaic_gpu|__cublas"
CHUNK = 512  # of prefill without
# Most of the time without.
BOUNDS = {"v6e": 1.05, "h100": 1.05, "v5e": 1.10, "tpu7x": 1.10}
INT8_BOUND, PREFILL_BOUND = 1.3, 1.2


@dataclass(frozen=True)
class Figures:
    """Bytes that a program moves beside attention in each layer and elsewhere, and its rows. The first two are without
    a cache between the chip and its memory, `cached_*` with it; None on chips without."""

    layer_bytes: float
    other_bytes: float
    num_rows: int
    num_head_rows: int
    cached_layer_bytes: float | None = None
    cached_other_bytes: float | None = None

    @property
    def through_cache(self) -> "Figures":
        """These figures, with the bytes that the cache leaves."""
        if self.cached_layer_bytes is None or self.cached_other_bytes is None:
            return self
        return replace(self, layer_bytes=self.cached_layer_bytes, other_bytes=self.cached_other_bytes)


def engine(chip: str, weights: str, slots: int, deterministic: Any) -> EngineSpec:
    """The engine, as shapes."""
    params = abstract_params(LLAMA_3_8B, jnp.bfloat16)
    if weights != "bfloat16":
        params = jax.eval_shape(partial(quantize_params, how=weights), params)
    options = EngineOptions(max_seqs=slots, max_model_len=CONTEXT, deterministic=deterministic)
    place = parse_place(chip)
    replicas = f"data={place.num_devices}" if place.num_devices > 1 else None
    spec = PlanRequest("8b", LLAMA_3_8B, params, place, options, mesh=replicas).spec(compiles=True)
    return spec.with_pages(max(1 + slots * spec.pages_per_sequence, MIN_POOL_BYTES // spec.page_bytes))


def compiled(spec: EngineSpec, chip: str, program: str) -> Figures:
    """Compiles a program with few and with more layers."""
    l2_bytes = parse_place(chip).chip.l2_bytes or 0
    found = []
    for layers in (FEW, MORE):
        planned = planned_programs(spec.with_layers(range(layers)))[program]
        one = ahead_of_time.compile_for(chip, planned.function, *planned.arguments, chip_mesh=spec.mesh)
        moves = HloProgram(one.program.as_text()).moves(gpu_kernels=GPU_KERNELS)
        found.append([_beside_attention(moves), _beside_attention(through_cache(moves, l2_bytes))])
    layer = [(more - few) / (MORE - FEW) for few, more in zip(*found, strict=True)]
    other = [few - FEW * one for few, one in zip(found[0], layer, strict=True)]
    cached = (layer[1], other[1]) if l2_bytes else (None, None)
    return Figures(layer[0], other[0], rows_of(spec, program), spec.step_slots[-1], *cached)


def _beside_attention(moves: list[Move]) -> float:
    return sum(move.num_bytes for move in moves if not is_attention(move.instruction))


def rows_of(spec: EngineSpec, program: str) -> int:
    """Rows of a pass."""
    is_small = program == DECODE and not spec.is_deterministic
    return spec.decode_slots[-1] if is_small else spec.token_buckets[-1]


def seconds(spec: EngineSpec, figures: Figures, page_bytes: float, attention_flops: float = 0.0) -> float:
    """Time of a step by the roofline."""
    rates, layers = Rates.of(parse_place(spec.chip or "").chip), spec.config.num_layers
    work = weight_work(spec.config, spec.params)
    kind, head_flops, head_bytes = work.head
    flops = {name: total * figures.num_rows for name, total in work.token_flops.items()}
    flops[kind] -= head_flops * figures.num_rows
    weights = work.dense_bytes - head_bytes
    share = share_of_flops(spec.chip, spec.platform, stored_bits(work), figures.num_rows)
    products = max(weights / rates.hbm, rates.compute_seconds(flops) / share)
    beside = max(layers * figures.layer_bytes - weights, 0.0) / rates.hbm
    attention = max(page_bytes / rates.hbm, attention_flops / rates.flops["bf16"])
    head = max(head_bytes / rates.hbm, rates.compute_seconds({kind: head_flops * figures.num_head_rows}))
    return products + beside + attention + head + max(figures.other_bytes - head_bytes, 0.0) / rates.hbm


def programs(chip: str, weights: str) -> dict[str, tuple[EngineSpec, str]]:
    """What is compiled, by name: the most telling first."""
    fast = {f"decode {batch}": (engine(chip, weights, batch, False), DECODE) for batch in BATCHES}
    uniform = engine(chip, weights, SLOTS, True)
    fast["prefill"] = (fast[f"decode {SLOTS}"][0], PREFILL)
    return {"uniform decode": (uniform, DECODE), "uniform prefill": (uniform, PREFILL), **fast}


def ideal(spec: EngineSpec, program: str) -> Figures:
    """Of a program that moves nothing but weights."""
    work = weight_work(spec.config, spec.params)
    other = work.head[2]
    return Figures((work.dense_bytes - other) / spec.config.num_layers, other, rows_of(spec, program), SLOTS)


def report(chip: str, weights: str, found: dict[str, Figures]) -> list[dict[str, Any]]:
    """Milliseconds with and without, their ratio, and that without a cache. What was not compiled without is ideal,
    which makes the ratio larger."""
    planned, lines = programs(chip, weights), []

    def add(what: str, name: str, uniform: str, bound: float | None, one: Callable[[EngineSpec, Figures], float]):
        both = [(planned[key][0], found[key] if key in found else ideal(*planned[key])) for key in (name, uniform)]
        times = [one(spec, figures.through_cache) for spec, figures in both]
        plain = [one(spec, figures) for spec, figures in both]
        is_ideal = name not in found
        lines.append(
            {"what": what, "times": times, "uncached": plain[1] / plain[0], "bound": bound, "is_ideal": is_ideal}
        )

    bound = BOUNDS[chip] if weights == "bfloat16" else INT8_BOUND if weights == "int8" else None
    for batch in BATCHES if "uniform decode" in found else ():
        add(f"decode, batch {batch}", f"decode {batch}", "uniform decode", bound, partial(decode_seconds, batch))
    if "uniform prefill" in found:
        add("prefill, a token", "prefill", "uniform prefill", PREFILL_BOUND, prefill_seconds)
    rows = planned["uniform decode"][0].determinism.num_rows
    return [{"chip": chip, "weights": weights, "rows": rows, **line} for line in lines]


def decode_seconds(batch: int, spec: EngineSpec, figures: Figures) -> float:
    """Time of a step of `batch` sequences."""
    counted = count(spec, spec.config, spec.placed_params, spec.cache)
    return seconds(spec, figures, batch * counted.read_cache_bytes(CONTEXT))


def prefill_seconds(spec: EngineSpec, figures: Figures) -> float:
    """Time of a prompt's token, in a step of all rows but at most `CHUNK`."""
    tokens = min(figures.num_rows, CHUNK) if not spec.is_deterministic else figures.num_rows
    counted = count(spec, spec.config, spec.placed_params, spec.cache)
    read, middle = counted.read_cache_bytes(CONTEXT // 2), (CONTEXT - tokens) // 2  # of a prompt
    return seconds(spec, figures, read, counted.span_flops(middle, tokens)) / tokens


def read(line: dict[str, dict[str, Any]]) -> dict[str, Figures]:
    """The figures of the programs that were compiled."""
    return {name: Figures(**values) for name, values in line.items() if "error" not in values}


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The ratios as docs/engine.md has them: with * where nothing was compiled without, in parentheses those without a
    cache where they differ."""
    lines = ["| chip | weights | rows | batch 1 | batch 8 | batch 64 | prefill |", "| --- | --- |" + " ---: |" * 5]
    for chip in CHIPS:
        for weights in WEIGHTS:
            ratios = {}
            for one in report(chip, weights, read(found.get(f"{chip} {weights}", {}))):
                text = f"{one['times'][1] / one['times'][0]:.3f}" + "*" * one["is_ideal"]
                differs = abs(one["uncached"] - one["times"][1] / one["times"][0]) >= 0.0005
                ratios[one["what"]] = f"{text} ({one['uncached']:.3f})" if differs else text
                rows = one["rows"]
            if ratios:
                names = (*(f"decode, batch {batch}" for batch in BATCHES), "prefill, a token")
                cells = (chip, weights, str(rows), *(ratios.get(name, "") for name in names))
                lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.deterministic_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chip", action="append", choices=CHIPS, help="default: all")
    parser.add_argument("--weights", action="append", choices=WEIGHTS, help="default: all")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="JSON of the figures, such as benchmarks/results/deterministic_cost.json; what it has is not compiled",
    )
    names = ["uniform decode", "uniform prefill", *(f"decode {batch}" for batch in BATCHES), "prefill"]
    parser.add_argument("--program", action="append", choices=names, help="compile these only; default: all")
    parser.add_argument("--only-report", action="store_true", help="compile nothing")
    parser.add_argument("--table", action="store_true", help="print the table of docs/engine.md, and compile nothing")
    options = parser.parse_args(argv)
    file, found = options.resume, {}
    if file is not None and file.exists():
        found = json.loads(file.read_text(encoding="utf-8"))
    if LLAMA_3_8B.num_layers <= MORE:
        raise ValueError("a model of more layers is extrapolated to")
    if options.table:
        print(table(found), end="")
        return 0
    if not options.only_report and (reasons := ahead_of_time.missing_compilers(options.chip or CHIPS)):
        print(*reasons, install_hint("aot"), sep="\n", file=sys.stderr)
        return 2
    print(f"{'chip':7}{'weights':11}{'rows':>5}  {'':18}{'without':>9}{'with':>9}{'ratio':>8}; ms  no cache")
    for weights in options.weights or WEIGHTS:
        for chip in options.chip or CHIPS:
            own = found.setdefault(f"{chip} {weights}", {})
            for name, (spec, program) in ({} if options.only_report else programs(chip, weights)).items():
                if name in own or name not in (options.program or [name]):
                    continue
                try:
                    figures = asdict(compiled(spec, chip, program))
                    own[name] = {key: value for key, value in figures.items() if value is not None}
                except Exception as error:  # the compiler's message is the result
                    own[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
                if file is not None:
                    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            for name, line in own.items():
                if "error" in line:
                    print(f"{chip:7}{weights:11}{name}: {line['error'][:120]}")
            for line in report(chip, weights, read(own)):
                without, uniform = (1e3 * one for one in line["times"])
                ratio = uniform / without
                verdict = "" if line["bound"] is None else "ok" if ratio <= line["bound"] else f"over {line['bound']}"
                head = f"{chip:7}{weights:11}{line['rows']:5}  {line['what']:18}"
                note = " (without: ideal)" if line["is_ideal"] else ""
                numbers = f"{without:9.3f}{uniform:9.3f}{ratio:8.3f}"
                print(f"{head}{numbers}  {verdict:10}{line['uncached']:7.3f}{note}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
