"""The programs on two devices: the tokens of one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import parallel
from jaxinfer.cache import init_paged_cache
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.programs import paged as programs
from jaxinfer.engine.programs import program_model
from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import MLAConfig, ModelConfig, MoEConfig, RopeConfig, init_params, parameter_shardings
from jaxinfer.planning.compiled import DECODE, PREFILL, planned_programs
from jaxinfer.quantization import quantize_params
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.sampling import SamplingParams, SamplingRow, make_batch, make_state
from tests.engine.mixed_requests import random_prompts

PAGE, PAGES, NUM_STEPS = 4, 8, 12
# One of each kind of row; every one reads the vocabulary in its own way.
PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.4, logit_bias={5: 3.0}, logprobs=3),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=7),
    SamplingParams(temperature=1.1, min_p=0.02, presence_penalty=0.5, seed=8, min_tokens=10),
)
LENGTHS = (5, 9, 12, 3)


def run(config, params, mesh, layout):
    """A step that stores four prompts and, but for one, ends them; a step that mixes the rest of that prompt with
    decoding; then decode steps. Returns the outputs of all three, on the host."""
    num_slots = len(PARAMS)
    rows = [SamplingRow(one, seed=one.seed or 0) for one in PARAMS]
    prompts = random_prompts(num_slots, 90, seed=4)
    prompts = [[token % 96 for token in prompt * 12][:length] for prompt, length in zip(prompts, LENGTHS, strict=True)]
    slots, _ = programs.init_slots(num_slots, config.vocab_size)
    slots = replace(slots, history=jax.tree.map(jnp.array, make_state(prompts, config.vocab_size)))
    batch = jax.tree.map(jnp.array, make_batch(rows, config.vocab_size))
    if mesh is not None:
        params = jax.device_put(params, parameter_shardings(mesh, config, params))
        places = parallel.shardings(mesh, programs.slot_axes(slots, batch))
        slots, batch = jax.device_put((slots, batch), places)
    cache = init_paged_cache(config, num_slots * PAGES + 1, PAGE, jnp.float32, layout, mesh)
    model, weights = program_model(config, params, mesh)
    table = np.arange(num_slots * PAGES, dtype=np.int32).reshape(num_slots, PAGES) + 1

    first = [prompt[:8] for prompt in prompts]
    rest = [prompt[8:] for prompt in prompts]
    outputs = []
    for chunks, starts in ((first, [0] * num_slots), (rest, [8 if chunk else 0 for chunk in rest])):
        lengths = np.array([len(chunk) or 1 for chunk in chunks], np.int32)
        work = programs.StepWork(
            tokens=np.array([token for chunk in chunks for token in chunk or [0]], np.int32),
            token_slots=np.repeat(np.arange(num_slots, dtype=np.int32), lengths),
            slots=programs.StepSlots(
                query_starts=np.cumsum(lengths, dtype=np.int32) - lengths,
                query_lengths=lengths,
                starts=np.array(starts, np.int32),
                is_prompt=np.array([bool(chunk) for chunk in chunks]),
                is_last=np.array(
                    [start + len(chunk) == length for start, chunk, length in zip(starts, chunks, LENGTHS, strict=True)]
                ),
                remaining=np.full(num_slots, 100, np.int32),
            ),
            page_tables=(table,),
        )
        cache, logits, *_ = programs.step(model, weights, cache, slots, work)
        slots, output = programs.sample_step(mesh, slots, batch, work.slots, logits)
        outputs.append(jax.block_until_ready(output))
    work = programs.DecodeWork(np.ones(num_slots, bool), (table,), np.int32(NUM_STEPS))
    cache, slots, output, _ = programs.decode(model, weights, cache, slots, batch, work, NUM_STEPS)
    return jax.device_get((*outputs, output)), cache, slots


@pytest.fixture(scope="module")
def model(tiny):
    config = replace(tiny[0], vocab_size=96)
    params = init_params(config, jax.random.key(0))
    return config, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params)


@pytest.fixture(scope="module")
def alone(model):
    return run(*model, None, "separate")[0]


# Both devices share the machine's few threads: where other tests take these, one device waits for the other until XLA
# gives up (once in CI).
@pytest.mark.alone
@pytest.mark.parametrize("layout", ["separate", "interleaved"])
def test_two_devices_give_the_tokens_of_one(model, alone, layout):
    mesh = jax.make_mesh((2,), (parallel.MODEL,), axis_types=(jax.sharding.AxisType.Auto,))
    cut, cache, slots = run(*model, mesh, layout)
    for one, two in zip(alone, cut, strict=True):
        assert one.samples.ok.all()
        assert two.samples.ok.all()
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_array_equal(one.samples.rank, two.samples.rank)
        np.testing.assert_allclose(one.samples.logprob, two.samples.logprob, rtol=1e-4, atol=1e-4)
    answers = alone[-1].samples.tokens.T.tolist()
    assert all(len(set(answer)) > 4 for answer in answers)  # the check could fail: answers vary
    assert_cut(cache, slots)


def assert_cut(cache, slots) -> None:
    """What is carried to the next step stayed cut."""
    for leaf in (*jax.tree.leaves(cache), slots.history.output_counts):
        assert leaf.addressable_shards[0].data.size == leaf.size // 2


MIXTURE = ModelConfig(
    architecture="DeepseekV2ForCausalLM",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_dim=24,
    rope=RopeConfig(rotary_dim=8),
    max_position_embeddings=128,
    attention_scale=20**-0.5,
    moe=MoEConfig(8, 3, 24, (1,), shared_size=16, has_expert_bias=True),
    mla=MLAConfig(latent_size=16, rope_size=8, nope_size=12, value_size=10),
)


@pytest.mark.alone
@pytest.mark.parametrize("recipe", [None, pytest.param("int4-g32-asym", marks=pytest.mark.slow)])
def test_experts_and_heads_over_two_devices_give_the_tokens_of_one(recipe):
    """Each device has half of the experts and of the query heads, and the whole latent cache."""
    params = init_params(MIXTURE, jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, params)
    if recipe is not None:
        params = quantize_params(params, recipe)
    mesh = jax.make_mesh((2,), (parallel.MODEL,), axis_types=(jax.sharding.AxisType.Auto,))
    alone, (cut, cache, _) = run(MIXTURE, params, None, "separate")[0], run(MIXTURE, params, mesh, "separate")
    for one, two in zip(alone, cut, strict=True):
        assert two.samples.ok.all()
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_allclose(one.samples.logprob, two.samples.logprob, rtol=1e-4, atol=1e-4)
    experts = jax.device_put(params, parameter_shardings(mesh, MIXTURE, params))["layers"]["1"]["mlp"]["experts"]
    for leaf in jax.tree.leaves(experts):
        assert leaf.addressable_shards[0].data.shape[0] == 4
    for leaf in jax.tree.leaves(cache):
        assert leaf.addressable_shards[0].data.shape == leaf.shape


def test_experts_that_cannot_be_cut_say_so():
    mesh = jax.sharding.AbstractMesh((4,), (parallel.MODEL,))
    config = replace(MIXTURE, moe=replace(MIXTURE.moe, num_experts=6))
    with pytest.raises(ValueError, match="num_experts=6 cannot be cut into 4 equal parts"):
        parameter_shardings(mesh, config)


@pytest.mark.alone
@pytest.mark.parametrize("chunk", [1024, pytest.param(2048, marks=pytest.mark.slow)])
def test_a_long_prompt_takes_a_quarter_on_four_devices(chunk):
    """The cache of 32,768 tokens and the arrays of a chunk and of decoding, on one of four devices and on one alone;
    weights are whole on each and not counted."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        rope=RopeConfig(rotary_dim=32),
        max_position_embeddings=32768,
    )
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    options = EngineOptions(max_seqs=1, max_model_len=32768, prefill_chunk=chunk)
    specs = [EngineSpec(config, params, options, "cpu", mesh) for mesh in (None, parallel.make_mesh("sequence=4"))]
    for name in (PREFILL, DECODE):
        alone, of_four = (_peak_bytes(planned_programs(spec)[name]) - num_bytes(params) for spec in specs)
        print(f"{chunk} tokens a chunk, {name}: {of_four:,} of {alone:,} bytes, {of_four / alone:.3f}")
        assert of_four <= 0.35 * alone
    alone, of_four = (num_bytes(spec.cache) for spec in specs)
    assert of_four == alone / 4


def _peak_bytes(planned) -> int:
    """Bytes on one device while a program runs."""
    memory = planned.function.lower(*planned.arguments).compile().memory_analysis()
    assert memory is not None
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return peak - memory.alias_size_in_bytes
