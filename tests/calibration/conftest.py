"""A tiny decoder with biases, grouped queries, a window in one layer, and activations of which a few are large."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models import ModelConfig, RopeConfig
from tests.random_params import random_params

CONFIG = ModelConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope=RopeConfig(rotary_dim=16),
    qkv_bias=True,
    sliding_windows=(None, 4, None),
    tie_word_embeddings=True,
    max_position_embeddings=64,
)


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return CONFIG


def _varied(params):
    """Parameters as of a trained model in that norms differ from channel to channel, biases are not zero, and weights
    are large enough that answers vary."""
    random = np.random.default_rng(1)

    def vary(path, leaf):
        name = [key.key for key in path]
        if leaf.ndim == 1 or name[-1] == "bias":
            spread = (
                np.exp(random.normal(0, 0.8, leaf.shape)) if "norm" in name[-2] else random.normal(0, 0.2, leaf.shape)
            )
            return jnp.asarray(spread, jnp.float32)
        return leaf * (50 if name == ["embed"] else 10)

    return jax.tree_util.tree_map_with_path(vary, params)


@pytest.fixture(scope="session")
def varied():
    return _varied


@pytest.fixture(scope="session")
def params():
    return _varied(random_params(CONFIG))


@pytest.fixture(scope="session")
def tokens() -> np.ndarray:
    return np.random.default_rng(2).integers(0, CONFIG.vocab_size, (24, 32)).astype(np.int32)


@pytest.fixture(scope="session")
def held_out() -> np.ndarray:
    return np.random.default_rng(3).integers(0, CONFIG.vocab_size, (8, 32)).astype(np.int32)
