"""The dense form of a policy that keeps sinks and a window of pages: attention over all tokens under a mask."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.policy.sinks_window import SinksWindow
from jaxinfer.models import ModelConfig, Params, bind
from jaxinfer.models.rope import inverse_frequencies, rotate


def is_seen(kept: SinksWindow, num_tokens: int) -> np.ndarray:
    """bool [queries, keys]: whole pages of sinks, whole pages of the window before the query's page, and its own."""
    position = np.arange(num_tokens)
    query, key = np.meshgrid(position // kept.page_size, position // kept.page_size, indexing="ij")
    is_kept = (key < kept.num_sinks) | (key >= query - kept.num_window)
    return is_kept & (position[None, :] <= position[:, None])


@partial(jax.jit, static_argnums=(0, 2))
def dense_logits(config: ModelConfig, params: Params, kept: SinksWindow, tokens: jax.Array) -> jax.Array:
    """float32 [T, V] of int32 tokens [T]. In pages that end beyond `kept.trained`, queries
    see the sinks from where they would stand in the cache: queries are rotated back by what was dropped."""
    decoder = bind(config, params)
    mask = jnp.asarray(is_seen(kept, tokens.shape[0]))
    positions = jnp.arange(tokens.shape[0])
    distance, page = positions[:, None] - positions, positions // kept.page_size
    num_dropped = jnp.maximum(page - kept.num_window - kept.num_sinks, 0)
    is_beyond = kept.trained is not None and (page + 1) * kept.page_size > kept.trained
    shifts = jnp.where(is_beyond, num_dropped * kept.page_size, 0)
    is_sink = page < kept.num_sinks

    def attend(layer, q, k, v, window, *, scale=None):
        group = q.shape[-2] // k.shape[-2]
        k, v = (jnp.repeat(x, group, axis=-2) for x in (k, v))
        products = partial(jnp.einsum, "qhk,shk->hqs", precision="highest")
        scores = products(q, k)
        if window is None:
            angles = -shifts[:, None] * inverse_frequencies(config.rope_of(layer))[0]
            scores = jnp.where(is_sink, products(rotate(q, jnp.cos(angles), jnp.sin(angles)), k), scores)
        scores *= scale or q.shape[-1] ** -0.5
        seen = mask if window is None else distance < window
        scores = jnp.where(seen & (distance >= 0), scores, -jnp.inf)
        return jnp.einsum("hqs,shk->qhk", jax.nn.softmax(scores, axis=-1), v, precision="highest")

    return decoder.logits(decoder(tokens, positions, attend))
