"""The tensors of a quantized checkpoint by its config.json alone: those that the format's libraries write."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from checkpoints_convert.formats.module import DenseModule, FormatError, Method
from checkpoints_convert.huggingface.families import is_wrapper
from checkpoints_convert.huggingface.family import Family, embedding_name, head_names, renaming
from checkpoints_convert.huggingface.rules import TensorGroup
from checkpoints_convert.safetensors_files import FLOAT_DTYPES, TensorHeader
from jaxinfer.models import ModelConfig

# Prefixes of the names of a text part, in the lists of a quantization_config.
_TEXT_PREFIXES = ("model.language_model.", "language_model.")


def declared_headers(
    hf_config: Mapping[str, Any], config: ModelConfig, family: Family, method: Method
) -> dict[str, TensorHeader]:
    """Headers by name of all tensors of a checkpoint; dense ones are stored in the configuration's dtype.

    Raises FormatError for a configuration by which nothing is quantized.
    """
    dtype = next(name for name, stored in FLOAT_DTYPES.items() if str(stored) == config.dtype)
    rename = renaming(family, _known_names(hf_config, family))
    headers: dict[str, TensorHeader] = {}
    num_quantized = 0
    for group in family.layout(config).tensor_groups:
        role = _role(group, family)
        stored = group.placements[0].stored
        for name in map(rename, group.sources):
            module = name.removesuffix(".weight")
            found = None if role is None else method.stored(DenseModule(module, stored, role, dtype))
            if found is None:
                headers[name] = (dtype, stored)
                continue
            num_quantized += 1
            separator = "." if name.endswith(".weight") else "_"
            headers |= {f"{module}{separator}{suffix}": header for suffix, header in found.items()}
    if not num_quantized and method.name != "compressed-tensors":  # which also declares scales of a cache alone
        raise FormatError(f"{method.name} quantizes no module of this model")
    return headers


def _role(group: TensorGroup, family: Family) -> Literal["linear", "router", "head", "embedding", "experts"] | None:
    """None for tensors that no format quantizes, such as norms and biases."""
    first, source = group.placements[0], group.sources[0]
    if first.target == ("embed",):
        return "embedding"
    if not source.endswith(".weight"):
        return "experts" if len(first.stored) == 3 else None
    if not first.transpose or len(first.stored) != 2:
        return None
    if source in head_names(family):
        return "head"
    return "router" if first.target[-2:] == ("router", "weight") else "linear"


def _known_names(hf_config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """A name for `renaming`: of a model of text and images, in the form that the lists of the configuration have."""
    embedding = embedding_name(family)
    if not is_wrapper(hf_config):
        yield embedding
        return
    text = json.dumps(hf_config.get("quantization_config"))
    prefix = next((prefix for prefix in _TEXT_PREFIXES if f'"{prefix}' in text or f":{prefix}" in text), "")
    bare = embedding.removeprefix(family.prefix)
    yield f"{prefix}{bare}" if prefix.startswith("model.") else f"{prefix}{embedding}"
