"""The platform that a program is traced for, and its processor."""

import os
from typing import Any

import jax
from jax._src import config

_is_portable = jax.make_user_context(default_value=False)


def portable() -> Any:
    """A context in which programs are traced with operations of XLA alone, without the kernels of any platform, so that
    `jax.export` can write them for all: `with portable(): jax.export.export(function, platforms=["cpu", "tpu"])(...)`.

    Functions that were traced outside are traced again.
    """
    return _is_portable(True)


def current_platform() -> str:
    """ "cpu", "tpu" or "gpu": the platform of the mesh that is set (`jax.set_mesh`), else JAX's default backend; "any"
    within `portable`."""
    if _is_portable.value:
        return "any"
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def missing_platform(needed: str, platform: str) -> str | None:
    """The reason why a kernel for the platform `needed` cannot run on `platform`, or None."""
    return None if platform == needed else f"it needs a {needed.upper()}, and this is a {platform}"


def is_tpu_interpreted() -> bool:
    """True if Pallas TPU kernels run in the interpreter (`pltpu.force_tpu_interpret_mode`)."""
    return config.pallas_tpu_interpret_mode_context_manager.value is not None


def num_cores() -> int:
    """The processor's cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
