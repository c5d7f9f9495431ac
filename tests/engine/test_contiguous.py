"""The contiguous engine: one answer whatever the neighbours, errors that stay in their row, no retraces."""

import gc
import inspect
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine import programs
from jaxinfer.engine.contiguous import ContiguousEngine, EngineOptions
from jaxinfer.engine.request import Generation
from jaxinfer.models import ModelConfig, RopeConfig, bind, init_params
from jaxinfer.sampling import SamplingRow


def random_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(97) for _ in range(numbers.randint(1, longest))] for _ in range(count)]


def mixed_params(number: int) -> SamplingParams:
    """Every kind of request, by its number."""
    kinds = (
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 1.0, "seed": number},
        {"temperature": 0.7, "top_k": 5, "seed": number},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01, "seed": number, "prompt_logprobs": 1},
        {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": number},
        {"temperature": 1.0, "logit_bias": {3: 5.0}, "seed": number, "min_tokens": 1},
        {"temperature": 1.0, "allowed_token_ids": [1, 2, 3, 4], "seed": number},
        {"temperature": 1.0, "stop_token_ids": [7, 8, 9], "seed": number},
    )
    return SamplingParams(max_tokens=1 + number % 13, **kinds[number % len(kinds)])


def test_an_answer_does_not_depend_on_its_neighbours(llm):
    prompts = random_prompts(18, 60)
    params = [mixed_params(number) for number in range(18)]
    together = [output.outputs[0] for output in llm.generate(prompts, params)]
    alone = [llm.generate(prompt, one)[0].outputs[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.finish_reason for one in together] == [one.finish_reason for one in alone]
    assert len({tuple(one.token_ids) for one in alone}) > 12  # the check could fail: answers differ


def test_streamed_tokens_are_the_generated_ones(llm):
    prompt, params = random_prompts(1, 40, seed=3)[0], SamplingParams(temperature=1.0, seed=5, max_tokens=24, n=2)
    whole = llm.generate(prompt, params)[0]
    deltas = list(llm.stream(prompt, params))
    for answer in whole.outputs:
        assert [t for delta in deltas if delta.index == answer.index for t in delta.token_ids] == answer.token_ids
    assert deltas[-1].output is not None
    assert [one.token_ids for one in deltas[-1].output.outputs] == [one.token_ids for one in whole.outputs]


def test_leaving_a_stream_frees_its_slot(llm):
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=100, temperature=0))
    next(stream)
    stream.close()
    assert not llm._engine.has_work
    assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids) == 4


def test_prompt_with_the_start_of_its_answer_goes_on_with_the_same_tokens(llm):
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=20)
    whole = llm.generate([5, 6, 7], params)[0].outputs[0].token_ids
    rest = llm.generate([5, 6, 7, *whole[:8]], params)[0].outputs[0].token_ids
    assert rest[:12] == whole[8:]


def test_first_of_n_answers_is_the_only_one(llm):
    one = llm.generate([4, 5], SamplingParams(seed=1, max_tokens=10))[0].outputs
    many = llm.generate([4, 5], SamplingParams(seed=1, max_tokens=10, n=4))[0].outputs
    assert many[0].token_ids == one[0].token_ids
    assert len({tuple(answer.token_ids) for answer in many}) == 4
    again = llm.generate([4, 5], SamplingParams(seed=many[2].seed, max_tokens=10))[0].outputs[0]
    assert again.token_ids == many[2].token_ids


def test_requests_without_a_seed_differ_but_repeat_with_the_llm_seed(tiny):
    def run(seed):
        with LLM(tiny, max_num_seqs=2, seed=seed) as llm:
            return [llm.generate([1, 2], SamplingParams(max_tokens=12))[0].outputs[0].token_ids for _ in range(2)]

    first, again, other = run(1), run(1), run(2)
    assert first == again
    assert first[0] != first[1]
    assert first != other


def test_nan_weights_end_the_request_with_an_error_and_a_reason(tiny):
    config, params = tiny
    broken = {**params, "final_norm": {"weight": params["final_norm"]["weight"].at[0].set(jnp.nan)}}
    with LLM((config, broken), max_num_seqs=1) as llm:
        answer = llm.generate([1, 2, 3], SamplingParams(temperature=0))[0].outputs[0]
    assert (answer.finish_reason, answer.token_ids) == ("error", [])
    assert "position 3" in answer.error


def test_nan_in_one_row_leaves_the_others_bit_identical(tiny):
    config, params = tiny
    poisoned = 96
    broken = {**params, "embed": params["embed"].at[poisoned].set(jnp.nan)}
    prompts = [[1, 2, 3], [4, poisoned, 5], [6, 7], [8] * 20]
    options = SamplingParams(temperature=0, max_tokens=16, logprobs=3, bad_words=(), logit_bias={poisoned: -100.0})
    with LLM((config, params), max_num_seqs=4) as llm:
        healthy = llm.generate([prompts[i] for i in (0, 2, 3)], options)
    with LLM((config, broken), max_num_seqs=4) as llm:
        outputs = llm.generate(prompts, options)
        # The slot that held the poisoned row serves the next request as if nothing had been there.
        after = llm.generate(prompts[:1] * 4, options)
    assert outputs[1].outputs[0].finish_reason == "error"
    for expected, found in zip(healthy, [outputs[0], outputs[2], outputs[3]], strict=True):
        assert expected.outputs[0].token_ids == found.outputs[0].token_ids
        assert expected.outputs[0].logprobs == found.outputs[0].logprobs
    assert all(output.outputs[0].token_ids == healthy[0].outputs[0].token_ids for output in after)


def test_no_retrace_after_warm_up_in_200_mixed_requests(tiny):
    with LLM(tiny, max_num_seqs=4) as llm:
        llm.warm_up(use_tqdm=False)
        prompts = random_prompts(200, 100, seed=1)
        params = [mixed_params(number) for number in range(200)]
        before = [program._cache_size() for program in (programs.prefill, programs.decode, programs.score)]
        with jax.no_tracing():
            for start, count in ((0, 1), (1, 3), (4, 96), (100, 100)):
                llm.generate(prompts[start : start + count], params[start : start + count])
        after = [program._cache_size() for program in (programs.prefill, programs.decode, programs.score)]
    assert before == after


def test_a_retrace_would_be_noticed(tiny):
    one = SamplingParams(max_tokens=2)
    with LLM(tiny, max_num_seqs=3, max_model_len=77) as llm, jax.no_tracing(), pytest.raises(Exception, match="trac"):
        llm.generate([1, 2, 3], one)


def test_decode_transfers_nothing_between_host_and_device(tiny):
    config, params = tiny
    engine = ContiguousEngine(config, params, EngineOptions(64, 2))
    engine.add(Generation([1, 2, 3], SamplingRow(SamplingParams(temperature=0), seed=0), max_tokens=8))
    engine._admit()
    steps = jax.device_put(np.int32(4))
    state, _ = programs.decode(engine.model, engine.weights, engine._state, engine._batch, 8, steps)
    with jax.transfer_guard("disallow"):
        _, output = programs.decode(engine.model, engine.weights, state, engine._batch, 8, steps)
    assert output.is_produced.shape == (8, 1)


def test_decode_donates_its_state(tiny):
    config, params = tiny
    state, batch = programs.init_state(config, 2, 64, jnp.float32)
    kept = state.cache.keys[0]
    programs.decode(*programs.program_model(config, params), state, batch, 4, np.int32(1))
    assert kept.is_deleted()


def flax_objects(tree) -> list:
    """Modules and variables anywhere in a tree, however deep."""
    kinds = (nnx.Variable, nnx.Module, nnx.State)
    return [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds)) if isinstance(x, kinds)]


def test_no_module_or_variable_crosses_jit(tiny, monkeypatch):
    config, params = tiny
    seen = []
    for name in ("prefill", "decode", "score", "score_processed", "hidden_states"):
        program = getattr(programs, name)
        monkeypatch.setattr(programs, name, lambda *args, program=program: seen.append(args) or program(*args))
    with LLM((config, params), max_num_seqs=1) as llm:
        llm.generate([1, 2], SamplingParams(max_tokens=3, prompt_logprobs=1), taps=["final_norm"])
        llm.score([[1, 2]], [[3]])
    assert len(seen) >= 5
    assert flax_objects(seen) == []
    assert flax_objects({"a": [bind(config, params)]}) != []  # the check finds one where there is one


def test_close_frees_the_cache_and_keeps_live_parameters(tiny):
    llm = LLM(tiny, max_num_seqs=2)
    llm.generate([1], SamplingParams(max_tokens=2))
    keys = llm._engine._state.cache.keys[0]
    llm.close()
    llm.close()
    assert keys.is_deleted()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(tiny[1]))
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([1])
    gc.collect()


@pytest.mark.parametrize("field", ["max_model_len", "max_num_seqs", "steps_per_dispatch"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_options_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        EngineOptions(**{"max_model_len": 8, "max_num_seqs": 1, field: value})


@pytest.mark.timing
def test_host_dispatch_of_a_decode_step_takes_at_most_200_microseconds():
    """400 parameter arrays, the default number of steps in a dispatch.

    The device's own time is what one more step costs inside a dispatch; the rest is the host's, per step.
    """
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=32, hidden_size=8, intermediate_size=8, num_layers=44,
        num_heads=1, num_kv_heads=1, head_dim=8, rope=RopeConfig(rotary_dim=8), max_position_embeddings=4096,
        tie_word_embeddings=True,
    )  # fmt: skip
    params = init_params(config, jax.random.key(0))
    assert 395 <= len(jax.tree.leaves(params)) <= 405
    capacity = 64
    engine = ContiguousEngine(config, params, EngineOptions(4096, 1, steps_per_dispatch=capacity))
    engine.add(Generation([1], SamplingRow(SamplingParams(temperature=0), seed=0), max_tokens=4000))
    engine._admit()

    def seconds(num_steps: int) -> float:
        start = time.perf_counter()
        engine._state, output = programs.decode(
            engine.model, engine.weights, engine._state, engine._batch, capacity, np.int32(num_steps)
        )
        jax.block_until_ready(output)
        return time.perf_counter() - start

    default = inspect.signature(LLM).parameters["steps_per_dispatch"].default
    seconds(default)
    pairs = [(seconds(default), seconds(capacity)) for _ in range(20)]
    # The least disturbed of each: whatever else the machine does can only add.
    few, many = (min(column) for column in zip(*pairs, strict=True))
    per_step = (many - few) / (capacity - default)
    dispatch = few - default * per_step
    overhead = dispatch / default
    print(
        f"{len(engine.weights)} arrays: {dispatch * 1e6:.0f} us a dispatch of {default} steps, "
        f"{overhead * 1e6:.0f} us a step, beyond {per_step * 1e6:.0f} us of the device"
    )
    assert overhead <= 200e-6
    engine.close()
