"""Host arrays to devices: whole to one, or each part to the devices of a mesh that hold it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from checkpoints_convert.arrays import aligned
from checkpoints_convert.parts import Bounds, cut, owned_parts
from checkpoints_convert.source import ParamPath, param_shapes
from jaxinfer.models import ModelConfig, fit_to_mesh, leaf_shardings, parameter_shardings
from jaxinfer.models.sharding import leaves_by_path
from jaxinfer.quantization import QuantizedArray

Convert = Callable[[ParamPath, Any], Any]


class OnDefaultDevice:
    """The default device holds everything."""

    parts: Mapping[ParamPath, Sequence[Bounds]] = {}

    def __init__(self, convert: Convert | None = None):
        self._convert = convert

    def __call__(self, path: ParamPath, found: list[np.ndarray] | QuantizedArray) -> Any:
        leaf = jax.device_put(found if isinstance(found, QuantizedArray) else found[0])
        return leaf if self._convert is None else self._convert(path, leaf)


class OnMesh:
    """Each device of a mesh holds what the rules of `jaxinfer.parallel` give it.

    What has to be repeated or padded first goes whole to every device, one parameter at a time.

    Attributes:
      parts: of every parameter, were it dense, the different parts that `devices` read; what this process reads.

    Raises ValueError, as `jaxinfer.models.fit_to_mesh`, for a model that the mesh cannot run.
    """

    def __init__(
        self,
        mesh: Mesh,
        config: ModelConfig,
        convert: Convert | None = None,
        *,
        devices: Iterable[Any] | None = None,
    ):
        """`devices` are those of this process unless given."""
        self._devices = list(mesh.local_devices if devices is None else devices)
        self._convert = convert
        self._begun: dict[ParamPath, list[list[jax.Array]]] = {}  # parts on their devices, of which more come
        self._shapes = param_shapes(config)
        self._fit = fit_to_mesh(mesh, config)
        self.shardings = leaves_by_path(parameter_shardings(mesh, config, whole_if_uneven=True))
        self.parts = {path: list(self._owned(self.shardings[path], shape)) for path, shape in self._shapes.items()}

    def __call__(self, path: ParamPath, found: list[np.ndarray] | QuantizedArray) -> Any:
        sharding = self.shardings[path]
        if isinstance(found, QuantizedArray):
            leaf: Any = jax.tree.map(self._whole, found, leaf_shardings(found, sharding))
        else:
            owned = self._owned(sharding, self._shapes[path])
            shards = self._begun.pop(path, [])
            shards += _on_devices(found, list(owned.values())[len(shards) :])
            if len(shards) < len(owned):
                self._begun[path] = jax.block_until_ready(shards)
                return None
            leaf = _assembled(shards, sharding, self._shapes[path])
        if self._convert is not None:
            leaf = self._convert(path, leaf)
        # What a conversion makes lies where its compiler put it.
        return self._fit.place_leaf(path, leaf)

    def _owned(self, sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Bounds, list]:
        assert isinstance(sharding.mesh, Mesh)
        return owned_parts(sharding.mesh, sharding.spec, shape, self._devices)

    def _whole(self, array: np.ndarray, sharding: NamedSharding) -> jax.Array:
        owned = self._owned(sharding, array.shape)
        parts = [aligned(cut(np.asarray(array), bounds)) for bounds in owned]
        return _assembled(_on_devices(parts, list(owned.values())), sharding, array.shape)


def _on_devices(parts: Sequence[np.ndarray], devices: Sequence[Sequence[Any]]) -> list[list[jax.Array]]:
    """Each part on its devices."""
    return [[jax.device_put(part, device) for device in own] for part, own in zip(parts, devices, strict=False)]


def _assembled(shards: list[list[jax.Array]], sharding: NamedSharding, shape: tuple[int, ...]) -> jax.Array:
    return jax.make_array_from_single_device_arrays(shape, sharding, [shard for own in shards for shard in own])
