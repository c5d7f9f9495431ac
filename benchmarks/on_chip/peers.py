"""Pieces of other programs on the same chip, each in a process of its own, and skipped where they are not installed."""

import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.on_chip import child
from benchmarks.on_chip.results import CardResults, Row
from benchmarks.on_chip.sizes import Sizes
from benchmarks.on_chip.speed import rate

# This process leaves the chip's memory to the other one.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
# Of the checked process: each array is an allocation of its own, beyond whose end nothing may be read.
CHECKED_ENVIRONMENT = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
SANITIZER = "compute-sanitizer"
SANITIZER_SECONDS, PEER_SECONDS = 150.0, 240.0


def sanitizer(sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """A small decode and verification under compute-sanitizer: no access outside an array."""
    case = "memcheck, decode and verify"
    if shutil.which(SANITIZER) is None:
        yield Row(case, note=f"not run: {SANITIZER} is not installed")
        return
    command = [SANITIZER, "--tool", "memcheck", *child.python("benchmarks.on_chip.sanitized", *_tiny(sizes))]
    ended = child.run(command, SANITIZER_SECONDS, CHECKED_ENVIRONMENT)
    if ended.status is None:
        yield Row(case, note=f"not run: it did not end within {SANITIZER_SECONDS:.0f} s")
        return
    counted = re.search(r"ERROR SUMMARY: (\d+) error", ended.output)
    if counted is None or "calls ran" not in ended.output:
        yield Row(case, note=f"not run: {ended.reason}")
        return
    first = re.search(r"=+ (Invalid .*|.*out of bounds.*)", ended.output)
    errors = int(counted.group(1))
    yield Row(case, errors, "errors", is_right=errors == 0, note="" if first is None else first.group(1))


def torch(sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """cuBLAS's products of the 8B shapes in bfloat16, and those of a whole decode step as one CUDA graph."""
    yield from _peer("torch", sizes, results)


def vllm(sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """Decoding of the 8B shape by vLLM."""
    yield from _peer("vllm", sizes, results)


def _peer(package: str, sizes: Sizes, results: CardResults) -> Iterator[Row]:
    """Rows that the module `with_PACKAGE` prints; those with `num_bytes` get a share of the copy."""
    if importlib.util.find_spec(package) is None:
        yield Row(package, note=f"not run: {package} is not installed")
        return
    copy = rate("copy", sizes, results)
    ended = child.run(child.python(f"benchmarks.on_chip.with_{package}", *_tiny(sizes)), PEER_SECONDS)
    found = [json.loads(line) for line in ended.output.splitlines() if line.startswith('{"case"')]
    for fields in found:
        num_bytes = fields.pop("num_bytes", None)
        row = Row(**fields)
        if num_bytes is not None and row.value:
            row = replace(row, share=num_bytes / (row.value * 1e-6) / copy, of="copy")
        yield row
    if ended.status != 0:
        late = f"it did not end within {PEER_SECONDS:.0f} s" if ended.status is None else ended.reason
        yield Row(package, note=f"not run{' to its end' * bool(found)}: {late}")


def _tiny(sizes: Sizes) -> list[str]:
    return ["--tiny"] * sizes.is_tiny
