"""How a checkpoint embeds texts, or scores pairs of them: the files of sentence-transformers beside its weights."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jaxinfer.checks import did_you_mean
from jaxinfer.engine.request import PoolingKind
from jaxinfer.files import open_regular

MODULES, PROMPTS, LENGTH = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
POOLINGS: tuple[PoolingKind, ...] = get_args(PoolingKind)
_MAX_BYTES = 10_000_000
_MAX_LENGTH = 2**31
# Their names of kinds of pooling.
_KINDS: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Tanh": np.tanh, "Identity": lambda values: values}
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


@dataclass(frozen=True)
class PooledVectorLayer:
    """A layer over pooled vectors: weight float32 [out, in], bias [out] or None, the name of its activation."""

    weight: np.ndarray
    bias: np.ndarray | None
    activation: str

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        product = vectors @ self.weight.T
        return _ACTIVATIONS[self.activation](product if self.bias is None else product + self.bias)


@dataclass(frozen=True)
class EmbeddingConfig:
    """How a checkpoint makes vectors of texts.

    Attributes:
      pooling: which hidden states count. includes_prompt: whether those of a prompt before the text do, for "mean".
      dense: layers over the pooled vector. normalizes: whether vectors have length 1.
      prompts: texts to put before the text, by name. default_prompt: the name of the one that is used without another.
      max_length: tokens of a text with its prompt; None for as many as the model takes.
      lower_case: whether texts are written in lower case first.
      labels: of a reranker, the ids of the tokens that say "relevant" and "not"; None for the second where only the
        first counts. None for a model that embeds.
    """

    pooling: PoolingKind = "last"
    includes_prompt: bool = True
    dense: tuple[PooledVectorLayer, ...] = ()
    normalizes: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_length: int | None = None
    lower_case: bool = False
    labels: tuple[int, int | None] | None = None

    def prompt(self, name: str | None) -> str:
        """The text of a prompt by name, or of the default one. "query" and "document" are always known, empty where the
        checkpoint has none. Raises ValueError for another unknown name."""
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        names = _DOCUMENT_PROMPTS if name == "document" else (name,)
        for known in names:
            if known in self.prompts:
                return self.prompts[known]
        if name in ("query", "document"):
            return ""
        known = ", ".join(map(repr, self.prompts)) or "none"
        raise ValueError(
            f"prompt_name={name!r}{did_you_mean(name, self.prompts)} is none of the model's prompts: {known}"
        )


def read_embedding_config(directory: Path) -> EmbeddingConfig | None:
    """The configuration in a checkpoint's directory; None where it has no modules.json.

    Raises ValueError, with file and field, for what is malformed, and for modules and kinds of pooling that are not
    supported.
    """
    if not (directory / MODULES).is_file():
        return None
    modules = _read(directory / MODULES, list)
    values: dict[str, Any] = {"normalizes": False}
    kinds = [_kind_of(directory, module) for module in modules]
    for number, (kind, path) in enumerate(kinds):
        if kind == "Transformer" and number == 0:
            continue
        where = directory / path
        if kind == "Pooling":
            values |= _pooling(where / "config.json")
        elif kind == "Dense":
            values["dense"] = (*values.get("dense", ()), _dense(where))
        elif kind == "Normalize":
            values["normalizes"] = True
        elif kind == "LogitScore":
            values["labels"] = _labels(where / "config.json")
        else:
            raise ValueError(f"{directory / MODULES}: module {number} is {kind!r}, which is not supported")
    names = [kind for kind, _ in kinds]
    if "Pooling" not in names and "LogitScore" not in names:
        raise ValueError(
            f"{directory / MODULES}: it has no module Pooling, its modules are {', '.join(names) or 'none'}"
        )
    if "Normalize" in names[:-1]:
        raise ValueError(f"{directory / MODULES}: modules after Normalize are not supported")
    return EmbeddingConfig(**values, **_prompts(directory / PROMPTS), **_length(directory))


def _read(path: Path, kind: type) -> Any:
    with open_regular(path) as file:
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"{path}: more than {_MAX_BYTES:,} bytes")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, kind):
        raise ValueError(f"{path}: {'a list' if kind is list else 'an object'} is needed, got {content!r:.60}")
    return content


def _field(path: Path, data: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    value = data.get(name, default)
    value = default if value is None else value
    is_wrong = not isinstance(value, kind) or (kind is int and isinstance(value, bool))
    if value is not default and is_wrong:
        raise ValueError(f"{path}: {name} must be {kind.__name__}, got {value!r:.60}")
    return value


def _kind_of(directory: Path, module: Any) -> tuple[str, str]:
    """The kind of a module and its folder."""
    path = directory / MODULES
    if not isinstance(module, dict):
        raise ValueError(f"{path}: a module must be an object, got {module!r:.60}")
    kind, folder = _field(path, module, "type", str, ""), _field(path, module, "path", str, "")
    if "/" in folder or folder == ".." or "\0" in folder:
        raise ValueError(f"{path}: path {folder!r:.60} is not the name of a folder")
    return kind.rpartition(".")[2], folder


def _pooling(path: Path) -> dict[str, Any]:
    data = _read(path, dict)
    modes = [name for flag, name in _FLAGS.items() if _field(path, data, flag, bool, False)]
    if "pooling_mode" in data:
        mode = data["pooling_mode"]
        modes = mode if isinstance(mode, list) else [mode]
    if len(modes) != 1 or modes[0] not in _KINDS:
        shown = " and ".join(map(str, modes)) or "none"
        raise ValueError(f"{path}: pooling {shown} is not supported, one of {', '.join(_KINDS)} is")
    return {"pooling": _KINDS[modes[0]], "includes_prompt": _field(path, data, "include_prompt", bool, True)}


def _dense(folder: Path) -> PooledVectorLayer:
    path = folder / "config.json"
    data = _read(path, dict)
    activation = _field(path, data, "activation_function", str, "Tanh").rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{path}: activation_function {activation!r} is not supported, {', '.join(_ACTIVATIONS)} are")
    for name in ("module_input_name", "module_output_name"):
        if (value := data.get(name, "sentence_embedding")) not in (None, "sentence_embedding"):
            raise ValueError(f"{path}: {name} is {value!r}, only 'sentence_embedding' is supported")
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise ValueError(f"{weights} is missing; pickled weights (pytorch_model.bin) are never opened")
    try:
        tensors = {name: np.asarray(value, np.float32) for name, value in load_file(weights).items()}
    except (SafetensorError, TypeError, KeyError) as error:
        raise ValueError(f"{weights}: {error}") from None
    shape = (data.get("out_features"), data.get("in_features"))
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    if weight is None or weight.shape != shape or (bias is not None and bias.shape != shape[:1]):
        shapes = {name: value.shape for name, value in tensors.items()}
        raise ValueError(f"{weights}: linear.weight of shape {shape} is needed, the file has {shapes}")
    if _field(path, data, "bias", bool, True) != (bias is not None):
        raise ValueError(
            f"{weights}: bias is {data.get('bias')} in config.json, but its tensors are {', '.join(tensors)}"
        )
    return PooledVectorLayer(weight, bias, activation)


def _labels(path: Path) -> tuple[int, int | None]:
    data = _read(path, dict)
    relevant, other = (_field(path, data, name, int, None) for name in ("true_token_id", "false_token_id"))
    if relevant is None or relevant < 0 or (other is not None and other < 0):
        raise ValueError(f"{path}: true_token_id must be a token id, got {relevant}; false_token_id one or null")
    return relevant, other


def _prompts(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    data = _read(path, dict)
    prompts, default = _field(path, data, "prompts", dict, {}), _field(path, data, "default_prompt_name", str, None)
    for name, text in prompts.items():
        if not isinstance(text, str):
            raise ValueError(f"{path}: prompts.{name} must be str, got {text!r:.60}")
    if default is not None and default not in prompts:
        raise ValueError(
            f"{path}: default_prompt_name {default!r} is none of its prompts: {', '.join(prompts) or 'none'}"
        )
    return {"prompts": prompts, "default_prompt": default}


def _length(directory: Path) -> dict[str, Any]:
    """The limit of texts: of the module Transformer, or else the tokenizer's, which may be any large number."""
    settings: dict[str, Any] = {}
    path = directory / "tokenizer_config.json"
    limit = _read(path, dict).get("model_max_length") if path.is_file() else None
    if isinstance(limit, int) and 0 < limit < _MAX_LENGTH:
        settings["max_length"] = limit
    path = directory / LENGTH
    if path.is_file():
        data = _read(path, dict)
        length = _field(path, data, "max_seq_length", int, None)
        if length is not None and length < 1:
            raise ValueError(f"{path}: max_seq_length must be positive, got {length}")
        settings |= {} if length is None else {"max_length": length}
        settings["lower_case"] = _field(path, data, "do_lower_case", bool, False)
    return settings
