"""Families with LayerNorm: GPT-2, GPT-NeoX and Falcon, with names of their own; Cohere, Phi-2 and StableLM."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from checkpoints_convert.huggingface.family import ATTENTION_BIAS, Family, RopeForm, Setting, all_biases, choice
from checkpoints_convert.huggingface.llama_tensors import (
    ATTENTION,
    EMBEDDING,
    GATED_MLP,
    HEAD,
    LAYER,
    NORMS,
    QKV,
    TARGET,
    linears,
)
from checkpoints_convert.huggingface.rules import TensorRule, linear, norm
from jaxinfer.models import ModelConfig

_QKV = tuple(f"{TARGET}.attention.{name}" for name in QKV)
_FIXED = {"norm": "layer", "norm_bias": True, "is_mlp_gated": False}
# Masks that old exports stored.
_MASKS = r".*\.(attn|attention)\.(bias|masked_bias)"
_ROPE_BUFFERS = r".*\.rotary_emb\.inv_freq"

_GPT2 = _FALCON = "transformer.h.{layer}"
_GPT2_TENSORS = (
    TensorRule("transformer.wte.weight", ("embed",)),
    TensorRule("transformer.wpe.weight", ("position_embed",)),
    *norm(f"{_GPT2}.ln_1", f"{TARGET}.attention_norm"),
    # Its Conv1D stores [in, out].
    *linear(f"{_GPT2}.attn.c_attn", *_QKV, transpose=False),
    *linear(f"{_GPT2}.attn.c_proj", f"{TARGET}.attention.o_proj", transpose=False),
    *norm(f"{_GPT2}.ln_2", f"{TARGET}.mlp_norm"),
    *linear(f"{_GPT2}.mlp.c_fc", f"{TARGET}.mlp.up_proj", transpose=False),
    *linear(f"{_GPT2}.mlp.c_proj", f"{TARGET}.mlp.down_proj", transpose=False),
    *norm("transformer.ln_f", "final_norm"),
    *HEAD,
)

_NEOX = "gpt_neox.layers.{layer}"
_NEOX_TENSORS = (
    TensorRule("gpt_neox.embed_in.weight", ("embed",)),
    *norm(f"{_NEOX}.input_layernorm", f"{TARGET}.attention_norm"),
    *linear(f"{_NEOX}.attention.query_key_value", *_QKV, groups="num_kv_heads"),
    *linear(f"{_NEOX}.attention.dense", f"{TARGET}.attention.o_proj"),
    *norm(f"{_NEOX}.post_attention_layernorm", f"{TARGET}.mlp_norm"),
    *linears(f"{_NEOX}.mlp", f"{TARGET}.mlp", ("up_proj", "down_proj"), ("dense_h_to_4h", "dense_4h_to_h")),
    *norm("gpt_neox.final_layer_norm", "final_norm"),
    TensorRule("embed_out.weight", ("lm_head",), transpose=True),
    *HEAD,
)

_TWO_NORMS = ("block", "parallel_two_norms")
_FALCON_TENSORS = (
    TensorRule("transformer.word_embeddings.weight", ("embed",)),
    *norm(f"{_FALCON}.ln_attn", f"{TARGET}.attention_norm", when=_TWO_NORMS),
    *norm(f"{_FALCON}.input_layernorm", f"{TARGET}.attention_norm", when=("block", "parallel_one_norm")),
    *norm(f"{_FALCON}.input_layernorm", f"{TARGET}.attention_norm", when=("block", "pre_norm")),
    *linear(f"{_FALCON}.self_attention.query_key_value", *_QKV, groups="num_kv_heads"),
    *linear(f"{_FALCON}.self_attention.dense", f"{TARGET}.attention.o_proj"),
    *norm(f"{_FALCON}.ln_mlp", f"{TARGET}.mlp_norm", when=_TWO_NORMS),
    *norm(f"{_FALCON}.post_attention_layernorm", f"{TARGET}.mlp_norm", when=("block", "pre_norm")),
    *linears(f"{_FALCON}.mlp", f"{TARGET}.mlp", ("up_proj", "down_proj"), ("dense_h_to_4h", "dense_4h_to_h")),
    *norm("transformer.ln_f", "final_norm"),
    *HEAD,
)


def _falcon_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """How many key heads there are, and where the norms, follows from four fields and their defaults."""

    def flag(name: str, default: bool) -> bool:
        return default if data.get(name) is None else bool(data[name])

    heads = data.get("num_attention_heads")
    is_new = flag("new_decoder_architecture", False)
    if is_new:
        block = "parallel_one_norm" if data.get("num_ln_in_parallel_attn") == 1 else "parallel_two_norms"
        kv_heads = data.get("num_kv_heads") or heads
    else:
        block = "parallel_one_norm" if flag("parallel_attn", True) else "pre_norm"
        kv_heads = 1 if flag("multi_query", True) else heads
    return {**data, "block": block, "num_kv_heads": kv_heads}


def _falcon_words(config: ModelConfig) -> dict[str, Any]:
    is_new = config.block == "parallel_two_norms" or 1 < config.num_kv_heads < config.num_heads
    words = {
        "new_decoder_architecture": is_new,
        "multi_query": config.num_kv_heads == 1,
        "parallel_attn": config.block != "pre_norm",
        "alibi": False,
    }
    return {**words, "num_ln_in_parallel_attn": 2 if config.block == "parallel_two_norms" else 1} if is_new else words


EARLY: tuple[Family, ...] = (
    Family(
        "GPT2LMHeadModel",
        "gpt2",
        title="GPT-2",
        examples="GPT-2 124M to 1.5B, DistilGPT2",
        max_position_embeddings=1024,
        norm_eps=1e-5,
        **all_biases(True),
        is_tied=True,
        inner_factor=4,
        names={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "num_key_value_heads": None,
            "head_dim": None,
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        activation="gelu_new",
        rope=RopeForm(rotated="none"),
        fixed={**_FIXED, "has_position_embedding": True},
        refused={
            "scale_attn_by_inverse_layer_idx": (True, "each layer has a scale of its own for its scores"),
            "scale_attn_weights": (False, "scores are not scaled"),
            "add_cross_attention": (True, "the model reads an encoder's output"),
        },
        prefix="transformer.",
        tensors=_GPT2_TENSORS,
        skipped=(_MASKS,),
    ),
    Family(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        title="GPT-NeoX",
        examples="Pythia 14M to 12B, GPT-NeoX 20B, RedPajama",
        max_position_embeddings=2048,
        norm_eps=1e-5,
        **ATTENTION_BIAS,
        mlp_bias=True,
        defaults={"attention_bias": True},
        names={"rms_norm_eps": "layer_norm_eps", "num_key_value_heads": None, "head_dim": None},
        activation="gelu",
        rope=RopeForm(partial=0.25, has_partial=True, theta_name="rotary_emb_base", partial_name="rotary_pct"),
        fixed=_FIXED,
        settings=(
            Setting(
                "block", "use_parallel_residual", "boolean", True, choice(true="parallel_two_norms", false="pre_norm")
            ),
        ),
        prefix="gpt_neox.",
        tensors=_NEOX_TENSORS,
        skipped=(_MASKS, _ROPE_BUFFERS),
    ),
    Family(
        "FalconForCausalLM",
        "falcon",
        title="Falcon",
        examples="Falcon 7B to 180B, Falcon 2 11B",
        max_position_embeddings=2048,
        norm_eps=1e-5,
        **all_biases("bias"),
        is_tied=True,
        inner_factor=4,
        names={
            "num_key_value_heads": "num_kv_heads",
            "head_dim": None,
            "intermediate_size": "ffn_hidden_size",
            "hidden_act": "activation",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        activation="gelu",
        fixed=_FIXED,
        settings=(Setting("block", "block", "text", "parallel_one_norm", is_derived=True),),
        refused={"alibi": (True, "ALiBi adds a slope to the scores, which no attention kernel here does")},
        prefix="transformer.",
        tensors=_FALCON_TENSORS,
        skipped=(_MASKS, _ROPE_BUFFERS),
        normalize=_falcon_fields,
        express=_falcon_words,
    ),
)


_LAYER_NORM = {"norm": "layer"}
_BIASED_NORM = {"norm": "layer", "norm_bias": True}
_NAMES = {"rms_norm_eps": "layer_norm_eps", "head_dim": None}

_PHI_TENSORS = (
    *EMBEDDING,
    *norm(f"{LAYER}.input_layernorm", f"{TARGET}.attention_norm"),
    *linears(f"{LAYER}.self_attn", f"{TARGET}.attention", QKV),
    *linear(f"{LAYER}.self_attn.dense", f"{TARGET}.attention.o_proj"),
    *norm(f"{LAYER}.self_attn.q_layernorm", f"{TARGET}.attention.q_norm"),
    *norm(f"{LAYER}.self_attn.k_layernorm", f"{TARGET}.attention.k_norm"),
    *linears(f"{LAYER}.mlp", f"{TARGET}.mlp", ("up_proj", "down_proj"), ("fc1", "fc2")),
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

_COHERE = Family(
    "CohereForCausalLM",
    "cohere",
    title="Cohere",
    examples="Command R, Command R+, Aya",
    max_position_embeddings=8192,
    norm_eps=1e-5,
    **ATTENTION_BIAS,
    is_tied=True,
    names=_NAMES,
    rope=RopeForm(theta=500000.0, pairs_neighbours=True),
    fixed={**_LAYER_NORM, "block": "parallel_one_norm", "qk_norm_span": "each_head"},
    settings=(
        Setting("qk_norm", "use_qk_norm", "boolean", False),
        Setting("logit_scale", "logit_scale", "number", 0.0625),
    ),
)

PARALLEL: tuple[Family, ...] = (
    _COHERE,
    replace(
        _COHERE,
        architecture="Cohere2ForCausalLM",
        model_type="cohere2",
        title="Cohere 2",
        examples="Command R7B, Command A",
        windows="pattern",
        full_every=4,
        default_window=4096,
        rope=RopeForm(rotated="windowed", pairs_neighbours=True),
        fixed={**_LAYER_NORM, "block": "parallel_one_norm"},
        settings=(Setting("logit_scale", "logit_scale", "number", 0.0625),),
    ),
    Family(
        "PhiForCausalLM",
        "phi",
        title="Phi-1, 1.5, 2",
        examples="Phi-1.5, Phi-2",
        max_position_embeddings=2048,
        norm_eps=1e-5,
        **all_biases(True),
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
