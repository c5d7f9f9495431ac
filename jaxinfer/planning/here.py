"""The plan of an engine that runs: of the machine at hand, from the arrays that lie there."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.experimental.layout import Format

from jaxinfer.engine.memory import available_bytes
from jaxinfer.engine.paged import PagedEngine
from jaxinfer.planning.chips import Chip, Place, chip_of_kind
from jaxinfer.planning.plan import MemoryPlan, PlanRequest
from jaxinfer.planning.planner import plan_here
from jaxinfer.planning.subject import Subject
from jaxinfer.quantization.on_gpu import is_laid_out
from jaxinfer.quantization.tree import is_quantized
from jaxinfer.speculative import ModelDraft
from pallas_kernels.ahead_of_time import Compilation


def plan_engine(name: str, engine: PagedEngine) -> MemoryPlan:
    """What an engine holds and needs on its devices, with its pages as they are; its programs are compiled for shapes
    alone, or read from the compilation cache."""
    subject = subject_of(name, engine)
    mesh, device = engine.model.mesh, engine.device
    num_devices = 1 if mesh is None else mesh.size
    chip = chip_of_kind(device.device_kind)
    place = Place(f"{num_devices} x {device.device_kind}", chip or _unknown(device, subject.platform), num_devices)
    axes = None if mesh is None else ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    request = PlanRequest(name, engine.config, subject.params, place, subject.options, axes, subject.draft)
    return plan_here(request, subject, compile_here, chip, _usable(device, subject))


def subject_of(name: str, engine: PagedEngine) -> Subject:
    """What an engine runs, as shapes: its parameters as its programs take them, its draft, its pages."""
    params = _shapes(jax.tree.unflatten(engine.model.structure, engine.weights))
    draft = None if engine.speculation is None else engine.speculation.draft
    if isinstance(draft, ModelDraft):
        draft = replace(draft, params=_shapes(draft.params))
    options = replace(engine.options, num_pages=engine.memory.num_pages, page_size=engine.page_size)
    platform = "gpu" if engine.device.platform in ("cuda", "rocm") else engine.device.platform
    return Subject(name, engine.config, params, options, platform, engine.model.mesh, draft)


def compile_here(function: Callable, arguments: tuple[Any, ...]) -> Compilation:
    """Compiles for the default device, or the devices of the arguments' shardings."""
    start = time.perf_counter()
    jitted: Any = function
    program = jitted.lower(*arguments).compile()
    return Compilation.of(jax.default_backend(), program, time.perf_counter() - start)


def _usable(device: Any, subject: Subject) -> int:
    """What programs may use of a device, this engine's arrays included."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return limit
    return (available_bytes(device) or 0) + sum(subject.parts.values())


def _shapes(params: Any) -> Any:
    """With the layouts that a GPU's kernels want."""

    def shape(array: jax.Array, place: Any = None) -> jax.ShapeDtypeStruct:
        is_cut = len(array.sharding.device_set) > 1
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place or (array.sharding if is_cut else None))

    def of_leaf(leaf: Any) -> Any:
        if not is_quantized(leaf) or jax.default_backend() != "gpu" or not is_laid_out(leaf):
            return jax.tree.map(shape, leaf)
        place = Format(leaf.values.format.layout, leaf.values.sharding)
        return replace(jax.tree.map(shape, leaf), values=shape(leaf.values, place))

    return jax.tree.map(of_leaf, params, is_leaf=is_quantized)


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
