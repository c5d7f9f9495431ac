"""Writing Hugging Face checkpoints: config.json and safetensors that Transformers opens.

Quantized parameters are written as compressed-tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from checkpoints_convert.checkpoint import (
    DRAFT_INDEX,
    ParamPath,
    check_dtype,
    check_finite,
    numpy_dtype,
    param_dtype,
    param_shapes,
)
from checkpoints_convert.errors import CheckpointError, UnwritableSchemeError
from checkpoints_convert.files import CONFIG, WEIGHTS_INDEX, write_companions, write_json
from checkpoints_convert.formats.kv_scales import LayerKVScales
from checkpoints_convert.host_arrays import count_nonfinite
from checkpoints_convert.huggingface.compress import StoredForm, compress, quantization_config, stored_form
from checkpoints_convert.huggingface.config import huggingface_config
from checkpoints_convert.huggingface.families import family_of
from checkpoints_convert.huggingface.families_heads import IS_DRAFTED, VOCABULARY, SpeculatorsForm
from checkpoints_convert.huggingface.family import Family, head_names
from checkpoints_convert.huggingface.rules import TensorGroup
from checkpoints_convert.outputs import join_outputs
from checkpoints_convert.staging import staged
from jaxinfer.files import sync
from jaxinfer.models import ModelConfig, Params, keeps_float32
from jaxinfer.models.experts import is_shared
from jaxinfer.quantization import QuantizedArray, check
from jaxinfer.quantization.matmul import transposed
from jaxinfer.quantization.on_device import unpack_params

_OUTPUT_PROJECTION = "layers.{layer}.attention.o_proj.weight"
MAX_SHARD_BYTES = 2 * 2**30  # a shard is held in host memory while it is written


def save_huggingface(
    config: ModelConfig,
    params: Params,
    dst: str | Path,
    dtype: str = "bfloat16",
    *,
    extra_files: Iterable[str | Path] | Mapping[str, Path | str] = (),
    extra_config: Mapping[str, Any] | None = None,
    kv_scales: Sequence[LayerKVScales] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    speculators: SpeculatorsForm | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes config.json and safetensors to the directory `dst`, which appears when it is complete.

    Args:
      dtype: of dense weights; "auto" keeps that of `params`. Quantized weights keep their values: integers of 2 to 8
        bits per tensor, output or group are written as pack-quantized, those with int8 activations as int-quantized,
        FP8 as float-quantized (naive-quantized without quantized activations), MXFP4 as mxfp4-pack-quantized.
      kv_scales: of an 8-bit key-value cache, one per layer.
      extra_files: copied beside the weights under their own names, such as tokenizer files; or files and texts by the
        name to write, which may be in a folder.
      extra_config: further fields of config.json, such as `eos_token_id`. Without them the special tokens are null,
        since Transformers would otherwise use those of the first Llama.
      speculators: of a head that drafts, writes it in that library's form.

    Raises:
      CheckpointError: a configuration that config.json of the architecture cannot express; parameters that do not fit
        it, or are not finite in `dtype`; a scheme that compressed-tensors does not have, such as NF4; a destination
        that exists (unless `overwrite`) or has too little space.
    """
    check_dtype(dtype)
    params = unpack_params(params)
    leaves = {
        tuple(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda node: not isinstance(node, dict))
    }
    _check_params(config, leaves, dst)
    config = replace(config, dtype=_own_dtype(leaves, dst) if dtype == "auto" else dtype)
    data = huggingface_config(config, speculators)
    family = family_of(config)
    if speculators is None:
        data |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    else:
        family = speculators.family(family)

    def size_of(path: ParamPath) -> int:
        leaf = leaves[path]
        return leaf.num_bytes if isinstance(leaf, QuantizedArray) else _num_bytes(config, path)

    if isinstance(extra_files, Mapping):
        extra = {str(name): content for name, content in extra_files.items()}
    else:
        extra = {Path(file).name: Path(file) for file in extra_files}
    with staged(Path(dst), sum(map(size_of, leaves)), overwrite=overwrite, also_own=extra) as partial:
        write_companions(extra, partial)
        quantization = write_shards(
            config,
            partial,
            leaves.__getitem__,
            size_of,
            kv_scales=kv_scales,
            max_shard_bytes=max_shard_bytes,
            family=family,
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
    family: Family | None = None,
) -> dict[str, Any]:
    """Writes parameters, cast to config.dtype, as model.safetensors or as numbered shards with an index.

    One shard is held at a time. Returns the fields of config.json on quantization.

    Args:
      read: returns a parameter; called once for each, in the order of `param_shapes`.
      size_of: approximate size of a parameter in bytes.
      family: by whose rules tensors are named; that of the configuration by default.
    """
    family = family_of(config) if family is None else family
    tensor_groups = family.layout(config).tensor_groups
    shards = list(_shards(tensor_groups, size_of, max_shard_bytes))
    leaves = _Leaves(config, read)
    weight_map: dict[str, str] = {}
    modules: dict[str, StoredForm] = {}
    total = 0
    for number, shard_groups in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = _first_tensors(config, family, kv_scales, leaves) if number == 1 else {}
        for group in shard_groups:
            paths = [placement.target for placement in group.placements]
            params = [leaves.take(path) for path in paths]
            if any(isinstance(leaf, QuantizedArray) for leaf in params):
                for number_in_stack, source in enumerate(group.sources):
                    module = source.removesuffix(".weight")
                    own = [_of_stack(leaf, number_in_stack) for leaf in params] if group.is_stacked else params
                    parts, modules[module] = _compressed(own, group, directory)
                    tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in parts.items()}
            else:
                arrays = [_cast(config, leaf, path, directory) for leaf, path in zip(params, paths, strict=True)]
                tensors |= group.assemble(arrays)
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        try:
            save_file(tensors, directory / name, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk
            raise CheckpointError(directory / name, f"could not be written: {error}") from None
        sync(directory / name)
    if len(shards) > 1:
        write_json(directory / WEIGHTS_INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    if not modules and not kv_scales:
        return {}
    strategy = None
    if kv_scales:
        strategy = (
            "tensor" if all(len(scale) == 1 for layer in kv_scales for scale in (layer.k, layer.v)) else "attn_head"
        )
    linears = _linears(tensor_groups, head_names(family)[0])
    return {"quantization_config": quantization_config(modules, linears, kv_strategy=strategy)}


class _Leaves:
    """Parameters that are read in the order of `param_shapes` and taken, each once, in any order."""

    def __init__(self, config: ModelConfig, read: Callable[[ParamPath], Any]):
        self._paths, self._read = iter(param_shapes(config)), read
        self._held: dict[ParamPath, Any] = {}

    def take(self, wanted: ParamPath) -> Any:
        while wanted not in self._held:
            path = next(self._paths)
            self._held[path] = self._read(path)
        return self._held.pop(wanted)


def _linears(tensor_groups: Sequence[TensorGroup], head: str) -> list[str]:
    """Names of the Linear modules, including the head even if it is tied to the embedding."""
    names = [
        source.removesuffix(".weight")
        for group in tensor_groups
        for source in group.sources
        if group.placements[0].transpose and source.endswith(".weight")
    ]
    head = head.removesuffix(".weight")
    return [*names, *([head] if head not in names else [])]


def _first_tensors(
    config: ModelConfig, family: Family, kv_scales: Sequence[LayerKVScales], leaves: _Leaves
) -> dict[str, np.ndarray]:
    """Tensors beside those of the rules: scales of a cache, and of a head the tokens of its smaller vocabulary."""
    tensors = _kv_tensors(config, family, kv_scales)
    if config.draft_head is not None and config.draft_head.has_draft_index:
        tensors |= _vocabulary(np.asarray(leaves.take(DRAFT_INDEX)), config.draft_head.vocab_size or config.vocab_size)
    return tensors


def _vocabulary(index: np.ndarray, size: int) -> dict[str, np.ndarray]:
    """Tensors that are read as the places of the target's tokens in a smaller vocabulary of that size."""
    is_drafted = index < size
    tokens = np.flatnonzero(is_drafted)[np.argsort(index[is_drafted])]
    return {VOCABULARY: tokens.astype(np.int64) - np.arange(size), IS_DRAFTED: is_drafted}


def _kv_tensors(config: ModelConfig, family: Family, kv_scales: Sequence[LayerKVScales]) -> dict[str, np.ndarray]:
    if kv_scales and len(kv_scales) != config.num_layers:
        raise ValueError(f"{len(kv_scales)} layers of kv_scales for a model of {config.num_layers}")
    output = next(rule.source for rule in family.tensors if rule.targets == (_OUTPUT_PROJECTION,))
    attention = output.removesuffix(".weight").rpartition(".")[0]
    return {
        f"{attention.format(layer=layer)}.{side}_scale": np.array(values, np.float32)
        for layer, scales in enumerate(kv_scales)
        if config.has_attention(layer)
        for side, values in (("k", scales.k), ("v", scales.v))
    }


def _of_stack(leaf: Any, number: int) -> Any:
    """The part of one expert in a stack."""

    def take(path: Any, array: Any) -> Any:
        return array if is_shared(path, array) else array[number]

    return jax.tree_util.tree_map_with_path(take, leaf)


def check_schemes(config: ModelConfig, leaf_of: Callable[[ParamPath], Any], where: str | Path) -> None:
    """Raises UnwritableSchemeError for a quantized parameter that `write_shards` could not write; from types and shapes
    alone, so that the arrays of `leaf_of(path)` may be abstract."""
    for group in family_of(config).layout(config).tensor_groups:
        leaves = [leaf_of(placement.target) for placement in group.placements]
        if not any(isinstance(leaf, QuantizedArray) for leaf in leaves):
            continue
        names = _check_alike(leaves, group, where)
        to_matrix = transposed if group.placements[0].target == ("embed",) else _first_of_stack
        for name, leaf in zip(names, leaves, strict=True):
            try:
                _check_form(leaf.ndim - group.is_stacked, group)
                stored_form(jax.eval_shape(to_matrix, leaf))
            except ValueError as error:
                raise UnwritableSchemeError(where, f"{name}: {error}") from None


def _first_of_stack(leaf: QuantizedArray) -> QuantizedArray:
    return leaf if leaf.ndim == 2 else _of_stack(leaf, 0)


def _check_alike(leaves: Sequence[Any], group: TensorGroup, where: str | Path) -> list[str]:
    """Names of the parameters in a quantized module. Raises UnwritableSchemeError if one is not quantized."""
    names = [f"parameter {'.'.join(placement.target)!r}" for placement in group.placements]
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, QuantizedArray):
            reason = f"{name} is not quantized, others of the tensor {group.sources[0]!r} are"
            raise UnwritableSchemeError(where, reason)
    return names


def _check_form(num_axes: int, group: TensorGroup) -> None:
    if num_axes > 2:
        raise ValueError("all experts are one tensor in this family, which compressed-tensors cannot express")
    if group.placements[0].target != ("embed",) and not group.placements[0].transpose:
        raise ValueError("a Conv1D of the family stores [in, out], which compressed-tensors cannot express")


def _compressed(leaves: Sequence[Any], group: TensorGroup, where: Path) -> tuple[dict[str, np.ndarray], StoredForm]:
    """The tensors of a quantized module, made of the parameters in it."""
    names = _check_alike(leaves, group, where)
    leaves = [jax.tree.map(np.asarray, leaf) for leaf in leaves]
    outputs = [placement.outputs for placement in group.placements if placement.outputs is not None]
    name, is_embedding = names[0], group.placements[0].target == ("embed",)
    try:
        for name, leaf in zip(names, leaves, strict=True):
            check(leaf, name)
        weight = join_outputs(leaves, outputs) if outputs else leaves[0]
        _check_form(weight.ndim, group)
        return compress(jax.tree.map(np.asarray, transposed(weight)) if is_embedding else weight)
    except ValueError as error:
        reason = str(error) if str(error).startswith(name) else f"{name}: {error}"
        raise UnwritableSchemeError(where, reason) from None


def _shards(
    tensor_groups: Sequence[TensorGroup], size_of: Callable[[ParamPath], int], max_shard_bytes: int
) -> Iterator[list[TensorGroup]]:
    shard: list[TensorGroup] = []
    filled = 0
    for group in tensor_groups:
        size = sum(size_of(placement.target) for placement in group.placements)
        if shard and filled + size > max_shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(group)
        filled += size
    yield shard


def _num_bytes(config: ModelConfig, path: ParamPath) -> int:
    return int(np.prod(param_shapes(config)[path], dtype=np.int64)) * numpy_dtype(param_dtype(config, path)).itemsize


def _cast(config: ModelConfig, leaf: Any, path: ParamPath, where: Path) -> np.ndarray:
    array, dtype = np.asarray(leaf), numpy_dtype(param_dtype(config, path))
    with np.errstate(over="ignore", invalid="ignore"):
        array = array.astype(dtype, copy=False)
    check_finite(where, ".".join(path), count_nonfinite(array), array.size)
    return array


def _own_dtype(leaves: Mapping[ParamPath, Any], where: str | Path) -> str:
    own = (leaf for path, leaf in leaves.items() if not isinstance(leaf, QuantizedArray) and not keeps_float32(path))
    dtypes = sorted({str(leaf.dtype) for leaf in own})
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
