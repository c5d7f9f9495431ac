"""generation_config.json: what is applied, what is reported."""

import pytest

from jaxinfer.sampling.generation_config import from_generation_config
from jaxinfer.sampling.params import SamplingParams, SamplingParamsError


def test_a_sampling_config():
    defaults = from_generation_config(
        {
            "bos_token_id": 128000,
            "do_sample": True,
            "eos_token_id": [128001, 128008, 128009],
            "temperature": 0.6,
            "top_p": 0.9,
            "transformers_version": "4.42.3",
        }
    )
    assert defaults.params == SamplingParams(temperature=0.6, top_p=0.9)
    assert defaults.eos_token_ids == (128001, 128008, 128009)
    assert defaults.ignored == ()


def test_every_applied_field_and_overrides_win():
    config = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
    }
    params = from_generation_config(config, top_p=0.5, seed=3).params
    assert params == SamplingParams(
        temperature=0.7, top_k=20, top_p=0.5, min_p=0.1, repetition_penalty=1.05, max_tokens=2048, seed=3
    )


def test_do_sample_false_is_greedy_and_reports_the_idle_filters():
    config = {"do_sample": False, "temperature": 0.6, "top_k": 50, "repetition_penalty": 1.1}
    defaults = from_generation_config(config)
    assert defaults.params == SamplingParams(temperature=0, repetition_penalty=1.1)
    assert defaults.ignored == ("temperature", "top_k")
    assert from_generation_config(config, temperature=0.5).params.temperature == 0.5


@pytest.mark.parametrize("config", [{}, {"do_sample": None}, {"do_sample": True}, {"temperature": None, "top_k": None}])
def test_a_silent_config_leaves_the_defaults(config):
    assert from_generation_config(config) == (SamplingParams(), (), ())


def test_what_we_do_not_do_is_reported():
    config = {"num_beams": 4, "no_repeat_ngram_size": 3, "max_length": 4096, "suppress_tokens": [1], "new_thing": 2}
    assert from_generation_config(config).ignored == (
        "max_length",
        "new_thing",
        "no_repeat_ngram_size",
        "num_beams",
        "suppress_tokens",
    )


def test_neutral_values_are_not_reported():
    config = {
        "num_beams": 1,
        "no_repeat_ngram_size": 0,
        "length_penalty": 1.0,
        "suppress_tokens": [],
        "guidance_scale": None,
        "early_stopping": False,
        "pad_token_id": 0,
        "use_cache": True,
        "max_length": 20,
    }
    assert from_generation_config(config).ignored == ()


def test_one_eos_id():
    assert from_generation_config({"eos_token_id": 2}).eos_token_ids == (2,)


@pytest.mark.parametrize(
    "config", [{"eos_token_id": "2"}, {"eos_token_id": [2, -2]}, {"eos_token_id": True}, {"eos_token_id": 2.5}]
)
def test_malformed_ends_raise(config):
    with pytest.raises(SamplingParamsError, match=next(iter(config))):
        from_generation_config(config)


@pytest.mark.parametrize(
    "config",
    [
        {"max_new_tokens": -5},
        {"max_new_tokens": "many"},
        {"temperature": -1},
        {"temperature": 1e9},
        {"temperature": float("nan")},
        {"temperature": [0.5]},
        {"top_p": 1.5},
        {"top_k": 2.5},
        {"top_k": -7},
        {"min_p": None, "repetition_penalty": 0},
        {"do_sample": "yes"},
    ],
)
def test_a_default_that_is_invalid_is_reported_and_closes_nothing(config):
    defaults = from_generation_config({"top_p": 0.5, **config})
    name = next(name for name, value in config.items() if value is not None)
    assert defaults.params == SamplingParams(top_p=1.0 if name == "top_p" else 0.5)
    (ignored,) = defaults.ignored
    assert ignored.startswith(f"{name}=")
    with pytest.raises(SamplingParamsError, match="top_p"):
        from_generation_config(config, top_p=7)


def test_a_tiny_temperature_is_greedy():
    assert from_generation_config({"temperature": 0.000001}) == (SamplingParams(temperature=0), (), ())


def test_whole_numbers_may_be_floats():
    defaults = from_generation_config({"top_k": 20.0, "max_new_tokens": 64.0, "eos_token_id": [2.0, 3]})
    assert defaults.params == SamplingParams(top_k=20, max_tokens=64)
    assert [type(value) for value in (defaults.params.top_k, *defaults.eos_token_ids)] == [int] * 3


@pytest.mark.parametrize("value", [None, -1, [], [None], [-1, None]])
def test_values_that_mean_no_end(value):
    assert from_generation_config({"eos_token_id": value}) == (SamplingParams(), (), ())
    listed = value if isinstance(value, list) else [value]
    assert from_generation_config({"eos_token_id": [*listed, 7]}).eos_token_ids == (7,)
