"""auto-round checkpoints (Cheng et al. 2023): weights packed as GPTQ or AWQ, with bits per layer in `extra_config`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from checkpoints_convert.formats.awq import Awq, awq
from checkpoints_convert.formats.gptq import Gptq, check_pattern, gptq
from checkpoints_convert.formats.module import FormatError, flag

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
    overrides = _overrides(data.get("extra_config"))
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


def _overrides(extra: Any) -> tuple[tuple[str, dict[str, Any]], ...]:
    if not extra:
        return ()
    if not isinstance(extra, Mapping) or not all(isinstance(fields, Mapping) for fields in extra.values()):
        raise FormatError(f"extra_config must map layers to fields, got {extra!r}")
    for pattern, fields in extra.items():
        check_pattern(pattern)
        if (fields.get("data_type") or "int") != "int" and (fields.get("bits") or 16) < 16:
            raise FormatError(f"extra_config of {pattern!r}: data_type {fields['data_type']!r} is not supported")
    return tuple((pattern, dict(fields)) for pattern, fields in extra.items())
