"""How a model is cut over the devices of a place: the axes of its mesh."""

from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jaxinfer import parallel
from jaxinfer.models import ModelConfig, check_divides, fit_to_mesh
from jaxinfer.parallel import DATA
from jaxinfer.planning.chips import Place
from pallas_kernels import ahead_of_time


@dataclass(frozen=True)
class Layout:
    """Attributes:
    num_replicas: engines side by side, each with all weights and a cache of its own. axes: of the mesh of one replica,
      names with sizes.
    """

    num_replicas: int
    axes: tuple[tuple[str, int], ...]

    @property
    def num_devices(self) -> int:
        """Of one replica."""
        count = 1
        for _, size in self.axes:
            count *= size
        return count

    def mesh(self, place: Place) -> Mesh:
        """Devices of the chip to compile for. Raises RuntimeError without its compiler."""
        return ahead_of_time.slice_mesh(place.chip.name, self.axes)

    @property
    def shape_mesh(self) -> Any:
        """A mesh without devices, which is enough for counting."""
        return AbstractMesh(tuple(size for _, size in self.axes), tuple(name for name, _ in self.axes))

    def __str__(self) -> str:
        axes = [(DATA, self.num_replicas)] if self.num_replicas > 1 else []
        return ",".join(f"{name}={size}" for name, size in (*axes, *self.axes))


def layout_of(place: Place, *configs: ModelConfig, mesh: str | None = None) -> Layout:
    """The layout that `mesh` names; by default all devices cut the model, or as many as divide it, and the rest are
    replicas. Raises ValueError for axes that no rule knows, that are not all devices of the place, or that do not
    divide a model."""
    if mesh is None:
        sizes = [size for size in range(place.num_devices, 0, -1) if place.num_devices % size == 0]
        return next(layout for size in sizes if (layout := _model_parallel(place, size)) and _fits(layout, configs))
    axes = parallel.parse_mesh(mesh)
    replicas = axes.pop(DATA, 1)
    layout = Layout(replicas, tuple(axes.items()) or ((parallel.MODEL, 1),))
    if replicas * layout.num_devices != place.num_devices:
        count = replicas * layout.num_devices
        raise ValueError(f"mesh={mesh!r} has {count} devices, and {place.name} has {place.num_devices}")
    for config in configs:
        check(layout, config)
    return layout


def check(layout: Layout, config: ModelConfig) -> None:
    """Raises ValueError where the mesh cannot run the model."""
    fit_to_mesh(layout.shape_mesh, config)


def _model_parallel(place: Place, size: int) -> Layout:
    return Layout(place.num_devices // size, ((parallel.MODEL, size),))


def _fits(layout: Layout, configs: tuple[ModelConfig, ...]) -> bool:
    """Whether the mesh cuts the models without anything repeated or padded."""
    try:
        for config in configs:
            check_divides(layout.shape_mesh, config)
    except ValueError:
        return False
    return True
