"""What every implementation of flash attention is given, checked once."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ("xla", "reference")


@dataclass(frozen=True)
class AttentionSpec:
    """Static facts of one call, derived from the operands by `make_spec`.

    Shapes: q [B, T, Hq, K], k and v [B, S, Hkv, K]; `num_groups` is Hq / Hkv.
    """

    batch_size: int
    num_queries: int
    num_keys: int
    num_kv_heads: int
    num_groups: int
    head_dim: int
    causal: bool
    window: int | None
    scale: float


def make_spec(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, window: int | None, scale: float | None
) -> AttentionSpec:
    """Checks shapes and options; raises ValueError with the offending shapes."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"flash_attention takes q [B, T, Hq, K] and equal k, v [B, S, Hkv, K]; "
            f"got q {q.shape}, k {k.shape}, v {v.shape}"
        )
    batch, num_queries, num_heads, head_dim = q.shape
    if k.shape[0] != batch or k.shape[3] != head_dim or num_heads % k.shape[2]:
        raise ValueError(
            f"q {q.shape} does not fit k {k.shape}: batch and head_dim must agree and the "
            f"{num_heads} query heads must be a multiple of the {k.shape[2]} key heads"
        )
    if not (q.dtype == k.dtype == v.dtype) or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q, k and v must share one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window={window} needs causal attention and at least 1 key")
    return AttentionSpec(
        batch_size=batch,
        num_queries=num_queries,
        num_keys=k.shape[1],
        num_kv_heads=k.shape[2],
        num_groups=num_heads // k.shape[2],
        head_dim=head_dim,
        causal=causal,
        window=window,
        scale=head_dim**-0.5 if scale is None else scale,
    )
