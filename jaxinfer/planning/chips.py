"""Places of one or several chips; how a place shards a model."""

import math
import re
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jaxinfer import parallel
from jaxinfer.checks import did_you_mean
from jaxinfer.chips import Chip, chips
from jaxinfer.models import ModelConfig, check_divides, fit_to_mesh
from jaxinfer.parallel import DATA
from pallas_kernels import ahead_of_time

MAX_GPUS = 8


@dataclass(frozen=True)
class Place:
    """`num_chips` chips of one kind that compute together. `name` is as the user wrote it, such as "v6e:2x4"."""

    name: str
    chip: Chip
    num_chips: int

    @property
    def num_devices(self) -> int:
        """JAX devices."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def device_bytes(self) -> int:
        """Usable memory of one device."""
        return self.chip.usable_bytes // self.chip.devices_per_chip


def parse_place(text: str) -> Place:
    """Parses "v6e:2x2" (a slice of TPUs), "h200x8" (GPUs) or a chip's name (one chip).

    Raises ValueError for a chip that is not listed, with the nearest name, and for an impossible count.
    """
    match = re.fullmatch(r"(?P<slice>.+):(?P<bounds>\d+(x\d+)*)|(?P<several>.+)x(?P<count>\d+)|(?P<one>.+)", text)
    if match is None:
        raise ValueError("no chips are named: write v6e:2x2 or h200x1")
    if text in chips():
        name, num_chips = text, 1
    elif match["slice"]:
        name, num_chips = match["slice"], math.prod(map(int, match["bounds"].split("x")))
    elif match["several"]:
        name, num_chips = match["several"], int(match["count"])
    else:
        name, num_chips = text, 1
    if name not in chips():
        hint = did_you_mean(name, chips(), otherwise=f": known are {', '.join(chips())}")
        raise ValueError(f"no chip is called {name!r}{hint}")
    chip = chips()[name]
    if match["slice"] and chip.platform == "gpu":
        raise ValueError(f"{text!r}: GPUs are written {name}x{num_chips}")
    if num_chips < 1 or (chip.platform == "gpu" and num_chips > MAX_GPUS):
        raise ValueError(f"{text!r}: {num_chips} chips; GPUs are planned for from 1 to {MAX_GPUS}, the GPUs of a host")
    return Place(text, chip, num_chips)


def larger_places(place: Place) -> list[Place]:
    """Places with more chips of the same kind, the smallest first."""
    chip = place.chip
    if chip.platform == "gpu":
        return [Place(f"{chip.name}x{n}", chip, n) for n in (2, 4, 8) if n > place.num_chips]
    slices = [(bounds, math.prod(map(int, bounds.split("x")))) for bounds in ahead_of_time.slices(chip.name)]
    return [Place(f"{chip.name}:{bounds}", chip, n) for bounds, n in slices if n > place.num_chips]


@dataclass(frozen=True)
class Layout:
    """How a place runs a model.

    Attributes:
      num_replicas: engines side by side, each with all weights and its own cache.
      axes: names and sizes of the mesh axes of one replica.
    """

    num_replicas: int
    axes: tuple[tuple[str, int], ...]

    @property
    def num_devices(self) -> int:
        """Devices of one replica."""
        return math.prod(size for _, size in self.axes)

    def mesh(self, place: Place) -> Mesh:
        """A mesh of devices to compile for. Raises RuntimeError if the chip's compiler is not installed."""
        return ahead_of_time.slice_mesh(place.chip.name, self.axes)

    @property
    def shape_mesh(self) -> Any:
        """A mesh without devices, for counting."""
        return AbstractMesh(tuple(size for _, size in self.axes), tuple(name for name, _ in self.axes))

    def __str__(self) -> str:
        axes = [(DATA, self.num_replicas)] if self.num_replicas > 1 else []
        return ",".join(f"{name}={size}" for name, size in (*axes, *self.axes))


def layout_of(place: Place, *configs: ModelConfig, mesh: str | None = None) -> Layout:
    """The layout that `mesh` names; by default the model is sharded over as many devices as divide it, and the rest are
    replicas. Raises ValueError for unknown axes, axes that do not use all devices, or that do not divide a model."""
    if mesh is None:
        sizes = [size for size in range(place.num_devices, 0, -1) if place.num_devices % size == 0]
        layouts = (Layout(place.num_devices // size, ((parallel.MODEL, size),)) for size in sizes)
        return next(layout for layout in layouts if _fits(layout, configs))
    axes = parallel.parse_mesh(mesh)
    replicas = axes.pop(DATA, 1)
    layout = Layout(replicas, tuple(axes.items()) or ((parallel.MODEL, 1),))
    if replicas * layout.num_devices != place.num_devices:
        count = replicas * layout.num_devices
        raise ValueError(f"mesh={mesh!r} has {count} devices, and {place.name} has {place.num_devices}")
    for config in configs:
        fit_to_mesh(layout.shape_mesh, config)
    return layout


def _fits(layout: Layout, configs: tuple[ModelConfig, ...]) -> bool:
    """Tells if the mesh divides the models without repeating or padding."""
    try:
        for config in configs:
            check_divides(layout.shape_mesh, config)
    except ValueError:
        return False
    return True
