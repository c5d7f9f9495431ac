"""The entry points: pick an implementation, run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pallas_kernels.choice import Choice, Implementations
from pallas_kernels.flash_attention.gradient import differentiable
from pallas_kernels.flash_attention.specs import IMPLEMENTATIONS, AttentionSpec, Operands, make_spec
from pallas_kernels.platform import current_platform

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32

_BY_PLATFORM = {"tpu": ("pallas_tpu", "xla"), "gpu": ("cudnn", "pallas_gpu", "xla"), "cpu": ("xla",)}
# Each has `attention(operands, spec)`, which returns (out, lse or None).
_MODULES = Implementations("pallas_kernels.flash_attention", IMPLEMENTATIONS, _BY_PLATFORM)
# These are differentiated by JAX itself or bring their own gradient.
_HAVE_GRADIENT = ("cudnn", "reference")


def flash_attention(
    q: Float[Array, "B T Hq K"],
    k: Float[Array, "B S Hkv K"],
    v: Float[Array, "B S Hkv K"],
    *,
    causal: bool = True,
    query_offset: Int32[Array, " B"] | None = None,
    kv_lengths: Int32[Array, " B"] | None = None,
    segment_ids: Int32[Array, "B T"] | tuple[Int32[Array, "B T"], Int32[Array, "B S"]] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Any:
    """Softmax attention that never holds the [T, S] score matrix (Dao 2023, FlashAttention-2, section 3.1).

    Differentiable in q, k, v and sinks, the log-sum-exp included. A row's result is the same bits whatever the
    other rows of the batch are. A NaN that a query sees comes out as NaN.

    Args:
      q: queries [B, T, Hq, K]; k, v: keys and values [B, S, Hkv, K], Hq a multiple of Hkv (grouped queries).
      causal: key position s is visible to the query at position p when s <= p.
      query_offset: int32 [B], the position of each row's first query among its keys; 0 when None.
      kv_lengths: int32 [B], how many leading keys of each row exist; all S when None. What lies beyond is never
        read, and may be NaN. A query that sees no key returns zeros.
      segment_ids: int32 [B, T] when T == S, or a pair (of queries [B, T], of keys [B, S]): a query sees only keys
        of its own segment.
      window: only the last `window` visible keys, the query's own included.
      soft_cap: scores become soft_cap * tanh(score / soft_cap), after scaling, before masking (Gemma 2, section 2).
      sinks: float32 [Hq], one more score in each head's softmax, whose value is zero (gpt-oss). -inf takes nothing.
      scale: multiplies the scores; K**-0.5 when None.
      return_lse: also return the natural logarithm of each softmax's denominator, the sink included when given.
      implementation: None picks by platform and shape (see `explain`); "pallas_tpu", "pallas_gpu", "cudnn" or
        "xla" is this one or an error; "reference" is dense float32, for tests.

    Returns:
      out [B, T, Hq, K] in q's dtype; scores and sums are float32. With return_lse, (out, lse float32 [B, T, Hq]);
      lse is -inf for a query that sees nothing and has no sink.

    Raises:
      ValueError: shapes, dtypes or options that do not fit; an unknown implementation.
      NotImplementedError: the named implementation cannot do this; the message says why.
    """
    operands = _operands(q, k, v, query_offset, kv_lengths, segment_ids, sinks)
    spec = make_spec(operands, causal=causal, window=window, soft_cap=soft_cap, scale=scale, return_lse=return_lse)
    out, lse = _attend(q, operands, spec, implementation)
    return (out, lse) if return_lse else out


def _attend(
    q: Float[Array, "B T Hq K"], operands: Operands, spec: AttentionSpec, implementation: str | None
) -> tuple[Float[Array, "B T Hq K"], Float32[Array, "B T Hq"] | None]:
    name = _MODULES.take(spec, current_platform(), implementation)
    run = _MODULES[name].attention
    return run(operands, spec) if name in _HAVE_GRADIENT else differentiable(run, spec, operands)  # pyright: ignore


def explain(
    q,
    k,
    v,
    *,
    causal: bool = True,
    query_offset=None,
    kv_lengths=None,
    segment_ids=None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks=None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Choice:
    """What `flash_attention` of the same arguments would run here, and why none of the others.

    Takes arrays or `jax.ShapeDtypeStruct`s, and raises as `flash_attention` does.
    """
    operands = _operands(q, k, v, query_offset, kv_lengths, segment_ids, sinks)
    spec = make_spec(operands, causal=causal, window=window, soft_cap=soft_cap, scale=scale, return_lse=return_lse)
    return _MODULES.choose(spec, current_platform(), implementation)


def _operands(q, k, v, query_offset, kv_lengths, segment_ids, sinks) -> Operands:
    queries = keys = None
    if isinstance(segment_ids, tuple):
        if len(segment_ids) != 2:
            raise ValueError(f"segment_ids is one array or a pair (queries, keys), not {len(segment_ids)} arrays")
        queries, keys = segment_ids
    elif segment_ids is not None:
        queries = keys = segment_ids
    return Operands(q, k, v, sinks, query_offset, kv_lengths, queries, keys)
