"""Which tensors of a checkpoint become which parameter, decided from names and shapes before any byte is read."""

import difflib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.formats import FormatError, Method, ModuleReader, quantization_method
from checkpoints_convert.formats.kv_scales import check_kv_scale, kv_scale_names
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


@dataclass(frozen=True)
class QuantizedPlan:
    """One quantized module's way into the parameters.

    Attributes:
      module: its name, of which the tensors' begin. sources: {suffix the reader knows: tensor}.
      zero_bias: a bias the model has no parameter for; old GPTQ files store one, of zeros.
      target: the keys of the parameter. shape: the parameter's.
      transpose: whether the stored matrix [N, K] is the parameter's transpose, as every Linear's is.
    """

    module: str
    target: ParamPath
    reader: ModuleReader
    sources: Mapping[str, str]
    shape: tuple[int, ...]
    transpose: bool
    zero_bias: str | None = None


def plan(
    hf_config: Mapping[str, Any],
    headers: Mapping[str, TensorHeader],
    *,
    dtype: str = "auto",
    where: str | Path = "checkpoint",
    file_of: Callable[[str], str] | None = None,
) -> tuple[ModelConfig, list[TensorPlan | QuantizedPlan]]:
    """Matches a config.json with the headers {name: (dtype, shape)} of its tensors. A pure function.

    Every tensor must be used once or be on the family's list of stored buffers, every parameter must be filled once.
    `lm_head.weight` beside tied embeddings is a copy and is not used. Whether a module is quantized is decided by its
    tensors, how by config.json's quantization_config.

    Args:
      dtype: of all parameters that are not quantized. "auto" is the stored one; where tensors differ, the one
        config.json declares.
      where: for messages. file_of: the file of a tensor, for messages.

    Raises:
      CheckpointError: names, shapes and dtypes that do not fit, all at once, each with its nearest miss.
    """
    check_dtype(dtype)
    config = model_config(hf_config, where)
    method = quantization_method(hf_config)
    family = family_of(config)
    rename = _prefix(headers)
    shapes = param_shapes(config)
    rules = {target: source_of(family, target) for target in shapes}
    sources = {target: rename(source) for target, (source, _) in rules.items()}
    modules = _modules(set(sources.values()), headers) if method else {}
    problems = _kv_scale_problems(config, headers)
    plans: dict[ParamPath, TensorPlan | QuantizedPlan] = {}
    expected: dict[str, str] = {}
    used: set[str] = set()  # by quantized modules
    for target, shape in shapes.items():
        source, transpose = sources[target], rules[target][1]
        module = source.removesuffix(".weight")
        if method and module in modules and len(shape) == 2:
            tensors = {f"{module}.{suffix}" for suffix in modules[module]}
            try:
                reader = method.reader(
                    module, _stored_shape(shape, transpose), modules[module], "Linear" if transpose else "Embedding"
                )
            except FormatError as error:
                problems.append(_format_problem(error, module, tensors, file_of))
                used |= tensors
                continue
            if reader:
                bias = f"{module}.bias"
                is_extra = bias in headers and bias not in sources.values()
                names = {suffix: f"{module}.{suffix}" for suffix in reader.suffixes}
                plans[target] = QuantizedPlan(
                    module, target, reader, names, shape, transpose, bias if is_extra else None
                )
                used |= {*names.values(), bias} if is_extra else set(names.values())
                continue
        stored = _stored_shape(shape, transpose)
        expected[source] = _described(stored)
        if source not in headers:
            continue
        found_dtype, found = headers[source]
        if found != stored:
            problems.append(
                f"tensor {source!r} has shape {_described(found)}, config.json makes it {_described(stored)}"
            )
        plans[target] = TensorPlan(source, target, found, found_dtype, shape, config.dtype, transpose)
    dense = [tensor for tensor in plans.values() if isinstance(tensor, TensorPlan)]
    problems += _unmatched(family, config, expected, {name: headers[name] for name in headers if name not in used})
    problems += _unsupported_dtypes(dense, method)
    if problems:
        raise CheckpointError(where, *problems)
    config = replace(config, dtype=_choose_dtype([tensor.source_dtype for tensor in dense], hf_config, dtype, where))
    return config, [
        replace(tensor, dtype=config.dtype) if isinstance(tensor, TensorPlan) else tensor for tensor in plans.values()
    ]


def _stored_shape(shape: tuple[int, ...], transpose: bool) -> tuple[int, ...]:
    return shape[::-1] if transpose else shape


def _modules(sources: set[str], headers: Mapping[str, TensorHeader]) -> dict[str, dict[str, TensorHeader]]:
    """The tensors of every module with a weight, by suffix, but for its bias."""
    names = {source.removesuffix(".weight") for source in sources if source.endswith(".weight")}
    modules: dict[str, dict[str, TensorHeader]] = {}
    for name, header in headers.items():
        dots = [place for place, character in enumerate(name) if character == "."]
        place = next((place for place in reversed(dots) if name[:place] in names), None)
        if place is not None and name[place + 1 :] != "bias" and not kv_scale_names([name]):
            modules.setdefault(name[:place], {})[name[place + 1 :]] = header
    return modules


def _format_problem(error: FormatError, module: str, tensors: set[str], file_of: Callable[[str], str] | None) -> str:
    if error.suffix is None:
        return f"module {module!r} {error}"
    name = f"{module}.{error.suffix}"
    known = name if name in tensors else min(tensors)
    return f"tensor {name!r}{f' ({file_of(known)})' if file_of else ''} {error}"


def _kv_scale_problems(config: ModelConfig, headers: Mapping[str, TensorHeader]) -> list[str]:
    problems = []
    for name, (layer, _) in kv_scale_names(headers).items():
        try:
            check_kv_scale(headers[name], layer, config)
        except FormatError as error:
            problems.append(f"tensor {name!r} {error}")
    return problems


def unused_tensors(family: Family, config: ModelConfig, names: set[str]) -> set[str]:
    """Tensors a family's checkpoints may hold that are no parameters: buffers, scales of the key-value cache, and the
    copy of a tied embedding."""
    unused = {name for name in names if family.is_skipped(name)} | set(kv_scale_names(names))
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


def _unsupported_dtypes(tensors: list[TensorPlan], method: Method | None) -> list[str]:
    kind = f"weights that {method.name} did not quantize" if method else "weights without a quantization_config"
    return [
        f"tensor {tensor.source!r} is stored as {tensor.source_dtype}, {kind} are {', '.join(FLOAT_DTYPES)}"
        for tensor in tensors
        if tensor.source_dtype not in FLOAT_DTYPES
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
