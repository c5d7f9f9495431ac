"""Writing what `jaxinfer quantize` made, and comparing it with what was calibrated before it gets its name."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.command import say
from jaxinfer.cli.output import waiting
from jaxinfer.cli.quantize_checks import num_bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from checkpoints_convert import LayerKVScales
    from checkpoints_convert.checkpoint import Checkpoint, ParamPath
    from jaxinfer.calibration import CalibrationResult, LayerReport
    from jaxinfer.quantization import QuantizedArray

_TOLERANCE = 1e-3  # of the largest logit: weights as floats, against products of integers, both in float32


def write(
    source: "Checkpoint",
    weights: "dict[ParamPath, QuantizedArray]",
    result: "CalibrationResult",
    dtype: str,
    held_out: "np.ndarray | None",
    work: Path,
    destination: Path,
    *,
    overwrite: bool,
) -> float:
    """Writes the checkpoint beside its destination, loads it again, compares, and gives it its name.

    One layer is held at a time, beside the shard it is written to.

    Args:
      weights: what is quantized, as `planned` says. held_out: int32 [rows, T], whose logits are compared.

    Returns the largest difference of a logit. Raises CheckpointError where a parameter or the logits differ.
    """
    from checkpoints_convert.errors import CheckpointError
    from checkpoints_convert.load import open_checkpoint
    from checkpoints_convert.staging import check_destination, publish
    from jaxinfer.calibration.inputs import random_rows
    from jaxinfer.calibration.verify import ComparedModel, compare_models

    made = work / "checkpoint"
    with waiting("writing"):
        _write_files(source, weights, result, dtype, made)
    with waiting("loading what was written, and comparing"), open_checkpoint(made, dtype="float32") as written:
        tokens = random_rows(source.config.vocab_size) if held_out is None else held_out[:2]
        calibrated = ComparedModel(source.config, result.read, result.rest)
        found = compare_models(
            calibrated, ComparedModel(written.config, unit_reader(written), rest_of(written)), tokens
        )
        if written.kv_scales != _kv_scales(source, result)[0]:
            found.problems.append("scales of the key-value cache differ")
    reasons = found.problems
    if not reasons and not found.difference <= _TOLERANCE * found.largest:
        reasons = [f"logits differ by up to {found.difference:.3g}, where the largest is {found.largest:.3g}"]
    if reasons:
        raise CheckpointError(
            made, "is not the model that was calibrated", *reasons, f"nothing was written to {destination}"
        )
    check_destination(destination, overwrite=overwrite)
    publish(made, destination)
    shutil.rmtree(work)
    _warn(source, weights, result)
    return found.difference


def unit_reader(source: "Checkpoint") -> "Callable[[str], Any]":
    """Gives a unit's parameters as a nested dict, or the one array it is."""
    from checkpoints_convert.checkpoint import insert

    def read(unit: str) -> Any:
        found: Any = {}
        for path, array in source.read(unit):
            keys = path[2:] if path[0] == "layers" else path[1:]
            if not keys:
                return array
            insert(found, keys, array)
        return found

    return read


def rest_of(source: "Checkpoint") -> tuple[str, ...]:
    """Its units that are no layers."""
    return tuple(unit for unit in source.units() if not unit.startswith("layers."))


def adjusted_kv_scales(
    scales: "Sequence[LayerKVScales]", layers: "Sequence[LayerReport]"
) -> "tuple[tuple[LayerKVScales, ...], list[int]]":
    """Scales of the cache for values that were divided, and the numbers of the layers whose scale is lost: where the
    channels of a head were divided by different amounts no number is right, and 1 takes its place."""
    import numpy as np

    found, lost = [], []
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
        found.append(layer)
    return tuple(found), lost


def _kv_scales(source: "Checkpoint", result: "CalibrationResult") -> "tuple[tuple[LayerKVScales, ...], list[int]]":
    return adjusted_kv_scales(source.kv_scales, result.layers) if source.kv_scales else ((), [])


def _write_files(
    source: "Checkpoint",
    weights: "dict[ParamPath, QuantizedArray]",
    result: "CalibrationResult",
    dtype: str,
    made: Path,
) -> None:
    from checkpoints_convert.files import CONFIG, companion_files, copy_files, read_json, write_json
    from checkpoints_convert.huggingface.config import huggingface_config
    from checkpoints_convert.huggingface.save import write_shards
    from checkpoints_convert.staging import check_free_space
    from jaxinfer.files import sync

    shutil.rmtree(made, ignore_errors=True)  # of a run that was killed
    config = replace(source.config, dtype=dtype)
    sizes = num_bytes_of(source, weights, dtype)
    check_free_space(made, sum(sizes.values()))
    made.mkdir(parents=True)
    original = read_json(source.directory / CONFIG) if (source.directory / CONFIG).exists() else {}
    special = {name: original.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    scales, _ = _kv_scales(source, result)
    quantization = write_shards(config, made, _leaf_reader(result.read), sizes.__getitem__, kv_scales=scales)
    others = [name for name in companion_files(source.directory) if name != CONFIG]
    copy_files(source.directory, made, others)
    for name in others:
        sync(made / name)
    write_json(made / CONFIG, huggingface_config(config) | special | quantization)


def _leaf_reader(read: "Callable[[str], Any]") -> "Callable[[ParamPath], Any]":
    """Parameters by path, in the order of units, of which the last is held."""
    from checkpoints_convert.checkpoint import unit_of

    name, unit = None, None

    def leaf(path: "ParamPath") -> Any:
        nonlocal name, unit
        if unit_of(path) != name:
            unit = None  # before the next is read
            name, unit = unit_of(path), read(unit_of(path))
        found: Any = unit
        for key in path[2 if path[0] == "layers" else 1 :]:
            found = found[key]
        return found

    return leaf


def _warn(source: "Checkpoint", weights: "dict[ParamPath, QuantizedArray]", result: "CalibrationResult") -> None:
    _, lost = _kv_scales(source, result)
    if lost:
        others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        say(
            f"warning: 'model.layers.{lost[0]}.self_attn.v_scale'{others}: dropped, 1 is written in its place, since"
            " the channels of v_proj were divided by different amounts; --keep '*.o_proj' leaves them as they are"
        )
    num_permuted = sum(weight.permutation is not None for weight in weights.values())
    if num_permuted:
        say(
            f'warning: {num_permuted} weights have permuted inputs (weight_g_idx, actorder "group"): jaxinfer opens'
            " them, compressed-tensors 0.20 does not; --static-groups makes what both open"
        )
