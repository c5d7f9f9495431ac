"""Answers that go on after tokens that were made elsewhere, in engines of several kinds: the tokens that follow are
those of the undisturbed answer."""

import jax
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.request import BegunAnswer
from jaxinfer.models import init_params
from tests.tiny import OPTIONS, TINY

PROMPT = list(range(3, 40))
SLOW = pytest.mark.slow
ENGINES = [
    pytest.param({}, id="plain"),
    pytest.param({"draft": "ngram", "num_draft_tokens": 3}, id="with a draft", marks=SLOW),
    pytest.param({"steps_per_dispatch": 4, "num_pages": 12}, id="short of pages", marks=SLOW),
    pytest.param({"mesh": "data=2"}, id="two engines", marks=SLOW),
    pytest.param({"deterministic": True}, id="deterministic", marks=SLOW),
]
REQUESTS = [
    SamplingParams(max_tokens=20, seed=5, temperature=1.0, ignore_eos=True),
    SamplingParams(max_tokens=20, seed=6, n=2, frequency_penalty=0.7, repetition_penalty=1.2, logprobs=1),
    SamplingParams(max_tokens=20, temperature=0.0, min_tokens=12, logit_bias={7: 3.0}),
]


def ended(llm, request):
    """The output of a request, and how many tokens its answers were given in the engine."""
    *_, last = llm.client.stream(request)
    return last.output


@pytest.mark.slow
@pytest.mark.parametrize("options", ENGINES)
def test_the_rest_is_that_of_the_undisturbed_answer(options):
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, init_params(TINY, jax.random.key(0)))
    with LLM((TINY, params), **{**OPTIONS, **options}) as llm:
        for sampling in REQUESTS:
            request = llm.prepare(PROMPT, sampling)
            whole = ended(llm, request)
            for cut in (0, 1, 7, 19, 20):
                parts = [
                    BegunAnswer(tuple(answer.token_ids[: max(cut - 4 * index, 0)]), cut >= 20 + 4 * index)
                    for index, answer in enumerate(whole.outputs)
                ]
                begun = ended(llm, llm.client.begun(request, parts))
                assert [answer.token_ids for answer in begun.outputs] == [answer.token_ids for answer in whole.outputs]
                ends = [(answer.finish_reason, answer.stop_reason) for answer in begun.outputs]
                assert ends == [(answer.finish_reason, answer.stop_reason) for answer in whole.outputs]
                assert [answer.seed for answer in begun.outputs] == [answer.seed for answer in whole.outputs]
                assert [answer.weights for answer in begun.outputs] == [answer.weights for answer in whole.outputs]


def test_beginnings_that_fit_no_answer_are_refused():
    with LLM((TINY, init_params(TINY, jax.random.key(0))), **OPTIONS) as llm:
        request = llm.prepare(PROMPT, SamplingParams(max_tokens=4, n=2, stop_token_ids=[9]))
        for parts, words in (
            ([BegunAnswer()], "1 answers were begun, and n=2"),
            ([BegunAnswer((1,) * 5), BegunAnswer()], "answer 0 begins with 5 tokens, of 4 at most"),
            ([BegunAnswer(), BegunAnswer((TINY.vocab_size,))], "answer 1 begins with"),
            ([BegunAnswer(), BegunAnswer((-1,))], "answer 1 begins with"),
            ([BegunAnswer(), BegunAnswer((9, 1))], "answer 1 goes on after token 9, which ends answers"),
        ):
            with pytest.raises(ValueError, match=words):
                llm.client.begun(request, parts)
        scored = llm.prepare(PROMPT, SamplingParams(max_tokens=4, prompt_logprobs=1))
        with pytest.raises(ValueError, match="hidden states of its prompt are read"):
            llm.client.begun(scored, [BegunAnswer((1,))])
