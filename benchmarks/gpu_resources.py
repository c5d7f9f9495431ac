"""Registers, spills, shared memory, barriers and machine instructions of the decode kernel, compiled for an H100.

    PYTHONPATH=.venv-chip/compilers python -m benchmarks.gpu_resources [--dtype int8 ...] [--json FILE]

A multiprocessor issues four instructions a cycle, and where the kernel needs more cycles for a block of keys than its
copy takes, decoding is bound by issue: this shows before a chip is at hand. Instructions are those of one warp in the
loop over blocks of keys, with those that most blocks or warps skip. The tools are in the wheels nvidia-cuda-nvcc and
nvidia-cuda-nvdisasm, or on the PATH.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from jaxinfer.extras import install_hint

DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4")
BATCH, CONTEXT, MODEL, CHIP, ARCHITECTURE = 64, 4096, "llama-3-8b", "h100", "sm_90a"
# Smallest pages of the engine: scales of fewer tokens are no copy.
PAGE_SIZES = {"int8": 32, "int4": 32}
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(.*);")
_LABEL = re.compile(r"\s*(\.L_x?_?\w+):")
_BARRIER = re.compile(r"Barrier\(arrival_count=(\d+), num_barriers=(\d+)[^)]*\): (\d+)")


@dataclass(frozen=True)
class GpuResources:
    """Figures of one kernel. barriers: number of barriers by the arrivals that complete them.

    opcodes: instructions of the loop over blocks, of a warp and 64 keys.
    """

    dtype: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    barriers: dict[int, int]
    opcodes: dict[str, int]

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())


def find_tool(name: str) -> str | None:
    """The path of ptxas or nvdisasm, or None."""
    wheels = find_spec("nvidia")
    for place in (wheels.submodule_search_locations or ()) if wheels else ():
        for folder in ("cu13/bin", "cuda_nvcc/bin"):
            if (file := Path(place, folder, name)).exists():
                return str(file)
    return shutil.which(name)


def missing_tools() -> list[str]:
    """The reasons why kernels cannot be read here; [] if they can."""
    from pallas_kernels import ahead_of_time

    tools = [f"{name} is not installed" for name in ("ptxas", "nvdisasm") if find_tool(name) is None]
    return ahead_of_time.missing_compilers([CHIP]) + tools


def measure(dtype: str) -> GpuResources:
    """Compiles the kernel in a process of its own, whose compiler writes its files. Raises RuntimeError if it does not
    compile."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"MOSAIC_GPU_DUMP_TO": folder, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "benchmarks.gpu_resources", "--compile", dtype]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        files = sorted(Path(folder).glob("paged_attention*.ptx"))
        if ended.returncode or len(files) != 1:
            raise RuntimeError(f"{dtype}: {len(files)} kernels; {ended.stderr[-600:]}")
        return read_kernel(dtype, files[0])


def read_kernel(dtype: str, ptx: Path) -> GpuResources:
    """Assembles a dumped kernel and reads its SASS; its .resources.txt lies beside it."""
    cubin = ptx.with_suffix(".cubin")
    assembler = [str(find_tool("ptxas")), f"-arch={ARCHITECTURE}", "-v", str(ptx), "-o", str(cubin)]
    told = subprocess.run(assembler, capture_output=True, text=True, check=True).stderr
    disassembler = [str(find_tool("nvdisasm")), "-c", str(cubin)]
    sass = subprocess.run(disassembler, capture_output=True, text=True, check=True).stdout
    ptx.with_suffix(".sass").write_text(sass, encoding="utf-8")
    resources = ptx.with_suffix(".resources.txt").read_text(encoding="utf-8")
    barriers: Counter[int] = Counter()
    for arrivals, num_barriers, count in _BARRIER.findall(resources):
        barriers[int(arrivals)] += int(num_barriers) * int(count)
    return GpuResources(
        dtype,
        registers=_figure(r"Used (\d+) registers", told),
        spill_bytes=_figure(r"(\d+) bytes spill stores", told) + _figure(r"(\d+) bytes spill loads", told),
        shared_bytes=_figure(r"smem_scratch_bytes=(\d+)", resources),
        barriers=dict(sorted(barriers.items())),
        opcodes=dict(loop_opcodes(sass).most_common()),
    )


def loop_opcodes(sass: str) -> Counter[str]:
    """Opcodes of the smallest loop with all matrix products of the kernel."""
    opcodes, labels, jumps = [], {}, []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(opcodes)
        elif found := _INSTRUCTION.search(line):
            if found[1] == "BRA" and (target := re.search(r"\.L_x?_?\w+", found[2])):
                jumps.append((len(opcodes), target[0]))
            opcodes.append(found[1])
    loops = [opcodes[labels[target] : end + 1] for end, target in jumps if labels.get(target, end + 1) <= end]
    products = [loop for loop in loops if loop.count("HGMMA") == opcodes.count("HGMMA")]
    return Counter(min(products, key=len, default=[]))


def _figure(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _compile(dtype: str) -> None:
    from pallas_kernels import ahead_of_time
    from pallas_kernels.paged_attention import paged_attention
    from pallas_kernels.paged_attention.shapes import decode_shape

    page_size = PAGE_SIZES.get(dtype, 16)
    shape = decode_shape(MODEL, BATCH, CONTEXT, cache_dtype=dtype, page_size=page_size)
    arguments = shape.abstract("separate", BATCH * shape.table_width)
    pages = arguments.pop("pages")

    def step(pages, arrays):
        return paged_attention(pages=pages, **arrays, **shape.options, implementation="pallas_gpu")

    ahead_of_time.compile_for(CHIP, step, pages, arguments, donate_argnums=(0,))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_resources", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="of the cache; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.compile:
        _compile(options.compile)
        return 0
    if reasons := missing_tools():
        print(*reasons, install_hint("aot"), sep="\n", file=sys.stderr)
        return 2
    print(f"{'cache':15}{'registers':>10}{'spills':>8}{'shared':>9}{'instructions':>14}  barriers by arrivals; opcodes")
    found = []
    for dtype in options.dtype or DTYPES:
        one = measure(dtype)
        found.append(asdict(one) | {"instructions": one.instructions})
        barriers = " ".join(f"{arrivals}:{count}" for arrivals, count in one.barriers.items())
        opcodes = " ".join(f"{opcode} {count}" for opcode, count in list(one.opcodes.items())[:8])
        figures = f"{one.registers:10}{one.spill_bytes:8}{one.shared_bytes:9}{one.instructions:14}"
        print(f"{dtype:15}{figures}  {barriers}; {opcodes}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
