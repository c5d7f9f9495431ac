"""Compiles every kernel ahead of time for chips that are not attached, and prints memory, FLOPs and bytes.

    python -m benchmarks.kernels [--chip v6e ...] [--only decode ...] [--quick] [--json FILE]

Bytes are those of the kernel's cost estimate with full page tables, next to the ideal: queries, output, and the keys
and values in use once. The GPU compiler reports neither bytes nor FLOPs; FLOPs are then those of unmasked attention.
On-chip memory is VMEM on a TPU and shared memory on a GPU.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import ahead_of_time
from pallas_kernels.choice import KernelChoice
from pallas_kernels.flash_attention import explain as explain_flash
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.measure import ideal_bytes
from pallas_kernels.paged_attention import choose, paged_attention, pallas_gpu
from pallas_kernels.paged_attention.shapes import MODELS, PagedShape, decode_shape

CHIPS = ("v5e", "v6e", "tpu7x", "h100")
CACHE_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
# Pages of one layer's pool: enough for the new tokens of the largest step, less than any chip's memory.
NUM_PAGES = 4096
PROGRAMS = {
    "decode": partial(decode_shape, batch=256, context=32768, page_size=128),
    "verify": partial(decode_shape, batch=64, context=8192, num_new=8),
    "prefill": partial(decode_shape, batch=1, context=8192, num_new=512),
    "mixed": partial(decode_shape, batch=32, context=8192, num_new=64),
}


@dataclass(frozen=True)
class ReportLine:
    """One compiled kernel; `reason` says why there is none, or why XLA runs instead."""

    chip: str
    kernel: str
    model: str
    cache: str
    implementation: str
    seconds: float | None = None
    on_chip_bytes: int | None = None
    temporary_bytes: int | None = None
    aliased_bytes: int | None = None
    gflops: float | None = None
    bytes_moved: float | None = None
    ideal_bytes: int | None = None
    reason: str = ""


def lines(chips: list[str], only: list[str] | None, is_quick: bool) -> Iterator[ReportLine]:
    """Compiles one case after the other and yields each result."""
    models = ["llama-3-8b"] if is_quick else list(MODELS)
    for chip in chips:
        for model in models:
            if only is None or "flash" in only:
                yield _flash(chip, model)
            for program, make in PROGRAMS.items():
                if only is None or program in only:
                    for dtype in CACHE_DTYPES:
                        yield _paged(chip, model, program, make(model, cache_dtype=dtype), dtype)


def _paged(chip: str, model: str, program: str, shape: PagedShape, dtype: str) -> ReportLine:
    line = ReportLine(
        chip, program, model, dtype, "none", ideal_bytes=ideal_bytes(shape), gflops=full_flops(shape) / 1e9
    )
    if (missing := ahead_of_time.missing_compiler(chip)) is not None:
        return replace(line, reason=missing)
    page_layout = "separate" if chip.startswith("h") else "interleaved"
    arguments, spec = shape.abstract(page_layout, NUM_PAGES), shape.spec(page_layout)
    with ahead_of_time.as_if_on(chip):
        choice = choose(spec)
    line = replace(line, implementation=choice.implementation, reason=_why_not_a_kernel(chip, choice))
    if choice.implementation == "pallas_gpu":
        line = replace(line, on_chip_bytes=pallas_gpu.shared_bytes(spec))
    pages = arguments.pop("pages")

    def step(pages, arrays):
        return paged_attention(pages=pages, **arrays, **shape.options)

    return _compile(line, step, pages, arguments, donate_argnums=(0,))


def full_flops(shape: PagedShape) -> float:
    """FLOPs of both products if every query sees every key of its sequence."""
    return 4.0 * shape.heads[0] * shape.head_dim * sum(new * keys for new, keys in shape.lengths)


def _flash(chip: str, model: str, length: int = 8192) -> ReportLine:
    num_q, num_kv, head_dim = MODELS[model]
    q, kv = (jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.bfloat16) for heads in (num_q, num_kv))
    line = ReportLine(chip, "flash", model, "bfloat16", "none", ideal_bytes=2 * (2 * q.size + 2 * kv.size))
    line = replace(line, gflops=4 * num_q * head_dim * length**2 / 1e9)
    if (missing := ahead_of_time.missing_compiler(chip)) is not None:
        return replace(line, reason=missing)
    with ahead_of_time.as_if_on(chip):
        choice = explain_flash(q, kv, kv)
    line = replace(line, implementation=choice.implementation, reason=_why_not_a_kernel(chip, choice))
    if choice.implementation == "cudnn":
        # cuDNN is not part of the compiler: our own kernel is compiled.
        line = replace(line, implementation="pallas_gpu", reason="cuDNN comes first where it is installed")

    def attend(q, kv):
        return flash_attention(q, kv, kv, implementation=line.implementation)

    return _compile(line, attend, q, kv)


def _why_not_a_kernel(chip: str, choice: KernelChoice) -> str:
    """The reason why XLA runs instead of the chip's own kernel; empty if it does not."""
    kernel = "pallas_gpu" if chip.startswith("h") else "pallas_tpu"
    return choice.reasons[kernel] if choice.implementation == "xla" else ""


def _compile(line: ReportLine, function, *arguments, donate_argnums: tuple[int, ...] = ()) -> ReportLine:
    try:
        compiled = ahead_of_time.compile_for(line.chip, function, *arguments, donate_argnums=donate_argnums)
    except Exception as error:  # the compiler's message is part of the report
        return replace(line, reason=f"DOES NOT COMPILE: {str(error).splitlines()[0]}")
    return replace(
        line,
        seconds=round(compiled.seconds, 2),
        on_chip_bytes=line.on_chip_bytes or vmem_bytes(compiled.program),
        temporary_bytes=compiled.temporary_bytes,
        aliased_bytes=compiled.aliased_bytes,
        gflops=compiled.cost["flops"] / 1e9 if "flops" in compiled.cost else line.gflops,
        bytes_moved=compiled.cost.get("bytes accessed"),
    )


def vmem_bytes(program: Any) -> int | None:
    """Largest VMEM of one kernel in a compiled TPU program, in bytes; None if the program does not contain it."""
    pattern = r'used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
    return max(map(int, re.findall(pattern, program.as_text())), default=None)


def _row(line: ReportLine) -> str:
    def number(value: float | None, unit: float = 1, digits: int = 0) -> str:
        return "-" if value is None else f"{value / unit:,.{digits}f}"

    ratio = line.bytes_moved / line.ideal_bytes if line.bytes_moved and line.ideal_bytes else None
    cells = [
        f"{line.chip:6}{line.kernel:9}{line.model:12}{line.cache:15}{line.implementation:12}",
        f"{number(line.seconds, digits=1):>6}",
        f"{number(line.on_chip_bytes, 1024):>8}",
        f"{number(line.temporary_bytes, 2**20, 1):>8}",
        f"{number(line.gflops):>8}",
        f"{number(line.bytes_moved, 1e6, 1):>10}",
        f"{number(line.ideal_bytes, 1e6, 1):>10}",
        f"{number(ratio, digits=2):>6}",
    ]
    return "".join(cells) + (f"  {line.reason[:100]}" if line.reason else "")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chip", action="append", choices=ahead_of_time.CHIPS, help=f"default: {', '.join(CHIPS)}")
    parser.add_argument("--only", action="append", choices=["flash", *PROGRAMS], help="one program (may be repeated)")
    parser.add_argument("--quick", action="store_true", help="one model instead of all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(argv)
    print(f"JAX {jax.__version__}; times in s, memory in KiB (on chip) and MiB (temporary), bytes in MB")
    head = f"{'chip':6}{'kernel':9}{'model':12}{'cache':15}{'by':12}{'time':>6}{'on chip':>8}{'temp':>8}"
    print(head + f"{'GFLOP':>8}{'bytes':>10}{'ideal':>10}{'ratio':>6}")
    found = []
    for line in lines(options.chip or list(CHIPS), options.only, options.quick):
        found.append(line)
        print(_row(line), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        facts = {"jax": jax.__version__, "lines": [asdict(line) for line in found]}
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return int(any(line.reason.startswith("DOES NOT COMPILE") for line in found))


if __name__ == "__main__":
    sys.exit(main())
