"""Tiny models: one or more of every family, and one for each field of a config that changes the numbers.

Plain data and NumPy: the tests read it, and `make_golden.py` and `test_live.py` build the same models in Transformers.
Weights are not stored: they are made again from names, shapes and a seed.
"""

from functools import partial
from typing import Any

import numpy as np

from tests.oracle.case import (
    FOLDER,
    GOLDEN,
    GROUPS,
    LATENT,
    MIN_DISTINCT,
    MIN_MARGIN,
    NUM_GREEDY,
    NUM_TOKENS,
    VOCAB_SIZE,
    WINDOW,
    Case,
    layer_types,
)
from tests.oracle.recent_cases import RECENT_CASES

__all__ = ["CASES", "FOLDER", "GOLDEN", "MIN_DISTINCT", "MIN_MARGIN", "NUM_GREEDY", "Case", "prompt_tokens", "weights"]

_LAYER_NORM = ("rms_norm_eps",)
_EPS = {"layer_norm_eps": 1e-5}
_PATTERN = {"sliding_window": WINDOW}

CASES = {
    case.name: case
    for case in (
        Case("llama", "llama", "LlamaForCausalLM"),
        Case("mistral", "mistral", "MistralForCausalLM", {"sliding_window": WINDOW, "head_dim": 24}),
        Case(
            "ministral",
            "ministral",
            "MinistralForCausalLM",
            {**_PATTERN, "layer_types": layer_types("s", "f"), "head_dim": 24},
        ),
        Case(
            "ministral3",
            "ministral3",
            "Ministral3ForCausalLM",
            {
                "head_dim": 32,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.3,
                },
            },
        ),
        Case("qwen2", "qwen2", "Qwen2ForCausalLM"),
        Case("qwen3", "qwen3", "Qwen3ForCausalLM", {"head_dim": 24}),
        Case("phi3", "phi3", "Phi3ForCausalLM", {"sliding_window": WINDOW}),
        Case(
            "phi3_longrope",
            "phi3",
            "Phi3ForCausalLM",
            {
                "original_max_position_embeddings": 128,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.75,
                    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5],
                    "long_factor": [1.0, 1.4, 1.9, 2.6, 3.5, 4.7],
                },
            },
            ties=(True,),
        ),
        Case("olmo2", "olmo2", "Olmo2ForCausalLM"),
        Case(
            "olmo3",
            "olmo3",
            "Olmo3ForCausalLM",
            {
                **_PATTERN,
                "layer_types": layer_types("s", "f"),
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "yarn",
                        "rope_theta": 500000.0,
                        "factor": 8.0,
                        "original_max_position_embeddings": 64,
                        "attention_factor": 1.2,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
                },
            },
        ),
        Case(
            "smollm3",
            "smollm3",
            "SmolLM3ForCausalLM",
            {
                "no_rope_layer_interval": 2,
                "use_sliding_window": True,
                "sliding_window": WINDOW,
            },
        ),
        Case(
            "granite",
            "granite",
            "GraniteForCausalLM",
            {
                "embedding_multiplier": 3.0,
                "residual_multiplier": 0.22,
                "attention_multiplier": 0.2,
                "logits_scaling": 3.0,
            },
        ),
        Case("glm4", "glm4", "Glm4ForCausalLM", {"head_dim": 24}),
        Case("gemma", "gemma", "GemmaForCausalLM", {"head_dim": 24, "num_key_value_heads": 1}),
        Case(
            "gemma2",
            "gemma2",
            "Gemma2ForCausalLM",
            {
                **_PATTERN,
                "head_dim": 24,
                "query_pre_attn_scalar": 20,
                "attn_logit_softcapping": 3.0,
                "final_logit_softcapping": 10.0,
            },
        ),
        Case(
            "gemma3",
            "gemma3_text",
            "Gemma3ForCausalLM",
            {
                **_PATTERN,
                "layer_types": layer_types("s", "f"),
                "head_dim": 24,
                "query_pre_attn_scalar": 20,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            },
        ),
        Case("cohere", "cohere", "CohereForCausalLM", {**_EPS, "logit_scale": 0.5}, without=_LAYER_NORM),
        Case(
            "cohere_qk_norm",
            "cohere",
            "CohereForCausalLM",
            {**_EPS, "use_qk_norm": True, "logit_scale": 0.5},
            ties=(True,),
            without=_LAYER_NORM,
        ),
        Case(
            "cohere2",
            "cohere2",
            "Cohere2ForCausalLM",
            {**_EPS, **_PATTERN, "layer_types": layer_types("s", "f"), "logit_scale": 0.5},
            without=_LAYER_NORM,
        ),
        Case("phi", "phi", "PhiForCausalLM", _EPS, without=_LAYER_NORM, live_seed=1045),
        Case("phi_qk_norm", "phi", "PhiForCausalLM", {**_EPS, "qk_layernorm": True}, (False,), _LAYER_NORM, 100, 1281),
        Case("stablelm", "stablelm", "StableLmForCausalLM", {**_EPS, "use_qkv_bias": True}, without=_LAYER_NORM),
        Case(
            "stablelm_parallel",
            "stablelm",
            "StableLmForCausalLM",
            {**_EPS, "use_parallel_residual": True, "qk_layernorm": True},
            ties=(False,),
            without=_LAYER_NORM,
        ),
        Case(
            "gpt2",
            "gpt2",
            "GPT2LMHeadModel",
            {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 96},
            ties=(True, False),
            without=(
                *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
                *("intermediate_size", "max_position_embeddings", "rms_norm_eps"),
            ),
            first_seed=178,
        ),
        Case(
            "gpt_neox",
            "gpt_neox",
            "GPTNeoXForCausalLM",
            _EPS,
            without=("rms_norm_eps", "num_key_value_heads"),
            first_seed=162,
            live_seed=1017,
        ),
        Case(
            "gpt_neox_sequential",
            "gpt_neox",
            "GPTNeoXForCausalLM",
            {**_EPS, "use_parallel_residual": False, "rotary_pct": 0.5},
            ties=(False,),
            without=("rms_norm_eps", "num_key_value_heads"),
        ),
        Case(
            "falcon",
            "falcon",
            "FalconForCausalLM",
            {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
            ties=(True, False),
            without=("rms_norm_eps", "num_key_value_heads", "intermediate_size"),
            first_seed=58,
            live_seed=1119,
        ),
        Case(
            "falcon_multi_query",
            "falcon",
            "FalconForCausalLM",
            {"multi_query": True, "ffn_hidden_size": 96},
            ties=(True,),
            without=("rms_norm_eps", "num_key_value_heads", "intermediate_size"),
            first_seed=32,
            live_seed=1035,
        ),
        Case(
            "falcon_sequential",
            "falcon",
            "FalconForCausalLM",
            {"multi_query": False, "parallel_attn": False, "bias": True, "ffn_hidden_size": 96},
            ties=(False,),
            without=("rms_norm_eps", "num_key_value_heads", "intermediate_size"),
        ),
    )
}

_LATENT_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    }
}
CASES |= {
    case.name: case
    for case in (
        Case("mixtral", "mixtral", "MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": WINDOW}),
        Case(
            "qwen2_moe",
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            {
                "num_hidden_layers": 3,
                "mlp_only_layers": [1],
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 48,
                "use_sliding_window": True,
                "sliding_window": WINDOW,
                "max_window_layers": 2,
            },
        ),
        Case(
            "qwen3_moe",
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            {
                "head_dim": 24,
                "num_hidden_layers": 3,
                "decoder_sparse_step": 2,
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 32,
                "norm_topk_prob": True,
            },
        ),
        Case(
            "gpt_oss",
            "gpt_oss",
            "GptOssForCausalLM",
            {
                "head_dim": 24,
                "swiglu_limit": 0.8,  # below some gates and ups
                "num_local_experts": 8,
                "num_experts_per_tok": 3,
                "sliding_window": WINDOW,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 150000.0,
                    "factor": 8.0,
                    "truncate": False,
                    "original_max_position_embeddings": 64,
                },
            },
        ),
        Case(
            "deepseek_v2",
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            {**LATENT, **_LATENT_YARN, **GROUPS, "topk_method": "group_limited_greedy"},
        ),
        # V2-Lite: queries without a vector of their own, no groups.
        Case(
            "deepseek_v2_lite", "deepseek_v2", "DeepseekV2ForCausalLM", {**LATENT, "q_lora_rank": None}, ties=(False,)
        ),
        Case("deepseek_v3", "deepseek_v3", "DeepseekV3ForCausalLM", {**LATENT, **_LATENT_YARN, **GROUPS}),
        Case(
            "deepseek_v3_halves",
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            {**LATENT, **GROUPS, "rope_interleave": False, "attention_bias": True},
            ties=(False,),
        ),
    )
}
CASES |= {case.name: case for case in RECENT_CASES}

# One for each field of a config that changes the numbers and that no family above has, or not alone.
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0],
        "long_factor": [1.0, 1.4, 1.9, 2.6, 3.5, 4.7, 6.2, 8.0],
    }
}


def _scaled(rope_type: str, theta: float = 10000.0, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **options}}


_one = partial(Case, ties=(True,), seeds=(0,))
_llama = partial(_one, model_type="llama", architecture="LlamaForCausalLM")
CASES |= {
    case.name: case
    for case in (
        _llama("llama_head_dim", options={"head_dim": 32}),
        _llama("llama_bias", options={"attention_bias": True, "mlp_bias": True}),
        _llama("llama_linear", options=_scaled("linear", factor=4.0)),
        # Transformers makes the base of a forward pass from its longest position; an engine fixes it once. They agree
        # where nothing is longer than the original 128 tokens, or where the engine is told the length of the pass.
        _llama("llama_dynamic", options={**_scaled("dynamic", factor=2.0), "max_position_embeddings": 128}),
        # At theta 500,000 the wavelengths 6, 32, 167, ... lie on all three sides of the bounds 64/4 and 64/1.
        _llama(
            "llama_llama3",
            options=_scaled(
                "llama3",
                theta=500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        ),
        _llama("llama_yarn", options=_scaled("yarn", factor=8.0, original_max_position_embeddings=64)),
        # Transformers takes the short factors for a forward pass within 128 tokens and the long ones for any other.
        _llama("llama_longrope_short", options=LONGROPE, num_tokens=128),
        _llama("llama_longrope_long", options=LONGROPE, greedy_lengths=(129, 151), max_model_len=256),
        _one("mistral_full", "mistral", "MistralForCausalLM", {"sliding_window": None, "head_dim": 32}),
        _one(
            "qwen2_window",
            "qwen2",
            "Qwen2ForCausalLM",
            {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        ),
        _one(
            "qwen3_mqa",
            "qwen3",
            "Qwen3ForCausalLM",
            {"head_dim": 16, "num_key_value_heads": 1, "attention_bias": True},
            ties=(False,),
        ),
    )
}


def prompt_tokens(seed: int) -> np.ndarray:
    """int32 [300]; the greedy prompts are its beginnings."""
    return np.random.default_rng([seed, 3]).integers(0, VOCAB_SIZE, NUM_TOKENS, dtype=np.int32)


# In bfloat16 a token whose experts nearly tie goes to others, in Transformers as much as here: a gain of 2 makes
# its own KL from float32 0.01. So routers are decisive and experts small; attention is soft, as elsewhere.
_MIXTURE_GAINS = {
    ("mlp.gate.weight", "router.weight"): 8.0,
    (".experts.", ".shared_expert"): 1.0,
    ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj"): 1.2,
}


# Models whose norms multiply by 1 + w.
_ZERO_CENTRED = ("gemma_", "gemma2", "gemma3", "qwen3_next", "qwen3_5")
# Of xIELU; published models have -1e-6 as eps, which no logit would show.
_SCALARS = {"act_fn.alpha_p": 0.2, "act_fn.alpha_n": -1.0, "act_fn.beta": 0.5, "act_fn.eps": -0.5, "layer_scalar": 0.8}


# Of Gemma 4: scores of normalized queries and keys are not divided by anything, the embedding is multiplied by the root
# of its width, and all that is added to it is normalized. Answers would repeat one token.
_GEMMA4_FACTORS = {
    **dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), 0.3),
    **dict.fromkeys(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight"), 4.0),
    "q_norm.weight": 0.35,
    "router.proj.weight": 8.0,  # of nearly equal experts, rounding chooses one that counts little
}


def weights(name: str, shape: tuple[int, ...], seed: int, case: Case) -> np.ndarray:
    """float32 values of a tensor of a Transformers checkpoint, a function of its name."""
    values = _weights(name, shape, seed, case)
    for ending, factor in _GEMMA4_FACTORS.items() if case.model_type == "gemma4_text" else ():
        if name.endswith(ending):
            return np.float32(factor) * values
    return values


def _weights(name: str, shape: tuple[int, ...], seed: int, case: Case) -> np.ndarray:
    """Values before the factors of a family.

    Nothing is left at 0 or 1, so that a bias or a norm that is dropped or misplaced shows in the logits. Queries and
    keys are smaller than the rest: softer attention magnifies rounding less, and larger MLPs keep answers from looping.
    What is fused is as one.
    """
    noise = np.random.default_rng([seed, 4, *name.encode()]).standard_normal(shape, np.float32)
    is_norm = any(part.rpartition(".")[2].startswith(("ln_", "norm")) or "norm" in part for part in name.split("."))
    if name.endswith("bias"):
        return np.float32(0.3) * noise
    if name.endswith(("router.scale", "router.per_expert_scale")):
        return np.float32(1.0) + np.float32(0.3) * noise
    for ending, centre in _SCALARS.items():
        if name.endswith(ending):
            return np.asarray(np.float32(centre) * (1 + np.float32(0.2) * noise))
    if is_norm:
        is_zero_centred = f"{case.model_type}_".startswith(_ZERO_CENTRED) and "linear_attn" not in name
        centre = np.float32(0.0 if is_zero_centred else 1.0)
        is_last = name.startswith(("model.norm", "model.final", "transformer.ln_f", "gpt_neox.final"))
        if is_last and is_zero_centred and case.gain != 1.0:
            return np.float32(0.15) * noise - np.float32(0.5)
        return centre + np.float32(0.3) * noise if not is_last else np.float32(0.5) * (centre + np.float32(0.3) * noise)
    if any(part in name for part in ("embed", "wte", "wpe", "lm_head")):
        return np.float32(0.4) * noise
    is_conv = case.model_type == "gpt2"
    fan_in = shape[0] if is_conv else shape[-1]
    gain = 1.2 if any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn")) else 2.0
    for parts, factor in _MIXTURE_GAINS.items():
        if any(part in name for part in parts):
            gain = factor
    gain *= case.gain
    return np.float32(gain / np.sqrt(fan_in)) * noise
