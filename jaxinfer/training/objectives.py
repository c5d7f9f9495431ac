"""What training minimises. An objective is `loss(params, tokens [B, T + 1]) -> (scalar loss, metrics)`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxinfer.cache import attend_without_cache
from jaxinfer.models import ModelConfig, Params, bind

Objective = Callable[[Params, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]


def sequence_logits(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """float32 logits [B, T, V] of int32 tokens [B, T], without a cache."""
    decoder = bind(config, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return decoder.logits(decoder(tokens, positions, attend_without_cache))


def next_token(config: ModelConfig) -> Objective:
    """Mean cross entropy of the next token, in nats."""

    def loss(params: Params, tokens: jax.Array):
        logits = sequence_logits(config, params, tokens[:, :-1])
        value = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return value, {"loss": value}

    return loss
