"""The sampler: greedy and sampled rows of any parameters, in one batch and one program."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sampling import exact
from jaxinfer.sampling.batch import SamplingBatch
from jaxinfer.sampling.keys import gumbel_noise
from jaxinfer.sampling.logprobs import TokenLogprobs, no_logprobs, token_logprobs
from jaxinfer.sampling.params import MAX_LOGPROBS
from jaxinfer.sampling.state import SamplingState
from jaxinfer.sampling.transforms import is_transformed, transform

Draw = Callable[[jax.Array], jax.Array]  # float32[S, V] -> int32[S]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleOutput:
    """The next token of S rows.

    Attributes:
      tokens: int32[S]; 0, which must not be used, where not `ok`.
      ok: bool[S], false if the raw logits have a NaN or +inf, or if no token is possible.
      logprob, rank, top_ids, top_logprobs: of the raw logits, as in `TokenLogprobs` with K = 20. Computed for all rows
        if any row requests them, else rank is 0.
    """

    tokens: jax.Array
    ok: jax.Array
    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


@jax.named_scope("sampler")
def sample(
    logits: jax.Array,
    positions: jax.Array,
    batch: SamplingBatch,
    state: SamplingState,
    draw: Draw | None = None,
) -> SampleOutput:
    """Samples a token of each row from logits float32[S, V].

    `positions` int32[S] is the absolute index, in prompt plus answer, of the token being sampled. A token is a function
    of its row's logits, parameters, history, seed and position, and of nothing else. The caller advances the state with
    `advance(state, output.tokens, is_active & output.ok)`.

    `draw` replaces the choice of tokens in sampled rows; it gets the transformed logits.
    """
    # No [S, V] array leaves the branches: a step in which no row needs a transform does not copy the logits.
    tokens, best = lax.cond(
        jnp.any(is_transformed(batch, state)),
        lambda: _choose(transform(logits, batch, state), positions, batch, draw),
        lambda: exact.largest(logits),
    )
    ok = jnp.all(logits < jnp.inf, axis=-1) & (best > -jnp.inf)
    tokens = jnp.where(ok, tokens, 0)
    logprobs: TokenLogprobs = lax.cond(
        jnp.any(batch.has_logprobs),
        lambda: token_logprobs(logits, tokens, MAX_LOGPROBS),
        lambda: no_logprobs(logits.shape[0], MAX_LOGPROBS, logits.shape[1]),
    )
    return SampleOutput(
        tokens=tokens,
        ok=ok,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_ids=logprobs.top_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def choose(transformed: jax.Array, positions: jax.Array, batch: SamplingBatch) -> jax.Array:
    """Tokens int32[S] from transformed logits float32[S, V]: the argmax in greedy rows; in sampled rows the argmax
    after adding the Gumbel noise of (seed, position), a sample of their softmax. The lowest id wins a tie. A row
    without a possible token gets an undefined id in 0..V; `sample` reports it."""
    return _choose(transformed, positions, batch, None)[0]


def choose_several(
    transformed: jax.Array, positions: jax.Array, batch: SamplingBatch, width: int, *, stream: int | None = None
) -> jax.Array:
    """The `width` best tokens int32[S, width] in the order of `choose`, best first; always valid ids.

    In sampled rows these are `width` samples without replacement (Kool et al. 2019, Stochastic beams). `stream` selects
    noise independent of plain sampling.
    """
    noisy = _add_noise(transformed, positions, batch, stream)
    if width == 1:
        return jnp.minimum(exact.largest(noisy)[0], noisy.shape[1] - 1)[:, None]
    return lax.top_k(noisy, width)[1]


def processed_logprobs(logits: jax.Array, batch: SamplingBatch, state: SamplingState) -> jax.Array:
    """Log-probabilities float32[S, V] of the distribution that `sample` samples from. In a greedy row it is the softmax
    of the logits after the processors, not one-hot."""
    return exact.log_softmax(transform(logits, batch, state))


def is_stop(tokens: jax.Array, batch: SamplingBatch) -> jax.Array:
    """bool[S]: whether tokens int32[S] are stop ids of their rows."""
    return jnp.any(tokens[:, None] == batch.stop_ids, axis=-1)


def _choose(
    transformed: jax.Array, positions: jax.Array, batch: SamplingBatch, draw: Draw | None
) -> tuple[jax.Array, jax.Array]:
    """Tokens int32[S] and their scores float32[S], -inf in rows without a possible token."""
    if draw is None:
        return exact.largest(_add_noise(transformed, positions, batch, None))
    tokens, best = exact.largest(transformed)
    drawn = lax.cond(jnp.any(batch.is_sampled), lambda: draw(transformed), lambda: tokens)
    return jnp.where(batch.is_sampled, drawn, tokens), best


def _add_noise(transformed: jax.Array, positions: jax.Array, batch: SamplingBatch, stream: int | None) -> jax.Array:
    """Adds the noise of seed and position to sampled rows; greedy rows are unchanged."""

    def add(x: jax.Array) -> jax.Array:
        noise = gumbel_noise(batch.seed, positions, transformed.shape[1], stream=stream)
        return jnp.where(batch.is_sampled[:, None], x + noise, x)

    return lax.cond(jnp.any(batch.is_sampled), add, lambda x: x, transformed)
