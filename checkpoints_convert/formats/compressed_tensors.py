"""compressed-tensors checkpoints (llm-compressor): the configuration, and the tensors of a module.

    pack-quantized  weight_packed int32 [N, words], value + 2^(bits - 1) packed along the inputs; weight_scale;
                    weight_shape int64 [2]; weight_zero_point int32 packed along the outputs; weight_g_idx
    int-quantized, float-quantized, naive-quantized
                    weight int8 or float8_e4m3fn [N, K], weight_scale, weight_zero_point
    mxfp4-pack-quantized, nvfp4-pack-quantized
                    as in float4.py

W = (value - zero) * scale.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from checkpoints_convert.formats.float4 import BLOCK, GROUP, mxfp4_reader, nvfp4_headers, nvfp4_reader
from checkpoints_convert.formats.gptq import check_pattern
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
    num_words,
    order_of_groups,
    signed,
    transposed,
    two_sizes,
    unpack,
)
from checkpoints_convert.safetensors_files import NUMPY_DTYPES, TensorHeader
from jaxinfer.checks import did_you_mean
from jaxinfer.quantization import QuantizedArray, Scheme

_ACTIVATION_TENSORS = ("input_scale", "input_zero_point", "input_global_scale")


@dataclass(frozen=True)
class WeightScheme:
    """block: (outputs, inputs), of the strategy "block". is_reordered: whether inputs are grouped in another order."""

    bits: int
    kind: Literal["int", "float"]
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    is_reordered: bool = False


@dataclass(frozen=True)
class ActivationScheme:
    bits: int
    kind: str
    strategy: str | None
    is_dynamic: bool
    symmetric: bool = True


@dataclass(frozen=True)
class _Layout:
    """shape [N, K]; scales: their stored shape. per_word: values of a word, None for the dense stream."""

    form: str
    weights: WeightScheme
    scheme: Scheme
    shape: tuple[int, ...]
    scales: tuple[int, int]
    per_word: int | None = None


def module_reader(
    form: str,
    weights: WeightScheme,
    activations: ActivationScheme | None,
    shape: tuple[int, ...],
    headers: Headers,
) -> ModuleReader:
    """The reader of a quantized module stored in the format `form`. Raises FormatError as `Method.reader` does."""
    if form == "mxfp4-pack-quantized":
        return _mxfp4(weights, shape, headers)
    if form == "nvfp4-pack-quantized":
        return _nvfp4(weights, activations, shape, headers)
    if weights.strategy == "tensor_group":
        raise FormatError("weights of strategy 'tensor_group' are not supported outside nvfp4-pack-quantized")
    outputs, inputs = shape
    block = _block(weights, outputs, inputs)
    scales = (-(-outputs // block[1]), -(-inputs // block[0]))
    quantized, notes = _quantized_activations(weights, activations)
    layout = _Layout(form, weights, Scheme(weights.kind, weights.bits, block, quantized), shape, scales)
    also = {"tensor": ((), (1,)), "channel": (scales[:1],)}.get(weights.strategy, ())
    has_shape(headers, "weight_scale", FLOATS, scales, *also)
    if form == "pack-quantized":
        layout, suffixes = _packed(layout, headers)
    else:
        suffixes = _plain(layout, headers)
    static = tuple(suffix for suffix in _ACTIVATION_TENSORS if suffix in headers)
    made = WeightForm(
        (inputs, outputs),
        layout.scheme,
        NUMPY_DTYPES[headers["weight_scale"][0]],
        None if weights.kind == "int" else NUMPY_DTYPES[headers["weight"][0]],
        has_zeros=not weights.symmetric and "weight_zero_point" in suffixes,
        is_permuted="weight_g_idx" in suffixes and block[0] < inputs,
    )
    return ModuleReader((*suffixes, "weight_scale", *static), partial(_read, layout), made, notes=notes)


def stored_headers(form: str, weights: WeightScheme, module: DenseModule) -> dict[str, TensorHeader]:
    """Headers of the tensors, by suffix, of a module stored in the format `form`."""
    outputs, inputs = module.shape
    if form == "mxfp4-pack-quantized":
        return {"weight_packed": ("U8", (outputs, inputs // 2)), "weight_scale": ("U8", (outputs, inputs // BLOCK))}
    if form == "nvfp4-pack-quantized":
        return nvfp4_headers(module.shape, is_modelopt=False)
    block = _block(weights, outputs, inputs)
    scales = (-(-outputs // block[1]), -(-inputs // block[0]))
    headers: dict[str, TensorHeader] = {"weight_scale": (module.dtype, scales)}
    if form == "pack-quantized":
        headers["weight_packed"] = ("I32", (outputs, num_words(inputs, weights.bits)))
        headers["weight_shape"] = ("I64", (2,))
        if not weights.symmetric:
            headers["weight_zero_point"] = ("I32", (num_words(outputs, weights.bits), scales[1]))
        if weights.is_reordered:
            headers["weight_g_idx"] = ("I32", (inputs,))
        return headers
    headers["weight"] = ("I8" if weights.kind == "int" else "F8_E4M3", module.shape)
    return headers if weights.symmetric else {**headers, "weight_zero_point": ("I8", scales)}


def _block(weights: WeightScheme, outputs: int, inputs: int) -> tuple[int, int]:
    """Inputs and outputs that share a scale."""
    if weights.block is not None:
        return weights.block[1], weights.block[0]
    if weights.strategy == "tensor":
        return inputs, outputs
    return min(weights.group_size or inputs, inputs), 1


def _packed(layout: _Layout, headers: Headers) -> tuple[_Layout, tuple[str, ...]]:
    if layout.weights.kind != "int":
        raise FormatError(
            f"pack-quantized holds integers, the configuration says {layout.weights.kind}", "weight_packed"
        )
    (outputs, inputs), bits = layout.shape, layout.weights.bits
    per_word = 32 // bits
    # Until 2025 a word held whole values, and left bits over for 3, 5, 6 and 7.
    which = has_shape(
        headers, "weight_packed", ["I32"], (outputs, num_words(inputs, bits)), (outputs, -(-inputs // per_word))
    )
    layout = replace(layout, per_word=per_word if which == 1 else None)
    has_shape(headers, "weight_shape", ["I64", "I32"], (2,))
    suffixes = ["weight_packed", "weight_shape"]
    if not layout.weights.symmetric:
        rows = num_words(outputs, bits) if which == 0 else -(-outputs // per_word)
        if headers.get("weight_zero_point", ("",))[0] == "I8":
            has_shape(headers, "weight_zero_point", ["I8"], layout.scales)
        else:
            has_shape(headers, "weight_zero_point", ["I32"], (rows, layout.scales[1]))
    if "weight_zero_point" in headers:
        suffixes.append("weight_zero_point")
    if "weight_g_idx" in headers:
        has_shape(headers, "weight_g_idx", ["I32", "I64"], (inputs,))
        suffixes.append("weight_g_idx")
    return layout, tuple(suffixes)


def _plain(layout: _Layout, headers: Headers) -> tuple[str, ...]:
    weights = layout.weights
    wanted = {"int-quantized": "int", "float-quantized": "float"}.get(layout.form, weights.kind)
    if weights.kind != wanted or (weights.kind == "float" and weights.bits != 8):
        raise FormatError(f"{layout.form} does not hold {weights.bits}-bit {weights.kind} weights", "weight")
    has_shape(headers, "weight", ["I8" if weights.kind == "int" else "F8_E4M3"], layout.shape)
    if "weight_zero_point" not in headers:
        if not weights.symmetric:
            raise FormatError("is missing, and symmetric is false", "weight_zero_point")
        return ("weight",)
    shapes = (layout.scales, layout.scales[:1], ())
    has_shape(headers, "weight_zero_point", ["I8", "F8_E4M3"] if weights.symmetric else ["I8"], *shapes)
    return ("weight", "weight_zero_point")


def _quantized_activations(
    weights: WeightScheme, activations: ActivationScheme | None
) -> tuple[Literal["int8", "fp8"] | None, tuple[str, ...]]:
    """The activations of a `Scheme`, and notes on what it cannot express; static scales become dynamic ones."""
    if activations is None:
        return None, ()
    notes = () if activations.is_dynamic else ("static scales of activations are not applied: each token has its own",)
    if (weights.kind, activations.kind, activations.bits, activations.symmetric) == ("int", "int", 8, True):
        return "int8", notes
    is_fp8 = (weights.kind, activations.kind, activations.bits, weights.bits) == ("float", "float", 8, 8)
    if is_fp8 and activations.symmetric and activations.strategy in ("token", "tensor"):
        return "fp8", notes
    symmetric = "" if activations.symmetric else "asymmetric "
    kind = f"{symmetric}{activations.bits}-bit {activations.kind} ({activations.strategy})"
    return None, (f"activations declared as {kind} stay floating-point with {weights.bits}-bit {weights.kind} weights",)


def _read(layout: _Layout, tensors: Tensors) -> QuantizedArray:
    weights, (outputs, inputs) = layout.weights, layout.shape
    scales = np.ascontiguousarray(tensors["weight_scale"].reshape(layout.scales).T)
    order = None
    if layout.form == "pack-quantized":
        if (says := tensors["weight_shape"].tolist()) != [outputs, inputs]:
            raise FormatError(f"says {says}, config.json makes it {[outputs, inputs]}", "weight_shape")
        codes = _unpacked(tensors["weight_packed"], layout, inputs, axis=1).T
        group = tensors.get("weight_g_idx")
        if group is not None and layout.scheme.block[0] < inputs and not (group == -1).all():
            order = order_of_groups(group, layout.scheme.block[0], "weight_g_idx")
        values = signed(np.ascontiguousarray(codes) if order is None else codes[order], weights.bits)
    else:
        values = _narrowed(transposed(tensors["weight"]), weights)
    return host_quantized(layout.scheme, values, scales, zeros=_zeros(layout, tensors), permutation=order)


def _unpacked(words: np.ndarray, layout: _Layout, count: int, *, axis: int) -> np.ndarray:
    """The dense stream, or the old one: each word by itself."""
    bits, per_word = layout.weights.bits, layout.per_word
    if per_word is None or 32 % bits == 0:
        return unpack(words, bits, count, axis=axis)
    words = np.moveaxis(words.view(np.uint32), axis, 0)
    shifts = (np.arange(per_word, dtype=np.uint32) * np.uint32(bits)).reshape(-1, *[1] * (words.ndim - 1))
    codes = ((words[:, None] >> shifts) & np.uint32(2**bits - 1)).astype(np.uint8)
    return np.moveaxis(codes.reshape(-1, *words.shape[1:])[:count], 0, axis)


def _narrowed(values: np.ndarray, weights: WeightScheme) -> np.ndarray:
    if weights.kind != "int" or weights.bits == 8:
        return values
    half = 2 ** (weights.bits - 1)
    if bad := int(((values < -half) | (values >= half)).sum()):
        raise FormatError(f"{bad} of {values.size} values do not fit {weights.bits} bits", "weight")
    return signed((values + np.int8(half)).view(np.uint8), weights.bits)


def _zeros(layout: _Layout, tensors: Tensors) -> np.ndarray | None:
    stored = tensors.get("weight_zero_point")
    if stored is None:
        return None
    if stored.dtype == np.int32:
        bits = layout.weights.bits
        codes = _unpacked(stored, layout, layout.scales[0], axis=0)
        stored = (codes - np.uint8(2 ** (bits - 1))).view(np.int8)
    if layout.weights.symmetric:
        if stored.astype(np.float32).any():
            raise FormatError("is not zero, and symmetric is true", "weight_zero_point")
        return None
    return np.ascontiguousarray(stored.reshape(layout.scales).T)


def _mxfp4(weights: WeightScheme, shape: tuple[int, ...], headers: Headers) -> ModuleReader:
    if (weights.bits, weights.kind, weights.group_size) != (4, "float", BLOCK) or shape[1] % BLOCK:
        raise FormatError(f"mxfp4-pack-quantized holds 4-bit floats in groups of {BLOCK}", "weight_packed")
    return mxfp4_reader(shape, headers)


def _nvfp4(
    weights: WeightScheme, activations: ActivationScheme | None, shape: tuple[int, ...], headers: Headers
) -> ModuleReader:
    if (weights.bits, weights.kind, weights.group_size, weights.symmetric) != (4, "float", GROUP, True):
        raise FormatError(f"nvfp4-pack-quantized holds symmetric 4-bit floats in groups of {GROUP}", "weight_packed")
    _, notes = _quantized_activations(weights, activations)
    return replace(nvfp4_reader(shape, headers, is_modelopt=False), notes=notes)


FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
)
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_GROUPED = ("group", "tensor_group")
_QUANTIZED_SUFFIXES = ("weight_packed", "weight_scale", "weight_shape")


@dataclass(frozen=True)
class ConfigGroup:
    """An entry of config_groups. targets: names, "re:" patterns or classes. format: None for the checkpoint's."""

    targets: tuple[str, ...]
    format: str | None
    weights: WeightScheme
    activations: ActivationScheme | None


@dataclass(frozen=True)
class CompressedTensors(Method):
    """groups: in the order of the file. ignore: as targets."""

    format: str
    groups: tuple[ConfigGroup, ...]
    ignore: tuple[str, ...] = ()
    name: str = "compressed-tensors"

    def reader(self, module: str, shape: tuple[int, ...], headers: Headers, kind: str) -> ModuleReader | None:
        is_plain = headers.get("weight", ("",))[0] in ("F64", "F32", "F16", "BF16")
        if is_plain or not any(suffix in headers for suffix in ("weight", *_QUANTIZED_SUFFIXES)):
            return None
        if self._ignores(module, kind):
            raise FormatError("is stored quantized, and the configuration ignores it")
        group = self._group_of(module, kind)
        if group is None:
            raise FormatError("is stored quantized, and no group of the configuration targets it")
        return module_reader(self._form_of(group), group.weights, group.activations, shape, headers)

    def stored(self, module: DenseModule) -> dict[str, TensorHeader] | None:
        group = self._group_of(module.name, module.kind)
        if group is None or module.role == "experts" or self._ignores(module.name, module.kind):
            return None
        form = self._form_of(group)
        return None if form == "dense" else stored_headers(form, group.weights, module)

    def _ignores(self, module: str, kind: str) -> bool:
        return any(_matches(target, module, kind) for target in self.ignore)

    def _form_of(self, group: ConfigGroup) -> str:
        form = group.format or self.format
        if form == "mixed-precision":
            raise FormatError("the format is mixed-precision, and the module's group names none")
        return form

    def _group_of(self, module: str, kind: str) -> ConfigGroup | None:
        """A name comes before a pattern, a pattern before a class."""
        for level in ("name", "pattern", "class"):
            for group in self.groups:
                if any(_matches(target, module, kind) == level for target in group.targets):
                    return group
        return None


def compressed_tensors(data: Mapping[str, Any]) -> CompressedTensors:
    """The method a quantization_config declares. Raises FormatError for formats and schemes we do not read, by name."""
    form = data.get("format") or "dense"
    if form not in (*FORMATS, "mixed-precision", "dense"):
        raise FormatError(f"format {form!r} is not supported, {', '.join(FORMATS)} are{did_you_mean(form, FORMATS)}")
    sparsity = data.get("sparsity_config") or {}
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise FormatError(f"sparsity_config format {sparsity['format']!r} is not supported")
    transforms = data.get("transform_config") or {}
    if not isinstance(transforms, Mapping) or transforms.get("config_groups"):
        raise FormatError("transform_config is not supported: the weights are rotated")
    groups = data.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise FormatError(f"config_groups must be an object, got {groups!r}")
    return CompressedTensors(
        form, tuple(_group(name, group) for name, group in groups.items()), _targets("ignore", data.get("ignore") or [])
    )


def _matches(target: str, module: str, kind: str) -> Literal["name", "pattern", "class"] | None:
    if target == module:
        return "name"
    if target.startswith("re:"):
        return "pattern" if re.match(target.removeprefix("re:"), module) else None
    return "class" if target == kind else None


def _targets(where: str, targets: Any) -> tuple[str, ...]:
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise FormatError(f"{where} must be a list of names, got {targets!r}")
    for target in targets:
        if target.startswith("re:"):
            check_pattern(target.removeprefix("re:"))
    return tuple(targets)


def _group(name: str, data: Any) -> ConfigGroup:
    if not isinstance(data, Mapping):
        raise FormatError(f"config_groups of {name!r} must be an object, got {data!r}")
    form = data.get("format")
    if form not in (None, "dense", *FORMATS):
        raise FormatError(f"config_groups of {name!r}: format {form!r} is not supported, {', '.join(FORMATS)} are")
    if data.get("output_activations"):
        raise FormatError(f"config_groups of {name!r}: output_activations are not supported")
    return ConfigGroup(
        targets=_targets(f"config_groups of {name!r}: targets", data.get("targets") or []),
        format=form,
        weights=_weights(name, data.get("weights")),
        activations=_activations(name, data.get("input_activations")),
    )


def _weights(name: str, data: Any) -> WeightScheme:
    where = f"config_groups of {name!r}: weights"
    if not isinstance(data, Mapping):
        raise FormatError(f"{where} must be an object, got {data!r}")
    bits, kind = data.get("num_bits", 8), data.get("type", "int")
    group_size, structure = data.get("group_size"), data.get("block_structure")
    strategy = data.get("strategy") or ("group" if group_size and group_size > 0 else "tensor")
    if (
        kind not in ("int", "float")
        or type(bits) is not int
        or not 2 <= bits <= 8
        or (kind == "float" and bits not in (4, 8))
    ):
        raise FormatError(f"{where} of {bits!r}-bit {kind!r} are not supported")
    if strategy not in _STRATEGIES:
        raise FormatError(f"{where} of strategy {strategy!r} are not supported, {', '.join(_STRATEGIES)} are")
    if strategy in _GROUPED and (type(group_size) is not int or group_size < 1):
        raise FormatError(f"{where}: group_size must be a positive integer, got {group_size!r}")
    block = two_sizes(f"{where}: block_structure", structure) if strategy == "block" else None
    if data.get("dynamic"):
        raise FormatError(f"{where} are dynamic, which no stored weight is")
    return WeightScheme(
        bits,
        kind,
        flag(data, "symmetric", True),
        strategy,
        group_size if strategy in _GROUPED else None,
        block,
        is_reordered=strategy == "group" and data.get("actorder") in (True, "group", "dynamic"),
    )


def _activations(name: str, data: Any) -> ActivationScheme | None:
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise FormatError(f"config_groups of {name!r}: input_activations must be an object, got {data!r}")
    return ActivationScheme(
        data.get("num_bits", 8),
        data.get("type", "int"),
        data.get("strategy"),
        data.get("dynamic") is True,
        flag(data, "symmetric", True),
    )
