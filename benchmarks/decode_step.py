"""A decode step of Llama-3-8B on H100s as the GPU's compiler plans it: launches, graphs, waits of the host.

Programs of few layers are compiled, and the launches of 32 follow.
"""

from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp

from benchmarks.compiled_roofline import LLAMA_3_8B
from jaxinfer.engine.options import EngineOptions
from jaxinfer.models import abstract_params
from jaxinfer.planning import PlanRequest, parse_place
from jaxinfer.planning.compiled import planned_programs
from jaxinfer.quantization import quantize_params
from pallas_kernels.ahead_of_time import Compilation
from pallas_kernels.gpu_launches import LaunchPlan, compile_with_plan

CHIP = "h100"


@dataclass(frozen=True)
class StepLaunches:
    """Launches of a layer, and of a step beside its layers; graphs and waits of a dispatch of steps."""

    batch: int
    of_layer: int
    beside: int
    num_graphs: int
    num_waits: int

    @property
    def in_step(self) -> int:
        return LLAMA_3_8B.num_layers * self.of_layer + self.beside


@cache
def decode(
    num_layers: int, batch: int = 1, recipe: str | None = None, kv_dtype: str = "auto", num_devices: int = 1
) -> tuple[Compilation, LaunchPlan]:
    """The decode program of so many layers, and its launches."""
    config = replace(LLAMA_3_8B, num_layers=num_layers)
    params = abstract_params(config, jnp.bfloat16)
    if recipe is not None:
        params = jax.eval_shape(lambda params: quantize_params(params, recipe), params)
    options = EngineOptions(max_model_len=8192, max_seqs=batch, kv_dtype=kv_dtype)
    spec = PlanRequest("llama", config, params, parse_place(f"{CHIP}x{num_devices}"), options).spec(compiles=True)
    program = planned_programs(spec)["decode"]
    return compile_with_plan(CHIP, program.function, *program.arguments, chip_mesh=spec.mesh)


def launches(batch: int, **options) -> StepLaunches:
    """The launches of a step, from programs of 2 and of 3 layers."""
    two, three = (decode(num_layers, batch, **options)[1] for num_layers in (2, 3))
    of_layer = len(three.loop) - len(two.loop)
    return StepLaunches(batch, of_layer, len(two.loop) - 2 * of_layer, two.num_graphs, two.num_waits)
