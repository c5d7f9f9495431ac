"""Configurations of published models, in the fields and forms of their repositories, have the published sizes."""

import json
import math

import jax
import pytest
from safetensors import safe_open

from checkpoints_convert.huggingface.config import huggingface_config, model_config
from jaxinfer.models import abstract_params
from tests.checkpoints_convert.family_files import GOLDEN

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _config(architecture, sizes, vocab_size, **fields):
    return {
        **dict(zip(_SIZES, sizes, strict=True)),
        "architectures": [architecture],
        "vocab_size": vocab_size,
        **fields,
    }


_GLM = _config(
    "Glm4MoeForCausalLM",
    (4096, 10944, 46, 96, 8),
    151552,
    attention_bias=True,
    head_dim=128,
    moe_intermediate_size=1408,
    n_routed_experts=128,
    num_experts_per_tok=8,
    first_k_dense_replace=1,
    partial_rotary_factor=0.5,
    num_nextn_predict_layers=1,
    rope_theta=1000000,
    n_group=1,
    topk_group=1,
)
_KIMI = _config(
    "DeepseekV3ForCausalLM",
    (7168, 18432, 61, 64, 64),
    163840,
    model_type="kimi_k2",
    moe_intermediate_size=2048,
    n_routed_experts=384,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=1,
    topk_group=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    first_k_dense_replace=1,
    moe_layer_freq=1,
    rope_scaling={"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
)
_MINIMAX = _config(
    "MiniMaxM2ForCausalLM",
    (3072, 1536, 62, 48, 8),
    200064,
    num_local_experts=256,
    rotary_dim=64,
    num_experts_per_tok=8,
    attn_type_list=[1] * 62,
    qk_norm_type="per_layer",
    scoring_func="sigmoid",
    shared_intermediate_size=0,
    use_qk_norm=True,
    use_routing_bias=True,
    use_mtp=True,
)
_ERNIE = _config(
    "Ernie4_5_MoeForCausalLM",
    (2560, 12288, 28, 20, 4),
    103424,
    moe_num_experts=64,
    moe_k=6,
    moe_num_shared_experts=2,
    moe_layer_start_index=1,
    moe_layer_end_index=27,
    moe_capacity=[64] * 3,
    moe_intermediate_size=1536,
    moe_gate="topk",
    use_bias=False,
    tie_word_embeddings=True,
)
_HUNYUAN = _config(
    "HunYuanMoEV1ForCausalLM",
    (4096, 3072, 32, 32, 8),
    128167,
    num_experts=64,
    moe_topk=[8] * 32,
    moe_intermediate_size=[3072] * 32,
    num_shared_expert=[1] * 32,
    use_cla=False,
    use_mla=False,
    tie_word_embeddings=True,
    rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0},
)
_SCOUT_TEXT = {
    **dict(zip(_SIZES, (5120, 8192, 48, 40, 8), strict=True)),
    "vocab_size": 202048,
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "no_rope_layers": [],
    "attn_temperature_tuning": 4,
    "max_position_embeddings": 10485760,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}
_SCOUT = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": _SCOUT_TEXT}
_PHI = _config(
    "PhimoeForCausalLM",
    (4096, 6400, 32, 32, 8),
    32064,
    attention_bias=True,
    lm_head_bias=True,
    rope_scaling={
        "type": "longrope",
        "short_factor": [1.0] * 64,
        "long_factor": [2.0] * 64,
        "short_mscale": 1.2,
        "long_mscale": 1.2,
        "original_max_position_embeddings": 4096,
    },
)


@pytest.mark.parametrize(
    ("data", "billions", "max_length"),
    [
        pytest.param(_GLM, 106.9, 131072, id="GLM-4.5-Air"),
        pytest.param(_KIMI, 1026.4, 4096, id="Kimi-K2"),
        pytest.param(_MINIMAX, 228.7, 196608, id="MiniMax-M2"),
        pytest.param(_ERNIE, 21.8, 131072, id="ERNIE-4.5-21B-A3B"),
        pytest.param(_HUNYUAN, 80.4, 2048, id="Hunyuan-A13B"),
        pytest.param(_SCOUT, 107.8, 8192, id="Llama-4-Scout"),
        pytest.param(_PHI, 41.9, 131072, id="Phi-3.5-MoE"),
    ],
)
def test_published_models_have_their_sizes(data, billions, max_length):
    config = model_config(data)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))
    assert round(count / 1e9, 1) == billions
    assert config.max_length == max_length
    assert model_config(huggingface_config(config)) == config


def _as_floats(value):
    """Every integer spelled as a float, as some writers of JSON do."""
    if isinstance(value, dict):
        return {key: _as_floats(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_as_floats(one) for one in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


@pytest.mark.matrix
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_whole_numbers_may_be_floats_in_every_field_of_every_family(path):
    with safe_open(path, "numpy") as file:
        configs = json.loads(file.metadata()["made"])["configs"]
    for fields in configs.values():
        assert model_config(_as_floats(fields)) == model_config(fields)
