"""Which implementation is taken is tested with each operation; here, that the others are not even imported."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_cpu_does_not_import_the_kernels_of_other_chips():
    """They take a third of a second of every start."""
    code = """
        import sys
        import jax.numpy as jnp
        from pallas_kernels import flash_attention
        x = jnp.zeros((1, 4, 2, 8))
        flash_attention(x, x, x)
        found = [name for name in sys.modules if name.startswith("jax.experimental.") and "pallas" in name]
        assert not found, found
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    subprocess.run([sys.executable, "-c", lines], check=True)
