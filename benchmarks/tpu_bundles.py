"""Bundles of the TPU kernels in the compiler's final listing, next to the time of the block's copies.

    PYTHONPATH=.venv/compilers python -m benchmarks.tpu_bundles [--chip v6e ...] [--dtype int8 ...] [--json FILE]

A TPU issues one bundle of instructions a cycle, so the straight code that a kernel runs for each block of keys takes at
least as many cycles. While it runs, the next block is copied: where the bundles take longer than the copy, decoding is
bound by compute, and this shows before a chip is at hand. Cycles are an estimate from below: a listing has no waits.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jaxinfer.extras import install_hint
from pallas_kernels.tpu_parameters import CHECKS_VARIABLE

CHIPS = ("v5e", "v6e", "tpu7x")
DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4")
PROGRAMS = {"decode": (64, 1), "verify": (64, 8), "uniform": (64, 1)}  # sequences, new tokens of each
CONTEXT, PAGE_SIZE, MODEL = 8192, 64, "llama-3-8b"
GOAL = 1.2
# Cycles a second: the public bf16 rate over the operations of the matrix units in a cycle.
CLOCKS = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}
_LINE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(LH|LB|LE|PB|PF|CT)?\s*:\s((?:> ?)*)")


@dataclass(frozen=True)
class BlockCost:
    """A block of keys of one program on one chip: microseconds of its bundles and of its copies."""

    chip: str
    program: str
    dtype: str
    keys: int
    bundles: int
    all_bundles: int
    num_bytes: int
    compute_us: float
    copy_us: float

    @property
    def ratio(self) -> float:
        return self.compute_us / self.copy_us


@dataclass(frozen=True)
class ListingLine:
    """A bundle of a listing: its mark before a branch target or "", the loops around it, and its instructions."""

    mark: str
    depth: int
    text: str

    @property
    def is_empty(self) -> bool:
        """True for a bundle without instructions."""
        return self.text.lstrip().startswith("{}")

    def begins_loop(self, depth: int) -> bool:
        """True for the first bundle of a loop inside of `depth` - 1 others."""
        return self.mark == "LB" and self.depth == depth


def listing_lines(listing: str) -> Iterator[ListingLine]:
    """The bundles of a listing."""
    for line in listing.splitlines():
        if (found := _LINE.match(line)) is not None:
            yield ListingLine(found[1] or "", found[2].count(">"), line[found.end() :])


def straight_runs(listing: str) -> Iterator[int]:
    """Lengths, in bundles, of the parts of a listing without a branch target between them."""
    count, before = 0, None
    for line in listing_lines(listing):
        if line.mark or line.depth != before:
            yield count
            count = 0
        count, before = count + 1, line.depth
    yield count


def measure(chip: str, program: str, dtype: str) -> BlockCost:
    """Compiles one kernel in a process of its own, whose compiler writes its listings. Raises RuntimeError if it does
    not compile."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = os.environ | {"LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu", CHECKS_VARIABLE: "0"}
        command = [sys.executable, "-m", "benchmarks.tpu_bundles", "--compile", chip, program, dtype]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        files = sorted(Path(folder).glob("*paged_attention*final_bundles.txt"))
        listings = [file.read_text(encoding="utf-8") for file in files if "schedule-analysis" not in file.name]
        if ended.returncode or len(listings) != 1:
            raise RuntimeError(f"{chip} {program} {dtype}: {len(listings)} listings; {ended.stderr[-600:]}")
    facts = json.loads(ended.stdout.splitlines()[-1])
    (listing,) = listings
    runs = list(straight_runs(listing))
    bundles = max(runs)
    return BlockCost(
        chip,
        program,
        dtype,
        facts["keys"],
        bundles,
        sum(runs),
        facts["num_bytes"],
        1e6 * bundles / CLOCKS[chip] / facts["num_cores"],
        1e6 * facts["num_bytes"] / facts["bandwidth"],
    )


def _compile(chip: str, program: str, dtype: str) -> None:
    from jaxinfer.planning.chips import parse_place
    from pallas_kernels import ahead_of_time
    from pallas_kernels.paged_attention import paged_attention
    from pallas_kernels.paged_attention.shapes import decode_shape
    from pallas_kernels.paged_attention.tpu_schedule import program_sizes
    from pallas_kernels.tpu_parameters import num_cores

    batch, num_new = PROGRAMS[program]
    shape = decode_shape(MODEL, batch, CONTEXT, cache_dtype=dtype, page_size=PAGE_SIZE, num_new=num_new)
    arguments = shape.abstract("interleaved", 4096)
    spec = shape.spec("interleaved")
    options = dict(shape.options)
    if program == "uniform":  # any number of new tokens may come
        options |= {"is_uniform": True, "max_query_length": None}
        spec = replace(spec, is_uniform=True, max_query_length=batch)
    with ahead_of_time.as_if_on(chip):
        sizes, cores = program_sizes(spec, is_long=spec.has_long), num_cores()
    pages = arguments.pop("pages")

    def step(pages, arrays):
        return paged_attention(pages=pages, **arrays, **options, implementation="pallas_tpu")

    ahead_of_time.compile_for(chip, step, pages, arguments, donate_argnums=(0,))
    token_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in (pages.kv,)) // (4096 * PAGE_SIZE)
    device = parse_place(chip).chip
    bandwidth = device.hbm_bandwidth / device.devices_per_chip
    facts = {"keys": sizes.num_keys, "num_bytes": sizes.num_keys * token_bytes, "bandwidth": bandwidth}
    print(json.dumps(facts | {"num_cores": cores}))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.tpu_bundles", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chip", action="append", choices=CLOCKS, help=f"default: {', '.join(CHIPS)}")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="of the cache; default: all")
    parser.add_argument("--program", action="append", choices=PROGRAMS, help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.compile:
        _compile(*options.compile)
        return 0
    from pallas_kernels import ahead_of_time  # imports JAX, which the processes that compile do anyway

    if reasons := ahead_of_time.missing_compilers(options.chip or CHIPS):
        print(*reasons, install_hint("aot"), sep="\n", file=sys.stderr)
        return 2
    print(f"{'chip':7}{'program':9}{'cache':15}{'keys':>6}{'bundles':>9}{'compute':>9}{'copy':>8}{'ratio':>7}")
    found = []
    for chip in options.chip or CHIPS:
        for program in options.program or PROGRAMS:
            for dtype in options.dtype or DTYPES:
                one = measure(chip, program, dtype)
                found.append(one)
                head = f"{chip:7}{program:9}{dtype:15}{one.keys:6}{one.bundles:9}"
                end = f"{one.compute_us:9.2f}{one.copy_us:8.2f}{one.ratio:7.2f}"
                print(head + end + ("  compute-bound" if one.ratio > GOAL else ""), flush=True)
    if options.json:
        lines = [asdict(one) | {"ratio": round(one.ratio, 3)} for one in found]
        options.json.write_text(json.dumps({"clocks": CLOCKS, "lines": lines}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
