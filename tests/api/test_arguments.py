"""Wrong types and lengths raise sentences that say what was given and what is expected."""

import numpy as np
import pytest

from jaxinfer.api.arguments import (
    as_conversations,
    as_count,
    as_names,
    as_pairs,
    as_prompt,
    as_prompts,
    checked_options,
    each_request,
    params_of_each,
    priorities_of_each,
    takes_other_names,
)
from jaxinfer.engine.request import DEFAULT_REQUEST_OPTIONS
from jaxinfer.sampling import SamplingParams

HI = [{"role": "user", "content": "hi"}]
GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (range(2), [[0, 1]]),
        (["a", [1]], ["a", [1]]),
        pytest.param((text for text in ("a", "b")), ["a", "b"], id="a generator"),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([np.int32(1), np.int64(2)], [[1, 2]]),
        ([], []),
    ],
    ids=str,
)
def test_one_prompt_or_several(given, prompts):
    assert as_prompts(given) == prompts


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "prompts must be a text or a list of token ids, or a list of these, got int 5"),
        (None, "prompts must be .* got None"),
        ([None], "prompt 0 must be a text or a list of token ids, got None"),
        (["a", 5], "prompt 1 must be .* got int 5"),
        ([5, "a"], "prompt 0 must be .* got int 5"),
        (b"a", "got bytes b'a'; decode it first"),
        ([{"prompt": "a"}], "prompt 0 must be .*; pass what its 'prompt' is"),
        (HI, r"prompt 0 must be .*; messages are for llm\.chat"),
        (np.array([1.0, 2.0]), "a prompt must be .* got ndarray"),
        ([["a", "b"]], r"prompt 0 must be .* got list \['a', 'b'\]"),
    ],
    ids=str,
)
def test_what_is_no_prompt(given, message):
    with pytest.raises(TypeError, match=message):
        as_prompts(given)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: as_prompt(None, "the prompt"), TypeError, "the prompt must be .* got None"),
        (lambda: params_of_each({"n": 2}, GREEDY, 1), TypeError, "got dict .*: SamplingParams.from_dict reads one"),
        (lambda: params_of_each(5, GREEDY, 1), TypeError, "params must be SamplingParams, got int 5"),
        (lambda: params_of_each([GREEDY, 5], GREEDY, 2), TypeError, "params 1 must be SamplingParams, got int 5"),
        (lambda: params_of_each([GREEDY], GREEDY, 2), ValueError, "1 sampling parameters for 2 prompts: give one for"),
        (lambda: priorities_of_each("high", 1), TypeError, "priority must be an integer, .* got str 'high'"),
        (lambda: priorities_of_each([1, 1.5], 2), TypeError, "priority must be an integer, .* got float 1.5"),
        (lambda: priorities_of_each([1], 2), ValueError, "1 priorities for 2 prompts"),
        (lambda: as_conversations("hi"), TypeError, "chat takes messages, .* got a text: generate takes texts"),
        (lambda: as_conversations(HI[0]), TypeError, "got one message: put it in a list"),
        (lambda: as_conversations(None), TypeError, "chat takes messages, .* got None"),
        (lambda: as_conversations(["hi"]), TypeError, "conversation 0 must be a list of messages, .* got str 'hi'"),
        (lambda: as_conversations([HI, HI[0]]), TypeError, "conversation 1 must be a list of messages"),
        (lambda: as_conversations([*HI, "x"]), TypeError, "message 1 must be a dict with a role and a content"),
        (lambda: as_pairs(["a", "b"], ["c"]), ValueError, "2 prompts and 1 continuations do not pair up"),
        (lambda: as_pairs("a", ["b", "c"]), ValueError, r"for one prompt with several, \[prompt\] \* 2"),
        (lambda: as_pairs("a", None), TypeError, "continuations must be .* got None"),
        (lambda: list(each_request("abc", GREEDY)), TypeError, r"takes tuples \(key, prompt, params\), got str 'abc'"),
        (lambda: list(each_request([("k", "a")], GREEDY)), TypeError, "request 0 must be .key, prompt, params."),
        (lambda: list(each_request([(1, 5, None)], GREEDY)), TypeError, "request 0 with key 1: the prompt must be"),
        (lambda: list(each_request([(1, "a", 5)], GREEDY)), TypeError, "request 0 with key 1: params must be"),
        (lambda: as_count("max_queued", "4"), TypeError, "max_queued must be a positive integer, got str '4'"),
        (lambda: as_count("max_queued", 0), ValueError, "max_queued must be at least 1, got 0"),
        (lambda: as_names("taps", "layers.3.residual"), TypeError, "taps must be a list of names, got str"),
        (lambda: as_names("taps", [3]), TypeError, "taps must be a list of names, got int 3 in it"),
        (lambda: checked_options(5, {}), TypeError, "model must be a folder, .* got int 5"),
        (lambda: checked_options("m", {"seed": "a"}), TypeError, "seed must be an integer, got str 'a'"),
        (lambda: checked_options("m", {"tokenizer": 5}), TypeError, "tokenizer must be a folder or .* got int 5"),
        (lambda: checked_options("m", {"draft": 5}), TypeError, "draft must be a model or head, .* got int 5"),
        (lambda: checked_options("m", {"quantize": 8}), TypeError, "quantize must be a text, got int 8"),
        (lambda: checked_options("m", {"temperature": 1}), TypeError, "it belongs to SamplingParams"),
    ],
)
def test_wrong_arguments_raise_sentences(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_one_for_all_or_one_for_each():
    other = SamplingParams(n=2)
    assert params_of_each(None, GREEDY, 2) == [GREEDY, GREEDY]
    assert params_of_each([other, None], GREEDY, 2) == [other, GREEDY]
    assert priorities_of_each(3, 2) == [3, 3]
    assert priorities_of_each((1, 2), 2) == [1, 2]
    assert as_conversations(HI) == [HI]
    assert as_conversations([HI, HI]) == [HI, HI]
    assert as_pairs("a", "b") == [("a", "b")]
    assert list(each_request([("k", "a", None)], GREEDY)) == [("k", "a", GREEDY, DEFAULT_REQUEST_OPTIONS)]


class Model:
    @takes_other_names
    def generate(self, prompts, params=None, *, use_tqdm=None):
        return prompts, params, use_tqdm

    @takes_other_names
    def chat(self, messages, params=None, **template_kwargs):
        return messages, params, template_kwargs


def test_methods_take_names_and_show_their_form():
    model = Model()
    assert model.generate("a", sampling_params=GREEDY) == ("a", GREEDY, None)  # type: ignore[call-arg]
    assert model.chat(HI, sampling_params=GREEDY, enable_thinking=False) == (HI, GREEDY, {"enable_thinking": False})
    assert model.chat(HI, chat_template_kwargs={"x": 1}) == (HI, None, {"x": 1})
    for call, message in (
        (lambda: model.generate(), r"missing a required argument: 'prompts'; the call is generate\(prompts, params"),
        (lambda: model.generate("a", max_tokens=5), r"it belongs to SamplingParams, as in generate\(prompts, Samp"),
        (lambda: model.generate("a", max_seqs=5), "it belongs to LLM"),
        (lambda: model.generate("a", max_new_tokens=5), "SamplingParams takes it as max_tokens"),
        (lambda: model.generate("a", use_tqmd=True), "did you mean 'use_tqdm'"),
        (lambda: model.chat(HI, temperature=5), "chat has no argument 'temperature': it belongs to SamplingParams"),
        (lambda: model.chat(HI, temp=5), "SamplingParams takes it as temperature"),
        (lambda: model.chat(HI, timeout=5), "chat has no argument 'timeout': it belongs to generate"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
