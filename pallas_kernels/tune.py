"""Finds the block sizes of a chip: `python -m pallas_kernels.tune`.

Every program of every implementation that runs on the device at hand is timed at the shapes of well-known models, over
its candidate sizes; the fastest go into the chip's table (see `pallas_kernels.tuning`). A size is taken only when it
beats the heuristic by more than 2 %, so that noise writes nothing. Interrupt it at any time: the table is saved after
each shape, and what it has is not measured again.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import jax
from tqdm import tqdm

from pallas_kernels import measure, tuning
from pallas_kernels.paged_attention import make_spec, pallas_gpu, pallas_tpu, xla
from pallas_kernels.paged_attention.shapes import MODELS, Shape, decode_shape
from pallas_kernels.platform import current_platform

_MODULES = {"xla": xla, "pallas_tpu": pallas_tpu, "pallas_gpu": pallas_gpu}
_MIN_GAIN = 1.02
_VECTORS = ("query_lengths", "kv_lengths", "query_starts")


def shapes(platform: str, models: list[str], is_quick: bool) -> dict[str, Shape]:
    """Decode, verify and prefill of each model in each cache dtype that pays on the platform."""
    is_cpu = platform == "cpu"
    batch, context = (4, 512) if is_quick else (16, 2048) if is_cpu else (64, 8192)
    found = {}
    for model in models:
        for dtype in ("float32", "int8") if is_cpu else ("bfloat16", "float8_e4m3fn", "int8"):
            for page_size in (16,) if is_cpu else (64, 128) if platform == "tpu" else (16, 64):
                options = {"cache_dtype": dtype, "page_size": page_size, "dtype": "float32" if is_cpu else "bfloat16"}
                name = f"{model} {dtype} page {page_size}"
                found[f"{name} decode"] = decode_shape(model, batch, context, **options)
                found[f"{name} prefill"] = decode_shape(model, 1, context, num_new=min(512, context), **options)
    return found


def tune(shape: Shape, implementation: str, report=lambda text: None) -> dict[str, dict[str, int] | None]:
    """The best sizes of each program of one call, None where the heuristic is as good; ArithmeticError on NaN."""
    module, platform = _MODULES[implementation], current_platform()
    abstract = shape.abstract(module.LAYOUT)
    spec = make_spec(**{name: value for name, value in abstract.items() if name not in _VECTORS}, **shape.options)
    layers = measure.num_layers(shape, platform)

    def seconds(name: str, sizes: dict[str, int]) -> float:
        with tuning.force(name, **sizes):
            loop, arguments = measure.paged_loop(shape, implementation, layers)
            return measure.seconds_per_step(loop, arguments, 2 if platform == "cpu" else 20, repeats=3) / layers

    best: dict[str, dict[str, int] | None] = {}
    for name, tried in module.candidates(spec).items():
        heuristic = asdict(module.blocks(spec)[name])
        baseline = seconds(name, heuristic)
        timed = {}
        for blocks in tried:
            sizes = asdict(blocks)
            if sizes == heuristic:
                continue
            try:
                timed[json.dumps(sizes)] = seconds(name, sizes)
            except Exception as error:  # a size the compiler refuses is not a candidate
                report(f"{name} {sizes}: {str(error).splitlines()[0][:120]}")
        winner = min(timed, key=timed.__getitem__, default=None)
        is_better = winner is not None and baseline / timed[winner] > _MIN_GAIN
        best[name] = json.loads(winner) if is_better and winner is not None else None
        gain = baseline / timed[winner] if winner is not None else 1.0
        report(f"{name} {spec.facts}: {baseline * 1e6:.0f} us, best {gain:.2f}x with {winner}")
    return best


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pallas_kernels.tune",
        description=(__doc__ or "").splitlines()[0],
        epilog="The table is found by later runs if it lies in the package (the default) or in $PALLAS_KERNELS_TABLES.",
    )
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="shapes of this model (default: all)")
    parser.add_argument(
        "--implementation", action="append", choices=sorted(_MODULES), help="default: all that run here"
    )
    parser.add_argument("--quick", action="store_true", help="small batches and contexts")
    parser.add_argument("--again", action="store_true", help="measure also what the table has")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: the package's table of this chip")
    options = parser.parse_args(argv)
    platform = current_platform()
    path = options.output or tuning.FOLDER / f"{tuning.chip()}.json"
    names = options.implementation or [{"tpu": "pallas_tpu", "gpu": "pallas_gpu"}.get(platform, "xla")]
    found = tuning.read(path) if path.exists() else {"sizes": {}, "measured": []}
    found |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    todo = [
        (implementation, name, shape)
        for implementation in names
        for name, shape in shapes(platform, options.model or sorted(MODELS), options.quick).items()
        if options.again or f"{implementation} {name}" not in found["measured"]
    ]
    progress = tqdm(todo, unit="shape", disable=None)
    for implementation, name, shape in progress:
        progress.set_description(f"{implementation} {name}")
        arrays = {k: v for k, v in shape.abstract(_MODULES[implementation].LAYOUT).items() if k not in _VECTORS}
        spec = make_spec(**arrays, **shape.options)
        reason = _MODULES[implementation].unsupported(spec, platform)
        if reason is not None:
            tqdm.write(f"{implementation} {name}: {reason}")
            continue
        for program, sizes in tune(shape, implementation, tqdm.write).items():
            of_program = found["sizes"].setdefault(program, {})
            of_program.pop(spec.facts, None)
            if sizes is not None:
                of_program[spec.facts] = sizes
        found["measured"] = sorted({*found["measured"], f"{implementation} {name}"})
        _save(path, found)
    print(
        f"{path}: {sum(map(len, found['sizes'].values()))} sizes that beat the heuristic, {len(todo)} shapes measured"
    )
    return 0


def _save(path: Path, found: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
