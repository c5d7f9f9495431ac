"""The files of `jaxinfer quantize`: checks before anything is written, and writing and verifying the checkpoint."""

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.command import UsageError, say
from jaxinfer.progress import Stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from checkpoints_convert import LayerKVScales
    from checkpoints_convert.checkpoint import Checkpoint, ParamPath
    from jaxinfer.calibration import CalibrationOptions, CalibrationResult, FloatModel, LayerReport
    from jaxinfer.calibration.journal import CalibrationJournal
    from jaxinfer.calibration.verify import ModelComparison
    from jaxinfer.quantization import QuantizedArray


_TOLERANCE = 1e-3  # of the largest logit: weights as floats, against products of integers, both in float32


def write(
    source: "Checkpoint",
    companions: "Mapping[str, Path | str]",
    weights: "dict[ParamPath, QuantizedArray]",
    result: "CalibrationResult",
    dtype: str,
    held_out: "np.ndarray | None",
    journal: "CalibrationJournal",
    work: Path,
    destination: Path,
    *,
    overwrite: bool,
) -> float:
    """Writes the checkpoint to a working folder, loads it again, compares it, and moves it to its destination.

    One layer and one shard are in memory at a time.

    Args:
      companions: of the source, when it was opened. weights: the quantized weights, from `planned`.
      held_out: int32 [rows, T], whose logits are compared.
      journal: of the calibration, in the working folder; removed with it.

    Returns the largest difference of a logit. Raises CheckpointError if a parameter or the logits differ.
    """
    from checkpoints_convert.errors import CheckpointError
    from checkpoints_convert.staging import JOURNAL, check_destination, partial_path, publish
    from jaxinfer.files import remove_tree

    made = work / "checkpoint"
    sizes = num_bytes_of(source, weights, dtype)
    with Stage("writing", sum(sizes.values()), "B") as stage:
        _write_files(source, companions, sizes, result, dtype, made, stage)
    comparison = _compared(source, result, held_out, made)
    reasons = comparison.problems
    if not reasons and not comparison.difference <= _TOLERANCE * comparison.largest:
        reasons = [f"logits differ by up to {comparison.difference:.3g}, where the largest is {comparison.largest:.3g}"]
    if reasons:
        raise CheckpointError(
            made, "is not the model that was calibrated", *reasons, f"nothing was written to {destination}"
        )
    check_destination(destination, overwrite=overwrite)
    # The last step is the one that makes the checkpoint appear: killed before it, the command begins again, and after
    # it nothing is left.
    partial = partial_path(destination)
    remove_tree(partial, JOURNAL)
    os.rename(made, partial)
    journal.remove()
    shutil.rmtree(work)
    publish(partial, destination)
    _warn(source, weights, result)
    return comparison.difference


def _compared(
    source: "Checkpoint", result: "CalibrationResult", held_out: "np.ndarray | None", made: Path
) -> "ModelComparison":
    """The checkpoint at `made`, loaded again, next to the calibrated model."""
    from checkpoints_convert.load import open_checkpoint
    from jaxinfer.calibration import FloatModel
    from jaxinfer.calibration.inputs import random_rows
    from jaxinfer.calibration.verify import compare_models

    with (
        Stage("loading the checkpoint and comparing", source.config.num_layers, "layer") as stage,
        open_checkpoint(made, dtype="float32") as written,
    ):
        comparison = compare_models(
            FloatModel(source.config, result.read, result.rest),
            float_model(written),
            random_rows(source.config.vocab_size) if held_out is None else held_out[:2],
            report=lambda layer: stage.update(),
        )
        if written.kv_scales != _kv_scales(source, result)[0]:
            comparison.problems.append("scales of the key-value cache differ")
    return comparison


def float_model(source: "Checkpoint", fingerprint: str = "") -> "FloatModel":
    """The checkpoint as a model of which a unit is read at a time, as a nested dict or a single array."""
    from checkpoints_convert.checkpoint import insert
    from jaxinfer.calibration import FloatModel

    def read(unit: str) -> Any:
        params: Any = {}
        for path, array in source.read(unit):
            keys = path[2:] if path[0] == "layers" else path[1:]
            if not keys:
                return array
            insert(params, keys, array)
        return params

    rest = tuple(unit for unit in source.units() if not unit.startswith("layers."))
    return FloatModel(source.config, read, rest, fingerprint)


def adjusted_kv_scales(
    scales: "Sequence[LayerKVScales]", layers: "Sequence[LayerReport]"
) -> "tuple[tuple[LayerKVScales, ...], list[int]]":
    """Scales of the cache after the values were divided, and the numbers of the layers whose scale is lost: if the
    channels of a head were divided by different amounts, no scale is correct, and 1 is written."""
    import numpy as np

    adjusted, lost = [], []
    for layer, report in zip(scales, layers, strict=True):
        divisors = report.value_divisors
        if None in divisors:
            lost.append(report.number)
            layer = replace(layer, v=(1.0,) * len(layer.v))
        elif divisors:
            heads = layer.v * (len(divisors) // len(layer.v))
            # Rounded as they are stored.
            values = tuple(float(np.float32(value / by)) for value, by in zip(heads, divisors, strict=True) if by)
            layer = replace(layer, v=values[:1] if len(layer.v) == 1 and len(set(values)) == 1 else values)
        adjusted.append(layer)
    return tuple(adjusted), lost


def _kv_scales(source: "Checkpoint", result: "CalibrationResult") -> "tuple[tuple[LayerKVScales, ...], list[int]]":
    return adjusted_kv_scales(source.kv_scales, result.layers) if source.kv_scales else ((), [])


def _write_files(
    source: "Checkpoint",
    companions: "Mapping[str, Path | str]",
    sizes: "dict[ParamPath, int]",
    result: "CalibrationResult",
    dtype: str,
    made: Path,
    stage: Stage,
) -> None:
    from checkpoints_convert.checkpoint import unit_of
    from checkpoints_convert.files import CONFIG, read_json, special_token, write_companions, write_json
    from checkpoints_convert.huggingface.config import huggingface_config
    from checkpoints_convert.huggingface.save import write_shards
    from checkpoints_convert.staging import check_free_space
    from jaxinfer.files import sync

    shutil.rmtree(made, ignore_errors=True)  # of a run that was killed
    config = replace(source.config, dtype=dtype)
    check_free_space(made, sum(sizes.values()))
    made.mkdir(parents=True)
    given = companions.get(CONFIG, "{}")  # a file, or its content where there is none
    original = read_json(given) if isinstance(given, Path) else json.loads(given)
    special = {name: special_token(original, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    scales, _ = _kv_scales(source, result)
    name, unit = None, None  # the last unit: paths come in the order of units

    def read(path: "ParamPath") -> Any:
        nonlocal name, unit
        stage.update(sizes[path])
        if unit_of(path) != name:
            unit = None  # freed before the next one is read
            name, unit = unit_of(path), result.read(unit_of(path))
        node: Any = unit
        for key in path[2 if path[0] == "layers" else 1 :]:
            node = node[key]
        return node

    quantization = write_shards(config, made, read, sizes.__getitem__, kv_scales=scales)
    for name in write_companions({name: file for name, file in companions.items() if name != CONFIG}, made):
        sync(made / name)
    write_json(made / CONFIG, huggingface_config(config) | special | quantization)


def _warn(source: "Checkpoint", weights: "dict[ParamPath, QuantizedArray]", result: "CalibrationResult") -> None:
    _, lost = _kv_scales(source, result)
    if lost:
        others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        say(
            f"warning: 'model.layers.{lost[0]}.self_attn.v_scale'{others}: dropped, 1 is written in its place, since"
            " the channels of v_proj were divided by different amounts; --keep '*.o_proj' avoids that"
        )
    num_permuted = sum(weight.permutation is not None for weight in weights.values())
    if num_permuted:
        say(
            f'warning: {num_permuted} weights have permuted inputs (weight_g_idx, actorder "group"): jaxinfer opens'
            " them, compressed-tensors 0.20 does not; --static-groups makes what both open"
        )


def check_not_quantized(source: "Checkpoint") -> None:
    """Raises CheckpointError, with the folder and a tensor, if the checkpoint has quantized weights, even if they would
    be read as floats, unless that was asked for."""
    from checkpoints_convert.errors import CheckpointError

    tensors = list(source.quantized().values())
    if tensors and not source.is_dequantized:
        others = f", and {len(tensors) - 1} other weights are" if len(tensors) > 1 else ""
        raise CheckpointError(
            source.directory,
            f"tensor {tensors[0]!r} is quantized already{others}: quantize the original checkpoint instead",
        )


def planned(source: "Checkpoint", options: "CalibrationOptions") -> "dict[ParamPath, QuantizedArray]":
    """The weights that will be quantized, as abstract arrays.

    Raises UsageError for a group size that does not divide the inputs of a linear layer, ValueError for a method that
    the model cannot be quantized with, and for a pattern of `keep` without a match, CheckpointError for what
    compressed-tensors or the family's config.json cannot express.
    """
    from checkpoints_convert.errors import CheckpointError
    from checkpoints_convert.huggingface.compress import stored_form
    from checkpoints_convert.huggingface.config import huggingface_config
    from jaxinfer.calibration.driver import abstract_weights, all_linears, check_method

    check_method(source.config, options)
    options.check_keep(all_linears(source.config))
    huggingface_config(replace(source.config, dtype=options.dtype))
    weights = abstract_weights(source.config, options)
    _check_experts(source, weights)
    for path, weight in weights.items():
        name, inputs = ".".join(path[:-1]), weight.shape[-2]
        group = options.grid(weight.scheme.bits).group_size
        if group is not None and group > inputs and options.group_size != "auto":
            raise UsageError(
                f"--group-size {group}: {name} has {inputs} inputs; -1 gives every output one scale{_hint(weights)}"
            )
        if group is not None and inputs % min(group, inputs):
            raise UsageError(
                f"--group-size {group}: the {inputs} inputs of {name} leave a remainder of {inputs % group}, which "
                f"compressed-tensors cannot store{_hint(weights)}, or keep the layer unquantized with --keep"
            )
        try:
            stored_form(weight)
        except ValueError as error:
            raise CheckpointError(source.directory, f"{name}: {error}") from None
    return weights


def _check_experts(source: "Checkpoint", weights: "dict[ParamPath, QuantizedArray]") -> None:
    from checkpoints_convert.errors import CheckpointError
    from checkpoints_convert.huggingface.families import family_of

    for group in family_of(source.config).layout(source.config).tensor_groups:
        for target in (placement.target for placement in group.placements):
            if not group.is_stacked and target in weights and weights[target].ndim > 2:
                raise CheckpointError(
                    source.directory,
                    f"{'.'.join(target)}: all experts are one tensor in this family, which compressed-tensors cannot "
                    f"express: keep them unquantized with --keep '*.experts'",
                )


def num_bytes_of(
    source: "Checkpoint", weights: "dict[ParamPath, QuantizedArray]", dtype: str
) -> "dict[ParamPath, int]":
    """Bytes of each parameter in the written checkpoint."""
    from checkpoints_convert.checkpoint import numpy_dtype, param_shapes

    size = numpy_dtype(dtype).itemsize
    return {
        path: weights[path].num_bytes if path in weights else math.prod(shape) * size
        for path, shape in param_shapes(source.config).items()
    }


def check_room(source: "Checkpoint", weights: "dict[ParamPath, QuantizedArray]", dtype: str, work: Path) -> None:
    """Raises CheckpointError unless the disk has room for the checkpoint and for the finished layers, with one byte per
    value. A resumed run is not checked, since it has written a part already."""
    from checkpoints_convert.staging import check_free_space

    if not work.exists():
        layers = sum(weight.values.size for weight in weights.values())
        check_free_space(work, sum(num_bytes_of(source, weights, dtype).values()) + layers)


def _hint(weights: "dict[ParamPath, QuantizedArray]") -> str:
    """A group size that divides the inputs of all layers, if there is a useful one."""
    common = math.gcd(*(weight.shape[-2] for weight in weights.values()))
    size = common & -common  # its largest power of two
    return f"; --group-size {min(size, 128)} fits every layer" if size >= 16 else ""
