"""Models that exist as shapes only."""

from dataclasses import replace

from benchmarks.compiled_roofline import LLAMA_3_8B
from jaxinfer.models import DeltaConfig, MambaConfig, ModelConfig, MoEConfig, RopeConfig

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
# Three gated delta nets before each layer with attention, 256 experts of which a token has 8, and a shared one.
QWEN_36_35B_A3B = ModelConfig(
    architecture="Qwen3_5MoeForConditionalGeneration",
    vocab_size=248_320,
    hidden_size=2048,
    intermediate_size=512,
    num_layers=40,
    num_heads=16,
    num_kv_heads=2,
    head_dim=256,
    rope=RopeConfig(theta=1e7, rotary_dim=64),
    max_position_embeddings=262_144,
    dtype="bfloat16",
    layer_kinds=("gated_delta", "gated_delta", "gated_delta", "attention") * 10,
    delta=DeltaConfig(num_key_heads=16, num_value_heads=32, key_size=128, value_size=128),
    moe=MoEConfig(
        num_experts=256, num_experts_per_token=8, expert_size=512, layers=tuple(range(40)),
        shared_size=512, has_shared_gate=True,
    ),
    is_attention_gated=True,
    norm="rms_zero_centred",
    qk_norm=True,
)  # fmt: skip
# Mamba 2 in nine of ten layers, 72 experts of which a token has 10, and a shared one.
GRANITE_4_SMALL = ModelConfig(
    architecture="GraniteMoeHybridForCausalLM",
    vocab_size=100_352,
    hidden_size=4096,
    intermediate_size=768,
    num_layers=40,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=RopeConfig(rotary_dim=128),
    rotated_layers=(False,) * 40,
    max_position_embeddings=131_072,
    dtype="bfloat16",
    layer_kinds=tuple("attention" if layer % 10 == 5 else "mamba2" for layer in range(40)),
    mamba=MambaConfig(num_heads=128, head_size=64, num_groups=1, state_size=128),
    moe=MoEConfig(num_experts=72, num_experts_per_token=10, expert_size=768, layers=tuple(range(40)), shared_size=1536),
    tie_word_embeddings=True,
)
# A window of 128 tokens in every other layer, attention sinks, and 32 experts of which a token has 4.
GPT_OSS_20B = ModelConfig(
    architecture="GptOssForCausalLM",
    vocab_size=201_088,
    hidden_size=2880,
    intermediate_size=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    rope=RopeConfig("yarn", 150_000.0, 64, factor=32.0, original_length=4096),
    max_position_embeddings=131_072,
    dtype="bfloat16",
    qkv_bias=True,
    output_bias=True,
    norm="rms_float32",
    has_sinks=True,
    sliding_windows=(128, None) * 12,
    moe=MoEConfig(
        num_experts=32, num_experts_per_token=4, expert_size=2880, layers=tuple(range(24)),
        scoring="softmax_of_chosen", has_router_bias=True, has_expert_bias=True, clamp=7.0,
    ),
)  # fmt: skip
# A window of 1,024 tokens in five of six layers.
GEMMA_3_27B = ModelConfig(
    architecture="Gemma3ForCausalLM",
    vocab_size=262_208,
    hidden_size=5376,
    intermediate_size=21_504,
    num_layers=62,
    num_heads=32,
    num_kv_heads=16,
    head_dim=128,
    rope=RopeConfig("linear", 1e6, 128, factor=8.0),
    local_rope=RopeConfig(rotary_dim=128),
    max_position_embeddings=131_072,
    dtype="bfloat16",
    tie_word_embeddings=True,
    qk_norm=True,
    norm="rms_zero_centred",
    block="sandwich_norm",
    activation="gelu_tanh",
    attention_scale=168**-0.5,
    embedding_multiplier=5376**0.5,
    sliding_windows=((*(1024,) * 5, None) * 11)[:62],
)
# A window of 1,024 tokens in five of six layers; the others have fewer and wider heads, whose values are their keys.
GEMMA_4_31B = ModelConfig(
    architecture="Gemma4ForCausalLM",
    vocab_size=262_144,
    hidden_size=5376,
    intermediate_size=21_504,
    num_layers=60,
    num_heads=32,
    num_kv_heads=16,
    head_dim=256,
    rope=RopeConfig("proportional", 1e6, 512, num_rotated=128),
    local_rope=RopeConfig(rotary_dim=256),
    max_position_embeddings=262_144,
    dtype="bfloat16",
    tie_word_embeddings=True,
    qk_norm=True,
    norm="rms_float32",
    block="sandwich_norm",
    activation="gelu_tanh",
    attention_scale=1.0,
    embedding_multiplier=5376**0.5,
    logit_softcap=30.0,
    sliding_windows=(*(1024,) * 5, None) * 10,
    global_head_dim=512,
    num_global_kv_heads=4,
    has_value_norm=True,
    global_values_are_keys=True,
    has_layer_scalar=True,
)
