"""Compaction of a prompt's cache at its end: each key head of each layer keeps the tokens with the best scores.

The last tokens of a prompt go through the model in a pass of their own. In each layer they attend to all tokens, as in
any other pass; then the tokens are scored, and the stored keys and values of those that stay are copied to fresh pages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache.kv_dtype import KVScales, divide_by_scales, scales_of_layer
from jaxinfer.cache.paged import PagedCache, PromptPages
from jaxinfer.cache.policy.contract import EndWork
from jaxinfer.cache.policy.prompt_queries import LayerQueries, PromptQueries, prompt_moments, stored_prompt
from jaxinfer.cache.policy.scores import expected_attention_scores, kept_positions, keydiff_scores, snapkv_scores
from jaxinfer.cache.ragged import AttentionByLayer, LayerAttention, PagedAttention
from pallas_kernels.paged_attention import Pages
from pallas_kernels.paged_attention.compaction import compact
from pallas_kernels.paged_attention.layout import PageShape, from_stored, gather, page_shape, queries_for

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def compacting(method: str, block_size: int, work: EndWork) -> CompactingAttention:
    """`CachePolicy.attend_end` of a `PromptBudget`."""
    cache, queries = work.cache, None
    if work.before is not None:
        tables = tuple(prompt.page_table for prompt in work.prompts)
        end = work.end - work.positions.shape[0]
        moments = prompt_moments(work.decoder, cache, tables, work.before, end, block_size)
        # Else a compiler may store the last tokens before the others are read, in a copy of the cache.
        moments, cache = lax.optimization_barrier((moments, cache))
        queries = PromptQueries(work.decoder.config, moments, work.positions, work.end)
    return CompactingAttention(work.attend(cache), cache, method, work.prompts, queries)


class CompactingAttention(AttentionByLayer):
    """`attend` for the last tokens of one prompt, which compacts it. After the pass, `cache` is the updated cache.

    `attend` stores and attends to the tokens, in full. `prompts` are of the layers' groups. `queries` are those of the
    tokens, for a method that chooses by all of the prompt's.
    """

    def __init__(
        self,
        attend: PagedAttention,
        cache: PagedCache,
        method: str,
        prompts: tuple[PromptPages, ...],
        queries: PromptQueries | None = None,
    ):
        self._attend, self._before, self._method, self._prompts = attend, cache, method, prompts
        self._queries = queries

    def of_layer(self, layer: int) -> CompactingLayer:
        """The attention of one layer."""
        group, scales = self._before.group_of(layer), scales_of_layer(self._before.scales, layer)
        queries = None if self._queries is None else self._queries.of_layer(layer)
        return CompactingLayer(self._attend.of_layer(layer), scales, self._prompts[group], queries, self._method)

    def update(self, layer: int, state: Pages) -> None:
        """Takes over what a layer has stored."""
        self._attend.update(layer, state)

    @property
    def cache(self) -> PagedCache:
        return self._attend.cache


@jax.tree_util.register_pytree_node_class
class CompactingLayer:
    """One layer of `CompactingAttention`: a pytree. `state` are its pages, and after a call what they hold then."""

    def __init__(
        self,
        attend: LayerAttention,
        scales: KVScales | None,
        prompt: PromptPages,
        queries: LayerQueries | None,
        method: str,
    ):
        self._attend, self._scales, self._prompt = attend, scales, prompt
        self._queries, self._method = queries, method

    @property
    def state(self) -> Any:
        return self._attend.state

    def tree_flatten(self):
        return (self._attend, self._scales, self._prompt, self._queries), (self._method,)

    @classmethod
    def tree_unflatten(cls, static, children) -> CompactingLayer:
        return cls(*children, *static)

    def __call__(
        self,
        q: Float[Array, "T Hq K"],
        k: Float[Array, "T Hkv K"],
        v: Float[Array, "T Hkv K"],
        window: int | None,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> Float[Array, "T Hq K"]:
        out = self._attend(q, k, v, window, scale=scale, soft_cap=soft_cap)
        with jax.named_scope("compact"):
            pages, heads = self._attend.state, k.shape[1:]
            if self._queries is not None:
                pages = compacted_by_moments(pages, self._prompt, q, heads, self._scales, self._queries, scale)
            else:
                q = divide_by_scales(self._scales, q, k, v)[0]
                options = {"scale": scale, "soft_cap": soft_cap}
                pages = compacted(self._method, pages, self._prompt, q, heads, options)
            self._attend.state = pages
        return out


def compacted(
    method: str,
    pages: Pages,
    prompt: PromptPages,
    q: Float[Array, "W Hq K"],
    heads: tuple[int, ...],
    options: dict[str, Any],
) -> Pages:
    """The pages of one layer with the tokens of a prompt that stay copied to its targets. `q` are the queries of the
    prompt's last W tokens, for keys as they are stored; `heads` are the number of key heads and their width."""
    shape = page_shape(pages, *heads)
    stored = gather(pages, prompt.page_table, shape)
    scales = None if stored.k_scales is None else stored.k_scales.swapaxes(1, 2).reshape(-1, shape.num_kv_heads)
    keys = from_stored(stored.k.reshape(-1, *stored.k.shape[2:]), scales)
    q, length = queries_for(q.astype(jnp.float32), shape.dtype), prompt.num_tokens
    choose = partial(chosen_positions, method, q, keys, length, options=options)
    return _keep(pages, shape, prompt, choose)


def compacted_by_moments(
    pages: Pages,
    prompt: PromptPages,
    q: Float[Array, "W Hq K"],
    heads: tuple[int, ...],
    scales: KVScales | None,
    queries: LayerQueries,
    scale: float | None,
) -> Pages:
    """As `compacted`, by what is expected of the queries after the prompt, from the moments of its own: `queries` has
    those of the tokens before the last W."""
    keys, values = stored_prompt(pages, prompt.page_table, heads, scales, jnp.float32)
    length = prompt.num_tokens
    scores = expected_attention_scores(queries.add(q), keys, values, queries.future, length, scale=scale)
    return _keep(
        pages, page_shape(pages, *heads), prompt, lambda num_kept, count: kept_positions(scores, count, num_kept)
    )


def chosen_positions(
    method: str,
    q: Float[Array, "W Hq K"],
    k: Float[Array, "n Hkv K"],
    num_tokens: jax.Array,
    num_kept: jax.Array,
    count: int,
    options: dict[str, Any],
) -> Int[Array, "Hkv count"]:
    """The positions of the tokens that stay, ascending, of which `num_kept` (at most `count`) count. `num_tokens` of
    the keys are the prompt's."""
    if method == "keydiff":
        return kept_positions(keydiff_scores(k, num_tokens), count, num_kept)
    window = q.shape[0]
    num_scored = num_kept - window  # the queries' own tokens stay, too
    best = kept_positions(snapkv_scores(q, k, num_tokens, **options), count - window, num_scored)
    number = jnp.arange(count, dtype=jnp.int32)
    best = jnp.pad(best, ((0, 0), (0, window)))
    return jnp.where(number < num_scored, best, num_tokens - num_kept + number)


def _keep(pages: Pages, shape: PageShape, prompt: PromptPages, choose: Callable[[jax.Array, int], jax.Array]) -> Pages:
    """The pages with the positions [Hkv, count] that `choose` gives for (num_kept, count) copied to the targets."""
    num_kept = prompt.num_tokens - prompt.num_dropped * shape.page_size
    count = min(prompt.targets.shape[0], prompt.page_table.shape[0]) * shape.page_size
    return compact(pages, shape, prompt.page_table, choose(num_kept, count), num_kept, prompt.targets)
