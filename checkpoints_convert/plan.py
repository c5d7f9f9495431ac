"""Which tensor of a checkpoint becomes which parameter, decided from names and shapes before any byte is read."""

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.huggingface.config import declared_dtype, model_config
from checkpoints_convert.huggingface.families import Family, family_of, source_of
from checkpoints_convert.safetensors_file import FLOAT_DTYPES
from checkpoints_convert.safetensors_index import TensorHeader
from checkpoints_convert.source import DTYPES, ParamPath, check_dtype, param_shapes
from jaxinfer.models import ModelConfig

_NUM_HINTS = 20  # near misses are looked up for as many problems as a message shows


@dataclass(frozen=True)
class TensorPlan:
    """One tensor's way into the parameters.

    Attributes:
      source: its name in the checkpoint. source_shape, source_dtype: as stored; the dtype by its safetensors name.
      target: the keys of the parameter. shape, dtype: what it becomes.
      transpose: whether the stored matrix is the parameter's transpose.
    """

    source: str
    target: ParamPath
    source_shape: tuple[int, ...]
    source_dtype: str
    shape: tuple[int, ...]
    dtype: str
    transpose: bool


def plan(
    hf_config: Mapping[str, Any],
    headers: Mapping[str, TensorHeader],
    *,
    dtype: str = "auto",
    where: str | Path = "checkpoint",
) -> tuple[ModelConfig, list[TensorPlan]]:
    """Matches a config.json with the headers {name: (dtype, shape)} of its tensors. A pure function.

    Every tensor must be used once or be on the family's list of stored buffers, every parameter must be filled once.
    `lm_head.weight` beside tied embeddings is a copy and is not used.

    Args:
      dtype: of all parameters. "auto" is the stored one; where tensors differ, the one config.json declares.
      where: for messages.

    Raises:
      CheckpointError: names, shapes and dtypes that do not fit, all at once, each with its nearest miss.
    """
    check_dtype(dtype)
    config = model_config(hf_config, where)
    family = family_of(config)
    rename = _prefix(headers)
    problems: list[str] = []
    matched: list[tuple[str, ParamPath, tuple[int, ...], bool]] = []
    expected: dict[str, str] = {}
    for target, shape in param_shapes(config).items():
        source, transpose = source_of(family, target)
        source = rename(source)
        stored_shape = shape[::-1] if transpose else shape
        expected[source] = _described(stored_shape)
        if source not in headers:
            continue
        if headers[source][1] != stored_shape:
            found = _described(headers[source][1])
            problems.append(f"tensor {source!r} has shape {found}, config.json makes it {_described(stored_shape)}")
        matched.append((source, target, shape, transpose))
    problems += _unmatched(family, config, expected, headers)
    problems += _unsupported_dtypes([source for source, *_ in matched], headers)
    if problems:
        raise CheckpointError(where, *problems)
    config = replace(config, dtype=_choose_dtype([headers[name][0] for name, *_ in matched], hf_config, dtype, where))
    plans = [
        TensorPlan(source, target, headers[source][1], headers[source][0], shape, config.dtype, transpose)
        for source, target, shape, transpose in matched
    ]
    return config, plans


def unused_tensors(family: Family, config: ModelConfig, names: set[str]) -> set[str]:
    """Tensors a family's checkpoints may hold that are no parameters: buffers, and the copy of a tied embedding."""
    unused = {name for name in names if family.is_skipped(name)}
    if config.tie_word_embeddings:
        unused |= {"lm_head.weight"} & names
    return unused


def _prefix(headers: Mapping[str, TensorHeader]):
    """Checkpoints of the bare model lack the `model.` in front of every name but the head's."""
    is_bare = "embed_tokens.weight" in headers and "model.embed_tokens.weight" not in headers
    return (lambda name: name.removeprefix("model.")) if is_bare else (lambda name: name)


def _described(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _unmatched(
    family: Family, config: ModelConfig, expected: Mapping[str, str], headers: Mapping[str, TensorHeader]
) -> list[str]:
    """Parameters without a tensor and tensors without a parameter, with the likely partner of each."""
    missing = [name for name in expected if name not in headers]
    extra = [name for name in headers if name not in expected]
    ignored = unused_tensors(family, config, set(extra))
    extra = [name for name in extra if name not in ignored]
    hints = _hints(missing, extra)
    problems = []
    for name in missing:
        why = hints.get(name, "")
        if name == "lm_head.weight":
            why = ": tie_word_embeddings is false or absent in config.json; set it to true if the model ties them"
        problems.append(f"tensor {name!r} {expected[name]} is missing{why}")
    problems += [
        f"tensor {name!r} {_described(headers[name][1])} is not of this model{hints.get(name, '')}" for name in extra
    ]
    return problems


def _hints(missing: list[str], extra: list[str]) -> dict[str, str]:
    hints = {}
    for name in missing[:_NUM_HINTS]:
        if near := difflib.get_close_matches(name, extra, n=1, cutoff=0.7):
            hints[name] = f"; the checkpoint has {near[0]!r}"
    for name in extra[:_NUM_HINTS]:
        if near := difflib.get_close_matches(name, missing, n=1, cutoff=0.7):
            hints[name] = f"; the model needs {near[0]!r}"
    return hints


def _unsupported_dtypes(names: list[str], headers: Mapping[str, TensorHeader]) -> list[str]:
    return [
        f"tensor {name!r} is stored as {headers[name][0]}, weights without a quantization_config are"
        f" {', '.join(FLOAT_DTYPES)}"
        for name in names
        if headers[name][0] not in FLOAT_DTYPES
    ]


def _choose_dtype(stored: list[str], hf_config: Mapping[str, Any], dtype: str, where: str | Path) -> str:
    if dtype != "auto":
        return dtype
    counts = Counter(str(FLOAT_DTYPES[name]) for name in stored)
    if len(counts) == 1 and next(iter(counts)) in DTYPES:
        return next(iter(counts))
    declared = declared_dtype(hf_config, [])
    if declared in counts and declared in DTYPES:
        return str(declared)
    found = " and ".join(f"{name} ({number} tensors)" for name, number in counts.most_common())
    raise CheckpointError(where, f"tensors are stored as {found}: choose one of {', '.join(DTYPES)} with dtype=")
