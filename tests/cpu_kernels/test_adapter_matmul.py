"""The kernel of adapters as it is compiled for other processors."""

import subprocess
import sys

import pytest

from tests.cpu_kernels.packed_matmul.test_instruction_sets import environment

pytest.importorskip("numba", reason="kernels for CPUs need Numba")

COMPARE = """
import numpy as np
from tests.pallas_kernels.adapter_matmul.test_adapter_matmul import CALLS
for name, call in CALLS.items():
    together = call.results("numba_cpu")
    for found, expected in zip(together, call.expected()):
        np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max(), err_msg=name)
    for row in range(min(len(call.ids), 9)):
        for found, expected in zip(call.rows([row]).results("numba_cpu"), together):
            np.testing.assert_array_equal(found[0], expected[row], err_msg=name)
"""


@pytest.mark.slow
def test_adapters_on_avx2(tmp_path):
    """Against float64, and a row by itself has the same bits."""
    subprocess.run([sys.executable, "-c", COMPARE], env=environment("haswell", str(tmp_path)), check=True)
