"""The configuration of a checkpoint and the shapes of its parameters, from configuration files and headers alone.

Which parameters are quantized, and how, follows from names, dtypes and shapes of the tensors, as in loading. Where it
depends on values, those of a well-formed checkpoint are assumed: symmetric zeros if it declares `sym`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from checkpoints_convert.checkpoint import (
    Keeps16Bits,
    ParamPath,
    check_dtype,
    insert,
    numpy_dtype,
    param_dtype,
    param_shapes,
)
from checkpoints_convert.errors import CheckpointError, CheckpointNotFoundError
from checkpoints_convert.files import CONFIG, NATIVE_CONFIG, read_json
from checkpoints_convert.formats import FormatError, quantization_method, with_side_file
from checkpoints_convert.gguf.checkpoint import GGUFCheckpoint, check_requantize
from checkpoints_convert.gguf.index import find_gguf
from checkpoints_convert.hub import describe, is_local, resolve
from checkpoints_convert.huggingface.config import declared_dtype, model_config
from checkpoints_convert.huggingface.declared import declared_headers
from checkpoints_convert.huggingface.families import family_of
from checkpoints_convert.huggingface.quantized import abstract_quantized
from checkpoints_convert.plan import TensorPlan, plan, stored_dtype
from checkpoints_convert.safetensors_files import SafetensorsIndex, TensorHeader, weight_files
from checkpoints_convert.store import parts_of, read_native_config, rebuild
from jaxinfer.models import ModelConfig, Params

Headers = Mapping[str, TensorHeader]


def abstract(
    path_or_hub_id: str | Path,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    requantize: str | None = None,
    keeps_16_bits: Keeps16Bits | None = None,
) -> tuple[ModelConfig, Params]:
    """The result of `load` as `jax.ShapeDtypeStruct`s. No weights are read.

    A directory may have a config.json alone: which weights its quantization_config quantizes is then a rule of the
    format (`Method.stored`). Of a hub id only configuration files and the headers of safetensors are downloaded.
    Arguments and errors as of `load`, and `keeps_16_bits` as of a `Checkpoint`.
    """
    check_dtype(dtype)
    check_requantize(requantize)
    if is_local(path_or_hub_id):
        path, headers = resolve(path_or_hub_id, revision=revision), None
        if (file := find_gguf(path)) is not None:
            return _of_gguf(file, dtype, requantize, keeps_16_bits)
    else:
        path, headers = describe(str(path_or_hub_id), revision)
    if requantize is not None:
        raise ValueError(f"requantize={requantize!r} is for GGUF files, and {path} is not one")
    if (path / NATIVE_CONFIG).exists():
        return _of_native(path, dtype, keeps_16_bits)
    if not (path / CONFIG).exists():
        raise CheckpointNotFoundError(path, f"holds neither {CONFIG} nor {NATIVE_CONFIG}: not a checkpoint")
    hf_config = with_side_file(path, read_json(path / CONFIG))
    if headers is None and (weight_files(path) or any(path.glob("*.safetensors"))):
        with SafetensorsIndex(path) as index:
            headers = index.headers
    return abstract_of(hf_config, headers, dtype=dtype, where=path, keeps_16_bits=keeps_16_bits)


def abstract_of(
    hf_config: Mapping[str, Any],
    headers: Headers | None,
    *,
    dtype: str = "auto",
    where: str | Path = "checkpoint",
    keeps_16_bits: Keeps16Bits | None = None,
) -> tuple[ModelConfig, Params]:
    """The same of a config.json and the headers of its tensors; None for no headers."""
    if headers is None:
        config = model_config(hf_config, f"{where}/{CONFIG}")
        config = replace(config, dtype=declared_dtype(hf_config, []) or "bfloat16")
        method = quantization_method(hf_config)
        if method is None:
            config = config if dtype == "auto" else replace(config, dtype=dtype)
            return config, _filled(config, {})
        try:
            headers = declared_headers(hf_config, config, family_of(config), method)
        except FormatError as error:
            raise CheckpointError(f"{where}/{CONFIG}", f"quantization_config: {error}") from None
    config, plans = plan(hf_config, headers, dtype=dtype, where=where)
    leaves: dict[ParamPath, Any] = {}
    known: dict[Any, Any] = {}  # layers are alike
    for one in plans:
        if isinstance(one, TensorPlan):
            stored = stored_dtype(one, headers) if keeps_16_bits is not None and keeps_16_bits(one.target) else None
            kept = stored if stored in ("bfloat16", "float16") else one.dtype
            leaves[one.target] = jax.ShapeDtypeStruct(one.shape, numpy_dtype(kept))
            continue
        key = (one.reader.form, one.shape, one.transpose, one.view, one.outputs, len(one.experts))
        if key not in known:
            try:
                known[key] = abstract_quantized(one, config.dtype)
            except FormatError as error:
                raise CheckpointError(where, f"module {one.module!r} {error}") from None
        leaves[one.target] = known[key]
    return config, _filled(config, leaves)


def _filled(config: ModelConfig, leaves: Mapping[ParamPath, Any]) -> Params:
    """All parameters, those that `leaves` lacks dense."""
    params: Params = {}
    for path, shape in param_shapes(config).items():
        dense = jax.ShapeDtypeStruct(shape, numpy_dtype(param_dtype(config, path)))
        insert(params, path, leaves.get(path, dense))
    return params


def _of_gguf(
    file: Path, dtype: str, requantize: str | None, keeps_16_bits: Keeps16Bits | None
) -> tuple[ModelConfig, Params]:
    source = GGUFCheckpoint(file, dtype=dtype, requantize=requantize)
    source.keeps_16_bits = keeps_16_bits
    with source:
        leaves = {one.target: source.abstract_param(one.target) for one in source.plans}
        return source.config, _filled(source.config, leaves)


def _of_native(directory: Path, dtype: str, keeps_16_bits: Keeps16Bits | None) -> tuple[ModelConfig, Params]:
    native = read_native_config(directory)
    config = native.model if dtype == "auto" else replace(native.model, dtype=dtype)
    leaves: dict[ParamPath, Any] = {}
    if keeps_16_bits is not None and native.model.dtype in ("bfloat16", "float16"):
        for path, shape in filter(lambda item: keeps_16_bits(item[0]), param_shapes(config).items()):
            leaves[path] = jax.ShapeDtypeStruct(shape, numpy_dtype(native.model.dtype))
    for name, description in native.quantized.items():
        stored = parts_of(description).items()
        parts: Any = {part: jax.ShapeDtypeStruct(shape, numpy_dtype(kind)) for part, (shape, kind) in stored}
        leaves[tuple(name.split("."))] = rebuild(description, parts)
    return config, _filled(config, leaves)
