"""Quantized checkpoints of other libraries, read into `QuantizedArray`s: a file per format."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from checkpoints_convert.files import QUANTIZATION_FILES, read_json
from checkpoints_convert.formats.bitsandbytes import bitsandbytes
from checkpoints_convert.formats.compressed_tensors import compressed_tensors
from checkpoints_convert.formats.float4 import mxfp4
from checkpoints_convert.formats.fp8 import fbgemm_fp8, fp8, modelopt
from checkpoints_convert.formats.gptq import autoround, awq, gptq
from checkpoints_convert.formats.module import FormatError, Method
from jaxinfer.checks import did_you_mean, whole_numbers

METHODS: dict[str, Callable[[Mapping[str, Any]], Method]] = {
    "gptq": gptq,
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "mxfp4": mxfp4,
    "auto-round": autoround,
    "intel/auto-round": autoround,
}
# Reasons why other methods are not supported.
_REFUSED = {
    "mlx": "MLX checkpoints hold affine groups with floating-point offsets",
    "hqq": "HQQ checkpoints hold groups with floating-point zeros, packed in ways that depend on the library's version;"
    " open the original model, or quantize it with `jaxinfer quantize`",
    "aqlm": "AQLM checkpoints hold sums of learned vectors of 8 weights, with codebooks of up to 65,536 of them; open"
    " the original model, or quantize it with `jaxinfer quantize`",
}


def quantization_method(hf_config: Mapping[str, Any]) -> Method | None:
    """The quantization method that config.json declares; None for a model that is not quantized.

    Raises FormatError for unsupported methods, formats and versions, by name.
    """
    name = quantization_name(hf_config)
    return None if name is None else METHODS[name](_declared(hf_config))


def _declared(hf_config: Mapping[str, Any]) -> Any:
    return whole_numbers(hf_config.get("quantization_config") or hf_config.get("compression_config"))


def quantization_name(hf_config: Mapping[str, Any]) -> str | None:
    """The name of the method that config.json declares; None for a model that is not quantized.

    Raises FormatError for unsupported methods.
    """
    data = _declared(hf_config)
    if not data:
        if hf_config.get("quantization"):
            raise FormatError(f"the method 'mlx' is not supported: {_REFUSED['mlx']}")
        return None
    if not isinstance(data, Mapping):
        raise FormatError(f"must be an object, got {data!r}")
    name = data.get("quant_method")
    if name is None and hf_config.get("quantization") and {"bits", "group_size"} <= data.keys():
        name = "mlx"
    if name is None and (data.get("load_in_4bit") or data.get("load_in_8bit")):
        name = "bitsandbytes"
    if name is None and "config_groups" in data:
        name = "compressed-tensors"
    if name not in METHODS:
        why = _REFUSED.get(str(name), f"{', '.join(METHODS)} are")
        raise FormatError(f"quant_method {name!r} is not supported{did_you_mean(name, METHODS)}: {why}")
    return name


def with_side_file(directory: Path, hf_config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the `quantization_config` that older repositories have in a separate file."""
    if any(hf_config.get(name) for name in ("quantization_config", "compression_config")):
        return hf_config
    for name in QUANTIZATION_FILES:
        if (directory / name).exists():
            data = read_json(directory / name)
            if name == "hf_quant_config.json":
                method = "modelopt"
            else:
                method = "awq" if "version" in data or "zero_point" in data else "gptq"
            return {**hf_config, "quantization_config": {"quant_method": method, **data}}
    return hf_config
