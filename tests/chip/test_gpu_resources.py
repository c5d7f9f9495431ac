"""TMA descriptors of the GPU kernels, and their copies, for all shapes of the tests."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.gpu_kernels import CHECKED, KernelCall
from benchmarks.tma_rules import broken_rules, descriptors_of
from pallas_kernels import ahead_of_time
from pallas_kernels import mosaic_gpu_compat as compat


@pytest.fixture(autouse=True)
def _compiler():
    if (reason := ahead_of_time.missing_compiler("h100")) is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("name", CHECKED)
def test_descriptors_break_no_rule(name):
    made = descriptors_of(CHECKED[name]())
    assert bool(made) == (name != "norm")
    assert all(one.shared for one in made)
    assert [rule for one in made for rule in broken_rules(one)] == []


def test_a_window_at_an_odd_place_of_shared_memory_is_noticed():
    """Rows of 64 bytes: the second begins in the middle of 128 bytes."""

    def body(x_ref, out_ref, rows, barrier):
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(0, 8), pl.ds(0, 32)], rows.at[pl.ds(1, 8)], barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(rows.at[pl.ds(0, 8)], out_ref.at[pl.ds(0, 8), pl.ds(0, 32)])
        plgpu.wait_smem_to_gmem(0)

    copied = compat.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((16, 64), jnp.bfloat16),
        grid=(1,),
        grid_names=("block",),
        scratch_types=(plgpu.SMEM((16, 32), jnp.bfloat16), plgpu.Barrier()),
        name="odd_place",
    )
    call = KernelCall("odd_place", lambda x: copied(x), (jax.ShapeDtypeStruct((16, 64), jnp.bfloat16),))
    load, store = descriptors_of(call)
    assert broken_rules(load) == ["shared address at a multiple of 64 bytes, not 128"]
    assert broken_rules(store) == []
