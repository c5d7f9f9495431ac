"""Differences of a quantized model from the float model on held-out text."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache, reduce
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import ModelConfig, Params, abstract_params, bind

Hidden = jax.Array | np.ndarray
Array = TypeVar("Array", jax.Array, np.ndarray)


@dataclass(frozen=True)
class Quality:
    """Quality of a quantized model, over the tokens of a text.

    Attributes:
      kl: KL(float || quantized) of the next token, nats per token.
      perplexity, float_perplexity: of the text, by each model.
      top1_agreement: share of positions with the same most likely token.
    """

    kl: float
    perplexity: float
    float_perplexity: float
    top1_agreement: float
    num_tokens: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Sums(NamedTuple):
    kl: jax.Array
    nll: jax.Array
    float_nll: jax.Array
    num_agreeing: jax.Array


def kl_divergence(log_p: Array, log_q: Array) -> Array:
    """KL(p || q) [...] in nats, of log-probabilities [..., V], both on the host or both on devices."""
    numbers: Any = log_p.__array_namespace__()
    return numbers.sum(numbers.exp(log_p) * (log_p - log_q), axis=-1)


def compare(
    config: ModelConfig,
    rest: Params,
    other_rest: Params,
    chunks: Iterable[tuple[Hidden, Hidden, np.ndarray]],
) -> Quality:
    """Quality over chunks of (final hidden states [B, T, D] of the float model, of the quantized model, tokens [B, T]).

    Args:
      rest: parameters outside the layers of the float model; other_rest: of the quantized one.
    """
    totals, num_tokens, num_targets = [], 0, 0
    for hidden, other, tokens in chunks:
        totals.append(_head(config)[1](rest, other_rest, hidden, other, tokens))
        num_tokens += tokens.size
        num_targets += tokens[:, 1:].size
    if not totals:
        raise ValueError("no text to compare on")
    sums = reduce(lambda a, b: jax.tree.map(jnp.add, a, b), totals)
    return Quality(
        kl=float(sums.kl) / num_tokens,
        perplexity=float(np.exp(float(sums.nll) / num_targets)),
        float_perplexity=float(np.exp(float(sums.float_nll) / num_targets)),
        top1_agreement=float(sums.num_agreeing) / num_tokens,
        num_tokens=num_tokens,
    )


def logits(config: ModelConfig, rest: Params, hidden: Hidden) -> jax.Array:
    """float32 logits [B, T, V] of hidden states [B, T, D] after the last layer."""
    return _head(config)[0](rest, hidden)


@lru_cache(maxsize=4)
def _head(config: ModelConfig) -> tuple[Callable[..., jax.Array], Callable[..., _Sums]]:
    config = config.with_layers([0])
    layer = abstract_params(config)["layers"]["0"]

    def logits(rest: Params, hidden: jax.Array) -> jax.Array:
        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), layer)
        decoder = bind(config, rest | {"layers": {"0": blank}})
        return decoder.logits(decoder.final_norm(hidden))

    def sums(rest: Params, other_rest: Params, hidden: jax.Array, other: jax.Array, tokens: jax.Array) -> _Sums:
        log_p, log_q = (jax.nn.log_softmax(logits(*pair)) for pair in ((rest, hidden), (other_rest, other)))

        def nll(log_probs: jax.Array) -> jax.Array:
            return -jnp.take_along_axis(log_probs[:, :-1], tokens[:, 1:, None], axis=-1).sum()

        kl = jnp.maximum(kl_divergence(log_p, log_q), 0.0).sum()
        agrees = jnp.argmax(log_p, axis=-1) == jnp.argmax(log_q, axis=-1)
        return _Sums(kl, nll(log_q), nll(log_p), agrees.sum())

    return jax.jit(logits), jax.jit(sums)
