"""Products on a CPU, by rows and by instruction set: our kernels beside XLA's and torch's.

    python -m benchmarks.cpu_products [--rows 1,4,16,64,512,1024] [--threads N] [--rounds N] [--json FILE]

Weights are those of a layer and a head of a 135M model, in float32 and packed few bits. Each instruction set has a
process of its own, and the processes take turns. Numba compiles for AVX2 on any machine (NUMBA_CPU_NAME=haswell), and
torch is limited to it (ATEN_CPU_CAPABILITY, MKL_ENABLE_INSTRUCTIONS); XLA's own products cannot be limited, so that
they are measured with what the machine has only. Figures are GFLOP/s, the fastest of the rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = ((576, 1536), (1536, 576), (576, 49152))
FORMS = {"float32": None, "bfloat16": None, "int4, 32 a scale": "int4-g32", "int8, 32 a scale": "int8-g32"}
AVX2 = "avx avx2 bmi bmi2 f16c fma lzcnt movbe popcnt sse sse2 sse3 sse4.1 sse4.2 ssse3 cx16 64bit"
LIMITS = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in AVX2.split()),
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
SECONDS = 0.15  # of a measurement, at least


def gflops(run: Callable[[], Any], rows: int, shape: tuple[int, int]) -> float:
    """Of the fastest of several runs."""
    run()
    fastest, begin = np.inf, time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        start = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - start)
    return 2e-9 * rows * shape[0] * shape[1] / fastest


def measure(rows_of: list[int], threads: int, is_limited: bool) -> list[dict[str, Any]]:
    """A figure for each shape, form, number of rows and implementation."""
    import jax
    import jax.numpy as jnp

    from jaxinfer.quantization import quantize
    from jaxinfer.quantization.matmul import matmul
    from jaxinfer.quantization.packed import pack_weight

    torch = _torch(threads)
    found = []
    for shape in SHAPES:
        weight = jax.random.normal(jax.random.key(0), shape) * 0.02
        plain = {"float32": weight, "bfloat16": weight.astype(jnp.bfloat16)}
        for form, recipe in FORMS.items():
            packed = pack_weight(plain[form] if recipe is None else quantize(weight, recipe))
            for rows in rows_of:
                x = jax.random.normal(jax.random.key(1), (rows, shape[0]))
                product = jax.jit(matmul)
                runs: dict[str, Callable[[], Any]] = {"ours": partial(_wait, product, x, packed)}
                if form == "float32":
                    dense = jax.jit(lambda x, weight: jnp.matmul(x, weight, precision="highest"))
                    if not is_limited:
                        runs["XLA"] = partial(_wait, dense, x, weight)
                    if torch is not None:
                        own, other = (torch.from_numpy(np.array(array)) for array in (x, weight))
                        runs["torch"] = partial(torch.matmul, own, other)
                for name, run in runs.items():
                    found.append({"shape": shape, "form": form, "rows": rows, name: gflops(run, rows, shape)})
    return found


def _wait(function: Callable[..., Any], *arguments: Any) -> None:
    function(*arguments).block_until_ready()


def _torch(threads: int) -> Any:
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(threads)
    return torch


def merged(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each shape, form and number of rows, with the best of each implementation."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for figure in (figure for found in rounds for figure in found):
        key = tuple(figure["shape"]), figure["form"], figure["rows"]
        row = rows.setdefault(key, {"shape": key[0], "form": key[1], "rows": key[2]})
        for name in figure.keys() - row.keys() | (figure.keys() & {"ours", "XLA", "torch"}):
            row[name] = max(figure[name], row.get(name, 0.0))
    return list(rows.values())


def to_markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| inputs x outputs | weight | rows | ours | XLA | torch |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        figures = (f"{row[name]:.0f}" if name in row else "" for name in ("ours", "XLA", "torch"))
        shape = "{:,} x {:,}".format(*row["shape"])
        lines.append(f"| {shape} | {row['form']} | {row['rows']:,} | {' | '.join(figures)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,16,64,512,1024", help="numbers of rows, by commas")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="torch's threads")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each instruction set")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--worker", choices=("native", "avx2"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows_of = [int(number) for number in options.rows.split(",")]
    if options.worker is not None:
        print(json.dumps(measure(rows_of, options.threads, options.worker == "avx2")))
        return
    found: dict[str, list[list[dict[str, Any]]]] = {"native": [], "avx2": []}
    for _ in range(options.rounds):
        for name, rounds in found.items():
            command = [sys.executable, "-m", "benchmarks.cpu_products", "--worker", name, "--rows", options.rows]
            environment = {**os.environ, **(LIMITS if name == "avx2" else {}), "JAX_PLATFORMS": "cpu"}
            command += ["--threads", str(options.threads)]
            printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            rounds.append(json.loads(printed.splitlines()[-1]))
    result = {name: merged(rounds) for name, rounds in found.items()}
    for name, rows in result.items():
        print(f"\n{name}\n\n{to_markdown(rows)}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
