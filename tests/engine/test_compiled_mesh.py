"""What devices send each other in a step of decoding, as the TPU's compiler makes it, in each layer.

Two sums over the devices of hidden states, as in Megatron-LM (Shoeybi et al. 2019): after attention and after the MLP.
No weight is gathered, whatever it is stored as. Llama-3-8B and 70B on v6e:2x2 and v5e:4x4: more chips than the models
have key-value heads.
"""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxinfer import parallel
from jaxinfer.cache import abstract_paged_cache
from jaxinfer.engine.abstract_work import abstract_decode_work
from jaxinfer.engine.programs import paged as paged_programs
from jaxinfer.engine.programs import program_model
from jaxinfer.engine.spec import abstract_slots, placed_params
from jaxinfer.models import abstract_params, fit_to_mesh
from jaxinfer.quantization import quantize_params
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import Program
from tests.engine.test_compiled import COLLECTIVES, LLAMA_3_8B, MAX_STEPS, NARROW, PAGE, PAGES, SLOTS

LLAMA_3_70B = replace(LLAMA_3_8B, hidden_size=8192, intermediate_size=28_672, num_heads=64)
MODELS = {"8b": LLAMA_3_8B, "70b": LLAMA_3_70B, "narrow": NARROW}
# Of a hidden state's number. The scales of int8, one for each output, are multiplied after the sum, which the compiler
# therefore keeps in float32.
SUMMED_BYTES = {None: 2, "int8": 4, "int4-g128": 2}
CASES = [
    ("v5e", 16, "narrow", None),
    *(
        pytest.param(chip, size, model, recipe, marks=pytest.mark.slow)
        for chip, size in (("v6e", 4), ("v5e", 16))
        for model in ("8b", "70b")
        for recipe in (None, "int8", "int4-g128")
    ),
]


def sent(chip: str, size: int, model: str, recipe: str | None, num_layers: int) -> tuple[Counter, int]:
    """(how many collectives of each kind and size a step has, bytes of the smallest matrix on a device)."""
    mesh = ahead_of_time.slice_mesh(chip, ((parallel.MODEL, size),))
    config = replace(MODELS[model], num_layers=num_layers)
    fit = fit_to_mesh(mesh, config)

    def make():
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_params(config))
        return fit.resize(params if recipe is None else quantize_params(params, recipe))

    params = placed_params(fit.config, jax.eval_shape(make), mesh)
    cache = abstract_paged_cache(fit.config, SLOTS * PAGES + 1, PAGE, jnp.bfloat16, "interleaved", mesh)
    program_of, weights = program_model(fit.config, params, mesh)
    slots = abstract_slots(SLOTS, config.vocab_size, mesh)
    arguments = (program_of, weights, cache, *slots, abstract_decode_work(SLOTS, PAGES), MAX_STEPS)
    found = ahead_of_time.compile_for(chip, paged_programs.decode, *arguments, chip_mesh=mesh)
    counts: Counter[tuple[str, int]] = Counter()
    for instruction in Program(found.program.as_text()).instructions:
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            counts[kind, max(array.num_bytes for array in instruction.results)] += 1
    matrices = [leaf for leaf in weights if leaf.ndim == 2 and leaf.shape[0] > 1]
    smallest = min(
        jax.dtypes.itemsize_bits(leaf.dtype) * leaf.size // 8 // size for leaf in matrices if leaf.size >= 2**20
    )
    return counts, smallest


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("chip", "size", "model", "recipe"), CASES)
def test_a_layer_sums_twice_over_the_devices(chip, size, model, recipe):
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    num_layers = 1 if model == "narrow" else 2
    fewer, _ = sent(chip, size, model, recipe, num_layers)
    more, smallest = sent(chip, size, model, recipe, num_layers + 1)
    of_layer = more - fewer
    print(
        f"a layer: {dict(of_layer)}; a step of {num_layers + 1} layers: {dict(more)}; the smallest matrix: {smallest:,}"
    )
    assert fewer - more == Counter()
    hidden = SUMMED_BYTES[recipe] * SLOTS * MODELS[model].hidden_size
    assert of_layer == Counter({("all-reduce", hidden): 2})
    # No weight is gathered, in the layers or around them.
    assert all(num_bytes < smallest for kind, num_bytes in more if kind != "all-reduce")
