"""The configuration of a checkpoint and the shapes of its parameters, from configuration files and headers alone.

Which parameters are quantized, and how, follows from names, dtypes and shapes of the tensors, as in loading. Where it
depends on values, those of a well-formed checkpoint are assumed: symmetric zeros if it declares `sym`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

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
from checkpoints_convert.formats import quantization_method, with_side_file
from checkpoints_convert.formats.module import DenseModule, FormatError, Method
from checkpoints_convert.gguf.checkpoint import GGUFCheckpoint, check_requantize
from checkpoints_convert.gguf.index import find_gguf
from checkpoints_convert.hub import describe, is_local, resolve
from checkpoints_convert.huggingface.config import declared_dtype, model_config, mtp_config
from checkpoints_convert.huggingface.families import family_of, is_wrapper
from checkpoints_convert.huggingface.family import Family, embedding_name, head_names, renaming
from checkpoints_convert.huggingface.quantized import abstract_quantized
from checkpoints_convert.huggingface.rules import TensorGroup
from checkpoints_convert.plan import TensorPlan, VocabularyPlan, plan, stored_dtype
from checkpoints_convert.safetensors_files import FLOAT_DTYPES, SafetensorsIndex, TensorHeader, weight_files
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
    is_mtp: bool = False,
) -> tuple[ModelConfig, Params]:
    """The result of `load` as `jax.ShapeDtypeStruct`s. No weights are read.

    A directory may have a config.json alone: which weights its quantization_config quantizes is then a rule of the
    format (`Method.stored`). Of a hub id only configuration files and the headers of safetensors are downloaded.
    Arguments and errors as of `load`, `keeps_16_bits` as of a `Checkpoint`, `is_mtp` as of `open_checkpoint`.
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
    hf_config = mtp_config(hf_config, path / CONFIG) if is_mtp else hf_config
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
    """`abstract` of a config.json and the headers of its tensors; None for no headers."""
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
    for param in plans:
        if isinstance(param, VocabularyPlan):
            continue
        if isinstance(param, TensorPlan):
            stored = stored_dtype(param, headers) if keeps_16_bits is not None and keeps_16_bits(param.target) else None
            kept = stored if stored in ("bfloat16", "float16") else param.dtype
            leaves[param.target] = jax.ShapeDtypeStruct(param.shape, numpy_dtype(kept))
            continue
        place = param.placement
        key = (param.reader.form, param.shape, place.transpose, place.view, place.outputs, len(param.experts))
        if key not in known:
            try:
                known[key] = abstract_quantized(param, config.dtype)
            except FormatError as error:
                raise CheckpointError(where, f"module {param.module!r} {error}") from None
        leaves[param.target] = known[key]
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
        leaves = {param.target: source.abstract_param(param.target) for param in source.plans}
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


# Prefixes of the names of a text part, in the lists of a quantization_config.
_TEXT_PREFIXES = ("model.language_model.", "language_model.")


def declared_headers(
    hf_config: Mapping[str, Any], config: ModelConfig, family: Family, method: Method
) -> dict[str, TensorHeader]:
    """Headers by name of all tensors of a checkpoint; dense ones are stored in the configuration's dtype.

    Raises FormatError for a configuration by which nothing is quantized.
    """
    dtype = next(name for name, stored in FLOAT_DTYPES.items() if str(stored) == config.dtype)
    rename = renaming(family, _known_names(hf_config, family))
    headers: dict[str, TensorHeader] = {}
    num_quantized = 0
    for group in family.layout(config).tensor_groups:
        role = _role(group, family)
        stored = group.placements[0].stored
        for name in map(rename, group.sources):
            module = name.removesuffix(".weight")
            by_suffix = None if role is None else method.stored(DenseModule(module, stored, role, dtype))
            if by_suffix is None:
                headers[name] = (dtype, stored)
                continue
            num_quantized += 1
            separator = "." if name.endswith(".weight") else "_"
            headers |= {f"{module}{separator}{suffix}": header for suffix, header in by_suffix.items()}
    if not num_quantized and method.name != "compressed-tensors":  # which also declares scales of a cache alone
        raise FormatError(f"{method.name} quantizes no module of this model")
    return headers


def _role(group: TensorGroup, family: Family) -> Literal["linear", "router", "head", "embedding", "experts"] | None:
    """None for tensors that no format quantizes, such as norms and biases."""
    first, source = group.placements[0], group.sources[0]
    if first.target == ("embed",):
        return "embedding"
    if not source.endswith(".weight"):
        return "experts" if len(first.stored) == 3 else None
    if not first.transpose or len(first.stored) != 2:
        return None
    if source in head_names(family):
        return "head"
    return "router" if first.target[-2:] == ("router", "weight") else "linear"


def _known_names(hf_config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """A name for `renaming`: of a model of text and images, in the form that the lists of the configuration have."""
    embedding = embedding_name(family)
    if not is_wrapper(hf_config):
        yield embedding
        return
    text = json.dumps(hf_config.get("quantization_config"))
    prefix = next((prefix for prefix in _TEXT_PREFIXES if f'"{prefix}' in text or f":{prefix}" in text), "")
    bare = embedding.removeprefix(family.prefix)
    yield f"{prefix}{bare}" if prefix.startswith("model.") else f"{prefix}{embedding}"
