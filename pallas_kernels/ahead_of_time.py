"""Compiling for a TPU or GPU that is not at hand, with the real compilers.

`libtpu` holds the TPU compiler and `jax-cuda12-plugin` the GPU compiler; neither needs a device or a driver to compile
(extra `aot`). What comes back is a compiled program whose memory, FLOPs and HLO can be read, but which cannot run.
"""

import contextlib
import functools
import importlib.util
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import config
from jax.experimental import topologies
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The smallest slice of each generation that the TPU compiler accepts as a topology.
_TPU_TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
# The public figures of a chip, in the form of XLA's GpuTargetConfigProto (openxla/xla, target_config/specs).
_GPU_TARGET = """
gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth}
  l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 minor: 0 }} registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
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
CHIPS = (*_TPU_TOPOLOGIES, *_GPU_TARGETS)


@dataclass(frozen=True)
class Compilation:
    """A program compiled for `chip`, and what it took. `cost` is empty where the compiler gives none (GPU)."""

    chip: str
    program: Any
    seconds: float
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    cost: dict[str, float]


def missing_compiler(chip: str) -> str | None:
    """Why this installation cannot compile for `chip`; None when it can."""
    if chip not in CHIPS:
        raise ValueError(f"chip={chip!r} is not one of {', '.join(CHIPS)}")
    is_tpu = chip in _TPU_TOPOLOGIES
    module = "libtpu" if is_tpu else "jax_cuda12_plugin"
    if importlib.util.find_spec(module) is None:
        return f"no compiler for {chip}: pip install 'jaxinfer[aot]' ({module} is missing)"
    return None


@functools.cache
def mesh(chip: str, num_devices: int = 1, axis: str = "x") -> Mesh:
    """A mesh of one axis over devices of `chip`, of which a TPU's slice has four here and a GPU's one.

    Raises RuntimeError when its compiler is not installed, ValueError for more devices than there are.
    """
    reason = missing_compiler(chip)
    if reason is not None:
        raise RuntimeError(reason)
    if chip in _TPU_TOPOLOGIES:
        # Without these libtpu asks a metadata server which machine it is on, and refuses a second process.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        topology = topologies.get_topology_desc(platform="tpu", topology_name=_TPU_TOPOLOGIES[chip])
    else:
        with warnings.catch_warnings():
            # The plugin of one patch release earlier compiles the same programs.
            warnings.filterwarnings("ignore", message="JAX plugin jax_cuda12_plugin version")
            topology = topologies.get_topology_desc(
                chip, "cuda", target_config=_GPU_TARGET.format(**_GPU_TARGETS[chip]), topology="1x1x1"
            )
    if num_devices > len(topology.devices):
        raise ValueError(f"{num_devices} devices of {chip}: the topology compiled for has {len(topology.devices)}")
    return Mesh(np.array(topology.devices[:num_devices]), (axis,))


@contextlib.contextmanager
def as_if_on(chip: str, chip_mesh: Mesh | None = None) -> Iterator[NamedSharding]:
    """Tracing inside sees `chip`, one device of it unless `chip_mesh` has more; yields the sharding of an abstract
    argument that is whole on each."""
    chip_mesh = chip_mesh or mesh(chip)
    with jax.set_mesh(chip_mesh):
        yield NamedSharding(chip_mesh, PartitionSpec())


def compile_for(
    chip: str,
    function: Callable,
    *arguments,
    donate_argnums: tuple[int, ...] = (),
    chip_mesh: Mesh | None = None,
) -> Compilation:
    """Compiles `function` for one `chip`, or for the devices of `chip_mesh`.

    `arguments` are pytrees of arrays or `jax.ShapeDtypeStruct`s, and whatever a function that is jitted already takes
    as static; such a function keeps its own `donate_argnums`. The layout of an abstract array with a
    `jax.experimental.layout.Format` is kept. On a mesh an argument without a `NamedSharding` is whole
    on each device. Figures are those of one device. Raises RuntimeError without the chip's compiler, and whatever the
    compiler raises (out of VMEM, a layout it cannot lower).
    """
    with as_if_on(chip, chip_mesh) as whole:

        def abstract(leaf):
            if not hasattr(leaf, "shape"):
                return leaf
            sharding = leaf.sharding if isinstance(getattr(leaf, "sharding", None), NamedSharding) else whole
            layout = getattr(getattr(leaf, "format", None), "layout", None)
            place = sharding if layout is None else Format(layout, sharding)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

        jitted: Any = function if hasattr(function, "lower") else jax.jit(function, donate_argnums=donate_argnums)
        start = time.perf_counter()
        lowered = jitted.lower(*jax.tree.map(abstract, arguments))
        # What was compiled without a device cannot be read back from the compilation cache, so it is never written.
        with config.persistent_cache_min_compile_time_secs(math.inf):
            program = lowered.compile()
        seconds = time.perf_counter() - start
    memory: Any = program.memory_analysis()
    return Compilation(
        chip=chip,
        program=program,
        seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        cost=dict(program.cost_analysis() or {}),
    )
