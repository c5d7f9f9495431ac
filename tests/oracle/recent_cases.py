"""Cases of newer families; a part of cases.py."""

from tests.oracle.case import GROUPS, LATENT, VOCAB_SIZE, WINDOW, Case, layer_types

_PATTERN = {"sliding_window": WINDOW}
# Far fewer tokens than prompts have; of so many heads, no two tokens have the same score.
_INDEX = {"index_topk": 20, "index_n_heads": 16, "index_head_dim": 12}

_DENSE: tuple[Case, ...] = (
    Case("seed_oss", "seed_oss", "SeedOssForCausalLM", {"head_dim": 24, "attention_out_bias": True}),
    Case("ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM", {"head_dim": 24, "use_bias": True}, ties=(True, False)),
    Case(
        "hunyuan_dense",
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        {
            "head_dim": 24,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0},
        },
    ),
    Case("arcee", "arcee", "ArceeForCausalLM", {"head_dim": 24}),
    Case("exaone4", "exaone4", "Exaone4ForCausalLM", {**_PATTERN, "sliding_window_pattern": 2, "head_dim": 24}),
    Case(
        "exaone4_full",
        "exaone4",
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": layer_types("f", "f"), "head_dim": 24},
        ties=(False,),
        seeds=(0,),
    ),
    Case(
        "apertus",
        "apertus",
        "ApertusForCausalLM",
        {
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12000000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ),
)

_GLM = {**{name: LATENT[name] for name in LATENT if name.startswith(("moe_", "n_", "num_ex", "first_", "routed"))}}
_MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
_PHI_MSCALES = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 128,
        "short_mscale": 1.2,
        "long_mscale": 1.3,
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0],
        "long_factor": [1.0, 1.4, 1.9, 2.6, 3.5, 4.7, 6.2, 8.0],
    }
}
_MIXTURES: tuple[Case, ...] = (
    Case("glm4_moe", "glm4_moe", "Glm4MoeForCausalLM", {**_GLM, "head_dim": 24, "use_qk_norm": True}),
    Case(
        "glm4_moe_groups",
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {**_GLM, **GROUPS, "head_dim": 16, "attention_bias": True},
        ties=(False,),
        seeds=(0,),
    ),
    Case(
        "glm4_moe_lite",
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        {**LATENT, "mlp_layer_types": ["dense", "sparse"]},
    ),
    Case("deepseek_v32", "deepseek_v32", "DeepseekV32ForCausalLM", {**LATENT, **GROUPS, **_INDEX}, ties=(False,)),
    Case(
        "glm_moe_dsa",
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        {**LATENT, **_INDEX, "mlp_layer_types": ["dense", "sparse"]},
        ties=(False,),
    ),
    Case(
        "mistral4",
        "mistral4",
        "Mistral4ForCausalLM",
        {**LATENT, **GROUPS, "first_k_dense_replace": 0, "rope_parameters": _MISTRAL4_ROPE},
    ),
    Case(
        "minimax_m2",
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        {"head_dim": 24, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 12},
    ),
    Case(
        "olmoe",
        "olmoe",
        "OlmoeForCausalLM",
        {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 1.1, "norm_topk_prob": False},
    ),
    Case(
        "phimoe",
        "phimoe",
        "PhimoeForCausalLM",
        {
            "num_local_experts": 8,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.1,
            "sliding_window": WINDOW,
        },
    ),
    # Transformers has the factors of short sequences for all lengths: compared within 128 tokens.
    Case(
        "phimoe_longrope",
        "phimoe",
        "PhimoeForCausalLM",
        {"num_local_experts": 8, **_PHI_MSCALES},
        ties=(False,),
        seeds=(0,),
        num_tokens=128,
    ),
    Case(
        "ernie4_5_moe",
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        {
            "num_hidden_layers": 3,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "use_bias": True,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
        },
        ties=(True, False),
    ),
    Case(
        "hunyuan_moe",
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        {
            "head_dim": 24,
            "num_experts": 8,
            "moe_topk": [3, 3],
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0},
        },
    ),
    Case(
        "llama4",
        "llama4_text",
        "Llama4ForCausalLM",
        {
            "head_dim": 24,
            "num_hidden_layers": 3,
            "moe_layers": [1, 2],
            "no_rope_layers": [1, 0, 1],
            "intermediate_size": 48,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_chunk_size": 512,
            "floor_scale": 16,
            "attn_scale": 0.3,
        },
    ),
)

# Heads by kind of layer are in every case; the last layers of the second and third read the keys of earlier ones.
_GEMMA4 = {
    **_PATTERN,
    "head_dim": 16,
    "global_head_dim": 24,
    "final_logit_softcapping": 30.0,
    "num_hidden_layers": 4,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 0,
}
_GEMMA4_CASES: tuple[Case, ...] = (
    Case(
        "gemma4",
        "gemma4_text",
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "layer_types": layer_types("s", "f", "s", "f"),
        },
        ties=(True, False),
    ),
    Case(
        "gemma4_shared",
        "gemma4_text",
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": layer_types("s", "s", "f", "s", "s", "f"),
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 12,
            "use_double_wide_mlp": True,
        },
        ties=(True, False),
    ),
    Case(
        "gemma4_experts",
        "gemma4_text",
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": layer_types("s", "s", "f"),
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
        ties=(True,),
    ),
)

RECENT_CASES = (*_DENSE, *_MIXTURES, *_GEMMA4_CASES)
