"""Gemma 1, 2 and 3: norms that multiply by 1 + w, an embedding times sqrt(width), caps on scores and logits."""

from collections.abc import Mapping
from typing import Any

from checkpoints_convert.huggingface.families_llama import (
    ATTENTION,
    EMBEDDING,
    GATED_MLP,
    HEAD,
    LAYER,
    LLAMA_TENSORS,
    QK_NORMS,
    TARGET,
)
from checkpoints_convert.huggingface.family import ACTIVATIONS, INVERSE_ROOT, Family, RopeForm, Setting
from checkpoints_convert.huggingface.rules import norm

_NORMS = (
    *norm(f"{LAYER}.input_layernorm", f"{TARGET}.attention_norm"),
    *norm(f"{LAYER}.post_attention_layernorm", f"{TARGET}.attention_post_norm"),
    *norm(f"{LAYER}.pre_feedforward_layernorm", f"{TARGET}.mlp_norm"),
    *norm(f"{LAYER}.post_feedforward_layernorm", f"{TARGET}.mlp_post_norm"),
    *norm("model.norm", "final_norm"),
)
_SANDWICH_TENSORS = (*EMBEDDING, *_NORMS, *ATTENTION, *QK_NORMS, *GATED_MLP, *HEAD)
_FIXED = {"norm": "rms_zero_centred"}
# "gelu" in the files of the first release means the tanh form: the weights were trained with that.
_ACTIVATIONS = {**ACTIVATIONS, "gelu": "gelu_tanh"}
_EMBEDDING_MULTIPLIER = Setting("embedding_multiplier", "embedding_multiplier", "number", 1.0, is_derived=True)
_REFUSED = {"use_bidirectional_attention": (True, "the model sees later tokens, which a cache of keys cannot hold")}


def _scaled(data: Mapping[str, Any]) -> dict[str, Any]:
    """Multiplies the embedding by the square root of the width; config.json has no field for it."""
    width = data.get("hidden_size")
    if not isinstance(width, int) or width < 1:  # what is noted as a problem when the field itself is read
        width = 1
    return {**data, "embedding_multiplier": width**0.5}


def _settings(final_softcap: float | None, softcap: float | None) -> tuple[Setting, ...]:
    return (
        _EMBEDDING_MULTIPLIER,
        Setting("attention_scale", "query_pre_attn_scalar", "number", 256, INVERSE_ROOT),
        Setting("logit_softcap", "final_logit_softcapping", "optional", final_softcap),
        Setting("attention_softcap", "attn_logit_softcapping", "optional", softcap),
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
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        is_tied=True,
        activation="gelu_pytorch_tanh",
        activations=_ACTIVATIONS,
        fixed=_FIXED,
        settings=(_EMBEDDING_MULTIPLIER,),
        refused=_REFUSED,
        tensors=LLAMA_TENSORS,
        normalize=_scaled,
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        title="Gemma 2",
        examples="Gemma 2 2B to 27B",
        max_position_embeddings=8192,
        num_kv_heads=4,
        head_dim=256,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
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
        normalize=_scaled,
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        title="Gemma 3",
        examples="Gemma 3 270M to 27B, text of the models with images too",
        max_position_embeddings=131072,
        num_kv_heads=4,
        head_dim=256,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        is_tied=True,
        windows="pattern",
        full_every=6,
        default_window=4096,
        names={"hidden_act": "hidden_activation"},
        # The text part in a model with images names only what differs from these.
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
        activation="gelu_pytorch_tanh",
        rope=RopeForm(theta=1e6, local_theta=10000.0, local_theta_name="rope_local_base_freq"),
        fixed={**_FIXED, "block": "sandwich_norm"},
        settings=_settings(None, None),
        refused=_REFUSED,
        tensors=_SANDWICH_TENSORS,
        normalize=_scaled,
    ),
)
