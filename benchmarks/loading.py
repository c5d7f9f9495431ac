"""Time and host memory of loading a checkpoint from a cold disk, next to reading its bytes.

    python -m benchmarks.loading [--json FILE] [--rounds 5] [--folder FOLDER]

The checkpoint has the shapes of Llama-3.2-1B in bfloat16, 2.3 GiB of random weights, in the Hugging Face form and in
ours. In every round, and for each form, its files are dropped from the page cache and read from end to end in pieces of
16 MiB, then dropped again and loaded; each in a process of its own, which has imported what it needs and started JAX
before the clock starts. Our form is loaded once more without comparing its checksums, in turn before and after the load
that compares them, and the median of the ratios of these pairs is what the checks cost. What is left of the files in
the cache is counted and printed. Figures are medians over the rounds; memory is the peak of the resident set above
what it was before, less the model.
"""

import argparse
import ctypes
import json
import math
import mmap
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

LAYERS, D, F, V, KV = 16, 2048, 8192, 128256, 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
FORMS = ("huggingface", "native")
PIECE = 16 * 2**20
GOAL_RATIO, GOAL_BYTES, GOAL_CHECKS = 1.3, 2**29, 1.03
UNCHECKED = "load without checks"


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, size in (("q", D), ("k", KV), ("v", KV)):
            found[f"{prefix}.self_attn.{name}_proj.weight"] = (size, D)
        found[f"{prefix}.self_attn.o_proj.weight"] = (D, D)
        found |= {f"{prefix}.mlp.{name}_proj.weight": (F, D) for name in ("gate", "up")}
        found[f"{prefix}.mlp.down_proj.weight"] = (D, F)
        found |= {f"{prefix}.{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    return {**found, "model.norm.weight": (D,)}


MODEL_BYTES = 2 * sum(map(math.prod, shapes().values()))


def write_checkpoint(folder: Path) -> None:
    """Normal weights from a pool of 64 MiB, which compresses as a real model does: hardly."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    header, position = {}, 0
    for name, shape in shapes().items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    raw = json.dumps(header).encode()
    random = np.random.default_rng(0)
    pool = (random.standard_normal(2**25, np.float32) * 0.02).astype(ml_dtypes.bfloat16).tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for start in range(0, position, len(pool)):
            file.write(pool[: position - start])


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def drop(folder: Path) -> None:
    """Asks the system to forget the files' pages; what it keeps, `resident` counts."""
    for path in files_of(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident(folder: Path) -> float:
    """The fraction of the files' pages that are in memory."""
    library, pages, there = ctypes.CDLL(None, use_errno=True), 0, 0
    for path in files_of(folder):
        if not path.stat().st_size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            state = np.zeros(-(-view.size // mmap.PAGESIZE), np.uint8)
            address = ctypes.c_void_p(view.ctypes.data)
            if library.mincore(address, ctypes.c_size_t(view.size), ctypes.c_void_p(state.ctypes.data)):
                raise OSError(ctypes.get_errno(), "mincore")
            pages, there = pages + state.size, there + int((state & 1).sum())
            del view
    return there / pages


def read(folder: Path) -> dict[str, float]:
    """Seconds to read every byte."""
    drop(folder)
    cached = resident(folder)
    buffer = memoryview(bytearray(PIECE))
    buffer[:] = bytes(PIECE)
    start = time.perf_counter()
    for path in files_of(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return {"seconds": time.perf_counter() - start, "cached": cached}


def load(folder: Path, verify: bool | None = None) -> dict[str, float]:
    """Seconds, processor seconds, and bytes of host memory above the model, of `checkpoints_convert.load`."""
    import jax
    import orbax.checkpoint  # noqa: F401

    import checkpoints_convert

    jax.device_put(np.zeros(4)).block_until_ready()
    drop(folder)
    cached = resident(folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory("VmRSS")
    start, processor = time.perf_counter(), time.process_time()
    params = jax.block_until_ready(checkpoints_convert.load(folder, verify=verify)[1])
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "bytes_above": _memory("VmHWM") - before - held,
        "cached": cached,
    }


def _memory(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def measure(folder: Path, rounds: int) -> Iterator[tuple[str, str, dict[str, float]]]:
    for number in range(rounds):
        for form in FORMS:
            loads = ["load", UNCHECKED][:: 1 if number % 2 else -1] if form == "native" else ["load"]
            for what in ("read", *loads):
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.loading",
                    "--measure",
                    what,
                    "--folder",
                    str(folder / form),
                ]
                environment = os.environ | {"JAX_PLATFORMS": "cpu"}
                done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
                if done.returncode:
                    raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
                yield form, what, {**json.loads(done.stdout.splitlines()[-1]), "load_average": os.getloadavg()[0]}


def summary(form: str, folder: Path, found: dict[str, list[dict[str, float]]]) -> dict[str, object]:
    def median(what: str, key: str) -> float:
        return statistics.median(one[key] for one in found[what])

    seconds = {what: median(what, "seconds") for what in ("read", "load")}
    checks = None
    if found.get(UNCHECKED):
        pairs = zip(found["load"], found[UNCHECKED], strict=True)
        checks = statistics.median(one["seconds"] / other["seconds"] for one, other in pairs)
    return {
        "form": form,
        "file_bytes": sum(path.stat().st_size for path in files_of(folder / form)),
        "read_seconds": seconds["read"],
        "load_seconds": seconds["load"],
        "ratio": seconds["load"] / seconds["read"],
        "checks_ratio": checks,
        "load_processor_seconds": median("load", "processor_seconds"),
        "bytes_above_model": max(one["bytes_above"] for one in found["load"]),
        "largest_cached_fraction": max(one["cached"] for what in found for one in found[what]),
        "rounds": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write 5 GB for the time being, instead of /tmp")
    parser.add_argument("--measure", choices=("read", "load", UNCHECKED), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        found = read(arguments.folder) if arguments.measure == "read" else None
        found = found or load(arguments.folder, False if arguments.measure == UNCHECKED else None)
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        results = run(Path(name), arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def run(folder: Path, rounds: int) -> dict[str, object]:
    import jax

    import checkpoints_convert

    write_checkpoint(folder / "huggingface")
    checkpoints_convert.convert(folder / "huggingface", folder / "native", progress=None)
    found: dict[str, dict[str, list]] = {form: {"read": [], "load": []} for form in FORMS}
    found["native"][UNCHECKED] = []
    for form, what, one in measure(folder, rounds):
        found[form][what].append(one)
        print(f"{form} {what}: {one['seconds']:.2f} s, load average {one['load_average']:.1f}", file=sys.stderr)
    rows = [summary(form, folder, found[form]) for form in FORMS]
    print(f"Llama-3.2-1B shapes, bfloat16, {MODEL_BYTES / 2**30:.2f} GiB; {os.cpu_count()} cores, {rounds} rounds")
    columns = ("cold read (s)", "cold load (s)", "ratio", "with checks / without", "memory above the model (GiB)")
    print(f"| form | file (GiB) | {' | '.join(columns)} | still cached |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        checks = "" if row["checks_ratio"] is None else f"{row['checks_ratio']:.3f}"
        print(
            f"| {row['form']} | {row['file_bytes'] / 2**30:.2f} | {row['read_seconds']:.2f} | "
            f"{row['load_seconds']:.2f} | {row['ratio']:.2f} | {checks} | {row['bytes_above_model'] / 2**30:.2f} | "
            f"{row['largest_cached_fraction']:.1%} |"
        )
    print(
        f"goals: ratio at most {GOAL_RATIO}, memory at most {GOAL_BYTES / 2**30:.1f} GiB, checks at most {GOAL_CHECKS}"
    )
    versions = {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__}
    machine = {"cores": os.cpu_count(), "platform": platform.machine(), "system": platform.release()}
    return {"model_bytes": MODEL_BYTES, "versions": versions, "machine": machine, "forms": rows}


if __name__ == "__main__":
    main()
