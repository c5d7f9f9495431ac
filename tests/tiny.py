"""The configuration of a tiny model, for tests of what does not depend on the model."""

from jaxinfer.models import ModelConfig, RopeConfig

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope=RopeConfig(rotary_dim=8),
    max_position_embeddings=128,
)
