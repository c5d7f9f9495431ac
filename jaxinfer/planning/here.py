"""The plan of an engine that runs: of the machine at hand, from the arrays that lie there."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.memory import available_bytes
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.planning.chips import Chip, Place, chip_of_kind
from jaxinfer.planning.plan import MemoryPlan, PlanRequest
from jaxinfer.planning.planner import plan_here
from pallas_kernels.ahead_of_time import Compilation


def plan_engine(name: str, engine: Engine) -> MemoryPlan:
    """What an engine holds and needs on its devices, with its pages as they are; its programs are compiled for shapes
    alone, or read from the compilation cache."""
    spec, device = engine.spec, engine.device
    chip = chip_of_kind(device.device_kind)
    title = f"{spec.num_devices} x {device.device_kind}"
    place = Place(title, chip or _unknown(device, spec.platform), spec.num_devices)
    axes = None if spec.mesh is None else ",".join(f"{axis}={size}" for axis, size in spec.mesh.shape.items())
    options = replace(spec.options, max_model_len=spec.max_model_len, max_seqs=spec.max_seqs)
    request = PlanRequest(name, spec.config, spec.params, place, options, axes, spec.draft)
    return plan_here(request, spec, compile_here, chip, _usable(device, spec))


def compile_here(function: Callable, arguments: tuple[Any, ...]) -> Compilation:
    """Compiles for the default device, or the devices of the arguments' shardings."""
    start = time.perf_counter()
    jitted: Any = function
    program = jitted.lower(*arguments).compile()
    return Compilation.of(jax.default_backend(), program, time.perf_counter() - start)


def _usable(device: Any, spec: EngineSpec) -> int:
    """What programs may use of a device, this engine's arrays included."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return limit
    return (available_bytes(device) or 0) + sum(spec.parts.values())


def _unknown(device: Any, platform: str) -> Chip:
    """A device that is not listed, with no rates."""
    return Chip(
        name=device.device_kind,
        title=device.device_kind,
        platform=platform,
        devices_per_chip=1,
        hbm_bytes=0,
        usable_bytes=0,
        hbm_bandwidth=0.0,
        flops={},
        link_bandwidth=0.0,
        chips_per_host=1,
        can_compile=False,
        device_kinds=(device.device_kind,),
        sources=(),
    )
