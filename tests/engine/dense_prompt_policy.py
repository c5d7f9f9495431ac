"""The dense form of a policy that compacts prompts: attention over all tokens, under a mask by key head."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.cache.policy.prompt_budget import PromptBudget
from jaxinfer.cache.policy.scores import (
    FUTURE_POSITIONS,
    NUM_SINKS,
    QueryMoments,
    expected_attention_scores,
    kept_positions,
    keydiff_scores,
    snapkv_scores,
)
from jaxinfer.models import ModelConfig, Params, bind
from jaxinfer.models.rope import rotate, rotation

WINDOW = 32


@partial(jax.jit, static_argnums=(0, 2, 3, 5))
def dense_logits(
    config: ModelConfig,
    params: Params,
    policy: PromptBudget,
    page_size: int,
    tokens: jax.Array,
    num_prompt: int,
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """float32 [T, V] of int32 tokens [T], of which the first `num_prompt` are the prompt; by layer the positions
    int32 [Hkv, C] of it that later tokens see; and by layer all keys [T, Hkv, K]."""
    decoder, kept, keys = bind(config, params), [], []
    positions = jnp.arange(tokens.shape[0])

    def attend(layer, q, k, v, window, *, scale=None):
        num_heads, prompt = k.shape[-2], slice(0, num_prompt)
        dropped = policy.bound(page_size, None).of_layer(layer, config.num_layers).num_dropped(num_prompt)
        count = num_prompt - dropped * page_size
        if not dropped:
            found = jnp.broadcast_to(positions[prompt], (num_heads, num_prompt))
        elif policy.method == "keydiff":
            found = kept_positions(keydiff_scores(k[prompt]), count)
        elif policy.method == "expected_attention":
            rope, queries = config.rope, q[prompt]
            cos, sin = rotation(rope, positions[prompt])
            moments = QueryMoments.none(*q.shape[1:]).add(rotate(queries, cos, -sin)[NUM_SINKS:])
            future = rotation(rope, num_prompt + jnp.arange(FUTURE_POSITIONS))
            scores = expected_attention_scores(moments, k[prompt], v[prompt], future, scale=scale)
            found = kept_positions(scores, count)
        else:
            best = kept_positions(snapkv_scores(q[prompt][-WINDOW:], k[prompt], scale=scale), count - WINDOW)
            last = jnp.broadcast_to(jnp.arange(num_prompt - WINDOW, num_prompt), (num_heads, WINDOW))
            found = jnp.concatenate([best, last], axis=1)
        kept.append(found)
        keys.append(k)
        stays = (positions >= num_prompt)[None].repeat(num_heads, 0).at[jnp.arange(num_heads)[:, None], found].set(True)
        seen = (positions <= positions[:, None]) & (stays[:, None] | (positions[:, None] < num_prompt))
        group = q.shape[-2] // num_heads
        seen, k, v = jnp.repeat(seen, group, 0), jnp.repeat(k, group, axis=-2), jnp.repeat(v, group, axis=-2)
        scores = jnp.einsum("qhk,shk->hqs", q, k, precision="highest") * (scale or q.shape[-1] ** -0.5)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqs,shk->qhk", weights, v, precision="highest")

    return decoder.logits(decoder(tokens, positions, attend)), kept, keys
