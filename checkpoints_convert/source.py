"""A checkpoint opened for reading, whatever its form: a configuration, and parameters unit by unit."""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints_convert.arrays import Read, read_tensor
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.formats import LayerKVScales
from jaxinfer.models import ModelConfig, abstract_params
from jaxinfer.quantization import QuantizedArray

DTYPES = ("float32", "bfloat16", "float16")
ParamPath = tuple[str, ...]  # the keys that lead to a parameter, such as ("layers", "0", "mlp_norm", "weight")


class Source(ABC):
    """An open checkpoint.

    A unit is what is read, stored and resumed at once: one layer, or one parameter that belongs to none.

    Attributes:
      directory: where its files are. config: its dtype is that of every dense array `read` gives; a `QuantizedArray`
        keeps the dtypes of the file.
      kv_scales: of an 8-bit key-value cache, by layer, where the checkpoint has them; () where not.
      cast_errors: the largest relative error of the casts so far, by parameter, when opened to measure them.
    """

    directory: Path
    config: ModelConfig
    kv_scales: tuple[LayerKVScales, ...] = ()

    def __init__(self, directory: Path, *, measure_casts: bool = False):
        self.directory = directory
        self._measure_casts = measure_casts
        self.cast_errors: dict[str, float] = {}
        self._executor: ThreadPoolExecutor | None = None

    @abstractmethod
    def read(self, unit: str) -> Iterator[tuple[ParamPath, np.ndarray | QuantizedArray]]:
        """The parameters of a unit as host arrays, quantized ones as `QuantizedArray`s of host arrays.

        Raises CheckpointError, naming file and tensor."""

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
        return int(np.prod(param_shapes(self.config)[path], dtype=np.int64)) * numpy_dtype(self.config.dtype).itemsize

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
    ) -> np.ndarray:
        """Reads one parameter in config.dtype; `name` in the file `where` is what errors speak of."""
        dtype = numpy_dtype(self.config.dtype)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="checkpoint-read")
        found = read_tensor(
            read, shape, stored, dtype, transpose=transpose, executor=self._executor, measure_cast=self._measure_casts
        )
        size = found.array.size
        check_finite(where, name, found.num_nonfinite, size)
        if found.num_overflowed:
            raise CheckpointError(
                where,
                f"tensor {name!r}: {found.num_overflowed} of {size} values are too large for {dtype};"
                f" they fit {stored}, as stored",
            )
        if stored != dtype:
            self.cast_errors[param] = found.max_relative_error
        return found.array

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def param_shapes(config: ModelConfig) -> dict[ParamPath, tuple[int, ...]]:
    """Shape of every parameter of a model, in the order of computation: embedding, layers, final norm, head."""
    return _param_shapes(replace(config, dtype="float32"))


@lru_cache(maxsize=8)
def _param_shapes(config: ModelConfig) -> dict[ParamPath, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config))
    shapes = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    first = ("embed", "layers", "final_norm", "lm_head")
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
