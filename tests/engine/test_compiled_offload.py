"""Layers in the host's memory as the compilers of a TPU and a GPU make them: what is copied, when, and into how much
memory. Of Llama-3-8B in bfloat16, six layers of which every second one is on the host."""

import re
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.engine.offload import with_host_layers
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import abstract_params
from jaxinfer.planning.compiled import DECODE, planned_programs
from jaxinfer.quantization import quantize_params
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram, Instruction, copied_from_host
from tests.engine.test_compiled import NARROW
from tests.planning.plan_models import LLAMA_3_8B

OPTIONS = EngineOptions(max_model_len=2048, max_seqs=16, num_pages=600)
# Of the copied bytes, those whose copy ends before any product of matrices that it could run beside. A GPU runs two
# copies at once, and the compiler has each wait for the last but one: those of the first layer, which start together.
MAX_EXPOSED = {"v6e": 0.02, "h100": 0.35}
_LAYER = re.compile(r"body/layers\.(\d+)/")
_ROW = re.compile(r"from_host\.(\d+)/")


@dataclass(frozen=True)
class Compiled:
    """A decode program, its spec, and the instructions of its loop in the order in which they run."""

    spec: EngineSpec
    found: ahead_of_time.Compilation

    @cached_property
    def program(self) -> HloProgram:
        return HloProgram(self.found.program.as_text())

    @cached_property
    def schedule(self) -> list[Instruction]:
        bodies = self.program.computations.values()
        [body] = [one for one in bodies if any(copied_from_host(i) for i in one.values())]
        return list(body.values())

    def starts(self) -> list[tuple[int, int, int, int]]:
        """Of each copy: the layer, its bytes, and where it starts and is waited for."""
        ends = {name: place for place, one in enumerate(self.schedule) for name in one.operands if _is_done(one)}
        return [
            (int(_ROW.findall(one.text)[0]), copied_from_host(one), place, ends[one.name])
            for place, one in enumerate(self.schedule)
            if copied_from_host(one)
        ]

    def products(self) -> list[tuple[int, int]]:
        """Of each product of matrices: its place, and its layer."""
        kinds = ("fusion", "custom-call", "convolution", "dot")
        found = ((place, one) for place, one in enumerate(self.schedule) if one.opcode in kinds)
        named = ((place, _LAYER.findall(one.text)) for place, one in found if "dot_general" in one.text)
        return [(place, int(layer[0])) for place, layer in named if layer]

    def exposed(self) -> float:
        """The share of copied bytes that nothing hides."""
        places = [place for place, _ in self.products()]
        copies = self.starts()
        alone = sum(size for _, size, start, end in copies if not any(start < place < end for place in places))
        return alone / sum(size for _, size, _, _ in copies)


def _is_done(one: Instruction) -> bool:
    return one.opcode.endswith("-done")


def compiled(chip: str, config, layers, recipe: str | None = None) -> Compiled:
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    platform = "gpu" if chip == "h100" else "tpu"
    params = abstract_params(config, jnp.bfloat16)
    if recipe is not None:
        params = jax.eval_shape(partial(quantize_params, how=recipe), params)
    spec = EngineSpec(config, params, OPTIONS, platform, ahead_of_time.mesh(chip, 1, "model"))
    spec = with_host_layers(spec, layers)
    decode = planned_programs(spec)[DECODE]
    return Compiled(spec, ahead_of_time.compile_for(chip, decode.function, *decode.arguments, chip_mesh=spec.mesh))


CASES = [
    pytest.param(chip, replace(model, num_layers=count), layers, marks=pytest.mark.slow, id=f"{chip}-{count}")
    for chip, model, count, layers in (
        ("h100", NARROW, 4, (1, 3)),
        ("v6e", LLAMA_3_8B, 6, (1, 3, 5)),
        ("h100", LLAMA_3_8B, 6, (1, 3, 5)),
    )
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("chip", "recipe"), [("v6e", "int8"), ("v6e", "int4-g128"), ("v6e", "nf4")])
def test_quantized_stacks_are_copied_once(chip, recipe):
    """In the layouts of `HostPlace`; in others the compiler makes a second stack on the host, or refuses."""
    one = compiled(chip, replace(NARROW, num_layers=4), (1, 3), recipe)
    memory = one.found.program.memory_analysis()
    copied = one.program.host_bytes()
    print(f"{chip}, {recipe}: {copied:,} bytes copied, {memory.host_temp_size_in_bytes:,} of temporaries on the host")
    assert memory.host_temp_size_in_bytes == 0
    assert memory.host_argument_size_in_bytes == pytest.approx(one.spec.host_bytes, rel=0.05)  # padded to tiles
    assert copied == pytest.approx(one.spec.arriving_bytes, rel=0.05)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("chip", "config", "layers"), CASES)
def test_each_layer_is_copied_beside_those_before_it(chip, config, layers):
    one = compiled(chip, config, layers)
    spec, memory = one.spec, one.found.program.memory_analysis()
    share = one.found.temporary_bytes / spec.buffer_bytes
    copied = one.program.host_bytes()
    print(
        f"{chip}: {memory.host_argument_size_in_bytes:,} bytes on the host, {copied:,} copied a step; temporaries "
        f"{share:.3f} of two layers; {one.exposed():.3f} of the copies exposed"
    )
    # The stacks lie on the host, and each of their bytes is copied once a step.
    assert memory.host_argument_size_in_bytes == spec.host_bytes
    assert copied == pytest.approx(spec.arriving_bytes, rel=0.01)
    # On the device are two layers at once. Narrow ones are no larger than the sampler's arrays.
    assert config.vocab_size < 10_000 or share < 1.10
    # A copy starts when the layer on the host before it begins, not before, and mostly ends behind products.
    before = dict(zip(layers[1:], layers, strict=False))
    products = one.products()
    assert {layer for layer, _, _, _ in one.starts()} == set(layers)
    for layer, _, start, end in one.starts():
        if layer in before:
            assert start > max(place for place, other in products if other < before[layer])
        assert end < max(place for place, other in products if other == layer)
    assert one.exposed() <= MAX_EXPOSED[chip]
