"""Programs compiled before their first use, several at once."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import jax
from jax.stages import Lowered

from jaxinfer.checks import num_cores
from pallas_kernels.platform import current_platform

Report = Callable[[str], None]
MAX_JOBS = 8  # compilers of large models take gigabytes

# Of the compilers, for large programs. XLA:GPU would join products of the same rows (queries, keys, values), and for
# that write their weights side by side in every step: three times the bytes of reading them. XLA:CPU cuts a program
# into 32 LLVM modules, to compile them side by side; on two cores that takes a third longer than one module (9.3 s and
# 6.8 s for `decode` of 30 layers), and several programs side by side use the cores anyway. XLA:TPU gives the bfloat16
# operands of a loop tiles of 16 rows on tpu7x, where arguments and products have tiles of 8: each dispatch copied all
# weights.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_cpu_parallel_codegen_split_count": 1} if num_cores() <= 4 else {},
    "gpu": {"xla_gpu_dot_merger_threshold_mb": 0},
    "tpu": {"xla_tpu_control_large_2nd_minor_layout_for_x16": False},
}


class LargeProgram:
    """`jax.jit(function, **arguments)` with `COMPILER_OPTIONS` of the platform that it is traced for."""

    def __init__(self, function: Callable, **arguments: Any):
        update_wrapper(self, function)
        self._jitted: dict[str, Any] = {
            platform: jax.jit(function, compiler_options=options, **arguments)
            for platform, options in COMPILER_OPTIONS.items()
        }

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._jitted[current_platform()](*arguments, **named)

    def lower(self, *arguments: Any, **named: Any) -> Lowered:
        return self._jitted[current_platform()].lower(*arguments, **named)

    def _cache_size(self) -> int:
