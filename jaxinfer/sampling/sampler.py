"""The one sampler: greedy and sampled rows of any parameters, in one batch and one program."""

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
      tokens: int32[S]; 0 where not `ok`, which no caller may use.
      ok: bool[S], false where the raw logits hold a NaN or +inf, or where no token can be chosen.
      logprob, rank, top_ids, top_logprobs: of the raw logits, as in `TokenLogprobs` with K = 20. Computed for all rows
        if any row asks, else rank is 0.
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
    """Chooses a token of each row from float32[S, V].

    `positions` int32[S] is the absolute index, in prompt plus answer, of the token being chosen. A token is a function
    of its row's logits, parameters, history, seed and position: neighbours, the row's place and S do not matter. The
    caller advances the state, `advance(state, output.tokens, is_active & output.ok)`.

    `draw` may choose the tokens of sampled rows otherwise, from the logits that went through `transform`.
    """
    # Nothing of [S, V] leaves the branches: a step in which all rows are plain makes no copy of the logits.
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
    """Tokens int32[S] from logits that went through `transform`: the argmax for greedy rows, and for sampled rows the
    argmax after adding the Gumbel noise of (seed, position), which is a draw from their softmax. The lowest id wins a
    tie. A row without any token to choose gives one past the end or an arbitrary id; `sample` is what flags it."""
    return _choose(transformed, positions, batch, None)[0]


def choose_several(
    transformed: jax.Array, positions: jax.Array, batch: SamplingBatch, width: int, *, stream: int | None = None
) -> jax.Array:
    """The `width` best tokens int32[S, width] as `choose` compares them, the best first; always ids of the vocabulary.

    For sampled rows that is `width` draws without replacement (Kool et al. 2019, Stochastic beams). `stream` names
    other noise than that of plain sampling.
    """
    noisy = _add_noise(transformed, positions, batch, stream)
    if width == 1:
        return jnp.minimum(exact.largest(noisy)[0], noisy.shape[1] - 1)[:, None]
    return lax.top_k(noisy, width)[1]


def processed_logprobs(logits: jax.Array, batch: SamplingBatch, state: SamplingState) -> jax.Array:
    """Log-probabilities float32[S, V] of the distribution that `sample` draws from; a greedy row's is not one-hot but
    that of its logits after the processors."""
    return exact.log_softmax(transform(logits, batch, state))


def is_stop(tokens: jax.Array, batch: SamplingBatch) -> jax.Array:
    """bool[S]: whether each row's token ends its answer."""
    return jnp.any(tokens[:, None] == batch.stop_ids, axis=-1)


def _choose(
    transformed: jax.Array, positions: jax.Array, batch: SamplingBatch, draw: Draw | None
) -> tuple[jax.Array, jax.Array]:
    """Tokens int32[S] and the values float32[S] at which they won, -inf where there was nothing to choose."""
    if draw is None:
        return exact.largest(_add_noise(transformed, positions, batch, None))
    tokens, best = exact.largest(transformed)
    drawn = lax.cond(jnp.any(batch.is_sampled), lambda: draw(transformed), lambda: tokens)
    return jnp.where(batch.is_sampled, drawn, tokens), best


def _add_noise(transformed: jax.Array, positions: jax.Array, batch: SamplingBatch, stream: int | None) -> jax.Array:
    """Sampled rows with the noise of their seed and position; greedy ones as they are."""

    def add(x: jax.Array) -> jax.Array:
        noise = gumbel_noise(batch.seed, positions, transformed.shape[1], stream=stream)
        return jnp.where(batch.is_sampled[:, None], x + noise, x)

    return lax.cond(jnp.any(batch.is_sampled), add, lambda x: x, transformed)
