"""Who decides a row's sampling parameters, and its seed."""

import pytest

from jaxinfer.batch.input import BatchRow
from jaxinfer.batch.job import Defaults
from jaxinfer.batch.rows import BatchRequest
from jaxinfer.openai.errors import RequestError
from jaxinfer.openai.requests import TextRequest
from jaxinfer.sampling.params import SamplingParams, SamplingParamsError
from jaxinfer.sampling.seeds import derive_seed
from tests.batch.conftest import FakeLLM

CHECKPOINT = SamplingParams(temperature=0.6, top_k=20, max_tokens=96)


def params(given=None, form="plain", line=1, seed=0, echo=False, checkpoint=CHECKPOINT, **sampling):
    has = {"messages": [{"role": "user", "content": "x"}]} if form == "chat" else {"prompts": ("x",)}
    text = TextRequest(sampling, echo=echo, has_openai_limits=form != "plain", **has)
    model, row = FakeLLM(**vars(checkpoint)), BatchRow(line, "a", BatchRequest(form, text))
    return Defaults.of(checkpoint, given, seed).bind(row, model, model.answer_format).params


def test_the_row_goes_before_the_job_before_the_checkpoint():
    found = params({"top_k": 30, "min_p": 0.1}, min_p=0.2)
    assert (found.temperature, found.top_k, found.min_p) == (0.6, 30, 0.2)


@pytest.mark.parametrize(("form", "own"), [("chat", None), ("completions", 16), ("plain", 16)])
def test_each_form_has_a_length_of_its_own(form, own):
    assert params(form=form).max_tokens == 96  # the checkpoint's
    assert params(form=form, checkpoint=SamplingParams()).max_tokens == own
    assert params({"max_tokens": 5}, form=form).max_tokens == 5
    assert params({"max_tokens": 5}, form=form, max_tokens=7).max_tokens == 7


def test_whole_parameters_replace_the_checkpoints():
    assert params(SamplingParams()) == SamplingParams(seed=derive_seed(0, 0))


def test_a_seed_belongs_to_the_line():
    assert params(line=3).seed == derive_seed(0, 2)
    assert params(line=3, seed=9).seed == derive_seed(9, 2)
    assert params({"seed": 7}, line=3).seed == derive_seed(7, 2)
    assert params(SamplingParams(seed=7), line=3).seed == derive_seed(7, 2)
    assert params({"seed": 7}, line=3, seed=4).seed == derive_seed(7, 2)


def test_echo_shows_the_prompts_log_probabilities_too():
    assert params(form="completions", echo=True, logprobs=3).prompt_logprobs == 3
    assert params({"logprobs": 2}, form="completions", echo=True).prompt_logprobs == 2
    assert params(form="completions", echo=True, logprobs=3, prompt_logprobs=1).prompt_logprobs == 1
    assert params(form="completions", logprobs=3).prompt_logprobs is None


def test_what_is_out_of_range_is_refused():
    with pytest.raises(SamplingParamsError, match="top_p"):
        Defaults.of(CHECKPOINT, {"top_p": 2}, 0)
    with pytest.raises(SamplingParamsError, match="did you mean 'temperature'"):
        Defaults.of(CHECKPOINT, {"temprature": 2}, 0)
    with pytest.raises(RequestError, match="top_p"):
        params(top_p=2)


def test_a_default_length_is_no_less_than_min_tokens():
    assert params(min_tokens=100).max_tokens == 100
    with pytest.raises(RequestError, match="min_tokens=100 is larger than max_tokens=9"):
        params(min_tokens=100, max_tokens=9)
