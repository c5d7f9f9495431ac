"""Families with LayerNorm, most of which add attention and MLP of the same input: Cohere, Phi-2, StableLM."""

from checkpoints_convert.huggingface.families_llama import (
    ATTENTION,
    EMBEDDING,
    GATED_MLP,
    HEAD,
    LAYER,
    LLAMA_TENSORS,
    NORMS,
    TARGET,
)
from checkpoints_convert.huggingface.family import Family, RopeForm, Setting, choice
from checkpoints_convert.huggingface.rules import TensorRule, linear, norm

_LAYER_NORM = {"norm": "layer"}
_BIASED_NORM = {"norm": "layer", "norm_bias": True}
_NAMES = {"rms_norm_eps": "layer_norm_eps", "head_dim": None}

_PHI_TENSORS = (
    *EMBEDDING,
    *norm(f"{LAYER}.input_layernorm", f"{TARGET}.attention_norm"),
    *linear(f"{LAYER}.self_attn.q_proj", f"{TARGET}.attention.q_proj"),
    *linear(f"{LAYER}.self_attn.k_proj", f"{TARGET}.attention.k_proj"),
    *linear(f"{LAYER}.self_attn.v_proj", f"{TARGET}.attention.v_proj"),
    *linear(f"{LAYER}.self_attn.dense", f"{TARGET}.attention.o_proj"),
    *norm(f"{LAYER}.self_attn.q_layernorm", f"{TARGET}.attention.q_norm"),
    *norm(f"{LAYER}.self_attn.k_layernorm", f"{TARGET}.attention.k_norm"),
    *linear(f"{LAYER}.mlp.fc1", f"{TARGET}.mlp.up_proj"),
    *linear(f"{LAYER}.mlp.fc2", f"{TARGET}.mlp.down_proj"),
    *norm("model.final_layernorm", "final_norm"),
    *HEAD,
    TensorRule("lm_head.bias", ("lm_head_bias",)),
)
_STABLELM_TENSORS = (
    *EMBEDDING,
    *NORMS,
    *ATTENTION,
    *GATED_MLP,
    *HEAD,
    *norm(f"{LAYER}.self_attn.q_layernorm.norms.{{index}}", f"{TARGET}.attention.q_norm"),
    *norm(f"{LAYER}.self_attn.k_layernorm.norms.{{index}}", f"{TARGET}.attention.k_norm"),
)

PARALLEL: tuple[Family, ...] = (
    Family(
        "CohereForCausalLM",
        "cohere",
        title="Cohere",
        examples="Command R, Command R+, Aya",
        max_position_embeddings=8192,
        norm_eps=1e-5,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        is_tied=True,
        names=_NAMES,
        rope=RopeForm(theta=500000.0, pairs_neighbours=True),
        fixed={**_LAYER_NORM, "block": "parallel_one_norm", "qk_norm_span": "each_head"},
        settings=(
            Setting("qk_norm", "use_qk_norm", "boolean", False),
            Setting("logit_scale", "logit_scale", "number", 0.0625),
        ),
        tensors=LLAMA_TENSORS,
    ),
    Family(
        "Cohere2ForCausalLM",
        "cohere2",
        title="Cohere 2",
        examples="Command R7B, Command A",
        max_position_embeddings=8192,
        norm_eps=1e-5,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        is_tied=True,
        windows="pattern",
        full_every=4,
        default_window=4096,
        names=_NAMES,
        rope=RopeForm(rotated="windowed", pairs_neighbours=True),
        fixed={**_LAYER_NORM, "block": "parallel_one_norm"},
        settings=(Setting("logit_scale", "logit_scale", "number", 0.0625),),
        tensors=LLAMA_TENSORS,
    ),
    Family(
        "PhiForCausalLM",
        "phi",
        title="Phi-1, 1.5, 2",
        examples="Phi-1.5, Phi-2",
        max_position_embeddings=2048,
        norm_eps=1e-5,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        names=_NAMES,
        activation="gelu_new",
        rope=RopeForm(partial=0.5, has_partial=True),
        fixed={**_BIASED_NORM, "block": "parallel_one_norm", "is_mlp_gated": False, "lm_head_bias": True},
        settings=(Setting("qk_norm", "qk_layernorm", "boolean", False),),
        tensors=_PHI_TENSORS,
    ),
    Family(
        "StableLmForCausalLM",
        "stablelm",
        title="StableLM",
        examples="StableLM 2 1.6B and 12B, StableLM 3B, Zephyr 3B",
        max_position_embeddings=4096,
        num_kv_heads=32,
        norm_eps=1e-5,
        qkv_bias="use_qkv_bias",
        names=_NAMES,
        rope=RopeForm(partial=0.25, has_partial=True),
        fixed={**_BIASED_NORM, "qk_norm_span": "each_head"},
        settings=(
            Setting("qk_norm", "qk_layernorm", "boolean", False),
            Setting(
                "block", "use_parallel_residual", "boolean", False, choice(true="parallel_one_norm", false="pre_norm")
            ),
        ),
        tensors=_STABLELM_TENSORS,
    ),
)
