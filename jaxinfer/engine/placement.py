"""Places an engine's arrays: on one device, or on a mesh."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer import parallel
from jaxinfer.engine.programs.paged import slot_axes
from jaxinfer.engine.programs.work import Slots
from jaxinfer.sampling import SamplingBatch


@dataclass(frozen=True)
class DevicePlacement:
    """Sends arrays from the host to all devices of the mesh; to the default device where there is none."""

    mesh: Mesh | None = None

    @cached_property
    def _everywhere(self) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def is_of_this_process(self) -> bool:
        return self._everywhere is None or self._everywhere.is_fully_addressable

    def put(self, tree: Any) -> Any:
        """Puts host arrays on the device, or copies on every device of the mesh. All processes pass the same ones."""
        if self._everywhere is None:
            return jax.device_put(tree)
        if self.is_of_this_process:
            return jax.device_put(tree, self._everywhere)
        # `device_put` would compare them between processes, by way of the devices.
        return jax.tree.map(self._put_here, tree)

    def slots(self, slots: Slots, batch: SamplingBatch) -> tuple[Slots, SamplingBatch]:
        """Places what `init_slots` made, by the rules."""
        if self.mesh is None:
            return slots, batch
        rows = slots, batch
        return jax.tree.map(self.cut, rows, parallel.array_shardings(self.mesh, rows, slot_axes(*rows)))

    def cut(self, array: jax.Array, sharding: NamedSharding) -> jax.Array:
        """A small array that every process has, cut by a sharding."""
        if self.is_of_this_process:
            return jax.device_put(array, sharding)
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    def _put_here(self, leaf: Any) -> jax.Array:
        sharding = self._everywhere
        assert sharding is not None
        host = np.asarray(leaf)
        shards = [
            jax.device_put(host, device)
            for device in sorted(sharding.addressable_devices, key=lambda device: device.id)
        ]
        return jax.make_array_from_single_device_arrays(host.shape, sharding, shards)
