"""Models that exist as shapes only."""

from dataclasses import replace

from jaxinfer.models import ModelConfig, MoEConfig, RopeConfig

LLAMA_3_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=RopeConfig("llama3", 500_000.0, 128, factor=8.0, original_length=8192),
    max_position_embeddings=131_072,
    dtype="bfloat16",
)
TINY = replace(
    LLAMA_3_8B, vocab_size=512, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64,
    num_layers=48, rope=RopeConfig(rotary_dim=64), max_position_embeddings=1024,
)  # fmt: skip
LLAMA_3_70B = replace(LLAMA_3_8B, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64)
MIXTRAL_8X7B = replace(
    LLAMA_3_8B,
    architecture="MixtralForCausalLM",
    vocab_size=32_000,
    rope=RopeConfig(theta=1e6, rotary_dim=128),
    max_position_embeddings=32_768,
    moe=MoEConfig(num_experts=8, num_experts_per_token=2, expert_size=14_336, layers=tuple(range(32))),
)
