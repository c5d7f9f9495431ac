"""Registers, spills, shared memory, barriers and machine instructions of the GPU kernels, compiled for an H100; their
TMA descriptors, and the launches of a decode step.

    PYTHONPATH=.venv-chip/compilers python -m benchmarks.gpu_resources [--only kernels ...] [--kernel norm ...]
        [--json FILE]

A multiprocessor issues four instructions a cycle, and where the kernel needs more cycles for a block of keys than its
copy takes, decoding is bound by issue: this shows before a chip is at hand. Instructions are those of one warp in the
loop over blocks of keys or groups of weights, with those that most blocks or warps skip; of a kernel without products
all. The tools are in the wheels nvidia-cuda-nvcc and nvidia-cuda-nvdisasm, or on the PATH.
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
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from benchmarks import gpu_kernels, tma_rules
from jaxinfer.extras import install_hint

ARCHITECTURE = "sm_90a"
RESULTS = Path(__file__).parent / "results" / "gpu_resources.json"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(.*);")
_LABEL = re.compile(r"\s*(\.L_x?_?\w+):")
_BARRIER = re.compile(r"Barrier\(arrival_count=(\d+), num_barriers=(\d+)[^)]*\): (\d+)")


@dataclass(frozen=True)
class GpuResources:
    """Figures of one kernel. barriers: number of barriers by the arrivals that complete them.

    opcodes: instructions of the loop over blocks, of a warp and 64 keys (flash attention: 128) or a group of weights.
    """

    kernel: str
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
    return ahead_of_time.missing_compilers([gpu_kernels.CHIP]) + tools


def measure(kernel: str) -> GpuResources:
    """Compiles the kernel in a process of its own, whose compiler writes its files. Raises RuntimeError if it does not
    compile."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"MOSAIC_GPU_DUMP_TO": folder, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "benchmarks.gpu_resources", "--compile", kernel]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        files = sorted(Path(folder).glob("*.ptx"))
        if ended.returncode or len(files) != 1:
            raise RuntimeError(f"{kernel}: {len(files)} kernels; {ended.stderr[-600:]}")
        return read_kernel(kernel, files[0])


def read_kernel(kernel: str, ptx: Path) -> GpuResources:
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
        kernel,
        registers=_figure(r"Used (\d+) registers", told),
        spill_bytes=_figure(r"(\d+) bytes spill stores", told) + _figure(r"(\d+) bytes spill loads", told),
        shared_bytes=_figure(r"smem_scratch_bytes=(\d+)", resources),
        barriers=dict(sorted(barriers.items())),
        opcodes=dict(loop_opcodes(sass).most_common()),
    )


def loop_opcodes(sass: str) -> Counter[str]:
    """Opcodes of the innermost loop with the most matrix products, the smallest if several have as many: where blocks
    without a mask have a loop of their own, theirs. All opcodes of a kernel without products."""
    opcodes, labels, jumps = [], {}, []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(opcodes)
        elif code := _INSTRUCTION.search(line):
            if code[1] == "BRA" and (target := re.search(r"\.L_x?_?\w+", code[2])):
                jumps.append((len(opcodes), target[0]))
            opcodes.append(code[1])
    loops = [(labels[target], end + 1) for end, target in jumps if labels.get(target, end + 1) <= end]
    products = [(begin, end) for begin, end in loops if "HGMMA" in opcodes[begin:end]]
    innermost = [
        opcodes[begin:end]
        for begin, end in products
        if not any((begin, end) != inner and begin <= inner[0] and inner[1] <= end for inner in products)
    ]
    if not innermost:
        return Counter(opcodes)
    return Counter(max(innermost, key=lambda loop: (loop.count("HGMMA"), -len(loop))))


def _figure(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def kernels(names: Iterable[str]) -> list[dict]:
    """Figures of kernels, each printed when it is compiled."""
    print(
        f"{'kernel':22}{'registers':>10}{'spills':>8}{'shared':>9}{'instructions':>14}  barriers by arrivals; opcodes"
    )
    figures = []
    for name in names:
        one = measure(name)
        figures.append(asdict(one) | {"instructions": one.instructions})
        opcodes = " ".join(f"{opcode} {count}" for opcode, count in list(one.opcodes.items())[:8])
        row = f"{name:22}{one.registers:10}{one.spill_bytes:8}{one.shared_bytes:9}{one.instructions:14}"
        print(f"{row}  {_barriers(one.barriers)}; {opcodes}", flush=True)
    return figures


def descriptors() -> list[dict]:
    """Descriptors of each call of `gpu_kernels.CHECKED`, and the rules that they break."""
    print(f"{'call':36}{'descriptors':>12}{'copies':>8}{'broken rules':>14}")
    figures = []
    for name, make in gpu_kernels.CHECKED.items():
        made = tma_rules.descriptors_of(make())
        broken = [rule for one in made for rule in tma_rules.broken_rules(one)]
        copies = sum(len(one.shared) for one in made)
        figures.append({"call": name, "descriptors": len(made), "copies": copies, "broken": broken})
        print(f"{name:36}{len(made):12}{copies:8}{len(broken):14}", *broken, sep="  ", flush=True)
    return figures


def steps() -> list[dict]:
    """Launches and waits of a decode step with few and with many sequences."""
    from benchmarks import decode_step

    print(f"{'sequences':9}{'of a layer':>12}{'beside':>8}{'in a step':>11}{'graphs':>8}{'waits':>7}")
    figures = []
    for batch in (1, 64):
        one = decode_step.launches(batch)
        figures.append(asdict(one) | {"in_step": one.in_step})
        print(
            f"{batch:9}{one.of_layer:12}{one.beside:8}{one.in_step:11}{one.num_graphs:8}{one.num_waits:7}", flush=True
        )
    return figures


def table(path: Path = RESULTS) -> str:
    """The tables of docs/kernels.md."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rows = ["| kernel | registers | spilled bytes | shared bytes | barriers | instructions |", "| --- " * 6 + "|"]
    for one in report["kernels"]:
        barriers = _barriers(one["barriers"])
        shared = f"{one['shared_bytes']:,}"
        rows.append(
            f"| {one['kernel']} | {one['registers']} | {one['spill_bytes']} | {shared} | {barriers} "
            f"| {one['instructions']:,} |"
        )
    made, copies = (sum(one[name] for one in report["descriptors"]) for name in ("descriptors", "copies"))
    broken = sum(len(one["broken"]) for one in report["descriptors"])
    of_steps = "; ".join(
        f"{one['batch']} {'sequence' if one['batch'] == 1 else 'sequences'}: {one['of_layer']} a layer and "
        f"{one['beside']} beside, {one['in_step']} in all, as {one['num_graphs']} graph, {one['num_waits']} waits"
        for one in report["steps"]
    )
    return "\n".join(
        [
            *rows,
            "",
            f"{len(report['descriptors'])} calls have {made} TMA descriptors, which {copies} copies use: {broken} "
            "broken rules.",
            "",
            f"Launches of a decode step of Llama-3-8B in bfloat16: {of_steps}. JAX {report['jax']}.",
        ]
    )


def _barriers(barriers: dict) -> str:
    return " ".join(f"{arrivals}:{count}" for arrivals, count in barriers.items())


def main(argv: list[str] | None = None) -> int:
    parts = {"kernels": kernels, "descriptors": descriptors, "steps": steps}
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_resources", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=parts, help="one part (may be repeated); default: all")
    parser.add_argument("--kernel", action="append", choices=gpu_kernels.REPORTED, help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there; other parts stay")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.compile:
        gpu_kernels.REPORTED[options.compile]().compile()
        return 0
    if reasons := missing_tools():
        print(*reasons, install_hint("aot"), sep="\n", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"jax": jax.__version__}
    if options.json and options.json.exists():
        report = json.loads(options.json.read_text(encoding="utf-8")) | report
    for part in options.only or parts:
        report[part] = kernels(options.kernel or gpu_kernels.REPORTED) if part == "kernels" else parts[part]()
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    is_broken = any(one["broken"] for one in report.get("descriptors", ()))
    return int(is_broken or any(one["spill_bytes"] for one in report.get("kernels", ()) if "decode" in one["kernel"]))


if __name__ == "__main__":
    sys.exit(main())
