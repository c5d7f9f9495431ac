"""Finds the block sizes of a chip: `python -m pallas_kernels.tune`.

Times every program of every implementation that runs on the attached device, for the shapes of well-known models and
all candidate sizes, and writes the fastest sizes to the chip's table (see `pallas_kernels.tuning`). Sizes must beat the
heuristic by more than 2 %, so that noise is not recorded. A run may be interrupted at any time: the table is saved
after each shape, and shapes in it are not measured again.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from pallas_kernels import measure, tuning
from pallas_kernels.flash_attention import pallas_gpu as flash_gpu
from pallas_kernels.flash_attention import pallas_tpu as flash_tpu
from pallas_kernels.flash_attention import specs as flash_specs
from pallas_kernels.paged_attention import pallas_gpu, pallas_tpu, xla
from pallas_kernels.paged_attention.shapes import MODELS, PagedShape, decode_shape
from pallas_kernels.platform import current_platform

_PAGED = {"xla": xla, "pallas_tpu": pallas_tpu, "pallas_gpu": pallas_gpu}
_FLASH = {"pallas_tpu": flash_tpu, "pallas_gpu": flash_gpu}
_MIN_GAIN = 1.02


@dataclass(frozen=True)
class TuningCall:
    """One call to tune. `module` has `unsupported`, `tunable` and `candidates`; `loop` makes the function that is
    timed, once for each candidate; each of its steps has `per_step` calls."""

    name: str
    module: Any
    spec: Any
    loop: Callable[[], tuple[Callable, Any]]
    per_step: int = 1


def calls(implementation: str, platform: str, models: list[str], is_quick: bool) -> Iterator[TuningCall]:
    """Decode and prefill of each model for each useful cache dtype of the platform, and a prompt without pages."""
    is_cpu = platform == "cpu"
    batch, context = (4, 512) if is_quick else (16, 2048) if is_cpu else (64, 8192)
    q_dtype = "float32" if is_cpu else "bfloat16"
    for model in models:
        for dtype in ("float32", "int8") if is_cpu else ("bfloat16", "float8_e4m3fn", "int8"):
            for page_size in (16,) if is_cpu else (64, 128) if platform == "tpu" else (16, 64):
                options = {"cache_dtype": dtype, "page_size": page_size, "dtype": q_dtype}
                name = f"{implementation} {model} {dtype} page {page_size}"
                shape = decode_shape(model, batch, context, **options)
                yield paged_call(f"{name} decode", shape, implementation)
                shape = decode_shape(model, 1, context, num_new=min(512, context), **options)
                yield paged_call(f"{name} prefill", shape, implementation)
        if implementation in _FLASH:
            yield _flash_call(f"{implementation} {model} flash", implementation, MODELS[model], context, q_dtype)


def paged_call(name: str, shape: PagedShape, implementation: str, layers: int | None = None) -> TuningCall:
    """A call for one layer, over the caches of `layers` layers; without, of as many as exceed the chip's cache."""
    module = _PAGED[implementation]
    layers = layers or measure.num_layers(shape, current_platform())
    return TuningCall(
        name,
        module,
        shape.spec(module.LAYOUT),
        lambda: measure.paged_loop(shape, implementation, layers),
        layers,
    )


def _flash_call(name: str, implementation: str, heads: tuple[int, int, int], length: int, dtype: str) -> TuningCall:
    num_q, num_kv, head_dim = heads
    q, kv = (jax.ShapeDtypeStruct((1, length, n, head_dim), jnp.dtype(dtype)) for n in (num_q, num_kv))
    operands: Any = (q, kv, kv, None, None, None, None, None)
    spec = flash_specs.make_spec(flash_specs.FlashOperands(*operands))
    return TuningCall(
        name,
        _FLASH[implementation],
        spec,
        lambda: measure.flash_loop(length, heads, dtype, implementation),
        measure.flash_calls(current_platform()),
    )


def tune(call: TuningCall, report: Callable[[str], None]) -> dict[str, dict[str, int] | None]:
    """The best sizes of each program of one call, None if the heuristic is as good; ArithmeticError on NaN."""

    def seconds(name: str, sizes: dict[str, int]) -> float:
        with tuning.force(name, **sizes):
            loop, arguments = call.loop()
            steps = 2 if current_platform() == "cpu" else 20
            return measure.seconds_per_step(loop, arguments, steps, repeats=3) / call.per_step

    best: dict[str, dict[str, int] | None] = {}
    for name, tried in call.module.candidates(call.spec).items():
        heuristic = asdict(call.module.tunable(call.spec)[name])
        baseline = seconds(name, heuristic)
        timed = {}
        for blocks in tried:
            sizes = asdict(blocks)
            if sizes == heuristic:
                continue
            try:
                timed[json.dumps(sizes)] = seconds(name, sizes)
            except Exception as error:  # sizes that the compiler rejects are not candidates
                report(f"{name} {sizes}: {str(error).splitlines()[0][:120]}")
        winner = min(timed, key=timed.__getitem__, default="")
        gain = baseline / timed[winner] if winner else 1.0
        best[name] = json.loads(winner) if gain > _MIN_GAIN else None
        report(f"{name} {call.spec.facts}: {baseline * 1e6:.0f} us, best {gain:.2f}x with {winner or 'nothing else'}")
    return best


def tune_into(path: Path, call: TuningCall, report: Callable[[str], None]) -> dict[str, dict[str, int] | None]:
    """Tunes a call and writes its block sizes to the table at `path`; returns and raises as `tune`."""
    best = tune(call, report)
    table = read_table(path) | {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for program, sizes in best.items():
        of_program = table["sizes"].setdefault(program, {})
        of_program.pop(call.spec.facts, None)
        if sizes is not None:
            of_program[call.spec.facts] = sizes
    table["measured"] = sorted({*table["measured"], call.name})
    _save(path, table)
    return best


def read_table(path: Path) -> dict[str, Any]:
    """The table at `path`; an empty one where there is none."""
    return tuning.read(path) if path.exists() else {"sizes": {}, "measured": []}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pallas_kernels.tune",
        description=(__doc__ or "").splitlines()[0],
        epilog="Later runs read the table if it lies in the package (the default) or in $PALLAS_KERNELS_TABLES.",
    )
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="shapes of this model (default: all)")
    parser.add_argument("--implementation", action="append", choices=sorted(_PAGED), help="default: all that run here")
    parser.add_argument("--quick", action="store_true", help="small batches and contexts")
    parser.add_argument("--again", action="store_true", help="measure also what the table has")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: the package's table of this chip")
    options = parser.parse_args(argv)
    platform = current_platform()
    path = options.output or tuning.FOLDER / f"{tuning.chip()}.json"
    names = options.implementation or [{"tpu": "pallas_tpu", "gpu": "pallas_gpu"}.get(platform, "xla")]
    measured = read_table(path)["measured"]
    todo = [
        call
        for implementation in names
        for call in calls(implementation, platform, options.model or sorted(MODELS), options.quick)
        if options.again or call.name not in measured
    ]
    progress = tqdm(todo, unit="call", disable=None)
    for call in progress:
        progress.set_description(call.name)
        reason = call.module.unsupported(call.spec, platform)
        if reason is not None:
            tqdm.write(f"{call.name}: {reason}")
            continue
        tune_into(path, call, tqdm.write)
    table = read_table(path)
    print(f"{path}: {sum(map(len, table['sizes'].values()))} sizes that beat the heuristic, {len(todo)} calls measured")
    return 0


def _save(path: Path, table: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
