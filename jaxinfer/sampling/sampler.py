"""The sampler: greedy and sampled rows of any parameters, in one batch and one program, and
log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.grammar.device import GrammarTables, apply_masks
from jaxinfer.sampling import exact
from jaxinfer.sampling.batch import SamplingBatch, mask_inactive_rows
from jaxinfer.sampling.keys import gumbel_noise
from jaxinfer.sampling.packed import pack, unpack
from jaxinfer.sampling.params import MAX_LOGPROBS
from jaxinfer.sampling.state import SamplingState
from jaxinfer.sampling.transforms import is_more_than_masked, is_transformed, transform

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float32, Int32

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
    logits: Float32[Array, "S V"],
    positions: Int32[Array, " S"],
    batch: SamplingBatch,
    state: SamplingState,
    tables: GrammarTables | None = None,
    draw: Draw | None = None,
    is_used: Bool[Array, " S"] | None = None,
) -> SampleOutput:
    """Samples a token of each row from logits float32[S, V].

    `positions` int32[S] is the absolute index, in prompt plus answer, of the token being sampled. A token is a function
    of its row's logits, parameters, history, seed and position, and of nothing else. The caller advances the state with
    `advance(state, output.tokens, is_active & output.ok, tables)`.

    `draw` maps transformed logits float32 [S, V] to tokens int32 [S]: it replaces the choice in sampled rows (rejection
    sampling of drafts). With `is_used` bool[S] the parameters of other rows are neutral (`mask_inactive_rows`).
    """
    # Each branch returns [S] arrays only, so that the logits are not copied where no row needs a transform, or where
    # all rows are greedy with at most a grammar's mask. What only a branch reads is masked there.
    used = partial(mask_inactive_rows, batch, is_used) if is_used is not None else lambda: batch
    is_more = jnp.any(is_more_than_masked(used(), state))
    which = jnp.where(is_more, 2, jnp.any(is_transformed(used(), state)))

    def transformed() -> tuple[jax.Array, jax.Array]:
        own = used()
        return checked(_choose(transform(logits, own, state, tables), positions, own, draw))

    def checked(choice: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tokens, best = choice
        return tokens, jnp.all(logits < jnp.inf, axis=-1) & (best > -jnp.inf)

    def largest_of_raw() -> tuple[jax.Array, jax.Array]:
        # The maximum is NaN or +inf if any logit is: no second pass over them, of 64 MB for 64 rows of Qwen3.6.
        tokens, best = exact.largest(logits)
        return tokens, (best > -jnp.inf) & (best < jnp.inf)

    tokens, ok = lax.switch(
        which,
        [
            largest_of_raw,
            lambda: checked(exact.largest(logits if tables is None else apply_masks(logits, state.grammar, tables))),
            transformed,
        ],
    )
    tokens = jnp.where(ok, tokens, 0)
    none = no_logprobs(logits.shape[0], MAX_LOGPROBS, logits.shape[1])
    packed = lax.cond(
        jnp.any(used().has_logprobs), lambda: pack(token_logprobs(logits, tokens, MAX_LOGPROBS)), lambda: pack(none)
    )
    logprobs = unpack(packed, none)
    return SampleOutput(
        tokens=tokens,
        ok=ok,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_ids=logprobs.top_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def choose(
    transformed: Float32[Array, "S V"], positions: Int32[Array, " S"], batch: SamplingBatch
) -> Int32[Array, " S"]:
    """Tokens int32[S] from transformed logits float32[S, V]: the argmax in greedy rows; in sampled rows the argmax
    after adding the Gumbel noise of (seed, position), a sample of their softmax. The lowest id wins a tie. A row
    without a possible token gets an arbitrary id from 0 to V inclusive; `sample` reports it."""
    return _choose(transformed, positions, batch, None)[0]


def choose_several(
    transformed: Float32[Array, "S V"],
    positions: Int32[Array, " S"],
    batch: SamplingBatch,
    width: int,
    *,
    stream: int | None = None,
) -> Int32[Array, "S width"]:
    """The `width` best tokens int32[S, width] in the order of `choose`, best first; always valid ids.

    In sampled rows these are `width` samples without replacement (Kool et al. 2019, Stochastic beams). `stream` selects
    noise independent of plain sampling.
    """
    noisy = _add_noise(transformed, positions, batch, stream)
    if width == 1:
        return jnp.minimum(exact.largest(noisy)[0], noisy.shape[1] - 1)[:, None]
    return lax.top_k(noisy, width)[1]


def processed_logprobs(
    logits: Float32[Array, "S V"], batch: SamplingBatch, state: SamplingState
) -> Float32[Array, "S V"]:
    """Log-probabilities float32[S, V] of the distribution that `sample` samples from. In a greedy row it is the softmax
    of the logits after the processors, not one-hot."""
    return exact.log_softmax(transform(logits, batch, state))


def is_stop(tokens: Int32[Array, " S"], batch: SamplingBatch) -> Bool[Array, " S"]:
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of T tokens, and the K most probable tokens at each position: a pytree.

    Attributes:
      logprob: float32[T]. rank: int32[T], 1 plus the number of tokens with a larger logit; 0 if not computed.
      top_ids: int32[T, K], padded with V if the vocabulary has fewer than K tokens. top_logprobs: float32[T, K].
    """

    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def token_logprobs(logits: jax.Array, targets: jax.Array, num_top: int) -> TokenLogprobs:
    """Log-probabilities of `targets` int32[T] and of the `num_top` most probable tokens under logits float32[T, V].

    For prompt logprobs, row i holds the logits that predict token i, and targets[i] is token i. Equal logits are listed
    by ascending id. Rows are independent, bit for bit.
    """
    num_rows, vocab_size = logits.shape
    logprobs = exact.log_softmax(logits)
    rows = jnp.arange(num_rows)
    chosen = logits[rows, targets]
    rank = 1 + jnp.sum(logits > chosen[:, None], axis=-1, dtype=jnp.int32)

    num_found = min(num_top, vocab_size)
    _, top_ids = lax.top_k(logits, num_found)
    top_logprobs = jnp.take_along_axis(logprobs, top_ids, axis=-1)
    padding = ((0, 0), (0, num_top - num_found))
    return TokenLogprobs(
        logprob=logprobs[rows, targets],
        rank=rank,
        top_ids=jnp.pad(top_ids, padding, constant_values=vocab_size),
        top_logprobs=jnp.pad(top_logprobs, padding, constant_values=-jnp.inf),
    )


def no_logprobs(num_rows: int, num_top: int, vocab_size: int) -> TokenLogprobs:
    """Placeholder where no log-probabilities were requested: log-probability 0, rank 0, no top tokens."""
    return TokenLogprobs(
        logprob=jnp.zeros(num_rows, jnp.float32),
        rank=jnp.zeros(num_rows, jnp.int32),
        top_ids=jnp.full((num_rows, num_top), vocab_size, jnp.int32),
        top_logprobs=jnp.full((num_rows, num_top), -jnp.inf, jnp.float32),
    )
