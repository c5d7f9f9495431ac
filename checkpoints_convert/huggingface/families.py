"""What differs between the supported families, as tables that loading and saving share.

A family's entry says how its config.json is read where that differs from Llama's; the tensor rules say which tensor
of the checkpoint is which parameter. Adding a family of the same shape is adding an entry.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from jaxinfer.models import ModelConfig

# A bias exists never, always, or when the named field of config.json says so.
Bias = bool | str
# Which layers have a sliding window: none; all, when `sliding_window` is set; or, when `use_sliding_window` is set,
# those from `max_window_layers` on. `layer_types`, where given, names them one by one.
Windows = Literal["none", "all", "late"]


@dataclass(frozen=True)
class TensorRule:
    """One tensor of the checkpoint and the parameter it becomes; Linear weights [out, in] are transposed."""

    source: str
    target: str
    transpose: bool = False


def _linear(source: str, target: str) -> tuple[TensorRule, TensorRule]:
    return (
        TensorRule(f"{source}.weight", f"{target}.weight", transpose=True),
        TensorRule(f"{source}.bias", f"{target}.bias"),
    )


_LAYER, _TARGET = "model.layers.{layer}", "layers.{layer}"

LLAMA_TENSORS: tuple[TensorRule, ...] = (
    TensorRule("model.embed_tokens.weight", "embed"),
    TensorRule(f"{_LAYER}.input_layernorm.weight", f"{_TARGET}.attention_norm.weight"),
    *_linear(f"{_LAYER}.self_attn.q_proj", f"{_TARGET}.attention.q_proj"),
    *_linear(f"{_LAYER}.self_attn.k_proj", f"{_TARGET}.attention.k_proj"),
    *_linear(f"{_LAYER}.self_attn.v_proj", f"{_TARGET}.attention.v_proj"),
    *_linear(f"{_LAYER}.self_attn.o_proj", f"{_TARGET}.attention.o_proj"),
    TensorRule(f"{_LAYER}.self_attn.q_norm.weight", f"{_TARGET}.attention.q_norm.weight"),
    TensorRule(f"{_LAYER}.self_attn.k_norm.weight", f"{_TARGET}.attention.k_norm.weight"),
    TensorRule(f"{_LAYER}.post_attention_layernorm.weight", f"{_TARGET}.mlp_norm.weight"),
    *_linear(f"{_LAYER}.mlp.gate_proj", f"{_TARGET}.mlp.gate_proj"),
    *_linear(f"{_LAYER}.mlp.up_proj", f"{_TARGET}.mlp.up_proj"),
    *_linear(f"{_LAYER}.mlp.down_proj", f"{_TARGET}.mlp.down_proj"),
    TensorRule("model.norm.weight", "final_norm.weight"),
    TensorRule("lm_head.weight", "lm_head", transpose=True),
)

# Buffers old exports stored; they are computed from the configuration.
LLAMA_SKIPPED = (r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",)


@dataclass(frozen=True)
class Family:
    """One `architectures` entry of config.json.

    Attributes:
      max_position_embeddings, num_kv_heads, head_dim: what Transformers assumes when config.json is silent; None
        for one key-value head per query head, and for hidden_size / num_attention_heads.
      skipped: patterns of tensors that carry no weights.
    """

    architecture: str
    model_type: str
    max_position_embeddings: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: Bias = False
    output_bias: Bias = False
    mlp_bias: Bias = False
    qk_norm: bool = False
    has_partial_rotary: bool = False
    windows: Windows = "none"
    default_window: int | None = None
    tensors: tuple[TensorRule, ...] = field(default=LLAMA_TENSORS, repr=False)
    skipped: tuple[str, ...] = LLAMA_SKIPPED

    def is_skipped(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.skipped)


FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family(
            "LlamaForCausalLM",
            "llama",
            max_position_embeddings=2048,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
        ),
        Family(
            "MistralForCausalLM",
            "mistral",
            max_position_embeddings=131072,
            num_kv_heads=8,
            windows="all",
            default_window=4096,
        ),
        Family(
            "Qwen2ForCausalLM",
            "qwen2",
            max_position_embeddings=32768,
            num_kv_heads=32,
            qkv_bias=True,
            windows="late",
            default_window=4096,
        ),
        Family(
            "Qwen3ForCausalLM",
            "qwen3",
            max_position_embeddings=32768,
            num_kv_heads=32,
            head_dim=128,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            windows="late",
            default_window=4096,
        ),
    )
}


def source_of(family: Family, path: tuple[str, ...]) -> tuple[str, bool]:
    """The checkpoint's tensor for a parameter, and whether it is stored transposed. KeyError: no rule."""
    rule = _rules_by_target(family)[".".join("{layer}" if key.isdigit() else key for key in path)]
    layer = next((key for key in path if key.isdigit()), "")
    return rule.source.format(layer=layer), rule.transpose


def family_of(config: ModelConfig) -> Family:
    """The family a configuration was read as, for saving. KeyError: none."""
    return FAMILIES[config.architecture]


@lru_cache(maxsize=len(FAMILIES))
def _rules_by_target(family: Family) -> dict[str, TensorRule]:
    return {rule.target: rule for rule in family.tensors}
