"""What devices send each other, as the compilers make it, in each layer: in a step of decoding, and of a long prompt.

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
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.programs import paged as paged_programs
from jaxinfer.engine.programs import program_model
from jaxinfer.engine.spec import EngineSpec, abstract_slots, placed_params
from jaxinfer.models import abstract_params, fit_to_mesh
from jaxinfer.planning.compiled import PREFILL, chip_compiler, compile_programs
from jaxinfer.quantization import quantize_params
from jaxinfer.quantization.tree import num_bytes
from pallas_kernels import ahead_of_time
from pallas_kernels.hbm_traffic import HloProgram
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
    for instruction in HloProgram(found.program.as_text()).instructions:
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            counts[kind, max(array.num_bytes for array in instruction.results)] += 1
    matrices = [leaf for leaf in weights if leaf.ndim == 2 and leaf.shape[0] > 1]
    smallest = min(
        jax.dtypes.itemsize_bits(leaf.dtype) * leaf.size // 8 // size for leaf in matrices if leaf.size >= 2**20
    )
    return counts, smallest


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chip", ["v6e", "h100"])
def test_a_prompt_of_32768_tokens_over_four_devices(chip):
    """Llama-3-8B in bfloat16, 2,048 tokens a step: bytes beside the weights, and what a device sends for a layer."""
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    num_devices, rows, platform = 4, 2048, "gpu" if chip == "h100" else "tpu"
    config = replace(LLAMA_3_8B, max_position_embeddings=32_768)
    params = abstract_params(config, jnp.bfloat16)
    options = EngineOptions(max_seqs=1, max_model_len=32_768, prefill_chunk=rows, num_pages=32_768 // PAGE + 1)
    found = []
    for size in (1, num_devices):
        mesh = ahead_of_time.slice_mesh(chip, ((parallel.SEQUENCE, size),))
        spec = EngineSpec(config, params, replace(options, page_size=PAGE), platform, mesh if size > 1 else None)
        compiled = compile_programs(spec, chip_compiler(chip, mesh), whole=False, only=PREFILL)[PREFILL]
        found.append(compiled.figures)
    alone, of_four = (one.total_bytes - num_bytes(params) for one in found)
    sent = found[1].sent_bytes / config.num_layers
    print(f"{chip}: {of_four:,.0f} of {alone:,.0f} bytes, {of_four / alone:.3f}; {sent:,.0f} bytes sent for a layer")
    assert of_four <= 0.35 * alone
    # Queries, keys and values are gathered in bfloat16, and the sums of attention scattered in float32 with their
    # denominators: nothing that grows with the prompt. A thirtieth is for what is sent outside the layers.
    heads, others = config.num_heads * config.head_dim, num_devices - 1
    gathered = 2 * rows * (heads + 2 * config.num_kv_heads * config.head_dim) * others // num_devices
    scattered = 4 * rows * (heads + 4 * config.num_heads) * others // num_devices
    assert sent <= (gathered + scattered) * 31 / 30
