"""The formulas: one token of many sequences, and a block of tokens of one."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.platform import current_platform
from pallas_kernels.recurrence.batch import RecurrentTokens

# Tokens of a block whose sum of outer products is no product of matrices on a GPU: XLA would write it before the sum.
MAX_SUMMED_TOKENS = 16


def step(state: jax.Array, tokens: RecurrentTokens) -> tuple[jax.Array, jax.Array]:
    """Outputs float32 [S, H, V] of one token [S] each, and states [S, Hk, K, E] after it.

    With S' = exp(g) S: S <- S' + k (beta (v - S'k))', o = S'q. The state is read once for both products.
    """
    q, k = tokens.q, tokens.k
    new, decay, beta = lanes(tokens)
    seen, known = jnp.sum(state * q[..., None], axis=-2), None
    if beta is not None:
        # Otherwise XLA:GPU computes one of them where it is used, and reads the state once more for it.
        seen, known = lax.optimization_barrier((seen, jnp.sum(state * k[..., None], axis=-2)))
        new = beta * (new - decay * known)
    out = decay * seen + jnp.sum(q * k, axis=-1, keepdims=True) * new
    return out.reshape(tokens.v.shape), decay[..., None, :] * state + k[..., None] * new[..., None, :]


def lanes(tokens: RecurrentTokens) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Values, decays and rates as [..., Hk, E], as a state has the values of the heads of a key side by side."""
    shape = (*tokens.k.shape[:-1], -1)

    def spread(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[..., None], tokens.v.shape).reshape(shape)

    beta = None if tokens.beta is None else spread(tokens.beta)
    return tokens.v.reshape(shape), spread(jnp.exp(tokens.g)), beta


def block(state: jax.Array, tokens: RecurrentTokens, is_kept: jax.Array | bool = True) -> tuple[jax.Array, jax.Array]:
    """Outputs float32 [C, H, V] of C tokens of a sequence, and its state [Hk, K, E] after them, in matrix products.

    The delta rule within a block is a unit lower triangular system (Yang et al. 2024, section 3.2). Each decay is the
    exponential of its own sum of logarithms: of differences of sums a token that forgets much (g = -1e5) would leave no
    digits to the others. Tokens of zeros, at any place, change neither the outputs of the others nor the state, to the
    bit. Without `is_kept` the state is zeros before, whatever it holds.
    """
    num_tokens, num_heads = tokens.v.shape[:2]
    # Products of the state with queries and keys as it lies, read once: its heads side by side.
    rows = jnp.concatenate([tokens.q] if tokens.beta is None else [tokens.q, tokens.k])
    of_state = jnp.where(is_kept, _product("chk,hke->che", rows, state), 0).reshape(len(rows), num_heads, -1)
    seen, known = (jnp.moveaxis(each, 0, 1) for each in (of_state[:num_tokens], of_state[-num_tokens:]))
    q, k = (jnp.moveaxis(_per_head(x, num_heads), 0, 1) for x in (tokens.q, tokens.k))
    v, g = jnp.moveaxis(tokens.v, 0, 1), tokens.g.T
    is_causal = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
    is_after = jnp.tril(jnp.ones((num_tokens, num_tokens), bool), -1)
    pairs = jnp.cumsum(jnp.where(is_after, g[:, :, None], 0), axis=1)  # [h, i, j]: g of the tokens after j up to i
    between = jnp.exp(jnp.where(is_causal, pairs, -jnp.inf))
    since_start = jnp.exp(jnp.cumsum(g, axis=1))[..., None]
    if tokens.beta is None:
        new = v
    else:
        beta = tokens.beta.T[..., None]
        solved = invert_unit_lower(beta * _product("hik,hjk->hij", k, k) * between)
        new = _product("hij,hjv->hiv", solved, beta * (v - since_start * known))
    out = since_start * seen + _product("hij,hjv->hiv", _product("hik,hjk->hij", q, k) * between, new)
    until_end = between[:, -1, :, None]
    left = jnp.moveaxis(until_end * new, 0, 1).reshape(num_tokens, *state.shape[::2])
    decay = jnp.broadcast_to(since_start[:, -1], v.shape[::2]).reshape(len(state), 1, -1)
    after = decay * jnp.where(is_kept, state, 0)
    if num_tokens > MAX_SUMMED_TOKENS or current_platform() != "gpu":
        return jnp.moveaxis(out, 0, 1), after + _product("chk,che->hke", tokens.k, left)
    for k, added in zip(tokens.k, left, strict=True):  # in the pass that reads and writes the state
        after = after + k[..., None] * added[:, None]
    return jnp.moveaxis(out, 0, 1), after


def invert_unit_lower(matrix: jax.Array) -> jax.Array:
    """The inverse of I + L [..., C, C], where L is the part of `matrix` below the diagonal.

    Blocks on the diagonal are inverted, then pairs of them are joined: [[A, 0], [B, D]] has the inverse
    [[A', 0], [-D' B A', D']]. That is log2(C) rounds of matrix products, as stable as substitution.
    """
    size = matrix.shape[-1]
    padding = (1 << (size - 1).bit_length()) - size
    matrix = jnp.pad(matrix, [(0, 0)] * (matrix.ndim - 2) + [(0, padding)] * 2)
    lead, inverse, width = matrix.shape[:-2], jnp.ones((*matrix.shape[:-1], 1, 1), matrix.dtype), 1
    while width < size + padding:
        count = (size + padding) // (2 * width)
        halves = matrix.reshape(*lead, count, 2, width, count, 2, width)[..., 1, :, :, 0, :]
        below = jnp.moveaxis(jnp.diagonal(halves, axis1=-4, axis2=-2), -1, -3)
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_product("...ij,...jk->...ik", _product("...ij,...jk->...ik", lower, below), upper)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)
        width *= 2
    return inverse[..., 0, :size, :size]


def _per_head(x: jax.Array, num_heads: int) -> jax.Array:
    """[..., H, K] of x [..., Hk, K]: head h reads row h // (H / Hk)."""
    return x if x.shape[-2] == num_heads else jnp.repeat(x, num_heads // x.shape[-2], axis=-2)


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST)
