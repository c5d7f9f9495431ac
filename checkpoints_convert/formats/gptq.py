"""GPTQ, AWQ and auto-round checkpoints: codes and zeros packed in 32-bit words, a scale per group.

GPTQ (Frantar et al. 2022), as AutoGPTQ and GPTQModel pack it, 2, 3, 4 and 8 bits, v1 and v2:

    qweight int32 [K * bits / 32, N]   codes packed along the inputs
    qzeros  int32 [K / g, N * bits / 32]  packed along the outputs; v1 stores zero - 1
    scales  [K / g, N]; g_idx int32 [K]  the group of every input

W[k, n] = scales[g_idx[k], n] * (code[k, n] - zero[g_idx[k], n]).

AWQ (Lin et al. 2023) in AutoAWQ's "gemm" layout: 4 bits, packed along the outputs, interleaved:

    qweight int32 [K, N / 8]; qzeros int32 [K / g, N / 8]; scales [K / g, N]

Nibble i of word c is output 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]; zeros are stored as they are.
W[k, n] = (code[k, n] - zero[k // g, n]) * scales[k // g, n].

auto-round (Cheng et al. 2023) packs as GPTQ or AWQ, with bits per layer in `extra_config`.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from checkpoints_convert.formats.module import (
    FLOATS,
    DenseModule,
    FormatError,
    Headers,
    Method,
    ModuleReader,
    Tensors,
    WeightForm,
    flag,
    has_shape,
    host_quantized,
    is_named,
    names_list,
    num_words,
    order_of_groups,
    positive_int,
    signed,
    transposed,
    unpack,
)
from checkpoints_convert.safetensors_files import NUMPY_DTYPES, TensorHeader
from jaxinfer.quantization import QuantizedArray, Scheme

_LOG = logging.getLogger(__name__)
_BITS = (2, 3, 4, 8)
_FORMATS = {"gptq": 1, "gptq_v2": 0}
_SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True)
class GptqSettings:
    """Settings of one module. group_size: -1 for one group. zero_offset: subtracted from every stored zero, 1 in v1."""

    bits: int
    group_size: int
    sym: bool
    desc_act: bool
    zero_offset: int
    is_word_subtracted: bool = False


@dataclass(frozen=True)
class Gptq(Method):
    """overrides: (pattern, fields) of `dynamic`, or of auto-round's `extra_config`; the first that matches wins.

    Which modules are quantized, where no tensors tell: `inside`, names within a layer, () for all; `is_head_quantized`;
    and `dense`, patterns of exceptions.
    """

    settings: GptqSettings
    overrides: tuple[tuple[str, dict[str, Any]], ...] = ()
    inside: tuple[str, ...] = ()
    is_head_quantized: bool = False
    dense: tuple[str, ...] = ()
    name: str = "gptq"

    def reader(self, module: str, shape: tuple[int, ...], headers: Headers, kind: str) -> ModuleReader | None:
        if "qweight" not in headers:
            return None
        settings = self._settings_of(module)
        (outputs, inputs), bits = shape, settings.bits
        size = _group_size(settings.group_size, inputs)
        groups = -(-inputs // size)
        _check_shapes(headers, _headers(settings, shape))
        if "g_idx" in headers:
            has_shape(headers, "g_idx", ["I32"], (inputs,))
        elif settings.desc_act and groups > 1:
            raise FormatError("is missing, and desc_act is true", "g_idx")
        suffixes = tuple(suffix for suffix in _SUFFIXES if suffix in headers)
        form = WeightForm(
            (inputs, outputs),
            Scheme("int", bits, (size, 1)),
            NUMPY_DTYPES[headers["scales"][0]],
            has_zeros=not settings.sym,
            is_permuted="g_idx" in headers and settings.desc_act and groups > 1,
        )
        return ModuleReader(suffixes, partial(_read, settings, shape, size, module), form)

    def stored(self, module: DenseModule) -> dict[str, TensorHeader] | None:
        is_inside = module.role == "linear" and (not self.inside or is_named(module.name, self.inside))
        is_asked = is_inside or (module.role == "head" and self.is_head_quantized)
        if not is_asked or any(_matches(pattern, module.name) for pattern in self.dense):
            return None
        if _is_kept_dense(self.overrides, module.name):
            return None
        return _headers(self._settings_of(module.name), module.shape)

    def _settings_of(self, module: str) -> GptqSettings:
        for pattern, fields in self.overrides:
            if not _matches(pattern, module):
                continue
            own = replace(
                self.settings,
                bits=positive_int(fields, ["bits", "w_bit"], self.settings.bits),
                group_size=positive_int(fields, ["group_size", "q_group_size"], self.settings.group_size),
                sym=flag(fields, "sym", self.settings.sym),
                desc_act=flag(fields, "desc_act", self.settings.desc_act),
            )
            _check_bits(own.bits)
            return own
        return self.settings


def _group_size(declared: int, inputs: int) -> int:
    return inputs if declared == -1 else min(declared, inputs)


def _headers(settings: GptqSettings, shape: tuple[int, ...]) -> dict[str, TensorHeader]:
    (outputs, inputs), bits = shape, settings.bits
    groups = -(-inputs // _group_size(settings.group_size, inputs))
    return {
        "qweight": ("I32", (num_words(inputs, bits), outputs)),
        "qzeros": ("I32", (groups, num_words(outputs, bits))),
        "scales": ("F16", (groups, outputs)),
        "g_idx": ("I32", (inputs,)),
    }


def _check_shapes(headers: Headers, wanted: Headers) -> None:
    for suffix, dtypes in (("qweight", ["I32"]), ("qzeros", ["I32"]), ("scales", FLOATS)):
        has_shape(headers, suffix, dtypes, wanted[suffix][1])


def _is_kept_dense(overrides: tuple[tuple[str, dict[str, Any]], ...], module: str) -> bool:
    """True if auto-round left a layer at 16 bits or more."""
    bits = [fields.get("bits") for pattern, fields in overrides if _matches(pattern, module)]
    return any(isinstance(number, int) and number >= 16 for number in bits)


def gptq(data: Mapping[str, Any]) -> Gptq:
    """The method a quantization_config or quantize_config.json declares.

    Raises FormatError for unsupported bits, packings and variants, by name.
    """
    declared = data.get("checkpoint_format") or data.get("format") or "gptq"
    if data.get("format") not in (None, declared):
        raise FormatError(f"checkpoint_format {declared!r} contradicts format {data['format']!r}")
    if declared not in _FORMATS:
        raise FormatError(f"checkpoint_format {declared!r} is not supported, {' and '.join(_FORMATS)} are")
    if flag(data, "is_marlin_format", False):
        raise FormatError("is_marlin_format is set: weights packed for the Marlin kernel are not supported")
    if str(data.get("pack_dtype") or "int32").removeprefix("torch.") != "int32":
        raise FormatError(f"pack_dtype {data['pack_dtype']!r} is not supported, only 'int32' is")
    if data.get("rotation"):
        raise FormatError(f"rotation {data['rotation']!r} is not supported")
    settings = GptqSettings(
        bits=positive_int(data, ["bits", "w_bit"]),
        group_size=positive_int(data, ["group_size", "q_group_size"], -1),
        sym=flag(data, "sym", True),
        desc_act=flag(data, "desc_act", False),
        zero_offset=_FORMATS[declared],
        is_word_subtracted=_is_word_subtracted(data),
    )
    _check_bits(settings.bits)
    inside = data.get("modules_in_block_to_quantize")
    if isinstance(inside, list):  # of names, or of lists of names
        inside = [name for names in inside for name in (names if isinstance(names, list) else [names])]
    overrides, dense = _overrides(data.get("dynamic"))
    return Gptq(
        settings,
        overrides,
        inside=names_list("modules_in_block_to_quantize", inside),
        is_head_quantized=flag(data, "lm_head", False),
        dense=dense,
    )


def _check_bits(bits: int) -> None:
    if bits not in _BITS:
        raise FormatError(f"bits {bits} is not supported, {', '.join(map(str, _BITS))} are")


def _is_word_subtracted(data: Mapping[str, Any]) -> bool:
    """True if 1 was subtracted from whole words, so that a zero of 0 borrows: GPTQModel since 0.9.0."""
    meta = data.get("meta")
    quantizers = meta.get("quantizer") if isinstance(meta, Mapping) else None
    for entry in [quantizers] if isinstance(quantizers, str) else quantizers or []:
        if match := re.fullmatch(r"gptqmodel:(\d+)\.(\d+).*", str(entry)):
            return (int(match[1]), int(match[2])) >= (0, 9)
    return False


def _overrides(dynamic: Any) -> tuple[tuple[tuple[str, dict[str, Any]], ...], tuple[str, ...]]:
    """(pattern, fields) of `dynamic`, and its patterns with "-:", of modules that are not quantized."""
    if not dynamic:
        return (), ()
    if not isinstance(dynamic, Mapping) or not all(isinstance(fields, Mapping) for fields in dynamic.values()):
        raise FormatError(f"dynamic must map patterns to fields, got {dynamic!r}")
    overrides, dense = [], []
    for pattern, fields in dynamic.items():
        name = pattern.removeprefix("+:").removeprefix("-:")
        check_pattern(name)
        if pattern.startswith("-:"):
            dense.append(name)
        else:
            overrides.append((name, dict(fields)))
    return tuple(overrides), tuple(dense)


def check_pattern(pattern: str) -> None:
    """Raises FormatError unless `pattern` is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise FormatError(f"the pattern {pattern!r} is not a regular expression: {error}") from None


def _matches(pattern: str, module: str) -> bool:
    return pattern == module or re.match(pattern, module) is not None


def _read(settings: GptqSettings, shape: tuple[int, ...], size: int, module: str, tensors: Tensors) -> QuantizedArray:
    outputs, inputs = shape
    codes = unpack(tensors["qweight"], settings.bits, inputs, axis=0)
    order = None
    if "g_idx" in tensors and tensors["g_idx"].any():
        order = order_of_groups(tensors["g_idx"], size, "g_idx")
    elif settings.desc_act and size < inputs:
        raise FormatError("is all zero, and desc_act is true", "g_idx")
    zeros = _zeros(tensors["qzeros"], settings, outputs, module)
    return host_quantized(
        Scheme("int", settings.bits, (size, 1)),
        signed(codes if order is None else codes[order], settings.bits),
        tensors["scales"],
        zeros=zeros if zeros.any() else None,
        permutation=order,
    )


def _zeros(words: np.ndarray, settings: GptqSettings, outputs: int, module: str) -> np.ndarray:
    """int8 [groups, N], less 2^(bits - 1)."""
    bits, middle, full = settings.bits, 2 ** (settings.bits - 1), 2**settings.bits - 1
    stored = unpack(words, bits, outputs, axis=1)
    offset = settings.zero_offset
    if settings.sym:
        # Some files declare one version and store the other, which symmetric zeros reveal.
        if (stored == middle).all() or (stored == middle - 1).all():
            return np.zeros(stored.shape, np.int8)
        _LOG.warning(
            "%s: sym is true, and the stored zeros are neither all %d nor all %d; read as %s",
            module,
            middle - 1,
            middle,
            "v1 (stored + 1)" if offset else "v2 (as stored)",
        )
    if offset and settings.is_word_subtracted and bits != 3:
        ones = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
        stored = unpack(words.view(np.uint32) + ones, bits, outputs, axis=1)
    elif offset:
        if not settings.is_word_subtracted:
            _check_not_overwritten(stored, bits)
        stored = (stored + np.uint8(1)) & np.uint8(full)
    return (stored - np.uint8(middle)).view(np.int8)


def _check_not_overwritten(stored: np.ndarray, bits: int) -> None:
    """Raises FormatError for zeros that are lost: AutoGPTQ packed a zero of 0 as -1, which set all higher bits of the
    word."""
    is_full = stored == 2**bits - 1
    if bits != 3:
        per_word = 32 // bits
        is_full = is_full & (np.arange(stored.shape[1]) % per_word != per_word - 1)
    if lost := int(is_full.sum()):
        raise FormatError(
            f"{lost} zeros of 0 were packed as -1, which overwrote their neighbours (sym=false, checkpoint_format"
            " gptq, not packed by gptqmodel 0.9 or newer): the file has lost them",
            "qzeros",
        )


_NIBBLE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Awq(Method):
    """group_size: -1 for one group. overrides: group sizes of single modules (auto-round). dense: modules that are not
    quantized, where no tensors tell."""

    group_size: int
    overrides: tuple[tuple[str, dict[str, Any]], ...] = ()
    dense: tuple[str, ...] = ()
    name: str = "awq"

    def reader(self, module: str, shape: tuple[int, ...], headers: Headers, kind: str) -> ModuleReader | None:
        if "qweight" not in headers:
            return None
        outputs, inputs = shape
        size = self._group_size_of(module, inputs)
        if outputs % 8:
            raise FormatError(f"has {outputs} outputs, not a multiple of the 8 of a word", "qweight")
        _check_shapes(headers, self._headers(module, shape))
        scales = NUMPY_DTYPES[headers["scales"][0]]
        form = WeightForm((inputs, outputs), Scheme("int", 4, (size, 1)), scales, has_zeros=True)
        return ModuleReader(("qweight", "qzeros", "scales"), partial(_read_awq, outputs, size), form)

    def stored(self, module: DenseModule) -> dict[str, TensorHeader] | None:
        if module.role != "linear" or is_named(module.name, self.dense):
            return None
        return None if _is_kept_dense(self.overrides, module.name) else self._headers(module.name, module.shape)

    def _group_size_of(self, module: str, inputs: int) -> int:
        asked = next((positive_int(own, ["group_size"], self.group_size) for name, own in self.overrides
                      if name == module), self.group_size)  # fmt: skip
        return _group_size(asked, inputs)

    def _headers(self, module: str, shape: tuple[int, ...]) -> dict[str, TensorHeader]:
        outputs, inputs = shape
        groups = -(-inputs // self._group_size_of(module, inputs))
        return {
            "qweight": ("I32", (inputs, outputs // 8)),
            "qzeros": ("I32", (groups, outputs // 8)),
            "scales": ("F16", (groups, outputs)),
        }


def awq(data: Mapping[str, Any]) -> Awq:
    """The method a quantization_config declares. Raises FormatError for other layouts, by name."""
    version = str(data.get("version") or data.get("format") or "gemm").lower()
    if version != "gemm":
        raise FormatError(f"version {version!r} is not supported, only 'gemm' is")
    if (bits := positive_int(data, ["bits", "w_bit"], 4)) != 4:
        raise FormatError(f"bits {bits} is not supported, AWQ's gemm layout has 4")
    if not flag(data, "zero_point", True):
        raise FormatError("zero_point false is not supported: the gemm layout stores zero points")
    dense = names_list("modules_to_not_convert", data.get("modules_to_not_convert"))
    return Awq(positive_int(data, ["group_size", "q_group_size"], 128), dense=dense)


def _read_awq(outputs: int, size: int, tensors: Tensors) -> QuantizedArray:
    codes = transposed(_outputs_first(tensors["qweight"], outputs))
    zeros = (_outputs_first(tensors["qzeros"], outputs).T - np.uint8(8)).view(np.int8)
    return host_quantized(
        Scheme("int", 4, (size, 1)),
        signed(codes, 4),
        tensors["scales"],
        zeros=np.ascontiguousarray(zeros) if zeros.any() else None,
    )


def _outputs_first(words: np.ndarray, outputs: int) -> np.ndarray:
    """uint8 [N, rows] of int32 [rows, N / 8]."""
    codes = unpack(words, 4, outputs, axis=1).T
    return codes.reshape(outputs // 8, 8, -1)[:, _NIBBLE_OF_OUTPUT].reshape(outputs, -1)


# GPTQ's version of a packing, or AWQ; the name of a kernel may follow, such as auto_round:auto_gptq:exllamav2.
_PACKINGS = {
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:gptq": "gptq",
    "auto_round:auto_gptq": "gptq",
    "auto_round:awq": "awq",
    "auto_round:auto_awq": "awq",
}
_KERNELS = ("exllamav2", "tritonv2", "triton", "gemm")


def autoround(data: Mapping[str, Any]) -> Gptq | Awq:
    """The method a quantization_config declares. Raises FormatError for unsupported packings and types."""
    packing = _packing(data)
    if str(data.get("data_type") or "int") != "int":
        raise FormatError(f"data_type {data['data_type']!r} is not supported, only 'int' is")
    if (act_bits := data.get("act_bits") or 16) < 16:
        raise FormatError(f"act_bits {act_bits} is not supported: weights alone may be quantized")
    if data.get("super_bits"):
        raise FormatError("super_bits is not supported")
    overrides = _autoround_overrides(data.get("extra_config"))
    if packing == "awq":
        return replace(awq({**data, "version": "gemm", "zero_point": True}), overrides=overrides, name="auto-round")
    rest = {name: value for name, value in data.items() if name not in ("format", "dynamic", "meta")}
    return replace(gptq({**rest, "checkpoint_format": packing}), overrides=overrides, name="auto-round")


def _packing(data: Mapping[str, Any]) -> str:
    """How weights are packed: "awq", or GPTQ's version. Older files have `backend` instead of `packing_format`."""
    name = "packing_format" if data.get("packing_format") else "backend"
    declared = data.get(name)
    if declared in (None, "auto"):
        if flag(data, "sym", True):
            return "gptq"  # symmetric zeros reveal the version
        raise FormatError("sym is false, and neither packing_format nor backend tells how zeros are stored")
    kept, _, kernel = str(declared).rpartition(":")
    packing = kept if kernel in _KERNELS else str(declared)
    if packing not in _PACKINGS:
        raise FormatError(f"{name} {declared!r} is not supported, {', '.join(_PACKINGS)} are")
    return _PACKINGS[packing]


def _autoround_overrides(extra: Any) -> tuple[tuple[str, dict[str, Any]], ...]:
    if not extra:
        return ()
    if not isinstance(extra, Mapping) or not all(isinstance(fields, Mapping) for fields in extra.values()):
        raise FormatError(f"extra_config must map layers to fields, got {extra!r}")
    for pattern, fields in extra.items():
        check_pattern(pattern)
        if (fields.get("data_type") or "int") != "int" and (fields.get("bits") or 16) < 16:
            raise FormatError(f"extra_config of {pattern!r}: data_type {fields['data_type']!r} is not supported")
    return tuple((pattern, dict(fields)) for pattern, fields in extra.items())
