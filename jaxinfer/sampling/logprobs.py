"""Log-probabilities of tokens, for answers and for prompts."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sampling import exact


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
