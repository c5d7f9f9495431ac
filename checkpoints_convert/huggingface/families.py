"""The table of model families: their differences, as data that loading and saving share.

A family's entry says how its config.json is read where that differs from Llama's; the tensor rules say which tensors
of the checkpoint are which parameters. Adding a family is adding an entry."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from checkpoints_convert.huggingface.families_deepseek import DEEPSEEK
from checkpoints_convert.huggingface.families_delta import DELTA, SHORT_CONV
from checkpoints_convert.huggingface.families_gemma4 import GEMMA4
from checkpoints_convert.huggingface.families_layernorm import EARLY, PARALLEL
from checkpoints_convert.huggingface.families_llama import GEMMA, LLAMA_LIKE
from checkpoints_convert.huggingface.families_llama4 import LLAMA4
from checkpoints_convert.huggingface.families_mamba import MAMBA
from checkpoints_convert.huggingface.families_mixtures import MIXTURES
from checkpoints_convert.huggingface.family import Family
from jaxinfer.models import ModelConfig

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for group in (
        *(LLAMA_LIKE, LLAMA4, MIXTURES, DEEPSEEK),
        *(DELTA, MAMBA, SHORT_CONV, GEMMA, GEMMA4, PARALLEL, EARLY),
    )
    for family in group
}

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
    """The family of a configuration. Raises KeyError if there is none."""
    return FAMILIES[config.architecture]


def text_part(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the text part of a model of text and images; of any other model, `data` itself."""
    names = data.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    part = data.get("text_config")
    if name not in WRAPPERS or not isinstance(part, Mapping):
        return data
    inherited = {key: data[key] for key in _INHERITED if key in data and key not in part}
    kind = part.get("model_type") or WRAPPERS[name]
    kind = TYPE_ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    by_type = {family.model_type: family.architecture for family in FAMILIES.values()}
    # The text model of that type, whatever `architectures` of the part says.
    return {**inherited, **part, "model_type": kind, "architectures": [by_type.get(kind, kind)]}


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
    fixed, rope = family.fixed, family.rope
    targets = {target for rule in family.tensors for target in rule.targets}
    yield from (title for part, title in _PARTS.items() if any(part in target for target in targets))
    if any(".conv.in_proj" in rule.source for rule in family.tensors):
        yield "short convolutions"
    if fixed.get("is_attention_gated"):
        yield "gated attention"
    if fixed.get("norm") == "layer":
        yield "LayerNorm"
    if fixed.get("norm") == "rms_zero_centred":
        yield "norms times 1 + w"
    if fixed.get("block") in _BLOCKS:
        yield _BLOCKS[fixed["block"]]
    if any(setting.field == "block" for setting in family.settings):
        yield _BLOCKS["parallel_two_norms"]
    if fixed.get("is_mlp_gated") is False:
        yield "MLP without gate"
    kind = family.activations[family.activation]
    if kind in _ACTIVATIONS:
        yield _ACTIVATIONS[kind]
    elif kind != "silu" and fixed.get("is_mlp_gated") is not False:
        yield "GELU"
    has_norm = family.qk_norm or any(setting.field == "qk_norm" for setting in family.settings)
    if has_norm and fixed.get("is_qk_norm_after_rotation"):
        yield "norms of queries and keys after rotation"
    elif family.qk_norm:
        yield _SETTINGS["qk_norm"]
    for setting in family.settings:
        is_off = setting.kind == "optional" and setting.default is None and setting.field != "qkv_clip"
        is_named = setting.field == "qk_norm" and fixed.get("is_qk_norm_after_rotation")
        if setting.field in _SETTINGS and not is_off and not is_named:
            yield _SETTINGS[setting.field] + (" in some models" if not setting.default else "")
    if family.windows in _WINDOWS:
        yield _WINDOWS[family.windows]
    if fixed.get("has_position_embedding"):
        yield "learned positions"
    elif rope.rotated != "all":
        yield "layers without rotation"
    if rope.local_theta is not None:
        yield "a rotation of its own in layers with a window"
    if rope.has_partial:
        yield "partial rotation"
    if rope.pairs_neighbours:
        yield "interleaved rotation"
    if rope.has_query_scale:
        yield "queries that grow with the position"
    # Whether experts are stored fused depends on the writer, not on the family.
    if any(len(rule.targets) > 1 and not any(part in rule.targets[0] for part in _PARTS) for rule in family.tensors):
        yield "fused projections"
    yield from family.notes
