"""Norms on Hopper (Pallas Mosaic GPU): the addition to the residual stream and the norm in one launch.

A thread block of one warpgroup takes a row: it keeps the sum in registers between the two passes over it. XLA needs a
launch for the statistics and one for the result.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu_compat as compat
from pallas_kernels.norm import xla
from pallas_kernels.norm.api import NormSpec
from pallas_kernels.platform import missing_platform

THREADS = 128  # of a warpgroup
MAX_WIDTH = 8192  # whose sums fit in the registers: 64 of each thread


def unsupported(spec: NormSpec, platform: str) -> str | None:
    if (reason := missing_platform("gpu", platform)) is not None:
        return reason
    if spec.width % THREADS or spec.width > MAX_WIDTH:
        return f"the GPU kernel takes widths in multiples of {THREADS} up to {MAX_WIDTH}, not {spec.width}"
    if spec.weight_axes > 1:
        return "the GPU kernel takes one weight for all rows"
    if not spec.has_term and spec.width < 1024:
        return "XLA fuses norms of heads with what is around them"
    if any(dtype not in ("bfloat16", "float16", "float32", "") for dtype in spec.dtypes):
        return f"the GPU kernel takes floats of 16 and 32 bits, not {' and '.join(spec.dtypes)}"
    if jax.sharding.get_abstract_mesh().size > 1:
        return "on several devices XLA partitions its own norms only"
    return compat.not_hopper()


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def norm(x, weight, bias, term, spec: NormSpec) -> tuple[jax.Array, jax.Array]:
    """The kernel, with the gradient of XLA's formula."""
    return _run(x, weight, bias, term, spec)


def _run(x, weight, bias, term, spec: NormSpec) -> tuple[jax.Array, jax.Array]:
    named = {"x": x.reshape(-1, spec.width), "weight": weight, "bias": bias}
    if term is not None:
        named["term"] = term.reshape(-1, spec.width)
    named = {name: array for name, array in named.items() if array is not None}
    shape = jax.ShapeDtypeStruct(named["x"].shape, x.dtype)
    outputs = {"sum": shape, "out": shape} if spec.has_term else {"out": shape}

    def body(*refs):
        _row(dict(zip((*named, *outputs), refs, strict=True)), spec)

    num_bytes = sum(array.nbytes for array in named.values()) + len(outputs) * named["x"].nbytes
    results = compat.kernel(
        body,
        out_type=tuple(outputs.values()),
        grid=(spec.rows,),
        grid_names=("row",),
        cost_estimate=pl.CostEstimate(flops=6 * x.size, bytes_accessed=num_bytes, transcendentals=spec.rows),
        name="norm",
    )(*named.values())
    results = [result.reshape(x.shape) for result in results]
    return (x, results[0]) if term is None else (results[0], results[1])


def _forward(x, weight, bias, term, spec: NormSpec):
    total, out = _run(x, weight, bias, term, spec)
    return (total, out), (total, weight, bias)


def _backward(spec: NormSpec, residuals, cotangents):
    def formula(total, weight, bias):
        return total, xla.norm(total, weight, bias, None, spec)[1].astype(total.dtype)

    _, pull = jax.vjp(formula, *residuals)
    d_total, d_weight, d_bias = pull(cotangents)
    return d_total, d_weight, d_bias, d_total if spec.has_term else None


norm.defvjp(_forward, _backward)


def _row(refs, spec: NormSpec):
    row, width = lax.axis_index("row"), spec.width
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=_vector(spec))
    load = partial(compat.load, layout=layout)
    x = load(refs["x"], (row, slice(None)))
    if "term" in refs:
        x = x + load(refs["term"], (row, slice(None)))
        refs["sum"][row, :] = x
    x32 = x.astype(jnp.float32)
    if spec.kind == "layer":
        x32 = x32 - jnp.sum(x32) / width
    normed = x32 * lax.rsqrt(jnp.sum(x32 * x32) / width + spec.eps)
    if "weight" not in refs:
        refs["out"][row, :] = normed.astype(x.dtype)
        return
    weight = load(refs["weight"], (slice(None),))
    if spec.kind == "rms":
        refs["out"][row, :] = (normed.astype(x.dtype) * weight).astype(x.dtype)
        return
    weight = weight.astype(jnp.float32)
    out = normed * (1 + weight if spec.kind == "rms_zero_centred" else weight)
    if "bias" in refs:
        out = out + load(refs["bias"], (slice(None),)).astype(jnp.float32)
    refs["out"][row, :] = out.astype(x.dtype)


def _vector(spec: NormSpec) -> int:
    """Neighbouring numbers of a thread: up to 16 bytes of the widest array."""
    most = 16 // max(jnp.dtype(dtype).itemsize for dtype in spec.dtypes if dtype)
    return next(count for count in (8, 4, 2, 1) if count <= most and spec.width % (THREADS * count) == 0)
