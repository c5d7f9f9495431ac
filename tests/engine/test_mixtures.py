"""One answer where experts are shared by the batch, in groups, and keys and values are one latent vector. Everything
that must not change a token is tried, and in deterministic mode every bit."""

import random
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.models import MLAConfig, ModelConfig, MoEConfig, RopeConfig, init_params
from tests.engine.mixed_requests import mixed_params, random_prompts

NUM_PROMPTS = 8
PROMPTS = random_prompts(NUM_PROMPTS, 100, seed=8)
PARAMS = [replace(mixed_params(number), max_tokens=4 + number) for number in range(NUM_PROMPTS)]
OPTIONS = {"max_seqs": 8, "num_pages": 200, "max_model_len": 128}
CONFIG = ModelConfig(
    architecture="DeepseekV3ForCausalLM",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_dim=24,
    rope=RopeConfig(rotary_dim=8),
    attention_scale=20**-0.5,
    max_position_embeddings=128,
    moe=MoEConfig(
        8,
        3,
        24,
        (1,),
        "sigmoid",
        num_groups=4,
        num_chosen_groups=2,
        group_score="top2_sum",
        has_correction_bias=True,
        shared_size=24,
    ),
    mla=MLAConfig(latent_size=16, rope_size=8, nope_size=12, value_size=10, query_rank=20),
)


@pytest.fixture(scope="module")
def model():
    params = init_params(CONFIG, jax.random.key(5))
    return CONFIG, jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, params)


@pytest.fixture(scope="module")
def expected(model):
    """Tokens of each prompt alone, over a contiguous cache."""
    with LLM(model, cache="contiguous", max_seqs=1, max_model_len=128) as llm:
        tokens = [llm.generate(p, one)[0].outputs[0].token_ids for p, one in zip(PROMPTS, PARAMS, strict=True)]
    assert len({tuple(one) for one in tokens}) > 6
    return tokens


def generate(llm: LLM) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.slow
def test_together_in_shuffled_pages_and_again_from_the_prefix(model, expected):
    with LLM(model, **OPTIONS) as llm:
        random.Random(3).shuffle(llm.engine.scheduler.pool._free)
        assert generate(llm) == expected
        before = llm.engine.scheduler.counters.reused_tokens
        assert generate(llm) == expected
        assert llm.engine.scheduler.counters.reused_tokens > before


@pytest.mark.slow
def test_in_chunks_and_with_preemptions(model, expected):
    params = SamplingParams(temperature=0, max_tokens=28)
    with LLM(model, **OPTIONS, prefill_chunk=16, prefix_cache=False) as llm:
        assert generate(llm) == expected
        roomy = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params, use_tqdm=False)]
        pool = llm.engine.scheduler.pool
        pool.allocate(pool.num_available - 9)  # room for the longest, and little more
        tight = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params, use_tqdm=False)]
        assert llm.engine.scheduler.counters.num_preemptions > 0
    assert tight == roomy


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["layers:1", "ngram"])
def test_speculated(model, expected, draft):
    with LLM(model, **OPTIONS, draft=draft, num_draft_tokens=3) as llm:
        assert generate(llm) == expected


@pytest.mark.slow
def test_latents_of_few_bits_are_stored_as_they_are_alone(model):
    """8 bits change the model, not with whom it runs."""
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(model, **OPTIONS, kv_dtype="int8") as llm:
        alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in PROMPTS[:4]]
        together = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params, use_tqdm=False)][:4]
    assert together == alone


def logprobs(output) -> list[float]:
    return [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_deterministic_bits_do_not_depend_on_what_others_route(model, dtype):
    config, params = model
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    params["layers"]["1"]["mlp"]["router"]["correction"] = model[1]["layers"]["1"]["mlp"]["router"]["correction"]
    kind = SamplingParams(temperature=1.0, seed=4, max_tokens=10, logprobs=1)
    numbers = random.Random(1)
    with LLM((replace(config, dtype=dtype), params), **OPTIONS, deterministic=True) as llm:
        alone = [llm.generate(prompt, kind)[0].outputs[0] for prompt in PROMPTS[:3]]
        for _ in range(3):
            order = numbers.sample(range(NUM_PROMPTS), numbers.randint(3, NUM_PROMPTS))
            order = [*(i for i in order if i > 2), 0, 1, 2]
            numbers.shuffle(order)
            found = llm.generate([PROMPTS[i] for i in order], kind, use_tqdm=False)
            for number in range(3):
                output = found[order.index(number)].outputs[0]
                assert output.token_ids == alone[number].token_ids
                assert np.array_equal(logprobs(output), logprobs(alone[number]))


@pytest.mark.slow
def test_what_is_cached_is_one_vector(model):
    with LLM(model, **OPTIONS) as llm:
        groups = llm.explain().groups
        assert groups["cache"]["bytes per token"] == 4 * CONFIG.num_layers * (16 + 8)
        assert groups["model"]["latent attention"] == "16 + 8 numbers cached a token and layer"
        assert groups["model"]["experts"] == "3 of 8, 24 wide, in 1 of 2 layers"
