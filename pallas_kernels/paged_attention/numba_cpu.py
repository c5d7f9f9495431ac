"""Paged attention on CPUs: a kernel that reads pages where they lie, compiled by Numba (`numba_kernel`).

XLA appends the new tokens and calls the kernel once for each core, with equal shares of the work.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.numba_cpu import calls
from pallas_kernels.paged_attention import layout
from pallas_kernels.paged_attention.reference import token_places, write_places
from pallas_kernels.paged_attention.rotation import LEVEL_STEP
from pallas_kernels.paged_attention.specs import DIVIDED_PAGES, SHORT_QUERIES, PagedOperands, PagedSpec

LAYOUT = "separate"
KINDS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int4")
MAX_ROWS = 64  # queries times heads of a unit


class StepUnits(NamedTuple):
    """Everything of a step that is the same in all layers.

    Attributes:
      unit: int32 [T, Hq], the unit that computes each row; -1 for padding.
      bounds: int32 [parts + 1], the first unit of each call, and the end.
      lengths: int32 [S] each: first rows, new tokens, and keys of the sequences.
      page, slot: int32 [T], where each token's key and value go; padding has a page beyond the last.
    """

    unit: jax.Array
    bounds: jax.Array
    page_table: jax.Array
    lengths: tuple[jax.Array, jax.Array, jax.Array]
    page: jax.Array
    slot: jax.Array


def unsupported(spec: PagedSpec, platform: str) -> str | None:
    """The reason why the kernel cannot run `spec` on `platform`, or None."""
    if (reason := calls.unsupported(platform)) is not None:
        return reason
    if spec.num_parts > 1:
        return DIVIDED_PAGES
    if spec.layout == "interleaved":
        return "it reads separate or bits pages, not interleaved"
    if spec.page.is_rotated and spec.head_dim % 32:
        return f"head_dim={spec.head_dim} is no multiple of 32: the halves of an int4 vector are whole vectors"
    if 0 in (spec.num_tokens, spec.num_sequences, spec.pages_per_sequence):
        return "the call has no tokens, sequences or pages"
    return None


def _tiles(spec: PagedSpec) -> tuple[int, int]:
    """Queries of an item, and query heads of a unit."""
    groups = min(spec.num_groups, MAX_ROWS)
    return max(1, min(SHORT_QUERIES, spec.max_query_length, MAX_ROWS // groups)), groups


def make_schedule(spec: PagedSpec, page_table, query_starts, query_lengths, kv_lengths) -> StepUnits:
    places = token_places(spec, query_starts, query_lengths, kv_lengths)
    page, slot = write_places(spec, page_table, places)
    queries, groups = _tiles(spec)
    units_of_item = spec.num_kv_heads * -(-spec.num_groups // groups)
    ends = _running_sum(-(-query_lengths // queries))
    first = ends + query_lengths // -queries
    capacity = min(
        -(-spec.num_tokens // queries) + spec.num_sequences,
        spec.num_sequences * -(-spec.max_query_length // queries),
    )
    item = jnp.arange(capacity, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.sum(item[:, None] >= ends, axis=1), spec.num_sequences - 1)
    offset = (item - first[sequence]) * queries
    count = jnp.where(item < ends[-1], jnp.minimum(query_lengths[sequence] - offset, queries), 0)
    num_keys = (kv_lengths - query_lengths)[sequence] + offset + count
    if spec.window is not None:
        num_keys = jnp.minimum(num_keys, spec.window + count)
    cost = jnp.where(count > 0, (num_keys * (count + 4)).astype(jnp.float32), 0.0)
    num_parts = calls.num_parts(capacity * units_of_item)
    before = units_of_item * (_running_sum(cost) - cost)
    middle = before[:, None] + cost[:, None] * (jnp.arange(units_of_item) + 0.5)
    share = jnp.arange(1, num_parts) / num_parts * (before[-1] + cost[-1] * units_of_item)
    inner = jnp.sum((middle[..., None] < share) & (count > 0)[:, None, None], axis=(0, 1), dtype=jnp.int32)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), inner, (ends[-1] * units_of_item)[None]])

    head = np.arange(spec.num_q_heads)
    unit_of_head = head // spec.num_groups * (units_of_item // spec.num_kv_heads) + head % spec.num_groups // groups
    unit = (first[places.sequence] + places.index // queries)[:, None] * units_of_item + unit_of_head
    unit = jnp.where(places.is_real[:, None], unit, -1).astype(jnp.int32)
    return StepUnits(unit, bounds, page_table, (query_starts, query_lengths, kv_lengths), page, slot)


def _running_sum(numbers: jax.Array) -> jax.Array:
    """By comparisons of all pairs: XLA's running sum takes longer to compile."""
    index = jnp.arange(numbers.shape[0])
    return jnp.sum(jnp.where(index[:, None] >= index, numbers, 0), axis=1, dtype=numbers.dtype)


def attention(operands: PagedOperands, spec: PagedSpec, schedule: StepUnits) -> tuple[jax.Array, layout.Pages]:
    return _attention(operands, schedule, spec, schedule.bounds.shape[0] - 1)


# jit with inline=True: traced once for all layers of a model, and the program is the same as without.
@partial(jax.jit, static_argnums=(2, 3))
def _attention(operands: PagedOperands, schedule: StepUnits, spec: PagedSpec, num_parts: int):
    pages = layout.append(operands.pages, operands.k_new, operands.v_new, schedule.page, schedule.slot)
    out = None
    for part in range(num_parts):
        found = _call(operands, schedule, spec, pages, part)
        out = found if out is None else jnp.where((schedule.unit >= schedule.bounds[part])[..., None], found, out)
    out = jnp.where((schedule.unit >= 0)[..., None], out, 0)
    return out.astype(operands.q.dtype), pages


def _call(operands: PagedOperands, schedule: StepUnits, spec: PagedSpec, pages: Any, part: int) -> jax.Array:
    from pallas_kernels.paged_attention import numba_kernel

    queries, groups = _tiles(spec)
    max_rows = max(queries * groups, min(MAX_ROWS, queries * spec.num_q_heads))
    nothing = jnp.zeros(0, jnp.float32)
    has_scales = spec.page.has_scales
    scales = (pages.k_scales, pages.v_scales if spec.page.has_values else pages.k_scales) if has_scales else (nothing,) * 2
    key_kind, value_kind = spec.page.key_dtype, spec.page.value_dtype
    size = [1 if kind == "int4" else jnp.dtype(kind).itemsize for kind in (key_kind, value_kind)]
    sizes = [part, queries, groups, spec.window or 0, has_scales, spec.has_sinks, spec.has_ancestors]
    sizes += [KINDS.index(key_kind), KINDS.index(value_kind), *size, spec.value_dim, max_rows]
    factor = {"float8_e4m3fn": 256.0, "int4": LEVEL_STEP}
    numbers = [spec.soft_cap or 0.0, spec.scale * factor.get(key_kind, 1.0), factor.get(value_kind, 1.0)]
    vecs = -(-spec.head_dim // 16)
    # In one array, since XLA would give all calls the same memory for a result of which nothing is read.
    num_results = spec.num_tokens * spec.num_q_heads * spec.value_dim
    num_floats = num_results + numba_kernel.scratch_floats(max_rows, vecs, -(-spec.value_dim // 16))
    arrays = (
        operands.q.astype(jnp.float32),
        pages.k,
        pages.v if spec.page.has_values else pages.k,
        *scales,
        schedule.page_table,
        *schedule.lengths,
        operands.sinks if spec.has_sinks else nothing,
        operands.ancestors if spec.has_ancestors else nothing,
        schedule.bounds,
        jnp.array(sizes, jnp.int32),
        jnp.array(numbers, jnp.float32),
    )
    found = calls.call(_register(), jax.ShapeDtypeStruct((num_floats,), jnp.float32), arrays)
    return found[:num_results].reshape(spec.num_tokens, spec.num_q_heads, spec.value_dim)


def _register() -> str:
    from pallas_kernels.numba_cpu.frames import register
    from pallas_kernels.paged_attention.numba_kernel import attention_handler

    return register("jaxinfer_paged_attention", attention_handler)
