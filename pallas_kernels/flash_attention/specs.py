"""Operands and static facts of a call, as every implementation of flash attention takes them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ("pallas_tpu", "cudnn", "pallas_gpu", "xla", "reference")


class FlashOperands(NamedTuple):
    """The arrays of one call, shapes as in `flash_attention`. Optional ones may be None (`has_` fields of the spec)."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    sinks: Any
    query_offset: Any
    kv_lengths: Any
    query_segments: Any
    key_segments: Any


@dataclass(frozen=True)
class AttentionSpec:
    """Static facts of one call, from `make_spec`.

    Shapes: q [B, T, Hq, K], k and v [B, S, Hkv, K]; `num_groups` is Hq / Hkv.
    """

    batch_size: int
    num_queries: int
    num_keys: int
    num_kv_heads: int
    num_groups: int
    head_dim: int
    dtype: str
    causal: bool
    window: int | None
    soft_cap: float | None
    scale: float
    has_sinks: bool = False
    has_offset: bool = False
    has_lengths: bool = False
    has_segments: bool = False
    return_lse: bool = False

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.num_groups

    @property
    def facts(self) -> str:
        """Facts that block sizes may depend on. The batch is none of them: it must not change the rounding of sums."""
        heads = f"q{self.num_heads} kv{self.num_kv_heads} k{self.head_dim}"
        window = "" if self.window is None else f" window{self.window}"
        return f"{heads} {self.dtype} {'causal' if self.causal else 'full'}{window}"

    @property
    def cost(self) -> dict[str, int]:
        """Fields of `pl.CostEstimate` for rows of full length; half of the products if causal with T == S."""
        keys = self.num_keys if self.window is None else min(self.num_keys, self.window)
        pairs = self.batch_size * self.num_heads * self.num_queries * keys
        if self.causal and self.window is None and self.num_queries == self.num_keys:
            pairs //= 2
        rows = 2 * self.num_queries * self.num_heads + 2 * self.num_keys * self.num_kv_heads
        num_bytes = rows * self.batch_size * self.head_dim * jnp.dtype(self.dtype).itemsize
        return {"flops": 4 * pairs * self.head_dim, "transcendentals": pairs, "bytes_accessed": num_bytes}

    @property
    def may_see_nothing(self) -> bool:
        """True if a query may see no key at all."""
        return self.has_lengths or self.has_segments or self.has_offset or self.window is not None


def make_spec(
    operands: FlashOperands,
    *,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> AttentionSpec:
    """Checks arrays or `jax.ShapeDtypeStruct`s and options; raises ValueError with the offending shapes."""
    q, k, v = operands.q, operands.k, operands.v
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"flash_attention takes q [B, T, Hq, K] and equal k, v [B, S, Hkv, K]; "
            f"got q {q.shape}, k {k.shape}, v {v.shape}"
        )
    batch, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"flash_attention needs at least one of everything; got q {q.shape}, k {k.shape}")
    if k.shape[0] != batch or k.shape[3] != head_dim or num_heads % num_kv_heads:
        raise ValueError(
            f"q {q.shape} does not fit k {k.shape}: batch and head_dim must agree and the "
            f"{num_heads} query heads must be a multiple of the {num_kv_heads} key heads"
        )
    if not (q.dtype == k.dtype == v.dtype) or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q, k and v must share one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window={window} needs causal attention and at least 1 key")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap} must be positive")
    _check("sinks", operands.sinks, (num_heads,), jnp.float32)
    _check("query_offset", operands.query_offset, (batch,), jnp.int32)
    _check("kv_lengths", operands.kv_lengths, (batch,), jnp.int32)
    _check("segment_ids of the queries", operands.query_segments, (batch, num_queries), jnp.int32)
    _check("segment_ids of the keys", operands.key_segments, (batch, num_keys), jnp.int32)
    return AttentionSpec(
        batch_size=batch,
        num_queries=num_queries,
        num_keys=num_keys,
        num_kv_heads=num_kv_heads,
        num_groups=num_heads // num_kv_heads,
        head_dim=head_dim,
        dtype=jnp.dtype(q.dtype).name,
        causal=causal,
        window=window,
        soft_cap=None if soft_cap is None else float(soft_cap),
        scale=head_dim**-0.5 if scale is None else float(scale),
        has_sinks=operands.sinks is not None,
        has_offset=operands.query_offset is not None,
        has_lengths=operands.kv_lengths is not None,
        has_segments=operands.query_segments is not None,
        return_lse=return_lse,
    )


def _check(name: str, array: Any, shape: tuple[int, ...], dtype: Any) -> None:
    if array is not None and (array.shape != shape or array.dtype != dtype):
        raise ValueError(f"{name}: expected {jnp.dtype(dtype).name} {shape}, got {array.dtype} {array.shape}")
