"""Tiny models with recurrent layers, beside those of cases.py."""

from tests.oracle.case import Case

_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 24,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
}
_QWEN_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 12, "mamba_n_groups": 2}
_GRANITE = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 3.0,
}
_FACTORS = {
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.4,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6,
    "mlp_multipliers": [0.9, 0.8],
    "ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7],
}
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 10, "n_groups": 2, "head_dim": 16}
RECURRENT_CASES = {
    case.name: case
    for case in (
        Case(
            "qwen3_next",
            "qwen3_next",
            "Qwen3NextForCausalLM",
            {**_DELTA, **_QWEN_EXPERTS, "mlp_only_layers": [1]},
            gain=0.4,
        ),
        Case("qwen3_5", "qwen3_5_text", "Qwen3_5ForCausalLM", _DELTA, gain=0.4),
        Case(
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "Qwen3_5MoeForCausalLM",
            {**_DELTA, **_QWEN_EXPERTS},
            without=("intermediate_size",),
            gain=0.4,
        ),
        Case(
            "lfm2",
            "lfm2",
            "Lfm2ForCausalLM",
            {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-5},
            ties=(True, False),
            without=("rms_norm_eps",),
            gain=0.6,
        ),
        Case(
            "lfm2_bias",
            "lfm2",
            "Lfm2ForCausalLM",
            {"full_attn_idxs": [0], "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
            ties=(False,),
            without=("rms_norm_eps",),
            gain=0.6,
        ),
        Case(
            "lfm2_moe",
            "lfm2_moe",
            "Lfm2MoeForCausalLM",
            {
                "num_hidden_layers": 3,
                "layer_types": ["conv", "full_attention", "conv"],
                "num_dense_layers": 1,
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 24,
                "routed_scaling_factor": 1.5,
            },
            ties=(True, False),
            without=("rms_norm_eps",),
            gain=0.6,
        ),
        Case(
            "granite_hybrid",
            "granitemoehybrid",
            "GraniteMoeHybridForCausalLM",
            {**_MAMBA, **_GRANITE, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24},
            gain=0.5,
        ),
        Case(
            "granite_hybrid_dense",
            "granitemoehybrid",
            "GraniteMoeHybridForCausalLM",
            {**_MAMBA, **_GRANITE, "num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True},
            ties=(False,),
            gain=0.5,
        ),
        Case(
            "falcon_h1",
            "falcon_h1",
            "FalconH1ForCausalLM",
            {**_MAMBA, **_FACTORS, "head_dim": 24, "mamba_d_ssm": 96, "mamba_rms_norm": True, "projectors_bias": True},
            gain=0.5,
        ),
        Case(
            "falcon_h1_gate",
            "falcon_h1",
            "FalconH1ForCausalLM",
            {**_MAMBA, "mamba_d_ssm": None, "mamba_rms_norm": False},
            ties=(False,),
            gain=0.5,
        ),
        Case(
            "nemotron_h",
            "nemotron_h",
            "NemotronHForCausalLM",
            {
                **_NEMOTRON,
                "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
            },
            without=("num_hidden_layers", "rms_norm_eps"),
            gain=0.5,
        ),
        Case(
            "nemotron_h_moe",
            "nemotron_h",
            "NemotronHForCausalLM",
            {
                **_NEMOTRON,
                "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
                "n_routed_experts": 8,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 24,
                "moe_shared_expert_intermediate_size": 40,
                "routed_scaling_factor": 2.5,
                "n_group": 4,
                "topk_group": 2,
            },
            ties=(False,),
            without=("num_hidden_layers", "rms_norm_eps"),
            gain=0.5,
        ),
    )
}
