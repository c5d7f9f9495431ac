"""The chain of logit transforms, from the model's logits to those that are sampled: the same for every caller.

The order is vLLM V1's (`vllm/v1/sample/sampler.py`): allowed ids, bad words, min_tokens, logit bias, repetition,
frequency and presence penalties; then, for sampled rows, temperature, min-p, top-k, top-p.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sampling import exact
from jaxinfer.sampling.batch import SamplingBatch
from jaxinfer.sampling.filters import top_k_top_p
from jaxinfer.sampling.state import SamplingState


def transform(logits: jax.Array, batch: SamplingBatch, state: SamplingState) -> jax.Array:
    """Applies all processors and filters to logits float32[S, V]; each row samples from the softmax of the result.

    A greedy row gets only the processors before temperature; its token is the argmax. Rows are independent, bit for
    bit. A step that no row needs is skipped at run time, in the same program. Impossible tokens have -inf; `sample`
    reports a row in which all have. Raises ValueError while tracing if dtype or shape do not match the batch.
    """
    if logits.dtype != jnp.float32 or logits.shape != batch.bias.shape:
        raise ValueError(f"logits must be float32{list(batch.bias.shape)}, got {logits.dtype}{list(logits.shape)}")
    logits = _where_any(_has_processors(batch, state), lambda x: _process(x, batch, state), logits)
    return _where_any(batch.is_sampled, lambda x: _filter(x, batch), logits)


def is_transformed(batch: SamplingBatch, state: SamplingState) -> jax.Array:
    """bool[S]: whether `transform` may change a row."""
    return _has_processors(batch, state) | batch.is_sampled


def _has_processors(batch: SamplingBatch, state: SamplingState) -> jax.Array:
    return batch.has_bias | batch.has_bad_words | (state.num_output < batch.min_tokens) | batch.has_penalties


def _process(logits: jax.Array, batch: SamplingBatch, state: SamplingState) -> jax.Array:
    is_early = state.num_output < batch.min_tokens
    # Masks and the bias commute: a masked logit stays -inf whatever finite number is added.
    logits = _where_any(batch.has_bias, lambda x: _add_bias(x, batch), logits)
    logits = _where_any(batch.has_bad_words, lambda x: _forbid(x, _completions(batch, state)), logits)
    early_ids = jnp.where(is_early[:, None], batch.min_tokens_ids, batch.vocab_size)
    logits = _where_any(is_early, lambda x: _forbid(x, early_ids), logits)
    return _where_any(batch.has_penalties, lambda x: _penalize(x, batch, state), logits)


def _filter(logits: jax.Array, batch: SamplingBatch) -> jax.Array:
    has_temperature = batch.is_sampled & (batch.temperature != 1)
    logits = _where_any(has_temperature, lambda x: _scale(x, batch.temperature, has_temperature), logits)
    logits = _where_any(batch.min_p > 0, lambda x: _min_p(x, batch.min_p), logits)
    has_top = (batch.top_k > 0) | (batch.top_p < 1)
    return _where_any(has_top, lambda x: top_k_top_p(x, batch.top_k, batch.top_p), logits)


def _where_any(is_needed: jax.Array, step: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
    """Runs `step` if any row needs it. `step` must not change the other rows."""
    return lax.cond(jnp.any(is_needed), step, lambda x: x, logits)


def _add_bias(logits: jax.Array, batch: SamplingBatch) -> jax.Array:
    return jnp.where(batch.has_bias[:, None], logits + batch.bias, logits)


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
