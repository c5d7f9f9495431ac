"""Dense families near Llama: Seed-OSS, ERNIE 4.5, Hunyuan, Arcee, EXAONE 4, Apertus."""

from collections.abc import Mapping
from typing import Any

from checkpoints_convert.huggingface.families_llama import (
    ATTENTION,
    ATTENTION_BIAS,
    EMBEDDING,
    GATED_MLP,
    HEAD,
    LAYER,
    LLAMA_TENSORS,
    NORMS,
    POST_NORMS,
    QK_NORMS,
    TARGET,
)
from checkpoints_convert.huggingface.family import ACTIVATIONS, Family, RopeForm
from checkpoints_convert.huggingface.rules import TensorRule, linear, norm
from jaxinfer.models import ModelConfig

# Names of Hunyuan's norms of queries and keys.
HUNYUAN_QK_NORMS = (
    *norm(f"{LAYER}.self_attn.query_layernorm", f"{TARGET}.attention.q_norm"),
    *norm(f"{LAYER}.self_attn.key_layernorm", f"{TARGET}.attention.k_norm"),
)
_UNGATED_MLP = (
    *linear(f"{LAYER}.mlp.up_proj", f"{TARGET}.mlp.up_proj"),
    *linear(f"{LAYER}.mlp.down_proj", f"{TARGET}.mlp.down_proj"),
)
_XIELU = (
    TensorRule(f"{LAYER}.mlp.act_fn.alpha_p", (f"{TARGET}.mlp.act.alpha_p",)),
    TensorRule(f"{LAYER}.mlp.act_fn.alpha_n", (f"{TARGET}.mlp.act.alpha_n",)),
    TensorRule(f"{LAYER}.mlp.act_fn.beta", (f"{TARGET}.mlp.act.beta",), stored=()),
    TensorRule(f"{LAYER}.mlp.act_fn.eps", (f"{TARGET}.mlp.act.eps",), stored=()),
)
_APERTUS_NORMS = (
    *norm(f"{LAYER}.attention_layernorm", f"{TARGET}.attention_norm"),
    *norm(f"{LAYER}.feedforward_layernorm", f"{TARGET}.mlp_norm"),
    *norm("model.norm", "final_norm"),
)


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


DENSE: tuple[Family, ...] = (
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
        tensors=LLAMA_TENSORS,
    ),
    Family(
        "Ernie4_5ForCausalLM",
        "ernie4_5",
        title="ERNIE 4.5",
        examples="ERNIE-4.5-0.3B",
        max_position_embeddings=131072,
        num_kv_heads=2,
        head_dim=128,
        norm_eps=1e-5,
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        is_tied=True,
        rope=RopeForm(theta=500000.0, pairs_neighbours=True),
        tensors=LLAMA_TENSORS,
    ),
    Family(
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
        tensors=(*EMBEDDING, *NORMS, *ATTENTION, *HUNYUAN_QK_NORMS, *GATED_MLP, *HEAD),
    ),
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
        tensors=(*EMBEDDING, *NORMS, *ATTENTION, *_UNGATED_MLP, *HEAD),
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
        tensors=(*EMBEDDING, *POST_NORMS, *ATTENTION, *QK_NORMS, *GATED_MLP, *HEAD),
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
            default={
                "rope_type": "llama3",
                "rope_theta": 12000000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
        fixed={"is_mlp_gated": False},
        supported={"mlp_bias": (False,), "post_norm": (False,), "qk_norm": (True,)},
        tensors=(*EMBEDDING, *_APERTUS_NORMS, *ATTENTION, *QK_NORMS, *_UNGATED_MLP, *_XIELU, *HEAD),
    ),
)
