"""Ahead-of-time compilation for TPUs and GPUs that are not attached.

`libtpu` holds the TPU compiler, `jax-cuda12-plugin` and `jax-cuda13-plugin` the GPU compiler; none needs a device or a
driver to compile (extra `aot`). The memory, FLOPs and HLO of the compiled program can be read; the program cannot run.
"""

import contextlib
import functools
import importlib.util
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import config
from jax._src.interpreters import pxla
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import topologies
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Slices that are offered, smallest first. The TPU compiler accepts none smaller than the first.
_FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SOLID = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
_TPU_TOPOLOGIES = {"v4": _SOLID, "v5e": _FLAT, "v5p": _SOLID, "v6e": _FLAT, "tpu7x": _SOLID}
_TPU_OPTIONS = {"v4": {"chip_config_name": "megacore"}}  # both cores of a chip as one device
# The public figures of a chip, in the form of XLA's GpuTargetConfigProto (openxla/xla, target_config/specs).
_GPU_TARGET = """
gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth}
  l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 minor: 0 }} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "{cuda}" runtime_version: "{cuda}" compile_time_toolkit_version: "{cuda}" }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 patch: 0 }} device_description_str: "{name}"
"""
_GPU_TARGETS = {
    "h100": {
        "name": "NVIDIA H100 80GB HBM3",
        "bandwidth": 3_352_320_000_000,
        "l2": 52_428_800,
        "clock": 1.98,
        "memory": 84_942_979_072,
    },
    "h200": {
        "name": "NVIDIA H200",
        "bandwidth": 4_800_000_000_000,
        "l2": 62_914_560,
        "clock": 1.98,
        "memory": 150_000_000_000,
    },
}
# Plugins that hold the GPU compiler, newest first, and the version of CUDA, driver and runtime, that a program is
# compiled for. Without one XLA takes the oldest, and plans other launches than on a chip: calls of kernels, loops and
# conditionals are in no graph.
_GPU_PLUGINS = {"jax_cuda13_plugin": "13.0.0", "jax_cuda12_plugin": "12.9.0"}
HOST_KINDS = ("pinned_host", "unpinned_host")  # of memory
CHIPS = (*_TPU_TOPOLOGIES, *_GPU_TARGETS)


@dataclass(frozen=True)
class Compilation:
    """A program compiled for `chip`; bytes are those of one device. `cost` is XLA's cost analysis, empty on GPUs."""

    chip: str
    program: Any
    seconds: float
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    cost: dict[str, float]
    code_bytes: int = 0

    @classmethod
    def of(cls, chip: str, program: Any, seconds: float) -> "Compilation":
        """Reads the compiler's memory and cost analysis of a compiled program."""
        memory: Any = program.memory_analysis()
        return cls(
            chip=chip,
            program=program,
            seconds=seconds,
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            aliased_bytes=memory.alias_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            cost=dict(program.cost_analysis() or {}),
            code_bytes=memory.generated_code_size_in_bytes,
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of device memory that the program needs while it runs."""
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes + self.code_bytes


def slices(chip: str) -> tuple[str, ...]:
    """Slices of a TPU generation that programs can be compiled for, smallest first; () for other chips."""
    return _TPU_TOPOLOGIES.get(chip, ())


def missing_compiler(chip: str) -> str | None:
    """The reason why this installation cannot compile for `chip`, or None."""
    if chip not in CHIPS:
        raise ValueError(f"chip={chip!r} is not one of {', '.join(CHIPS)}")
    modules = ["libtpu"] if chip in _TPU_TOPOLOGIES else list(_GPU_PLUGINS)
    if not any(map(importlib.util.find_spec, modules)):
        return f"no compiler for {chip}: {' or '.join(modules)} is not installed"
    return None


def missing_compilers(chips: Iterable[str]) -> list[str]:
    """The reasons why this installation cannot compile for some of the chips; [] if it can for all."""
    return [reason for chip in dict.fromkeys(chips) if (reason := missing_compiler(chip)) is not None]


def mesh(chip: str, num_devices: int = 1, axis: str = "x") -> Mesh:
    """A mesh of one axis over devices of `chip`; raises as `slice_mesh`."""
    return slice_mesh(chip, ((axis, num_devices),))


@functools.cache
def slice_mesh(chip: str, axes: tuple[tuple[str, int], ...]) -> Mesh:
    """A mesh of (name, size) axes over devices of `chip`: of the smallest TPU slice with as many, or of one GPU host.

    Raises RuntimeError if the compiler is not installed, ValueError for more devices than the largest slice has.
    """
    reason = missing_compiler(chip)
    if reason is not None:
        raise RuntimeError(reason)
    num_devices = math.prod(size for _, size in axes)
    devices = _tpu_devices(chip, num_devices) if chip in _TPU_TOPOLOGIES else _gpu_devices(chip, num_devices)
    return Mesh(np.array(devices[:num_devices]).reshape([size for _, size in axes]), tuple(name for name, _ in axes))


def _tpu_devices(chip: str, num_devices: int) -> list[Any]:
    # Otherwise libtpu queries a metadata server for its machine, and refuses to load in a second process.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices: list[Any] = []
    for bounds in _TPU_TOPOLOGIES[chip]:
        devices = topologies.get_topology_desc(f"{chip}:{bounds}", "tpu", **_TPU_OPTIONS.get(chip, {})).devices
        if len(devices) >= num_devices:
            return devices
    raise ValueError(f"{num_devices} devices of {chip}: the largest slice compiled for has {len(devices)}")


def _gpu_devices(chip: str, num_devices: int) -> list[Any]:
    with warnings.catch_warnings():
        # A plugin one patch release older compiles the same programs.
        warnings.filterwarnings("ignore", message="JAX plugin jax_cuda1[23]_plugin version")
        cuda = next(version for plugin, version in _GPU_PLUGINS.items() if importlib.util.find_spec(plugin))
        target = _GPU_TARGET.format(**_GPU_TARGETS[chip], cuda=cuda)
        return topologies.get_topology_desc(
            f"{chip}x{num_devices}", "cuda", target_config=target, topology=f"1x1x{num_devices}"
        ).devices


@contextlib.contextmanager
def as_if_on(chip: str, chip_mesh: Mesh | None = None) -> Iterator[NamedSharding]:
    """Traces for one `chip`, or for the devices of `chip_mesh`; yields the sharding of replicated arguments."""
    chip_mesh = chip_mesh or mesh(chip)
    with jax.set_mesh(chip_mesh):
        yield NamedSharding(chip_mesh, PartitionSpec())


def compile_for(
    chip: str,
    function: Callable,
    *arguments,
    donate_argnums: tuple[int, ...] = (),
    chip_mesh: Mesh | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Compilation:
    """Compiles `function` for one `chip`, or for the devices of `chip_mesh`.

    `arguments` are pytrees of arrays or `jax.ShapeDtypeStruct`s, and the static arguments of a function that is jitted
    already; such a function keeps its own `donate_argnums`. The layout of an abstract array with a
    `jax.experimental.layout.Format` is kept, and so is the host's memory as its place. Arguments without a
    `NamedSharding` are replicated over the mesh. `compiler_options` are added to the function's own.
    Raises RuntimeError if the chip's compiler is not installed, and the compiler's own errors (out of VMEM, a layout
    that it cannot lower).
    """
    with as_if_on(chip, chip_mesh) as whole:

        def abstract(leaf):
            if not hasattr(leaf, "shape"):
                return leaf
            sharding = getattr(leaf, "sharding", None)
            if not isinstance(sharding, NamedSharding):
                sharding = whole if (kind := _host_kind(leaf)) is None else whole.with_memory_kind(kind)
            layout = getattr(getattr(leaf, "format", None), "layout", None)
            place = sharding if layout is None else Format(layout, sharding)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

        jitted: Any = function if hasattr(function, "lower") else jax.jit(function, donate_argnums=donate_argnums)
        start = time.perf_counter()
        host = [_host_kind(leaf) for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "shape")]
        with _host_arguments(any(host)):
            lowered = jitted.lower(*jax.tree.map(abstract, arguments))
        if any(host) and chip in _GPU_TARGETS:
            _mark_host_arguments(lowered, host)
        # A program compiled without its device cannot be read back from the compilation cache: none is written.
        with config.persistent_cache_min_compile_time_secs(math.inf):
            program = lowered.compile(dict(compiler_options or {}))
        seconds = time.perf_counter() - start
    return Compilation.of(chip, program, seconds)


def _host_kind(leaf: Any) -> str | None:
    """The kind of the host's memory that an array lies in, None for one in the device's."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return kind if kind in HOST_KINDS else None


@contextlib.contextmanager
def _host_arguments(has_some: bool) -> Iterator[None]:
    """While lowering: copies from the host's memory are kept. The GPU that is not attached knows of no memories, from
    which JAX concludes that there is only one."""
    if not has_some:
        yield
        return
    with mock.patch.object(pxla, "are_all_shardings_default_mem_kind", return_value=False):
        yield


def _mark_host_arguments(lowered: Any, kinds: Sequence[str | None]) -> None:
    """Writes the places of a program's arguments into its module, as JAX does for a device that is attached."""
    module = lowered.compiler_ir()
    kept = sorted(lowered._lowering.compile_args["kept_var_idx"])  # unused arguments are left out
    functions = (op for op in module.body.operations if "sym_name" in op.attributes)
    main = next(op for op in functions if ir.StringAttr(op.attributes["sym_name"]).value == "main")
    with module.context:
        marked = []
        for index, attributes in zip(kept, main.arg_attrs, strict=True):
            known = {attribute.name: attribute.attr for attribute in attributes}
            if (kind := kinds[index]) is not None:
                known["mhlo.memory_kind"] = ir.StringAttr.get(kind)
            marked.append(ir.DictAttr.get(known))
        main.arg_attrs = ir.ArrayAttr.get(marked)
