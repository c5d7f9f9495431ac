"""auto-round checkpoints (Cheng et al. 2023): weights packed as GPTQ or AWQ, with bits per layer in `extra_config`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from checkpoints_convert.formats.awq import Awq, awq
from checkpoints_convert.formats.gptq import Gptq, check_pattern, gptq
from checkpoints_convert.formats.module import FormatError

# Of auto_round/inference: what each packing stores of a zero.
_V1 = ("auto_round:auto_gptq", "auto_round:gptq", "auto")
_V2 = ("auto_round", "auto_round:gptqmodel")
_AWQ = ("auto_round:auto_awq", "auto_round:awq")


def autoround(data: Mapping[str, Any]) -> Gptq | Awq:
    """The method a quantization_config declares. Raises FormatError for packings and types we do not read, by name."""
    packing = data.get("packing_format") or "auto_round:auto_gptq"
    if packing not in _V1 + _V2 + _AWQ:
        raise FormatError(f"packing_format {packing!r} is not supported, {', '.join(_V1[:-1] + _V2 + _AWQ)} are")
    if str(data.get("data_type") or "int") != "int":
        raise FormatError(f"data_type {data['data_type']!r} is not supported, only 'int' is")
    if (act_bits := data.get("act_bits") or 16) < 16:
        raise FormatError(f"act_bits {act_bits} is not supported: weights alone may be quantized")
    if data.get("super_bits"):
        raise FormatError("super_bits is not supported")
    overrides = _overrides(data.get("extra_config"))
    if packing in _AWQ:
        return replace(awq({**data, "version": "gemm", "zero_point": True}), overrides=overrides, name="auto-round")
    kind = "gptq" if packing in _V1 else "gptq_v2"
    rest = {name: value for name, value in data.items() if name not in ("format", "dynamic", "meta")}
    return replace(gptq({**rest, "checkpoint_format": kind}), overrides=overrides, name="auto-round")


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
