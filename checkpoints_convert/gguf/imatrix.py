"""Importance matrices of llama.cpp: the mean square of every input of a linear layer, on some text.

They weigh the rounding error of the weights (tools/imatrix/imatrix.cpp). Two forms: the binary one of 2024,

    int32 entries; for each: int32 length, name, int32 calls, int32 values, float32 [values], sums of the means

and GGUF, with `general.type` "imatrix" and two tensors for each layer: `NAME.in_sum2`, sums of squares [experts,
inputs], and `NAME.counts`, numbers of tokens [experts]. Names are those of the GGUF file's tensors.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from checkpoints_convert.checkpoint import ParamPath
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.gguf.architectures import ARCHITECTURES
from checkpoints_convert.gguf.blocks import dequantize
from checkpoints_convert.gguf.checkpoint import rules
from checkpoints_convert.gguf.file import MAX_NAME_BYTES, MAX_TENSORS, FileCursor
from checkpoints_convert.gguf.index import GGUFIndex
from checkpoints_convert.huggingface.rules import layout
from jaxinfer.models import ModelConfig

_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_imatrix(path: Path) -> dict[str, np.ndarray]:
    """float32 [experts, inputs] by tensor, one row where there are no experts; 1 for an expert that saw no token.

    Raises CheckpointError for a file that has neither of the two forms, is truncated, or has values that are not
    finite or negative.
    """
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
            importance = _of_gguf(path) if is_gguf else _of_binary(path, file.fileno())
    except OSError as error:
        raise CheckpointError(path, f"cannot be opened: {error.strerror}") from None
    for name, array in importance.items():
        if bad := int((~(np.isfinite(array) & (array >= 0))).sum()):
            raise CheckpointError(path, f"{name!r}: {bad} of {array.size} values are negative or not finite")
    return importance


def by_parameter(importance: Mapping[str, np.ndarray], config: ModelConfig, where: Path) -> dict[ParamPath, np.ndarray]:
    """The importance of the inputs of each linear layer's weight, [experts, inputs] or [1, inputs].

    Raises CheckpointError for a family without a name in GGUF, and for a file without any tensor of the model.
    """
    entry = next((entry for entry in ARCHITECTURES.values() if entry.huggingface == config.architecture), None)
    if config.architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        entry = ARCHITECTURES["llama"]
    if entry is None:
        raise CheckpointError(where, f"{config.architecture} has no name in GGUF, which an imatrix is for")
    by_path = {}
    for target, groups in layout(rules(entry.adds_one), config, entry.pairs_neighbours).of_target.items():
        name = next((name for group in groups for name in group.sources[:1] if name in importance), None)
        if name is not None and target[-1] == "weight":
            by_path[target] = importance[name]
    if not by_path:
        raise CheckpointError(where, f"the imatrix has no tensor of this model, {len(importance)} of others")
    return by_path


def _of_gguf(path: Path) -> dict[str, np.ndarray]:
    with GGUFIndex(path) as index:
        if (kind := index.text("general.type")) != "imatrix":
            raise CheckpointError(path, f"general.type is {kind!r}, not 'imatrix'")
        importance = {}
        for name in index.tensors:
            if not name.endswith(_SUMS):
                continue
            counted = f"{name.removesuffix(_SUMS)}{_COUNTS}"
            if counted not in index.tensors:
                raise CheckpointError(path, f"tensor {counted!r} is missing")
            for tensor in (name, counted):
                if (kind := index.tensors[tensor].kind.name) != "F32":
                    raise CheckpointError(path, f"tensor {tensor!r} is {kind}, not F32")
            sums, counts = (dequantize("F32", index.read(tensor)) for tensor in (name, counted))
            counts = counts.reshape(-1, 1)
            if len(counts) != len(sums):
                raise CheckpointError(path, f"tensor {counted!r} has {len(counts)} counts for {len(sums)} rows")
            with np.errstate(divide="ignore", invalid="ignore"):
                importance[name.removesuffix(_SUMS)] = np.where(counts > 0, sums / counts, np.float32(1))
        if not importance:
            raise CheckpointError(path, f"has no tensor whose name ends in {_SUMS}")
        return importance


def _of_binary(path: Path, descriptor: int) -> dict[str, np.ndarray]:
    cursor = FileCursor(descriptor, os.fstat(descriptor).st_size, path)
    count = cursor.number("<i4", "the number of entries")
    if not 1 <= count <= MAX_TENSORS:
        raise CheckpointError(path, f"begins with {count} entries: not an imatrix")
    importance: dict[str, np.ndarray] = {}
    for number in range(count):
        length = cursor.number("<i4", f"entry {number}")
        if not 0 < length <= MAX_NAME_BYTES:
            raise CheckpointError(path, f"entry {number} has a name of {length} bytes: not an imatrix")
        try:
            name = cursor.take(length, f"entry {number}").decode()
        except UnicodeDecodeError:
            raise CheckpointError(path, f"the name of entry {number} is not UTF-8: not an imatrix") from None
        if name in importance:
            raise CheckpointError(path, f"{name!r} appears twice")
        calls, size = cursor.number("<i4", name), cursor.number("<i4", name)
        if calls < 1 or size < 1:
            raise CheckpointError(path, f"{name!r} has {size} values of {calls} calls")
        values = np.frombuffer(cursor.take(4 * size, name), "<f4")
        importance[name] = (values / np.float32(calls)).reshape(1, -1)
    return importance
