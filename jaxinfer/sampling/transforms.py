"""The chain of logit transforms, from the model's logits to those that are sampled: the same for every caller.

The order is vLLM V1's (`vllm/v1/sample/sampler.py`): allowed ids, bad words, min_tokens, logit bias, repetition,
frequency and presence penalties; temperature of sampled rows; the grammar's mask; min-p, top-k, top-p of sampled rows.
A mask changes no other logit, not by rounding either: a token that wins without it and is allowed wins with it. An
answer that its grammar lets end ends where processors, such as min_tokens, leave no other token.

Functions of users (`processors.py`) run after the penalties and the grammar's mask, and temperature follows them: they
see the logits that are possible, at the model's own scale. At a temperature of 0 or 1, repetition_penalty and min_p
written as such functions are what the parameters are, bit for bit.

Top-k and top-p do not sort the vocabulary. Both keep the tokens whose logit reaches a threshold. Two methods find the
same threshold, bit for bit: a binary search over the bits of the float (32 passes of counting) and, on a CPU, the 128
largest logits, which nearly always include it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.grammar.device import GrammarTables, apply_masks
from jaxinfer.sampling import exact
from jaxinfer.sampling.batch import SamplingBatch
from jaxinfer.sampling.state import SamplingState

if TYPE_CHECKING:
    from jaxtyping import Array, Float32, Int32


def transform(
    logits: Float32[Array, "S V"], batch: SamplingBatch, state: SamplingState, tables: GrammarTables | None = None
) -> Float32[Array, "S V"]:
    """Applies all processors and filters to logits float32[S, V]; each row samples from the softmax of the result.

    A greedy row gets the processors before temperature and the grammar's mask; its token is the argmax. Rows are
    independent, bit for bit. A step that no row needs is skipped at run time, in the same program. Impossible tokens
    have -inf; `sample` reports a row in which all have. Raises ValueError while tracing if dtype or shape do not match
    the batch.
    """
    if logits.dtype != jnp.float32 or logits.shape != batch.bias.shape:
        raise ValueError(f"logits must be float32{list(batch.bias.shape)}, got {logits.dtype}{list(logits.shape)}")
    has_processors, own = _has_processors(batch, state), batch.processors
    logits = _where_any(has_processors, lambda x: _process(x, batch, state), logits)
    has_temperature = batch.is_sampled & (batch.temperature != 1)

    def scale(logits: jax.Array) -> jax.Array:
        return _where_any(has_temperature, lambda x: _scale(x, batch.temperature, has_temperature), logits)

    logits = scale(logits) if own is None else logits
    if tables is not None:
        logits = _where_any(state.grammar > 0, lambda x: apply_masks(x, state.grammar, tables), logits)
    if own is not None:
        logits = own.processors.apply(logits, state.tokens_so_far(), own.arrays)
    if tables is not None:
        may_exclude = (has_processors if own is None else True) & (state.grammar > 0)
        logits = _where_any(may_exclude, lambda x: _end_finished(x, may_exclude, batch, state, tables), logits)
    logits = logits if own is None else scale(logits)
    return _where_any(batch.is_sampled, lambda x: _filter(x, batch), logits)


def is_transformed(batch: SamplingBatch, state: SamplingState) -> jax.Array:
    """bool[S]: whether `transform` may change a row."""
    return is_more_than_masked(batch, state) | (state.grammar > 0)


def is_more_than_masked(batch: SamplingBatch, state: SamplingState) -> jax.Array:
    """bool[S]: whether `transform` may change a row in other ways than by its grammar's mask."""
    changed = _has_processors(batch, state) | batch.is_sampled
    return changed if batch.processors is None else jnp.ones_like(changed)


def _has_processors(batch: SamplingBatch, state: SamplingState) -> jax.Array:
    return batch.has_bias | batch.has_bad_words | (state.num_output < batch.min_tokens) | batch.has_penalties


def _process(logits: jax.Array, batch: SamplingBatch, state: SamplingState) -> jax.Array:
    is_early = state.num_output < batch.min_tokens
    # Masks and the bias commute: a masked logit stays -inf whatever finite number is added.
    logits = _where_any(batch.has_bias, lambda x: jnp.where(batch.has_bias[:, None], x + batch.bias, x), logits)
    logits = _where_any(batch.has_bad_words, lambda x: _forbid(x, _completions(batch, state)), logits)
    early_ids = jnp.where(is_early[:, None], batch.min_tokens_ids, batch.vocab_size)
    logits = _where_any(is_early, lambda x: _forbid(x, early_ids), logits)
    return _where_any(batch.has_penalties, lambda x: _penalize(x, batch, state), logits)


def _end_finished(
    logits: jax.Array, may_exclude: jax.Array, batch: SamplingBatch, state: SamplingState, tables: GrammarTables
) -> jax.Array:
    """Lets an answer end that is complete by its grammar where min_tokens and the like leave it no token; of several
    ends all are as probable."""
    rows = jnp.arange(logits.shape[0])[:, None]
    is_stuck = may_exclude & jnp.all(logits == -jnp.inf, axis=-1)
    ends = jnp.where(is_stuck[:, None], batch.min_tokens_ids, batch.vocab_size)
    return apply_masks(logits.at[rows, ends].set(0, mode="drop"), state.grammar, tables)


def _filter(logits: jax.Array, batch: SamplingBatch) -> jax.Array:
    logits = _where_any(batch.min_p > 0, lambda x: _min_p(x, batch.min_p), logits)
    has_top = (batch.top_k > 0) | (batch.top_p < 1)
    return _where_any(has_top, lambda x: top_k_top_p(x, batch.top_k, batch.top_p), logits)


def _where_any(is_needed: jax.Array, step: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
    """Runs `step` if any row needs it. `step` must not change the other rows."""
    return lax.cond(jnp.any(is_needed), step, lambda x: x, logits)


def _forbid(logits: jax.Array, ids: jax.Array) -> jax.Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")


def _completions(batch: SamplingBatch, state: SamplingState) -> jax.Array:
    """int32[S, 256]: the last tokens of the bad words whose other tokens were just generated, else V.

    As in vLLM, only the answer is matched, not the prompt.
    """
    beginning, last = batch.bad_words[:, :, :-1], batch.bad_words[:, :, -1]
    matches = (beginning == batch.vocab_size) | (beginning == state.recent[:, None, :])
    return jnp.where(jnp.all(matches, axis=-1), last, batch.vocab_size)


def _penalize(logits: jax.Array, batch: SamplingBatch, state: SamplingState) -> jax.Array:
    """Keskar et al. 2019 (CTRL) section 4.1 for repetition, OpenAI's definition for frequency and presence."""
    is_output = state.output_counts > 0
    repetition = jnp.where(state.prompt_mask | is_output, batch.repetition_penalty[:, None], 1)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - batch.frequency_penalty[:, None] * state.output_counts.astype(jnp.float32)
    return logits - jnp.where(is_output, batch.presence_penalty[:, None], 0)


def _scale(logits: jax.Array, temperature: jax.Array, is_scaled: jax.Array) -> jax.Array:
    """Divides the distance to the row's largest logit by the temperature: the same distribution as dividing the logits,
    without large quotients, whose rounding would exceed the noise at low temperatures."""
    largest = exact.finite_max(logits)
    divisor = jnp.where(is_scaled, temperature, 1)[:, None]
    return jnp.where(is_scaled[:, None], (logits - largest) / divisor, logits)


def _min_p(logits: jax.Array, min_p: jax.Array) -> jax.Array:
    largest = jnp.max(logits, axis=-1, keepdims=True)
    least = jnp.where(min_p > 0, largest[:, 0] + jnp.log(min_p), -jnp.inf)
    return jnp.where(logits >= least[:, None], logits, -jnp.inf)


NUM_CANDIDATES = 128  # 93 us on XLA:CPU for V = 49,152; the search takes 380 us for top-k, 1.2 ms for top-p


def top_k_top_p(
    logits: Float32[Array, "S V"], top_k: Int32[Array, " S"], top_p: Float32[Array, " S"]
) -> Float32[Array, "S V"]:
    """Masks float32[S, V] with -inf: top_k int32[S] (0 keeps all), then top_p float32[S] (1 keeps all).

    Top-k keeps the k largest logits and all equal to the k-th. Top-p keeps the smallest set of largest logits, equal
    ones together, whose probability in the softmax after top-k is at least top_p; at least one.
    """
    return lax.platform_dependent(logits, top_k, top_p, cpu=by_candidates, default=by_search)


def by_search(
    logits: Float32[Array, "S V"], top_k: Int32[Array, " S"], top_p: Float32[Array, " S"]
) -> Float32[Array, "S V"]:
    """`top_k_top_p` by binary search over the whole vocabulary. A filter that no row uses is skipped at run time."""
    logits = lax.cond(jnp.any(top_k > 0), _search_top_k, lambda x, _: x, logits, top_k)
    return lax.cond(jnp.any(top_p < 1), _search_top_p, lambda x, _: x, logits, top_p)


def by_candidates(
    logits: Float32[Array, "S V"], top_k: Int32[Array, " S"], top_p: Float32[Array, " S"]
) -> Float32[Array, "S V"]:
    """`top_k_top_p` from the largest logits; falls back to the search if these do not include some row's threshold."""
    vocab_size = logits.shape[1]
    best = lax.top_k(logits, min(NUM_CANDIDATES, vocab_size))[0]
    top_k = jnp.where(top_k < vocab_size, top_k, 0)

    kth = jnp.take_along_axis(best, jnp.clip(top_k - 1, 0, best.shape[1] - 1)[:, None], axis=1)
    kth = jnp.where(top_k[:, None] > 0, kth, -jnp.inf)
    logits = lax.cond(
        jnp.all(top_k <= best.shape[1]),
        lambda x: jnp.where(x >= kth, x, -jnp.inf),
        lambda x: _search_top_k(x, top_k),
        logits,
    )
    return lax.cond(jnp.any(top_p < 1), _top_p_of_candidates, lambda x, *_: x, logits, best, top_p)


def _search_top_k(logits: jax.Array, top_k: jax.Array) -> jax.Array:
    num_rows, vocab_size = logits.shape
    keys = exact.ordered_keys(logits)
    num_kept = jnp.where(top_k > 0, jnp.minimum(top_k, vocab_size), vocab_size)
    threshold = exact.largest_threshold(
        lambda t: jnp.sum(keys >= t[:, None], axis=-1, dtype=jnp.int32) >= num_kept, num_rows
    )
    return jnp.where(keys >= threshold[:, None], logits, -jnp.inf)


def _search_top_p(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    keys = exact.ordered_keys(logits)
    weights = _weights(logits)
    least = top_p * exact.mass(weights)
    threshold = exact.largest_threshold(lambda t: exact.mass(weights, keys >= t[:, None]) >= least, logits.shape[0])
    threshold = jnp.minimum(threshold, jnp.max(keys, axis=-1))  # where top_p is so small that least is 0
    is_kept = (keys >= threshold[:, None]) | (top_p >= 1)[:, None]
    return jnp.where(is_kept, logits, -jnp.inf)


def _top_p_of_candidates(logits: jax.Array, best: jax.Array, top_p: jax.Array) -> jax.Array:
    """Top-p from `best` float32[S, C]: the largest logits of each row, in descending order.

    The threshold is the element at which the cumulative mass reaches top_p. `best` may end with logits that top-k
    dropped, but the mass is complete before these.
    """
    least = top_p * exact.mass(_weights(logits))
    distance = best - exact.finite_max(best)
    reached = exact.running_mass(exact.fixed_point(jnp.exp(distance), logits.shape[1])) >= least[:, None]
    place = jnp.argmax(reached, axis=-1)[:, None]
    threshold = jnp.take_along_axis(best, place, axis=1)
    is_kept = (logits >= threshold) | (top_p >= 1)[:, None]
    return lax.cond(
        jnp.all(reached[:, -1] | (top_p >= 1)),
        lambda x: jnp.where(is_kept, x, -jnp.inf),
        lambda x: _search_top_p(x, top_p),
        logits,
    )


def _weights(logits: jax.Array) -> exact.FixedPoint:
    return exact.fixed_point(jnp.exp(logits - exact.finite_max(logits)), logits.shape[1])
