"""Rotations: frequencies against Transformers and against the formulas of the papers, application against complex
numbers."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models import RopeConfig
from jaxinfer.models.rope import Positions, inverse_frequencies, rotate, rotation

# tests/oracle/make_golden.py writes it; the cases are in tests/oracle/rope_cases.py.
STORED = json.loads((Path(__file__).parents[1] / "oracle" / "golden" / "rope.json").read_text())
# Transformers computes in float32, with a few roundings on the way.
RELATIVE = 4e-7


def rope_of(case: dict) -> RopeConfig:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in case["config"].items()}
    return RopeConfig(**values)


def both(rope: RopeConfig) -> np.ndarray:
    frequencies, scaling = inverse_frequencies(rope)
    return np.array([*frequencies, scaling])


@pytest.mark.parametrize("name", STORED)
def test_frequencies_are_those_of_transformers(name):
    frequencies, scaling = inverse_frequencies(rope_of(STORED[name]))
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, STORED[name]["frequencies"], rtol=RELATIVE)
    assert scaling == pytest.approx(STORED[name]["scaling"], rel=1e-6)


# Beyond its original length torch raises a tensor to a power, which is not rounded as a number's is.
@pytest.mark.parametrize("name", [name for name in STORED if name != "dynamic_long"])
def test_frequencies_are_rounded_as_in_transformers(name):
    found, _ = inverse_frequencies(rope_of(STORED[name]))
    assert found.dtype == np.float32
    assert np.count_nonzero(found != np.float32(STORED[name]["frequencies"])) <= 2


KINDS = {
    "linear": ("linear", "factor", 8.001),
    "dynamic_long": ("dynamic", "sequence_length", 6999),
    "llama_3.1": ("llama3", "low_freq_factor", 1.001),
    "llama_3.2": ("llama3", "high_freq_factor", 4.001),
    "yarn_qwen2.5": ("yarn", "factor", 4.001),
    "yarn_gpt_oss": ("yarn", "truncate", True),
    "yarn_betas": ("yarn", "beta_slow", 1.0),
    "yarn_two_mscales": ("yarn", "mscale", 1.001),
    "yarn_attention_factor": ("yarn", "attention_factor", None),
    "longrope_long": ("longrope", "sequence_length", 4096),
    "longrope_attention_factor": ("longrope", "attention_factor", None),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_comparison_catches_a_small_change(name):
    kind, field, value = KINDS[name]
    rope = rope_of(STORED[name])
    assert rope.kind == kind
    change = np.abs(both(replace(rope, **{field: value})) / both(rope) - 1).max()
    assert change > 10 * RELATIVE


# Formulas of the papers, one frequency at a time.


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_default_is_a_geometric_series(theta):
    frequencies, scaling = inverse_frequencies(RopeConfig(rotary_dim=32, theta=theta))
    assert scaling == 1.0
    np.testing.assert_allclose(frequencies, [1 / theta ** (2 * i / 32) for i in range(16)], rtol=RELATIVE)


def test_dynamic_at_its_original_length_is_default_and_grows_the_base_beyond():
    default, _ = inverse_frequencies(RopeConfig(rotary_dim=32))
    rope = RopeConfig(kind="dynamic", rotary_dim=32, factor=2.0, original_length=128)
    for length in (None, 1, 127, 128):
        np.testing.assert_array_equal(inverse_frequencies(replace(rope, sequence_length=length))[0], default)
    base = 10000 * (2 * 300 / 128 - 1) ** (32 / 30)
    expected = [1 / base ** (2 * i / 32) for i in range(16)]
    np.testing.assert_allclose(inverse_frequencies(replace(rope, sequence_length=300))[0], expected, rtol=RELATIVE)


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between():
    rope = RopeConfig(kind="llama3", theta=500000.0, rotary_dim=128, factor=8.0, original_length=8192)
    found, scaling = inverse_frequencies(rope)
    assert scaling == 1.0
    sides = set()
    for i, frequency in enumerate(found):
        plain = 500000 ** (-2 * i / 128)
        turns = 8192 * plain / (2 * math.pi)  # within the original length
        blend = min(max((turns - 1) / (4 - 1), 0), 1)
        assert frequency == pytest.approx((1 - blend) * plain / 8 + blend * plain, rel=RELATIVE)
        sides.add("long" if turns < 1 else "short" if turns > 4 else "between")
    assert sides == {"long", "short", "between"}


def test_yarn_interpolates_by_turns_within_the_original_length():
    # Without rounding of the bounds, the ramp falls from 1 at beta_fast turns to 0 at beta_slow, in the index i.
    rope = RopeConfig(
        kind="yarn", rotary_dim=64, factor=8.0, original_length=2048, beta_fast=32.0, beta_slow=1.0, truncate=False
    )
    found, scaling = inverse_frequencies(rope)
    assert scaling == pytest.approx(0.1 * math.log(8) + 1)
    for i, frequency in enumerate(found):
        plain = 10000 ** (-2 * i / 64)
        turns = 2048 * plain / (2 * math.pi)
        if turns > 32:
            expected = plain
        elif turns < 1:
            expected = plain / 8
        else:
            keep = math.log(turns) / math.log(32)
            expected = keep * plain + (1 - keep) * plain / 8
        assert frequency == pytest.approx(expected, rel=1e-6)


def test_longrope_takes_its_factors_by_length():
    rope = RopeConfig(
        kind="longrope", rotary_dim=4, factor=4.0, original_length=128, short_factor=(1.0, 1.5), long_factor=(2.0, 8.0)
    )
    for length in (None, 100, 128):
        found, scaling = inverse_frequencies(replace(rope, sequence_length=length))
        np.testing.assert_allclose(found, [1, 0.01 / 1.5], rtol=RELATIVE)
        assert scaling == pytest.approx(math.sqrt(1 + math.log(4) / math.log(128)))
    found, _ = inverse_frequencies(replace(rope, sequence_length=129))
    np.testing.assert_allclose(found, [1 / 2, 0.01 / 8], rtol=RELATIVE)


def test_llama3_may_blend_nothing():
    """Llama 4 Scout has 1 as both factors: waves longer than the original length are stretched, others are kept."""
    rope = RopeConfig(
        kind="llama3", theta=500000.0, rotary_dim=128, factor=16.0, original_length=8192, high_freq_factor=1.0
    )
    plain = inverse_frequencies(replace(rope, kind="default"))[0]
    is_long = 2 * np.pi / plain > 8192
    found = inverse_frequencies(rope)[0]
    assert 0 < is_long.sum() < 64
    np.testing.assert_allclose(found, np.where(is_long, plain / 16, plain), rtol=1e-6)


@pytest.mark.parametrize(("length", "factors", "mscale"), [(128, (1.0, 1.5), 1.2), (129, (2.0, 8.0), 1.3)])
def test_longrope_may_have_a_scale_for_each_length(length, factors, mscale):
    rope = RopeConfig(
        kind="longrope", rotary_dim=4, factor=4.0, original_length=128, short_factor=(1.0, 1.5), long_factor=(2.0, 8.0),
        short_mscale=1.2, long_mscale=1.3, sequence_length=length,
    )  # fmt: skip
    frequencies, scaling = inverse_frequencies(rope)
    assert scaling == mscale
    np.testing.assert_allclose(frequencies, [1 / factors[0], 1 / (factors[1] * 100)], rtol=1e-6)


def test_the_temperature_of_queries_grows_by_periods():
    positions, q = jnp.array([0, 6, 7, 15, 700]), jnp.ones((5, 1, 2))
    found = Positions(positions).temperature_scaled(q, 0.5, 8)
    periods = [0, 0, 1, 2, 87]
    np.testing.assert_allclose(found[:, 0, 0], 1 + 0.5 * np.log1p(periods), rtol=1e-6)


@pytest.mark.parametrize("kind", ["dynamic", "llama3", "yarn", "longrope"])
def test_a_missing_original_length_is_named(kind):
    with pytest.raises(ValueError, match=f"rope kind '{kind}' needs original_length"):
        inverse_frequencies(RopeConfig(kind=kind, factor=2.0))


@pytest.mark.parametrize(("factors", "count"), [(None, 0), ((1.0, 2.0, 3.0), 3)])
def test_longrope_factors_are_counted(factors, count):
    rope = RopeConfig(kind="longrope", rotary_dim=8, original_length=128, short_factor=factors)
    with pytest.raises(ValueError, match=f"longrope needs 4 factors, one per frequency; got {count}"):
        inverse_frequencies(rope)


# Application.


def test_rotation_is_multiplication_by_a_complex_number():
    rope = RopeConfig(rotary_dim=8)
    positions = jnp.array([0, 1, 7, 250], jnp.int32)
    x = np.random.default_rng(0).standard_normal((4, 3, 8), np.float32)
    turned = np.asarray(rotate(jnp.asarray(x), *rotation(rope, positions)))
    numbers = x[..., :4] + 1j * x[..., 4:]
    angles = np.asarray(positions)[:, None] * 10000.0 ** -(np.arange(4) / 4)
    expected = numbers * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(turned[..., :4] + 1j * turned[..., 4:], expected, atol=3e-5)
    np.testing.assert_array_equal(turned[0], x[0])


def test_scores_depend_on_the_distance_alone():
    rope = RopeConfig(rotary_dim=16)
    q, k = np.random.default_rng(1).standard_normal((2, 1, 1, 16)).astype(np.float32)

    def score(at_q, at_k):
        turned = [rotate(jnp.asarray(x), *rotation(rope, jnp.array([p]))) for x, p in ((q, at_q), (k, at_k))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


def test_what_lies_beyond_rotary_dim_stays():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((5, 2, 16), np.float32))
    turned = rotate(x, *rotation(RopeConfig(rotary_dim=6), jnp.arange(5)))
    np.testing.assert_array_equal(turned[..., 6:], x[..., 6:])
    assert np.all(turned[1:, :, :6] != x[1:, :, :6])


def test_the_attention_factor_scales_cos_and_sin():
    rope = RopeConfig(kind="yarn", rotary_dim=8, factor=2.0, original_length=64, attention_factor=1.5)
    cos, sin = rotation(rope, jnp.arange(100))
    np.testing.assert_allclose(cos**2 + sin**2, 2.25, rtol=1e-5)


def test_angles_are_float32_and_the_result_keeps_its_dtype():
    cos, sin = rotation(RopeConfig(rotary_dim=8), jnp.array([[100_000]], jnp.int32))
    assert cos.shape == sin.shape == (1, 1, 4)
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos[0, 0, 0], np.cos(100_000), atol=1e-6)
    assert rotate(jnp.ones((1, 1, 2, 8), jnp.bfloat16), cos, sin).dtype == jnp.bfloat16
