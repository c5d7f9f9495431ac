"""The table of families: what differs between them, as data that loading and saving share.

A family's entry says how its config.json is read where that differs from Llama's; the tensor rules say which tensors
of the checkpoint are which parameters. Adding a family is adding an entry.
"""

from collections.abc import Mapping
from typing import Any

from checkpoints_convert.huggingface.families_deepseek import DEEPSEEK
from checkpoints_convert.huggingface.families_early import EARLY
from checkpoints_convert.huggingface.families_gemma import GEMMA
from checkpoints_convert.huggingface.families_llama import LLAMA_LIKE
from checkpoints_convert.huggingface.families_mixtures import MIXTURES
from checkpoints_convert.huggingface.families_parallel import PARALLEL
from checkpoints_convert.huggingface.family import Family
from jaxinfer.models import ModelConfig

FAMILIES: dict[str, Family] = {
    family.architecture: family for family in (*LLAMA_LIKE, *MIXTURES, *DEEPSEEK, *GEMMA, *PARALLEL, *EARLY)
}

# Models of text and images, of which the text part is read: what `text_config` is when it does not say.
WRAPPERS: dict[str, str] = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Mistral3ForConditionalGeneration": "mistral",
}
# Their other parts.
WRAPPER_SKIPPED = (r"(model\.)?(vision_tower|multi_modal_projector)\..*",)
# What a text part has from the whole where it does not say.
_INHERITED = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config", "bos_token_id", "eos_token_id")


def family_of(config: ModelConfig) -> Family:
    """The family a configuration was read as, for saving. KeyError: none."""
    return FAMILIES[config.architecture]


def text_part(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the text model in a model of text and images; any other as it is."""
    names = data.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    part = data.get("text_config")
    if name not in WRAPPERS or not isinstance(part, Mapping):
        return data
    inherited = {key: data[key] for key in _INHERITED if key in data and key not in part}
    kind = part.get("model_type") or WRAPPERS[name]
    by_type = {family.model_type: family.architecture for family in FAMILIES.values()}
    # Whatever the part calls itself, it is the text model of its type.
    return {**inherited, **part, "model_type": kind, "architectures": [by_type.get(kind, kind)]}


def is_wrapper(data: Mapping[str, Any]) -> bool:
    return text_part(data) is not data


def source_of(family: Family, path: tuple[str, ...]) -> tuple[str, bool]:
    """The name of the tensor that holds a parameter alone, and whether it is stored transposed. KeyError: none does."""
    wanted = ".".join("{layer}" if key.isdigit() else key for key in path)
    rule = {rule.targets[0]: rule for rule in reversed(family.tensors) if len(rule.targets) == 1}[wanted]
    return rule.source.format(layer=next((key for key in path if key.isdigit()), "")), rule.transpose
