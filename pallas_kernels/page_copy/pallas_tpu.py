"""Page copies as DMAs within HBM, one for each page and array, all in flight at once."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.platform import is_tpu_interpreted, missing_platform
from pallas_kernels.tpu_parameters import compiler_params


def unsupported(_spec: None, platform: str) -> str | None:
    return None if is_tpu_interpreted() else missing_platform("tpu", platform)


def copy(pages, source: jax.Array, destination: jax.Array, is_real: jax.Array):
    leaves, structure = jax.tree.flatten(pages)
    # Valid copies come first, and the loop ends with the last of them.
    order = jnp.argsort(~is_real, stable=True)
    count = is_real.sum(dtype=jnp.int32)[None]
    num_bytes = sum(leaf.nbytes // leaf.shape[0] for leaf in leaves) * source.shape[0]
    in_hbm = [pl.BlockSpec(memory_space=pltpu.HBM)] * len(leaves)
    copied = pl.pallas_call(
        lambda *refs: _kernel(refs[:3], refs[3 + len(leaves) : -1], refs[-1]),
        out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            in_specs=in_hbm,
            out_specs=in_hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={3 + index: index for index in range(len(leaves))},
        compiler_params=compiler_params(),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * num_bytes),
        name="copy_pages",
    )(source[order], destination[order], count, *leaves)
    return jax.tree.unflatten(structure, copied)


def _kernel(scalars, arrays, done):
    source, destination, count = scalars

    def copies(index):
        return [pltpu.make_async_copy(array.at[source[index]], array.at[destination[index]], done) for array in arrays]

    @pl.loop(0, count[0])
    def _(index):
        for copy in copies(index):
            copy.start()

    @pl.loop(0, count[0])
    def _(index):
        for copy in copies(index):
            copy.wait()
