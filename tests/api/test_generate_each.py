"""Requests as a stream: taken as there is room, answered as they end; and as a file."""

import json

import jax
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.models import init_params
from tests.tiny import OPTIONS, TINY


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, init_params(TINY, jax.random.key(0)))


@pytest.fixture(scope="module")
def llm(params):
    with LLM((TINY, params), **OPTIONS) as llm:
        yield llm


def requests(count):
    for number in range(count):
        yield number, [1 + number, 2], SamplingParams(max_tokens=1 + 7 * (number % 3), seed=number, n=1 + number % 2)


@pytest.mark.slow
def test_the_answers_are_those_of_generate(llm):
    found = dict(llm.generate_each(requests(9)))
    keys, prompts, params = zip(*requests(9), strict=True)
    assert sorted(found) == list(keys)
    for key, output in zip(keys, llm.generate(prompts, params), strict=True):
        assert [one.token_ids for one in found[key].outputs] == [one.token_ids for one in output.outputs]
        assert found[key].prompt_token_ids == output.prompt_token_ids
        assert found[key].finished


@pytest.mark.slow
def test_short_answers_do_not_wait_for_long_ones(llm):
    stream = [
        ("long", [1], SamplingParams(max_tokens=60, ignore_eos=True)),
        ("short", [2], SamplingParams(max_tokens=1)),
    ]
    assert [key for key, _ in llm.generate_each(stream)] == ["short", "long"]


@pytest.mark.slow
def test_what_is_refused_is_told_under_its_key_and_the_others_go_on(llm):
    stream = [
        ("a", [1], SamplingParams(max_tokens=3)),
        ("too long", [1] * 120, SamplingParams(max_tokens=30)),
        ("empty", [], SamplingParams()),
        ("no such token", [97], SamplingParams()),
        ("text", "x", SamplingParams()),
        ("stop", [1], SamplingParams(stop="x")),
        ("bias", [1], SamplingParams(stop_token_ids=[97])),
        ("b", [1], SamplingParams(max_tokens=3)),
    ]
    found = dict(llm.generate_each(stream))
    assert len(found) == 8
    assert not any(isinstance(found[key], ValueError) for key in "ab")
    messages = {key: str(value) for key, value in found.items() if isinstance(value, ValueError)}
    assert messages["too long"].startswith("the prompt: 120 prompt tokens and max_tokens=30 make 150")
    assert len(messages) == 6


def test_requests_are_taken_as_there_is_room(llm):
    num_taken = 0

    def counted():
        nonlocal num_taken
        for request in requests(40):
            num_taken += 1
            yield request

    answers = llm.generate_each(counted(), max_queued=3)
    next(answers)
    assert num_taken <= 4
    assert len(list(answers)) == 39
    with pytest.raises(ValueError, match="max_queued must be at least 1"):
        llm.generate_each([], max_queued=0)


def test_leaving_early_frees_the_engine(llm):
    answers = llm.generate_each(requests(9))
    next(answers)
    answers.close()
    assert not llm.engine.has_work
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=3))[0].finished


def test_an_error_among_the_requests_aborts_what_runs(llm):
    def failing():
        yield from requests(3)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        list(llm.generate_each(failing()))
    assert not llm.engine.has_work


@pytest.mark.slow
def test_fingerprints_tell_models_apart(llm, params):
    def fingerprint(tree, **options):
        with LLM((TINY, tree), **{**OPTIONS, "max_seqs": 3, **options}) as other:
            return other.fingerprint()

    same = llm.fingerprint()
    assert fingerprint(params) == same  # whatever max_seqs
    assert fingerprint(params, max_model_len=64) != same
    leaves, structure = jax.tree.flatten(params)
    for index, leaf in enumerate(leaves):
        changed = [*leaves]
        changed[index] = leaf.at[(0,) * leaf.ndim].add(0.5)
        assert fingerprint(structure.unflatten(changed)) != same


def test_a_file_is_served_and_resumed(llm, tmp_path):
    path_in, path_out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path_in.write_text("".join(json.dumps({"prompt": [1 + n, 2], "n": 2}) + "\n" for n in range(6)))
    summary = llm.generate_file(path_in, path_out, params={"max_tokens": 7, "ignore_eos": True}, use_tqdm=False)
    assert (summary.ok, summary.failed, summary.output_tokens) == (6, 0, 6 * 2 * 7)
    whole = sorted(path_out.read_text().splitlines())
    path_out.write_text("".join(path_out.read_text().splitlines(keepends=True)[:2]) + "torn")
    with pytest.raises(ValueError, match=r"max_tokens \(was 7, is 8\)"):
        llm.generate_file(path_in, path_out, params={"max_tokens": 8, "ignore_eos": True})
    summary = llm.generate_file(path_in, path_out, params={"max_tokens": 7, "ignore_eos": True}, use_tqdm=False)
    assert (summary.ok, summary.resumed) == (6, 2)
    assert sorted(path_out.read_text().splitlines()) == whole


def test_several_answers_come_together_once_each_and_whole(params):
    asked = [(i, [i + 1, 5], SamplingParams(n=3, seed=i, max_tokens=9)) for i in range(6)]
    for options in ({}, {"prefix_cache": False}):
        with LLM((TINY, params), **OPTIONS, **options) as llm:
            found = list(llm.generate_each(asked))
            whole = {key: llm.generate(prompt, one)[0] for key, prompt, one in asked}
        assert sorted(key for key, _ in found) == list(range(6))
        for key, output in found:
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in whole[key].outputs]


def test_the_model_may_be_used_between_two_answers(params):
    asked = [(i, [i + 1], SamplingParams(temperature=0, max_tokens=4 + i)) for i in range(6)]
    keys = []
    with LLM((TINY, params), **OPTIONS) as llm:
        for key, _ in llm.generate_each(asked):
            keys.append(key)
            llm.generate([9, 9, key], SamplingParams(temperature=0, max_tokens=12))
    assert sorted(keys) == list(range(6))


def test_a_short_queue_only_slows_it_down(params):
    asked = [(i, [i + 1], SamplingParams(max_tokens=3)) for i in range(20)]  # seeds come from their numbers

    def tokens(**options):
        with LLM((TINY, params), **OPTIONS, **options) as llm:
            return {key: output.outputs[0].token_ids for key, output in llm.generate_each(asked)}

    assert tokens(max_waiting=1) == tokens()
    llm = LLM((TINY, params), **{**OPTIONS, "max_seqs": 2}, max_waiting=1)
    with llm, pytest.raises(ValueError, match="n=4 is more than max_seqs=2 and max_waiting=1"):
        llm.generate([1], SamplingParams(n=4, seed=1))
