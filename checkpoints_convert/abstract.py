"""The configuration of a checkpoint and the shapes of its parameters, from configuration files and headers alone.

Which parameters are quantized, and how, follows from names, dtypes and shapes of the tensors, as in loading. Where it
depends on values, those of a well-formed checkpoint are assumed: symmetric zeros if it declares `sym`.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_convert.checkpoint import ParamPath, check_dtype, insert, numpy_dtype, param_dtype, param_shapes
from checkpoints_convert.errors import CheckpointError, CheckpointNotFoundError
from checkpoints_convert.files import CONFIG, NATIVE_CONFIG, read_json
from checkpoints_convert.formats import with_side_file
from checkpoints_convert.gguf.blocks import abstract_leaf
from checkpoints_convert.gguf.checkpoint import DENSE, GGUFCheckpoint, check_requantize
from checkpoints_convert.gguf.index import find_gguf
from checkpoints_convert.hub import describe, is_local, resolve
from checkpoints_convert.huggingface.config import declared_dtype, model_config
from checkpoints_convert.huggingface.quantized import read_quantized
from checkpoints_convert.plan import QuantizedPlan, TensorPlan, plan
from checkpoints_convert.safetensors_files import NUMPY_DTYPES, SafetensorsIndex, TensorHeader, weight_files
from checkpoints_convert.store import parts_of, read_native_config, rebuild
from jaxinfer.models import ModelConfig, Params
from jaxinfer.quantization import quantize, recipe

Headers = Mapping[str, TensorHeader]


def abstract(
    path_or_hub_id: str | Path, *, dtype: str = "auto", revision: str | None = None, requantize: str | None = None
) -> tuple[ModelConfig, Params]:
    """The result of `load` as `jax.ShapeDtypeStruct`s. No weights are read.

    A directory may have a config.json alone, if nothing is quantized. Of a hub id only configuration files and the
    headers of safetensors are downloaded. Arguments and errors as of `load`; raises CheckpointError also for a
    config.json alone that declares quantized weights.
    """
    check_dtype(dtype)
    check_requantize(requantize)
    if is_local(path_or_hub_id):
        path, headers = resolve(path_or_hub_id, revision=revision), None
        if (file := find_gguf(path)) is not None:
            return _of_gguf(file, dtype, requantize)
    else:
        path, headers = describe(str(path_or_hub_id), revision)
    if requantize is not None:
        raise ValueError(f"requantize={requantize!r} is for GGUF files, and {path} is not one")
    if (path / NATIVE_CONFIG).exists():
        return _of_native(path, dtype)
    if not (path / CONFIG).exists():
        raise CheckpointNotFoundError(path, f"holds neither {CONFIG} nor {NATIVE_CONFIG}: not a checkpoint")
    hf_config = with_side_file(path, read_json(path / CONFIG))
    if headers is None and (weight_files(path) or any(path.glob("*.safetensors"))):
        with SafetensorsIndex(path) as index:
            headers = index.headers
    return abstract_of(hf_config, headers, dtype=dtype, where=path)


def abstract_of(
    hf_config: Mapping[str, Any], headers: Headers | None, *, dtype: str = "auto", where: str | Path = "checkpoint"
) -> tuple[ModelConfig, Params]:
    """The same of a config.json and the headers of its tensors; None for no headers."""
    if headers is None:
        config = model_config(hf_config, f"{where}/{CONFIG}")
        if any(hf_config.get(name) for name in ("quantization_config", "compression_config")):
            reason = f"{CONFIG} declares quantized weights, and there are no headers that say which"
            raise CheckpointError(where, reason)
        config = replace(config, dtype=(declared_dtype(hf_config, []) or "bfloat16") if dtype == "auto" else dtype)
        return config, _filled(config, {})
    config, plans = plan(hf_config, headers, dtype=dtype, where=where)
    leaves: dict[ParamPath, Any] = {}
    known: dict[Any, Any] = {}
    for one in plans:
        if isinstance(one, TensorPlan):
            leaves[one.target] = jax.ShapeDtypeStruct(one.shape, numpy_dtype(one.dtype))
            continue
        key = _kind_of(one, headers)
        if key not in known:
            known[key] = _quantized(one, headers, hf_config, config)
        leaves[one.target] = known[key]
    return config, _filled(config, leaves)


def _filled(config: ModelConfig, leaves: Mapping[ParamPath, Any]) -> Params:
    """All parameters, those that `leaves` lacks dense."""
    params: Params = {}
    for path, shape in param_shapes(config).items():
        dense = jax.ShapeDtypeStruct(shape, numpy_dtype(param_dtype(config, path)))
        insert(params, path, leaves.get(path, dense))
    return params


def _of_gguf(file: Path, dtype: str, requantize: str | None) -> tuple[ModelConfig, Params]:
    leaves: dict[ParamPath, Any] = {}
    source = GGUFCheckpoint(file, dtype=dtype, requantize=requantize)
    with source:
        for one in source.plans:
            if not one.stays_quantized or requantize == DENSE:
                continue
            if source.is_requantized(one):
                make = partial(quantize, how=recipe(requantize or ""), scale_dtype=source.config.dtype)
                leaves[one.target] = jax.eval_shape(make, jax.ShapeDtypeStruct(one.shape, jnp.float32))
            else:
                leaves[one.target] = abstract_leaf(one.entry.kind, one.shape, transpose=one.placement.transpose)
        return source.config, _filled(source.config, leaves)


def _of_native(directory: Path, dtype: str) -> tuple[ModelConfig, Params]:
    native = read_native_config(directory)
    config = native.model if dtype == "auto" else replace(native.model, dtype=dtype)
    leaves = {}
    for name, description in native.quantized.items():
        stored = parts_of(description).items()
        parts: Any = {part: jax.ShapeDtypeStruct(shape, numpy_dtype(kind)) for part, (shape, kind) in stored}
        leaves[tuple(name.split("."))] = rebuild(description, parts)
    return config, _filled(config, leaves)


# Quantized modules: the format's own reader is given tensors that hold nothing but what makes them well-formed.


def _kind_of(one: QuantizedPlan, headers: Headers) -> Any:
    """Equal for modules that become leaves of the same shapes."""
    tensors = tuple((suffix, headers[name]) for suffix, name in one.sources.items())
    read = getattr(one.reader.read, "func", one.reader.read)
    return read, tensors, one.shape, one.transpose, one.view, len(one.experts), one.outputs is None or one.target[-2:]


def _quantized(one: QuantizedPlan, headers: Headers, hf_config: Mapping[str, Any], config: ModelConfig) -> Any:
    declared = hf_config.get("quantization_config") or hf_config.get("compression_config") or {}
    first = replace(one, experts=(), zero_bias=None)
    tensors = {name: _tensor(suffix, name, first, headers, declared) for suffix, name in first.sources.items()}

    def read_into(name: str, offset: int, buffer: memoryview) -> None:
        buffer[:] = tensors[name].reshape(-1).view(np.uint8).data[offset : offset + len(buffer)]

    index: Any = SimpleNamespace(
        entry=lambda name: SimpleNamespace(dtype=headers[name][0], shape=tensors[name].shape),
        path_of=lambda name: Path("headers"),
        read_into=read_into,
    )
    leaf = read_quantized(index, first, config.dtype)
    stacked = (len(one.experts),) if one.experts else ()
    codebook = getattr(leaf, "codebook", None)

    def shaped(array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape if array is codebook else (*stacked, *array.shape), array.dtype)

    return jax.tree.map(shaped, leaf)


def _tensor(suffix: str, name: str, one: QuantizedPlan, headers: Headers, declared: Mapping[str, Any]) -> np.ndarray:
    kind, shape = headers[name]
    dtype = NUMPY_DTYPES[kind]
    if "quant_state" in suffix:  # bitsandbytes' JSON, which no header tells
        outputs_first = list(one.shape[:-3:-1]) if one.transpose else list(one.shape)
        num_blocks = headers[one.sources["weight.absmax"]][1][0]
        state: dict[str, Any] = {"shape": outputs_first, "quant_type": suffix[-3:], "nested_offset": 0.0}
        state["blocksize"] = _block_size(outputs_first[0] * outputs_first[1], num_blocks)
        if nested := one.sources.get("weight.nested_absmax"):
            state["nested_blocksize"] = _block_size(num_blocks, headers[nested][1][0])
        return np.frombuffer(json.dumps(state).encode(), np.uint8)
    if suffix == "weight_format":
        return np.zeros(shape, dtype)
    if suffix == "weight_shape":
        return np.array([headers[one.sources["weight_packed"]][1][0], one.shape[-2 if one.transpose else -1]], dtype)
    if suffix in ("g_idx", "weight_g_idx"):
        groups = next(headers[one.sources[key]][1] for key in ("scales", "weight_scale") if key in one.sources)
        count = groups[0] if suffix == "g_idx" else groups[-1]
        order = np.arange(shape[0]) // -(-shape[0] // count)
        is_permuted = declared.get("desc_act") or suffix == "weight_g_idx"
        return (order[::-1] if is_permuted else order).astype(dtype)
    if suffix == "qzeros" and declared.get("sym", True) and str(declared.get("quant_method", "")).lower() != "awq":
        bits = int(declared.get("bits") or declared.get("w_bit") or 4)
        middle = np.array([(2 ** (bits - 1) - 1) >> bit & 1 for bit in range(bits)], np.uint8)
        stream = np.tile(middle, -(-shape[-1] * 32 // bits))[: shape[-1] * 32]
        words = np.packbits(stream, bitorder="little").view(np.int32)
        return np.broadcast_to(words, shape).copy()
    if dtype.itemsize == 1 and dtype.kind not in "iu":
        return np.ones(shape, np.float32).astype(dtype)
    return np.ones(shape, dtype) if dtype.kind != "V" else np.ones(shape, np.float32).astype(dtype)


def _block_size(num_values: int, num_blocks: int) -> int:
    """The power of two that divides `num_values` into `num_blocks` blocks."""
    return 1 << max(-(-num_values // num_blocks) - 1, 0).bit_length()
