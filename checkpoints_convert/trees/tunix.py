"""Tunix's models with the names of Llama: `tunix.models.llama3`, `qwen2` and `qwen3` (google-tunix 0.1.7), and the
configurations of those and of Gemma 3. Its Gemma 3 has the names in `gemma`."""

import warnings
from typing import Any

from checkpoints_convert.huggingface.config import model_config
from checkpoints_convert.trees.rules import TreeForm, TreeRule, numbered
from jaxinfer.models import ModelConfig

# The theta that Llama 3 and Qwen of 0.1.7 rotate with: `apply_rope`'s default, since `rope_theta` is not passed on.
ROPE_THETA = 1_000_000

TUNIX = TreeForm(
    "Tunix",
    outside=(
        TreeRule("embedder.input_embedding", "embed", "V D"),
        TreeRule("final_norm.w", "final_norm.weight", "D"),
        TreeRule("lm_head.w", "lm_head", "D V"),
    ),
    inside=(
        TreeRule("input_layernorm.w", "attention_norm.weight", "D"),
        TreeRule("attn.q_proj.w", "attention.q_proj.weight", "D Hq K", "D Hq*K"),
        TreeRule("attn.k_proj.w", "attention.k_proj.weight", "D Hkv K", "D Hkv*K"),
        TreeRule("attn.v_proj.w", "attention.v_proj.weight", "D Hkv K", "D Hkv*K"),
        TreeRule("attn.o_proj.w", "attention.o_proj.weight", "Hq K D", "Hq*K D"),
        TreeRule("attn.q_bias", "attention.q_proj.bias", "Hq*K"),
        TreeRule("attn.k_bias", "attention.k_proj.bias", "Hkv*K"),
        TreeRule("attn.v_bias", "attention.v_proj.bias", "Hkv*K"),
        TreeRule("attn.q_norm.w", "attention.q_norm.weight", "K"),
        TreeRule("attn.k_norm.w", "attention.k_norm.weight", "K"),
        TreeRule("post_attention_layernorm.w", "mlp_norm.weight", "D"),
        TreeRule("mlp.gate_proj.kernel", "mlp.gate_proj.weight", "D F"),
        TreeRule("mlp.up_proj.kernel", "mlp.up_proj.weight", "D F"),
        TreeRule("mlp.down_proj.kernel", "mlp.down_proj.weight", "F D"),
        TreeRule("mlp.router.kernel", "mlp.router.weight", "D E"),
        TreeRule("mlp.gate_proj", "mlp.experts.gate_proj.weight", "E D G"),
        TreeRule("mlp.up_proj", "mlp.experts.up_proj.weight", "E D G"),
        TreeRule("mlp.down_proj", "mlp.experts.down_proj.weight", "E G D"),
    ),
    place=numbered("layers."),
)


def config_of(config: Any) -> ModelConfig:
    """The configuration of a model of `tunix.models.llama3`, `qwen2`, `qwen3` or `gemma3`, from its own `ModelConfig`.

    Llama 3 and Qwen rotate with theta 1,000,000 whatever `rope_theta` says, as their forward does in 0.1.7; a
    UserWarning names another one.

    Raises TypeError for a configuration of anything else.
    """
    family = type(config).__module__.split(".")[-2:-1]
    architectures = {
        "llama3": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gemma3": "Gemma3ForCausalLM",
    }
    architecture = architectures.get(family[0] if family else "")
    if architecture is None:
        raise TypeError(
            f"a jaxinfer.models.ModelConfig is wanted, or one of tunix.models.{{{', '.join(architectures)}}}, got "
            f"{type(config).__module__}.{type(config).__qualname__}"
        )
    data: dict[str, Any] = {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.hidden_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
    }
    if architecture == "Gemma3ForCausalLM":
        return model_config({"architectures": [architecture], **data, **_gemma3(config)}, "Tunix's configuration")
    if config.rope_theta != ROPE_THETA:
        warnings.warn(
            f"{type(config).__module__}: rope_theta={config.rope_theta} is not what this model of Tunix 0.1.7 rotates "
            f"with, which is {ROPE_THETA}: that is taken, so that both compute alike. Give a ModelConfig of jaxinfer "
            "for another one",
            stacklevel=2,
        )
    is_tied = config.weight_tying if hasattr(config, "weight_tying") else config.use_tied_embedding
    data |= {
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": is_tied,
        "max_position_embeddings": 131072,
    }
    if getattr(config, "num_experts", None):
        architecture = "Qwen3MoeForCausalLM"
        data |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "moe_intermediate_size": config.hidden_dim,
            "norm_topk_prob": True,
        }
    return model_config({"architectures": [architecture], **data}, "Tunix's configuration")


def _gemma3(config: Any) -> dict[str, Any]:
    by_heads = config.query_pre_attn_norm.name == "BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS"
    factor = config.global_scale_factor
    if config.local_scale_factor != 1.0:
        raise ValueError(f"local_scale_factor={config.local_scale_factor} is not supported, only 1.0 is")
    return {
        "vocab_size": config.num_embed,
        "query_pre_attn_scalar": config.embed_dim // config.num_heads if by_heads else config.head_dim,
        "sliding_window": config.sliding_window_size,
        "rope_theta": config.global_base_frequency,
        "rope_local_base_freq": config.local_base_frequency,
        "rope_scaling": None if factor == 1.0 else {"rope_type": "linear", "factor": factor},
    }
