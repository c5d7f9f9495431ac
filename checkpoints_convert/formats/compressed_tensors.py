"""compressed-tensors checkpoints (llm-compressor): the configuration, and which scheme a module has."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from checkpoints_convert.formats.compressed_tensors_modules import Activations, Weights, module_reader
from checkpoints_convert.formats.gptq import check_pattern
from checkpoints_convert.formats.module import FormatError, Method, ModuleReader, flag
from checkpoints_convert.safetensors_index import TensorHeader
from jaxinfer.checks import did_you_mean

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")
_QUANTIZED_SUFFIXES = ("weight_packed", "weight_scale", "weight_shape")


@dataclass(frozen=True)
class Group:
    """An entry of config_groups. targets: names, "re:" patterns or classes. format: None for the checkpoint's."""

    targets: tuple[str, ...]
    format: str | None
    weights: Weights
    activations: Activations | None


@dataclass(frozen=True)
class CompressedTensors(Method):
    """groups: in the order of the file. ignore: as targets."""

    format: str
    groups: tuple[Group, ...]
    ignore: tuple[str, ...] = ()
    name: str = "compressed-tensors"

    def reader(
        self, module: str, shape: tuple[int, ...], headers: Mapping[str, TensorHeader], kind: str
    ) -> ModuleReader | None:
        is_plain = headers.get("weight", ("",))[0] in ("F64", "F32", "F16", "BF16")
        if is_plain or not any(suffix in headers for suffix in ("weight", *_QUANTIZED_SUFFIXES)):
            return None
        group = self._group_of(module, kind)
        form = group.format or self.format
        if form == "mixed-precision":
            raise FormatError("the format is mixed-precision, and the module's group names none")
        return module_reader(form, group.weights, group.activations, shape, headers)

    def _group_of(self, module: str, kind: str) -> Group:
        """A name comes before a pattern, a pattern before a class."""
        if any(_matches(target, module, kind) for target in self.ignore):
            raise FormatError("is stored quantized, and the configuration ignores it")
        for level in ("name", "pattern", "class"):
            for group in self.groups:
                if any(_matches(target, module, kind) == level for target in group.targets):
                    return group
        raise FormatError("is stored quantized, and no group of the configuration targets it")


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


def _group(name: str, data: Any) -> Group:
    if not isinstance(data, Mapping):
        raise FormatError(f"config_groups of {name!r} must be an object, got {data!r}")
    form = data.get("format")
    if form not in (None, "dense", *FORMATS):
        raise FormatError(f"config_groups of {name!r}: format {form!r} is not supported, {', '.join(FORMATS)} are")
    if data.get("output_activations"):
        raise FormatError(f"config_groups of {name!r}: output_activations are not supported")
    return Group(
        targets=_targets(f"config_groups of {name!r}: targets", data.get("targets") or []),
        format=form,
        weights=_weights(name, data.get("weights")),
        activations=_activations(name, data.get("input_activations")),
    )


def _weights(name: str, data: Any) -> Weights:
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
    if strategy == "group" and (type(group_size) is not int or group_size < 1):
        raise FormatError(f"{where}: group_size must be a positive integer, got {group_size!r}")
    block = None
    if strategy == "block":
        if (
            not isinstance(structure, list)
            or len(structure) != 2
            or not all(type(n) is int and n > 0 for n in structure)
        ):
            raise FormatError(f"{where}: block_structure must be two positive integers, got {structure!r}")
        block = (structure[0], structure[1])
    if data.get("dynamic"):
        raise FormatError(f"{where} are dynamic, which no stored weight is")
    return Weights(
        bits, kind, flag(data, "symmetric", True), strategy, group_size if strategy == "group" else None, block
    )


def _activations(name: str, data: Any) -> Activations | None:
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise FormatError(f"config_groups of {name!r}: input_activations must be an object, got {data!r}")
    return Activations(
        data.get("num_bits", 8),
        data.get("type", "int"),
        data.get("strategy"),
        data.get("dynamic") is True,
        flag(data, "symmetric", True),
    )
