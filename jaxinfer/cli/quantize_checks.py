"""What `jaxinfer quantize` refuses, from headers alone, before anything is written or calibrated."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.cli.command import UsageError

if TYPE_CHECKING:
    from checkpoints_convert.checkpoint import Checkpoint, ParamPath
    from jaxinfer.calibration import CalibrationOptions
    from jaxinfer.quantization import QuantizedArray


def check_not_quantized(source: "Checkpoint") -> None:
    """Raises CheckpointError, with the folder and a tensor, for a checkpoint that holds quantized weights, also where
    they would be floats once read."""
    from checkpoints_convert.errors import CheckpointError

    tensors = list(source.quantized().values())
    if tensors:
        others = f", and {len(tensors) - 1} other weights are" if len(tensors) > 1 else ""
        raise CheckpointError(
            source.directory,
            f"tensor {tensors[0]!r} is quantized already{others}: quantize the checkpoint that it was made of",
        )


def planned(source: "Checkpoint", options: "CalibrationOptions") -> "dict[ParamPath, QuantizedArray]":
    """The weights that will be quantized, as abstract arrays.

    Raises UsageError for groups that the inputs of a linear layer do not fill, ValueError for a pattern of `keep` that
    fits nothing, CheckpointError for what compressed-tensors, or the family's config.json, cannot express.
    """
    from checkpoints_convert.errors import CheckpointError
    from checkpoints_convert.huggingface.compress import stored_form
    from checkpoints_convert.huggingface.config import huggingface_config
    from jaxinfer.calibration.driver import abstract_weights, all_linears

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
                f"--group-size {group}: the {inputs} inputs of {name} leave {inputs % group} over, which compressed-"
                f"tensors cannot store{_hint(weights)}, or leave the layer as it is with --keep"
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
                    f"say: leave them as they are with --keep '*.experts'",
                )


def num_bytes_of(
    source: "Checkpoint", weights: "dict[ParamPath, QuantizedArray]", dtype: str
) -> "dict[ParamPath, int]":
    """Bytes of every parameter as it will be written."""
    from checkpoints_convert.checkpoint import numpy_dtype, param_shapes

    size = numpy_dtype(dtype).itemsize
    return {
        path: weights[path].num_bytes if path in weights else math.prod(shape) * size
        for path, shape in param_shapes(source.config).items()
    }


def check_room(source: "Checkpoint", weights: "dict[ParamPath, QuantizedArray]", dtype: str, work: Path) -> None:
    """Raises CheckpointError unless the disk has room for the checkpoint and, beside it, for the finished layers, where
    a value takes a byte. Goes by what a new run needs; one that goes on has written some of it."""
    from checkpoints_convert.staging import check_free_space

    if not work.exists():
        layers = sum(weight.values.size for weight in weights.values())
        check_free_space(work, sum(num_bytes_of(source, weights, dtype).values()) + layers)


def _hint(weights: "dict[ParamPath, QuantizedArray]") -> str:
    """A size that all fit, if there is one worth having."""
    common = math.gcd(*(weight.shape[-2] for weight in weights.values()))
    size = common & -common  # its largest power of two
    return f"; --group-size {min(size, 128)} fits every layer" if size >= 16 else ""
