"""Tiny models with recurrent layers, beside those of cases.py."""

from tests.oracle.cases import Case

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
    )
}
