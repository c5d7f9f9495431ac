"""The entry point: picks an implementation and runs it."""

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention import reference, xla
from pallas_kernels.flash_attention.specs import IMPLEMENTATIONS, make_spec


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    query_offset: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Softmax attention that never holds the [T, S] score matrix (Dao 2023, FlashAttention-2, section 3.1).

    Args:
      q: queries [B, T, Hq, K]; k, v: keys and values [B, S, Hkv, K], Hq a multiple of Hkv (grouped queries).
      causal: key position s is visible to the query at position p when s <= p.
      query_offset: int32 [B], the position of each row's first query among its keys; 0 when None.
      kv_lengths: int32 [B], how many leading keys of each row exist; all S when None. A query that sees
        no key returns zeros. With None the call is differentiable; with an array the loop over key
        blocks stops at the longest row, so unused capacity costs nothing.
      window: only the last `window` visible keys, the query's own included.
      scale: multiplies the scores; K**-0.5 when None.
      implementation: None picks by platform; "xla" or "reference" (dense, float32, for tests).

    Returns:
      [B, T, Hq, K] in q's dtype; scores and sums are float32.

    Raises:
      ValueError: shapes, dtypes or options that do not fit; an unknown implementation.
    """
    spec = make_spec(q, k, v, causal=causal, window=window, scale=scale)
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation={implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    if query_offset is None:
        query_offset = jnp.zeros((spec.batch_size,), jnp.int32)
    run = reference.attention if implementation == "reference" else xla.attention
    return run(q, k, v, query_offset, kv_lengths, spec)
