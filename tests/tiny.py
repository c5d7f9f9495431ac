"""A tiny model and options of an engine, for tests of what depends on neither: equal ones share their programs."""

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
OPTIONS = {"max_seqs": 4, "max_model_len": 128, "prefill_chunk": 32, "num_pages": 60}
CONTIGUOUS_OPTIONS = {"cache": "contiguous", "max_seqs": 4, "max_model_len": 128}
