"""Training objectives: functions `(params, batch, *given) -> (scalar loss, metrics)`.

`given` are arrays that are neither trained nor donated, such as the target's parameters."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxinfer.calibration.quality import kl_divergence
from jaxinfer.models import ModelConfig, Params, bind

MASKED = -1e30


def attend_by_head(
    layer: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int | None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    texts: jax.Array | None = None,
) -> jax.Array:
    """`attend` for q [B, T, Hq, K], k and v [B, T, Hkv, K], as one product batched over all heads of all sequences.
    With `texts`, int32 [B, T], tokens see those with the same number alone.

    XLA:CPU runs that form, backward too, on its fast matrix product: with 12 x 256 tokens a training step of a
    2-layer model takes half the time of one with `attend_without_cache`. Rows and heads stay apart, so that a mesh may
    shard either. Scores need B * Hq * T * T elements.
    """
    length, num_heads, head_dim = q.shape[1:]

    def by_head(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, num_heads // x.shape[2], axis=2).swapaxes(1, 2)

    q, k, v = by_head(q), by_head(k), by_head(v)
    ages = jnp.arange(length)[:, None] - jnp.arange(length)
    is_visible = (ages >= 0) if window is None else (ages >= 0) & (ages < window)
    scores = lax.batch_matmul(q, k.swapaxes(2, 3), precision=lax.Precision.HIGHEST).astype(jnp.float32)
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if texts is not None:
        is_visible = is_visible & (texts[:, None, :, None] == texts[:, None, None, :])
    scores = jnp.where(is_visible, scores, MASKED)
    if sinks is not None:  # one more column, whose value is zero
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :length]
    return lax.batch_matmul(weights.astype(v.dtype), v, precision=lax.Precision.HIGHEST).swapaxes(1, 2)


Objective = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]


def sequence_logits(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """float32 logits [B, T, V] of int32 tokens [B, T], without a cache."""
    decoder = bind(config, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return decoder.logits(decoder(tokens, positions, attend_by_head))


def next_token(config: ModelConfig) -> Objective:
    """Mean cross entropy of the next token, in nats; a batch is tokens [B, T + 1]."""

    def loss(params: Params, tokens: jax.Array):
        logits = sequence_logits(config, params, tokens[:, :-1])
        value = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return value, {"loss": value}

    return loss


def forward_kl(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """KL(target || draft) [...] in nats of logits [..., V]: the draft covers all that the target says."""
    return kl_divergence(jax.nn.log_softmax(target_logits), jax.nn.log_softmax(draft_logits))


def reverse_kl(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """KL(draft || target) [...] in nats: the draft keeps to what the target says most."""
    return forward_kl(draft_logits, target_logits)


def total_variation(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """Half the sum of absolute differences [...], in 0..1: one minus the chance that a draft sampled and accepted
    as by Leviathan et al. 2023 is accepted."""
    return 0.5 * jnp.sum(jnp.abs(jax.nn.softmax(target_logits) - jax.nn.softmax(draft_logits)), axis=-1)


DIVERGENCES = {"fkl": forward_kl, "rkl": reverse_kl, "tv": total_variation}


def distillation(target: ModelConfig, draft: ModelConfig, loss: str, temperature: float = 1.0) -> Objective:
    """Mean divergence of the draft's next-token distribution from the target's.

    A batch is `{"tokens": [B, T], "weights": [B, T]}`: what the choice after each token counts. Given: the target's
    parameters. The target's logits are divided by `temperature`, the draft's are not: below 1, the draft learns above
    all which token the target would choose. The metric `agreement` is the weighted share of positions where both choose
    the same token.

    Raises ValueError for an unknown loss or a temperature that is not positive.
    """
    if loss not in DIVERGENCES:
        raise ValueError(f"loss={loss!r} is none of {', '.join(DIVERGENCES)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    divergence = DIVERGENCES[loss]

    def objective(params: Params, batch: dict[str, jax.Array], target_params: Params):
        tokens, shares = batch["tokens"], batch["weights"] / batch["weights"].sum()
        target_logits = jax.lax.stop_gradient(sequence_logits(target, target_params, tokens))
        draft_logits = sequence_logits(draft, params, tokens)
        value = jnp.sum(shares * divergence(target_logits / temperature, draft_logits))
        agrees = jnp.argmax(target_logits, axis=-1) == jnp.argmax(draft_logits, axis=-1)
        return value, {"loss": value, "agreement": jnp.sum(shares * agrees)}

    return objective
