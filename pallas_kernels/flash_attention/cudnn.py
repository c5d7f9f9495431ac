"""cuDNN's fused attention (`jax.nn.dot_product_attention`), forward and backward, for calls that it supports."""

import jax

from pallas_kernels.flash_attention.specs import AttentionSpec, FlashOperands
from pallas_kernels.platform import missing_platform


def unsupported(spec: AttentionSpec, platform: str) -> str | None:
    if (reason := missing_platform("gpu", platform)) is not None:
        return reason
    if spec.dtype not in ("bfloat16", "float16"):
        return f"cuDNN takes bfloat16 and float16, not {spec.dtype}"
    if spec.head_dim % 8 or spec.head_dim > 128:
        return f"cuDNN takes a head_dim that is a multiple of 8 up to 128, not {spec.head_dim}"
    absent = {
        "soft_cap": spec.soft_cap is not None,
        "sinks": spec.has_sinks,
        "segment_ids": spec.has_segments,
        "query_offset": spec.has_offset,
    }
    for name, is_asked in absent.items():
        if is_asked:
            return f"cuDNN has no {name}"
    if spec.has_lengths:
        return "cuDNN masks keys beyond kv_lengths but still multiplies their values, which may be NaN"
    if spec.return_lse:
        return f"cuDNN's log-sum-exp comes back rounded to {spec.dtype}"
    if spec.causal and spec.num_queries != spec.num_keys:
        return (
            f"cuDNN is used for causal attention of as many keys as queries, not {spec.num_queries} to {spec.num_keys}"
        )
    return None


def attention(operands: FlashOperands, spec: AttentionSpec) -> tuple[jax.Array, None]:
    out = jax.nn.dot_product_attention(
        operands.q,
        operands.k,
        operands.v,
        scale=spec.scale,
        is_causal=spec.causal,
        # Our window includes the query's own key; JAX's is the number of keys to its left.
        local_window_size=None if spec.window is None else (spec.window - 1, 0),
        implementation="cudnn",
    )
    return out, None
