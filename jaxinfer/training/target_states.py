"""What a target computes of texts: the hidden states that heads read, and what it says next."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import ModelConfig, Params, bind, collect
from jaxinfer.training.head_objectives import NOT_DRAFTED
from jaxinfer.training.objectives import attend_by_head

# (parameters, tokens, positions, texts) -> (states, each [B, T, D]; log-probabilities [B, T, Vd]; best [B, T])
Observe = Callable[[Params, jax.Array, jax.Array, jax.Array], tuple[tuple[jax.Array, ...], jax.Array, jax.Array]]


def observer(target: ModelConfig, taps: Sequence[str], index: np.ndarray | None, temperature: float) -> Observe:
    """A jitted pass of the target over rows of texts (`HeadBatch`), with its float parameters: tapped states, the
    log-probabilities of the tokens of a smaller vocabulary at a temperature, and its best token in that vocabulary's
    numbers, or NOT_DRAFTED. `index` has the place of each token in it; None for all tokens.
    """
    size = target.vocab_size if index is None else int(index.max())
    tokens_of = None if index is None else np.argsort(index, kind="stable")[:size]

    def said(decoder, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of one row [T, D]: all rows together would need their logits of all tokens at once."""
        logits = decoder.logits(hidden)[..., : target.vocab_size]
        best = jnp.argmax(logits, axis=-1)
        if index is not None:
            place = jnp.asarray(index)[best]
            best = jnp.where(place < size, place, NOT_DRAFTED)
        logits = logits / temperature
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return (logits if tokens_of is None else jnp.take(logits, tokens_of, axis=-1)) - total, best

    @jax.jit
    def observe(params: Params, tokens: jax.Array, positions: jax.Array, texts: jax.Array):
        states, tap = collect(taps)
        decoder = bind(target, params)
        attend = partial(attend_by_head, texts=texts)
        hidden = decoder(tokens, positions, attend, tap)
        log_probs, best = jax.lax.map(partial(said, decoder), hidden)
        return tuple(states[name] for name in taps), log_probs, best

    return observe
