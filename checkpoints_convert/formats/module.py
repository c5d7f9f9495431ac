"""Shared parts of all quantization formats: methods, readers of a module, and values of a few bits in 32-bit words."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

from checkpoints_convert.safetensors_files import FLOAT_DTYPES, TensorHeader
from jaxinfer.quantization import NestedScales, QuantizedArray, Scheme

Headers = Mapping[str, TensorHeader]
Tensors = Mapping[str, np.ndarray]
_FLOAT32 = np.dtype(np.float32)


class FormatError(ValueError):
    """A quantized checkpoint that cannot be read as declared.

    Attributes:
      suffix: the tensor of the module that is wrong, such as "qweight"; None for the module or the configuration.
    """

    def __init__(self, reason: str, suffix: str | None = None):
        super().__init__(reason)
        self.suffix = suffix


@dataclass(frozen=True)
class WeightForm:
    """Types and shapes of the weight that a reader makes, known before any tensor is read.

    Where values decide (zeros, the order of the inputs), those of a well-formed checkpoint are assumed.

    Attributes:
      shape: [..., K, N]. scheme: None for a dense float32 weight, and the rest is of a quantized one.
      scales: their dtype. values: None for the scheme's integers.
      nested: (values of `NestedScales.outer`, scales for each of them), where scales are quantized themselves.
    """

    shape: tuple[int, ...]
    scheme: Scheme | None = None
    scales: np.dtype = _FLOAT32
    values: np.dtype | None = None
    has_zeros: bool = False
    is_permuted: bool = False
    nested: tuple[int, int] | None = None

    def abstract(self) -> QuantizedArray | jax.ShapeDtypeStruct:
        """The weight as `jax.ShapeDtypeStruct`s."""
        of, scheme = jax.ShapeDtypeStruct, self.scheme
        if scheme is None:
            return of(self.shape, _FLOAT32)
        *leading, inputs, outputs = self.shape
        blocks = (*leading, -(-inputs // scheme.block[0]), -(-outputs // scheme.block[1]))
        has_codebook = scheme.kind == "codebook"
        integers = np.dtype(ml_dtypes.int4 if scheme.bits <= 4 or has_codebook else np.int8)
        scales: Any = of(blocks, self.scales)
        if self.nested is not None:
            numbers = [of(shape, self.scales) for shape in ((256,), self.nested[:1], ())]
            scales = NestedScales(of(blocks, np.dtype(np.uint8)), *numbers, self.nested[1])  # pyright: ignore
        return host_quantized(
            scheme,
            of(self.shape, self.values or integers),
            scales,
            zeros=of(blocks, np.dtype(np.int8)) if self.has_zeros else None,
            codebook=of((16,), _FLOAT32) if has_codebook else None,
            permutation=of((inputs,), np.dtype(np.int32)) if self.is_permuted else None,
        )


@dataclass(frozen=True)
class ModuleReader:
    """How the tensors of one quantized module become its weight.

    Attributes:
      suffixes: the tensors, by name after "module.".
      read: makes the weight [K, N] of tensors by suffix; dense float32 if its blocks are no blocks of [K, N]. Raises
        FormatError.
      form: the types and shapes of that weight.
      raw: suffixes of tensors of raw bytes, whose dtype has no meaning.
      notes: sentences on declared settings that are not applied.
    """

    suffixes: tuple[str, ...]
    read: Callable[[Tensors], QuantizedArray | np.ndarray]
    form: WeightForm
    raw: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DenseModule:
    """A module of a model before it is quantized.

    Attributes:
      name: in the checkpoint. shape: of the stored weight, [N, K]; of experts in one tensor [E, K, N].
      role: "linear" is a Linear of a layer, of an expert too. dtype: the weight's, by its safetensors name.
    """

    name: str
    shape: tuple[int, ...]
    role: Literal["linear", "router", "head", "embedding", "experts"]
    dtype: str

    @property
    def kind(self) -> str:
        return "Embedding" if self.role == "embedding" else "Linear"


class Method(ABC):
    """A checkpoint's quantization method, as its configuration declares it."""

    name: str

    @abstractmethod
    def reader(self, module: str, shape: tuple[int, ...], headers: Headers, kind: str) -> ModuleReader | None:
        """The reader of a module with a weight of `shape` [N, K]; None if by its tensors it is not quantized.

        Args:
          headers: of the module's tensors, by suffix. kind: "Linear" or "Embedding".

        Raises FormatError for tensors that are missing, or of a wrong dtype or shape.
        """

    @abstractmethod
    def stored(self, module: DenseModule) -> dict[str, TensorHeader] | None:
        """Headers of the tensors, by suffix, that the format's libraries write for a module; None if by the
        configuration they leave it dense. Dtypes that it does not declare are the libraries' usual ones."""


def has_shape(headers: Headers, suffix: str, dtypes: Iterable[str], *shapes: tuple[int, ...]) -> int:
    """The index in `shapes` of a tensor's shape. Raises FormatError if it is missing, or of another dtype or shape."""
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
    """A `QuantizedArray` of NumPy arrays, or of abstract ones."""
    return QuantizedArray(values, scales, zeros, codebook, permutation, scheme)


FLOATS = tuple(name for name in FLOAT_DTYPES if name != "F64")


def positive_int(data: Mapping[str, Any], names: Iterable[str], default: int | None = None) -> int:
    """The value of the first of `names` that is set. Raises FormatError unless it is a positive integer or -1."""
    names = tuple(names)
    value = next((data[name] for name in names if data.get(name) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise FormatError(f"{names[0]} must be a positive integer or -1, got {value!r}")
    return value


def names_list(key: str, value: Any) -> tuple[str, ...]:
    """A list of names; null is an empty one. Raises FormatError."""
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise FormatError(f"{key} must be a list of names, got {value!r}")
    return tuple(value)


def two_sizes(key: str, value: Any) -> tuple[int, int]:
    """A list of two positive integers. Raises FormatError."""
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise FormatError(f"{key} must be two positive integers, got {value!r}")
    return value[0], value[1]


def is_named(module: str, patterns: Iterable[str]) -> bool:
    """True if a module is named: by its name, a part of it between dots, or a pattern with wildcards."""
    return any(f".{pattern}." in f".{module}." or fnmatchcase(module, pattern) for pattern in patterns)


def flag(data: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean field; null is its default. Raises FormatError."""
    value = default if data.get(name) is None else data[name]
    if not isinstance(value, bool):
        raise FormatError(f"{name} must be true or false, got {value!r}")
    return value


def order_of_groups(g_idx: np.ndarray, group_size: int, suffix: str) -> np.ndarray | None:
    """int32 [K]: the permutation that sorts inputs by group; None if they are sorted.

    Raises FormatError for groups that do not exist, or do not have `group_size` inputs (the last: the rest).
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


_WORD = 32


def num_words(count: int, bits: int) -> int:
    """Words that hold `count` values."""
    return -(-count * bits // _WORD)


def unpack(words: np.ndarray, bits: int, count: int, *, axis: int) -> np.ndarray:
    """The first `count` codes along `axis` of 32-bit words, as uint8 in [0, 2^bits).

    In memory the result has `axis` first, so that transposing codes unpacked from [N, words] copies nothing.
    Raises ValueError unless the axis has exactly the words the codes need.
    """
    words = np.moveaxis(words.view(np.uint32), axis, 0)
    if len(words) != num_words(count, bits):
        raise ValueError(f"{len(words)} words cannot hold {count} values of {bits} bits, {num_words(count, bits)} can")
    step = math.gcd(_WORD, bits)
    period, width = _WORD // step, bits // step  # values and words until a value starts on a word again
    num_periods = -(-count // period)
    if missing := num_periods * width - len(words):
        words = np.concatenate([words, np.zeros((missing, *words.shape[1:]), np.uint32)])
    words = words.reshape(num_periods, width, *words.shape[1:])
    codes = np.empty((num_periods, period, *words.shape[2:]), np.uint8)
    for place in range(period):
        first, shift = divmod(bits * place, _WORD)
        code = words[:, first] >> np.uint32(shift)
        if shift + bits > _WORD:
            code |= words[:, first + 1] << np.uint32(_WORD - shift)
        codes[:, place] = code & np.uint32(2**bits - 1)
    return np.moveaxis(codes.reshape(num_periods * period, *codes.shape[2:])[:count], 0, axis)


def pack(codes: np.ndarray, bits: int, *, axis: int) -> np.ndarray:
    """int32 words of unsigned codes; the inverse of `unpack`. Bits after the last code are 0."""
    codes = np.moveaxis(codes, axis, 0)
    count = len(codes)
    words = np.zeros((num_words(count, bits) + 1, *codes.shape[1:]), np.uint32)
    period = _WORD // math.gcd(_WORD, bits)
    for place in range(min(period, count)):
        values = codes[place::period].astype(np.uint32)
        first, shift = divmod(bits * place, _WORD)
        stride = bits * period // _WORD
        words[first::stride][: len(values)] |= values << np.uint32(shift)
        if shift + bits > _WORD:
            words[first + 1 :: stride][: len(values)] |= values >> np.uint32(_WORD - shift)
    return np.ascontiguousarray(np.moveaxis(words[:-1], 0, axis)).view(np.int32)


def signed(codes: np.ndarray, bits: int) -> np.ndarray:
    """code - 2^(bits - 1), as int4 up to 4 bits and int8 beyond."""
    shifted = codes - np.uint8(2 ** (bits - 1))
    # The bytes are viewed as int4, since a cast takes 0.4 us a value.
    return (shifted & np.uint8(15)).view(ml_dtypes.int4) if bits <= 4 else shifted.view(np.int8)


def unsigned(values: np.ndarray, bits: int) -> np.ndarray:
    """value + 2^(bits - 1) of int4 or int8 values, as uint8."""
    return as_int8(values).view(np.uint8) + np.uint8(2 ** (bits - 1))


def as_int8(values: np.ndarray) -> np.ndarray:
    """int4 or int8 values as int8."""
    if values.dtype != ml_dtypes.int4:
        return values
    nibbles = values.view(np.uint8) & np.uint8(15)
    return ((nibbles ^ np.uint8(8)) - np.uint8(8)).view(np.int8)


def powers_of_two(exponents: np.ndarray, suffix: str | None) -> np.ndarray:
    """float32 2^(exponent - 127) of E8M0 bytes, the tensor `suffix`. Raises FormatError for the exponent 255, a NaN."""
    exponents = exponents.view(np.uint8)
    if bad := int((exponents == 255).sum()):
        raise FormatError(f"{bad} of {exponents.size} scales are NaN", suffix)
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)


def transposed(matrix: np.ndarray) -> np.ndarray:
    """The transpose [K, N] of [N, K] in C order, copied in strips that stay in the processor's cache."""
    result = np.empty(matrix.shape[::-1], matrix.dtype)
    source, target = (array.view(f"u{matrix.dtype.itemsize}") for array in (matrix, result))
    for first in range(0, len(source), 64):
        target[:, first : first + 64] = source[first : first + 64].T
    return result
