"""Products on a CPU, by rows and by instruction set: our kernels beside those of XLA, torch and llama.cpp.

    python -m benchmarks.cpu_products [--rows 1,4,16,64,512,1024] [--threads N] [--rounds N] [--llama-cpp FOLDER]
                                      [--json FILE]

Weights are those of a layer and a head of a 135M model, in float32 and packed few bits. Each instruction set has a
process of its own, and the processes take turns. Numba compiles for AVX2 on any machine (NUMBA_CPU_NAME=haswell), and
torch is limited to it (ATEN_CPU_CAPABILITY, MKL_ENABLE_INSTRUCTIONS); XLA's own products cannot be limited, so that
they are measured with what the machine has only. llama.cpp's libraries (`benchmarks.peers.ggml_products` says how
to build them for AVX2) are measured in the process of the instruction set that they are compiled for; weights then are
those of its types, the same numbers on both sides. It rounds activations, to 8 bits for Q4_1 and Q8_0 and to the
weight's type for 16 bits; ours are float32, or 8 bits in a column of their own. Figures are GFLOP/s, the fastest of the
rounds.
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
RECIPES = {"int4, 32 a scale": "int4-g32", "int8, 32 a scale": "int8-g32"}
GGML_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "Q4_1": "Q4_1", "Q8_0": "Q8_0"}
COLUMNS = ("ours", "ours, int8 activations", "XLA", "torch", "llama.cpp")
AVX2 = "avx avx2 bmi bmi2 f16c fma lzcnt movbe popcnt sse sse2 sse3 sse4.1 sse4.2 ssse3 cx16 64bit"
LIMITS = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in AVX2.split()),
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
SECONDS = 0.15  # of a measurement, at least
PRODUCTS = 8  # of a call of a JAX program, if they are small: its dispatch by Python would cost as much as one


def gflops(run: Callable[[], Any], rows: int, shape: tuple[int, int], products: int = 1) -> float:
    """GFLOP/s of the fastest of several runs, each of a number of products."""
    run()
    fastest, begin = np.inf, time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        start = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - start)
    return 2e-9 * products * rows * shape[0] * shape[1] / fastest


def measure(rows_of: list[int], threads: int, is_limited: bool, folder: Path | None = None) -> list[dict[str, Any]]:
    """A figure for each shape, form, number of rows and implementation; `folder` has llama.cpp's libraries."""
    import jax
    import jax.numpy as jnp

    from benchmarks.peers.ggml_products import Ggml
    from cpu_kernels.packed_matmul.loads import HAS_AVX512
    from jaxinfer.quantization.matmul import matmul
    from jaxinfer.quantization.packed import can_round_activations, pack_weight

    torch, ggml, found = _torch(threads), None if folder is None else Ggml(folder), []
    is_peer = ggml is not None and ggml.has_avx512 == HAS_AVX512
    for shape in SHAPES:
        weight = jax.random.normal(jax.random.key(0), shape) * 0.02
        for form, (leaf, stored) in _weights(weight, ggml).items():
            packed = {"ours": pack_weight(leaf)}
            if stored is not None and can_round_activations(packed["ours"].form):
                packed["ours, int8 activations"] = pack_weight(leaf, activations="int8")
            for rows in rows_of:
                x = jax.random.normal(jax.random.key(1), (rows, shape[0]))
                count = PRODUCTS if rows * weight.size < 2**30 else 1
                runs: dict[str, Callable[[], Any]] = {
                    name: partial(_wait, _repeated(matmul, count), x, own) for name, own in packed.items()
                }
                if form == "float32":
                    dense = _repeated(partial(jnp.matmul, precision="highest"), count)
                    if not is_limited:
                        runs["XLA"] = partial(_wait, dense, x, weight)
                    if torch is not None:
                        own, other = (torch.from_numpy(np.array(array)) for array in (x, weight))
                        runs["torch"] = partial(torch.matmul, own, other)
                if is_peer and stored is not None:
                    runs["llama.cpp"] = ggml.product(stored, GGML_TYPES[form], np.asarray(x), threads)
                for name, run in runs.items():
                    figure = gflops(run, rows, shape, 1 if name in ("torch", "llama.cpp") else count)
                    found.append({"shape": shape, "form": form, "rows": rows, name: figure})
    return found


def _weights(weight: Any, ggml: Any) -> dict[str, tuple[Any, np.ndarray | None]]:
    """By form: the weight as we store it, and as ggml does."""
    import jax.numpy as jnp

    from benchmarks.peers.ggml_products import to_quantized
    from jaxinfer.quantization import quantize

    if ggml is None:
        leaves = {"float32": weight, "bfloat16": weight.astype(jnp.bfloat16)}
        leaves |= {form: quantize(weight, recipe) for form, recipe in RECIPES.items()}
        return {form: (leaf, None) for form, leaf in leaves.items()}
    stored = {form: ggml.quantize(np.asarray(weight), kind) for form, kind in GGML_TYPES.items()}
    leaves = {form: weight.astype(form) for form in ("float32", "bfloat16", "float16")}
    leaves |= {form: to_quantized(stored[form], form, len(weight)) for form in ("Q4_1", "Q8_0")}
    return {form: (leaf, stored[form]) for form, leaf in leaves.items()}


def _repeated(product: Callable[..., Any], count: int) -> Callable[..., Any]:
    """A program of several products of the same rows and weight, each after the other."""
    import jax

    def step(x: Any, weight: Any) -> Any:
        # What is added is 0, but XLA does not know it, and so cannot take a product out of the loop.
        return x.at[0, 0].add(0.0 * jax.lax.optimization_barrier(product(x, weight))[0, 0])

    return jax.jit(lambda x, weight: jax.lax.fori_loop(0, count, lambda _, x: step(x, weight), x))


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
        for name in figure.keys() - row.keys() | (figure.keys() & set(COLUMNS)):
            row[name] = max(figure[name], row.get(name, 0.0))
    return list(rows.values())


def to_markdown(rows: list[dict[str, Any]]) -> str:
    columns = [name for name in COLUMNS if any(name in row for row in rows)]
    lines = [f"| inputs x outputs | weight | rows | {' | '.join(columns)} |", "| --- " * (3 + len(columns)) + "|"]
    for row in rows:
        figures = (f"{row[name]:.0f}" if name in row else "" for name in columns)
        shape = "{:,} x {:,}".format(*row["shape"])
        lines.append(f"| {shape} | {row['form']} | {row['rows']:,} | {' | '.join(figures)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,16,64,512,1024", help="numbers of rows, by commas")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch and llama.cpp")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each instruction set")
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        metavar="FOLDER",
        help="also measure llama.cpp, by the libraries in llama_cpp/lib of a llama-cpp-python, which pip compiles "
        "for this machine, or for AVX2 if CMAKE_ARGS is -DGGML_NATIVE=OFF (with --no-binary llama-cpp-python)",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--worker", choices=("native", "avx2"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows_of = [int(number) for number in options.rows.split(",")]
    if options.worker is not None:
        print(json.dumps(measure(rows_of, options.threads, options.worker == "avx2", options.llama_cpp)))
        return
    found: dict[str, list[list[dict[str, Any]]]] = {"native": [], "avx2": []}
    for _ in range(options.rounds):
        for name, rounds in found.items():
            command = [sys.executable, "-m", "benchmarks.cpu_products", "--worker", name, "--rows", options.rows]
            environment = {**os.environ, **(LIMITS if name == "avx2" else {}), "JAX_PLATFORMS": "cpu"}
            command += ["--threads", str(options.threads)]
            if options.llama_cpp is not None:
                command += ["--llama-cpp", str(options.llama_cpp)]
            printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            rounds.append(json.loads(printed.splitlines()[-1]))
    result = {name: merged(rounds) for name, rounds in found.items()}
    for name, rows in result.items():
        print(f"\n{name}\n\n{to_markdown(rows)}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
