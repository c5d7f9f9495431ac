"""A checkpoint opened for reading, whatever its form: a configuration, and parameters unit by unit."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from checkpoints_convert.arrays import aligned
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import companion_files
from checkpoints_convert.formats import LayerKVScales
from checkpoints_convert.parts import Bounds, cut, size_of
from checkpoints_convert.regions import CastStats, Read, read_tensor
from jaxinfer.models import ModelConfig, abstract_params, keeps_float32
from jaxinfer.quantization import QuantizedArray

DTYPES = ("float32", "bfloat16", "float16")
# More than there are cores: some wait for the disk, or the store, while others transpose.
NUM_THREADS = 8
ParamPath = tuple[str, ...]  # the keys that lead to a parameter, such as ("layers", "0", "mlp_norm", "weight")


Group = tuple[ParamPath, ...]


class Source(ABC):
    """An open checkpoint.

    A unit is what is read, stored and resumed at once: one layer, or one parameter that belongs to none.

    Attributes:
      directory: where its files are. config: its dtype is that of every dense array `read` gives; a `QuantizedArray`
        keeps the dtypes of the file.
      kv_scales: of an 8-bit key-value cache, by layer, where the checkpoint has them; () where not.
      requantize_errors: relative error (root of the mean square) of the weights that were rounded again so far.
      cast_errors: the largest relative error of the casts so far, by parameter, when opened to measure them.
    """

    directory: Path
    config: ModelConfig
    kv_scales: tuple[LayerKVScales, ...] = ()

    def __init__(self, directory: Path, *, measure_casts: bool = False):
        self.directory = directory
        self._measure_casts = measure_casts
        self.cast_errors: dict[str, float] = {}
        self.requantize_errors: dict[str, float] = {}
        self._executor: ThreadPoolExecutor | None = None

    @abstractmethod
    def read_group(
        self, group: Group, parts: Mapping[ParamPath, Sequence[Bounds]]
    ) -> Iterator[tuple[ParamPath, list[np.ndarray] | QuantizedArray]]:
        """The parameters of a group: of a dense one the parts asked for, or the whole where none are, as host arrays;
        quantized ones always whole, as `QuantizedArray`s of host arrays. Several threads may read groups at once.

        Raises CheckpointError, naming file and tensor."""

    def groups(self, unit: str) -> list[Group]:
        """The parameters of a unit that are read together: each by itself."""
        return [(path,) for path in self.units()[unit]]

    def split(self, path: ParamPath, parts: Sequence[Bounds], limit: int) -> list[list[Bounds]]:
        """The parts of a parameter in runs of at most `limit` bytes, as far as reading them apart reads no more."""
        return [list(parts)]

    def read(self, unit: str) -> Iterator[tuple[ParamPath, np.ndarray | QuantizedArray]]:
        """The parameters of a unit, whole.

        Raises CheckpointError, naming file and tensor."""
        for group in self.groups(unit):
            for path, found in self.read_group(group, {}):
                yield path, found if isinstance(found, QuantizedArray) else found[0]

    @abstractmethod
    def quantized(self) -> dict[ParamPath, str]:
        """The parameters that the files hold quantized, whatever `read` makes of them, each with the name of one of its
        tensors."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the files or the way they are read change; cheap."""

    def units(self) -> dict[str, dict[ParamPath, tuple[int, ...]]]:
        """Unit names, in reading order, with the shapes of their parameters."""
        found: dict[str, dict[ParamPath, tuple[int, ...]]] = {}
        for path, shape in param_shapes(self.config).items():
            found.setdefault(unit_of(path), {})[path] = shape
        return found

    def num_bytes(self, unit: str | None = None) -> int:
        """Bytes of a unit's arrays, or of all."""
        return sum(self.param_bytes(path) for name, paths in self.units().items() if unit in (None, name)
                   for path in paths)  # fmt: skip

    def param_bytes(self, path: ParamPath) -> int:
        """Bytes of one parameter; of a quantized one, as stored in the checkpoint."""
        size = int(np.prod(param_shapes(self.config)[path], dtype=np.int64))
        return size * numpy_dtype(param_dtype(self.config, path)).itemsize

    def host_bytes(self, group: Group, parts: Mapping[ParamPath, Sequence[Bounds]]) -> int:
        """Host memory that `read_group` takes, beside blocks: what it returns."""
        return sum(self._host_bytes(path, parts.get(path, ())) for path in group)

    def _host_bytes(self, path: ParamPath, parts: Sequence[Bounds]) -> int:
        if not parts or path in self._quantized_paths:
            return self.param_bytes(path)
        return sum(map(size_of, parts)) * numpy_dtype(param_dtype(self.config, path)).itemsize

    @cached_property
    def _quantized_paths(self) -> frozenset[ParamPath]:
        return frozenset(self.quantized())

    @property
    def executor(self) -> ThreadPoolExecutor:
        """The threads that read, started when they are first needed."""
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
        """Reads one parameter in `dtype`, or its own; `name` in the file `where` is what errors speak of."""
        wanted = numpy_dtype(dtype or param_dtype(self.config, tuple(param.split("."))))
        array, seen = read_tensor(
            read, shape, stored, wanted, transpose=transpose, executor=self.executor, measure_cast=self._measure_casts
        )
        self.check_seen(seen, stored, wanted, param=param, name=name, where=where)
        return array

    def check_seen(
        self, seen: CastStats, stored: np.dtype, wanted: np.dtype, *, param: str, name: str, where: str | Path
    ) -> None:
        """Raises CheckpointError for values that are not finite, or too large; keeps the error of the cast."""
        check_finite(where, name, seen.num_nonfinite, seen.size)
        if seen.num_overflowed:
            raise CheckpointError(
                where,
                f"tensor {name!r}: {seen.num_overflowed} of {seen.size} values are too large for {wanted};"
                f" they fit {stored}, as stored",
            )
        if stored != wanted:
            self.cast_errors[param] = max(self.cast_errors.get(param, 0.0), seen.max_relative_error)

    def companions(self, *, with_tokenizer: bool = True) -> dict[str, Path | str]:
        """What to carry along with the weights: the file, or the text, by name relative to the checkpoint's directory.

        Args:
          with_tokenizer: False where another tokenizer is taken, and this one need not be whole.
        """
        return {name: self.directory / name for name in companion_files(self.directory)}

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def cut_parts(array: np.ndarray, parts: Sequence[Bounds]) -> list[np.ndarray]:
    """Parts of an array that was read whole, as copies that leave it free; itself where none are asked for."""
    return [aligned(cut(array, bounds)) for bounds in parts] if parts else [array]


def param_dtype(config: ModelConfig, path: ParamPath) -> str:
    """The dtype of a parameter that is not quantized: the configuration's, but for the few that are always float32."""
    return "float32" if keeps_float32(path) else config.dtype


def param_shapes(config: ModelConfig) -> dict[ParamPath, tuple[int, ...]]:
    """Shape of every parameter of a model, in the order of computation: embedding, layers, final norm, head."""
    return _param_shapes(replace(config, dtype="float32"))


@lru_cache(maxsize=8)
def _param_shapes(config: ModelConfig) -> dict[ParamPath, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config))
    shapes = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    first = ("embed", "position_embed", "layers", "final_norm", "lm_head", "lm_head_bias")
    order = {name: position for position, name in enumerate(first)}
    return dict(
        sorted(shapes.items(), key=lambda item: (order[item[0][0]], int(item[0][1]) if item[0][0] == "layers" else 0))
    )


def unit_of(path: ParamPath) -> str:
    return ".".join(path[:2]) if path[0] == "layers" else path[0]


def insert(params: dict[str, Any], path: ParamPath, leaf: Any) -> None:
    """Sets one leaf of a nested dict."""
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = leaf


def numpy_dtype(name: str) -> np.dtype:
    """The dtype of a name such as "bfloat16", which numpy knows only once ml_dtypes is imported."""
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
