"""What holds over both caches: one answer whatever the neighbours, errors that stay in their row, plain arrays."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine import programs
from jaxinfer.engine.programs import paged as paged_programs
from jaxinfer.models import bind_layer
from tests.engine.mixed_requests import mixed_params, random_prompts


@pytest.mark.matrix
def test_an_answer_does_not_depend_on_its_neighbours(llm):
    prompts = random_prompts(18, 60)
    params = [mixed_params(number) for number in range(18)]
    together = [output.outputs[0] for output in llm.generate(prompts, params)]
    alone = [llm.generate(prompt, one)[0].outputs[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.finish_reason for one in together] == [one.finish_reason for one in alone]
    assert len({tuple(one.token_ids) for one in alone}) > 12  # the check could fail: answers differ


@pytest.mark.slow
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
    assert not llm.engine.has_work
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


@pytest.mark.matrix
def test_requests_without_a_seed_differ_but_repeat_with_the_llm_seed(tiny, options):
    def run(seed):
        with LLM(tiny, seed=seed, **options) as llm:
            return [llm.generate([1, 2], SamplingParams(max_tokens=12))[0].outputs[0].token_ids for _ in range(2)]

    first, again, other = run(1), run(1), run(2)
    assert first == again
    assert first[0] != first[1]
    assert first != other


def test_nan_weights_end_the_request_with_an_error_and_a_reason(tiny, options):
    config, params = tiny
    broken = {**params, "final_norm": {"weight": params["final_norm"]["weight"].at[0].set(jnp.nan)}}
    with LLM((config, broken), **options) as llm:
        answer = llm.generate([1, 2, 3], SamplingParams(temperature=0))[0].outputs[0]
    assert (answer.finish_reason, answer.token_ids) == ("error", [])
    assert "position 3" in answer.error


@pytest.mark.slow  # quick: of the paged cache, with a draft, in test_speculation.py
@pytest.mark.all_buckets
def test_nan_in_one_row_leaves_the_others_bit_identical(tiny, options):
    config, params = tiny
    poisoned = 96
    broken = {**params, "embed": params["embed"].at[poisoned].set(jnp.nan)}
    prompts = [[1, 2, 3], [4, poisoned, 5], [6, 7], [8] * 20]
    sampling = SamplingParams(temperature=0, max_tokens=16, logprobs=3, bad_words=(), logit_bias={poisoned: -100.0})
    with LLM((config, params), **options) as llm:
        healthy = llm.generate([prompts[i] for i in (0, 2, 3)], sampling)
    with LLM((config, broken), **options) as llm:
        outputs = llm.generate(prompts, sampling)
        # The slot that held the poisoned row serves the next request as if nothing had been there.
        after = llm.generate(prompts[:1] * 4, sampling)
    assert outputs[1].outputs[0].finish_reason == "error"
    for expected, found in zip(healthy, [outputs[0], outputs[2], outputs[3]], strict=True):
        assert expected.outputs[0].token_ids == found.outputs[0].token_ids
        assert expected.outputs[0].logprobs == found.outputs[0].logprobs
    assert all(output.outputs[0].token_ids == healthy[0].outputs[0].token_ids for output in after)


def flax_objects(tree) -> list:
    """Modules and variables anywhere in a tree, however deep."""
    kinds = (nnx.Variable, nnx.Module, nnx.State)
    return [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds)) if isinstance(x, kinds)]


def test_no_module_or_variable_crosses_jit(tiny, options, monkeypatch):
    config, params = tiny
    seen = []
    homes = {
        programs: ("score", "score_processed", "hidden_states"),
        paged_programs: ("step", "sample_step", "decode", "write_slot", "write_plain_slot"),
    }
    for module, name in [(module, name) for module, names in homes.items() for name in names]:
        program = getattr(module, name)
        watched = lambda *args, program=program: seen.append(args) or program(*args)  # noqa: E731
        watched.lower = program.lower
        monkeypatch.setattr(module, name, watched)
    with LLM((config, params), **options) as llm:
        llm.generate([1, 2], SamplingParams(max_tokens=3, prompt_logprobs=1), taps=["final_norm"])
        llm.score([[1, 2]], [[3]])
    assert len(seen) >= 5
    assert flax_objects(seen) == []
    assert flax_objects({"a": [bind_layer(config, 0, params["layers"]["0"])]}) != []  # the check finds one


def test_a_retrace_would_be_noticed(tiny, options):
    one = SamplingParams(max_tokens=2)
    with (
        LLM(tiny, **{**options, "max_seqs": 3, "max_model_len": 77}) as llm,
        jax.no_tracing(),
        pytest.raises(Exception, match="trac"),
    ):
        llm.generate([1, 2, 3], one)
