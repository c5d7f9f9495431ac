"""The table of model families: their differences, as data that loading and saving share.

A family's entry says how its config.json is read where that differs from Llama's; the tensor rules say which tensors
of the checkpoint are which parameters. Adding a family is adding an entry."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from checkpoints_convert.huggingface.families_deepseek import DEEPSEEK
from checkpoints_convert.huggingface.families_gemma4 import GEMMA4
from checkpoints_convert.huggingface.families_heads import HEADS
from checkpoints_convert.huggingface.families_layernorm import EARLY, PARALLEL
from checkpoints_convert.huggingface.families_llama import GEMMA, LLAMA_LIKE
from checkpoints_convert.huggingface.families_mixtures import MIXTURES
from checkpoints_convert.huggingface.families_recurrent import DELTA, MAMBA, SHORT_CONV
from checkpoints_convert.huggingface.family import Family
from jaxinfer.models import ModelConfig

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for group in (LLAMA_LIKE, MIXTURES, DEEPSEEK, DELTA, MAMBA, SHORT_CONV, GEMMA, GEMMA4, PARALLEL, EARLY)
    for family in group
}
BY_TYPE = {family.model_type: family for family in FAMILIES.values()}

# Models of text and images, of which the text part is read: default model_type of `text_config`.
WRAPPERS: dict[str, str] = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "KimiK25ForConditionalGeneration": "deepseek_v3",
    "Kimi_K25ForConditionalGeneration": "deepseek_v3",
    "Llama4ForConditionalGeneration": "llama4_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}
# Tensors of their other parts.
_OTHER_PARTS = (
    "vision_tower|vision_model|visual|multi_modal_projector|mm_projector|audio_tower|embed_vision|embed_audio"
)
WRAPPER_SKIPPED = (rf"(model\.)?({_OTHER_PARTS})\..*",)
# Names of a type in repositories, and Transformers' for the same model.
TYPE_ALIASES = {"kimi_k2": "deepseek_v3"}
# Names of an architecture in repositories, and Transformers' for the same model.
ARCHITECTURE_ALIASES = {
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
}
# Fields that `text_config` inherits from config.json.
_INHERITED = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config", "bos_token_id", "eos_token_id")


def family_of(config: ModelConfig) -> Family:
    """The family of a configuration, of a model or a head that drafts. Raises KeyError if there is none."""
    return (HEADS if config.draft_head is not None else FAMILIES)[config.architecture]


def first_architecture(data: Mapping[str, Any]) -> str | None:
    """The name in `architectures` of a config.json; None if that is no list of names."""
    names = data.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def text_part(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the text part of a model of text and images; of any other model, `data` itself."""
    name, part = first_architecture(data), data.get("text_config")
    if name not in WRAPPERS or not isinstance(part, Mapping):
        return data
    inherited = {key: data[key] for key in _INHERITED if key in data and key not in part}
    kind = part.get("model_type") or WRAPPERS[name]
    kind = TYPE_ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    # The text model of that type, whatever `architectures` of the part says.
    own = BY_TYPE[kind].architecture if isinstance(kind, str) and kind in BY_TYPE else kind
    return {**inherited, **part, "model_type": kind, "architectures": [own]}


def is_wrapper(data: Mapping[str, Any]) -> bool:
    return text_part(data) is not data


@dataclass(frozen=True)
class SupportedFamily:
    """A supported family, for documentation.

    Attributes:
      title, examples: its name, and well-known models of it.
      architectures: names in `architectures` of config.json: the family's, then those of models with images.
      model_type: Transformers' name.
      differences: differences from Llama.
    """

    title: str
    architectures: tuple[str, ...]
    model_type: str
    examples: str
    differences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {**asdict(self), "architectures": list(self.architectures), "differences": list(self.differences)}


def supported_families() -> list[SupportedFamily]:
    """All supported families, in the order of the documentation."""
    return [
        SupportedFamily(
            family.title,
            (family.architecture, *(name for name, kind in WRAPPERS.items() if kind == family.model_type)),
            family.model_type,
            family.examples,
            tuple(dict.fromkeys(_differences(family))),
        )
        for family in FAMILIES.values()
    ]


_ACTIVATIONS = {"relu2": "squared ReLU", "xielu": "xIELU"}
_BLOCKS = {
    "post_norm": "norms after attention and MLP",
    "sandwich_norm": "norms before and after attention and MLP",
    "parallel_one_norm": "attention and MLP side by side",
    "parallel_two_norms": "attention and MLP side by side",
}
_WINDOWS = {
    "all": "sliding windows",
    "late": "sliding windows in late layers",
    "pattern": "sliding windows in most layers",
    "unrotated": "sliding windows in some layers",
}
# Parts of a layer that only some families have, by a part of the names of their parameters.
_PARTS = {
    ".mlp.experts.": "a mixture of experts",
    ".mlp.shared.": "shared experts",
    ".attention.k_up.": "latent attention",
    ".recurrent.decay_proj": "gated delta nets",
    ".recurrent.skip": "Mamba 2 layers",
    ".attention.sinks": "attention sinks",
}
# Titles of fields of ModelConfig that a family may set.
_SETTINGS = {
    "attention_softcap": "capped scores",
    "logit_softcap": "capped logits",
    "logit_scale": "scaled logits",
    "embedding_multiplier": "scaled embedding",
    "residual_multiplier": "scaled residuals",
    "qk_norm": "norms of queries and keys",
    "qkv_clip": "clipped queries, keys and values",
}


def _differences(family: Family) -> Iterator[str]:
    fixed, rope, kind = family.fixed, family.rope, family.activations[family.activation]
    targets = {target for rule in family.tensors for target in rule.targets}
    norm_setting = any(setting.field == "qk_norm" for setting in family.settings)
    block, is_gated = fixed.get("block", ""), fixed.get("is_mlp_gated", True)
    is_norm_last = "is_qk_norm_after_rotation" in fixed
    # Whether experts are stored fused depends on the writer, not on the family.
    fused = [rule for rule in family.tensors if len(rule.targets) > 1 and not any(x in rule.targets[0] for x in _PARTS)]
    titles = {
        **{title: any(part in target for target in targets) for part, title in _PARTS.items()},
        "short convolutions": any(".conv.in_proj" in rule.source for rule in family.tensors),
        "gated attention": fixed.get("is_attention_gated"),
        "LayerNorm": fixed.get("norm") == "layer",
        "norms times 1 + w": fixed.get("norm") == "rms_zero_centred",
        _BLOCKS.get(block, ""): block in _BLOCKS,
    }
    if any(setting.field == "block" for setting in family.settings):
        titles[_BLOCKS["parallel_two_norms"]] = True
    titles |= {
        "MLP without gate": not is_gated,
        _ACTIVATIONS.get(kind, ""): kind in _ACTIVATIONS,
        "GELU": kind not in ("silu", *_ACTIVATIONS) and is_gated,
        "norms of queries and keys after rotation": is_norm_last and (family.qk_norm or norm_setting),
        _SETTINGS["qk_norm"]: family.qk_norm and not is_norm_last,
    }
    yield from (title for title, holds in titles.items() if holds)
    for setting in family.settings:
        is_off = setting.kind == "optional" and setting.default is None and setting.field != "qkv_clip"
        is_named = setting.field == "qk_norm" and is_norm_last
        if setting.field in _SETTINGS and not is_off and not is_named:
            yield _SETTINGS[setting.field] + (" in some models" if not setting.default else "")
    has_positions = bool(fixed.get("has_position_embedding"))
    last = {
        _WINDOWS.get(family.windows, ""): family.windows in _WINDOWS,
        "learned positions": has_positions,
        "layers without rotation": not has_positions and rope.rotated != "all",
        "a rotation of its own in layers with a window": rope.local_theta is not None,
        "partial rotation": rope.has_partial,
        "interleaved rotation": rope.pairs_neighbours,
        "queries that grow with the position": rope.has_query_scale,
        "fused projections": bool(fused),
    }
    yield from (title for title, holds in last.items() if holds)
    yield from family.notes
