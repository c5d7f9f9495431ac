"""Every field of config.json that changes what Transformers computes is applied or refused, never ignored."""

import pytest

from checkpoints_convert import CheckpointError
from checkpoints_convert.huggingface.config import model_config
from checkpoints_convert.huggingface.families import FAMILIES
from tests.checkpoints_convert.family_files import GOLDEN, read

# Fields that no forward pass depends on: training, generation, other parts of a library, and names.
INERT = {
    *("transformers_version", "pretraining_tp", "initializer_range", "attention_dropout", "hidden_dropout"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "residual_dropout", "use_cache", "bos_token_id"),
    *("eos_token_id", "pad_token_id", "sep_token_id", "eod_token_id", "classifier_dropout"),
    *("output_router_logits", "router_aux_loss_coef", "input_jitter_noise", "is_decoder", "model_type"),
    *("dtype", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "reorder_and_upcast_attn", "num_nextn_predict_layers"),
    *("num_logits_to_keep", "mamba_chunk_size", "chunk_size", "rescale_prenorm_residual", "use_mamba_kernels"),
}  # fmt: skip
_LATENT = {"head_dim", "qk_head_dim", "num_key_value_heads"}  # which follow from the widths of latent attention
_WINDOWS = {"max_window_layers", "sliding_window", "use_sliding_window"}
_FALCON = {"multi_query", "num_ln_in_parallel_attn", "parallel_attn", "num_kv_heads"}
# Fields by model type that another field overrides, such as `layer_types`, or that the model reads in training only.
UNREAD = {
    "deepseek_v2": {*_LATENT, "n_group", "topk_group"},  # by topk_method
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "glm_moe_dsa": _LATENT,
    "exaone4": {"sliding_window_pattern"},
    "falcon": _FALCON,
    "falcon_h1": {"mamba_expand"},  # by mamba_d_ssm
    "gemma3_text": {"_sliding_window_pattern"},
    "gemma4_text": {"num_experts", "top_k_experts", "moe_intermediate_size"},  # by enable_moe_block
    "glm4_moe_lite": _LATENT,
    "granitemoehybrid": {"num_experts_per_tok"},  # of no experts
    "lfm2": {"block_ffn_dim_multiplier", "block_multiple_of", "full_attn_idxs"},
    "llama4_text": {"no_rope_layer_interval", "router_jitter_noise"},
    "minimax_m2": {"rotary_dim", "router_jitter_noise"},
    "mistral4": _LATENT,
    "mixtral": {"router_jitter_noise"},
    "nemotron_h": {
        *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob"),
        *("routed_scaling_factor", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size"),
        *("moe_shared_expert_overlap", "mtp_layers_block_type"),  # of no experts
        *(
            "expand",
            "mamba_proj_bias",
            "time_step_limit",
            "time_step_max",
            "time_step_floor",
        ),  # not of inference
    },
    "phi3": {"original_max_position_embeddings"},
    "qwen2": _WINDOWS,
    "qwen2_moe": _WINDOWS,
    "qwen3": _WINDOWS,
    "qwen3_moe": _WINDOWS,
    "smollm3": {"no_rope_layer_interval"},
}


def others(value):
    """Other values of the same type, and for null one of each type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2 + 2, 1.5 * value + 0.01]
    return {str: ["nonsense"], type(None): [1, 1.5, True, "nonsense"], dict: [{"rope_type": "nonsense"}]}.get(
        type(value), [["nonsense"], [0]]
    )


def is_ignored(config: dict, name: str) -> bool:
    """True if no other value of a field is refused or makes another model."""
    wanted = model_config(config)
    for value in others(config[name]):
        try:
            if model_config({**config, name: value}) != wanted:
                return False
        except CheckpointError:
            return False
    return True


@pytest.mark.matrix
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_no_field_is_ignored(path):
    config = read(path.stem).config
    found = {name for name in config if name not in INERT and is_ignored(config, name)}
    assert found <= UNREAD.get(config["model_type"], set())


def test_the_check_sees_a_field_that_is_ignored():
    assert is_ignored({**read("llama").config, "use_gate": True}, "use_gate")


BASE = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Glm4MoeForCausalLM", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("Glm4MoeForCausalLM", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense", "wide"]}, "mlp_layer_types must"),
        ("DeepseekV2ForCausalLM", {"mlp_bias": True}, "mlp_bias True is not supported"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ("Mistral4ForCausalLM", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        (
            "Mistral4ForCausalLM",
            {"rope_parameters": {"partial_rotary_factor": 0.4}},
            "makes 25 rotated dimensions of 64 a head",
        ),
        ("MiniMaxM2ForCausalLM", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("MiniMaxM2ForCausalLM", {"qk_norm_type": "per_head"}, "qk_norm_type 'per_head' is not supported"),
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list .* is not supported"),
        ("MiniMaxM2ForCausalLM", {"shared_intermediate_size": 96}, "shared_intermediate_size 96 is not supported"),
        ("OlmoeForCausalLM", {"sliding_window": 9}, "sliding_window 9 is not supported"),
        ("OlmoeForCausalLM", {"head_dim": 24}, "head_dim 24 is not supported for OlmoeForCausalLM, only 16 is"),
        ("Olmo2ForCausalLM", {"head_dim": 24}, "head_dim 24 is not supported for Olmo2ForCausalLM, only 16 is"),
        ("PhimoeForCausalLM", {"num_experts_per_tok": 4}, "sparsemixer chooses 2 experts"),
        ("PhimoeForCausalLM", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear' is not supported"),
        ("Ernie4_5_MoeForCausalLM", {"moe_norm_min": 0.5}, "moe_norm_min 0.5 is not supported"),
        ("Ernie4_5_MoeForCausalLM", {"moe_gate_act": "sigmoid"}, "moe_gate_act 'sigmoid' is not supported"),
        ("HunYuanMoEV1ForCausalLM", {"use_cla": True}, "use_cla True is not supported"),
        ("HunYuanMoEV1ForCausalLM", {"use_mla": True}, "use_mla True is not supported"),
        ("HunYuanMoEV1ForCausalLM", {"moe_topk": [1, 1, 2, 1]}, "moe_topk .* only the same for all layers is"),
        ("HunYuanMoEV1ForCausalLM", {"num_shared_expert": [2] * 4}, "num_shared_expert 2 is not supported"),
        ("HunYuanMoEV1ForCausalLM", {"moe_intermediate_size": 48}, "moe_intermediate_size 48 is not supported"),
        ("HunYuanDenseV1ForCausalLM", {"use_qk_norm": False}, "use_qk_norm False is not supported"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 9.0}},
            "alpha is not a setting",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "longrope", "short_mscale": 1.0}},
            "short_mscale is not a setting",
        ),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LGLG"}, "sliding_window_pattern must be an integer"),
        ("ApertusForCausalLM", {"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported"),
        ("ApertusForCausalLM", {"post_norm": True}, "post_norm True is not supported"),
        ("ArceeForCausalLM", {"hidden_act": "xielu"}, "hidden_act 'xielu' is not supported"),
        ("Llama4ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "layer_types .* is not supported"),
        ("Llama4ForCausalLM", {"layer_types": ["chunked_attention"] * 4}, "layer_types .* is not supported"),
        ("Llama4ForCausalLM", {"moe_layers": ["all"]}, "moe_layers must be a list of layers"),
    ],
)
def test_values_that_are_not_applied_are_refused_by_name(architecture, changes, message):
    with pytest.raises(CheckpointError, match=message):
        model_config({**BASE, "num_key_value_heads": 4, "architectures": [architecture], **changes})


def test_every_supported_value_is_of_a_field_that_is_refused_otherwise():
    for family in FAMILIES.values():
        for name, values in family.supported.items():
            with pytest.raises(CheckpointError, match=f"{name} 'nonsense' is not supported for {family.architecture}"):
                model_config({**BASE, "architectures": [family.architecture], name: "nonsense"})
            assert all(value is not None for value in values)
