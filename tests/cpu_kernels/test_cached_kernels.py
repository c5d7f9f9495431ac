"""Kernels that different processes compiled, in one process."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="kernels for CPUs need Numba")

COMPILE = "from cpu_kernels import quantized_matmul; quantized_matmul.{}()"
USE = """
import jax, numpy as np
from pallas_kernels.dense_matmul import dense_matmul
x, weight = (np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((3, 64), (64, 96)))
for is_transposed in (True, False):
    given = np.ascontiguousarray(weight.T) if is_transposed else weight
    found = dense_matmul(jax.numpy.array(x), given, is_transposed=is_transposed, implementation="numba_cpu")
    np.testing.assert_allclose(found, x @ weight, atol=1e-4)
"""


@pytest.mark.slow
def test_functions_of_the_same_name_are_not_confused(tmp_path):
    """Numba's names count a process's functions, so that two kernels may have functions with the same."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    for program in (COMPILE.format("float32"), COMPILE.format("transposed_float32"), USE):
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
