"""Heads that copy: a repeated text is continued before anything is trained, and the rest of the model stays."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models import ModelConfig, RopeConfig
from jaxinfer.training.copying import ADDED_WIDTH, with_copying
from jaxinfer.training.objectives import sequence_logits
from tests.random_params import random_params

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=300, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2,
    num_kv_heads=2, head_dim=64, rope=RopeConfig(rotary_dim=64), tie_word_embeddings=True,
)  # fmt: skip
TEXT = np.random.default_rng(0).permutation(300)[:40].astype(np.int32)
REPEATED = np.concatenate([TEXT, TEXT, TEXT])[None]


def choices(config, params, tokens):
    return np.asarray(jax.jit(lambda p, t: jnp.argmax(sequence_logits(config, p, t), axis=-1))(params, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_repeated_text_is_continued(is_tied):
    config = replace(CONFIG, tie_word_embeddings=is_tied)
    params = random_params(config)
    wide_config, wide = with_copying(config, params, REPEATED, gain=12.0)
    assert (wide_config.hidden_size, wide_config.num_heads) == (64 + ADDED_WIDTH, 4)
    again = slice(41, 119)  # two tokens of the repetition tell where it is
    assert np.mean(choices(wide_config, wide, REPEATED)[0, again] == REPEATED[0, 42:120]) > 0.95
    assert np.mean(choices(config, params, REPEATED)[0, again] == REPEATED[0, 42:120]) < 0.1


@pytest.mark.slow
def test_without_gain_the_model_chooses_much_as_before():
    params = jax.tree.map(lambda leaf: 3 * leaf if leaf.ndim > 1 else leaf, random_params(CONFIG, 1))
    same = np.mean(
        choices(*with_copying(CONFIG, params, REPEATED, gain=0.0), REPEATED) == choices(CONFIG, params, REPEATED)
    )
    assert same > 0.7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": 1}, "1 layer: two are needed"),
        ({"num_kv_heads": 1}, "share key heads"),
        ({"qk_norm": True}, "norms of queries"),
        ({"qkv_bias": True}, "biases"),
        ({"head_dim": 32, "rope": RopeConfig(rotary_dim=32)}, "heads of 32 dimensions"),
        ({"rope": RopeConfig(rotary_dim=32)}, "32 rotated dimensions of 64"),
        ({"sliding_windows": (None, 8)}, "windows"),
    ],
)
def test_models_in_which_they_cannot_be_built_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        with_copying(replace(CONFIG, **change), {}, REPEATED)
