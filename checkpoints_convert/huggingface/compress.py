"""Writing `QuantizedArray`s as compressed-tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints_convert.formats.float4 import BLOCK
from checkpoints_convert.formats.module import as_int8, pack, transposed, unsigned
from jaxinfer.quantization import NestedScales, QuantizedArray
from jaxinfer.quantization.rtn import E2M1

_INSTEAD = "compressed-tensors cannot express it; the native form can"
_NOT_MXFP4 = f"values of a codebook, but for MXFP4's in blocks of {BLOCK}: {_INSTEAD}"


@dataclass(frozen=True)
class StoredForm:
    """How a module is stored: an entry of `config_groups` without its targets."""

    format: str
    bits: int
    kind: str
    symmetric: bool
    strategy: str
    group_size: int | None = None
    block: tuple[int, int] | None = None
    activations: str | None = None
    actorder: str | None = None


def stored_form(weight: QuantizedArray) -> StoredForm:
    """How a weight [K, N] is stored. Its arrays may be abstract: only types and shapes matter.

    Raises ValueError for a scheme that compressed-tensors does not have.
    """
    scheme, is_permuted = weight.scheme, weight.permutation is not None
    is_nested = isinstance(weight.scales, NestedScales)
    if scheme.kind == "codebook":
        if scheme.block != (BLOCK, 1) or weight.shape[0] % BLOCK:
            raise ValueError(_NOT_MXFP4)
        if is_nested or scheme.activations is not None or is_permuted:
            raise ValueError(f"MXFP4 with nested scales, quantized activations or permuted inputs: {_INSTEAD}")
        return StoredForm("mxfp4-pack-quantized", 4, "float", True, "group", BLOCK)
    if scheme.kind == "affine":
        raise ValueError(f"minima that are no multiple of the scale: {_INSTEAD}")
    if is_nested:
        raise ValueError(f"nested scales: {_INSTEAD}")
    strategy = _strategy(weight)
    is_packed = scheme.kind == "int" and (scheme.bits < 8 or scheme.activations is None)
    if is_permuted and not is_packed:
        raise ValueError(f"permuted inputs of 8-bit values: {_INSTEAD}")
    if scheme.kind == "float" and weight.values.dtype != ml_dtypes.float8_e4m3fn:
        raise ValueError(f"{weight.values.dtype.name} in blocks of {scheme.block}: {_INSTEAD}")
    if is_packed and weight.zeros is not None and strategy == "tensor":
        raise ValueError(f"one zero for a whole packed weight: {_INSTEAD}")
    plain = "int-quantized" if scheme.kind == "int" else "float-quantized" if scheme.activations else "naive-quantized"
    return StoredForm(
        format="pack-quantized" if is_packed else plain,
        bits=scheme.bits,
        kind=scheme.kind,
        symmetric=weight.zeros is None,
        strategy=strategy,
        group_size=scheme.block[0] if strategy == "group" else None,
        block=(scheme.block[1], scheme.block[0]) if strategy == "block" else None,
        activations=scheme.activations,
        actorder="group" if is_permuted else None,
    )


def compress(weight: QuantizedArray) -> tuple[dict[str, np.ndarray], StoredForm]:
    """The tensors of a module, by suffix, for a weight [K, N] of host arrays, and how they are stored.

    Raises ValueError as `stored_form`, and for a codebook or scales that are not MXFP4's.
    """
    stored = stored_form(weight)
    if stored.format == "mxfp4-pack-quantized":
        return _mxfp4(weight), stored
    scales = np.ascontiguousarray(np.asarray(weight.scales).T)
    scales = scales.reshape(1) if stored.strategy == "tensor" else scales
    if stored.format == "pack-quantized":
        return _packed(weight, scales, stored), stored
    values = np.asarray(weight.values)
    tensors = {"weight": transposed(as_int8(values) if stored.kind == "int" else values), "weight_scale": scales}
    if weight.zeros is not None:
        tensors["weight_zero_point"] = np.asarray(weight.zeros).T.reshape(scales.shape)
    return tensors, stored


def quantization_config(
    modules: Mapping[str, StoredForm], linears: list[str], *, kv_strategy: str | None
) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    Args:
      modules: how each quantized module is stored, by name. linears: every Linear of the model; those that are not
        quantized are listed as ignored.
      kv_strategy: "tensor" or "attn_head" where the checkpoint has scales of the key-value cache.
    """
    groups: dict[StoredForm, list[str]] = {}
    for module, stored in modules.items():
        groups.setdefault(stored, []).append(module)
    is_uniform = len(groups) == 1 and set(modules) <= set(linears)
    formats = {stored.format for stored in groups}
    kv_cache = {"num_bits": 8, "type": "float", "strategy": kv_strategy, "symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision" if formats else "dense",
        "config_groups": {
            f"group_{number}": _group(stored, ["Linear"] if is_uniform else names)
            for number, (stored, names) in enumerate(groups.items())
        },
        "ignore": [module for module in linears if module not in modules],
        "kv_cache_scheme": kv_cache if kv_strategy else None,
    }


def _group(stored: StoredForm, targets: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": stored.bits,
        "type": stored.kind,
        "symmetric": stored.symmetric,
        "strategy": stored.strategy,
        "group_size": stored.group_size,
        "block_structure": None if stored.block is None else list(stored.block),
        "dynamic": False,
        "actorder": stored.actorder,
    }
    kind = {"int8": "int", "fp8": "float"}.get(stored.activations or "")
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "targets": targets,
        "format": stored.format,
        "weights": weights,
        "input_activations": activations if kind else None,
        "output_activations": None,
    }


def _strategy(weight: QuantizedArray) -> str:
    (inputs, outputs), (bk, bn) = weight.shape[-2:], weight.scheme.block
    is_float = weight.scheme.kind == "float"
    if (bk, bn) == (inputs, outputs) or (not is_float and bk >= inputs and bn >= outputs):
        return "tensor"
    if bn == 1 and bk >= inputs:
        return "channel"
    if bn == 1 and not is_float:
        if inputs % bk:
            raise ValueError(f"groups of {bk} inputs with {inputs % bk} left over: {_INSTEAD}")
        return "group"
    if not is_float:
        raise ValueError(f"blocks of {bk} inputs and {bn} outputs of integers: {_INSTEAD}")
    return "block"


def _packed(weight: QuantizedArray, scales: np.ndarray, stored: StoredForm) -> dict[str, np.ndarray]:
    codes, bits = unsigned(np.asarray(weight.values), stored.bits), stored.bits
    tensors = {}
    if weight.permutation is not None:
        order = np.asarray(weight.permutation)
        group, natural = np.empty(len(order), np.int32), np.empty_like(codes)
        group[order] = np.arange(len(order)) // (stored.group_size or len(order))
        natural[order] = codes
        codes, tensors["weight_g_idx"] = natural, group
    tensors["weight_packed"] = transposed(pack(codes, bits, axis=0))
    tensors["weight_scale"] = scales
    tensors["weight_shape"] = np.array(weight.shape[::-1], np.int64)
    if weight.zeros is not None:
        tensors["weight_zero_point"] = transposed(pack(unsigned(np.asarray(weight.zeros), bits), bits, axis=1))
    return tensors


def _mxfp4(weight: QuantizedArray) -> dict[str, np.ndarray]:
    codebook = np.asarray(weight.codebook)
    factor = np.float32(codebook[7] / E2M1[7])  # ggml has the codebook doubled, and the scales halved
    if not np.array_equal(codebook, factor * E2M1):
        raise ValueError(_NOT_MXFP4)
    mantissa, exponents = np.frexp(np.asarray(weight.scales).astype(np.float32).T * factor)
    exponents = exponents.astype(np.int32) + 126
    if (mantissa != 0.5).any() or exponents.min() < 0 or exponents.max() > 254:
        raise ValueError(f"MXFP4 with scales that are no powers of two: {_INSTEAD}")
    codes = transposed(unsigned(np.asarray(weight.values), 4))
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": np.ascontiguousarray(exponents.astype(np.uint8))}
