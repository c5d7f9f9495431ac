"""Paged attention on Hopper GPUs: one Mosaic GPU kernel for decode, verify and prefill.

`gpu_schedule` makes the work items, `gpu_kernel` processes them, `gpu_blocks` attends to blocks of keys. XLA gathers
queries into rows and rounds new tokens to the cache's dtype. If every sequence is one tile (decode, verify), the kernel
appends the new tokens; otherwise XLA scatters them in place.
"""

from itertools import accumulate
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu_compat as compat
from pallas_kernels.paged_attention import gpu_kernel, gpu_schedule, gpu_sizes, layout
from pallas_kernels.paged_attention.gpu_blocks import LOG2_E
from pallas_kernels.paged_attention.gpu_schedule import BLOCK_KEYS, TILE_ROWS, SplitPlan, SplitPlanShape
from pallas_kernels.paged_attention.layout import SeparatePages
from pallas_kernels.paged_attention.reference import append_new_tokens
from pallas_kernels.paged_attention.specs import DIVIDED_PAGES, SHORT_QUERIES, PagedOperands, PagedSpec
from pallas_kernels.platform import missing_platform

LAYOUT = "separate"
# For the tuner.
tunable, candidates = gpu_schedule.tunable, gpu_schedule.candidates
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
HEAD_DIMS = (64, 80, 96, 128, 256)
CONVERTED = ("float8_e4m3fn", "float8_e5m2", "int8", "int4")


def unsupported(spec: PagedSpec, platform: str) -> str | None:
    """The reason why the kernel cannot run `spec` on `platform`, or None. The interpreter runs on any platform."""
    if not compat.is_interpreted() and (reason := missing_platform("gpu", platform)) is not None:
        return reason
    if not compat.is_interpreted() and (reason := compat.not_hopper()) is not None:
        return reason
    if spec.num_parts > 1:
        return DIVIDED_PAGES
    if not spec.page.has_values:
        return f"pages of {spec.head_dim} have no values of their own (multi-head latent attention)"
    if spec.layout != LAYOUT:
        return f"it reads {LAYOUT} pages, not {spec.layout}"
    if spec.q_dtype == "float32":
        return "float32 queries would be rounded to 10 bits by the tensor cores"
    if spec.page.dtype not in (spec.q_dtype, *CONVERTED):
        return f"a {spec.page.dtype} cache needs queries of the same dtype, not {spec.q_dtype}"
    if spec.page_size not in PAGE_SIZES:
        return f"page_size={spec.page_size} is not one of {', '.join(map(str, PAGE_SIZES))}"
    if spec.page.has_scales and spec.page_size * 4 < gpu_sizes.COPY_BYTES:
        return f"{spec.page_size} int8 scales of a page and head are less than a copy, {gpu_sizes.COPY_BYTES} bytes"
    if spec.head_dim not in HEAD_DIMS:
        return f"head_dim={spec.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if spec.page.dtype == "int4" and spec.head_dim % 128:
        return f"head_dim={spec.head_dim} is not 128 or 256: the halves of an int4 vector are whole tiles of 64 columns"
    if 0 in (spec.num_tokens, spec.num_sequences, spec.pages_per_sequence):
        return "the call has no tokens, sequences or pages"
    for shape in gpu_schedule.split_plan_shapes(spec):
        size = gpu_sizes.kernel_sizes(spec, shape, _appends_in_kernel(spec))
        if size.stages == 0:
            return f"it needs {size.shared_bytes} bytes of shared memory; there are {gpu_sizes.MAX_SHARED_BYTES}"
    return None


def shared_bytes(spec: PagedSpec) -> int:
    """Shared memory of a thread block of the larger program, in bytes."""
    shapes = gpu_schedule.split_plan_shapes(spec)
    return max(gpu_sizes.kernel_sizes(spec, shape, _appends_in_kernel(spec)).shared_bytes for shape in shapes)


def make_schedule(spec: PagedSpec, page_table, query_starts, query_lengths, kv_lengths) -> tuple[SplitPlan, ...]:
    """The work items of each program of the step."""
    shapes = gpu_schedule.split_plan_shapes(spec)
    return tuple(gpu_schedule.make_split_plan(spec, shape, query_starts, query_lengths, kv_lengths) for shape in shapes)


def attention(
    operands: PagedOperands, spec: PagedSpec, schedule: tuple[SplitPlan, ...]
) -> tuple[jax.Array, SeparatePages]:
    new_tokens = None
    pages = operands.pages
    if _appends_in_kernel(spec):
        new_tokens = _stored_tokens(operands, spec)
    else:
        pages = append_new_tokens(operands, spec)

    arrays = cast(SeparatePages, pages)  # the layout of this kernel
    refs = SeparatePages(*(None if a is None else jax.new_ref(a, memory_space=plgpu.GMEM) for a in arrays))
    out = None
    for shape, plan in zip(gpu_schedule.split_plan_shapes(spec), schedule, strict=True):
        # A token belongs to one program, which writes its row.
        written = None if out is None else jax.new_ref(out, memory_space=plgpu.GMEM)
        q_tiles, rows = _query_tiles(operands.q, plan, spec), _row_facts(operands, plan, spec, shape)
        if new_tokens is not None and new_tokens.k.dtype == q_tiles.dtype:
            q_tiles, k, v = _at_once(q_tiles, new_tokens.k, new_tokens.v)
            new_tokens = new_tokens._replace(k=k, v=v)
        out = gpu_kernel.run(q_tiles, refs, new_tokens, operands.page_table, plan, rows, written, spec, shape)
    assert out is not None
    return out, SeparatePages(*(None if ref is None else ref[...] for ref in refs))


def _at_once(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays [..., K] as parts of one, which the kernel gets addresses in: XLA rotates queries and keys in one
    launch."""
    rows = [array.reshape(-1, array.shape[-1]) for array in arrays]
    joined = lax.optimization_barrier(jnp.concatenate(rows))  # or XLA takes the parts from where they came
    parts = jnp.split(joined, [*accumulate(len(part) for part in rows[:-1])])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _appends_in_kernel(spec: PagedSpec) -> bool:
    """True if every sequence is one tile: of two tiles, one would read pages that the other writes."""
    return spec.max_query_length <= SHORT_QUERIES and spec.max_query_length * spec.num_groups <= TILE_ROWS


def _query_tiles(q: jax.Array, plan: SplitPlan, spec: PagedSpec) -> jax.Array:
    """Query tiles for `gpu_kernel.run`. Queries cast to float16 are clipped, since infinite scores become NaN."""
    dtype = gpu_sizes.compute_dtype(spec)
    if dtype != spec.q_dtype:
        largest = float(jnp.finfo(dtype).max)
        q = jnp.clip(q, -largest, largest).astype(dtype)
    q = q.reshape(spec.num_tokens, spec.num_kv_heads, spec.num_groups, spec.head_dim)
    heads = jnp.arange(spec.num_kv_heads)[:, None]
    return q.at[plan.row_token[:, None], heads, plan.row_group[:, None]].get(mode="promise_in_bounds")


def _stored_tokens(operands: PagedOperands, spec: PagedSpec) -> SeparatePages:
    """New tokens for `gpu_kernel.run`."""
    (k, k_scales), (v, v_scales) = (layout.to_stored(x, spec.page.key_dtype) for x in (operands.k_new, operands.v_new))
    # The kernel loads a fixed number of tokens at once.
    missing = max(gpu_sizes.padded_new_tokens(spec) - spec.num_tokens, 0)
    k, v = (jnp.pad(x, ((0, missing), (0, 0), (0, 0))) for x in (k, v))
    if k_scales is None:
        return SeparatePages(k, v)
    scales = jnp.stack([k_scales, v_scales], axis=1)
    # The new tokens of a sequence lie in at most two blocks of keys.
    first_new = operands.kv_lengths - operands.query_lengths
    token = jnp.arange(2 * BLOCK_KEYS) - (first_new % BLOCK_KEYS)[:, None] + operands.query_starts[:, None]
    aligned = scales.at[jnp.clip(token, 0, spec.num_tokens - 1)].get(mode="promise_in_bounds")
    aligned = aligned.reshape(spec.num_sequences, 2, BLOCK_KEYS, 2, spec.num_kv_heads)
    return SeparatePages(k, v, scales, aligned.transpose(0, 1, 3, 4, 2))


def _row_facts(operands: PagedOperands, plan: SplitPlan, spec: PagedSpec, shape: SplitPlanShape) -> dict:
    """The `rows` of `gpu_kernel.run`."""
    size = gpu_sizes.kernel_sizes(spec, shape, _appends_in_kernel(spec))
    facts, widths = {}, {"aux": size.aux_rows, "sinks": size.rows}
    if operands.ancestors is not None:
        bits = operands.ancestors[plan.row_token]
        depth = lax.population_count(bits).astype(jnp.int32) - 1
        facts["aux"] = jnp.stack([lax.bitcast_convert_type(bits, jnp.int32), depth], axis=1)
    if operands.sinks is not None:
        sinks = operands.sinks.reshape(spec.num_kv_heads, spec.num_groups) * LOG2_E
        facts["sinks"] = sinks[:, plan.row_group].swapaxes(0, 1)
    return {name: jnp.pad(fact, ((0, 0), (0, 0), (0, widths[name] - shape.out_rows))) for name, fact in facts.items()}
