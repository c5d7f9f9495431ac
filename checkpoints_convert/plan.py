"""Planning: which tensors every parameter is read from, by their names, shapes and dtypes."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoints_convert.checkpoint import DRAFT_INDEX, DTYPES, ParamPath, check_dtype, param_dtype, param_shapes
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import CONFIG
from checkpoints_convert.formats import quantization_method
from checkpoints_convert.formats.float4 import SUFFIXES as MXFP4_SUFFIXES
from checkpoints_convert.formats.kv_scales import check_kv_scale, kv_scale_names
from checkpoints_convert.formats.module import FormatError, Method, ModuleReader
from checkpoints_convert.huggingface.config import declared_dtype, family_for, model_config
from checkpoints_convert.huggingface.families import WRAPPER_SKIPPED, family_of, is_wrapper
from checkpoints_convert.huggingface.families_heads import VOCABULARY
from checkpoints_convert.huggingface.family import Family, head_names, renaming
from checkpoints_convert.huggingface.rules import LAYER, ParameterPlan, TensorGroup, TensorPlacement
from checkpoints_convert.safetensors_files import FLOAT_DTYPES, TensorHeader
from jaxinfer.checks import nearest
from jaxinfer.models import ModelConfig, keeps_float32

_LAYER_NUMBER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d{1,6})\.")
_SPARE_LAYERS = 8
_NUM_HINTS = 20  # nearest names are looked up for as many problems as a message shows
_NUM_COMPARED = 5_000  # and among so many in all: 0.5 s
# Tensors beside those of the model: of a quantized matrix up to ten, and those of other modalities.
_TENSORS_PER_SOURCE, _SPARE_TENSORS = 10, 10_000


@dataclass(frozen=True)
class TensorPlan(ParameterPlan):
    """A dense parameter that is read from stored tensors.

    Attributes:
      sources: the tensor that holds it, which may hold other parameters too; of a stack those that are stacked along
        the parameter's first axis. source_dtype: as stored, by its safetensors name. dtype: of the parameter.
    """

    sources: tuple[str, ...]
    is_stacked: bool
    source_dtype: str
    dtype: str


@dataclass(frozen=True)
class QuantizedPlan(ParameterPlan):
    """A parameter that is read from a quantized module.

    Attributes:
      module: its name, the prefix of its tensors' names. sources: tensors by the suffix that the reader takes.
      zero_bias: a bias that the model has no parameter for; old GPTQ files store one of zeros.
      experts: the modules, beginning with this one, that are stacked along the parameter's first axis; () for no stack.
    """

    module: str
    reader: ModuleReader
    sources: Mapping[str, str]
    zero_bias: str | None = None
    experts: tuple["QuantizedPlan", ...] = ()

    @property
    def tensors(self) -> list[str]:
        """All tensors that it is read from."""
        return [name for module in self.experts or (self,) for name in module.sources.values()]


@dataclass(frozen=True)
class VocabularyPlan(ParameterPlan):
    """The places of the target's tokens in a head's smaller vocabulary, read from `source`: by how much the number of
    each of its tokens is larger in the target's."""

    source: str


def plan(
    hf_config: Mapping[str, Any],
    headers: Mapping[str, TensorHeader],
    *,
    dtype: str = "auto",
    where: str | Path = "checkpoint",
    file_of: Callable[[str], str] | None = None,
) -> tuple[ModelConfig, list[TensorPlan | QuantizedPlan | VocabularyPlan]]:
    """Matches a config.json with the headers {name: (dtype, shape)} of its tensors. A pure function.

    Every parameter must have its tensors, and every tensor must be used or be a known buffer. `lm_head.weight` beside
    tied embeddings is a copy and is not used. The tensors of a module decide whether it is quantized, config.json's
    quantization_config decides how.

    Args:
      dtype: of all dense parameters. "auto" is the stored one, or config.json's if tensors differ.
      where: path for messages. file_of: the file of a tensor, for messages.

    Raises:
      CheckpointError: all names, shapes and dtypes that do not fit, each with the nearest name.
    """
    check_dtype(dtype)
    where_config = f"{where}/{CONFIG}"
    _check_num_layers(hf_config, headers, where_config)
    config = model_config(hf_config, where_config)
    family = family_of(config)
    config = _with_own_ends(config, family, headers)
    _check_num_tensors(config, family, headers, where)
    skipped = WRAPPER_SKIPPED if is_wrapper(hf_config) else ()
    work = _Matching(config, family, headers, quantization_method(hf_config), file_of, skipped)
    for target, shape in param_shapes(config).items():
        work.match(target, shape)
    problems = work.all_problems()
    if problems:
        raise CheckpointError(where, *problems)
    dense = [tensor for tensor in work.plans if isinstance(tensor, TensorPlan)]
    dtypes = [headers[name][0] for tensor in dense for name in tensor.sources if not keeps_float32(tensor.target)]
    config = replace(config, dtype=_choose_dtype(dtypes, hf_config, dtype, where))
    return config, [
        replace(tensor, dtype=param_dtype(config, tensor.target)) if isinstance(tensor, TensorPlan) else tensor
        for tensor in work.plans
    ]


def _with_own_ends(config: ModelConfig, family: Family, headers: Mapping[str, TensorHeader]) -> ModelConfig:
    """A head that drafts with the embedding and the vocabulary head that its files have; others are the target's."""
    if config.draft_head is None:
        return config
    rename, names = renaming(family, headers), {"has_embedding": "embed", "has_lm_head": "lm_head"}
    own = {
        field: any(rename(rule.source) in headers for rule in family.tensors if rule.targets == (target,))
        for field, target in names.items()
    }
    has_index = config.draft_head.vocab_size is not None
    return replace(config, draft_head=replace(config.draft_head, **own, has_draft_index=has_index))


def _check_num_layers(hf_config: Mapping[str, Any], headers: Mapping[str, TensorHeader], where: str | Path) -> None:
    """Raises CheckpointError if config.json has far more layers than the tensors name, before anything of that size is
    made. A few layers too many are reported later, tensor by tensor."""
    family, data = family_for(hf_config, where)
    name = family.names.get("num_hidden_layers") or "num_hidden_layers"
    declared = data.get(name)
    layers = {int(match[1]) for tensor in headers for match in _LAYER_NUMBER.finditer(tensor)}
    if isinstance(declared, int) and declared > 2 * len(layers) + _SPARE_LAYERS:
        raise CheckpointError(where, f"{name} is {declared}, the {len(headers)} tensors name {len(layers)} layers")


def _check_num_tensors(
    config: ModelConfig, family: Family, headers: Mapping[str, TensorHeader], where: str | Path
) -> None:
    """Raises CheckpointError if there are far more tensors than the model has."""
    wanted = sum(len(group.sources) for group in family.layout(config).tensor_groups)
    if len(headers) > _TENSORS_PER_SOURCE * wanted + _SPARE_TENSORS:
        raise CheckpointError(where, f"{len(headers)} tensors, the model that {CONFIG} describes has {wanted}")


class _Matching:
    """Matches parameters with tensors one by one; what is left at the end is reported."""

    def __init__(
        self,
        config: ModelConfig,
        family: Family,
        headers: Mapping[str, TensorHeader],
        method: Method | None,
        file_of: Callable[[str], str] | None,
        skipped: tuple[str, ...],
    ):
        self.config, self.family, self.headers, self.method = config, family, headers, method
        self.file_of, self.skipped = file_of, skipped
        self.rename = renaming(family, headers)
        self.layout = family.layout(config)
        self.beginnings = {f"{name.rpartition('.')[0]}." for name in headers}
        names = {self.rename(name) for groups in self.layout.of_target.values() for group in groups
                 for name in (group.sources if self._begins(group) else group.sources[:1])}  # fmt: skip
        self.modules = _modules(names, headers) if method else {}
        # gpt-oss's experts are parameters, not modules: their tensors have an underscore before the suffix.
        self.bare = {name for name in names if not name.endswith((".weight", ".bias"))}
        biases = [group for group in self.layout.tensor_groups if group.sources[0].endswith(".bias")]
        self.known_biases = {self.rename(name) for group in biases for name in group.sources}
        self.plans: list[TensorPlan | QuantizedPlan | VocabularyPlan] = []
        self.problems = _kv_scale_problems(config, headers)
        self.expected: dict[str, str] = {}  # shapes by name
        self.used: set[str] = set()  # by quantized modules
        self.refused: set[str] = set()  # modules that are reported

    def match(self, target: ParamPath, shape: tuple[int, ...]) -> None:
        """Finds the tensors of a parameter."""
        if target == DRAFT_INDEX:
            return self._match_vocabulary(shape)
        group, placement = self._placed(target)
        names = tuple(map(self.rename, group.sources))
        module = names[0].removesuffix(".weight")
        if self.method and module in self.modules and len(shape) > 1:
            modules = [name.removesuffix(".weight") for name in names]
            plans = [self._quantized(module, placement, shape) for module in modules]
            if self.refused.intersection(modules):
                return
            if quantized := [plan for plan in plans if plan is not None]:
                first = quantized[0]
                if len(quantized) < len(plans):
                    lacking = modules[plans.index(None)]
                    self.problems.append(f"module {lacking!r} is not quantized, and {first.module!r} beside it is")
                self.plans.append(replace(first, experts=tuple(quantized)) if group.is_stacked else first)
                return
        wanted = _described(placement.stored)
        self.expected |= dict.fromkeys(names, wanted)
        if not all(name in self.headers for name in names):
            return
        for name in names:
            stored = self.headers[name][1]
            if stored != placement.stored:
                self.problems.append(f"tensor {name!r} has shape {_described(stored)}, config.json makes it {wanted}")
        dtype = self.headers[names[0]][0]
        self.plans.append(TensorPlan(placement, shape, names, group.is_stacked, dtype, self.config.dtype))

    def _match_vocabulary(self, shape: tuple[int, ...]) -> None:
        head = self.config.draft_head
        wanted = (head.vocab_size if head is not None and head.vocab_size is not None else 0,)
        name = self.rename(VOCABULARY)
        self.expected[name] = _described(wanted)
        if name not in self.headers:
            return
        dtype, stored = self.headers[name]
        if stored != wanted or dtype not in ("I64", "I32"):
            self.problems.append(f"tensor {name!r} is {dtype} {_described(stored)}, not integers {_described(wanted)}")
        self.plans.append(VocabularyPlan(TensorPlacement(DRAFT_INDEX, wanted, transpose=False), shape, name))

    def _begins(self, group: TensorGroup) -> bool:
        """True if the first tensor of a stack exists, in some form; otherwise the names of the others are not made."""
        first = self.rename(group.sources[0])
        module = first.removesuffix(".weight")
        return not group.is_stacked or first in self.headers or f"{module}." in self.beginnings

    def _placed(self, target: ParamPath) -> tuple[TensorGroup, TensorPlacement]:
        """The tensor group of a parameter in the checkpoint (default: the first), and the placement in it."""
        tensor_groups = self.layout.of_target[target]

        def is_there(group: TensorGroup) -> bool:
            name = self.rename(group.sources[0])
            return name in self.headers or name.removesuffix(".weight") in self.modules

        group = next((group for group in tensor_groups if is_there(group)), tensor_groups[0])
        return group, group.placement_of(target)

    def _reader(self, module: str, placement: TensorPlacement) -> ModuleReader | None:
        assert self.method is not None
        is_embedding = placement.target == ("embed",)
        kind = "Embedding" if is_embedding else "Linear"
        try:
            reader = self.method.reader(module, placement.stored, self.modules.get(module, {}), kind)
            is_matrix = len(placement.stored) == 2
            if reader is not None and is_matrix and not placement.transpose and not is_embedding:
                raise FormatError("is a Conv1D, stored [in, out], which is not read quantized")
            return reader
        except FormatError as error:
            tensors = {self._tensor_name(module, suffix) for suffix in self.modules.get(module, {})}
            if module not in self.refused:
                self.problems.append(self._format_problem(error, module, tensors))
            self.refused.add(module)
            self.used |= tensors
            return None

    def _quantized(self, module: str, placement: TensorPlacement, shape: tuple[int, ...]) -> QuantizedPlan | None:
        """The plan of a parameter, or of one expert of a stack, from a quantized module; None if it is dense."""
        reader = self._reader(module, placement)
        if reader is None:
            return None
        bias = f"{module}.bias"
        is_extra = bias in self.headers and bias not in self.known_biases
        names = {suffix: self._tensor_name(module, suffix) for suffix in reader.suffixes}
        self.used |= {*names.values(), bias} if is_extra else set(names.values())
        return QuantizedPlan(placement, shape, module, reader, names, bias if is_extra else None)

    def _tensor_name(self, module: str, suffix: str) -> str:
        return f"{module}_{suffix}" if module in self.bare else f"{module}.{suffix}"

    def _format_problem(self, error: FormatError, module: str, tensors: set[str]) -> str:
        if error.suffix is None:
            return f"module {module!r} {error}"
        name = self._tensor_name(module, error.suffix)
        known = name if name in tensors else min(tensors)
        return f"tensor {name!r}{f' ({self.file_of(known)})' if self.file_of else ''} {error}"

    def all_problems(self) -> list[str]:
        rest = {name: header for name, header in self.headers.items() if name not in self.used}
        return list(dict.fromkeys(self.problems + self._unmatched(rest) + self._unsupported_dtypes()))

    def _unmatched(self, headers: Mapping[str, TensorHeader]) -> list[str]:
        """A sentence for each parameter without a tensor and tensor without a parameter, with the nearest name."""
        missing = [name for name in self.expected if name not in headers]
        extra = [name for name in headers if name not in self.expected]
        ignored = unused_tensors(self.family, self.config, set(extra), self.rename, self.skipped)
        extra = [name for name in extra if name not in ignored]
        hints = _hints(missing, extra)
        problems = []
        for name in missing:
            why = hints.get(name, "")
            if name in map(self.rename, head_names(self.family)):
                why = ": tie_word_embeddings is false or absent in config.json; set it to true if the model ties them"
            problems.append(f"tensor {name!r} {self.expected[name]} is missing{why}")
        problems += [
            f"tensor {name!r} {_described(headers[name][1])} is not of this model{hints.get(name, '')}"
            for name in extra
        ]
        return problems

    def _unsupported_dtypes(self) -> list[str]:
        kind = "weights without a quantization_config"
        if self.method:
            kind = f"weights that {self.method.name} did not quantize"
        return [
            f"tensor {name!r} is stored as {self.headers[name][0]}, {kind} are {', '.join(FLOAT_DTYPES)}"
            for tensor in self.plans
            if isinstance(tensor, TensorPlan)
            for name in tensor.sources
            if self.headers[name][0] not in FLOAT_DTYPES
        ]


def _modules(sources: set[str], headers: Mapping[str, TensorHeader]) -> dict[str, dict[str, TensorHeader]]:
    """The tensors of every module with a weight, by suffix, except its bias."""
    names = {source.removesuffix(".weight") for source in sources if source.endswith(".weight")}
    modules: dict[str, dict[str, TensorHeader]] = {}
    for name, header in headers.items():
        dots = [place for place, character in enumerate(name) if character == "."]
        place = next((place for place in reversed(dots) if name[:place] in names), None)
        if place is not None and name[place + 1 :] != "bias" and not kv_scale_names([name]):
            modules.setdefault(name[:place], {})[name[place + 1 :]] = header
    for source in sources:
        if own := {suffix: headers[name] for suffix in MXFP4_SUFFIXES if (name := f"{source}_{suffix}") in headers}:
            modules[source] = own
    return modules


def _kv_scale_problems(config: ModelConfig, headers: Mapping[str, TensorHeader]) -> list[str]:
    problems = []
    for name, (layer, _) in kv_scale_names(headers).items():
        try:
            check_kv_scale(headers[name], layer, config)
        except FormatError as error:
            problems.append(f"tensor {name!r} {error}")
    return problems


def unused_tensors(
    family: Family,
    config: ModelConfig,
    names: set[str],
    rename: Callable[[str], str] = lambda name: name,
    skipped: tuple[str, ...] = (),
) -> set[str]:
    """Tensors that are no parameters: buffers of the family, scales of the key-value cache, the copy of a tied
    embedding, keys of layers that read another's, and those that the patterns `skipped` fit."""
    unused = {name for name in names if family.is_skipped(name)} | set(kv_scale_names(names))
    unused |= {name for name in names if any(re.fullmatch(pattern, name) for pattern in skipped)}
    unused |= later_layer_tensors(family, config, names)
    unused |= {rename(name) for name in _unread_keys(family, config)} & names
    if config.tie_word_embeddings:
        unused |= {rename(name) for name in head_names(family)} & names
    return unused


def _unread_keys(family: Family, config: ModelConfig) -> Iterator[str]:
    """The family's names of projections and norms of keys and values in layers that read an earlier layer's."""
    for layer in range(config.num_layers):
        if config.kv_source(layer) != layer:
            for rule in family.tensors:
                if any(f".attention.{name}_" in target for target in rule.targets for name in ("k", "v")):
                    yield rule.source.replace(LAYER, str(layer))


def later_layer_tensors(family: Family, config: ModelConfig, names: Iterable[str]) -> set[str]:
    """Tensors of layers beyond the last, for multi-token prediction, in the families that have them."""
    if not family.has_later_layers:
        return set()
    layers = ((name, re.fullmatch(r"model\.layers\.(\d+)\..*", name)) for name in names)
    return {name for name, match in layers if match and int(match[1]) >= config.num_layers}


def _described(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _hints(missing: list[str], extra: list[str]) -> dict[str, str]:
    """The nearest name for tensors that are missing, or that no parameter is read from."""
    hints = {}
    for names, others, owner in ((missing, extra, "the checkpoint has"), (extra, missing, "the model needs")):
        for name in names[: min(_NUM_HINTS, _NUM_COMPARED // max(1, len(others)))]:
            if near := nearest(name, others, cutoff=0.7):
                hints[name] = f"; {owner} {near!r}"
    return hints


def stored_dtype(tensor: TensorPlan, headers: Mapping[str, TensorHeader]) -> str | None:
    """The dtype of the tensors of a parameter; None where they differ."""
    dtypes = {str(FLOAT_DTYPES[headers[name][0]]) for name in tensor.sources}
    return dtypes.pop() if len(dtypes) == 1 else None


def _choose_dtype(stored: list[str], hf_config: Mapping[str, Any], dtype: str, where: str | Path) -> str:
    if dtype != "auto":
        return dtype
    counts = Counter(str(FLOAT_DTYPES[name]) for name in stored)
    if len(counts) == 1 and next(iter(counts)) in DTYPES:
        return next(iter(counts))
    declared = declared_dtype(hf_config, [])
    if declared in counts and declared in DTYPES:
        return str(declared)
    kinds = " and ".join(f"{name} ({number} tensors)" for name, number in counts.most_common())
    raise CheckpointError(where, f"tensors are stored as {kinds}: choose one of {', '.join(DTYPES)} with dtype=")
