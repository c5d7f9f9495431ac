"""Dense families that keep Llama's names: another window, bias, norm, or place of the norms; Gemma 1, 2 and 3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from checkpoints_convert.huggingface.family import (
    ACTIVATIONS,
    ATTENTION_BIAS,
    INVERSE_ROOT,
    LINEAR_BIAS,
    MAX_INTEGER,
    RECIPROCAL,
    Family,
    RopeForm,
    Setting,
    all_biases,
    scaled,
)
from checkpoints_convert.huggingface.llama_tensors import (
    ATTENTION,
    EMBEDDING,
    FUSED_MLP,
    GATED_MLP,
    HEAD,
    LAYER,
    NORMS,
    POST_NORMS,
    QK_NORMS,
    QKV,
    SANDWICH_NORMS,
    TARGET,
)
from checkpoints_convert.huggingface.rules import TensorRule, linear, norm
from jaxinfer.models import ModelConfig

_GLM_NORMS = (
    *NORMS,
    *norm(f"{LAYER}.post_self_attn_layernorm", f"{TARGET}.attention_post_norm"),
    *norm(f"{LAYER}.post_mlp_layernorm", f"{TARGET}.mlp_post_norm"),
)
_FUSED_ATTENTION = (
    *linear(f"{LAYER}.self_attn.qkv_proj", *(f"{TARGET}.attention.{name}" for name in QKV)),
    *linear(f"{LAYER}.self_attn.o_proj", f"{TARGET}.attention.o_proj"),
)

_POST_NORM_TENSORS = (*EMBEDDING, *POST_NORMS, *ATTENTION, *QK_NORMS, *GATED_MLP, *HEAD)
_HUNYUAN_TENSORS = (
    *(*EMBEDDING, *NORMS, *ATTENTION, *GATED_MLP, *HEAD),
    *norm(f"{LAYER}.self_attn.query_layernorm", f"{TARGET}.attention.q_norm"),
    *norm(f"{LAYER}.self_attn.key_layernorm", f"{TARGET}.attention.k_norm"),
)
_APERTUS = (
    *norm(f"{LAYER}.attention_layernorm", f"{TARGET}.attention_norm"),
    *norm(f"{LAYER}.feedforward_layernorm", f"{TARGET}.mlp_norm"),
    *norm("model.norm", "final_norm"),
    TensorRule(f"{LAYER}.mlp.act_fn.alpha_p", (f"{TARGET}.mlp.act.alpha_p",)),
    TensorRule(f"{LAYER}.mlp.act_fn.alpha_n", (f"{TARGET}.mlp.act.alpha_n",)),
    TensorRule(f"{LAYER}.mlp.act_fn.beta", (f"{TARGET}.mlp.act.beta",), stored=()),
    TensorRule(f"{LAYER}.mlp.act_fn.eps", (f"{TARGET}.mlp.act.eps",), stored=()),
)

_NO_HEAD_DIM = {"head_dim": None}
MISTRAL_YARN = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


def _exaone_pattern(data: Mapping[str, Any]) -> dict[str, Any]:
    """The pattern of layers as a number: "LLLG" is 4. Other strings are left, to be refused as no integer."""
    pattern = data.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern == "L" * (len(pattern) - 1) + "G":
        return {**data, "sliding_window_pattern": len(pattern)}
    return dict(data)


def _express_exaone(config: ModelConfig) -> dict[str, Any]:
    if any(config.sliding_windows) or not all(config.rotated_layers):
        return {}
    return {"sliding_window": None, "layer_types": ["full_attention"] * config.num_layers}


GRANITE_SCALES = (
    Setting("embedding_multiplier", "embedding_multiplier", "number", 1.0),
    Setting("residual_multiplier", "residual_multiplier", "number", 1.0),
    Setting("attention_scale", "attention_multiplier", "number", 1.0),
    Setting("logit_scale", "logits_scaling", "number", 1.0, RECIPROCAL),
)

_MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    title="Mistral",
    examples="Mistral 7B, Nemo, Small",
    max_position_embeddings=131072,
    num_kv_heads=8,
    windows="all",
    default_window=4096,
)
_OLMO2 = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    title="OLMo 2",
    examples="OLMo 2 1B to 32B",
    max_position_embeddings=2048,
    norm_eps=1e-5,
    **ATTENTION_BIAS,
    qk_norm=True,
    names=_NO_HEAD_DIM,
    fixed={"norm": "rms_float32", "block": "post_norm", "qk_norm_span": "all_heads"},
    tensors=_POST_NORM_TENSORS,
)
ERNIE = Family(
    "Ernie4_5ForCausalLM",
    "ernie4_5",
    title="ERNIE 4.5",
    examples="ERNIE-4.5-0.3B",
    max_position_embeddings=131072,
    num_kv_heads=2,
    head_dim=128,
    norm_eps=1e-5,
    **all_biases("use_bias"),
    is_tied=True,
    rope=RopeForm(theta=500000.0, pairs_neighbours=True),
)
HUNYUAN = Family(
    "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_dense",
    title="Hunyuan",
    examples="Hunyuan 0.5B to 7B",
    max_position_embeddings=2048,
    norm_eps=1e-5,
    **ATTENTION_BIAS,
    qk_norm=True,
    fixed={"is_qk_norm_after_rotation": True},
    rope=RopeForm(has_alpha=True),
    supported={"use_qk_norm": (True,), "use_cla": (False,), "mlp_bias": (False,)},
    tensors=_HUNYUAN_TENSORS,
)

LLAMA_LIKE: tuple[Family, ...] = (
    Family(
        "LlamaForCausalLM",
        "llama",
        title="Llama 1 to 3.3",
        examples="Llama, TinyLlama, SmolLM2, Yi, DeepSeek LLM",
        max_position_embeddings=2048,
        **LINEAR_BIAS,
    ),
    _MISTRAL,
    replace(
        _MISTRAL,
        architecture="MinistralForCausalLM",
        model_type="ministral",
        title="Ministral",
        examples="Ministral 8B",
    ),
    Family(
        "Ministral3ForCausalLM",
        "ministral3",
        title="Ministral 3",
        examples="Ministral 3 3B to 14B",
        max_position_embeddings=262144,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        windows="all",
        rope=RopeForm(
            has_query_scale=True,
            default=scaled("yarn", 16.0, 16384, rope_theta=1e6, **MISTRAL_YARN),
        ),
    ),
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        title="Qwen2, Qwen2.5",
        examples="Qwen2.5 0.5B to 72B, QwQ",
        max_position_embeddings=32768,
        num_kv_heads=32,
        qkv_bias=True,
        windows="late",
        default_window=4096,
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        title="Qwen3",
        examples="Qwen3 0.6B to 32B",
        max_position_embeddings=32768,
        num_kv_heads=32,
        head_dim=128,
        **ATTENTION_BIAS,
        qk_norm=True,
        windows="late",
        default_window=4096,
    ),
    Family(
        "Phi3ForCausalLM",
        "phi3",
        title="Phi-3, 3.5, 4",
        examples="Phi-3 mini, Phi-3.5 mini, Phi-4, Phi-4 mini",
        max_position_embeddings=4096,
        norm_eps=1e-5,
        windows="all",
        names=_NO_HEAD_DIM,
        defaults={"original_max_position_embeddings": 4096},
        rope=RopeForm(has_partial=True, aliases={"yarn": "longrope"}),
        tensors=(*EMBEDDING, *NORMS, *_FUSED_ATTENTION, *FUSED_MLP, *HEAD),
    ),
    _OLMO2,
    replace(
        _OLMO2,
        architecture="Olmo3ForCausalLM",
        model_type="olmo3",
        title="OLMo 3",
        examples="OLMo 3 7B, 32B",
        windows="pattern",
        full_every=4,
        default_window=4096,
        rope=RopeForm(theta=500000.0, local_theta=500000.0),
    ),
    Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        title="SmolLM3",
        examples="SmolLM3 3B",
        max_position_embeddings=32768,
        num_kv_heads=4,
        **LINEAR_BIAS,
        is_tied=True,
        windows="unrotated",
        names=_NO_HEAD_DIM,
        rope=RopeForm(theta=2e6, rotated="listed"),
    ),
    Family(
        "GraniteForCausalLM",
        "granite",
        title="Granite",
        examples="Granite 3.0 to 3.3",
        max_position_embeddings=2048,
        **LINEAR_BIAS,
        names=_NO_HEAD_DIM,
        settings=GRANITE_SCALES,
    ),
    Family(
        "Glm4ForCausalLM",
        "glm4",
        title="GLM-4",
        examples="GLM-4 9B and 32B of 2025 (0414)",
        max_position_embeddings=131072,
        num_kv_heads=2,
        head_dim=128,
        norm_eps=1.5625e-07,
        qkv_bias="attention_bias",
        defaults={"attention_bias": True},
        rope=RopeForm(partial=0.5, has_partial=True, pairs_neighbours=True),
        fixed={"block": "sandwich_norm"},
        tensors=(*EMBEDDING, *_GLM_NORMS, *ATTENTION, *FUSED_MLP, *HEAD),
    ),
    Family(
        "SeedOssForCausalLM",
        "seed_oss",
        title="Seed-OSS",
        examples="Seed-OSS-36B",
        max_position_embeddings=524288,
        num_kv_heads=8,
        head_dim=128,
        qkv_bias="attention_bias",
        output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        defaults={"attention_bias": True},
    ),
    ERNIE,
    HUNYUAN,
    Family(
        "ArceeForCausalLM",
        "arcee",
        title="Arcee",
        examples="AFM-4.5B",
        max_position_embeddings=4096,
        norm_eps=1e-5,
        **ATTENTION_BIAS,
        mlp_bias="mlp_bias",
        activation="relu2",
        activations={**ACTIVATIONS, "relu2": "relu2"},
        fixed={"is_mlp_gated": False},
    ),
    Family(
        "Exaone4ForCausalLM",
        "exaone4",
        title="EXAONE 4",
        examples="EXAONE 4.0 1.2B, 32B",
        max_position_embeddings=2048,
        num_kv_heads=32,
        norm_eps=1e-5,
        qk_norm=True,
        windows="pattern",
        full_every=4,
        default_window=4096,
        rope=RopeForm(rotated="windowed_or_all"),
        fixed={"block": "post_norm"},
        tensors=_POST_NORM_TENSORS,
        normalize=_exaone_pattern,
        express=_express_exaone,
    ),
    Family(
        "ApertusForCausalLM",
        "apertus",
        title="Apertus",
        examples="Apertus 8B, 70B",
        max_position_embeddings=65536,
        norm_eps=1e-5,
        **ATTENTION_BIAS,
        qk_norm=True,
        activation="xielu",
        activations={**ACTIVATIONS, "relu2": "relu2", "xielu": "xielu"},
        rope=RopeForm(
            theta=12000000.0,
            default=scaled("llama3", 8.0, 8192, rope_theta=12000000.0, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
        fixed={"is_mlp_gated": False},
        supported={"mlp_bias": (False,), "post_norm": (False,), "qk_norm": (True,)},
        tensors=(*EMBEDDING, *ATTENTION, *QK_NORMS, *GATED_MLP, *_APERTUS, *HEAD),
    ),
)


_SANDWICH_TENSORS = (*EMBEDDING, *SANDWICH_NORMS, *ATTENTION, *QK_NORMS, *GATED_MLP, *HEAD)
_FIXED = {"norm": "rms_zero_centred"}
# "gelu" in the files of the first release means the tanh form: the weights were trained with that.
_ACTIVATIONS = {**ACTIVATIONS, "gelu": "gelu_tanh"}
EMBEDDING_MULTIPLIER = Setting("embedding_multiplier", "embedding_multiplier", "number", 1.0, is_derived=True)
_REFUSED = {"use_bidirectional_attention": (True, "the model sees later tokens, which a cache of keys cannot hold")}


def scaled_embedding(data: Mapping[str, Any]) -> dict[str, Any]:
    """Multiplies the embedding by the square root of the width; config.json has no field for it."""
    width = data.get("hidden_size")
    if not isinstance(width, int) or not 1 <= width <= MAX_INTEGER:  # a problem when the field itself is read
        width = 1
    return {**data, "embedding_multiplier": width**0.5}


def _settings(final_softcap: float | None, softcap: float | None) -> tuple[Setting, ...]:
    return (
        EMBEDDING_MULTIPLIER,
        Setting("attention_scale", "query_pre_attn_scalar", "number", 256, INVERSE_ROOT),
        Setting("logit_softcap", "final_logit_softcapping", "optional", final_softcap),
        Setting("attention_softcap", "attn_logit_softcapping", "optional", softcap),
    )


_GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    title="Gemma 2",
    examples="Gemma 2 2B to 27B",
    max_position_embeddings=8192,
    num_kv_heads=4,
    head_dim=256,
    **ATTENTION_BIAS,
    is_tied=True,
    windows="pattern",
    full_every=2,
    default_window=4096,
    names={"hidden_act": "hidden_activation"},
    activation="gelu_pytorch_tanh",
    fixed={**_FIXED, "block": "sandwich_norm"},
    settings=_settings(30.0, 50.0),
    refused=_REFUSED,
    tensors=_SANDWICH_TENSORS,
    normalize=scaled_embedding,
)
GEMMA3 = replace(
    _GEMMA2,
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    title="Gemma 3",
    examples="Gemma 3 270M to 27B, text of the models with images too",
    max_position_embeddings=131072,
    qk_norm=True,
    full_every=6,
    # The text part in a model with images names only what differs from these.
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
    },
    rope=RopeForm(theta=1e6, local_theta=10000.0, local_theta_name="rope_local_base_freq"),
    settings=_settings(None, None),
)

GEMMA: tuple[Family, ...] = (
    Family(
        "GemmaForCausalLM",
        "gemma",
        title="Gemma 1",
        examples="Gemma 2B and 7B, CodeGemma",
        max_position_embeddings=8192,
        num_kv_heads=16,
        head_dim=256,
        **ATTENTION_BIAS,
        is_tied=True,
        activation="gelu_pytorch_tanh",
        activations=_ACTIVATIONS,
        fixed=_FIXED,
        settings=(EMBEDDING_MULTIPLIER,),
        refused=_REFUSED,
        normalize=scaled_embedding,
    ),
    _GEMMA2,
    GEMMA3,
)
