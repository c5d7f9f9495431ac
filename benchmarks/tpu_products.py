"""Bundles of the products of a pass with many rows, next to the time in which their weights arrive.

    PYTHONPATH=.venv/compilers python -m benchmarks.tpu_products [--chip v6e ...] [--weights int8 ...] [--rows N ...]
        [--json FILE]

A pass reads all weights whatever its rows are. XLA multiplies a block of the weight while the next one is copied: rows
are free as long as the bundles of all blocks take no longer than the copy of the weight. The products are the largest
of Llama 3 8B. Every bundle of the compiler's final listing counts as often as its loops run; there are no waits in a
listing, so a product takes at least its FLOPs at the chip's rate too. `jaxinfer.engine.determinism` takes the shares of
FLOP/s from `benchmarks/results/tpu_products.json`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.tpu_bundles import CLOCKS, ListingLine, listing_lines
from jaxinfer.extras import install_hint
from jaxinfer.planning.chips import parse_place

CHIPS, WEIGHTS = ("v5e", "v6e", "tpu7x"), ("bfloat16", "int8", "int4-g128")
PRODUCTS = {"gate": (4096, 14336), "down": (14336, 4096)}
ROWS = {"bfloat16": {"v5e": (192, 224), "v6e": (480, 512, 544), "tpu7x": (256, 288)}, "*": {"*": (64, 128)}}
_EXIT = re.compile(r"scmp\.[\w.]+ \S+, (\d+)\s+/\* loop exit test \*/")
# A pipelined loop copies in its first passes and writes in its last: it has as many more as there are later stages.
_STAGE = re.compile(r"iteration index, stage = (\d+)")


@dataclass(frozen=True)
class ProductCost:
    """A product of one number of rows on one chip: microseconds of its bundles and of the copy of its weight."""

    chip: str
    weights: str
    product: str
    rows: int
    bundles: int
    num_bytes: int
    compute_us: float
    copy_us: float
    flops_us: float

    @property
    def ratio(self) -> float:
        return max(self.compute_us, self.flops_us) / self.copy_us

    @property
    def share_of_flops(self) -> float:
        """The share that the bundles would reach of the chip's public rate; above 1 the matrix units are waited for."""
        return self.flops_us / self.compute_us


def all_bundles(listing: str) -> int:
    """Bundles that a listing runs, each as often as the loops around it. Raises ValueError for a loop whose number of
    passes the listing does not say."""
    lines: list[ListingLine] = []
    for line in listing_lines(listing):  # the listing has no depth of a bundle without instructions
        lines.append(replace(line, depth=lines[-1].depth) if line.is_empty and lines else line)

    def count(start: int, end: int, depth: int) -> int:
        total, at = 0, start
        while at < end:
            if lines[at].depth <= depth:
                total, at = total + 1, at + 1
                continue
            last = at + 1
            while last < end and lines[last].depth > depth and not lines[last].begins_loop(depth + 1):
                last += 1
            total, at = total + _passes(lines[at:last], depth + 1) * count(at, last, depth + 1), last
        return total

    return count(0, len(lines), 0)


def _passes(body: list[ListingLine], depth: int) -> int:
    """Passes of a loop over blocks."""
    own = [line.text for line in body if line.depth == depth]
    ends = [int(found) for text in own for found in _EXIT.findall(text)]
    if len(ends) != 1:
        raise ValueError(f"{len(ends)} tests end a loop of {len(body)} bundles at depth {depth}")
    return ends[0] - max((int(found) for text in own for found in _STAGE.findall(text)), default=0)


def measure(chip: str, weights: str, product: str, rows: tuple[int, ...]) -> list[ProductCost]:
    """Compiles a product of several numbers of rows in a process whose compiler writes its listings. Raises
    RuntimeError if one does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = os.environ | {"LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "benchmarks.tpu_products", "--compile", folder, chip, weights, product]
        ended = subprocess.run(
            [*command, *map(str, rows)], env=environment, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise RuntimeError(f"{chip} {weights} {product}: {ended.stderr[-600:]}")
    device = parse_place(chip).chip
    inputs, outputs = PRODUCTS[product]
    found = []
    for line in ended.stdout.splitlines():
        if not line.startswith("{"):
            continue
        facts = json.loads(line)
        copy = facts["num_bytes"] * device.devices_per_chip / device.hbm_bandwidth
        flops = 2 * facts["rows"] * inputs * outputs * device.devices_per_chip / (device.flops["bf16"] or 0.0)
        times = [round(1e6 * seconds, 3) for seconds in (facts["bundles"] / CLOCKS[chip], copy, flops)]
        found.append(ProductCost(chip, weights, product, facts["rows"], facts["bundles"], facts["num_bytes"], *times))
    return found


def _compile(folder: str, chip: str, weights: str, product: str, *rows: str) -> None:
    import jax
    import jax.numpy as jnp

    from jaxinfer.quantization import quantize
    from jaxinfer.quantization.matmul import matmul
    from pallas_kernels import ahead_of_time

    weight = jax.ShapeDtypeStruct(PRODUCTS[product], jnp.bfloat16)
    if weights != "bfloat16":
        weight = jax.eval_shape(lambda array: quantize(array, weights), weight)
    num_bytes = sum(leaf.size * jax.dtypes.itemsize_bits(leaf.dtype) // 8 for leaf in jax.tree.leaves(weight))
    seen: set[str] = set()
    for num_rows in map(int, rows):
        x = jax.ShapeDtypeStruct((num_rows, PRODUCTS[product][0]), jnp.bfloat16)
        ahead_of_time.compile_for(chip, matmul, x, weight)
        files = {file.name: file for file in Path(folder).glob("*final_bundles.txt")}
        own = [file for name, file in files.items() if name not in seen and "schedule-analysis" not in name]
        seen |= set(files)
        texts = [file.read_text(encoding="utf-8") for file in own]
        # One row may be multiplied by the vector units.
        products = [text for text in texts if "vmatmul" in text] or [max(texts, key=len)]
        print(json.dumps({"rows": num_rows, "bundles": sum(map(all_bundles, products)), "num_bytes": num_bytes}))


def as_line(cost: ProductCost) -> dict[str, Any]:
    """A line of the file."""
    return asdict(cost) | {"ratio": round(cost.ratio, 3), "share_of_flops": float(f"{cost.share_of_flops:.3g}")}


def table(lines: list[dict[str, Any]]) -> str:
    """The ratios as docs/engine.md has them: rows and ratio of each number of rows."""
    cells: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if line["product"] == "gate":
            cells.setdefault((line["chip"], line["weights"]), []).append(f"{line['rows']}: {line['ratio']:.3f}")
    head = ["| chip | bfloat16 | int8 | int4-g128 |", "| --- | --- | --- | --- |"]
    rows = [[chip, *(", ".join(cells.get((chip, weights), [])) for weights in WEIGHTS)] for chip in CHIPS]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.tpu_products", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chip", action="append", choices=CLOCKS, help=f"default: {', '.join(CHIPS)}")
    parser.add_argument("--weights", action="append", choices=WEIGHTS, help="default: all")
    parser.add_argument("--product", action="append", choices=PRODUCTS, help="default: gate")
    parser.add_argument("--rows", action="append", type=int, help="default: around the chip's ridge")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the figures to this file")
    parser.add_argument("--table", action="store_true", help="print --json as docs/engine.md has it, compile nothing")
    parser.add_argument("--compile", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.compile:
        _compile(*options.compile)
        return 0
    if options.table:
        print(table(json.loads(options.json.read_text(encoding="utf-8"))), end="")
        return 0
    from pallas_kernels import ahead_of_time  # imports JAX, which the processes that compile do anyway

    if reasons := ahead_of_time.missing_compilers(options.chip or CHIPS):
        print(*reasons, install_hint("aot"), sep="\n", file=sys.stderr)
        return 2
    head = f"{'chip':7}{'weights':11}{'product':9}{'rows':>5}{'bundles':>9}{'compute':>9}{'copy':>8}{'ratio':>7}"
    print(f"{head}{'of FLOP/s':>11}")
    for weights in options.weights or WEIGHTS:
        for chip in options.chip or CHIPS:
            by_chip = ROWS.get(weights, ROWS["*"])
            rows = tuple(options.rows or by_chip.get(chip) or by_chip.get("*") or ROWS["*"]["*"])
            for product in options.product or ["gate"]:
                found = measure(chip, weights, product, rows)
                for one in found:
                    start = f"{chip:7}{weights:11}{product:9}{one.rows:5}{one.bundles:9}"
                    end = f"{one.compute_us:9.1f}{one.copy_us:8.1f}{one.ratio:7.3f}{one.share_of_flops:11.3f}"
                    print(start + end, flush=True)
                if options.json:
                    _add(options.json, found)
    return 0


def _add(file: Path, found: list[ProductCost]) -> None:
    """Writes figures in place of those of the same products."""
    lines = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    by_key = {(line["chip"], line["weights"], line["product"], line["rows"]): line for line in lines}
    by_key |= {(one.chip, one.weights, one.product, one.rows): as_line(one) for one in found}
    lines = [by_key[key] for key in sorted(by_key)]
    file.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
