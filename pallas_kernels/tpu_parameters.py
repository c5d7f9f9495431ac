"""Facts of the TPU that kernels are traced for, and the compiler parameters that all of them share."""

import os
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuning

# Set to 1, a kernel stops where a copy leaves its array or where a semaphore ends with a count. A copy of a page then
# takes 32 bundles to start instead of 17 (v6e), and attention starts one for each page and sequence.
CHECKS_VARIABLE = "JAXINFER_TPU_CHECKS"
# Vector memory of a core: 16 MiB on v4; elsewhere at least 64 MiB, of which no kernel takes all.
VMEM_BYTES, SMALL_VMEM_BYTES = 64 << 20, {"tpu_v4": 16 << 20}


def has_checks() -> bool:
    """True if kernels are traced with checks of their copies' bounds and of their semaphores."""
    return os.environ.get(CHECKS_VARIABLE, "") not in ("", "0")


def compiler_params(**options: Any) -> pltpu.CompilerParams:
    """The parameters of a kernel: `options` of `pltpu.CompilerParams`, without checks unless `has_checks`."""
    is_off = not has_checks()
    return pltpu.CompilerParams(disable_bounds_checks=is_off, disable_semaphore_checks=is_off, **options)


def num_cores() -> int:
    """Cores of a device that share the steps of a kernel's parallel grid: 2 on v4 and v5p, else 1."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    known = getattr(jax.devices()[0] if device is None else device, "num_cores", None)
    return known if isinstance(known, int) and tuning.chip().startswith("tpu") else 1


def vmem_bytes() -> int:
    """Bytes of vector memory that a kernel may count on."""
    return SMALL_VMEM_BYTES.get(tuning.chip(), VMEM_BYTES)
