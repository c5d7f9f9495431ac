"""Paged attention on CPUs: a kernel that reads pages where they lie, compiled by Numba (`cpu_kernels.paged_attention`).

XLA appends the new tokens, and divides the work into equal parts for the kernel's threads.
"""

import platform as machine
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cpu_kernels import kernels
from pallas_kernels import cpu_calls
from pallas_kernels.paged_attention import layout
from pallas_kernels.paged_attention.reference import token_places, write_places
from pallas_kernels.paged_attention.rotation import LEVEL_STEP
from pallas_kernels.paged_attention.specs import DIVIDED_PAGES, SHORT_QUERIES, PagedOperands, PagedSpec

NAME = "jaxinfer_paged_attention"  # of the kernel
LAYOUT = "separate"
KINDS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int4")
# Of numbers as the kernel converts them.
FACTORS = {"float8_e4m3fn": 256.0, "int4": LEVEL_STEP}
MAX_ROWS = 64  # queries times heads of a unit


class StepUnits(NamedTuple):
    """Everything of a step that is the same in all layers.

    Attributes:
      is_real: bool [T], False for padding.
      bounds: int32 [parts + 1], the first unit of each part, and the end.
      lengths: int32 [S] each: first rows, new tokens, and keys of the sequences.
      page, slot: int32 [T], where each token's key and value go; padding has a page beyond the last.
    """

    is_real: jax.Array
    bounds: jax.Array
    page_table: jax.Array
    lengths: tuple[jax.Array, jax.Array, jax.Array]
    page: jax.Array
    slot: jax.Array


def unsupported(spec: PagedSpec, platform: str) -> str | None:
    """The reason why the kernel cannot run `spec` on `platform`, or None."""
    if (reason := cpu_calls.unsupported(platform)) is not None:
        return reason
    if spec.num_parts > 1:
        return DIVIDED_PAGES
    if spec.layout == "interleaved":
        return "it reads separate or bits pages, not interleaved"
    if spec.page.is_rotated and spec.head_dim % 32:
        return f"head_dim={spec.head_dim} is no multiple of 32: the halves of an int4 vector are whole vectors"
    if spec.page.is_narrow_float and spec.page.dtype != "bfloat16" and not _has_half_conversions():
        return f"this CPU has no instruction that converts float16, as a {spec.page.dtype} cache needs"
    if 0 in (spec.num_tokens, spec.num_sequences, spec.pages_per_sequence):
        return "the call has no tokens, sequences or pages"
    return None


def _has_half_conversions() -> bool:
    from llvmlite.binding import get_host_cpu_features

    return machine.machine() not in ("x86_64", "AMD64") or bool(get_host_cpu_features().get("f16c"))


def _tiles(spec: PagedSpec) -> tuple[int, int]:
    """Queries of an item, and query heads of a unit."""
    groups = min(spec.num_groups, MAX_ROWS)
    return max(1, min(SHORT_QUERIES, spec.max_query_length, MAX_ROWS // groups)), groups


def make_schedule(spec: PagedSpec, page_table, query_starts, query_lengths, kv_lengths) -> StepUnits:
    """Numbers units by sequence, item and head."""
    places = token_places(spec, query_starts, query_lengths, kv_lengths)
    page, slot = write_places(spec, page_table, places)
    queries, groups = _tiles(spec)
    tiles = -(-spec.num_groups // groups)
    units_of_item = spec.num_kv_heads * tiles
    num_items = -(-query_lengths // queries)
    ends = _running_sum(num_items)
    bounds = _bounds(spec, queries, units_of_item, ends, ends - num_items, query_lengths, kv_lengths)
    return StepUnits(places.is_real, bounds, page_table, (query_starts, query_lengths, kv_lengths), page, slot)


def _bounds(spec: PagedSpec, queries: int, units_of_item: int, ends, first, query_lengths, kv_lengths) -> jax.Array:
    """The first unit of each part, and the end: `first` and `ends` are the items of each sequence."""
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
    # Parts of prompts take long enough that a core may be late: there are four for each.
    parts_of_core = 4 if spec.max_query_length > SHORT_QUERIES else 1
    # Reading a key takes about as long as 4 queries of it.
    cost = jnp.where(count > 0, (num_keys * (count + 4)).astype(jnp.float32), 0.0)
    after = _running_sum(cost)
    middle = (after - cost)[:, None] + cost[:, None] * ((np.arange(units_of_item) + 0.5) / units_of_item)
    num_parts = parts_of_core * cpu_calls.num_parts(capacity * units_of_item, parts_of_core)
    shares = np.arange(1, num_parts) / num_parts * after[-1]
    inner = jnp.sum((middle[..., None] < shares) & (count > 0)[:, None, None], axis=(0, 1), dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), inner, (ends[-1] * units_of_item)[None]])


def _running_sum(numbers: jax.Array) -> jax.Array:
    """By comparisons of all pairs: XLA's running sum takes longer to compile."""
    index = jnp.arange(numbers.shape[0])
    return jnp.sum(jnp.where(index[:, None] >= index, numbers, 0), axis=1, dtype=numbers.dtype)


def attention(operands: PagedOperands, spec: PagedSpec, schedule: StepUnits) -> tuple[jax.Array, layout.Pages]:
    return _attention(operands, schedule, spec)


# jit: traced once for all layers of a model.
@partial(jax.jit, static_argnums=2)
def _attention(operands: PagedOperands, schedule: StepUnits, spec: PagedSpec):
    pages = layout.append(operands.pages, operands.k_new, operands.v_new, schedule.page, schedule.slot)
    out = jnp.where(schedule.is_real[:, None, None], _call(operands, schedule, spec, pages), 0)
    return out.astype(operands.q.dtype), pages


def _call(operands: PagedOperands, schedule: StepUnits, spec: PagedSpec, pages: Any) -> jax.Array:
    queries, groups = _tiles(spec)
    max_rows = max(queries * groups, min(MAX_ROWS, queries * spec.num_q_heads))
    kinds = spec.page.key_dtype, spec.page.value_dtype
    sizes = [queries, groups, spec.window or 0, spec.page.has_scales, spec.has_sinks, spec.has_ancestors]
    sizes += [KINDS.index(kind) for kind in kinds]
    sizes += [1 if kind == "int4" else jnp.dtype(kind).itemsize for kind in kinds]
    sizes += [spec.value_dim, max_rows]
    factors = [FACTORS.get(kind, 1.0) for kind in kinds]
    nothing = jnp.zeros(0, jnp.float32)
    arrays = (
        operands.q.astype(jnp.float32),
        *_stored(pages, spec, nothing),
        schedule.page_table,
        *schedule.lengths,
        operands.sinks if spec.has_sinks else nothing,
        operands.ancestors if spec.has_ancestors else nothing,
        schedule.bounds,
        jnp.array(sizes, jnp.int32),
        jnp.array([spec.soft_cap or 0.0, spec.scale * factors[0], factors[1]], jnp.float32),
    )
    shape = jax.ShapeDtypeStruct((spec.num_tokens, spec.num_q_heads, spec.value_dim), jnp.float32)
    return cpu_calls.call(register(), shape, arrays)


def _stored(pages: Any, spec: PagedSpec, nothing: jax.Array) -> tuple[jax.Array, ...]:
    """Keys, values, and the scales of both or `nothing`."""
    values = pages.v if spec.page.has_values else pages.k
    if not spec.page.has_scales:
        return pages.k, values, nothing, nothing
    return pages.k, values, pages.k_scales, pages.v_scales if spec.page.has_values else pages.k_scales


def register() -> str:
    """The registered name of the kernel."""
    from cpu_kernels.paged_attention.kernel import attention_handler

    return kernels.register(NAME, attention_handler)
