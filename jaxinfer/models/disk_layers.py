"""Layers whose weights stay in the files of a checkpoint, and are read by the programs of a CPU, one layer at a time.

The parameters then have one more entry, `disk_layers`: a `DiskLayers`, a node without arrays, so that it is a constant
of the programs. They call back to read a layer before it runs. Vectors stay with `layers`, and so does all but the
experts of a layer that has some, as with `host_layers`.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any

import jax
import numpy as np

from jaxinfer.quantization.tree import num_bytes

DISK_LAYERS = "disk_layers"
Params = dict[str, Any]
ReadWeight = Callable[[tuple[str, ...]], Any]  # of a parameter by its path: NumPy arrays


class LayerReader:
    """Reads layers, each while the one before it computes. Thread-safe.

    Args:
      shapes: of the weights that are read, by layer; abstract.
      read: thread-safe. close: called when no layer will be read any more.
    """

    def __init__(self, shapes: Mapping[int, Params], read: ReadWeight, close: Callable[[], None]):
        self.shapes = dict(shapes)
        self._read, self._close = read, close
        self._paths = {layer: _paths(layer, moved) for layer, moved in self.shapes.items()}
        self._all_paths = {path for paths in self._paths.values() for path in paths}
        self._lock, self._thread = Lock(), ThreadPoolExecutor(1, thread_name_prefix="disk-layers")
        layers = list(self.shapes)
        self._after = dict(zip(layers, [*layers[1:], *layers[:1]], strict=True))  # what was read after each of them
        self._last: int | None = None
        self._ahead: tuple[int, Future[list[np.ndarray]]] | None = None

    @classmethod
    def of(cls, shapes: Mapping[int, Params], checkpoint: Any) -> "LayerReader":
        """A reader of the layers of an open `checkpoints_convert.Checkpoint`, which it closes."""

        def read(path: tuple[str, ...]) -> Any:
            tensor = checkpoint.read_param(path)
            return tensor[0] if isinstance(tensor, list) else tensor

        return cls(shapes, read, checkpoint.close)

    def takes(self, path: Sequence[str]) -> bool:
        """True if a parameter is read by programs, and not before."""
        return tuple(path) in self._all_paths

    def read(self, layer: int) -> list[np.ndarray]:
        """The arrays of a layer, in the order of its pytree; begins to read the one that came after it the last time.

        Raises what `read` of the constructor raises."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
            if self._last is not None:
                self._after[self._last] = layer
            self._last = layer
        is_read = ahead is not None and ahead[0] == layer
        arrays = ahead[1].result() if is_read else self._arrays(layer)  # pyright: ignore[reportOptionalSubscript]
        with self._lock:
            following = self._after[layer]
            self._ahead = following, self._thread.submit(self._arrays, following)
        return arrays

    def weight(self, path: tuple[str, ...]) -> Any:
        """One parameter, as NumPy arrays."""
        return self._read(path)

    def close(self) -> None:
        """Ends the thread, then the files."""
        self._thread.shutdown(cancel_futures=True)
        self._ahead = None
        self._close()

    def _arrays(self, layer: int) -> list[np.ndarray]:
        return [np.asarray(leaf) for path in self._paths[layer] for leaf in jax.tree.leaves(self._read(path))]


@jax.tree_util.register_static
@dataclass(frozen=True)
class DiskLayers:
    """The parameters of a model's layers that its programs read.

    Attributes:
      reader: shared by the models of some of its layers. numbers: of each such layer here, and in the reader.
    """

    reader: LayerReader
    numbers: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, reader: LayerReader) -> "DiskLayers":
        """All layers of a reader."""
        return cls(reader, tuple((layer, layer) for layer in reader.shapes))

    @property
    def shapes(self) -> dict[int, Params]:
        """The abstract weights by layer."""
        return {number: self.reader.shapes[stored] for number, stored in self.numbers}

    def take(self, layers: Sequence[int]) -> "DiskLayers":
        """Those of these layers, numbered from 0."""
        stored = dict(self.numbers)
        return DiskLayers(self.reader, tuple((new, stored[old]) for new, old in enumerate(layers) if old in stored))

    def arriving(self, layer: int, after: jax.Array) -> Params:
        """A layer's weights in a program that is traced, read once `after`, a scalar, is known."""
        stored = dict(self.numbers)[layer]
        shapes, structure = jax.tree.flatten(self.reader.shapes[stored])
        reader = self.reader
        with jax.named_scope(f"from_disk.{layer}"):
            leaves = jax.pure_callback(lambda _: reader.read(stored), shapes, after)
        return jax.tree.unflatten(structure, leaves)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays that each pass over the layers makes."""
        return sum(num_bytes(moved) for moved in self.shapes.values())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory while a program runs: a layer in the program, and as NumPy arrays, which have one 4-bit
        number a byte, that layer and the next."""
        return max((num_bytes(moved) + 2 * _numpy_bytes(moved) for moved in self.shapes.values()), default=0)


def _paths(layer: int, moved: Params) -> list[tuple[str, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(moved, is_leaf=lambda node: not isinstance(node, dict))
    return [("layers", str(layer), *(key.key for key in path)) for path, _ in leaves]


def _numpy_bytes(moved: Params) -> int:
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(moved))
