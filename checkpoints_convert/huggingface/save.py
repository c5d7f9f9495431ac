"""Writing Hugging Face checkpoints: config.json and safetensors that Transformers opens."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from checkpoints_convert.arrays import count_nonfinite
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import CONFIG, WEIGHTS_INDEX, make_durable, write_json
from checkpoints_convert.huggingface.config import huggingface_config
from checkpoints_convert.huggingface.families import family_of, source_of
from checkpoints_convert.source import ParamPath, check_dtype, check_finite, numpy_dtype, param_shapes
from checkpoints_convert.staging import staged
from jaxinfer.models import ModelConfig, Params

MAX_SHARD_BYTES = 2 * 2**30  # a shard is held in host memory while it is written


def save_huggingface(
    config: ModelConfig,
    params: Params,
    dst: str | Path,
    dtype: str = "bfloat16",
    *,
    extra_files: Iterable[str | Path] = (),
    extra_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Writes config.json and safetensors to the directory `dst`, which appears when it is complete.

    Args:
      dtype: of the stored weights; "auto" keeps that of `params`.
      extra_files: copied beside the weights under their own names, such as tokenizer files.
      extra_config: further fields of config.json, such as `eos_token_id`. Without them the special tokens are null,
        since Transformers would otherwise assume those of the first Llama.

    Raises:
      CheckpointError: a configuration the architecture has no fields for; parameters that do not fit it, or are not
        finite in `dtype`; a destination that exists (unless `overwrite`) or has no room.
    """
    check_dtype(dtype)
    leaves = {
        tuple(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda node: not isinstance(node, dict))
    }
    _check_params(config, leaves, dst)
    config = replace(config, dtype=_own_dtype(leaves, dst) if dtype == "auto" else dtype)
    data = huggingface_config(config) | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    num_bytes = sum(_num_bytes(config, path) for path in leaves)
    with staged(Path(dst), num_bytes, overwrite=overwrite) as partial:
        for file in map(Path, extra_files):
            shutil.copyfile(file, partial / file.name)
        write_json(partial / CONFIG, data | dict(extra_config or {}))
        write_shards(config, partial, lambda path: leaves[path], max_shard_bytes=max_shard_bytes)
    return Path(dst)


def write_shards(
    config: ModelConfig,
    directory: Path,
    read: Callable[[ParamPath], Any],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes the parameters `read` gives, cast to config.dtype, as model.safetensors or numbered shards and an index.

    `read` is called once per parameter, in the order of `param_shapes`; one shard is held at a time.
    """
    shards = list(_shards(config, max_shard_bytes))
    family = family_of(config)
    weight_map: dict[str, str] = {}
    for number, paths in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = {}
        for path in paths:
            key, transpose = source_of(family, path)
            tensors[key] = _stored(read(path), path, numpy_dtype(config.dtype), transpose, directory)
            weight_map[key] = name
        save_file(tensors, directory / name, metadata={"format": "pt"})
        make_durable(directory / name)
    if len(shards) > 1:
        total = sum(_num_bytes(config, path) for path in param_shapes(config))
        write_json(directory / WEIGHTS_INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(config: ModelConfig, max_shard_bytes: int) -> Iterator[list[ParamPath]]:
    shard: list[ParamPath] = []
    filled = 0
    for path in param_shapes(config):
        size = _num_bytes(config, path)
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
    dtypes = sorted({str(leaf.dtype) for leaf in leaves.values()})
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
