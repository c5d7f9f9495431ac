"""Paged attention on TPUs: operands and results of the Pallas calls of `tpu_kernel`."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuning
from pallas_kernels.paged_attention import layout, tpu_kernel, tpu_schedule
from pallas_kernels.paged_attention.layout import InterleavedPages
from pallas_kernels.paged_attention.specs import DIVIDED_PAGES, PagedOperands, PagedSpec
from pallas_kernels.paged_attention.tpu_program import KernelProgram, Refs
from pallas_kernels.paged_attention.tpu_schedule import ScaleBlocks, TpuSchedule, WorkItems
from pallas_kernels.platform import is_tpu_interpreted, missing_platform
from pallas_kernels.tpu_parameters import compiler_params, num_cores

LAYOUT = "interleaved"
# For the tuner.
tunable, candidates = tpu_schedule.tunable, tpu_schedule.candidates
_Q_DTYPES = ("float32", "bfloat16")
_CACHE_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4")
_CACHES_OF_8_BIT_FLOATS = ("float8_e4m3fn", "float8_e5m2", "int4")
_SCALARS = ("items", "count", "page_ids", "scale_pages", "ancestors", "depths")


def unsupported(spec: PagedSpec, platform: str) -> str | None:
    """The reason why the kernel cannot run `spec` on `platform`, or None. The interpreter runs on any platform."""
    if not is_tpu_interpreted() and (reason := missing_platform("tpu", platform)) is not None:
        return reason
    if spec.num_parts > 1:
        return DIVIDED_PAGES
    if not spec.page.has_values:
        return f"pages of {spec.head_dim} have no values of their own (multi-head latent attention)"
    if spec.layout != LAYOUT:
        return f"it reads the {LAYOUT} layout, not {spec.layout}"
    if spec.q_dtype not in _Q_DTYPES:
        return f"the TPU kernel takes queries of {' or '.join(_Q_DTYPES)}, not {spec.q_dtype}"
    if spec.page.dtype not in _CACHE_DTYPES:
        return f"the TPU kernel reads caches of {', '.join(_CACHE_DTYPES)}, not {spec.page.dtype}"
    if tuning.chip() == "tpu_v4" and spec.page.dtype in _CACHES_OF_8_BIT_FLOATS:
        return f"a v4 multiplies no 8-bit floats, which the kernel makes of a cache of {spec.page.dtype}"
    if not tpu_schedule.groups(spec):
        available = tpu_schedule.SMEM_BYTES - tpu_schedule.SMEM_RESERVED_BYTES
        needed = tpu_schedule.smem_bytes(spec, 1)
        return (
            f"page ids and work items take {needed:,} of {available:,} bytes of scalar memory "
            f"(one sequence of {spec.pages_per_sequence} pages): use larger pages than {spec.page_size}"
        )
    for program in _programs(spec):
        if (needed := program.vmem_bytes()) > (limit := tpu_schedule.vmem_limit()):
            return (
                f"{program.sizes} needs {needed:,} of {limit:,} bytes of vector memory "
                f"for {spec.num_q_heads} query and {spec.num_kv_heads} key heads of {spec.head_dim}"
            )
    return None


def make_schedule(spec: PagedSpec, page_table, query_starts, query_lengths, kv_lengths) -> TpuSchedule:
    """The work items of a step; see `tpu_schedule`."""
    return tpu_schedule.make_schedule(spec, page_table, query_starts, query_lengths, kv_lengths)


def attention(operands: PagedOperands, spec: PagedSpec, schedule: TpuSchedule) -> tuple[jax.Array, InterleavedPages]:
    """Appends and attends, see `paged_attention`. A donated cache is updated in place.

    The output replaces the rows of q in place, so padding rows keep their query.
    """
    k, k_scales = layout.to_stored(operands.k_new, spec.page.key_dtype)
    v, v_scales = layout.to_stored(operands.v_new, spec.page.value_dtype)
    arrays = {
        "new_tokens": layout.interleave(k, v, spec.page),
        "rows": _pack_queries(operands.q, spec),
        "cache": operands.pages.kv,
    }
    scalars = {}
    if schedule.scale_blocks is not None:
        scalars["scale_pages"] = schedule.scale_blocks.pages
        arrays["cache_scales"] = operands.pages.scales
        arrays["new_scales"] = _merge_scales(operands.pages.scales, k_scales, v_scales, schedule.scale_blocks)
    if spec.has_ancestors:
        scalars["ancestors"] = operands.ancestors.astype(jnp.int32)
        scalars["depths"] = jax.lax.population_count(operands.ancestors).astype(jnp.int32) - 1
    for program, calls in zip(_programs(spec), schedule.items, strict=True):
        if spec.has_sinks:
            arrays["sinks"] = _pack_sinks(operands.sinks, program)
        for page_ids, items in zip(schedule.page_ids, calls, strict=True):
            arrays |= _call(program, items, scalars | {"page_ids": page_ids}, arrays)
    pages = InterleavedPages(arrays["cache"], arrays.get("cache_scales"))
    return _unpack_output(arrays["rows"], spec), pages


def _programs(spec: PagedSpec) -> list[KernelProgram]:
    """The programs of a call: for few new tokens and, if a sequence may have more, for many."""
    sizes = [tpu_schedule.program_sizes(spec, is_long) for is_long in tpu_schedule.kinds(spec)]
    return [KernelProgram(spec, size, num_cores()) for size in sizes]


def _call(program: KernelProgram, items: WorkItems, scalars: dict, arrays: dict) -> dict:
    """Runs one program; returns the arrays that it updates in place."""
    scalars = scalars | {"items": items.fields, "count": items.count}
    scalars = {name: scalars[name] for name in _SCALARS if name in scalars}
    updated = [name for name in ("rows", "cache", "cache_scales") if name in arrays]
    scratch = program.scratch()
    # The cores of a chip take its steps in parallel.
    grid = (program.num_cores,) if program.num_cores > 1 else ()
    names = [*scalars, *arrays, *(f"{name} out" for name in updated), *scratch]

    def kernel(*refs):
        refs = dict(zip(names, refs, strict=True))
        # Updated arrays are both an input and an output, in the same memory.
        refs |= {name: refs.pop(f"{name} out") for name in updated}
        tpu_kernel.run(program, Refs(**refs, core=pl.program_id(0) if grid else 0, num_cores=program.num_cores))

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    shapes: list = [jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in updated]
    if not is_tpu_interpreted():
        # XLA else moves the pages of a small pool, and the scales of any, to vector memory and back for each kernel.
        shapes = [
            shape if name == "rows" else pltpu.HBM(shape.shape, shape.dtype)
            for name, shape in zip(updated, shapes, strict=True)
        ]
    results = pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM) if name == "sinks" else in_hbm for name in arrays],
            out_specs=[in_hbm] * len(updated),
            scratch_shapes=list(scratch.values()),
        ),
        input_output_aliases={len(scalars) + list(arrays).index(name): index for index, name in enumerate(updated)},
        cost_estimate=_cost(program),
        compiler_params=compiler_params(
            vmem_limit_bytes=tpu_schedule.vmem_limit(), dimension_semantics=("parallel",) * len(grid)
        ),
        name=f"paged_attention_{program.sizes.num_queries}_queries",
    )(*scalars.values(), *arrays.values())
    return dict(zip(updated, results, strict=True))


def _pack_queries(q: jax.Array, spec: PagedSpec) -> jax.Array:
    """q [T, Hq, K] as [T, Hkv, G, lanes], padded with rows and lanes of zeros."""
    q = q.reshape(spec.num_tokens, spec.num_kv_heads, spec.num_groups, spec.head_dim)
    rows = tpu_schedule.rows_of_group(spec)
    return jnp.pad(q, [(0, 0), (0, 0), (0, rows - spec.num_groups), (0, spec.page.num_lanes - spec.head_dim)])


def _unpack_output(rows: jax.Array, spec: PagedSpec) -> jax.Array:
    # If a row has key and value, the product with the values is in its second half.
    start = layout.LANES // 2 if spec.page.is_side_by_side else 0
    out = rows[:, :, : spec.num_groups, start : start + spec.head_dim]
    return out.reshape(spec.num_tokens, spec.num_q_heads, spec.head_dim)


def _pack_sinks(sinks: jax.Array, program: KernelProgram) -> jax.Array:
    """Sinks [Hq] as [heads, rows, 128]: the heads of a group, repeated to at least the rows of a register."""
    spec, rows = program.spec, program.group_rows
    sinks = jnp.pad(sinks.reshape(spec.num_kv_heads, spec.num_groups), [(0, 0), (0, rows - spec.num_groups)])
    sinks = jnp.tile(sinks, (1, max(1, layout.SUBLANES // rows)))
    return jnp.broadcast_to(sinks[..., None], (*sinks.shape, layout.LANES))


def _merge_scales(scales: jax.Array, k_scales: jax.Array, v_scales: jax.Array, blocks: ScaleBlocks) -> jax.Array:
    """Scales [blocks, 2 Hkv, lanes] of the pages that receive tokens, with those of the new tokens merged.

    k_scales, v_scales [T, Hkv]. The kernel writes the merged blocks.
    """
    old = scales.at[blocks.pages].get(mode="promise_in_bounds")
    new = jnp.stack([k_scales, v_scales], axis=-1).reshape(k_scales.shape[0], -1)
    new = new.at[blocks.rows].get(mode="fill", fill_value=0, wrap_negative_indices=False).swapaxes(1, 2)
    new = jnp.pad(new, [(0, 0), (0, old.shape[1] - new.shape[1]), (0, 0)])
    is_real_row = jnp.arange(old.shape[1])[:, None] < 2 * k_scales.shape[1]
    return jnp.where((blocks.rows >= 0)[:, None, :] & is_real_row, new, old)


def _cost(program: KernelProgram) -> pl.CostEstimate:
    """Upper bound: sequences fill the page table, and every query sees all keys, or all of its window."""
    spec = program.spec
    keys = spec.max_kv_length if spec.window is None else min(spec.window, spec.max_kv_length)
    token_bytes = spec.page.num_rows * spec.page.num_lanes * jnp.dtype(spec.page.element_dtype).itemsize
    if spec.page.has_scales:
        token_bytes += 2 * spec.num_kv_heads * 4
    num_queries = min(spec.num_tokens, spec.num_sequences * spec.max_query_length)
    scores = num_queries * spec.num_q_heads * keys
    row_bytes = spec.num_q_heads * spec.head_dim * jnp.dtype(spec.q_dtype).itemsize
    return pl.CostEstimate(
        flops=4 * scores * spec.head_dim,
        transcendentals=scores * (2 if spec.soft_cap is not None else 1),
        bytes_accessed=(spec.num_sequences * keys + 2 * spec.num_tokens) * token_bytes + 2 * num_queries * row_bytes,
    )
