"""Compiler parameters that all TPU kernels share: checks of their copies, which tests have and ordinary use has not."""

import os
from typing import Any

from jax.experimental.pallas import tpu as pltpu

# Set to 1, a kernel stops where a copy leaves its array or where a semaphore ends with a count. A copy of a page then
# takes 32 bundles to start instead of 17 (v6e), and attention starts one for each page and sequence.
CHECKS_VARIABLE = "JAXINFER_TPU_CHECKS"


def has_checks() -> bool:
    """True if kernels are traced with checks of their copies' bounds and of their semaphores."""
    return os.environ.get(CHECKS_VARIABLE, "") not in ("", "0")


def compiler_params(**options: Any) -> pltpu.CompilerParams:
    """The parameters of a kernel: `options` of `pltpu.CompilerParams`, without checks unless `has_checks`."""
    is_off = not has_checks()
    return pltpu.CompilerParams(disable_bounds_checks=is_off, disable_semaphore_checks=is_off, **options)
