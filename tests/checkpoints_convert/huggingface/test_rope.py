import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from checkpoints_convert.huggingface.rope import rope_config
from jaxinfer.checks import whole_numbers
from jaxinfer.models import RopeConfig
from jaxinfer.models.rope import inverse_frequencies

# Computed by Transformers 5.23 from the same fragments of config.json (64 wide, 4 heads, 512 positions).
REFERENCE = json.loads((Path(__file__).parent / "rope_reference.json").read_text())


def read(data, **changes):
    problems = []
    rope = rope_config(whole_numbers(data), problems, **{"head_dim": 16, "max_position_embeddings": 512, **changes})
    return rope, problems


@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: case["name"])
def test_frequencies_are_those_of_transformers(case):
    rope, problems = read(case["config"])
    assert (rope.kind, problems) == (case["kind"], [])
    frequencies, factor = inverse_frequencies(replace(rope, sequence_length=case["length"]))
    # float32 arithmetic there, float64 here: a dozen roundings of 2**-24
    np.testing.assert_allclose(frequencies, case["inverse_frequencies"], rtol=12 * 2**-24)
    assert factor == pytest.approx(case["factor"], rel=1e-12)


@pytest.mark.parametrize(
    "data",
    [
        {"rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [2] * 8}},
    ],
)
def test_su_is_longrope(data):
    rope, problems = read({**data, "original_max_position_embeddings": 128})
    assert problems == []
    assert (rope.kind, rope.factor, rope.short_factor, rope.long_factor) == ("longrope", 4.0, (1.0,) * 8, (2.0,) * 8)


@pytest.mark.parametrize(
    ("zeros", "same"),
    [
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 0}, {"rope_type": "yarn", "factor": 2.0}),
        (
            {"rope_type": "yarn", "factor": 0, "original_max_position_embeddings": 128},
            {"rope_type": "yarn", "factor": 4},
        ),
        ({"rope_type": "linear", "factor": 2.0, "mscale": 0, "beta_fast": 0.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 0}, {"rope_type": "dynamic", "factor": 2.0}),
        ({"rope_type": "default", "factor": 1.0, "attention_factor": 0}, {}),
        ({"rope_type": "default", "factor": 0}, {}),
    ],
)
def test_zero_is_as_a_field_that_is_missing(zeros, same):
    original = zeros.get("original_max_position_embeddings")
    same = {**same, "original_max_position_embeddings": original} if original else same
    assert read({"rope_scaling": zeros}) == read({"rope_scaling": same})
    assert read({"rope_scaling": zeros})[1] == []


def test_mrope_is_the_default_rotation_for_text():
    rope, problems = read({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e6})
    assert (rope, problems) == (RopeConfig(theta=1e6, rotary_dim=16), [])


def test_settings_nested_by_layer_type_must_agree_for_the_layers_there_are():
    linear, other = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "default", "rope_theta": 1e6}
    nested = {"rope_parameters": {"full_attention": linear, "sliding_attention": other}}
    rope, problems = read(nested, layer_types=["full_attention"])
    assert (rope.kind, rope.factor, problems) == ("linear", 2.0, [])
    rope, problems = read(nested, layer_types=["sliding_attention"] * 2)
    assert (rope.theta, problems) == (1e6, [])
    _, problems = read(nested, layer_types=["full_attention", "sliding_attention"])
    assert problems == [
        "rope_parameters differs between full_attention and sliding_attention; one rotation serves all layers"
    ]
    _, problems = read({"rope_parameters": {"sliding_attention": other}})
    assert problems == ["rope_parameters.full_attention must be an object, got None"]


def test_part_of_a_head_is_rotated():
    assert read({"partial_rotary_factor": 0.5})[0].rotary_dim == 8
    assert read({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}})[0].rotary_dim == 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object or null, got 'yarn'"),
        ({"rope_scaling": {"type": "yarnn"}}, "rope_scaling.rope_type 'yarnn' is not one of default, linear, .*'yarn'"),
        ({"rope_scaling": {"type": 3}}, "rope_scaling.rope_type 3 is not one of"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "rope_scaling.factor is null"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "rope_scaling.factor must be a positive number, got '4'"),
        ({"rope_scaling": {"type": "linear", "factor": -4}}, "rope_scaling.factor must be a positive number, got -4"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2, "alpha": 1000}}, "alpha is not a setting of rope type 'dyn"),
        ({"rope_scaling": {"type": "yarn", "beta_fasst": 1}}, "beta_fasst is not a setting.*did you mean 'beta_fast'"),
        ({"rope_scaling": {"type": "yarn", "truncate": 1}}, "rope_scaling.truncate must be true or false"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "high_freq_factor is missing"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
            "high_freq_factor must be at least low_freq_factor=4.0, got 1.0",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}},
            "rope_scaling.short_factor must be a list of 8 positive numbers, got 7 of them",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0, "x"] * 4}},
            "rope_scaling.long_factor must be a list of 8 positive numbers, got",
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}}, "rope_scaling.long_factor is missing"),
        ({"rope_theta": 0}, "rope_theta must be a positive number, got 0"),
        ({"rope_theta": float("inf")}, "rope_theta must be a positive number"),
        ({"partial_rotary_factor": 0.2}, "makes 3 rotated dimensions of 16"),
        ({"partial_rotary_factor": 1.5}, "makes 24 rotated dimensions of 16"),
        ({"rope_parameters": {"rope_type": "quadratic"}}, "'quadratic' is not one of"),
    ],
)
def test_bad_settings_are_named(data, message):
    _, problems = read(data)
    assert len(problems) == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(problems[0])
