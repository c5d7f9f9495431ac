"""Products with a tied embedding [outputs, inputs] on a TPU, with groups along the inputs: integers are read as stored.

The look-up of tokens needs rows of the embedding together, and XLA:TPU multiplies by its groups only in the other
layout: it writes a second head in each dispatch, 168 MB and 134 MB of padded scales for [262144, 640] of int8.

A grid step has a block of outputs and a tile of rows. Inputs are taken in chunks of 128 or of one group, whichever is
more. Groups of a chunk share its 128 lanes, so each multiplies a copy of the rows that is zero outside the group, in
one product: 4 times the FLOPs for groups of 32, in the time that the weight takes to arrive for up to 64 rows. Integers
are exact in bfloat16; a product is scaled when it is added to the total.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.platform import is_tpu_interpreted, missing_platform
from pallas_kernels.quantized_matmul.dequantize import code_zero
from pallas_kernels.quantized_matmul.specs import MatmulSpec, WeightReads
from pallas_kernels.tpu_parameters import compiler_params

LANES, SUBLANES = 128, 8
MAX_TILE_ROWS = 128
# Of a block of the weight, and of the float32 products of a chunk: two blocks of each are in vector memory.
BLOCK_BYTES, PRODUCT_BYTES = 2**20, 2**21
MAX_BLOCK_OUTPUTS = 1024


def unsupported(spec: MatmulSpec, platform: str) -> str | None:
    if not is_tpu_interpreted() and (reason := missing_platform("tpu", platform)) is not None:
        return reason
    if not spec.is_transposed or not spec.is_grouped:
        return "XLA fuses products with weights [inputs, outputs], and with a scale per output"
    if spec.values_dtype not in ("int4", "int8"):
        return f"the TPU kernel reads int4 and int8, not {spec.values_dtype}"
    if spec.activations is not None:
        return "the TPU kernel multiplies floating-point activations"
    size, across = spec.block
    if across != 1 or spec.inputs % size or (LANES % size and size % LANES):
        return (
            f"the TPU kernel takes whole groups that divide {LANES} inputs or are multiples, not blocks of {spec.block}"
        )
    if jax.sharding.get_abstract_mesh().size > 1:
        return "weights are sharded over several devices, and only XLA partitions its own products"
    if 0 in (spec.rows, spec.inputs, spec.outputs):
        return "the product is empty"
    return None


def form(spec: MatmulSpec, platform: str) -> str:
    """A description of how the product is computed, for people."""
    return "weights converted in registers, a product per group, then scale and sum"


def weight_reads(spec: MatmulSpec, platform: str) -> WeightReads:
    """A block of outputs stays in vector memory while all rows multiply it."""
    return WeightReads()


def block_outputs(spec: MatmulSpec) -> int:
    """Outputs of a block: a multiple of 128."""
    parts = max(LANES // spec.block[0], 1)
    of_weight = BLOCK_BYTES // spec.inputs
    of_products = PRODUCT_BYTES // (4 * parts * tile_rows(spec.rows))
    fitting = min(of_weight, of_products, MAX_BLOCK_OUTPUTS, spec.outputs + LANES - 1)
    return max(fitting // LANES * LANES, LANES)


def tile_rows(rows: int) -> int:
    """Rows of x in a tile."""
    return min(-(-rows // SUBLANES) * SUBLANES, MAX_TILE_ROWS)


def matmul(x, values, scales, zeros, codebook, minima, spec: MatmulSpec, platform: str) -> jax.Array:
    """float32 [rows, N] of x [rows, K]; the weight's arrays are [N, K]."""
    size, columns = tile_rows(spec.rows), block_outputs(spec)
    num_groups = spec.inputs // spec.block[0]
    x = jnp.pad(x, ((0, -spec.rows % size), (0, 0)))
    of_outputs = pl.BlockSpec((num_groups, columns), lambda output, row: (0, output))
    # XLA keeps the scales of a few groups transposed already: their own axis would be padded to 128.
    numbers = [array.T for array in (scales, zeros, minima) if array is not None]
    inputs = [x, values, *numbers]
    in_specs = [
        pl.BlockSpec((size, spec.inputs), lambda output, row: (row, 0)),
        pl.BlockSpec((columns, spec.inputs), lambda output, row: (output, 0)),
        *[of_outputs] * len(numbers),
    ]
    if codebook is not None:
        inputs.append(codebook)
        in_specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
    num_blocks = pl.cdiv(spec.outputs, columns)
    weight_bits = jax.dtypes.itemsize_bits(values.dtype)
    kernel = partial(
        _kernel,
        group=spec.block[0],
        has_zeros=zeros is not None,
        has_minima=minima is not None,
        precision=_precision(x),
    )
    product = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((len(x), spec.outputs), jnp.float32),
        grid=(num_blocks, len(x) // size),
        in_specs=in_specs,
        out_specs=pl.BlockSpec((size, columns), lambda output, row: (row, output)),
        compiler_params=compiler_params(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(x) * spec.inputs * spec.outputs * max(LANES // spec.block[0], 1),
            bytes_accessed=values.size * weight_bits // 8
            + sum(array.size * array.dtype.itemsize for array in numbers)
            + (x.nbytes if len(x) == size else num_blocks * x.nbytes)
            + 4 * len(x) * spec.outputs,
            transcendentals=0,
        ),
        name="quantized_matmul",
    )(*inputs)
    return product[: spec.rows]


def _kernel(
    x_ref,
    w_ref,
    scales_ref,
    *refs,
    group: int,
    has_zeros: bool,
    has_minima: bool,
    precision: lax.Precision | None,
):
    out_ref, refs = refs[-1], list(refs[:-1])
    zeros_ref = refs.pop(0) if has_zeros else None
    minima_ref = refs.pop(0) if has_minima else None
    codebook_ref = refs.pop(0) if refs else None
    (rows, inputs), chunk, dtype = x_ref.shape, max(group, LANES), x_ref.dtype
    total = jnp.zeros(out_ref.shape, jnp.float32)
    for start in range(0, inputs, chunk):
        width = min(chunk, inputs - start)
        x = x_ref[:, start : start + width]
        parts = [x]
        if width > group:
            of_lane = lax.broadcasted_iota(jnp.int32, x.shape, 1) // group
            parts = [jnp.where(of_lane == part, x, jnp.zeros_like(x)) for part in range(width // group)]
        weight = w_ref[:, start : start + width]
        weight = weight.astype(dtype) if codebook_ref is None else _look_up(weight, codebook_ref).astype(dtype)
        masked = jnp.concatenate(parts, axis=0)
        products = lax.dot_general(
            masked, weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        for part, own in enumerate(parts):
            at = start // group + part
            product = products[part * rows : (part + 1) * rows]
            sums = jnp.sum(own.astype(jnp.float32), axis=1, keepdims=True)
            if zeros_ref is not None:
                product = product - sums * zeros_ref[at : at + 1, :].astype(jnp.float32)
            if minima_ref is not None:
                product = product - sums * code_zero(w_ref)
            total = total + product * scales_ref[at : at + 1, :].astype(jnp.float32)
            if minima_ref is not None:
                total = total + sums * minima_ref[at : at + 1, :].astype(jnp.float32)
    out_ref[...] = total


def _look_up(values: jax.Array, codebook_ref) -> jax.Array:
    """codebook[value + 8], as `dequantize.look_up` on a TPU, of entries in scalar memory."""
    codes = values.astype(jnp.int32) + 8
    entries: list = [jnp.full(codes.shape, codebook_ref[entry]) for entry in range(16)]
    for bit in range(4):
        is_odd = (codes >> bit) & 1 == 1
        entries = [jnp.where(is_odd, high, low) for low, high in zip(entries[::2], entries[1::2], strict=True)]
    return entries[0]


def take_rows(array: jax.Array, indices: jax.Array) -> jax.Array:
    """array[indices] of [V, G] numbers of groups, which XLA keeps transposed: each row is a column of a block of 128.

    A gather by XLA:TPU writes them padded to 128 columns first, 134 MB for [262144, 20].
    """
    num_rows, num_groups = array.shape
    count = len(indices)
    padded = jnp.pad(jnp.clip(indices.astype(jnp.int32), 0, num_rows - 1), (0, -count % SUBLANES))

    def block(part: int) -> pl.BlockSpec:
        return pl.BlockSpec((num_groups, LANES), lambda step, taken: (0, taken[step * SUBLANES + part] // LANES))

    columns = pl.pallas_call(
        _take_kernel,
        out_shape=jax.ShapeDtypeStruct((num_groups, len(padded)), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(padded) // SUBLANES,),
            in_specs=[block(part) for part in range(SUBLANES)],
            out_specs=pl.BlockSpec((num_groups, len(padded)), lambda step, taken: (0, 0)),
        ),
        compiler_params=compiler_params(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=0,
            bytes_accessed=len(padded) * num_groups * (LANES * array.dtype.itemsize + 4),
            transcendentals=0,
        ),
        name="take_rows",
    )(padded, *[array.T] * SUBLANES)
    return columns.T[:count].astype(array.dtype)


def _take_kernel(taken_ref, *refs):
    out_ref, step = refs[-1], pl.program_id(0)

    @pl.when(step == 0)
    def _():
        out_ref[...] = jnp.zeros(out_ref.shape, out_ref.dtype)

    columns = out_ref[...]
    of_row = lax.broadcasted_iota(jnp.int32, columns.shape, 1)
    for part, ref in enumerate(refs[:-1]):
        at = step * SUBLANES + part
        values = ref[...].astype(jnp.float32)
        is_taken = lax.broadcasted_iota(jnp.int32, values.shape, 1) == taken_ref[at] % LANES
        column = jnp.sum(jnp.where(is_taken, values, 0.0), axis=1, keepdims=True)
        columns = jnp.where(of_row == at, column, columns)
    out_ref[...] = columns


def _precision(x: jax.Array) -> lax.Precision | None:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
