"""SamplingParams: defaults, limits, messages."""

import copy
import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.sampling.params import SamplingParams, SamplingParamsError

# vLLM's documented defaults; None of a list field reads as empty.
DEFAULTS = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": (),
    "stop_token_ids": (),
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": (),
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "structured": None,
}

NOT_NUMBERS = (math.nan, math.inf, -math.inf, True, "1", None, 10**400, 1j)

# field: (accepted values at the limits, refused values)
LIMITS = {
    "n": ((1, 256, np.int64(2)), (0, 257, 1.0, True, None)),
    "temperature": ((0, 1e-5, 100, np.float32(0.5)), (9e-6, -0.1, 100.1, *NOT_NUMBERS)),
    "top_p": ((1e-30, 1), (0, -0.1, 1.01, *NOT_NUMBERS)),
    "top_k": ((0, -1, 1, 2**22), (-2, 2**22 + 1, 1.0, True, None)),
    "min_p": ((0, 1), (-0.01, 1.01, *NOT_NUMBERS)),
    "seed": ((None, 0, 2**64 - 1), (-1, 2**64, 1.0, True, "1")),
    "stop": (
        ("a", ["a", "b"], ["x" * 1024], [f"{i}" for i in range(16)], None, ()),
        ("", [""], ["x" * 1025], [f"{i}" for i in range(17)], [1], 1, b"a", {"a": 1}, True),
    ),
    "stop_token_ids": (
        (None, (), [0, 5], range(64), np.arange(3)),
        (range(65), [-1], [2**22], [1.0], [True], "12", 5, {1: 2}),
    ),
    "ignore_eos": ((True, False), (1, 0, None, "true")),
    "max_tokens": ((None, 1, 2**24), (0, -1, 2**24 + 1, 1.0, True)),
    "min_tokens": ((0, 16), (-1, 2**24 + 1, 1.0, True, None)),
    "logprobs": ((None, 0, 20), (-1, 21, True, 1.0)),
    "prompt_logprobs": ((None, 0, 20), (-1, 21, True, 1.0)),
    "presence_penalty": ((-2, 2), (-2.1, 2.1, *NOT_NUMBERS)),
    "frequency_penalty": ((-2, 2), (-2.1, 2.1, *NOT_NUMBERS)),
    "repetition_penalty": ((1e-5, 10), (0, 1e-6, -1, 10.1, *NOT_NUMBERS)),
    "logit_bias": (
        (None, {}, {0: 100, 7: -100.0}, dict.fromkeys(range(1024), 1)),
        (
            {0: 100.5},
            {0: math.nan},
            {0: True},
            {-1: 1},
            {2**22: 1},
            {"1": 1},
            {True: 1},
            dict.fromkeys(range(1025), 1),
            [1],
        ),
    ),
    "allowed_token_ids": ((None, [0], range(3)), ([], [-1], [2**22], [1.5], [True], "1", 3)),
    "bad_words": (
        (None, (), "word", ["x" * 256]),
        ([""], ["x" * 257], [f"{i}" for i in range(129)], [1], 1, {"a": 1}),
    ),
    "skip_special_tokens": ((True, False), (1, None)),
    "include_stop_str_in_output": ((True, False), (1, None)),
    "structured": (
        (None, {"regex": "a"}, {"json": {}}, {"choice": ["a"] * 4096}, {"type": "json_object"}),
        ("a", {}, {"regex": 1}, {"json": 7}, {"choice": ["a"] * 4097}, {"regex": "a" * (2**20 + 1)}, 7),
    ),
}


def test_defaults_are_those_of_vllm():
    assert dataclasses.asdict(SamplingParams()) == DEFAULTS


def test_every_field_has_limits_here():
    assert set(LIMITS) == {f.name for f in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, (good, _) in LIMITS.items() for v in good], ids=str)
def test_values_at_the_limits_are_accepted(name, value):
    SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, (_, bad) in LIMITS.items() for v in bad], ids=lambda v: repr(v)[:30]
)
def test_values_beyond_the_limits_are_refused_by_name(name, value):
    with pytest.raises(SamplingParamsError) as refusal:
        SamplingParams(**{name: value})
    assert refusal.value.parameter == name
    assert name in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 101}, r"temperature must be 0 \(greedy\) or a finite number in \[1e-05, 100\], got 101"),
        ({"top_p": 1.5}, r"top_p must be a finite number in \(0, 1\], got 1.5"),
        ({"n": True}, r"n must be an integer in 1..256, got True"),
        ({"stop_token_ids": range(65)}, r"stop_token_ids must be at most 64 token ids, got 65"),
        ({"logit_bias": {3: 101}}, r"logit_bias must be a finite number in \[-100, 100\], got 101"),
        ({"stop": "x" * 2000}, r"stop must be strings of 1..1024 characters, not 2000, got 'xxxx"),
        ({"min_tokens": 17}, r"min_tokens=17 is larger than max_tokens=16"),
        ({"n": 2, "temperature": 0}, r"n=2 with temperature=0"),
    ],
)
def test_messages_carry_field_value_and_limit(values, message):
    with pytest.raises(SamplingParamsError, match=message):
        SamplingParams(**values)


def test_long_values_are_cut_in_messages():
    with pytest.raises(SamplingParamsError) as refusal:
        SamplingParams(stop=["x" * 10**6])
    assert len(str(refusal.value)) < 200


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=2)
    | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*DEFAULTS, "max_new_tokens", ""]), junk, max_size=3))
def test_junk_is_accepted_or_refused_but_never_crashes(mapping):
    try:
        params = SamplingParams.from_dict(mapping)
    except SamplingParamsError:
        return
    assert SamplingParams(**dataclasses.asdict(params)) == params


def test_equal_meanings_are_stored_alike():
    params = SamplingParams(
        top_k=-1, stop="a", stop_token_ids=[3, 3, 1], bad_words=["b", "b"], temperature=np.float32(0.5)
    )
    assert (params.top_k, params.stop, params.stop_token_ids, params.bad_words) == (0, ("a",), (3, 1), ("b",))
    assert type(params.temperature) is float
    assert SamplingParams(stop_token_ids=[1]) == SamplingParams(stop_token_ids=(1,))


def test_params_are_hashable_picklable_and_replaceable():
    params = SamplingParams(logit_bias={1: 2.0}, stop=["a"], seed=2**63)
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}, stop=["a"], seed=2**63))
    assert copy.deepcopy(params) == params
    assert dataclasses.replace(params, temperature=0).is_greedy
    with pytest.raises(SamplingParamsError):
        dataclasses.replace(params, top_p=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_p = 0.5  # type: ignore[misc]


def test_the_callers_mapping_is_copied():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 1e9
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize(
    ("name", "hint"),
    [("max_token", "max_tokens"), ("temprature", "temperature"), ("topp", "top_p")],
)
def test_unknown_names_raise_with_the_nearest(name, hint):
    with pytest.raises(SamplingParamsError, match=f"'{name}' is not a sampling parameter: did you mean '{hint}'"):
        SamplingParams.from_dict({name: 1})


def test_an_unknown_name_near_none_lists_all():
    with pytest.raises(SamplingParamsError, match="known are n, temperature, top_p"):
        SamplingParams.from_dict({"zzz": 1})


def test_from_dict_takes_the_decimal_keys_of_json():
    assert SamplingParams.from_dict({"logit_bias": {"50": -100}}).logit_bias == {50: -100.0}
    with pytest.raises(SamplingParamsError):
        SamplingParams.from_dict({"logit_bias": {"-1": 1}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop_token_ids": [9, 10]}, "stop_token_ids has token id 10, the vocabulary has 10 tokens"),
        ({"logit_bias": {11: 1}}, "logit_bias has token id 11, the vocabulary has 10 tokens"),
        ({"allowed_token_ids": [10]}, "allowed_token_ids has token id 10"),
        ({"max_tokens": 65}, "max_tokens=65, the model's length is 64 tokens"),
        ({"max_tokens": None, "min_tokens": 65}, "min_tokens=65, the model's length is 64 tokens"),
        ({"logprobs": 11}, "logprobs=11, the vocabulary has 10 tokens"),
        ({"prompt_logprobs": 20}, "prompt_logprobs=20, the vocabulary has 10 tokens"),
    ],
)
def test_validate_for_model(values, message):
    with pytest.raises(SamplingParamsError, match=message):
        SamplingParams(**values).validate_for_model(vocab_size=10, max_model_len=64)


def test_validate_for_model_accepts_the_limits():
    SamplingParams(
        stop_token_ids=[9], logit_bias={9: 1}, allowed_token_ids=[9], max_tokens=64, logprobs=10, top_k=11
    ).validate_for_model(vocab_size=10, max_model_len=64)


def test_params_come_without_jax():
    code = (
        "import sys, jaxinfer; before = set(sys.modules); import jaxinfer.sampling.params, jaxinfer.sampling.seeds, "
        "jaxinfer.sampling.generation_config; print('jax' in set(sys.modules) - before)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_the_package_exports_what_it_lists():
    import jaxinfer.sampling as room

    for name in room.__all__:
        assert getattr(room, name).__module__.startswith("jaxinfer.sampling.")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = room.nothing
