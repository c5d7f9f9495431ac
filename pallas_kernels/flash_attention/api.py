"""Entry points of flash attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pallas_kernels.choice import Implementations, KernelChoice
from pallas_kernels.flash_attention.gradient import differentiable
from pallas_kernels.flash_attention.specs import IMPLEMENTATIONS, AttentionSpec, FlashOperands, make_spec
from pallas_kernels.platform import current_platform

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32

_BY_PLATFORM = {"tpu": ("pallas_tpu", "xla"), "gpu": ("cudnn", "pallas_gpu", "xla"), "cpu": ("xla",)}
# Each has `attention(operands, spec)`, which returns (out, lse or None).
_MODULES = Implementations("pallas_kernels.flash_attention", IMPLEMENTATIONS, _BY_PLATFORM)
# Differentiated by JAX, or with a gradient of their own.
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

    Differentiable in q, k, v and sinks, also through the log-sum-exp. The result of a row does not depend, to the bit,
    on the other rows of the batch. A query that sees a NaN returns NaN.

    Args:
      q: queries, Hq a multiple of Hkv (grouped-query attention).
      causal: the query at position p sees the keys at positions up to p.
      query_offset: position of each row's first query among its keys, 0 when None.
      kv_lengths: number of valid keys of each row, S when None. Keys and values beyond are never used and may be NaN.
        A query that sees no key returns zeros.
      segment_ids: one array if T == S, or a pair (of queries, of keys): a query sees keys of its own segment only.
      window: a query sees the last `window` keys, its own included.
      soft_cap: scores become soft_cap * tanh(score / soft_cap), after scaling, before masking (Gemma 2, section 2).
      sinks: one more score in each head's softmax, with value zero (gpt-oss). -inf has no weight.
      scale: factor of the scores, K**-0.5 when None.
      return_lse: also return the natural logarithm of the softmax's denominator, sink included.
      implementation: "pallas_tpu", "pallas_gpu", "cudnn", "xla" or "reference" (dense float32, for tests); None selects
        by platform and shape (see `explain`).

    Returns:
      The output in q's dtype; scores and sums are float32. With return_lse, (output, lse float32 [B, T, Hq]); lse is
      -inf for a query that sees no key and has no sink.

    Raises:
      ValueError: shapes, dtypes or options that do not fit, or an unknown implementation.
      NotImplementedError: the named implementation cannot run the call; the message has the reason.
    """
    operands = _operands(q, k, v, query_offset, kv_lengths, segment_ids, sinks)
    spec = make_spec(operands, causal=causal, window=window, soft_cap=soft_cap, scale=scale, return_lse=return_lse)
    out, lse = _attend(q, operands, spec, implementation)
    return (out, lse) if return_lse else out


def _attend(
    q: Float[Array, "B T Hq K"], operands: FlashOperands, spec: AttentionSpec, implementation: str | None
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
) -> KernelChoice:
    """The implementation that `flash_attention` selects for the same arguments, and the reasons against the others.

    Arguments are arrays or `jax.ShapeDtypeStruct`s. Raises as `flash_attention` does.
    """
    operands = _operands(q, k, v, query_offset, kv_lengths, segment_ids, sinks)
    spec = make_spec(operands, causal=causal, window=window, soft_cap=soft_cap, scale=scale, return_lse=return_lse)
    return _MODULES.choose(spec, current_platform(), implementation)


def _operands(q, k, v, query_offset, kv_lengths, segment_ids, sinks) -> FlashOperands:
    queries = keys = None
    if isinstance(segment_ids, tuple):
        if len(segment_ids) != 2:
            raise ValueError(f"segment_ids is one array or a pair (queries, keys), not {len(segment_ids)} arrays")
        queries, keys = segment_ids
    elif segment_ids is not None:
        queries = keys = segment_ids
    return FlashOperands(q, k, v, sinks, query_offset, kv_lengths, queries, keys)
