"""Addressed noise: addresses, range, distribution.

Seeds are fixed, so the statistical tests give the same result in each run; their thresholds would reject a correct
generator once in a million seeds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling.keys import gumbel_noise, seed_words, uniform_noise

KS_MILLIONTH = 2.7  # sqrt(n) * D; 2 * exp(-2 * 2.7**2) < 1e-6

gumbel = jax.jit(gumbel_noise, static_argnames=("vocab_size", "stream"))
uniform = jax.jit(uniform_noise, static_argnames="stream")


def words(*seeds):
    return jnp.asarray(np.stack([seed_words(seed) for seed in seeds]))


@functools.cache
def many():
    """64 seeds at 4 positions, 256 tokens: float[256, 256]."""
    seeds = words(*range(1000, 1064))
    return np.concatenate([gumbel(seeds, jnp.full(64, p, jnp.int32), 256) for p in range(4)])


def ks(samples, cdf):
    """The Kolmogorov-Smirnov statistic, times sqrt(n)."""
    samples = np.sort(samples, axis=None)
    expected, n = cdf(samples), samples.size
    return np.sqrt(n) * max(np.max(np.arange(1, n + 1) / n - expected), np.max(expected - np.arange(n) / n))


def test_the_key_is_that_of_jax_random():
    seed, position = 0x0123456789ABCDEF, 41
    key = jax.random.wrap_key_data(words(seed)[0], impl="threefry2x32")
    bits = jax.random.bits(jax.random.fold_in(key, position), (5,), jnp.uint32)
    v = ((np.asarray(bits) >> 1).astype(np.float64) + 0.5) / 2**31
    noise = gumbel(words(seed), jnp.array([position], jnp.int32), 5)
    np.testing.assert_allclose(noise[0], -np.log(-np.log1p(-v)), rtol=2e-5, atol=1e-6)
    assert np.array_equal(seed_words(7), jax.random.key_data(jax.random.key(7, impl="threefry2x32")))


KNOWN_GUMBEL = [[-0.19287288, 1.3180251, -0.53239423, 1.6741673], [2.0277182, -0.7272281, 1.5032607, 0.71029204]]
KNOWN_UNIFORM = np.float32([0.08441561460494995, 0.36932551860809326])


def test_known_values_never_change():
    # A seed promises the same tokens tomorrow: these are what this code gave when written (JAX 0.10.2).
    noise = gumbel(words(1, 2**63), jnp.array([0, 2**31 - 1], jnp.int32), 4)
    np.testing.assert_allclose(noise, KNOWN_GUMBEL, rtol=1e-5)
    np.testing.assert_array_equal(uniform(words(1, 2**63), jnp.array([0, 9], jnp.int32), stream=0), KNOWN_UNIFORM)


def test_a_row_depends_on_its_seed_and_position_alone():
    full = gumbel(words(1, 2, 3, 1), jnp.array([5, 6, 7, 8], jnp.int32), 37)
    for row, (seed, position) in enumerate([(1, 5), (2, 6), (3, 7), (1, 8)]):
        alone = gumbel(words(seed), jnp.array([position], jnp.int32), 37)
        assert np.array_equal(full[row], alone[0])
    assert len({full[i].tobytes() for i in range(4)}) == 4


def test_a_tokens_noise_does_not_depend_on_the_size_of_the_vocabulary():
    small = gumbel(words(9), jnp.array([3], jnp.int32), 37)
    large = gumbel(words(9), jnp.array([3], jnp.int32), 256)
    assert np.array_equal(small, large[:, :37])


@pytest.mark.parametrize("seeds", [(2**32, 0), (2**32 + 1, 1), (2**63, 2**31)])
def test_both_words_of_the_seed_count(seeds):
    noise = gumbel(words(*seeds), jnp.zeros(2, jnp.int32), 8)
    assert not np.any(noise[0] == noise[1])


def test_noise_is_finite_and_within_its_range():
    assert np.all(np.isfinite(many()))
    assert -2.9 < many().min() < -2.0
    assert 9.0 < many().max() < 22.3


def test_extreme_bits_stay_finite(monkeypatch):
    for value in (0, 1, 2**31, 2**32 - 1):
        monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype, v=value: jnp.full(shape, v, dtype))
        noise = gumbel_noise(words(0), jnp.zeros(1, jnp.int32), 4)
        assert np.all((noise > -2.9) & (noise < 22.3))
        draw = uniform_noise(words(0), jnp.zeros(1, jnp.int32), stream=0)
        assert 0 <= draw[0] < 1


def test_noise_is_standard_gumbel():
    assert ks(many(), lambda g: np.exp(-np.exp(-g))) < KS_MILLIONTH
    # Tokens, positions and seeds are uncorrelated: 65,536 values, standard error 1/256 each, 5 sigma.
    x = (many() - many().mean()) / many().std()
    for shifted in (np.roll(x, 1, axis=1), np.roll(x, 1, axis=0), np.roll(x, 64, axis=0)):
        assert abs(np.mean(x * shifted)) < 5 / 256


def test_streams_are_independent_and_uniform():
    seeds, positions = words(*range(64)), jnp.arange(64, dtype=jnp.int32)
    draws = [np.concatenate([uniform(seeds, positions + 64 * i, stream=s) for i in range(32)]) for s in (0, 1)]
    for draw in draws:
        assert np.all((draw >= 0) & (draw < 1))
        assert ks(draw, lambda u: u) < KS_MILLIONTH
    assert abs(np.corrcoef(*draws)[0, 1]) < 5 / np.sqrt(2048)
    plain, other = (gumbel(seeds, positions, 8, stream=s) for s in (None, 0))
    assert not np.any(np.asarray(plain) == np.asarray(other))


@pytest.mark.parametrize("stream", [-1, 2**31])
def test_a_stream_outside_its_range_raises(stream):
    with pytest.raises(ValueError, match=f"got {stream}"):
        uniform_noise(words(0), jnp.zeros(1, jnp.int32), stream=stream)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_outside_its_range_raises(seed):
    with pytest.raises(ValueError, match="seed must be in"):
        seed_words(seed)
