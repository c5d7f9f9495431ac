"""`jaxinfer doctor`: what this machine has, and whether it works. Runs with any part missing."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.checks import format_bytes
from jaxinfer.cli.command import ERROR, OK, sentence
from jaxinfer.cli.options import as_json
from jaxinfer.cli.output import console, plain_cell, write_json
from jaxinfer.extras import install_hint
from jaxinfer.progress import Stage
from jaxinfer.tables import facts_text

REQUIRED = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "ml_dtypes", "safetensors", "tokenizers"),
    *("jinja2", "huggingface_hub", "tqdm", "rich", "typer", "prompt_toolkit", "xxhash", "flatbuffers"),
    "msgspec",
)
# An extra is installed when all these distributions are.
EXTRAS = {
    "tpu": ("libtpu",),
    "cuda12": ("jax-cuda12-plugin",),
    "cuda13": ("jax-cuda13-plugin",),
    "aot": ("libtpu", "jax-cuda12-plugin"),
    "plot": ("matplotlib",),
    "peers": ("llama-cpp-python", "gguf"),
    "docs": ("mkdocs-material", "mkdocstrings"),
    "object-store": ("fsspec",),
    "cpu": ("numba",),
    "serve": ("starlette", "uvicorn", "uvloop", "httptools", "prometheus-client"),
    "structured": ("llguidance",),
    "parquet": ("pyarrow",),
    "events": ("pyzmq",),
    "simulate": ("simpy",),
    "tracing": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
    "ray": ("ray",),
    "notebooks": ("jupytext", "nbmake", "ipykernel", "matplotlib"),
    "browser": ("playwright",),
    "test": ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil"),
    "lint": ("ruff", "pyright", "pre-commit"),
    "oracle": ("torch", "transformers"),
}


@dataclass(frozen=True)
class DoctorOptions:
    as_json: bool = as_json("One JSON object.")


def doctor(options: DoctorOptions) -> int:
    """Report what this machine has, and whether it works.

    Lists versions, devices, kernels, caches and models, and compiles and runs a small program. The exit code is 1 if
    something that jaxinfer needs is missing or fails.
    """
    with Stage("examining this machine"):
        report = examine()
    if options.as_json:
        write_json(report)
    else:
        _print(report)
    return ERROR if report["problems"] else OK


def examine() -> dict[str, Any]:
    """Facts by group. A group that could not be examined has an "error"; `problems` lists what has to be fixed."""
    problems: list[str] = []
    report: dict[str, Any] = {"system": _system(), "packages": _packages(problems)}
    groups: dict[str, Callable[[], dict[str, Any]]] = {
        "devices": _devices,
        "program": _run_program,
        "attention": _attention,
        "compilation cache": _compilation_cache,
        "kept files": _kept_files,
    }
    for name, find in groups.items():
        try:
            report[name] = find()
        except Exception as error:  # any error of an installation is reported
            report[name] = {"error": sentence(error)}
            problems.append(f"{name}: {sentence(error)}")
    report["embedded models"] = _embedded_models()
    report["extras"] = {
        extra: "installed" if all(map(_version, names)) else f"not installed: {install_hint(extra)}"
        for extra, names in EXTRAS.items()
    }
    return {**report, "problems": problems}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _system() -> dict[str, Any]:
    from pallas_kernels.platform import num_cores

    facts: dict[str, Any] = {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpu cores": os.cpu_count(),
        "cpu cores usable": num_cores(),
    }
    with contextlib.suppress(ValueError, OSError, AttributeError):
        facts["memory bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return facts


def _packages(problems: list[str]) -> dict[str, str]:
    from jaxinfer import __version__

    versions = {"jaxinfer": __version__}
    for name in REQUIRED:
        version = _version(name)
        versions[name] = version or "missing"
        if version is None:
            problems.append(f"packages: {name} is missing: {install_hint()} installs it")
    return versions


def _devices() -> dict[str, Any]:
    import jax

    devices = [
        {"id": device.id, "platform": device.platform, "kind": device.device_kind, **_memory(device)}
        for device in jax.devices()
    ]
    backend = jax.default_backend()
    facts: dict[str, Any] = {"default backend": backend, "count": len(devices), "devices": devices}
    if backend == "cpu":
        facts["accelerator"] = "none found: models run on the CPU, in float32"
        if Path("/dev/nvidiactl").exists():
            facts["accelerator"] = f"an NVIDIA GPU is present, but JAX cannot use it: {install_hint('cuda12')}"
    return facts


def _memory(device: Any) -> dict[str, int]:
    """Bytes in use and the limit, if the platform reports them."""
    try:
        stats = device.memory_stats() or {}
    except Exception:  # backends without it raise different exceptions
        stats = {}
    names = {"bytes_limit": "memory bytes", "bytes_in_use": "memory bytes in use"}
    return {name: stats[key] for key, name in names.items() if key in stats}


def _run_program() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    started = time.monotonic()
    compiled = jax.jit(lambda x: jnp.dot(x, x, precision="highest").sum()).lower(jnp.ones((8, 8))).compile()
    compile_seconds = time.monotonic() - started
    value = float(compiled(jnp.ones((8, 8))))
    if value != 512.0:
        raise ArithmeticError(f"a product of ones summed to {value}, not 512")
    return {"result": "a small jitted product is correct", "compile seconds": round(compile_seconds, 3)}


def _attention() -> dict[str, Any]:
    """The attention kernels of a bfloat16 model (float32 on a CPU) of the Llama-3-8B shape, and why not others."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import ahead_of_time
    from pallas_kernels.flash_attention import explain
    from pallas_kernels.paged_attention import choose
    from pallas_kernels.paged_attention.shapes import decode_shape
    from pallas_kernels.platform import current_platform

    dtype = jnp.dtype("float32" if current_platform() == "cpu" else "bfloat16")
    q, kv = (jax.ShapeDtypeStruct((1, 1024, heads, 128), dtype) for heads in (32, 8))
    flash = explain(q, kv, kv)
    shape = decode_shape("llama-3-8b", 16, 1024, dtype=dtype.name, cache_dtype=dtype.name)
    paged = choose(shape.spec("interleaved" if current_platform() == "tpu" else "separate"))
    kernels: dict[str, Any] = {
        "implementation": flash.implementation,
        "paged": paged.implementation,
        "not taken": {name: why for name, why in flash.reasons.items() if name != "reference"},
    }
    missing = [chip for chip in ahead_of_time.CHIPS if ahead_of_time.missing_compiler(chip) is not None]
    compilers = [chip for chip in ahead_of_time.CHIPS if chip not in missing]
    kernels["can compile ahead for"] = ", ".join(compilers) or f"no other chip: {install_hint('aot')}"
    return kernels


def _compilation_cache() -> dict[str, Any]:
    from jaxinfer import compilation_cache

    folder = compilation_cache.enable()
    if folder is None:
        return {"folder": "off (JAXINFER_CACHE_DIR is empty)"}
    if not folder.exists():
        return {"folder": str(folder), "state": "does not exist yet"}
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return {
        "folder": str(folder),
        "files": len(sizes),
        "bytes": sum(sizes),
        "permissions": stat.filemode(folder.stat().st_mode),
    }


def _kept_files() -> dict[str, Any]:
    """Folders and sizes of the other kept files, by kind."""
    from jaxinfer.kept_files import KINDS, KeptFiles

    facts: dict[str, Any] = {}
    for kind, limit in KINDS.items():
        if (kept := KeptFiles.of(kind)) is None:
            facts[kind] = "off (JAXINFER_CACHE_DIR is empty, or the folder is not this user's alone)"
            continue
        count, size = kept.usage()
        facts.update({f"{kind} folder": str(kept.folder), f"{kind} files": count})
        facts.update({f"{kind} bytes": size, f"{kind} bytes at most": limit})
    return facts


def _embedded_models() -> dict[str, Any]:
    from jaxinfer.data import EMBEDDED, embedded_path

    facts = {}
    for name in EMBEDDED:
        path = embedded_path(name) or Path()
        sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
        facts[name] = f"present, {format_bytes(sum(sizes))}" if (path / "config.json").is_file() else "absent"
    return facts


def _print(report: dict[str, Any]) -> None:
    out = console()
    for group, facts in report.items():
        if group == "problems":
            continue
        out.print(group, style="bold")
        lines = {name: _readable(name, value) for name, value in facts.items() if name != "devices"}
        for number, device in enumerate(facts.get("devices", ())):
            memory = ", ".join(
                f"{format_bytes(value)} {name.removeprefix('memory bytes') or 'memory'}".strip()
                for name, value in device.items()
                if name.startswith("memory")
            )
            line = f"{device['platform']}:{device['id']} {device['kind']}"
            lines[f"device {number}"] = f"{line}, {memory}" if memory else line
        out.print(plain_cell(facts_text(lines, indent="  ")), end="", soft_wrap=True)
    out.print()
    for problem in report["problems"]:
        out.print(plain_cell(f"problem: {problem}"), style="red", soft_wrap=True)
    if not report["problems"]:
        out.print("no problems found", style="green")


def _readable(name: str, value: Any) -> str:
    return format_bytes(value) if "bytes" in name and isinstance(value, int) else str(value)
