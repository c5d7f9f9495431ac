"""An open checkpoint of any form: its configuration, and its parameters, or parts of them, as host arrays."""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import bos_token_id, companion_files, eos_token_ids, generation_config
from checkpoints_convert.formats.kv_scales import LayerKVScales
from checkpoints_convert.host_arrays import CastStats, Read, aligned, read_tensor
from jaxinfer.files import Closable
from jaxinfer.models import ModelConfig, abstract_params, keeps_float32
from jaxinfer.quantization import QuantizedArray

# [start, stop) along every axis of a parameter.
Bounds = tuple[tuple[int, int], ...]


def full_bounds(shape: Sequence[int]) -> Bounds:
    """The bounds of a whole array."""
    return tuple((0, size) for size in shape)


def shape_of(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in bounds)


def size_of(bounds: Bounds) -> int:
    """Number of values in a part."""
    return math.prod(shape_of(bounds))


def slices_of(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(*pair) for pair in bounds)


def cut(array: np.ndarray, bounds: Bounds) -> np.ndarray:
    """A part of an array, as a view."""
    return array[(..., *slices_of(bounds))]


def part_of(spec: PartitionSpec, axes: Mapping[str, int], shape: Sequence[int], place: Sequence[int]) -> Bounds:
    """The part of an array on one device.

    Args:
      spec: how the array is sharded. axes: size of each mesh axis, in the mesh's order. place: the device's index along
        each of them.

    Raises ValueError for an axis of the array that cannot be cut into equal parts.
    """
    index = dict(zip(axes, place, strict=True))
    bounds = []
    for axis, size in enumerate(shape):
        entry = spec[axis] if axis < len(spec) else None
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        count, number = 1, 0
        for name in names:
            count, number = count * axes[name], number * axes[name] + index[name]
        if size % count:
            raise ValueError(f"axis {axis} of shape {tuple(shape)} cannot be cut into {count} equal parts")
        bounds.append((size // count * number, size // count * (number + 1)))
    return tuple(bounds)


def owned_parts(mesh: Mesh, spec: PartitionSpec, shape: Sequence[int], devices: Iterable[Any]) -> dict[Bounds, list]:
    """The distinct parts of an array on some devices of a mesh, each with its devices, in the array's order."""
    wanted = set(devices)
    owned: dict[Bounds, list] = {}
    for place, device in np.ndenumerate(mesh.devices):
        if device in wanted:
            owned.setdefault(part_of(spec, mesh.shape, shape, place), []).append(device)
    return dict(sorted(owned.items()))


DTYPES = ("float32", "bfloat16", "float16")
# More than the cores, since some wait for the disk or the object store while others transpose.
NUM_THREADS = 8
ParamPath = tuple[str, ...]  # the keys that lead to a parameter, such as ("layers", "0", "mlp_norm", "weight")
DRAFT_INDEX: ParamPath = ("draft_index",)  # of a head that drafts
HostParam = list[np.ndarray] | QuantizedArray  # parts of a dense parameter, or a quantized one
# True for a dense parameter that keeps the 16-bit dtype in which it is stored, whatever the configuration's dtype is.
Keeps16Bits = Callable[[ParamPath], bool]


class Checkpoint(Closable, ABC):
    """An open checkpoint, whose parameters are planned and can be read.

    A unit is what is read, written and resumed at once: one layer, or one parameter outside the layers.

    Attributes:
      directory: of its files. config: its dtype is that of every dense array read, but for those of `keeps_16_bits`; a
        `QuantizedArray` keeps the dtypes of the file.
      kv_scales: scales of an 8-bit key-value cache, by layer; () if the checkpoint has none.
      quantization: the quantized format that the files declare, such as awq; None for plain weights, and in jaxinfer's
        own format.
      is_headless: the model has no head and makes vectors only.
      requantize: how weights of a GGUF file are rounded again, as of `load`; None elsewhere.
      requantize_errors: relative error (root of the mean square) of the weights that were rounded again so far.
      keeps_16_bits: by default none does.
      cast_errors: the largest relative error of the casts so far, by parameter, when opened to measure them.
    """

    directory: Path
    config: ModelConfig
    kv_scales: tuple[LayerKVScales, ...] = ()
    quantization: str | None = None
    is_headless = False
    requantize: str | None = None
    keeps_16_bits: Keeps16Bits | None = None
    _quantized: Mapping[ParamPath, Any]  # parameters that `read_param` returns quantized, and how they are stored

    def __init__(self, directory: Path, *, measure_casts: bool = False):
        self.directory = directory
        self._measure_casts = measure_casts
        self.cast_errors: dict[str, float] = {}
        self.requantize_errors: dict[str, float] = {}
        self._executor: ThreadPoolExecutor | None = None

    def check_head(self) -> None:
        """Raises CheckpointError for a model without a head, which no written checkpoint could be told to be."""
        if self.is_headless:
            raise CheckpointError(self.directory, "its model has no head: only models that generate are written")

    @abstractmethod
    def read_param(self, path: ParamPath, parts: Sequence[Bounds] = ()) -> HostParam:
        """A parameter as host arrays: the given parts of a dense one (the whole if none are given), or a quantized one
        as a whole `QuantizedArray`. Thread-safe.

        Raises CheckpointError, naming file and tensor."""

    def split(self, path: ParamPath, parts: Sequence[Bounds], limit: int) -> list[list[Bounds]]:
        """The parts of a parameter in runs of at most `limit` bytes, unless that would read more bytes in all."""
        return [list(parts)]

    def read(self, unit: str) -> Iterator[tuple[ParamPath, np.ndarray | QuantizedArray]]:
        """The parameters of a unit, whole. Raises as `read_param`."""
        for path in self.units()[unit]:
            yield path, self.read_leaf(path)

    def read_leaf(self, path: ParamPath) -> np.ndarray | QuantizedArray:
        """A whole parameter. Raises as `read_param`."""
        param = self.read_param(path)
        return param if isinstance(param, QuantizedArray) else param[0]

    @abstractmethod
    def quantized(self) -> dict[ParamPath, str]:
        """The parameters that are quantized in the files, even if they are read dense, each with the name of one of its
        tensors."""

    @property
    def is_dequantized(self) -> bool:
        """True if quantized weights are read in floating point."""
        return self.requantize == "dense"

    @abstractmethod
    def fingerprint(self) -> str:
        """A digest that changes when the files, or the options they are read with, change. Reads no weights."""

    def units(self) -> dict[str, dict[ParamPath, tuple[int, ...]]]:
        """Unit names, in reading order, with the shapes of their parameters."""
        units: dict[str, dict[ParamPath, tuple[int, ...]]] = {}
        for path, shape in param_shapes(self.config).items():
            units.setdefault(unit_of(path), {})[path] = shape
        return units

    def num_bytes(self, unit: str | None = None) -> int:
        """Bytes of the parameters of a unit, or of all."""
        paths = param_shapes(self.config) if unit is None else self.units()[unit]
        return sum(map(self.param_bytes, paths))

    def param_bytes(self, path: ParamPath) -> int:
        """Bytes of one parameter; of a quantized one, as stored in the checkpoint."""
        return math.prod(param_shapes(self.config)[path]) * numpy_dtype(self.dense_dtype(path)).itemsize

    def dense_dtype(self, path: ParamPath) -> str:
        """The dtype in which a dense parameter is read."""
        if self.keeps_16_bits is not None and self.keeps_16_bits(path):
            stored = self.stored_dtype(path)
            if stored in ("bfloat16", "float16"):
                return stored
        return param_dtype(self.config, path)

    def stored_dtype(self, path: ParamPath) -> str | None:
        """The dtype of the tensors of a dense parameter that is read as it is stored; None where they differ, or where
        values change."""
        return None

    def host_bytes(self, path: ParamPath, parts: Sequence[Bounds] = ()) -> int:
        """Bytes of host memory that `read_param` takes, beside blocks in flight."""
        if not parts or path in self._quantized:
            return self.param_bytes(path)
        return sum(map(size_of, parts)) * numpy_dtype(self.dense_dtype(path)).itemsize

    @property
    def executor(self) -> ThreadPoolExecutor:
        """The thread pool for reading, started on first use."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="checkpoint-read")
        return self._executor

    def host_array(
        self,
        read: Read,
        shape: tuple[int, ...],
        stored: np.dtype,
        *,
        param: str,
        name: str,
        where: str | Path,
        transpose: bool = False,
        dtype: str | None = None,
    ) -> np.ndarray:
        """Reads one parameter in `dtype`, by default its own; errors name the tensor `name` of the file `where`."""
        wanted = numpy_dtype(dtype or self.dense_dtype(tuple(param.split("."))))
        array, stats = read_tensor(
            read, shape, stored, wanted, transpose=transpose, executor=self.executor, measure_cast=self._measure_casts
        )
        self.check_stats(stats, stored, wanted, param=param, name=name, where=where)
        return array

    def check_stats(
        self, stats: CastStats, stored: np.dtype, wanted: np.dtype, *, param: str, name: str, where: str | Path
    ) -> None:
        """Raises CheckpointError for values not finite, or too large for `wanted`; records the error of the cast."""
        check_finite(where, name, stats.num_nonfinite, stats.size)
        if stats.num_overflowed:
            raise CheckpointError(
                where,
                f"tensor {name!r}: {stats.num_overflowed} of {stats.size} values are too large for {wanted};"
                f" they fit {stored}, as stored",
            )
        if stored != wanted:
            self.cast_errors[param] = max(self.cast_errors.get(param, 0.0), stats.max_relative_error)

    def companions(self, *, with_tokenizer: bool = True) -> dict[str, Path | str]:
        """Files to copy beside the weights: a path or a text, by name relative to the checkpoint's directory.

        Args:
          with_tokenizer: False if another tokenizer is used, so that an incomplete one here is no error.
        """
        return {name: self.directory / name for name in companion_files(self.directory)}

    @property
    def generation_config(self) -> dict[str, Any]:
        """The contents of generation_config.json, or {} without one."""
        return generation_config(self.directory)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation, by generation_config.json and config.json, or a GGUF file's metadata."""
        return eos_token_ids(self.directory, self.config.vocab_size)

    @property
    def bos_token_id(self) -> int | None:
        """The id a text begins with, or None."""
        return bos_token_id(self.directory, self.config.vocab_size)

    def tokenizer_files(self) -> dict[str, str] | None:
        """Contents of the tokenizer's files by name, rebuilt from a GGUF file's metadata ({} if that has none); None
        for other checkpoints, whose tokenizer is in files of their directory. Raises CheckpointError."""
        return None

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()


def cut_parts(array: np.ndarray, parts: Sequence[Bounds]) -> list[np.ndarray]:
    """Copies of the parts of an array, which keep no reference to it; the array itself if no parts are given."""
    return [aligned(cut(array, bounds)) for bounds in parts] if parts else [array]


def param_dtype(config: ModelConfig, path: ParamPath) -> str:
    """The dtype of a dense parameter: the configuration's, except for the few that are always float32, and numbers of
    tokens."""
    if path == DRAFT_INDEX:
        return "int32"
    return "float32" if keeps_float32(path) else config.dtype


def param_shapes(config: ModelConfig) -> dict[ParamPath, tuple[int, ...]]:
    """Shape of every parameter of a model, in the order of computation: embedding, layers, final norm, head. What only
    heads that draft have comes last."""
    return _param_shapes(replace(config, dtype="float32"))


@lru_cache(maxsize=8)
def _param_shapes(config: ModelConfig) -> dict[ParamPath, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config))
    shapes = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    of_layers = ("layer_embed", "layer_embed_proj", "layer_embed_norm")
    order = ("embed", "position_embed", *of_layers, "layers", "final_norm", "lm_head", "lm_head_bias")

    def position(path: ParamPath) -> tuple[int, int]:
        place = order.index(path[0]) if path[0] in order else len(order)
        return place, int(path[1]) if path[0] == "layers" else 0

    return {path: shapes[path] for path in sorted(shapes, key=position)}


def unit_of(path: ParamPath) -> str:
    return ".".join(path[:2]) if path[0] == "layers" else path[0]


def insert(params: dict[str, Any], path: ParamPath, leaf: Any) -> None:
    """Sets one leaf of a nested dict."""
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = leaf


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a name, including ml_dtypes' such as "bfloat16"."""
    return np.dtype(jax.numpy.dtype(name))


def check_dtype(dtype: str) -> None:
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype={dtype!r} is not 'auto', {', '.join(map(repr, DTYPES))}")


def check_finite(where: str | Path, name: str, num_nonfinite: int, size: int) -> None:
    """Raises CheckpointError for a tensor with NaN or infinite values."""
    if num_nonfinite:
        raise CheckpointError(where, f"tensor {name!r}: {num_nonfinite} of {size} values are NaN or infinite")


def digest(*parts: Any) -> str:
    """SHA-256 over JSON-ready values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
