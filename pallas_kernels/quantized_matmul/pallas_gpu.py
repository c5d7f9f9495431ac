"""Products with group-wise int4 and int8 weights on Hopper (Pallas Mosaic GPU): dequantized in registers.

wgmma takes its left operand from registers, so the product is computed transposed, weight.T @ x.T: the 64 rows of a
tile are outputs, and a batch of 8 needs no padding. A thread block of one warpgroup keeps several steps of weights and
activations in flight by TMA. A step is one group of inputs: the weights' integers are converted to bfloat16 in
registers, which is exact, and the product is scaled when it is added to the total. If there are too few output tiles to
fill the chip, several blocks share the groups of a tile (`gpu_blocks`), and XLA adds their totals in the order of the
groups, in the fusion that reads the result.

The weights of an output must be contiguous, [N, K] in memory (`jaxinfer.quantization.on_device`); XLA copies weights of
another layout on every call.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu_compat as compat
from pallas_kernels.platform import missing_platform
from pallas_kernels.quantized_matmul.gpu_blocks import TILE_OUTPUTS, plan, tile_rows
from pallas_kernels.quantized_matmul.specs import GPU_KERNEL_BLOCKS, MatmulSpec, WeightReads

_ROW = plgpu.Layout.WGMMA.reduce(1)
_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def unsupported(spec: MatmulSpec, platform: str) -> str | None:
    if (reason := missing_platform("gpu", platform)) is not None:
        return reason
    if spec.values_dtype not in ("int4", "int8") or spec.has_codebook:
        return "the GPU kernel is for integers"
    if spec.has_minima:
        return "the GPU kernel takes integers as zeros, not minima"
    if spec.activations is not None:
        return "the GPU kernel multiplies floating-point activations"
    if spec.is_transposed:
        return "the GPU kernel multiplies by weights [inputs, outputs]"
    if not spec.is_grouped:
        return "XLA fuses products with a scale per output"
    if spec.block not in GPU_KERNEL_BLOCKS:
        return f"the GPU kernel takes groups of 64 or 128 inputs, not blocks of {spec.block}"
    if spec.x_dtype != "bfloat16":
        return f"the GPU kernel takes bfloat16, not {spec.x_dtype}"
    if jax.sharding.get_abstract_mesh().size > 1:
        return "weights are sharded over several devices, and only XLA partitions its own products"
    if spec.inputs % spec.block[0] or spec.outputs % TILE_OUTPUTS:
        return (
            f"the GPU kernel takes whole groups and outputs in multiples of {TILE_OUTPUTS}, "
            f"not {spec.inputs} x {spec.outputs}"
        )
    return compat.not_hopper()


def form(spec: MatmulSpec, platform: str) -> str:
    """A description of how the product is computed, for people."""
    return "weights converted in registers, a product per group, then scale and sum"


def weight_reads(spec: MatmulSpec, platform: str) -> WeightReads:
    """Every tile of rows reads the weight."""
    return WeightReads(passes=pl.cdiv(spec.rows, tile_rows(spec.rows)))


def matmul(x, values, scales, zeros, codebook, minima, spec: MatmulSpec, platform: str) -> jax.Array:
    """float32 [rows, N] of x [rows, K]."""
    made, group = plan(spec), spec.block[0]
    size, splits = made.tile_rows, made.splits
    x = jnp.pad(x, ((0, -spec.rows % size), (0, 0)))
    inputs = [x, values.T, scales]
    if zeros is not None:
        sums = x.reshape(len(x), -1, group).sum(-1, dtype=jnp.float32).T
        inputs += [zeros, sums]
    weight_bits = 4 if spec.values_dtype == "int4" else 8
    cost = pl.CostEstimate(
        flops=2 * len(x) * spec.inputs * spec.outputs,
        bytes_accessed=spec.inputs * spec.outputs * weight_bits // 8
        + sum(array.nbytes for array in (x, *inputs[2:]))
        + splits * len(x) * spec.outputs * 4,
        transcendentals=0,
    )
    partials = compat.kernel(
        partial(_kernel, group=group, size=size, num_steps=made.steps, stages=made.stages),
        out_type=jax.ShapeDtypeStruct((splits, spec.outputs, len(x)), jnp.float32),
        grid=(spec.outputs // TILE_OUTPUTS, len(x) // size, splits),
        grid_names=("output", "row", "split"),
        cost_estimate=cost,
        name="quantized_matmul",
    )(*inputs)
    return partials[:, :, : spec.rows].sum(0).T  # of one row it is fused into what reads it


def _kernel(x_ref, w_ref, scales_ref, *refs, group: int, size: int, num_steps: int, stages: int):
    bits = jax.dtypes.itemsize_bits(w_ref.dtype)
    swizzle = min(group * bits // 8, 128)
    w_transforms = (plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle))
    x_transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    scratch = {
        "x": plgpu.SMEM((stages, size, group), x_ref.dtype, transforms=x_transforms),
        "w": plgpu.SMEM((stages, TILE_OUTPUTS, group), w_ref.dtype, transforms=w_transforms),
        "out": plgpu.SMEM((TILE_OUTPUTS, size), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "done": plgpu.Barrier(),
    }

    def with_scratch(*values):
        smem = dict(zip(scratch, values, strict=True))
        _tile(x_ref, w_ref, scales_ref, refs[:-1], refs[-1], smem, group, size, stages, num_steps)

    pl.run_scoped(with_scratch, *scratch.values())


def _tile(x_ref, w_ref, scales_ref, zero_refs, out_ref, smem, group: int, size: int, stages: int, num_steps: int):
    outputs = pl.ds(lax.axis_index("output") * TILE_OUTPUTS, TILE_OUTPUTS)
    rows = pl.ds(lax.axis_index("row") * size, size)
    split = lax.axis_index("split")
    first = split * num_steps
    shape = (TILE_OUTPUTS, size)

    def load(step):
        slot, inputs = lax.rem(step, jnp.int32(stages)), pl.ds((first + step) * group, group)
        plgpu.copy_gmem_to_smem(w_ref.at[outputs, inputs], smem["w"].at[slot], smem["full"].at[slot])
        plgpu.copy_gmem_to_smem(x_ref.at[rows, inputs], smem["x"].at[slot], smem["full"].at[slot])

    def of_outputs(ref, of_group):
        """Scales or zeros of a group, converted here: an array of them in float32 would be written in every step."""
        return compat.load(ref, (of_group, outputs), _ROW).astype(jnp.float32)

    def step(index, total):
        slot, of_group = lax.rem(index, jnp.int32(stages)), first + index
        # Loaded from GMEM before the wait, in parallel with the copies.
        scale = lax.broadcast_in_dim(of_outputs(scales_ref, of_group), shape, (0,))
        excess = None
        if zero_refs:
            zero = lax.broadcast_in_dim(of_outputs(zero_refs[0], of_group), shape, (0,))
            sums = lax.broadcast_in_dim(compat.load(zero_refs[1], (of_group, rows), _COLUMN), shape, (1,))
            excess = zero * sums
        plgpu.barrier_wait(smem["full"].at[slot])
        product = compat.wgmma(smem["w"][slot].astype(x_ref.dtype), smem["x"].at[slot], transpose_b=True)
        if excess is not None:
            product = product - excess
        # All warps have read the slot before it is filled again; the fence orders their reads before the copy.
        plgpu.barrier_arrive(smem["done"])
        plgpu.barrier_wait(smem["done"])
        plgpu.commit_smem()
        pl.when(index + stages < num_steps)(lambda: load(index + stages))
        return total + product * scale

    lax.fori_loop(0, stages, lambda index, _: load(index), None)
    total = lax.fori_loop(0, num_steps, step, compat.cast_layout(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA))
    smem["out"][...] = total
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem["out"], out_ref.at[split, outputs, rows])
    plgpu.wait_smem_to_gmem(0)
