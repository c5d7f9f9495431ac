"""What every format shares: a method knows a checkpoint's modules, a reader makes one weight of a module's tensors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkpoints_convert.safetensors_file import FLOAT_DTYPES
from checkpoints_convert.safetensors_index import TensorHeader
from jaxinfer.quantization import QuantizedArray, Scheme

Tensors = Mapping[str, np.ndarray]


class FormatError(ValueError):
    """A quantized checkpoint that cannot be read as declared.

    Attributes:
      suffix: the tensor of the module that is wrong, such as "qweight"; None for the module or the configuration.
    """

    def __init__(self, reason: str, suffix: str | None = None):
        super().__init__(reason)
        self.suffix = suffix


@dataclass(frozen=True)
class ModuleReader:
    """How the tensors of one quantized module become its weight.

    Attributes:
      suffixes: the tensors, by name after "module.".
      read: from tensors by suffix, as stored, to the weight [K, N]; dense float32 where no blocks of [K, N] can say
        what the file says. Raises FormatError.
      raw: suffixes of tensors whose dtype is not what they hold.
      notes: what of the declaration is read but not applied, one sentence each.
    """

    suffixes: tuple[str, ...]
    read: Callable[[Tensors], QuantizedArray | np.ndarray]
    raw: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


class Method(ABC):
    """A checkpoint's quantization method, as its configuration declares it."""

    name: str

    @abstractmethod
    def reader(
        self, module: str, shape: tuple[int, ...], headers: Mapping[str, TensorHeader], kind: str
    ) -> ModuleReader | None:
        """The reader of a module whose weight is `shape` [N, K]; None where its tensors say that it is not quantized.

        Args:
          headers: of the module's tensors, by suffix. kind: "Linear" or "Embedding".

        Raises FormatError: tensors that are missing, or not of the dtype and shape the method makes them.
        """


def has_shape(headers: Mapping[str, TensorHeader], suffix: str, dtypes: Iterable[str], *shapes: tuple[int, ...]) -> int:
    """Which of `shapes` a tensor has. Raises FormatError if it is missing, of another dtype, or of another shape."""
    if suffix not in headers:
        raise FormatError("is missing", suffix)
    dtype, shape = headers[suffix]
    dtypes = tuple(dtypes)
    if dtype not in dtypes:
        raise FormatError(f"is stored as {dtype}, not as {' or '.join(dtypes)}", suffix)
    if shape not in shapes:
        raise FormatError(f"has shape {list(shape)}, not {' or '.join(str(list(wanted)) for wanted in shapes)}", suffix)
    return shapes.index(shape)


def host_quantized(
    scheme: Scheme, values: Any, scales: Any, *, zeros: Any = None, codebook: Any = None, permutation: Any = None
) -> QuantizedArray:
    """A `QuantizedArray` of numpy arrays, as readers give it and `jax.device_put` takes it."""
    return QuantizedArray(values, scales, zeros, codebook, permutation, scheme)


FLOATS = tuple(name for name in FLOAT_DTYPES if name != "F64")


def positive_int(data: Mapping[str, Any], names: Iterable[str], default: int | None = None) -> int:
    """The first of `names` that is set, a positive integer or -1. Raises FormatError."""
    names = tuple(names)
    value = next((data[name] for name in names if data.get(name) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise FormatError(f"{names[0]} must be a positive integer or -1, got {value!r}")
    return value


def flag(data: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean field; null is its default. Raises FormatError."""
    value = default if data.get(name) is None else data[name]
    if not isinstance(value, bool):
        raise FormatError(f"{name} must be true or false, got {value!r}")
    return value


def order_of_groups(g_idx: np.ndarray, group_size: int, suffix: str) -> np.ndarray | None:
    """int32 [K], the inputs ordered by group, for the group of every input; None if they are in order already.

    Raises FormatError for groups that do not exist or do not have `group_size` inputs (the last one the rest).
    """
    natural = np.arange(len(g_idx)) // group_size
    if np.array_equal(g_idx, natural):
        return None
    last = int(natural[-1])
    if g_idx.min() < 0 or g_idx.max() > last:
        bad = g_idx[(g_idx < 0) | (g_idx > last)]
        raise FormatError(f"{len(bad)} of {len(g_idx)} values such as {bad[0]} are not in [0, {last}]", suffix)
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    if not np.array_equal(g_idx[order], natural):
        sizes = np.bincount(g_idx, minlength=last + 1)
        wrong = int(np.argmax(sizes != np.bincount(natural)))
        raise FormatError(
            f"puts {sizes[wrong]} inputs in group {wrong}, the group size {group_size} makes it"
            f" {np.bincount(natural)[wrong]}",
            suffix,
        )
    return order
