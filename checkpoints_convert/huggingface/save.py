"""Writing Hugging Face checkpoints: config.json and safetensors that Transformers opens.

Quantized parameters are written as compressed-tensors.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from checkpoints_convert.arrays import count_nonfinite
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import CONFIG, WEIGHTS_INDEX, make_durable, write_json
from checkpoints_convert.formats import LayerKVScales
from checkpoints_convert.huggingface.compress import Stored, compress, quantization_config
from checkpoints_convert.huggingface.config import huggingface_config
from checkpoints_convert.huggingface.families import Family, family_of, source_of
from checkpoints_convert.source import ParamPath, check_dtype, check_finite, numpy_dtype, param_shapes
from checkpoints_convert.staging import staged
from jaxinfer.models import ModelConfig, Params
from jaxinfer.quantization import QuantizedArray, check
from jaxinfer.quantization.matmul import transposed

MAX_SHARD_BYTES = 2 * 2**30  # a shard is held in host memory while it is written


def save_huggingface(
    config: ModelConfig,
    params: Params,
    dst: str | Path,
    dtype: str = "bfloat16",
    *,
    extra_files: Iterable[str | Path] = (),
    extra_config: Mapping[str, Any] | None = None,
    kv_scales: Sequence[LayerKVScales] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Writes config.json and safetensors to the directory `dst`, which appears when it is complete.

    Args:
      dtype: of the stored weights; "auto" keeps that of `params`. Weights that are quantized stay as they are: integers
        of 2 to 8 bits per tensor, output or group become pack-quantized, those with int8 activations int-quantized,
        FP8 float-quantized (naive-quantized without quantized activations), MXFP4 mxfp4-pack-quantized.
      kv_scales: of an 8-bit key-value cache, one per layer.
      extra_files: copied beside the weights under their own names, such as tokenizer files.
      extra_config: further fields of config.json, such as `eos_token_id`. Without them the special tokens are null,
        since Transformers would otherwise assume those of the first Llama.

    Raises:
      CheckpointError: a configuration the architecture has no fields for; parameters that do not fit it, or are not
        finite in `dtype`; a scheme compressed-tensors has no words for, such as NF4; a destination that exists (unless
        `overwrite`) or has no room.
    """
    check_dtype(dtype)
    leaves = {
        tuple(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda node: not isinstance(node, dict))
    }
    _check_params(config, leaves, dst)
    config = replace(config, dtype=_own_dtype(leaves, dst) if dtype == "auto" else dtype)
    data = huggingface_config(config) | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

    def size_of(path: ParamPath) -> int:
        leaf = leaves[path]
        return leaf.num_bytes if isinstance(leaf, QuantizedArray) else _num_bytes(config, path)

    with staged(Path(dst), sum(map(size_of, leaves)), overwrite=overwrite) as partial:
        for file in map(Path, extra_files):
            shutil.copyfile(file, partial / file.name)
        quantization = write_shards(
            config, partial, leaves.__getitem__, size_of, kv_scales=kv_scales, max_shard_bytes=max_shard_bytes
        )
        write_json(partial / CONFIG, data | dict(extra_config or {}) | quantization)
    return Path(dst)


def write_shards(
    config: ModelConfig,
    directory: Path,
    read: Callable[[ParamPath], Any],
    size_of: Callable[[ParamPath], int],
    *,
    kv_scales: Sequence[LayerKVScales] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> dict[str, Any]:
    """Writes the parameters `read` gives, cast to config.dtype, as model.safetensors or numbered shards and an index.

    `read` is called once per parameter, in the order of `param_shapes`; one shard is held at a time. `size_of` is a
    parameter's size in bytes, about. Returns the fields for config.json that say how parameters are quantized.
    """
    shards = list(_shards(config, size_of, max_shard_bytes))
    family = family_of(config)
    weight_map: dict[str, str] = {}
    modules: dict[str, Stored] = {}
    total = 0
    for number, paths in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = _kv_tensors(config, kv_scales) if number == 1 else {}
        for path in paths:
            key, transpose = source_of(family, path)
            leaf = read(path)
            if isinstance(leaf, QuantizedArray):
                module = key.removesuffix(".weight")
                parts, modules[module] = _compressed(leaf, path, transpose, directory)
                tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in parts.items()}
            else:
                tensors[key] = _stored(leaf, path, numpy_dtype(config.dtype), transpose, directory)
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, directory / name, metadata={"format": "pt"})
        make_durable(directory / name)
    if len(shards) > 1:
        write_json(directory / WEIGHTS_INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    if not modules and not kv_scales:
        return {}
    strategy = None
    if kv_scales:
        strategy = (
            "tensor" if all(len(scale) == 1 for layer in kv_scales for scale in (layer.k, layer.v)) else "attn_head"
        )
    linears = _linears(config, family)
    return {"quantization_config": quantization_config(modules, linears, kv_strategy=strategy)}


def _linears(config: ModelConfig, family: Family) -> list[str]:
    """Modules of the class Linear, the head also where it is the embedding."""
    names = []
    for path in param_shapes(config):
        key, transpose = source_of(family, path)
        if transpose:
            names.append(key.removesuffix(".weight"))
    return [*names, *(["lm_head"] if "lm_head" not in names else [])]


def _kv_tensors(config: ModelConfig, kv_scales: Sequence[LayerKVScales]) -> dict[str, np.ndarray]:
    if kv_scales and len(kv_scales) != config.num_layers:
        raise ValueError(f"{len(kv_scales)} layers of kv_scales for a model of {config.num_layers}")
    return {
        f"model.layers.{layer}.self_attn.{side}_scale": np.array(values, np.float32)
        for layer, scales in enumerate(kv_scales)
        for side, values in (("k", scales.k), ("v", scales.v))
    }


def _compressed(
    leaf: QuantizedArray, path: ParamPath, transpose: bool, where: Path
) -> tuple[dict[str, np.ndarray], Stored]:
    leaf = jax.tree.map(np.asarray, leaf)
    name = f"parameter {'.'.join(path)!r}"
    try:
        check(leaf, name)
        return compress(leaf if transpose else jax.tree.map(np.asarray, transposed(leaf)))
    except ValueError as error:
        raise CheckpointError(where, str(error) if str(error).startswith(name) else f"{name}: {error}") from None


def _shards(
    config: ModelConfig, size_of: Callable[[ParamPath], int], max_shard_bytes: int
) -> Iterator[list[ParamPath]]:
    shard: list[ParamPath] = []
    filled = 0
    for path in param_shapes(config):
        size = size_of(path)
        if shard and filled + size > max_shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(path)
        filled += size
    yield shard


def _num_bytes(config: ModelConfig, path: ParamPath) -> int:
    return int(np.prod(param_shapes(config)[path], dtype=np.int64)) * numpy_dtype(config.dtype).itemsize


def _stored(leaf: Any, path: ParamPath, dtype: np.dtype, transpose: bool, where: Path) -> np.ndarray:
    array = np.asarray(leaf)
    with np.errstate(over="ignore", invalid="ignore"):
        array = array.astype(dtype, copy=False)
    check_finite(where, ".".join(path), count_nonfinite(array), array.size)
    # The writer takes the memory as it lies, so the order must be C.
    return np.ascontiguousarray(array.T if transpose else array)


def _own_dtype(leaves: Mapping[ParamPath, Any], where: str | Path) -> str:
    dtypes = sorted({str(leaf.dtype) for leaf in leaves.values() if not isinstance(leaf, QuantizedArray)})
    if len(dtypes) != 1:
        raise CheckpointError(where, f"the parameters mix {' and '.join(dtypes)}: choose one with dtype=")
    return dtypes[0]


def _check_params(config: ModelConfig, leaves: Mapping[ParamPath, Any], where: str | Path) -> None:
    wanted = param_shapes(config)
    problems = [f"parameter {'.'.join(path)!r} is missing" for path in wanted if path not in leaves]
    problems += [f"parameter {'.'.join(path)!r} is not of this model" for path in leaves if path not in wanted]
    for path in wanted.keys() & leaves.keys():
        shape = getattr(leaves[path], "shape", None)
        if shape != wanted[path]:
            kind = type(leaves[path]).__name__
            problems.append(f"parameter {'.'.join(path)!r} is {kind} of shape {shape}, not an array {wanted[path]}")
    if problems:
        raise CheckpointError(where, *problems)
