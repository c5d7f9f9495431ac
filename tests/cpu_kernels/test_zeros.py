import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.cpu_calls import untouched_zeros

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory that is given back is zero on Linux")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("size", [1, 1000, 4096, 5001, 100_003])
def test_memory_that_was_used_reads_as_zeros(size, dtype):
    """Memory that XLA recycles holds what was there."""
    for _ in range(3):
        used = jnp.full((size,), 0x7F, jnp.uint8)
        used.block_until_ready()
        del used
        found = np.asarray(untouched_zeros((size,), jnp.dtype(dtype)))
        assert found.dtype == dtype
        assert not found.view(np.uint8).any()


def test_memory_is_not_resident_before_it_is_written():
    add = jax.jit(lambda pool: pool.at[5, 7].set(1.0), donate_argnums=0)
    add(untouched_zeros((64, 1024), jnp.dtype(jnp.float32)))
    before = _resident_bytes()
    pool = untouched_zeros((2**16, 1024), jnp.dtype(jnp.float32))  # 256 MiB
    place = pool.block_until_ready().unsafe_buffer_pointer()
    pool = add(pool)
    assert pool.unsafe_buffer_pointer() == place
    assert float(pool[5, 7]) == 1.0
    assert float(pool[-1].sum()) == 0.0
    assert _resident_bytes() - before < 32 * 2**20
