"""Which layers' weights stay in the host's memory, and specs of engines that keep them there."""

from dataclasses import replace
from typing import Literal

from jaxinfer.engine.memory import fixed_parts
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models.host_layers import move_layers_to_host, on_device
from jaxinfer.quantization.tree import num_bytes

MIN_CACHE_SHARE = 0.25  # of the device's memory, for keys and values, where "auto" decides
DISK = "disk"
Offload = int | Literal["auto", "disk"]


def layers_for_host(spec: EngineSpec, offload: Offload, total: int | None) -> tuple[int, ...]:
    """The layers that `offload` names, spread evenly, so that each is copied while several others compute.

    "auto" takes as few as leave room in `total` bytes of device memory (None: none are moved) for the other weights,
    activations and a cache of `MIN_CACHE_SHARE` of them, or for all that the slots can use if that is less.

    Args:
      spec: of the engine with all layers on the device; abstract.

    Raises ValueError for more layers than the model has, for a mesh of several devices, and for "disk", which has none
    on the host.
    """
    num_layers = spec.config.num_layers
    if not offload:
        return ()
    if spec.is_sharded:
        raise ValueError(f"offload={offload!r} is for one device, and the mesh has {spec.num_devices}")
    if offload == DISK:
        raise ValueError('offload="disk" reads layers from files on a CPU; offload="auto" keeps them in host memory')
    if offload != "auto":
        if offload > num_layers:
            raise ValueError(f"offload={offload}: the model has {num_layers} layers")
        return spread(offload, num_layers)
    if total is None:
        return ()
    counts = (spread(count, num_layers) for count in range(num_layers))
    return next(
        (layers for layers in counts if _fits(with_host_layers(spec, layers), total)), spread(num_layers, num_layers)
    )


def with_host_layers(spec: EngineSpec, layers: tuple[int, ...]) -> EngineSpec:
    """The spec of an engine with these layers on the host, of one without any."""
    return replace(spec, params=move_layers_to_host(spec.params, layers, spec.platform)) if layers else spec


def spread(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` of the layers, each the last of an equal run."""
    return tuple((number + 1) * num_layers // count - 1 for number in range(count))


def device_bytes(spec: EngineSpec) -> int:
    """Bytes of the device that are not for keys and values, estimated as `memory.plan_pool` does."""
    weights = num_bytes(on_device(spec.placed_params)) + num_bytes(spec.own_draft_params)
    return sum(fixed_parts(spec, weights).values())


def _fits(spec: EngineSpec, total: int) -> bool:
    sizes, num_pages = spec.pool_sizes, spec.options.num_pages
    cache = min(int(MIN_CACHE_SHARE * total), sizes.bytes_of(sizes.default))
    if num_pages is not None:
        cache = sizes.bytes_of(num_pages)
    cache = max(cache, sizes.bytes_of(sizes.smallest))
    return device_bytes(spec) + cache <= int(spec.options.memory_fraction * total)
