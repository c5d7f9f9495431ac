"""Quest (Tang et al. 2024, section 3) without a cache: attention over all tokens under a mask of the chosen pages."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.cache.policy.quest import Quest
from jaxinfer.models import ModelConfig, Params, bind


def seen_keys(best: Quest, q: jax.Array, k: jax.Array, scale: float, num_prompt: int) -> jax.Array:
    """bool [T, T], whether the query of each token sees each key, of q [T, Hq, K] and k [T, Hkv, K]; `num_prompt` is of
    the sequence, and T a whole number of pages.

    A page is as good as the attention that it would have if its score were its bound, summed over all query heads.
    """
    num_tokens, size = k.shape[0], best.page_size
    num_pages, group = num_tokens // size, q.shape[1] // k.shape[1]
    keys = jnp.repeat(k, group, axis=1).reshape(num_pages, size, q.shape[1], -1)
    least, greatest = keys.min(axis=1), keys.max(axis=1)  # [pages, Hq, K]
    bound = jnp.maximum(q[:, None] * least, q[:, None] * greatest).sum(axis=-1) * scale  # [T, pages, Hq]
    position = jnp.arange(num_tokens)
    own, page = position // size, jnp.arange(num_pages)
    is_before = page < own[:, None]
    attention = jax.nn.log_softmax(jnp.where(is_before[..., None], bound, -1e30), axis=1)
    promise = jnp.where(is_before, jax.nn.logsumexp(attention, axis=2), -jnp.inf)
    # The place of each page in the order from best to worst, the earliest of equal ones first.
    better = (promise[:, None] > promise[..., None]) | (
        (promise[:, None] == promise[..., None]) & (page[None] < page[:, None])
    )
    is_chosen = is_before & (better.sum(axis=-1) < best.num_pages)
    is_read = is_chosen | (page == own[:, None]) | (position < num_prompt)[:, None]
    return jnp.repeat(is_read, size, axis=1) & (position <= position[:, None])


@partial(jax.jit, static_argnums=(0, 2))
def dense_logits(
    config: ModelConfig, params: Params, best: Quest, tokens: jax.Array, num_prompt: jax.Array
) -> jax.Array:
    """float32 [T, V] of int32 tokens [T], of which the first `num_prompt` are a prompt."""
    decoder = bind(config, params)
    positions = jnp.arange(tokens.shape[0])
    distance = positions[:, None] - positions

    def attend(layer, q, k, v, window, *, scale=None):
        scale = scale or q.shape[-1] ** -0.5
        seen = (distance >= 0) & (distance < (window or tokens.shape[0]))
        if window is None and layer >= best.num_dense_layers:
            seen = seen_keys(best, q, k, scale, num_prompt)
        group = q.shape[-2] // k.shape[-2]
        k, v = (jnp.repeat(x, group, axis=-2) for x in (k, v))
        scores = jnp.einsum("qhk,shk->hqs", q, k, precision="highest") * scale
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqs,shk->qhk", weights, v, precision="highest")

    return decoder.logits(decoder(tokens, positions, attend))
