"""Logits and log-probabilities that equal, bit for bit, those of an engine in deterministic mode: for trainers.

Tokens go through the model in passes of one shape over pages, as in the engine, whose numbers depend on that shape
alone. Gradients are those of the ordinary forward pass at the same parameters, so that memory does not grow with the
number of passes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache import abstract_paged_cache, abstract_state_cache, attend_ragged, attend_without_cache, stored_dtype
from jaxinfer.models import ModelConfig, Params, bind, compute_dtype
from jaxinfer.sampling import exact
from pallas_kernels.paged_attention import platform_layout
from pallas_kernels.platform import current_platform


@dataclass(frozen=True)
class FixedShape:
    num_rows: int = 256
    page_size: int = 16
    kv_dtype: str = "auto"


@dataclass(frozen=True)
class _Static:
    config: ModelConfig
    shape: FixedShape
    chunk: int


def forward_fixed(config, params, tokens, lengths=None, *, shape=FixedShape(), chunk=None):
    static = _Static(config, shape, min(chunk or shape.num_rows, tokens.shape[1]))
    if lengths is None:
        lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    hidden = _fixed_hidden(static, params, tokens, lengths)
    return _over_blocks(static, lambda h: bind(config, params).logits(h), hidden)


def _over_blocks(static, function, hidden):
    rows = hidden.reshape(-1, hidden.shape[-1])
    n = rows.shape[0]
    size = static.shape.num_rows
    rows = jnp.pad(rows, ((0, -n % size), (0, 0))).reshape(-1, size, rows.shape[-1])
    out = lax.map(function, rows)
    return out.reshape(-1, *out.shape[2:])[:n].reshape(*hidden.shape[:-1], *out.shape[2:])


def _fixed_hidden(static: _Static, params: Params, tokens, lengths):
    chunk, shape = static.chunk, static.shape
    batch, length = tokens.shape
    size = min(batch, shape.num_rows // chunk)
    num_passes = -(-length // chunk)
    tokens = jnp.pad(tokens, ((0, -batch % size), (0, num_passes * chunk - length)))
    padded = jnp.pad(lengths, (0, -batch % size))
    groups = tokens.reshape(-1, size, num_passes, chunk).swapaxes(1, 2), padded.reshape(-1, size)
    hidden = lax.map(lambda group: _passes(static, params, *group), groups)  # [G, N, S, C, D]
    hidden = hidden.swapaxes(1, 2).reshape(-1, num_passes * chunk, hidden.shape[-1])
    return hidden[:batch, :length]


def _passes(static, params, tokens, lengths):
    config, shape = static.config, static.shape
    num_passes, size, chunk = tokens.shape
    decoder = bind(config, params)
    dtype = compute_dtype(params)
    pages = -(-num_passes * chunk // shape.page_size)
    stored = stored_dtype(shape.kv_dtype, dtype)
    layout = platform_layout(current_platform(), stored, has_values=config.caches_values)
    cache = abstract_paged_cache(config, 1 + size * pages, shape.page_size, stored, layout)
    cache = replace(cache, states=abstract_state_cache(config, size, dtype))
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)
    table = 1 + jnp.arange(size * pages, dtype=jnp.int32).reshape(size, pages)
    starts = jnp.arange(size, dtype=jnp.int32) * chunk
    padding = shape.num_rows - size * chunk

    def one(cache, given):
        number, tokens = given
        first = number * chunk
        counts = jnp.clip(lengths - first, 0, chunk)
        attend = attend_ragged(cache, (table,), starts, counts, jnp.where(counts > 0, first + counts, 0), is_uniform=True)
        positions = jnp.broadcast_to(first + jnp.arange(chunk), tokens.shape)
        rows = (jnp.pad(x.reshape(-1), (0, padding)) for x in (tokens, positions))
        hidden = decoder(*rows, attend)
        return attend.cache, hidden[: size * chunk].reshape(size, chunk, -1)

    _, hidden = lax.scan(one, cache, (jnp.arange(num_passes, dtype=jnp.int32), tokens))
    return hidden
